"""Options that kfac_jax's optimizer has, too, each against the formula that it stands for."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
    LevenbergMarquardt,
    NormConstraint,
    curvature,
)
from curvlinops_plus.layer import AffineRule, register_rule
from curvlinops_plus.risk import as_vectors
from test.optim.test_kfac_optimizer import EXACT, batch, flat, net

FREE: dict[str, Any] = {"norm_constraint": None, **EXACT}


def take_step(optimizer: KFACOptimizer, model: nn.Module, loss: nn.Module, seed: int = 1) -> tuple[Tensor, Tensor]:
    """One step; the gradient, and what the parameters moved by."""
    X, y = batch(seed=seed)
    optimizer.zero_grad()
    loss(model(X), y).backward()
    gradient, before = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), flat(model)
    optimizer.step()
    return gradient, flat(model) - before


# --------------------------------------------------------------------------------------------------------- the damping
@pytest.mark.parametrize(
    ("options", "rho", "expected"),
    [
        ({}, 0.2, 2 / 0.9**5),
        ({}, 0.25, 2.0),
        ({}, 0.75, 2.0),
        ({}, 0.8, 2 * 0.9**5),
        ({}, nan, 2 / 0.9**5),
        ({}, -inf, 2 / 0.9**5),
        ({"interval": 3, "decay": 0.5}, 0.9, 2 * 0.5**3),
        ({"thresholds": (0.4, 0.5)}, 0.3, 2 / 0.9**5),
        ({"thresholds": (0.4, 0.5)}, 0.6, 2 * 0.9**5),
        ({"min": 1.9}, 1.0, 1.9),
        ({"max": 2.1}, 0.0, 2.1),
    ],
)
def test_how_the_damping_adapts(options: dict[str, Any], rho: float, expected: float) -> None:
    assert LevenbergMarquardt(2.0, **options).adapted(2.0, rho) == pytest.approx(expected)


def test_the_damping_stays_in_its_bounds_in_training() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    policy = LevenbergMarquardt(0.1, interval=1, decay=0.1, min=0.05)
    optimizer = KFACOptimizer(model, loss, lr=1e-3, damping=policy, **FREE)
    for step in range(3):
        take_step(optimizer, model, loss, step)
    assert optimizer.last_step.damping == [0.05]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("model_of", ["blocks", "exact"])
def test_the_predicted_change(include: bool, model_of: Any) -> None:
    """`g δ + δ C δ / 2`, with the statistics or the exact GGN of the batch, with and without the damping's term."""
    model, loss = net(), nn.CrossEntropyLoss()
    policy = LevenbergMarquardt(0.3, interval=1, include_damping=include)
    optimizer = KFACOptimizer(model, loss, 0.1, 0.0, policy, quadratic_model=model_of, **FREE)
    risk = EmpiricalRisk(model, loss, [batch()])
    C = (GGN(risk) if model_of == "exact" else curvature(risk, KFAC)).to_dense()
    g, δ = take_step(optimizer, model, loss)
    expected = g @ δ + δ @ C @ δ / 2 + (0.3 * δ @ δ / 2 if include else 0)
    assert optimizer.last_step.quadratic_change == pytest.approx(float(expected), rel=1e-9)


# ------------------------------------------------------------------------------------------------------ the statistics
def test_statistics_are_moving_averages_with_normalised_weights() -> None:
    model, loss, decay = net(), nn.CrossEntropyLoss(), 0.7
    optimizer = KFACOptimizer(model, loss, lr=0.0, approximation=FullBlock, decay=decay, **FREE)
    for step in range(4):
        take_step(optimizer, model, loss, step)
    ones = [curvature(EmpiricalRisk(model, loss, [batch(seed=step)]), FullBlock).to_dense() for step in range(4)]
    weights = torch.tensor([decay ** (3 - step) for step in range(4)], dtype=torch.float64)
    expected = sum(w * K for w, K in zip(weights / weights.sum(), ones, strict=True))
    torch.testing.assert_close(optimizer.curvature.estimator.operator.to_dense(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "word",
    [
        *("fisher_gradients", "fisher_curvature_prop", "fisher_exact", "fisher_empirical"),
        *("ggn_curvature_prop", "ggn_exact", "mc", "type-2", "empirical", "curvature-propagation", "forward-only"),
    ],
)
def test_words_for_vectors(word: str) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, vectors=word)
    assert optimizer.curvature.estimator.vectors == as_vectors(word)
    g, δ = take_step(optimizer, model, loss)
    assert float(g @ δ) < 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"approximation": DiagonalBlock}, [DiagonalBlock, DiagonalBlock]),  # generic blocks for all layers
        ({"approximation": {"0": FullBlock}}, [FullBlock, KFAC]),
        ({"approximation": {nn.Linear: EKFAC}}, [EKFAC, EKFAC]),
        ({"approximation": {"0": EKFAC}, "default": DiagonalBlock}, [EKFAC, DiagonalBlock]),
    ],
    ids=str,
)
def test_approximations_by_layer(options: dict[str, Any], expected: list[Any]) -> None:
    """Against `curvature` with the same options, by dense algebra."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, 1.0, 0.0, 0.1, **options, **FREE)
    assert [entry.approximation.kind for entry in optimizer.curvature.estimator.plan] == expected
    K = curvature(EmpiricalRisk(model, loss, [batch()]), **options).to_dense()
    g, δ = take_step(optimizer, model, loss)
    torch.testing.assert_close(-δ, torch.linalg.solve(K + 0.1 * torch.eye(len(g)).double(), g), rtol=1e-7, atol=1e-9)


class Transposed(nn.Module):
    """A layer that the package does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


@register_rule(Transposed)
class TransposedRule(AffineRule):
    """Its rule."""

    def patterns(self, m: nn.Module) -> dict[str, str]:
        return {"kernel": "i o -> o i"}

    def inputs(self, m: nn.Module, x: Tensor) -> Tensor:
        return x[:, None]

    def grads(self, m: nn.Module, g: Tensor) -> Tensor:
        return g[:, :, None]


def test_a_layer_with_a_rule_of_the_user() -> None:
    model, loss = Transposed(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, 1.0, 0.0, 0.1, **FREE)
    X, y = torch.linspace(-1, 1, 20).view(5, 4).double().cos(), torch.arange(5) % 3
    K = curvature(EmpiricalRisk(model, loss, [(X, y)]), KFAC).to_dense()
    before = flat(model)
    loss(model(X), y).backward()
    assert model.kernel.grad is not None
    g = model.kernel.grad.flatten().clone()
    optimizer.step()
    expected = torch.linalg.solve(K + 0.1 * torch.eye(12).double(), g)
    torch.testing.assert_close(before - flat(model), expected, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------ the step
def test_a_schedule_of_the_momentum() -> None:
    """The velocity is the update before, times the momentum of now."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, 0.1, 0.0, 0.1, approximation=FullBlock, **FREE)
    velocity = torch.zeros_like(flat(model))
    for step, momentum in enumerate((0.5, 0.9, 0.0, 0.3)):
        optimizer.param_groups[0]["momentum"] = momentum
        g, δ = take_step(optimizer, model, loss, step)
        K = optimizer.curvature.estimator.refreshed.to_dense()
        expected = momentum * velocity - 0.1 * torch.linalg.solve(K + 0.1 * torch.eye(len(g)).double(), g)
        torch.testing.assert_close(δ, expected, rtol=1e-9, atol=1e-11)
        velocity = δ if momentum else torch.zeros_like(δ)


@pytest.mark.parametrize("power", [-0.5, -0.25])
def test_other_powers_of_the_curvature(power: float) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    constraint = NormConstraint(1e9, norm="euclidean")
    optimizer = KFACOptimizer(
        model, loss, 1.0, 0.0, 0.1, approximation=FullBlock, power=power, **FREE | {"norm_constraint": constraint}
    )
    g, δ = take_step(optimizer, model, loss)
    values, Q = torch.linalg.eigh(optimizer.curvature.estimator.refreshed.to_dense())
    expected = Q @ ((values.clamp(min=0) + 0.1) ** power * (Q.mT @ g))
    torch.testing.assert_close(-δ, expected, rtol=1e-7, atol=1e-9)
