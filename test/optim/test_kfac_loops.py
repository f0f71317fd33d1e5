"""Training loops of people who know nothing of curvature: what they do is either heard right, or refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from curvlinops_plus import (
    GGN,
    CurvatureWarning,
    EmpiricalRisk,
    FullBlock,
    NumericsError,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.optim.kfac import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt
from test.optim.test_kfac_doors import plain
from test.optim.test_kfac_optimizer import EXACT, batch, flat, net

LOOKS: dict[str, Any] = {"damping": LevenbergMarquardt(0.1, interval=1), "norm_constraint": None, **EXACT}


# --------------------------------------------------------------------------------------- losses that are multiplied
@pytest.mark.parametrize("factor", [10.0, 0.01, -3.0])
@pytest.mark.parametrize("preconditioner", [False, True])
def test_a_factor_in_front_of_the_loss(factor: float, preconditioner: bool) -> None:
    """The curvature is multiplied, too: against dense algebra with the curvature of `factor * loss`."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    options: dict[str, Any] = {"approximation": FullBlock, "norm_constraint": None, **EXACT}
    if preconditioner:
        optimizer: Any = KFACPreconditioner(model, loss, 0.1, **options)
    else:
        optimizer = KFACOptimizer(model, loss, 1.0, 0.0, 0.1, **options)
    before = flat(model)
    (factor * loss(model(X), y)).backward()
    g = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    K = abs(factor) * optimizer.curvature.estimator.operator.to_dense()
    expected = torch.linalg.solve(K + 0.1 * torch.eye(43).double(), g)
    got = torch.cat([p.grad.flatten() for p in model.parameters()]) if preconditioner else before - flat(model)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


ADAPTIVE: dict[str, Any] = {"lr": "adaptive", "momentum": "adaptive"}


@pytest.mark.parametrize("options", [{}, ADAPTIVE, {"norm_constraint": 1e-4}, {"inverse": "factored"}], ids=str)
def test_the_ratio_of_a_loss_with_a_factor(options: dict[str, Any]) -> None:
    """Ten times the loss with ten times the damping: the same steps, and the same ratios."""
    found = []
    for factor in (1.0, 10.0):
        model, loss = net(), nn.CrossEntropyLoss()
        policy = LevenbergMarquardt(0.1 * factor, interval=1)
        given = {**LOOKS, **options, "damping": policy}
        if options.get("norm_constraint"):
            given["norm_constraint"] = options["norm_constraint"] * factor
        optimizer = KFACOptimizer(model, loss, **given)
        for step in range(4):
            X, y = batch(seed=step)
            optimizer.zero_grad()
            value = factor * loss(model(X), y)
            value.backward()
            optimizer.step()
            assert optimizer.last_step.loss == pytest.approx(value.item())
        found.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)


def test_a_sum_that_is_made_a_mean_by_hand() -> None:
    """Its curvature is that of the mean."""
    X, y = batch()
    found = []
    for loss, factor in ((nn.CrossEntropyLoss(), 1.0), (nn.CrossEntropyLoss(reduction="sum"), 1 / len(X))):
        model = net()
        optimizer = KFACOptimizer(model, loss, **EXACT)
        for step in range(4):
            X, y = batch(seed=step)
            optimizer.zero_grad()
            (factor * loss(model(X), y)).backward()
            optimizer.step()
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulation_with_any_weights(reduction: str) -> None:
    """Micro-batches of different sizes; the ratio is of the objective that was differentiated."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(reduction=reduction), batch(12)
    optimizer = KFACOptimizer(model, loss, lr=1e-4, **LOOKS)
    value = 0.0
    for part in (slice(0, 3), slice(3, 12)):
        micro = loss(model(X[part]), y[part]) / 2
        micro.backward()
        value += micro.item()
    optimizer.step()
    assert optimizer.last_step.examples == 12
    assert optimizer.last_step.loss == pytest.approx(value)
    assert optimizer.last_step.rho == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_exact_quadratic_model_of_unequal_micro_batches(reduction: str) -> None:
    """`Σ c_i GGN_i`, as the loss is `Σ c_i loss_i`, against dense matrices."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(reduction=reduction), batch(12)
    optimizer = KFACOptimizer(model, loss, lr="adaptive", momentum=0.0, **{**LOOKS, "damping": 0.01})
    parts, C = ((slice(0, 2), 0.3), (slice(2, 12), 1.5), (slice(2, 12), 0.2)), torch.zeros(43, 43).double()
    for part, c in parts:
        (c * loss(model(X[part]), y[part])).backward()
        C += c * GGN(EmpiricalRisk(model, loss, [(X[part], y[part])])).to_dense()
    g, before = torch.cat([p.grad.flatten() for p in model.parameters()]), flat(model)
    optimizer.step()
    d = flat(model) - before
    d /= d.norm()
    coefficient = -(g @ d) / (d @ C @ d + 0.01)
    torch.testing.assert_close(flat(model) - before, coefficient * d, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("numpy", [False, True])
def test_micro_batches_in_one_buffer(numpy: bool) -> None:
    """A loader fills the same memory anew for each batch, while the step waits for all of them."""
    found = []
    for one_buffer in (False, True):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, loss, "adaptive", "adaptive", 0.1)
        buffer = [t.clone() for t in batch()]
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                X, y = batch(seed=2 * step + micro)
                if one_buffer:
                    for t, new in zip(buffer, (X, y), strict=True):
                        np.copyto(t.numpy(), new.numpy()) if numpy else t.copy_(new)
                    X, y = buffer
                (loss(model(X), y) / 2).backward()
            optimizer.step()
        found.append(flat(model))
    assert torch.equal(*found)


def test_mixup_is_one_batch() -> None:
    """`a * loss(out, y) + b * loss(out, z)`: the same steps as with mixed targets."""
    found = []
    for mixed in (False, True):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, loss, **LOOKS)
        for step in range(4):
            (X, y), (_, z) = batch(seed=step), batch(seed=step + 10)
            optimizer.zero_grad()
            output = model(X)
            if mixed:
                loss(output, 0.3 * F.one_hot(y, 3).double() + 0.7 * F.one_hot(z, 3).double()).backward()
            else:
                (0.3 * loss(output, y) + 0.7 * loss(output, z)).backward()
            optimizer.step()
            assert optimizer.last_step.examples == 12
        found.append((flat(model), optimizer.last_step.rho, optimizer.last_step.loss))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("loss", "vectors"),
    [(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()), None), (nn.CrossEntropyLoss(), "empirical")],
)
def test_mixup_whose_curvature_depends_on_the_targets(loss: nn.Module, vectors: str | None) -> None:
    model, (X, y) = net(), batch()
    KFACOptimizer(model, loss, vectors=vectors)
    optimizer = KFACOptimizer(model, loss, vectors=vectors)
    output = model(X)
    loss(output, y)
    with pytest.raises(UnsupportedError, match=r"called twice on one output.*depends on them"):
        loss(output, y.flip(0))
    optimizer.close()


def test_several_losses_with_other_weights_than_theirs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, X: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(X), self.two(X)

    model, (X, y) = Two().double(), batch()
    losses = ((nn.CrossEntropyLoss(), 1.0), (nn.MSELoss(), 0.5))
    optimizer = KFACOptimizer(model, losses)

    def backward(weight: float) -> None:
        optimizer.zero_grad()
        one, two = model(X)
        (losses[0][0](one, y) + weight * losses[1][0](two, X[:, :2])).backward()

    backward(0.5)
    optimizer.step()
    backward(2.0)
    with pytest.raises(ValueError, match=r"loss 1 \(MSELoss\) was multiplied by 2 before.*weights are 0\.5 and 1"):
        optimizer.step()


def test_a_factor_that_a_scaler_hides() -> None:
    torch.manual_seed(0)
    model, loss, (X, y) = net().float(), nn.CrossEntropyLoss(), batch()
    twin = copy.deepcopy(model)
    optimizer, other = KFACOptimizer(model, loss), KFACOptimizer(twin, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # small enough to be a factor of the user's
    scaler.scale(loss(model(X.float()), y)).backward()
    scaler.step(optimizer)
    loss(twin(X.float()), y).backward()
    other.step()
    torch.testing.assert_close(flat(model), flat(twin))
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(10 * loss(model(X.float()), y)).backward()
    with pytest.warns(CurvatureWarning, match="by a gradient scaler, and by what else, can't be told"):
        scaler.step(optimizer)


@pytest.mark.parametrize("options", [{}, {"reject": 2.0}], ids=str)
def test_a_gradient_that_is_not_that_of_the_losses(options: dict[str, Any]) -> None:
    """Terms that nobody sees are said where the losses alone are looked at."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **{**LOOKS, **options})
    output = model(X)
    (0.7 * loss(output, y) - 0.3 * F.log_softmax(output, 1).mean()).backward()  # label smoothing by hand
    with pytest.warns(CurvatureWarning, match=r"The gradient in \.grad differs from that of the losses"):
        optimizer.step()
    optimizer = KFACOptimizer(model, loss, **EXACT)  # nothing is looked at
    loss(model(X), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


# --------------------------------------------------------------------------------------- outputs and several calls
def test_an_output_that_was_written_to() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **LOOKS)
    output = model(X)
    output.mul_(2.0)
    loss(output, y).backward()
    with pytest.raises(RuntimeError, match="on an output that was written to in place after"):
        optimizer.step()


def test_calls_before_their_losses() -> None:
    """A discriminator sees real and fake examples, then its loss both: one update of all of them."""
    found = []
    for at_once in (True, False):
        model, loss = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), nn.BCEWithLogitsLoss()
        model.load_state_dict({k: torch.full_like(v, 0.1) for k, v in model.state_dict().items()})
        optimizer = KFACOptimizer(model, loss, **LOOKS)
        for step in range(3):
            (X, _), (Z, _) = batch(6, seed=step), batch(6, seed=step + 10)
            one, zero = torch.ones(6, 1).double(), torch.zeros(6, 1).double()
            optimizer.zero_grad()
            if at_once:
                real, fake = model(X), model(Z)
                ((loss(real, one) + loss(fake, zero)) / 2).backward()
            else:
                loss(model(torch.cat([X, Z])), torch.cat([one, zero])).backward()
            optimizer.step()
            assert optimizer.last_step.examples == 12
        found.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-9)


def test_an_output_that_waited_too_long() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    KFACOptimizer(model, loss).close()
    optimizer = KFACOptimizer(model, loss)
    first = model(X)
    later = [model(X) for _ in range(4)]
    with pytest.raises(RuntimeError, match=r"called 4 more times before the loss was called on this output"):
        loss(first, y)
    loss(later[0], y).backward()
    optimizer.step()


def test_targets_that_depend_on_the_parameters() -> None:
    model, loss, (X, _) = net(), nn.MSELoss(), batch()
    other = copy.deepcopy(model)
    optimizer = KFACOptimizer(model, loss)
    one, two = model(X), model(X + 0.1)
    with pytest.raises(UnsupportedError, match=r"target of the loss depends on the parameters.*Detach it"):
        loss(one, two)
    loss(model(X), two.detach()).backward()
    optimizer.step()
    loss(model(X), other(X)).backward()  # somebody else's parameters
    optimizer.step()
    assert optimizer.last_step.examples == 12


def test_a_generator_that_trains_through_the_discriminator() -> None:
    """Its batches have no part in the discriminator's ratio."""
    torch.manual_seed(0)
    G = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    D, loss = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), nn.BCEWithLogitsLoss()
    of_D = KFACOptimizer(D, loss, lr=1e-4, **LOOKS)
    of_G = torch.optim.Adam(G.parameters())
    one, zero = torch.ones(5, 1).double(), torch.zeros(5, 1).double()
    for step in range(4):
        real, z = batch(5, seed=step)[0], torch.randn(5, 2).double()
        D.zero_grad() if step % 2 else of_D.zero_grad()
        with torch.no_grad():
            expected = float(loss(D(real), one) + loss(D(G(z)), zero))
        loss(D(real), one).backward()
        loss(D(G(z).detach()), zero).backward()
        of_D.step()
        assert of_D.last_step.loss == pytest.approx(expected)
        assert of_D.last_step.rho == pytest.approx(1.0, rel=2e-2)
        of_G.zero_grad()
        loss(D(G(z)), one).backward()
        of_G.step()


def test_gradients_with_respect_to_inputs_are_no_part_of_the_step() -> None:
    """Adversarial examples, and a penalty on gradients."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, lr=1e-4, **LOOKS)
    for _ in range(2):
        optimizer.zero_grad()
        X.requires_grad_()
        (g,) = torch.autograd.grad(loss(model(X), y), X)
        moved = (X + 0.1 * g.sign()).detach()
        value = loss(model(moved), y)
        value.backward()
        optimizer.step()
        assert optimizer.last_step.loss == pytest.approx(value.item())
        assert optimizer.last_step.rho == pytest.approx(1.0, rel=1e-2)


def test_a_second_look_at_moved_parameters() -> None:
    """Sharpness-aware steps: the gradient of the second pass alone."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    for _ in range(3):
        loss(model(X), y).backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        model.zero_grad()
        loss(model(X), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        assert optimizer.curvature.factor == 1.0
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------- what is not finite
def test_a_loss_that_is_nan_and_skipped() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    twin = net()
    optimizer, other = KFACOptimizer(model, loss, **EXACT), KFACOptimizer(twin, loss, **EXACT)
    for bad in (False, True, False, False):
        optimizer.zero_grad()
        if bad:
            value = loss(model(X * float("nan")), y)
            assert not bool(value.isfinite())
            continue
        if optimizer.curvature.steps == 1:
            with pytest.warns(CurvatureWarning, match="A batch was left out of the statistics"):
                output = model(X)
        else:
            output = model(X)
        loss(output, y).backward()
        optimizer.step()
        plain(other, twin, loss, X, y)
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("vectors", [None, "empirical", "ggn_exact"])
@pytest.mark.parametrize("reject", [None, 2.0])
@pytest.mark.parametrize("where", ["input", "target"])
def test_a_batch_with_nan(vectors: str | None, reject: float | None, where: str) -> None:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), nn.MSELoss()
    X, y = batch()[0], torch.rand(12, 2).double()
    optimizer = KFACOptimizer(model, loss, vectors=vectors, reject=reject)
    plain(optimizer, model, loss, X, y)
    before, velocity = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
    bad = (X * float("nan"), y) if where == "input" else (X, y * float("nan"))
    if reject is None:
        with pytest.raises(NumericsError, match=r"The gradient of 0\.weight is not finite"):
            plain(optimizer, model, loss, *bad)
        assert optimizer.curvature.steps == 1
    else:
        plain(optimizer, model, loss, *bad)
        assert optimizer.last_step.rejected
        assert optimizer.param_groups[0]["damping"] == 2e-3
    assert torch.equal(flat(model), before)
    for number, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(*map(torch.as_tensor, (t, velocity[number][name]))) for name, t in entries.items())
    plain(optimizer, model, loss, X, y)
    assert not optimizer.last_step.rejected
    assert optimizer.last_step.examples == 12


def test_what_a_scaler_has_skipped_is_no_part_of_the_next_step() -> None:
    torch.manual_seed(0)
    model, loss = net().float(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=1e-3, **LOOKS)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        X, y = batch(seed=step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        value = loss(model(X.float()), y)
        scaler.scale(value).backward()
        if step in (1, 2):
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.curvature.steps == 2
    assert optimizer.curvature.estimator.updates == 4
    assert optimizer.last_step.loss == pytest.approx(value.item(), rel=1e-5)
    assert optimizer.last_step.rho == pytest.approx(1.0, rel=2e-2)


# ------------------------------------------------------------------------------------------ precision and compilers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, loss = net().float(), nn.CrossEntropyLoss()
    twin = copy.deepcopy(model)
    optimizer, other = KFACOptimizer(model, loss, **EXACT), KFACOptimizer(twin, loss, **EXACT)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for step in range(5):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            value = loss(model(X.float()), y)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        plain(other, twin, loss, X.float(), y)
    torch.testing.assert_close(flat(model), flat(twin), rtol=0.1, atol=0.02)


def _eager(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    return lambda X, y: plain(optimizer, model, loss, X, y)


def _both(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    value = torch.compile(lambda X, y: loss(model(X), y), backend="eager")

    def step(X: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        value(X, y).backward()
        optimizer.step()

    return step


def _whole(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    return torch.compile(lambda X, y: plain(optimizer, model, loss, X, y), backend="eager")


def _in_place(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    model.compile(backend="eager")
    return lambda X, y: plain(optimizer, model, loss, X, y)


def _afterwards(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    compiled = torch.compile(model, backend="eager")
    return lambda X, y: plain(optimizer, compiled, loss, X, y)


def _loss(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    compiled = torch.compile(loss, backend="eager")
    return lambda X, y: plain(optimizer, model, compiled, X, y)


def _step(model: nn.Module, loss: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    step = torch.compile(optimizer.step, backend="eager")

    def whole(X: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(X), y).backward()
        step()

    return whole


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.filterwarnings("ignore:.*Dynamo")
@pytest.mark.parametrize("compiled", [_both, _whole, _in_place, _afterwards, _loss, _step])
def test_what_is_compiled(compiled: Callable[..., Any]) -> None:
    """Loss and model, the whole step, the model, the loss, the optimizer's step: as without the compiler."""
    torch.compiler.reset()
    found = []
    for make in (_eager, compiled):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, loss, statistics_every=2, damping=LevenbergMarquardt(0.1, interval=3))
        step, examples = make(model, loss, optimizer), []
        for k in range(5):
            step(*batch(seed=k))
            examples.append(optimizer.last_step.examples)
        found.append((flat(model), examples))
    assert found[0][1] == found[1][1] == [12, 0, 12, 0, 12]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*Dynamo")
def test_a_model_that_was_compiled_and_called_before() -> None:
    torch.compiler.reset()
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    optimizer = KFACOptimizer(model, loss)
    with pytest.raises(RuntimeError, match=r"compiled and called before \(give the optimizer what torch\.compile"):
        plain(optimizer, compiled, loss, X, y)
    optimizer.close()
    plain(KFACOptimizer(compiled, loss), compiled, loss, X, y)


# -------------------------------------------------------------------------------------- copies, threads, other tensors
@pytest.mark.parametrize("vectors", [None, "empirical"])
def test_copies_in_the_middle_of_a_step(vectors: str | None) -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    twin = copy.deepcopy(model)
    optimizer, other = (KFACOptimizer(m, loss, vectors=vectors) for m in (model, twin))
    for _ in range(2):
        optimizer.zero_grad()
        output = model(X)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        value = loss(output, y)
        copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for one in copies:
            assert torch.equal(one(X), output)
        value.backward()
        optimizer.step()
        plain(other, twin, loss, X, y)
    assert torch.equal(flat(model), flat(twin))


def test_an_average_of_the_parameters() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, **LOOKS)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        plain(optimizer, model, loss, *batch(seed=step))
        average.update_parameters(model)
        expected = [
            p.detach().clone() if step == 0 else (e + p.detach()) / 2
            for e, p in zip(expected, model.parameters(), strict=True)
        ]
        loss(average(batch(seed=step)[0]), batch(seed=step)[1])  # a copy: nobody hears it
        assert optimizer.last_step.examples == 12
    torch.testing.assert_close(flat(average.module), torch.cat([e.flatten() for e in expected]))


def test_other_tensors_in_place_of_the_parameters() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss)
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss(functional_call(model, values, (X,)), y).backward()  # an inner step of somebody else
    assert optimizer.curvature.estimator.updates == 0
    plain(optimizer, model, loss, X, y)
    assert optimizer.last_step.examples == 12
    loss(functional_call(model, dict(model.named_parameters()), (X,)), y).backward()
    optimizer.step()
    assert optimizer.last_step.examples == 12
    model.load_state_dict(net(3).state_dict(), assign=True)
    loss(model(X), y).backward()
    with pytest.raises(ValueError, match=r"other tensors in place of its parameters.*assign=True.*a new optimizer"):
        optimizer.step()


def test_training_in_another_thread() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    twin = copy.deepcopy(model)
    optimizer, other = KFACOptimizer(model, loss, **LOOKS), KFACOptimizer(twin, loss, **LOOKS)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            for step in range(3):
                plain(optimizer, model, loss, *batch(seed=step))
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=train)
    worker.start()
    worker.join()
    assert not errors
    for step in range(3):
        plain(other, twin, loss, *batch(seed=step))
    assert torch.equal(flat(model), flat(twin))


def test_a_model_that_is_checkpointed_as_a_whole() -> None:
    """Autograd calls it once more in the backward pass."""
    model, loss = net(), nn.CrossEntropyLoss()
    twin = copy.deepcopy(model)
    optimizer, other = KFACOptimizer(model, loss, **EXACT), KFACOptimizer(twin, loss, **EXACT)
    for step in range(3):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        loss(torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False), y).backward()
        optimizer.step()
        assert optimizer.last_step.examples == 12
        plain(other, twin, loss, X, y)
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-9, atol=1e-10)


def test_gradients_that_the_user_retains_are_the_users() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    found, optimizer = [], None
    for _ in range(2):
        model.zero_grad()
        output = model(X)
        output.retain_grad()
        loss(output, y).backward()
        found.append(output.grad)
        optimizer = optimizer or KFACOptimizer(model, loss)
    assert torch.equal(*found)


@pytest.mark.parametrize("vectors", [None, "empirical"])
@pytest.mark.usefixtures("new_objects_only")
def test_without_steps_nothing_piles_up(vectors: str | None) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, reject=2.0, vectors=vectors)

    def tensors() -> int:
        gc.collect()
        return sum(type(o) is Tensor for o in gc.get_objects())

    few = 0
    for k in range(40):
        optimizer.zero_grad()
        loss(model(batch(seed=k)[0]), batch(seed=k)[1]).backward()
        few = tensors() if k == 10 else few
    assert tensors() <= few + 3


def test_batches_that_are_kept_are_bounded() -> None:
    """Gradients are accumulated without end."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch(2)
    optimizer = KFACOptimizer(model, loss, reject=2.0, statistics_every=2)
    plain(optimizer, model, loss, X, y)
    for _ in range(1024):
        loss(model(X), y)
    with pytest.raises(RuntimeError, match="1024 batches were seen since the last step, and kept"):
        loss(model(X), y)


def test_hooks_that_are_removed_while_the_model_runs() -> None:
    """An optimizer that is dropped may be collected at any time."""

    class Collecting(nn.Linear):
        def forward(self, X: Tensor) -> Tensor:
            gc.collect()
            return super().forward(X)

    model, loss, (X, y) = nn.Sequential(nn.Linear(4, 4), Collecting(4, 3)).double(), nn.CrossEntropyLoss(), batch()
    gc.disable()
    try:
        optimizer = KFACOptimizer(model, loss, vectors="empirical")
        loss(model(X), y)  # waits for its backward pass
        del optimizer
        model(X)
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------- loops of other frameworks
class Module(nn.Module):
    """As a LightningModule is written."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = net(), nn.CrossEntropyLoss()

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)

    def training_step(self, found: tuple[Tensor, Tensor]) -> Tensor:
        X, y = found
        return self.loss(self(X), y)


def lightning(accumulate: int) -> Tensor:
    """A closure per step, with gradients cleared inside of it, and micro-batches without a step."""
    module = Module()
    optimizer = KFACOptimizer(module, module.loss, **EXACT)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        parts = batch(12, seed=step)
        size = 12 // accumulate
        for k in range(accumulate):
            micro = parts[0][k * size : (k + 1) * size], parts[1][k * size : (k + 1) * size]

            def closure(k: int = k, micro: Any = micro) -> Tensor:
                value = module.training_step(micro) / accumulate
                if k == 0:
                    optimizer.zero_grad()
                value.backward()
                return value

            if k < accumulate - 1:
                closure()
            else:
                optimizer.step(closure)
        scheduler.step()
        assert optimizer.last_step.examples == 12
    return flat(module)


class Wrapped:
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.optimizer.load_state_dict(optimizer.state_dict())  # it does so to move the state
        self.accumulating = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def zero_grad(self) -> None:
        if not self.accumulating:
            self.optimizer.zero_grad()

    def step(self) -> None:
        if not self.accumulating:
            self.optimizer.step()


def accelerate(accumulate: int) -> Tensor:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = Wrapped(KFACOptimizer(model, loss, **EXACT))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    for step in range(4):
        X, y = batch(12, seed=step)
        for k, (part, target) in enumerate(zip(X.chunk(accumulate), y.chunk(accumulate), strict=True)):
            optimizer.accumulating = k < accumulate - 1
            (loss(model(part), target) / accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            if not optimizer.accumulating:
                scheduler.step()
            optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_loops_of_other_frameworks(accumulate: int) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        plain(optimizer, model, loss, *batch(12, seed=step))
        scheduler.step()
    for loop in (lightning, accelerate):
        torch.testing.assert_close(loop(accumulate), flat(model), rtol=1e-9, atol=1e-10)


class LanguageModel(nn.Module):
    """As Hugging Face's: the loss is computed inside of the model, which returns it beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(self.embed(input_ids)).tanh())
        if labels is None:
            return {"logits": logits}
        value = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": value, "logits": logits}


class WithAttributes(LanguageModel):
    """Outputs have names, by which it is known that the last axis of logits is that of the classes."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return SimpleNamespace(**super().forward(input_ids, labels))


def test_a_model_that_returns_its_loss() -> None:
    """The loss is none of the optimizer's: `listen` around the call says what it is."""
    model = WithAttributes()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), shift_labels=True)
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(15):
        tokens = torch.arange(8).add(torch.randint(7, (6, 1), generator=generator)) % 7
        with optimizer.listen({"input_ids": tokens, "labels": tokens}):
            out = model(input_ids=tokens, labels=tokens)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        assert optimizer.last_step.examples == 6
        values.append(out.loss.item())
    assert values[-1] < 0.7 * values[0]
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    with pytest.raises(RuntimeError, match="No batch was seen"):
        optimizer.step()


@pytest.mark.parametrize("listening", [False, True])
def test_what_a_scaler_has_skipped_through_both_doors(listening: bool) -> None:
    """Batches whose gradients were thrown away are not looked at again."""
    model, loss = net().float(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=1e-4, **LOOKS)
    for step in range(3):
        X, y = batch(seed=step)
        with optimizer.listen((X.float(), y)) if listening else nullcontext():
            output = model(X.float())
        value = loss(output, y)
        optimizer.zero_grad()  # between loss and backward pass
        value.backward()
        if step:
            optimizer.step()
            assert optimizer.last_step.loss == pytest.approx(value.item(), rel=1e-5)


# --------------------------------------------------------------------------------------------- losses that are logged
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, ADAPTIVE, {"vectors": "empirical"}], ids=str)
@pytest.mark.parametrize("others", [False, True])
def test_a_loss_that_is_computed_for_a_log(reduction: str, options: dict[str, Any], others: bool) -> None:
    """`loss(out, y).item()` before, between and after the one that is differentiated changes nothing."""
    if others and "vectors" in options:
        pytest.skip("refused: the statistics would be those of the first targets")
    found = []
    for logged in (False, True):
        model, loss = net(), nn.CrossEntropyLoss(reduction=reduction)
        optimizer = KFACOptimizer(model, loss, **{**LOOKS, **options})
        for step in range(3):
            X, y = batch(seed=step)
            optimizer.zero_grad()
            output = model(X)
            if logged:
                loss(output, y.flip(0) if others else y).item()
            value = loss(output, y)
            value.backward(retain_graph=True)
            if logged:
                loss(output, y).item()
            optimizer.step()
            assert optimizer.last_step.loss == pytest.approx(value.item())
        found.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(X), self.two(X)


def test_several_losses_that_are_computed_for_a_log() -> None:
    found = []
    for logged in (False, True):
        model = TwoHeads().double()
        losses = ((nn.CrossEntropyLoss(), 1.0), (nn.MSELoss(), 0.5))
        optimizer = KFACOptimizer(model, losses, **LOOKS)
        for step in range(3):
            X, y = batch(seed=step)
            optimizer.zero_grad()
            one, two = model(X)
            if logged:
                losses[0][0](one, y).item()
            terms = [losses[0][0](one, y), losses[1][0](two, X[:, :2])]
            if logged:
                losses[1][0](two, X[:, :2]).item()
                losses[0][0](one, y).item()
            (terms[0] + 0.5 * terms[1]).backward()
            optimizer.step()
        found.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    one, two = model(X)
    losses[0][0](one, y)
    with pytest.raises(UnsupportedError, match="called twice on one output of the model, with different targets"):
        losses[0][0](one, y.flip(0))


# ------------------------------------------------------------------------------------------- factors that are large
def scaled_steps(make: Callable[[nn.Module, nn.Module], Any], factor: float, micro: int, scaler: Any = None) -> Tensor:
    """One step of `factor` times the mean over micro-batches, summed; the update over lr, or the new gradient."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = make(model, loss)
    optimizer.zero_grad()
    for k in range(micro):
        X, y = batch(seed=k)
        value = factor * loss(model(X), y)
        (value if scaler is None else scaler.scale(value)).backward()
    before = flat(model)
    if isinstance(optimizer, KFACOptimizer):
        optimizer.step() if scaler is None else scaler.step(optimizer, scaler=scaler)
        return before - flat(model)
    if scaler is not None:
        for p in model.parameters():
            p.grad /= scaler.get_scale()
    optimizer.step(scaler=scaler)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("preconditioner", [False, True])
@pytest.mark.parametrize(("factor", "micro"), [(64.0, 1), (65536.0, 1), (1.0, 64), (2.0, 4), (100.0, 1)])
@pytest.mark.filterwarnings("ignore:The loss was multiplied by")
def test_large_factors_without_a_scaler(factor: float, micro: int, preconditioner: bool) -> None:
    """They are the user's: with as many times the damping the direction is that of the loss by itself."""
    options: dict[str, Any] = {**EXACT, "norm_constraint": None}

    def make(damping: float) -> Callable[[nn.Module, nn.Module], Any]:
        def of(model: nn.Module, loss: nn.Module) -> Any:
            if preconditioner:
                return KFACPreconditioner(model, loss, damping, **options)
            return KFACOptimizer(model, loss, 1.0, 0.0, damping, **options)

        return of

    large = scaled_steps(make(0.1 * factor * micro), factor, micro)
    torch.testing.assert_close(large, scaled_steps(make(0.1), 1 / micro, micro), rtol=1e-9, atol=1e-12)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    told = scaled_steps(make(0.1 * factor * micro), factor, micro, scaler)
    torch.testing.assert_close(told, large, rtol=1e-9, atol=1e-12)


def test_what_may_be_a_scale_is_asked_for() -> None:
    for kind, factor in ((KFACPreconditioner, 64.0), (KFACOptimizer, 65536.0)):
        model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
        optimizer = kind(model, loss)
        (factor * loss(model(X), y)).backward()
        with pytest.warns(CurvatureWarning, match=rf"multiplied by {factor:g} .*say so: step\(scaler=scaler\)"):
            optimizer.step()


# ----------------------------------------------------------------------------------------------- what `listen` learns
@pytest.mark.parametrize("options", [{}, ADAPTIVE, {"vectors": "empirical"}], ids=str)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_factor_in_front_of_a_loss_that_nobody_sees(options: dict[str, Any], inside: bool, reduction: str) -> None:
    """The same steps as through hooks; micro-batches of different sizes and numbers."""
    found = []
    for listens in (True, False):
        model, loss = net(), nn.CrossEntropyLoss(reduction=reduction)
        optimizer = KFACOptimizer(model, loss, **{**LOOKS, **options})
        for step in range(3):
            optimizer.zero_grad()
            total = 0.0
            for n, c in ((4, 10.0), (8, 3.0)):
                X, y = batch(n, seed=step)
                with optimizer.listen((X, y)) if listens else nullcontext():
                    output = model(X)
                    value = c * (F.cross_entropy(output, y, reduction=reduction) if listens else loss(output, y))
                    if inside:
                        value.backward(retain_graph=True)
                if not inside:
                    value.backward()
                total += value.item()
            optimizer.step()
            assert optimizer.last_step.loss == pytest.approx(total)
        found.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_several_losses_with_a_factor_that_nobody_sees() -> None:
    found = []
    for listens in (True, False):
        model = TwoHeads().double()
        losses = {"one": (nn.CrossEntropyLoss(), 1.0), "two": (nn.MSELoss(), 0.5)}
        optimizer = KFACOptimizer(model, losses, output=lambda out: {"one": out[0], "two": out[1]}, **LOOKS)
        for step in range(3):
            X, y = batch(seed=step)
            optimizer.zero_grad()
            with optimizer.listen((X, {"one": y, "two": X[:, :2]})) if listens else nullcontext():
                one, two = model(X)
            if listens:
                value = F.cross_entropy(one, y) + 0.5 * F.mse_loss(two, X[:, :2])
            else:
                value = losses["one"][0](one, y) + 0.5 * losses["two"][0](two, X[:, :2])
            (7.0 * value).backward()
            optimizer.step()
        found.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_shifted_labels_with_a_factor() -> None:
    model = WithAttributes().double()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), shift_labels=True, **LOOKS)
    tokens = torch.arange(6).add(torch.arange(6)[:, None]) % 7
    with optimizer.listen({"input_ids": tokens, "labels": tokens}):
        out = model(input_ids=tokens, labels=tokens)
    (5 * out.loss).backward()
    optimizer.step()
    assert optimizer.curvature.factor == pytest.approx(5.0)
    assert optimizer.last_step.loss == pytest.approx(5 * out.loss.item())


@pytest.mark.parametrize("T", [5, 8])  # with 8, axis 1 could hold the classes
def test_shifted_labels_of_a_dict(T: int) -> None:
    """The class axis is the last one, for the statistics and for what the loss is multiplied with."""
    model, shown = LanguageModel().double(), LanguageModel().double()
    options: dict[str, Any] = {"output": lambda out: out["logits"], "shift_labels": True}
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **options, **LOOKS)
    tokens = torch.arange(T).add(torch.arange(6)[:, None]) % 7
    with optimizer.listen({"input_ids": tokens, "labels": tokens}):
        out = model(input_ids=tokens, labels=tokens)
    (5 * out["loss"]).backward()
    f = shown(input_ids=tokens)["logits"][:, :-1].movedim(-1, 1)
    moved = EmpiricalRisk(
        shown,
        nn.CrossEntropyLoss(),
        [(tokens, tokens[:, 1:])],
        output=lambda out: out["logits"][:, :-1].movedim(-1, 1),
    )
    torch.testing.assert_close(F.cross_entropy(f, tokens[:, 1:]), out["loss"])
    expected = curvature(moved, vectors=EXACT["vectors"]).to_dense()
    torch.testing.assert_close(optimizer.curvature.estimator.operator.to_dense(), expected)
    optimizer.step()
    assert optimizer.curvature.factor == pytest.approx(5.0)
    assert optimizer.last_step.loss == pytest.approx(5 * out["loss"].item())


@pytest.mark.parametrize("change", ["another term", "written to"])
def test_what_is_no_multiple_of_the_loss(change: str) -> None:
    """Then the curvature is that of the loss by itself."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    with optimizer.listen((X, y)):
        output = model(X)
    (
        output.square().mean() + 3 * F.cross_entropy(output, y)
        if change == "another term"
        else 3 * F.cross_entropy(output.mul_(2.0), y)
    ).backward()
    told = pytest.warns(CurvatureWarning, match="no multiple of the gradient of CrossEntropyLoss")
    with told if change == "another term" else nullcontext():
        optimizer.step()
    assert optimizer.curvature.factor == 1.0


@pytest.mark.parametrize("first", [0, 1])
def test_a_micro_batch_in_which_nothing_counts(first: int) -> None:
    """It adds nothing to the step; a step of which no target counts is refused, and can be gone on from."""
    models = net(), net()
    loss, (X, y) = nn.CrossEntropyLoss(), batch()
    nothing = torch.full_like(y, -100)
    for model, parts in zip(models, ([y, nothing] if first else [nothing, y], [y]), strict=True):
        optimizer = KFACOptimizer(model, loss, 1.0, 0.0, 0.1, approximation=FullBlock, norm_constraint=None, **EXACT)
        loss(model(X), nothing).backward()
        with pytest.raises(ValueError, match=r"No term of CrossEntropyLoss counts.*Skip such batches until one counts"):
            optimizer.step()
        optimizer.zero_grad()
        for part in parts:
            loss(model(X), part).backward()
        optimizer.step()
        optimizer.close()
    torch.testing.assert_close(flat(models[0]), flat(models[1]))
