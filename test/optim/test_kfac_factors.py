"""Losses that are multiplied with another number in every step, also in steps without statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops_plus import CurvatureWarning, FullBlock, HeuristicDamping, KFACOptimizer, LevenbergMarquardt
from test.optim.test_kfac_optimizer import EXACT, batch, flat, net

FACTORS = (2.0, 2.0, 7.0, 0.5, 1.0)
DAMPING = 0.1


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


PLAIN: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "damping": DAMPING, "norm_constraint": None}


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("listens", [False, True])
def test_the_curvature_has_the_factor_of_its_step(every: int, listens: bool) -> None:
    """Against dense algebra with the factor of the step and the statistics of the last refresh."""
    model, loss = net(), nn.CrossEntropyLoss()
    options = {**EXACT, **PLAIN, "statistics_every": every, "inverse_every": 5}
    optimizer = KFACOptimizer(model, loss, approximation=FullBlock, **options)
    for step, factor in enumerate(FACTORS):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        before = flat(model)
        if listens:
            with optimizer.listen((X, y)):
                out = model(X)
            value = F.cross_entropy(out, y)
        else:
            value = loss(model(X), y)
        (factor * value).backward()
        optimizer.step()
        K = factor * optimizer.curvature.estimator.refreshed.to_dense()
        expected = torch.linalg.solve(K + DAMPING * torch.eye(len(K)).double(), gradient_of(model))
        torch.testing.assert_close(before - flat(model), expected, rtol=1e-9, atol=1e-10)


def test_factored_inverses_have_the_factor_of_their_step() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, inverse="factored", statistics_every=5, **EXACT, **PLAIN)
    for step, factor in enumerate(FACTORS):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        before = flat(model)
        (factor * loss(model(X), y)).backward()
        optimizer.step()
        K = optimizer.curvature.estimator.refreshed
        P = K.inverse(HeuristicDamping(DAMPING / factor, min=0.0))
        torch.testing.assert_close(before - flat(model), P @ gradient_of(model) / factor, rtol=1e-9, atol=1e-10)


def test_a_norm_constraint_bounds_the_update_in_the_curvature_of_its_step() -> None:
    """What is carried along from one step to the next belongs to another curvature when the factor changes."""
    model, loss, c = net(), nn.CrossEntropyLoss(), 1e-4
    options = {**EXACT, **PLAIN, "momentum": 0.9, "norm_constraint": c}
    optimizer = KFACOptimizer(model, loss, approximation=FullBlock, statistics_every=9, inverse_every=9, **options)
    for step, factor in enumerate((1.0, 1.0, 100.0, 0.01, 0.01)):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        before = flat(model)
        (factor * loss(model(X), y)).backward()
        optimizer.step()
        δ, K = flat(model) - before, factor * optimizer.curvature.estimator.refreshed.to_dense()
        square = float(δ @ (K @ δ + DAMPING * δ))
        assert square <= c * (1 + 1e-9)
        assert optimizer.last_step.scale == 1 or square == pytest.approx(c)


def test_the_predicted_change_has_the_factor_of_its_step() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    options = {**EXACT, **PLAIN, "damping": LevenbergMarquardt(DAMPING, interval=1), "lr": 1e-3}
    optimizer = KFACOptimizer(model, loss, statistics_every=9, **options)
    for step, factor in enumerate(FACTORS):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        (factor * loss(model(X), y)).backward()
        optimizer.step()
        assert optimizer.last_step.rho == pytest.approx(1.0, rel=1e-2)


def test_a_step_whose_loss_nobody_sees() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, statistics_every=3, **EXACT)
    X, y = batch()
    for factor in (2.0, 3.0):
        optimizer.zero_grad()
        (factor * loss(model(X), y)).backward()
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(X), y).backward()
    with pytest.warns(CurvatureWarning, match=r"other numbers in other steps, by 3 in the last one.*nobody saw the"):
        optimizer.step()
    assert optimizer.curvature.factor == 3.0


def test_a_step_whose_loss_nobody_sees_after_losses_with_one_factor() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, statistics_every=2, **EXACT)
    X, y = batch()
    (2.0 * loss(model(X), y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    (2.0 * F.cross_entropy(model(X), y)).backward()
    optimizer.step()
    assert optimizer.curvature.factor == 2.0


def test_factors_reach_what_the_model_returned() -> None:
    """`output=` makes a tensor of its own, at which the caller's gradients don't arrive."""
    X, y = torch.randn(6, 3, 4, dtype=torch.float64), torch.arange(18).reshape(6, 3) % 2
    found = []
    for options in ({"output": lambda o: o.movedim(-1, 1)}, {}):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 2)] if options else [nn.Linear(4, 2), _ClassesFirst()]
        model = nn.Sequential(*layers).double()
        optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.1, **options)
        with optimizer.listen((X, y)):
            f = model(X)
        (3 * nn.functional.cross_entropy(f.movedim(-1, 1) if options else f, y)).backward()
        optimizer.step()
        found.append(model[0].weight.detach().clone())
        assert optimizer.curvature.factor == pytest.approx(3)
    torch.testing.assert_close(*found)


class _ClassesFirst(nn.Module):
    def forward(self, x):
        return x.movedim(-1, 1)


def test_factors_that_cannot_be_seen_are_told() -> None:
    """`output=` computes from one of several tensors."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x):
            return {"logits": self.inner(x), "x": x}

    torch.manual_seed(0)
    X, y = torch.randn(6, 3, 4), torch.arange(18).reshape(6, 3) % 2
    model = Two()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.1, output=lambda o: o["logits"].movedim(-1, 1))
    with pytest.warns(CurvatureWarning, match=r"`output=` computes what the loss reads"), optimizer.listen((X, y)):
        model(X)
    optimizer = KFACOptimizer(model, nn.MSELoss(), lr=0.1, output=lambda o: o["logits"])
    with optimizer.listen((X, torch.randn(6, 3, 2))):
        f = model(X)["logits"]
    (3 * f.square().mean()).backward()
    optimizer.close()
