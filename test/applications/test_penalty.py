"""Quadratic penalties against dense matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import F64, normal
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CGInverseLinearOperator,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    Hessian,
    KFACLinearOperator,
    QuadraticPenalty,
    curvature,
)
from curvlinops_plus.linalg import Dense, Structure


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def risk_of(model: nn.Module, seed: int = 0, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, nn.MSELoss(), [(normal(6, 3, seed=seed), normal(6, 2, seed=seed + 1))], **options)


def moved(model: nn.Module, seed: int = 5) -> Tensor:
    """Change the parameters, and return by how much."""
    risk = risk_of(model)
    step = normal(risk.space.dim, seed=seed)
    risk.assign(risk.vector() + step)
    return step


CURVATURES = {
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC": lambda risk: curvature(risk, EKFAC),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock),
    "mixed": lambda risk: curvature(risk, {"0": FullBlock}, default=KFAC),
    "inverse": lambda risk: curvature(risk, KFAC).inverse(0.1),
    "sum": lambda risk: curvature(risk, KFAC) + 2 * curvature(risk_of(risk.model, 3), KFAC),
    "shifted": lambda risk: curvature(risk, KFAC).shift(0.3),
    "dense": lambda risk: Hessian(risk).materialize(),
    "classic": lambda risk: KFACLinearOperator(risk.model, nn.MSELoss(), list(risk.params.values()), risk.data),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_value_and_derivatives(name) -> None:
    model = network()
    risk = risk_of(model)
    K = CURVATURES[name](risk)
    own = dict(risk.params) if name in ("inverse", "dense", "shifted") else None
    penalty = QuadraticPenalty(K, strength=3.0, params=own)
    M = K.to_dense()
    assert penalty().item() == 0.0
    step = moved(model)
    value = penalty()
    torch.testing.assert_close(value.detach(), 1.5 * step @ M @ step, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    g = torch.cat([t.flatten() for t in grads])
    torch.testing.assert_close(g.detach(), 3.0 * M @ step, rtol=1e-10, atol=1e-11)
    (second,) = torch.autograd.grad(g.sum(), [model[0].weight])
    torch.testing.assert_close(second.flatten(), 3.0 * M.sum(0)[:12], rtol=1e-10, atol=1e-11)


def test_the_matrix_is_that_of_the_old_task() -> None:
    """The classic classes compute at first use: it happens when the penalty is made."""
    model = network()
    params = list(model.parameters())
    risk = risk_of(model)
    make = partial(KFACLinearOperator, model, nn.MSELoss(), params, risk.data, fisher_type="type-2")
    M, penalty = make().to_dense(), QuadraticPenalty(make())
    step = moved(model)
    torch.testing.assert_close(penalty().detach(), 0.5 * step @ M @ step)


def test_penalties_of_several_tasks_add_up() -> None:
    model = network()
    penalties, expected = [], torch.zeros((), dtype=F64)
    matrices, steps = [], []
    for task in range(3):
        K = curvature(risk_of(model, seed=10 * task), KFAC)
        penalties.append(QuadraticPenalty(K, strength=task + 1.0))
        matrices.append(K.to_dense())
        steps.append(moved(model, seed=task))
    for task, M in enumerate(matrices):
        away = torch.stack(steps[task:]).sum(0)
        expected = expected + 0.5 * (task + 1) * away @ M @ away
    for total in (
        sum(penalties),
        penalties[0] + penalties[1] + penalties[2],
        penalties[0] + (penalties[1] + penalties[2]),
    ):
        assert isinstance(total, QuadraticPenalty) or callable(total)
        torch.testing.assert_close(total().detach(), expected)
    loss = nn.MSELoss()(model(normal(2, 3)), normal(2, 2)) + sum(penalties)()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_given_point_in_every_form() -> None:
    model = network()
    risk = risk_of(model)
    K, at = curvature(risk, KFAC), normal(risk.space.dim)
    away = risk.vector() - at
    expected = 0.5 * away @ K.to_dense() @ away
    for given in (at, risk.space.unflatten(at), list(risk.space.unflatten(at).values()), at.numpy()):
        torch.testing.assert_close(QuadraticPenalty(K, given)().detach(), expected)


def test_a_copy_of_the_point_is_kept() -> None:
    model = network()
    K = curvature(risk_of(model), KFAC)
    at = risk_of(model).vector()
    penalty = QuadraticPenalty(K, at)
    at.add_(1.0)
    assert penalty().item() == 0.0


def test_some_parameters_and_half_precision() -> None:
    model = network().to(torch.bfloat16)
    head = dict(model[2].named_parameters())
    data = [(normal(4, 3).to(torch.bfloat16), normal(4, 2).to(torch.bfloat16))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data, head), KFAC)
    penalty = QuadraticPenalty(K)
    with torch.no_grad():
        model[2].bias.add_(1.0)
        model[0].bias.add_(1.0)
    value = penalty()
    assert value.dtype == torch.float32
    (g,) = torch.autograd.grad(value, model[2].bias)
    assert g.dtype == torch.bfloat16
    torch.testing.assert_close(g.float(), K.to_dense()[-2:, -2:].sum(1), rtol=2e-2, atol=2e-2)


def test_values_that_stay() -> None:
    """A matrix-free operator at values of its own does not change as the network is trained."""
    model = network()
    fixed = {name: p.detach().clone() for name, p in model.named_parameters()}
    risk = risk_of(model, params=fixed)
    penalty = QuadraticPenalty(GGN(risk))
    M = GGN(risk_of(model)).to_dense()
    step = moved(model)
    torch.testing.assert_close(penalty().detach(), 0.5 * step @ M @ step)
    (g,) = torch.autograd.grad(penalty(), model[2].bias)
    torch.testing.assert_close(g, (M @ step)[-2:])


@pytest.mark.parametrize("wrap", [lambda A: A, lambda A: A.shift(0.1), lambda A: 2 * A + A, CGInverseLinearOperator])
def test_what_follows_the_parameters_is_refused(wrap) -> None:
    model = network()
    for make in (GGN, Hessian):
        with pytest.raises(
            TypeError, match="is computed in each product from the parameters that the network has then"
        ):
            QuadraticPenalty(wrap(make(risk_of(model))))


def test_what_is_refused() -> None:
    model, other = network(), network(1)
    K, L = (curvature(risk_of(m), KFAC) for m in (model, other))
    n = K.shape[0]
    with pytest.raises(TypeError, match=r"Expected an operator, such as curvature.* got Tensor"):
        QuadraticPenalty(torch.eye(n))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Expected a symmetric matrix"):
        QuadraticPenalty(Dense(normal(3, 3)))
    for strength in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Expected strength to be finite and at least 0"):
            QuadraticPenalty(K, strength=strength)
    with pytest.raises(ValueError, match="was computed from 2 networks; say which parameters"):
        QuadraticPenalty(K + L)
    with pytest.raises(ValueError, match="was computed from no network; say which parameters"):
        QuadraticPenalty(Dense(torch.eye(n, dtype=F64), Structure.PSD))
    with pytest.raises(ValueError, match="Expected parameters of the shapes of"):
        QuadraticPenalty(K, params={"0.weight": model[0].weight})
    with pytest.raises(ValueError, match="Expected shape"):
        QuadraticPenalty(K, torch.zeros(3, dtype=F64))
    with pytest.raises(ValueError, match=r"Expected `at` to be one vector \[26\], got 2 columns"):
        QuadraticPenalty(K, torch.zeros(n, 2, dtype=F64))
    with pytest.raises(TypeError, match="unsupported operand"):
        QuadraticPenalty(K) + 1.0  # pyright: ignore[reportOperatorIssue]
    penalty = QuadraticPenalty(K)
    model[0].weight = nn.Parameter(torch.zeros(4, 3, dtype=F64))
    with pytest.raises(ValueError, match="other tensors in place of its parameters"):
        penalty()


@pytest.mark.parametrize("name", ["KFAC", "sum", "classic"])
def test_a_matrix_of_before_more_training_needs_its_point(name: str) -> None:
    model = network()
    K, before = CURVATURES[name](risk_of(model)), risk_of(model).vector()
    _ = K @ before  # the classic one is computed at its first use
    step = moved(model)
    with pytest.raises(ValueError, match=r"have changed since .* was computed, .* curvature at another point"):
        QuadraticPenalty(K)
    torch.testing.assert_close(QuadraticPenalty(K, before)(), 0.5 * K.quadratic_form(step))


def test_a_sum_of_two_networks_with_the_parameters_named() -> None:
    model = network()
    K = curvature(risk_of(model), KFAC) + curvature(risk_of(network(1)), KFAC)
    penalty = QuadraticPenalty(K, params=dict(model.named_parameters()))
    step = moved(model)
    torch.testing.assert_close(penalty().detach(), 0.5 * step @ K.to_dense() @ step)
