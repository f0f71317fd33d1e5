"""Training loops of people who know nothing of curvature: what they do is heard right."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import lr_scheduler

from curvlinops_plus import CurvatureWarning, EmpiricalRisk, NumericsError, curvature
from curvlinops_plus.optim import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt
from test.nets import tanh_net
from test.optim.kfac.training import EXACT, TwoHeads, batch, flat, listening, net, plain

Step = Callable[[Any, nn.Module, nn.Module, Tensor, Tensor], Any]
CE = nn.CrossEntropyLoss()
LOOKS: dict[str, Any] = {
    "damping": LevenbergMarquardt(0.1, interval=1),
    "norm_constraint": None,
    **EXACT,
}
ADAPTIVE: dict[str, Any] = {"lr": "adaptive", "momentum": "adaptive"}


# ------------------------------------------------------------------- loops that take the same steps
def closing(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        return value

    with torch.no_grad():
        assert optimizer.step(closure).requires_grad


def accumulating(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    buffer = X[:6].clone(), y[:6].clone()
    for k in (0, 6):  # a loader fills the same memory anew
        for t, new in zip(buffer, (X[k : k + 6], y[k : k + 6]), strict=True):
            np.copyto(t.numpy(), new.numpy())
        (loss(model(buffer[0]), buffer[1]) / 2).backward()
    optimizer.step()


def evaluating(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    loss(model.eval()(X + 1), y)
    with torch.no_grad():
        loss(model.train()(X + 2), y)
    plain(optimizer, model, loss, X, y)


def logging(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    """The loss is computed before and after; then with other targets."""
    optimizer.zero_grad()
    output = model(X)
    loss(output, y).item()
    value = loss(output, y)
    value.backward(retain_graph=True)
    loss(output, y.flip(0)).item()
    optimizer.step()


def calling_for_another(
    optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor
) -> None:
    """Without its loss; and for gradients with respect to inputs, as for the generator of a GAN."""
    torch.autograd.grad(model(X).square().mean(), list(model.parameters()))
    Z = X.clone().requires_grad_()
    with optimizer.paused():
        torch.autograd.grad(loss(model(Z), y), Z)
    plain(optimizer, model, loss, X, y)


def with_other_tensors(
    optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor
) -> None:
    """An inner step of somebody else."""
    values = {name: 2 * p.detach().requires_grad_() for name, p in model.named_parameters()}
    loss(functional_call(model, values, (X,)), y).backward()
    plain(optimizer, model, loss, X, y)


def checkpointing(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss(torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False), y).backward()
    optimizer.step()


def two_calls(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    """Before their losses, as of a discriminator; what the generator's losses are applied to is
    another's.
    """
    optimizer.zero_grad()
    real, fake = model(X[:6]), model(X[6:])
    ((loss(real, y[:6]) + loss(fake, y[6:])) / 2).backward()
    optimizer.step()
    with optimizer.paused():
        loss(model(X + 1), y)


def copying(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    """Copies and pickles in the middle of a step are not heard."""
    optimizer.zero_grad()
    output = model(X)
    value = loss(output, y)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), output)
        loss(other(X + 1), y)
    value.backward()
    optimizer.step()


LOOPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        listening,
        closing,
        accumulating,
        evaluating,
        logging,
        calling_for_another,
        with_other_tensors,
        checkpointing,
        two_calls,
        copying,
    )
}
OPTIONS: list[dict[str, Any]] = [
    LOOKS,
    {**ADAPTIVE, **EXACT},
    {"statistics_every": 2, **EXACT},
    {"reject": 2.0, **EXACT},
]


@pytest.mark.parametrize(("number", "name"), [*enumerate(LOOPS)])
def test_loops(number: int, name: str) -> None:
    """The same steps as those of a plain loop, and the same batches."""
    found = []
    for step in (plain, LOOPS[name]):
        for options in (OPTIONS[number % 4], OPTIONS[(number + 1) % 4]):
            model, loss = net(), nn.CrossEntropyLoss()
            optimizer = KFACOptimizer(model, loss, **options)
            for seed in range(5):
                step(optimizer, model, loss, *batch(seed=seed))
                assert optimizer.last_step.examples in (0, 12, 24)
            found.append((flat(model), optimizer.last_step.rho, optimizer.last_step.loss))
    for one, other in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.filterwarnings("ignore:.*Dynamo")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_compiled(whole: bool) -> None:
    """The model in place, or the whole step: as without the compiler."""
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        model, loss, examples = net(), nn.CrossEntropyLoss(), []
        optimizer = KFACOptimizer(
            model, loss, statistics_every=2, damping=LevenbergMarquardt(0.1, interval=3)
        )
        if compiled and not whole:
            model.compile(backend="eager")
        step = torch.compile(plain, backend="eager") if compiled and whole else plain
        for k in range(4):
            step(optimizer, model, loss, *batch(seed=k))
            examples.append(optimizer.last_step.examples)
        assert examples == [12, 0, 12, 0]
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


# -------------------------------------------------------------------------------- what is in a step
def test_autocast_and_a_scaler() -> None:
    """Steps that the scaler skips: their batches belong to the next one."""
    (model, loss), values = (net().float(), nn.CrossEntropyLoss()), []
    optimizer, scaler = KFACOptimizer(model, loss, lr=1e-3, **LOOKS), torch.amp.GradScaler("cpu")
    for step in range(4):
        X, y = batch(seed=step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step < 3):
            value = loss(model(X.float()), y)
        values.append(value.item())
        scaler.scale(value).backward()
        if step in (1, 2):
            model[0].weight.grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (step in (1, 2))
    assert (optimizer.steps, optimizer.curvature.updates) == (2, 4)
    assert optimizer.last_step.loss == pytest.approx(sum(values[1:]) / 3, rel=1e-2)


@pytest.mark.parametrize("door", [plain, listening])
@pytest.mark.filterwarnings("ignore:.*batch norm in training mode")
def test_batch_norm_and_dropout(door: Step) -> None:
    """Re-evaluations have the same dropout, and leave running statistics and random numbers
    alone.
    """
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    model, loss = nn.Sequential(*layers).double(), nn.CrossEntropyLoss()
    params = [*model[0].parameters(), *model[4].parameters()]
    optimizer = KFACOptimizer(
        model, loss, params=params, damping=LevenbergMarquardt(0.1, interval=1), lr=1e-5
    )
    twin = copy.deepcopy(model)
    for step in range(3):
        X, y = batch(seed=step)
        torch.manual_seed(step)
        door(optimizer, model, loss, X, y)
        after = torch.get_rng_state()
        torch.manual_seed(step)
        with torch.no_grad():
            value = loss(twin(X), y)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(model[1].running_mean, twin[1].running_mean)
        assert optimizer.last_step.loss == pytest.approx(float(value), rel=1e-9)
        assert optimizer.last_step.rho == pytest.approx(
            1.0, rel=1e-2
        )  # of the same random function
        twin.load_state_dict(model.state_dict())


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, X: Tensor, factor: Tensor | None = None) -> dict[str, Tensor]:
        out = self.linear(X)
        return {"logits": out if factor is None else out * factor[:, None], "value": out[:, 0]}


def test_keywords_and_several_losses() -> None:
    """Called in any order, also once more for a log."""
    (X, y), losses, ends = batch(), {"logits": nn.CrossEntropyLoss(), "value": nn.MSELoss()}, []
    factor, target = torch.rand(12).double(), torch.rand(12).double()
    for listens in (False, True):
        model = Keywords().double()
        optimizer = KFACOptimizer(model, losses, **LOOKS)
        for _ in range(3):
            optimizer.zero_grad()
            told = {"X": X, "factor": factor, "labels": {"logits": y, "value": target}}
            with optimizer.listen(told) if listens else nullcontext():
                out = model(X, factor=factor)
            if not listens:
                losses["value"](out["value"], target).item()
            terms = (
                losses["value"](input=out["value"], target=target),
                losses["logits"](out["logits"], y),
            )
            sum(terms).backward()
            optimizer.step()
            assert optimizer.last_step.examples == 12
        ends.append((flat(model), optimizer.last_step.rho))
        optimizer.close()
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------ what the loss is multiplied with beforehand


@pytest.mark.parametrize("factor", [0.3, 3.0, -0.75, 1 / 3, 65536.0, 0.5, -1.0, 1 / 7])
def test_a_factor_in_front_of_the_losses(factor: float) -> None:
    """It is said once, unless it is that of a part of a sum, or of a gradient scaler, or a sign."""
    model, losses, (X, y) = TwoHeads().double(), [(CE, 0.3), (nn.MSELoss(), 5.0)], batch()
    optimizer = KFACOptimizer(model, losses, **EXACT)
    said = abs(factor) in (0.3, 3.0, 0.75)
    words = f"is multiplied by {abs(factor):g} before its backward"
    for step in range(2):
        for part, share in (
            ((slice(12), 1.0),) if said else ((slice(8), 2 / 3), (slice(8, 12), 1 / 3))
        ):
            one, two = model(X[part])
            (
                factor * share * (0.3 * CE(one, y[part]) + 5.0 * losses[1][0](two, X[part, :2]))
            ).backward()
        with pytest.warns(CurvatureWarning, match=words) if said and not step else nullcontext():
            optimizer.step()


# ------------------------------------------------------------------------------- what is not finite
@pytest.mark.parametrize("reject", [None, 2.0])
@pytest.mark.parametrize("where", ["input", "target", "gradient"])
def test_a_batch_with_nan(reject: float | None, where: str) -> None:
    """It changes nothing, and the next step is as usual."""
    torch.manual_seed(0)
    model, loss = tanh_net(4, 5, 2).double(), nn.MSELoss()
    X, y, nan = batch()[0], torch.rand(12, 2).double(), float("nan")
    optimizer = KFACOptimizer(model, loss, reject=reject)
    plain(optimizer, model, loss, X, y)
    before, velocity = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    loss(model(X * nan if where == "input" else X), y * nan if where == "target" else y).backward()
    if where == "gradient":
        model[2].weight.grad[0, 0] = nan
    if reject is None:
        with pytest.raises(
            NumericsError, match=r"The gradient of \d\.weight is not finite; parameters have not"
        ):
            optimizer.step()
        assert optimizer.steps == 1
    else:
        optimizer.step()
        assert optimizer.last_step.rejected
        assert optimizer.param_groups[0]["damping"] == 2e-3
    assert torch.equal(flat(model), before)
    for number, entries in optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(*map(torch.as_tensor, (t, velocity[number][name])))
            for name, t in entries.items()
        )
    plain(optimizer, model, loss, X, y)
    assert not optimizer.last_step.rejected
    assert optimizer.last_step.examples == 12


def test_a_step_to_nan_is_undone() -> None:
    model, before = net(), flat(net())
    optimizer = KFACOptimizer(model, CE, lr=1e308, norm_constraint=None, reject=2.0)
    plain(optimizer, model, CE, *batch())
    assert optimizer.last_step.new_loss != optimizer.last_step.new_loss
    assert optimizer.last_step.rejected
    assert torch.equal(flat(model), before)


# --------------------------------------------------------------------------------- hooks and memory
def test_no_pass_is_made_beside_the_users() -> None:
    """But for the looks at batches 1, 4, 16, ..."""
    model, calls = net(), list[int]()
    optimizer = KFACOptimizer(model, CE)
    model[0].register_forward_hook(lambda *args: calls.append(optimizer.steps))
    for _ in range(7):
        plain(optimizer, model, CE, *batch())
    assert [calls.count(step) for step in (1, 2, 4, 5, 6)] == [1] * 5


def hooks(*modules: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(
        len(getattr(m, kind)) for module in modules for m in module.modules() for kind in kinds
    )


@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_hooks_are_gone_with_the_optimizer(kind: Any) -> None:
    """At once, in the middle of a step, and without the garbage collector, while somebody may read
    the hooks.
    """
    model, loss = net(), nn.CrossEntropyLoss()
    with kind(model, loss) as optimizer:
        plain(optimizer, model, loss, *batch())
        assert hooks(model, loss) == 3
    assert hooks(model, loss) == 0
    gc.collect()
    gc.disable()
    try:
        optimizer = kind(model, loss)
        plain(optimizer, model, loss, *batch())
        model(batch()[0])
        del optimizer
        assert hooks(model, loss) == 0
        model(batch()[0])
    finally:
        gc.enable()


def test_two_optimizers_on_one_model() -> None:
    (model, both), loss = (net(), net()), nn.CrossEntropyLoss()
    options = {"norm_constraint": None, **EXACT}
    one = KFACOptimizer(model, loss, params=list(model[0].parameters()), **options)
    two = KFACOptimizer(model, loss, params=list(model[2].parameters()), **options)
    alone = KFACOptimizer(both, loss, **options)
    for step in range(4):
        X, y = batch(seed=step)
        model.zero_grad()
        loss(model(X), y).backward()
        one.step()
        two.step()
        plain(alone, both, loss, X, y)
    torch.testing.assert_close(flat(model), flat(both), rtol=1e-9, atol=1e-10)


def tensors() -> int:
    gc.collect()
    return sum(isinstance(o, Tensor) for o in gc.get_objects())


@pytest.mark.usefixtures("new_objects_only")
@pytest.mark.parametrize(
    "options", [{}, {**ADAPTIVE, "damping": LevenbergMarquardt(1.0)}, {"reject": 2.0}], ids=str
)
@pytest.mark.parametrize("steps", [24, pytest.param(1008, marks=pytest.mark.slow)])
def test_tensors_do_not_grow(options: dict[str, Any], steps: int) -> None:
    model, loss, counts = net(), nn.CrossEntropyLoss(), []
    optimizer = KFACOptimizer(model, loss, inverse_every=6, **options)
    for step in range(steps + 12):
        optimizer.zero_grad()
        loss(model(batch(seed=step)[0]), batch(seed=step)[1]).backward()
        optimizer.step()
        if step in (11, steps - 1, steps + 11):
            counts.append(tensors())
    assert max(counts[1:]) <= counts[0]


# ------------------------------------------------------------- what belongs to PyTorch's optimizers


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    ],
)
def test_schedulers(make: Callable[[Any], Any]) -> None:
    """Those of PyTorch set learning rate and momentum as they set SGD's, and they are what the next
    step takes.

    A tensor stays the option that it is: what is written to it has an effect.
    """
    model, lr = net(), torch.tensor(0.1, dtype=torch.float64)
    optimizer, sgd = (
        KFACOptimizer(model, CE, lr),
        torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9),
    )  # type: ignore[arg-type]
    schedulers = [make(o) for o in (optimizer, sgd)]
    for step in range(5):
        plain(optimizer, model, CE, *batch(seed=step))
        sgd.step()
        for option in ("lr", "momentum"):
            assert getattr(optimizer.last_step, option) == [
                pytest.approx(sgd.param_groups[0][option], rel=1e-14)
            ]
        assert optimizer.param_groups[0]["lr"] is lr
        for scheduler in schedulers:
            scheduler.step()


def test_warming_up_is_a_plain_mean() -> None:
    model, batches = net(), [batch(seed=k) for k in range(4)]
    before, optimizer = flat(model), KFACOptimizer(model, CE, decay=0.5, **EXACT)
    optimizer.warmup(iter(batches), steps=3)
    assert torch.equal(flat(model), before)
    K = curvature(EmpiricalRisk(model, CE, batches[:3]), **EXACT)
    torch.testing.assert_close(optimizer.curvature.operator.to_dense(), K.to_dense())
    plain(optimizer, model, CE, *batches[3])
    assert optimizer.last_step.examples == 12
    with pytest.raises(
        ValueError, match=r"warmup\(\.\.\.\) averages means before the first step; 1 steps"
    ):
        optimizer.warmup(batches)


def test_layers_that_are_trained_later() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = KFACOptimizer(model, CE, params=[("w", p) for p in model.parameters()])
    before = model[0].weight.clone()
    plain(optimizer, model, CE, *batch())
    assert optimizer.last_step.left_alone == ["0.weight", "0.bias"]
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    plain(optimizer, model, CE, *batch(seed=2))
    assert optimizer.last_step.left_alone == []
    assert not torch.equal(model[0].weight, before)
