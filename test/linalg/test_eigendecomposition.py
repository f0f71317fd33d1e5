"""Eigendecompositions through the range of a matrix of low rank, against LAPACK's and against the equations."""

from __future__ import annotations

import pytest
import torch
from helpers import peak
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg.eigendecomposition import _by_range, eigenbasis, eigh

from .cases import F64, normal

F32 = torch.float32
D = 400


def rows(kind: str, m: int) -> Tensor:  # -> [m, D]
    """Rows whose Gram matrix is of rank `m` at most."""
    X = normal(m, D)
    if kind == "decaying":
        return X * torch.logspace(0, -6, D, dtype=F64) @ torch.linalg.qr(normal(D, D, seed=1))[0]
    if kind == "of all sizes":
        return X * torch.logspace(0, -12, D, dtype=F64)[torch.randperm(D, generator=torch.Generator().manual_seed(0))]
    if kind == "with a mean":
        return X / 10 + 10
    if kind == "rectified":
        return (normal(m, D // 4) @ normal(D // 4, D, seed=1) / D**0.5 + 0.5).relu()
    if kind == "with dead units":
        X[:, ::2] = 0
    if kind == "repeated":
        X[1:] = X[:1]
    if kind == "clustered":
        return torch.linalg.qr(X.T)[0].T
    return X


KINDS = ["normal", "decaying", "of all sizes", "with a mean", "rectified", "with dead units", "repeated", "clustered"]


def check(M: Tensor, values: Tensor, Q: Tensor) -> None:
    """`M Q = Q Λ` with an error like that of LAPACK, and an orthogonal `Q`."""
    eps, top = torch.finfo(M.dtype).eps, torch.linalg.matrix_norm(M.double(), 2)
    residual = M.double() @ Q.double() - Q.double() * values.double()
    assert torch.linalg.matrix_norm(residual, 2) <= 60 * eps * top
    torch.testing.assert_close(Q.mT @ Q, torch.eye(len(M), dtype=M.dtype), rtol=0, atol=60 * eps)
    assert bool((values.diff() >= 0).all())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("m", [1, 30, 150, 300, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_eigh_of_every_rank(kind: str, m: int, dtype: torch.dtype) -> None:
    X = rows(kind, m).to(dtype)
    M = X.T @ X / m
    before = M.clone()
    values, Q = eigh(M, semidefinite=True)
    check(M, values, Q)
    assert torch.equal(M, before)
    error = float(60 * torch.finfo(dtype).eps * values[-1])
    torch.testing.assert_close(values.double(), torch.linalg.eigvalsh(M.double()), rtol=0, atol=error)
    Q = eigenbasis(M)
    torch.testing.assert_close(Q.T @ Q, torch.eye(D, dtype=dtype), rtol=0, atol=60 * torch.finfo(dtype).eps)
    D_ = Q.double().T @ M.double() @ Q.double()
    assert (D_ - D_.diagonal().diag()).norm() <= 1e3 * torch.finfo(dtype).eps * M.norm()
    assert bool((D_.diagonal().diff() >= -1e3 * torch.finfo(dtype).eps * M.norm()).all())


def test_the_check_can_fail() -> None:
    M = normal(D, D) @ normal(D, D).T
    values, Q = torch.linalg.eigh(M)
    check(M, values, Q)
    for wrong in ((values * (1 + 1e-12), Q), (values, Q * (1 + 1e-13)), (values.flip(0), Q.flip(1))):
        with pytest.raises(AssertionError):
            check(M, *wrong)


def test_a_low_rank_takes_less_memory_than_lapack() -> None:
    """Beside the matrix: the result, and twice a half of it."""
    X = rows("normal", 120).to(F32)
    M, size = X.T @ X, 4 * D * D
    assert peak(lambda: eigenbasis(M)) < 2 * size
    assert peak(lambda: torch.linalg.eigh(M)) > 2.9 * size


def test_what_is_no_semidefinite_matrix_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says that it is one may be wrong: the result is right all the same."""
    X = normal(30, D)
    low = X.T @ X
    hidden = torch.zeros(D, D, dtype=F64)
    hidden[3, 5] = hidden[5, 3] = 1.0  # zeros on the diagonal, but not in the row
    negative = low - 1e-3 * torch.diag((torch.arange(D) > 390).double())
    for M in (hidden, -low, negative, low + 1e3 * hidden):
        values, Q = eigh(M, semidefinite=True)
        check(M, values, Q)
        assert values[0] < 0
        Q = eigenbasis(M)
        torch.testing.assert_close(Q.T @ M @ Q, torch.diag((Q.T @ M @ Q).diagonal()), rtol=0, atol=1e-8)
    assert _by_range(-low, "", 0.0, refine=True) is None
    assert _by_range(low + 1e3 * hidden, "", 0.0, refine=True) is None


def test_what_has_other_ways() -> None:
    """Batches, derivatives, half precision, nothing at all."""
    X = normal(2, 20, D)
    batch = X.mT @ X
    values, Q = eigh(batch, semidefinite=True)
    torch.testing.assert_close(Q * values[:, None] @ Q.mT, batch)
    M = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(eigh(M, semidefinite=True)[0][-1], M)
    assert grad.norm() == pytest.approx(1)
    half = batch[0].bfloat16()
    assert eigenbasis(half).dtype == torch.bfloat16
    assert eigenbasis(torch.zeros(D, D)).shape == (D, D)
    check(torch.zeros(D, D), *eigh(torch.zeros(D, D), semidefinite=True))
    assert eigenbasis(torch.empty(0, 0)).shape == (0, 0)
    with pytest.raises(NumericsError, match=r"factor A \[2, 2\] has 4 entries that are NaN"):
        eigenbasis(torch.full((2, 2), torch.nan), "factor A")
    huge = torch.full((3, 3), 3e38)
    assert eigh(huge)[0].shape == (3,)  # the sum of its entries overflows
