"""Training in float16, beside the same network in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import Empirical, Exact, KFACOptimizer, LevenbergMarquardt

X, Y = torch.linspace(-9, 9, 64 * 6).view(64, 6).sin(), torch.arange(64) % 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "factored": {"inverse": "factored"},
    "adaptive": {"lr": "adaptive", "momentum": "adaptive"},
    "damping follows the blocks": {"damping": LevenbergMarquardt(1e-2, interval=1)},
    "damping follows the GGN": {"damping": LevenbergMarquardt(1e-2, interval=1), "quadratic_model": "exact"},
}


def net(factor: float) -> nn.Module:
    """Gradients are `factor ** 2` times as large in the lowest layer as at the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for layer in (model[2], model[4]):
            layer.weight *= factor  # type: ignore[operator]
    return model


def update_of(optimizer: KFACOptimizer) -> Tensor:
    """The last update, which half precision has not rounded."""
    return torch.cat([state["velocity"].flatten().double() for state in optimizer.state.values()])


def require_same_step(one: KFACOptimizer, other: KFACOptimizer, rtol: float) -> None:
    ours, theirs = update_of(one), update_of(other)
    assert torch.dist(ours, theirs) <= rtol * theirs.norm()
    for name in ("lr", "quadratic_change", "rho"):
        mine, twin = getattr(one.last_step, name), getattr(other.last_step, name)
        assert mine == (twin if twin is None else pytest.approx(twin, rel=rtol)), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_of_a_network_in_float16(options: dict[str, Any]) -> None:
    loss, model = nn.CrossEntropyLoss(), net(1.0).half()
    twin, x = copy.deepcopy(model).double(), X.half()
    half, double = (KFACOptimizer(m, loss, vectors=Exact(), **options) for m in (model, twin))
    for m, optimizer, inputs in ((model, half, x), (twin, double, x.double())):
        loss(m(inputs), Y).backward()
        optimizer.step()
    require_same_step(half, double, 2e-2)


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"vectors": Empirical()}], ids=[*OPTIONS, "empirical"])
@pytest.mark.parametrize("factor", [1.0, 0.1, 1e-3])
def test_a_step_under_a_gradient_scaler(options: dict[str, Any], factor: float) -> None:
    """Of what arrives in the lowest layer most is below float16's range for the smallest factor."""
    loss, model = nn.CrossEntropyLoss(), net(factor)
    twin = copy.deepcopy(model).double()
    options = {"vectors": Exact(), **options}
    half, double = (KFACOptimizer(m, loss, **options) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(model(X), Y)
    scaler.scale(value).backward()
    scaler.step(half)
    scaler.update()
    loss(twin(X.double()), Y).backward()
    double.step()
    # Where gradients in the weights above are sums that cancel, their own rounding is larger than the range's.
    require_same_step(half, double, 2e-2 if factor == 1 else 6e-2)
    blocks = [optimizer.curvature.estimator.operator.blocks for optimizer in (half, double)]
    for name, block in blocks[0].items():
        expected = blocks[1][name].to_dense()
        assert torch.dist(block.to_dense().double(), expected) <= 2e-2 * expected.norm(), name


def test_training_in_float16_follows_training_in_float32() -> None:
    loss, losses = nn.CrossEntropyLoss(), []
    for dtype in (torch.float16, torch.float32):
        model, scaler = net(0.1), torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        optimizer = KFACOptimizer(model, loss, lr=0.3, inverse_every=2)
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=dtype == torch.float16):
                value = loss(model(X), Y)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(float(value.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
