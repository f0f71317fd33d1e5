"""Quadratic forms of the exact GGN, which send nothing back, against its entries."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cases import FEW, VECTORS, close, problem, unchanged
from helpers import normal
from middles import MIDDLES, Net
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CGInverseLinearOperator,
    Empirical,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    Jacobian,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.linalg import ProjectedLinearOperator


def rows_of(n: int) -> list[Tensor]:
    return [normal(n), normal(1, n, seed=1), normal(3, n, seed=2), normal(2, 4, n, seed=3), torch.zeros(2, n).double()]


@pytest.mark.parametrize("name", FEW)
def test_it_is_that_of_the_matrix(name: str) -> None:
    p = problem(name)
    risk = p.risk()
    G, dense = GGN(risk), p.exact.ggn()
    for J in rows_of(risk.space.dim):
        with unchanged(p.model, risk.data):
            found = G.quadratic_form(J)
        close(found, J @ dense @ J.mT if J.ndim > 1 else J @ dense @ J)
    tree = {key: normal(3, *q.shape, seed=k) for k, (key, q) in enumerate(risk.params.items())}
    flat = torch.cat([t.flatten(1) for t in tree.values()], 1)
    close(G.quadratic_form(tree), flat @ dense @ flat.T)


@pytest.mark.parametrize("mode", VECTORS)
def test_it_is_that_of_every_mode(mode: str) -> None:
    risk = problem("mlp").risk()
    if not VECTORS[mode].backward:
        pytest.skip("sends nothing")
    G, J = GGN(risk, VECTORS[mode]), normal(3, risk.space.dim)
    close(G.quadratic_form(J), J @ G.to_dense() @ J.T)


@pytest.mark.parametrize("middle", MIDDLES)
def test_where_forward_mode_is_wrong(middle: str) -> None:
    torch.manual_seed(0)
    part, right = MIDDLES[middle]
    data = [(normal(n, 3, seed=n), torch.arange(n) % 2) for n in (5, 3)]
    risk = EmpiricalRisk(Net(part).double(), nn.CrossEntropyLoss(), data)
    G, J = GGN(risk), normal(2, risk.space.dim)
    for rows in (J, J[0]):
        found = G.quadratic_form(rows)
        assert G._linear.mode.right is right
        close(found, rows @ (G @ rows.T).T.mT if rows.ndim > 1 else rows @ (G @ rows))


class OfUser(nn.Module):
    """A loss without a likelihood."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return ((f - y) ** 4).mean() + f.square().sum(1).sqrt().mean()


def test_a_loss_without_likelihood() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2).double(), [(normal(4, 3), normal(4, 2)), (normal(4, 3, seed=1), normal(4, 2, seed=1))]
    G = GGN(EmpiricalRisk(model, OfUser(), data))
    for J in rows_of(8):
        close(G.quadratic_form(J), J @ G.to_dense() @ J.mT if J.ndim > 1 else J @ G.to_dense() @ J)


def test_nothing_is_sent_back() -> None:
    """No backward pass reaches a parameter, after forward mode was tried."""
    passes: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            passes.append(g)
            return g

        generate_vmap_rule = True

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(self.layer(x))

    torch.manual_seed(0)
    G = GGN(EmpiricalRisk(Model().double(), nn.MSELoss(), [(normal(4, 3), normal(4, 2))]))
    G.quadratic_form(normal(8))
    assert passes
    for J in rows_of(8):
        passes.clear()
        G.quadratic_form(J)
        assert not passes
    G @ normal(8)
    assert passes


def test_a_graph_is_kept_where_it_is_asked_for() -> None:
    risk = problem("mlp").risk()
    J = normal(2, risk.space.dim)
    assert not GGN(risk).quadratic_form(J).requires_grad
    with torch.no_grad():
        assert not GGN(risk).quadratic_form(J.requires_grad_()).requires_grad


EXACT = {
    "GGN": GGN,
    "kept": partial(GGN, max_kept_bytes=2**20),
    "Monte Carlo": partial(GGN, vectors=MonteCarlo(2)),
    "empirical": partial(GGN, vectors=Empirical()),
    "Hessian": Hessian,
    "product": lambda risk: (factor := GGNFactor(risk)) @ factor.T,
    "Jacobian": lambda risk: (J := Jacobian(risk)).T @ J,
    "sum": lambda risk: GGN(risk) + curvature(risk, KFAC),
    "shifted": lambda risk: Hessian(risk).shift(0.1),
    "scaled": lambda risk: 3 * Hessian(risk),
    "part": lambda risk: Hessian(risk)["0.weight", "0.weight"],
    "projected": lambda risk: ProjectedLinearOperator(Hessian(risk), [1, 3]),
    "general": lambda risk: Hessian(risk) @ GGN(risk),
    "inverse": lambda risk: CGInverseLinearOperator(GGN(risk).shift(0.1), tolerance=1e-13),
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC": lambda risk: curvature(risk, EKFAC).inverse(1e-2),
}


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_in_the_vector(name) -> None:
    """A quadratic form is a penalty: its gradient is `(A + Aᵀ) v`, and it has a second derivative."""
    risk = problem("mlp").risk()
    A = EXACT[name](risk)
    M = A.to_dense()
    S = M + M.T
    v = normal(A.shape[1]).requires_grad_()
    given = [v, A.in_space.unflatten(v), list(A.in_space.unflatten(v).values())]
    for x in given:
        value = A.quadratic_form(x)
        torch.testing.assert_close(value.detach(), (v @ M @ v).detach(), rtol=1e-9, atol=1e-11)
        (g,) = torch.autograd.grad(value, v, create_graph=True)
        torch.testing.assert_close(g.detach(), (S @ v).detach(), rtol=1e-9, atol=1e-10)
    (second,) = torch.autograd.grad(g @ torch.ones_like(g), v)
    torch.testing.assert_close(second, S.sum(0), rtol=1e-9, atol=1e-10)
    J = normal(2, A.shape[1]).requires_grad_()
    W = normal(2, 2, seed=1)
    (g,) = torch.autograd.grad((A.quadratic_form(J) * W).sum(), J)
    torch.testing.assert_close(g, (W @ J @ M.T + W.T @ J @ M).detach(), rtol=1e-9, atol=1e-10)
