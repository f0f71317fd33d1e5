"""What is said to somebody whose training loop, arguments or network the K-FAC optimizer can't
use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus import Empirical, UnsupportedError
from curvlinops_plus.optim import KFACOptimizer, LevenbergMarquardt, NormConstraint, WeightDecay
from test.helpers import Refusal, refusals
from test.optim.kfac.training import EXACT, Loss, batch, flat, net, plain

CE = nn.CrossEntropyLoss()
LM = LevenbergMarquardt
X, Y = batch()


def made(loss: Any = CE, **options: Any) -> Callable[[], Any]:
    return lambda: KFACOptimizer(net(), loss, **options)


def of_kinds(**options: Any) -> Callable[[], Any]:
    """An optimizer with other options for weights and for biases, which takes a step."""

    def step() -> None:
        model = net()
        groups = [
            {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]},
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], **options},
        ]
        plain(KFACOptimizer(model, CE, params=groups, **EXACT), model, CE, *batch())

    return step


def assigned() -> None:
    model = net()
    optimizer = KFACOptimizer(model, CE)
    model.load_state_dict(net(3).state_dict(), assign=True)
    plain(optimizer, model, CE, X, Y)


def step_on(X: Tensor, y: Tensor) -> None:
    model = net()
    plain(KFACOptimizer(model, CE), model, CE, X, y)


REFUSED: list[Refusal] = [
    (made(lr=-1.0), ValueError, "lr=-1; expected a number at least 0"),
    (made(damping=-1.0), ValueError, "damping=-1"),
    (made(inverse="eigen"), ValueError, "inverse='eigen'; expected one of 'exact', 'factored'"),
    (made(inverse="factored", power=-0.5), ValueError, "only inverses can be damped"),
    (made(quadratic_model="ggn"), ValueError, "quadratic_model='ggn'"),
    (made(norm_constraint=-1.0), ValueError, "The norm constraint=-1"),
    (made(lr="adaptive", norm_constraint=1.0), ValueError, "can't both choose the length"),
    (made(reject=0.5), ValueError, "reject=0.5; expected a number at least 1"),
    (made(reject=2.0, damping=lambda step: 1.0), ValueError, "is a schedule here"),
    (made(decay=2.0), ValueError, "decay=2.0"),
    (made(power=1.0), ValueError, "power"),
    (made(power=-0.5), ValueError, "A norm constraint in the damped norm is for inverses"),
    (made(nn.CrossEntropyLoss(reduction="sum"), decay=1.0),
     ValueError, "would add up the curvature of all steps"),
    (made(params=[]), ValueError, "`params` is empty, or an iterator that was read"),
    (made(foreach=True), TypeError, "unexpected keyword argument 'foreach'"),
    (made(weight="w"), UnsupportedError, "can't see whether your gradients have weights"),
    (made(nn.CrossEntropyLoss), TypeError, "The loss is the class CrossEntropyLoss"),
    (lambda: KFACOptimizer(net().parameters(), CE),
     TypeError, "The model is a generator; expected"),
    (lambda: KFACOptimizer(net(), lr=0.1),
     TypeError, r"KFACOptimizer\(model, loss, ...\) needs the loss that is minimised, such as nn"),
    (lambda: KFACOptimizer(nn.Linear(3, 2, dtype=torch.cfloat), CE),
     ValueError, "only real floating-point"),
    (lambda: made()().add_param_group({"params": nn.Parameter(torch.zeros(2))}),
     ValueError, "recorded for parameters that come later; give all to the constructor"),
    (of_kinds(lr=0.2), ValueError, r"one block.*\(0\.1, .* and \(0\.2, .*in one group"),
    (of_kinds(weight_decay=WeightDecay(0.1, "coupled")),
     ValueError, "one block.*possible if it is decoupled, a"),
    (lambda: LM(0.0), ValueError, "initial=0"),
    (lambda: LM(1.0, interval=0), ValueError, "interval=0"),
    (lambda: LM(1.0, thresholds=(0.5, 0.5)),
     ValueError, "The second threshold=0.5; expected a number above 0.5"),
    (lambda: LM(1.0, min=1.0, max=0.1), ValueError, "max=0.1"),
    (lambda: LM(1e-5), ValueError, "initial=1e-05; expected a number at least 0.0001"),
    (lambda: NormConstraint(1.0, "all"), ValueError, "of='all'"),
    (lambda: WeightDecay(1.0, "l2"), ValueError, "kind='l2'"),
    (lambda: WeightDecay(-1.0), ValueError, "weight decay=-1"),
    # data
    (assigned,
     ValueError, r"other tensors in place of its parameters.*assign=True.*a new optimizer"),
    (lambda: step_on(X, torch.full_like(Y, -100)),
     ValueError, r"No term of CrossEntropyLoss counts.*skip such batches until one counts"),
]  # fmt: skip
test_refusals = refusals(REFUSED)


def test_decoupled_weight_decay_may_differ_within_a_block() -> None:
    of_kinds(weight_decay=0.1)()


# -------------------------------------------------------------------------- steps that saw no batch
def without_gradients(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(X)
    return loss(output.requires_grad_(), y)


def written_to(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    output = model(X)
    output += 1.0
    return loss(output, y)


def after_evaluating(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    loss(model.eval()(X), y)
    return F.cross_entropy(2 * model.train()(X), y)


UNHEARD: list[Callable[..., Tensor]] = [
    lambda model, loss, X, y: loss(model.eval()(X), y),
    without_gradients,
    lambda model, loss, X, y: loss(
        functional_call(model, {n: 2 * p for n, p in model.named_parameters()}, X), y
    ),
    lambda model, loss, X, y: nn.CrossEntropyLoss(reduction="sum")(model(X), y),
    lambda model, loss, X, y: loss(model(X)[:, :2], y % 2),
    lambda model, loss, X, y: loss(copy.deepcopy(model)(X), y),
    written_to,
    lambda model, loss, X, y: loss(F.one_hot(y, 3).double(), model(X)),
    after_evaluating,
]


@pytest.mark.parametrize("call", UNHEARD)
def test_steps_that_have_heard_no_batch(call: Callable[..., Tensor]) -> None:
    """The error shows both loops; and one can go on."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer, (X, y) = KFACOptimizer(model, loss, **EXACT), batch()
    call(model, loss, X, y).backward()
    with pytest.raises(
        RuntimeError, match=r"No batch was recorded(?s:.*)listen(?s:.*)strict=False"
    ):
        optimizer.step()
    model.train()
    plain(optimizer, model, loss, X, y)
    assert optimizer.last_step.examples == 12


def test_of_a_function_the_error_says_that_it_is_not_heard() -> None:
    model, (X, y) = net(), batch()
    function = nn.functional.cross_entropy
    optimizer = KFACOptimizer(model, function, vectors=Empirical())
    function(model(X), y).backward()
    with pytest.raises(RuntimeError, match=r"given cross_entropy, which is a function.*pass one"):
        optimizer.step()


def test_steps_without_a_batch() -> None:
    """They take the old statistics if they are not strict; without gradients they do nothing."""
    model, (X, y) = net(), batch()
    optimizer = KFACOptimizer(model, CE, strict=False, **EXACT)
    with pytest.raises(RuntimeError, match="No batch was recorded"):  # there are no old statistics
        optimizer.step()
    plain(optimizer, model, CE, X, y)
    before = flat(model)
    optimizer.step()
    assert optimizer.last_step.examples == 0
    assert not torch.equal(flat(model), before)
    before = flat(model)
    optimizer.zero_grad()
    CE(model(X), y)
    optimizer.step()
    assert torch.equal(flat(model), before)
    assert len(optimizer.last_step.left_alone) == 4


def test_a_step_that_was_refused_keeps_nothing_for_the_next_one() -> None:
    """Neither do its statistics merge with those of the next step."""
    ends = []
    for refused in (True, False):
        model = net()
        optimizer = KFACOptimizer(model, CE, **EXACT)
        CE(model(batch()[0]), batch()[1]).backward()
        if refused:
            model[0].bias.grad = None
            with pytest.raises(
                ValueError, match=r"one block of the curvature, only \['0.weight'\] have a gradient"
            ):
                optimizer.step()
        else:
            optimizer._hooks.forget()
        plain(optimizer, model, CE, *batch(seed=2))
        assert optimizer.last_step.examples == 12
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-13)
