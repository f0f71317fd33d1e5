"""Eigendecompositions: of every rank, that fail at first, on several threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import BlockDiagonal, Dense, Kronecker, Layout, Space, eigh
from curvlinops_plus.linalg.numerics import side_by_side
from test.helpers import seeded
from test.linalg.cases import F64, normal, psd

F32 = torch.float32
D = 400


def rows(kind: str, m: int) -> Tensor:  # -> [m, D]
    """Rows whose Gram matrix is of rank `m` at most."""
    X = normal(m, D)
    if kind == "decaying":
        return X * torch.logspace(0, -6, D, dtype=F64) @ torch.linalg.qr(normal(D, D, seed=1))[0]
    if kind == "of all sizes":
        return X * torch.logspace(0, -12, D, dtype=F64)[torch.randperm(D, generator=seeded())]
    if kind == "with a mean":
        return X / 10 + 10
    if kind == "with dead units":
        X[:, ::2] = 0
    if kind == "repeated":
        X[1:] = X[:1]
    if kind == "clustered":
        return torch.linalg.qr(X.T)[0].T
    return X


KINDS = [
    "normal",
    "decaying",
    "of all sizes",
    "with a mean",
    "with dead units",
    "repeated",
    "clustered",
]


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
    torch.testing.assert_close(
        values.double(), torch.linalg.eigvalsh(M.double()), rtol=0, atol=error
    )


def test_the_check_can_fail() -> None:
    values, Q = torch.linalg.eigh(M := psd(50, 50))
    check(M, values, Q)
    for wrong in (
        (values * (1 + 1e-12), Q),
        (values, Q * (1 + 1e-13)),
        (values.flip(0), Q.flip(1)),
    ):
        with pytest.raises(AssertionError):
            check(M, *wrong)


def test_a_low_rank_leaves_a_small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead units are a low rank, too."""
    seen, plain = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: seen.append(M.shape[-1]) or plain(M))
    for kind, m, size in (
        ("normal", 30, 30),
        ("normal", 300, D),
        ("with dead units", 150, 150),
        ("repeated", 50, 1),
    ):
        X = rows(kind, m)
        values, _ = eigh(X.T @ X, semidefinite=True)
        assert seen == [size], kind
        assert int((values == 0).sum()) >= D - size  # exactly
        seen.clear()
    X = rows("decaying", 600)
    for rtol in (1e-3, 1e-1):  # directions that need not be told apart
        _, Q = eigh(X.T @ X, semidefinite=True, rtol=rtol)
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


def test_what_has_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, derivatives, half precision, nothing at all, and what fails in single precision."""
    X = normal(2, 20, D)
    batch = X.mT @ X
    values, Q = eigh(batch, semidefinite=True)
    torch.testing.assert_close(Q * values[:, None] @ Q.mT, batch)
    M = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(eigh(M, semidefinite=True)[0][-1], M)
    assert grad.norm() == pytest.approx(1)
    assert eigh(batch[0].bfloat16(), semidefinite=True)[1].dtype == torch.bfloat16
    check(torch.zeros(D, D), *eigh(torch.zeros(D, D), semidefinite=True))
    assert eigh(torch.full((3, 3), 3e38))[0].shape == (3,)  # the sum of its entries overflows
    plain, M = torch.linalg.eigh, psd(4, 4).to(F32)
    for failing in ([F32], [F32, F64]):
        for result in (torch.nan, None):

            def fails(
                M: Tensor, failing: list = failing, result: float | None = result
            ) -> tuple[Tensor, Tensor]:
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
                    NumericsError,
                    match=r"of factor A \[4, 4\] failed in every precision \(torch.float3",
                ):
                    eigh(M, "factor A")


# On several threads
# ---------------------------------------------------------------------------------


def many_blocks() -> BlockDiagonal:
    sizes = {"w0": (2, 101), "w1": (3, 102), "w2": (120, 2)}
    layouts = {name: Layout({name: "o i -> o i"}, {name: size}) for name, size in sizes.items()}
    return BlockDiagonal(
        {n: Kronecker(psd(o, o), psd(i, i)) for n, (o, i) in sizes.items()}, layouts, Space(sizes)
    )


@pytest.mark.usefixtures("two_threads")
def test_blocks_are_decomposed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results in order, from threads of their own; errors say what they are about."""
    v, seen, plain = normal(many_blocks().shape[0]), set(), torch.linalg.eigh
    forms = (
        lambda K: K.inverse(0.1) @ v,
        lambda K: K.shift(0.1).logdet,
        lambda K: K.power(-0.5, 0.1) @ v,
    )
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
    with pytest.raises(NumericsError, match=r'block "w1".*1 entries that are NaN'):
        BlockDiagonal(broken, many_blocks().layouts, many_blocks().space).inverse(0.1)
