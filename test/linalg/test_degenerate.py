"""Eigenvectors of repeated eigenvalues do not depend on rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from curvlinops_plus.linalg import eigendecomposition
from curvlinops_plus.linalg.degenerate import canonical
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


def test_of_the_range_alone() -> None:
    """Other eigenvalues may repeat, too."""
    X = levels(60, 0)
    A, B = rounded_differently(X)
    P, Q = eigenbasis(A, range_only=True), eigenbasis(B, range_only=True)
    assert away(P[:, 20:], Q[:, 20:]) < 1e-10
    assert away(P[:, :20], Q[:, :20]) > 0.1


def test_batches_of_matrices() -> None:
    pairs = [rounded_differently(rows(12, 5)) for rows in (few, dead, levels)]
    A, B = (torch.stack(each) for each in zip(*pairs, strict=True))
    assert away(eigenbasis(A), eigenbasis(B)) < 1e-12
    for M, Q in zip(A, eigenbasis(A), strict=True):
        assert away(Q, eigenbasis(M)) < 1e-12


def test_a_matrix_of_rounding_beside_others() -> None:
    """Such as that of gradients of keys, whose sums over positions cancel."""
    pairs = [rounded_differently(normal(30, 12)), (1e-16 * normal(12, 12), 1e-16 * normal(12, 12, seed=1))]
    A, B = (torch.stack([M @ M.T for M in each]) for each in zip(*pairs, strict=True))
    assert away(eigenbasis(A), eigenbasis(B)) < 1e-11
    assert away(eigenbasis(A[1]), eigenbasis(B[1])) > 0.1


def test_single_precision() -> None:
    """Factors of few rows; where all eigenvalues are near to each other, nothing is changed."""
    A, B = rounded_differently(normal(30, 300))
    assert away(eigenbasis(A.float()), eigenbasis(B.float())) < 2e-3
    values, Q = 1 + torch.arange(500) * 2e-6, orthogonal(500).float()
    for _ in range(2):
        assert torch.equal(canonical(values, Q.clone(), values), Q)
        values[20:30] = values[20]  # these are between others, too


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4])
def test_inputs_of_other_scales(scale: float, dtype: torch.dtype) -> None:
    """Small eigenvalues beside those of one large input are told apart, as if that input were not there."""
    X = normal(500, 10) @ normal(10, 10, seed=1)
    X[:, 0] = scale * (1 + 0.3 * normal(500))
    M = (X.T @ X / 500).to(dtype)
    Q = eigenbasis(M).double()
    small = (Q.T @ M.double() @ Q)[:-1, :-1]
    assert (small - small.diagonal().diag()).norm() < 100 * torch.finfo(dtype).eps * small.norm()


def test_what_stays() -> None:
    """Eigenvectors that are determined, those of zero, and what is differentiated."""
    Q = orthogonal(5)
    for values in (torch.arange(5.0), torch.zeros(5)):
        assert torch.equal(canonical(values.double(), Q.clone(), values.double()), Q)
    ones = torch.ones(5, dtype=F64)
    assert not torch.equal(canonical(ones, Q.clone(), ones), Q)
    assert torch.equal(canonical(ones, Q.bfloat16(), ones), Q.bfloat16())
    M = torch.eye(3, dtype=F64, requires_grad=True)
    assert eigenbasis(M).requires_grad
