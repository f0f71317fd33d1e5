"""Quadratic penalties against dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalRisk,
    Hessian,
    KFACLinearOperator,
    QuadraticPenalty,
    curvature,
)
from test.helpers import normal
from test.nets import tanh_net


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return tanh_net(3, 4, 2).double()


def risk_of(model: nn.Module, seed: int = 0, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(
        model, nn.MSELoss(), [(normal(6, 3, seed=seed), normal(6, 2, seed=seed + 1))], **options
    )


def moved(model: nn.Module, seed: int = 5) -> Tensor:
    """Change the parameters, and return by how much."""
    risk = risk_of(model)
    step = normal(risk.space.dim, seed=seed)
    risk.assign(risk.vector() + step)
    return step


CURVATURES: dict[str, Any] = {
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC": lambda risk: curvature(risk, EKFAC),
    "inverse": lambda risk: curvature(risk, KFAC).inverse(0.1),
    "sum": lambda risk: curvature(risk, KFAC) + 2 * curvature(risk_of(risk.model, 3), KFAC),
    "dense": lambda risk: Hessian(risk).materialize(),
    # It computes at first use: that is when the penalty is made.
    "classic": lambda risk: KFACLinearOperator(
        risk.model, nn.MSELoss(), [*risk.params.values()], risk.data
    ),
    "fixed values": lambda risk: GGN(
        risk_of(risk.model, params={k: p.detach().clone() for k, p in risk.params.items()})
    ),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_value_and_derivatives(name: str) -> None:
    model = network()
    risk = risk_of(model)
    M, K = CURVATURES[name](risk).to_dense(), CURVATURES[name](risk)
    own = dict(risk.params) if name in ("inverse", "sum", "dense") else None
    penalty, before = QuadraticPenalty(K, strength=3.0, params=own), risk.vector()
    assert penalty().item() == 0.0
    step = moved(model)
    value = penalty()
    torch.testing.assert_close(value.detach(), 1.5 * step @ M @ step, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    g = torch.cat([t.flatten() for t in grads])
    torch.testing.assert_close(g.detach(), 3.0 * M @ step, rtol=1e-10, atol=1e-11)
    (second,) = torch.autograd.grad(g.sum(), [model[0].weight])
    torch.testing.assert_close(second.flatten(), 3.0 * M.sum(0)[:12], rtol=1e-10, atol=1e-11)
    if name in ("KFAC", "classic"):  # a matrix of before more training needs its point
        with pytest.raises(
            ValueError, match=r"have changed since .* was computed; compute it anew"
        ):
            QuadraticPenalty(K)
        torch.testing.assert_close(QuadraticPenalty(K, before, 3.0)(), value)
    with pytest.raises(TypeError, match=r"`at`, .* is the number 3.0; .*strength=3.0"):
        QuadraticPenalty(K, 3.0)  # type: ignore[arg-type]


def test_a_given_point_in_every_form_of_which_a_copy_is_kept() -> None:
    risk = risk_of(network())
    K, at = curvature(risk, KFAC), normal(risk.space.dim)
    away = risk.vector() - at
    expected = 0.5 * away @ K.to_dense() @ away
    forms = (
        at.clone(),
        risk.space.unflatten(at),
        list(risk.space.unflatten(at).values()),
        at.numpy(),
    )
    penalties = [QuadraticPenalty(K, form) for form in forms]
    at.add_(1.0)
    forms[0].add_(1.0)  # type: ignore[union-attr]
    for penalty in penalties:
        torch.testing.assert_close(penalty().detach(), expected)
