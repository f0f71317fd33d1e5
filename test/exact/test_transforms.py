"""Transforms of `torch.func` around products: they are linear functions of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from curvlinops_plus import GGN, EmpiricalRisk, GGNFactor, Hessian, Jacobian, UnsupportedError

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
KINDS: list[Callable[[EmpiricalRisk], Any]] = [GGN, Hessian, Jacobian, GGNFactor, lambda risk: 2 * GGN(risk)[:20, :20]]


def operator(kind: Callable[[EmpiricalRisk], Any]) -> tuple[Any, Tensor, Tensor]:
    """An operator, its dense matrix, and two vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    A = kind(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, torch.arange(6) % 2)]))
    return A, A.to_dense(), torch.randn(2, A.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS, ids=["GGN", "Hessian", "Jacobian", "factor", "submatrix"])
def test_reverse_mode_and_vmap(kind: Any) -> None:
    A, D, V = operator(kind)

    def square(v: Tensor) -> Tensor:
        return (A @ v).square().sum()

    torch.testing.assert_close(grad(square)(V[0]), 2 * D.T @ D @ V[0])
    torch.testing.assert_close(vmap(grad(square))(V), 2 * V @ D.T @ D)
    torch.testing.assert_close(jacrev(lambda v: A @ v)(V[0]), D)
    torch.testing.assert_close(jacrev(grad(square))(V[0]), 2 * D.T @ D)
    torch.testing.assert_close(vmap(lambda v: A @ v)(V), V @ D.T)
    torch.testing.assert_close(vmap(lambda v: A @ v)(torch.stack([V.T, 3 * V.T])), torch.stack([D @ V.T, 3 * D @ V.T]))
    u = torch.ones(A.shape[0], dtype=torch.float64)
    torch.testing.assert_close(vjp(lambda v: A @ v, V[0])[1](u)[0], D.T @ u)


@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_quadratic_forms(kind: Any) -> None:
    A, D, V = operator(kind)

    def form(v: Tensor) -> Tensor:
        return A.quadratic_form(v[None])[0, 0]

    torch.testing.assert_close(grad(form)(V[0]), 2 * D @ V[0])
    torch.testing.assert_close(vmap(form)(V), torch.stack([v @ D @ v for v in V]))


def test_forward_mode_is_right_or_refused_in_words() -> None:
    A, D, V = operator(Hessian)
    torch.testing.assert_close(jvp(lambda v: A @ v, (V[0],), (V[1],))[1], D @ V[1])
    torch.testing.assert_close(hessian(lambda v: v @ (A @ v))(V[0]), 2 * D)
    A, D, V = operator(GGN)
    A @ V[0]  # in forward mode
    with pytest.raises(UnsupportedError, match="which PyTorch can't nest"):
        jvp(lambda v: A @ v, (V[0],), (V[1],))
