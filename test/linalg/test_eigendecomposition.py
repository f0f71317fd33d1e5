"""Eigendecompositions: of every rank, of repeated eigenvalues, that fail at first, by division, on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from helpers import peak
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Kronecker,
    Layout,
    Space,
    eigendecomposition,
)
from curvlinops_plus.linalg.eigendecomposition import _by_range, eigenbasis, eigh
from curvlinops_plus.linalg.side_by_side import side_by_side

from .cases import F64, normal, orthogonal, psd

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
    if kind == "with dead units":
        X[:, ::2] = 0
    if kind == "repeated":
        X[1:] = X[:1]
    if kind == "clustered":
        return torch.linalg.qr(X.T)[0].T
    return X


KINDS = ["normal", "decaying", "of all sizes", "with a mean", "with dead units", "repeated", "clustered"]


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
    off = Q.double().T @ M.double() @ Q.double()
    assert (off - off.diagonal().diag()).norm() <= 1e3 * torch.finfo(dtype).eps * M.norm()
    assert bool((off.diagonal().diff() >= -1e3 * torch.finfo(dtype).eps * M.norm()).all())


def test_the_check_can_fail() -> None:
    values, Q = torch.linalg.eigh(M := psd(50, 50))
    check(M, values, Q)
    for wrong in ((values * (1 + 1e-12), Q), (values, Q * (1 + 1e-13)), (values.flip(0), Q.flip(1))):
        with pytest.raises(AssertionError):
            check(M, *wrong)


def test_a_low_rank_leaves_a_small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes less memory than LAPACK: beside the matrix the result, and twice a half of it."""
    X = rows("normal", 120).to(F32)
    M = X.T @ X
    assert peak(lambda: eigenbasis(M)) < 2 * 4 * D * D
    seen, plain = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: seen.append(M.shape[-1]) or plain(M))
    for kind, m, size in (
        ("normal", 30, 30),
        ("normal", 300, D),
        ("with dead units", 600, D // 2),
        ("repeated", 50, 1),
    ):
        X = rows(kind, m)
        values, _ = eigh(X.T @ X, semidefinite=True)
        eigenbasis(X.T @ X)
        assert seen == 2 * [size], kind
        assert int((values == 0).sum()) >= D - size  # exactly
        seen.clear()
    X = rows("decaying", 600)
    for rtol in (1e-3, 1e-1):  # directions that need not be told apart
        Q = eigenbasis(X.T @ X, rtol=rtol)
        off = Q.T @ X.T @ X @ Q
        assert (off - off.diagonal().diag()).norm() <= D * rtol * X.square().sum(0).max()
    assert D > seen[0] > seen[1]


def test_what_is_no_semidefinite_matrix_is_noticed() -> None:
    """Who says that it is one may be wrong: the result is right all the same."""
    low, hidden = rows("normal", 30).T @ rows("normal", 30), torch.zeros(D, D, dtype=F64)
    hidden[3, 5] = hidden[5, 3] = 1.0  # zeros on the diagonal, but not in the row
    for M in (hidden, -low, low + 1e3 * hidden):
        values, Q = eigh(M, semidefinite=True)
        check(M, values, Q)
        assert values[0] < 0
        Q = eigenbasis(M)
        torch.testing.assert_close(Q.T @ M @ Q, torch.diag((Q.T @ M @ Q).diagonal()), rtol=0, atol=1e-8)
    assert _by_range(-low, "", 0.0, refine=True) is None


def test_what_has_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, derivatives, half precision, nothing at all, and what fails in single precision."""
    X = normal(2, 20, D)
    batch = X.mT @ X
    values, Q = eigh(batch, semidefinite=True)
    torch.testing.assert_close(Q * values[:, None] @ Q.mT, batch)
    M = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(eigh(M, semidefinite=True)[0][-1], M)
    assert grad.norm() == pytest.approx(1)
    assert eigenbasis(batch[0].bfloat16()).dtype == torch.bfloat16
    check(torch.zeros(D, D), *eigh(torch.zeros(D, D), semidefinite=True))
    assert eigenbasis(torch.empty(0, 0)).shape == (0, 0)
    assert eigh(torch.full((3, 3), 3e38))[0].shape == (3,)  # the sum of its entries overflows
    plain, M = torch.linalg.eigh, psd(4, 4).to(F32)
    for failing in ([F32], [F32, F64]):
        for result in (torch.nan, None):

            def fails(M: Tensor, failing: list = failing, result: float | None = result) -> tuple[Tensor, Tensor]:
                if M.dtype in failing and result is None:
                    raise RuntimeError("linalg.eigh: failed to converge")
                return plain(M) if M.dtype not in failing else (M[0] * torch.nan, M * torch.nan)

            monkeypatch.setattr(torch.linalg, "eigh", fails)
            if len(failing) == 1:
                values, Q = eigh(M)
                assert values.dtype == Q.dtype == F32
                torch.testing.assert_close(Q * values @ Q.T, M)
            else:
                with pytest.raises(
                    NumericsError, match=r"of factor A \[4, 4\] failed in every precision \(torch.float3"
                ):
                    eigh(M, "factor A")


# Repeated eigenvalues ------------------------------------------------------------------------------------------------


def dead(d: int, rank: int) -> Tensor:
    return normal(rank, d) * (torch.arange(d) % 3 > 0)


def alike(d: int, rank: int) -> Tensor:
    """Two of each column."""
    return normal(rank, d)[:, torch.arange(d) // 2]


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


@pytest.mark.parametrize("make", [lambda d, rank: normal(rank, d), dead, alike, levels])
@pytest.mark.parametrize(("d", "ranks"), [(7, [1, 6, 7]), (230, [1, 77, 230])])
def test_rounding_does_not_choose_eigenvectors(
    make: Callable[[int, int], Tensor], d: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ranks:
        A, B = rounded_differently(make(d, rank))
        Q = eigenbasis(A)
        assert away(Q, eigenbasis(B)) < 1e-10, rank
        if rank in (6, 77):
            assert away(torch.linalg.eigh(A)[1], torch.linalg.eigh(B)[1]) > 1e-3 or d == 7
        with monkeypatch.context() as patch:  # the same, also if it is not found that the rank is low
            patch.setattr(eigendecomposition, "_by_range", lambda *_, **__: None)
            assert away(Q, eigenbasis(A)) < 1e-10, rank


# By division, and on several threads ---------------------------------------------------------------------------------


def many_blocks() -> BlockDiagonal:
    sizes = {"w0": (2, 101), "w1": (3, 102), "w2": (120, 2)}
    layouts = {name: Layout({name: "o i -> o i"}, {name: size}) for name, size in sizes.items()}
    return BlockDiagonal({n: Kronecker(psd(o, o), psd(i, i)) for n, (o, i) in sizes.items()}, layouts, Space(sizes))


@pytest.mark.usefixtures("two_threads")
def test_blocks_are_decomposed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results in order, from threads of their own; errors say what they are about."""
    v, seen, plain = normal(many_blocks().shape[0]), set(), torch.linalg.eigh
    forms = (lambda K: K.inverse(0.1) @ v, lambda K: K.shift(0.1).logdet, lambda K: K.power(-0.5, 0.1) @ v)
    torch.set_num_threads(1)
    expected = [form(many_blocks()) for form in forms]
    torch.set_num_threads(2)
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: seen.add(threading.get_ident()) or plain(M))
    for form, value in zip(forms, expected):
        torch.testing.assert_close(form(many_blocks()), value)
    assert seen
    assert threading.get_ident() not in seen
    matrices = [(x := normal(m, 300, seed=m)).T @ x for m in (40, 600, 90)]
    found = side_by_side(lambda M: eigh(M, semidefinite=True), matrices, lambda _: 1e8)
    for M, (values, Q) in zip(matrices, found, strict=True):
        check(M, values, Q)
    broken = many_blocks().blocks
    assert isinstance(broken["w1"], Kronecker)
    assert isinstance(broken["w1"].A, Dense)
    broken["w1"].A.matrix[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r'block "w1".*factor A.*1 entries that are NaN'):
        BlockDiagonal(broken, many_blocks().layouts, many_blocks().space).inverse(0.1)
