"""The norm constraint bounds the update in the curvature of its own step, in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from curvlinops_plus import EKFAC, KFAC, FullBlock
from curvlinops_plus.optim.kfac import KFACOptimizer, LevenbergMarquardt, NormConstraint
from test.optim.test_kfac_optimizer import flat


def autoencoder() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(18, 3), nn.Tanh(), nn.Linear(3, 6)
    ).double()


DAMPINGS: dict[str, Any] = {
    "constant": 1e-3,
    "schedule": lambda step: 0.1 * 0.7**step,
    "rising": lambda step: 1e-3 * 1.5**step,
    "adapted": LevenbergMarquardt(0.1, interval=2, decay=0.6),
}


@pytest.mark.parametrize("inverse", ["exact", "factored"])
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize(("kind", "inverse_every"), [(KFAC, 1), (KFAC, 5), (FullBlock, 4), (EKFAC, 7)])
def test_updates_are_as_long_as_they_may_be(kind: Any, inverse_every: int, damping: str, inverse: Any) -> None:
    """With the damping of now; a factored inverse is of a larger matrix, so its updates may be shorter."""
    model, loss, c = autoencoder(), nn.MSELoss(), 1e-3
    options = {"approximation": kind, "default": kind, "norm_constraint": c, "inverse_every": inverse_every}
    optimizer = KFACOptimizer(model, loss, 0.3, 0.9, DAMPINGS[damping], inverse=inverse, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for number in range(16):
        if number == 9:  # it goes on from its state
            state, optimizer = (
                optimizer.state_dict(),
                KFACOptimizer(model, loss, 0.3, 0.9, DAMPINGS[damping], inverse=inverse, **options),
            )
            optimizer.load_state_dict(state)
            schedule.optimizer = optimizer
        X = torch.randn(8, 1, 2).double() @ torch.randn(2, 6).double()
        optimizer.zero_grad()
        before = flat(model)
        loss(model(X), X[:, 0]).backward()
        optimizer.step()
        schedule.step()
        δ, K = flat(model) - before, optimizer.curvature.estimator.refreshed
        square = float(δ @ (K @ δ)) + optimizer.last_step.damping[0] * float(δ @ δ)
        assert square <= c * (1 + 1e-9)
        if optimizer.last_step.scale < 1 and inverse == "exact":
            assert square == pytest.approx(c, rel=1e-9)
    assert optimizer.last_step.scale > 0


def test_a_step_that_is_undone_after_a_refresh() -> None:
    """What was kept before belongs to the curvature of before the refresh."""
    model, loss, c = autoencoder(), nn.MSELoss(), 3.0
    optimizer = KFACOptimizer(model, loss, 2.0, 0.9, 1e-2, norm_constraint=c, inverse_every=3, reject=1.01)
    undone = 0
    for number in range(18):
        X = torch.randn(8, 1, 6).double() * 3 ** (number % 4)
        optimizer.zero_grad()
        before = flat(model)
        loss(model(X), X[:, 0]).backward()
        optimizer.step()
        undone += optimizer.last_step.rejected
        δ, K = flat(model) - before, optimizer.curvature.estimator.refreshed
        square = float(δ @ (K @ δ)) + optimizer.last_step.damping[0] * float(δ @ δ)
        assert square <= c * (1 + 1e-9)
    assert 0 < undone < 18


def test_products_are_computed_where_the_curvature_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = autoencoder(), nn.MSELoss()
    optimizer, calls = KFACOptimizer(model, loss, norm_constraint=NormConstraint(1e-3), inverse_every=4), []
    inner = optimizer.curvature.inverse.product
    monkeypatch.setattr(optimizer.curvature.inverse, "product", lambda *args: calls.append(0) or inner(*args))
    for number in range(12):
        X = torch.randn(8, 1, 6).double()
        optimizer.zero_grad()
        loss(model(X), X[:, 0]).backward()
        optimizer.step()
        assert len(calls) == number // 4  # in the first step there is no velocity
