"""Eigenvectors of repeated eigenvalues do not depend on rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from curvlinops_plus.linalg import eigendecomposition
from curvlinops_plus.linalg.eigendecomposition import eigenbasis

from .cases import F64, normal, orthogonal

SIZES = (2, 7, 64, 230, 400)


def few(d: int, rank: int) -> Tensor:
    return normal(rank, d)


def dead(d: int, rank: int) -> Tensor:
    return normal(rank, d) * (torch.arange(d) % 3 > 0)


def nearly_dead(d: int, rank: int) -> Tensor:
    """Of which rounding leaves something."""
    return normal(rank, d) * torch.where(torch.arange(d) < d // 3, 1e-17, 1.0)


def alike(d: int, rank: int) -> Tensor:
    """Two of each column."""
    return normal(rank, d)[:, torch.arange(d) // 2]


def coordinates(d: int, rank: int) -> Tensor:
    return torch.eye(d, dtype=F64)[-rank:] * torch.linspace(1, 2, rank, dtype=F64)[:, None]


def levels(d: int, rank: int) -> Tensor:
    """Three eigenvalues, one of which may be 0."""
    values = torch.linspace(0, 3, d, dtype=F64).floor().clamp(min=float(rank == d))
    return orthogonal(3 * d, seed=1)[:, :d] * values @ orthogonal(d)


def rounded_differently(X: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    return X.T @ X / len(X), torch.stack([x.T @ x for x in X[order].split(3)]).sum(0) / len(X)


def away(P: Tensor, Q: Tensor) -> float:
    """The largest difference up to signs of columns."""
    return float((P - Q * (P * Q).sum(-2, keepdim=True).sign()).abs().amax())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("rows", [few, dead, nearly_dead, alike, coordinates, levels])
def test_what_rounding_changes(rows: Callable[[int, int], Tensor], d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in sorted({1, d // 5 + 1, d // 3 + 1, d - 1, d}):
        X = rows(d, rank)
        A, B = rounded_differently(X)
        Q = eigenbasis(A)
        torch.testing.assert_close(Q.T @ Q, torch.eye(d, dtype=F64), rtol=0, atol=1e-13)
        off = Q.T @ A @ Q
        assert (off - off.diagonal().diag()).norm() <= 1e-13 * A.norm()
        assert away(Q, eigenbasis(B)) < 1e-10, rank
        with monkeypatch.context() as patch:  # the same, also if it is not found that the rank is low
            patch.setattr(eigendecomposition, "_by_range", lambda *_, **__: None)
            assert away(Q, eigenbasis(A)) < 1e-10, rank


@pytest.mark.parametrize("rows", [few, dead, levels])
def test_the_check_can_fail(rows: Callable[[int, int], Tensor]) -> None:
    A, B = rounded_differently(rows(64, 20))
    assert away(torch.linalg.eigh(A)[1], torch.linalg.eigh(B)[1]) > 0.1
    assert away(eigenbasis(A, range_only=True)[:, :40], eigenbasis(B, range_only=True)[:, :40]) > 0.1
