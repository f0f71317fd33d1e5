"""Gram products and decompositions, also of bad input."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import Dense, Kronecker, cholesky_inverse, eigh, gram, numerics, psd_clip
from curvlinops_plus.linalg.gram_sum import (
    GramSum,
    PackedGram,
)

from .cases import F64, normal, psd

F32 = torch.float32


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize(("M", "d"), [(3, 2), (0, 3), (300, 129), (200, 300), (10, 300)])
def test_gram(M: int, d: int, dtype: torch.dtype) -> None:
    rows = normal(M, d).to(dtype)
    expected = rows.double().T @ rows.double()
    tolerance: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12} if dtype == F64 else {"rtol": 1e-4, "atol": 1e-4}
    for memory in (rows, rows.T.contiguous().T, torch.cat([rows, rows], dim=1)[:, :d]):
        before = memory.clone()
        G = gram(memory)
        assert G.dtype == dtype
        torch.testing.assert_close(G.double(), expected, **tolerance)
        assert torch.equal(memory, before)


@settings(max_examples=60, deadline=None)
@given(
    d=st.sampled_from([1, 3, 130]),
    numbers=st.lists(st.integers(0, 400) | st.integers(0, 1) | st.integers(30, 63), min_size=1, max_size=8),
    ones=st.booleans(),
    dtype=st.sampled_from([F64, F32]),
)
def test_sums_of_gram_matrices(d: int, numbers: list[int], ones: bool, dtype: torch.dtype) -> None:
    """However rows come in pieces, nobody's tensor is kept, and autocast around the end changes nothing."""
    total, seen = GramSum(ones), []
    for seed, M in enumerate(numbers):
        rows = normal(M, d, seed=seed).to(dtype)
        seen.append(torch.cat([rows, rows.new_ones(M, int(ones))], 1).double())
        total.add(rows)
        rows.fill_(torch.nan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = total.value()
    expected = torch.cat(seen)
    assert value.dtype == dtype
    torch.testing.assert_close(
        value.double(),
        expected.T @ expected,
        rtol=1e-12 if dtype == F64 else 1e-4,
        atol=1e-10 if dtype == F64 else 1e-3,
    )


def test_rows_that_wait_count_once() -> None:
    for d, M in ((3, 1), (200, 50)):
        total, pieces = GramSum(ones=False), [normal(M, d, seed=seed) for seed in range(9)]
        for rows in pieces:
            total.add(rows)
        torch.testing.assert_close(total.value(), torch.cat(pieces).T @ torch.cat(pieces))


@pytest.mark.parametrize("refer", [False, True])
@pytest.mark.parametrize("M", [1, 3, 40, 300])
@pytest.mark.parametrize("d", [3, 130])
@pytest.mark.parametrize("entry", [torch.nan, torch.inf])
def test_witnesses_of_a_gram_sum_show_entries_that_are_not_finite(d: int, M: int, refer: bool, entry: float) -> None:
    for bad in (False, True):
        total, merged = GramSum(ones=True, refer=refer), GramSum(ones=True)
        for rows in (normal(M, d, seed=1), normal(M, d, seed=2)):
            rows[M // 2, -1] = entry if bad else 0
            total.add(rows)
        merged.merge(total)
        for one in (total, merged):
            assert any(not t.isfinite().all() for t in one.witnesses()) == bad


@dataclass(frozen=True)
class Tridiagonal:
    """A matrix of its diagonal and one number beside it."""

    columns: int
    sign: float = 1.0

    def unpack(self, values: Tensor) -> Tensor:
        beside = self.sign * values[-1] * torch.ones(self.columns - 1).to(values)
        return torch.diag(values[:-1]) + torch.diag(beside, 1) + torch.diag(beside, -1)

    def row_sum(self, total: Tensor) -> Tensor:
        return self.sign * total


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("d", [3, 130])
@pytest.mark.parametrize("kinds", ["p", "pp", "ppr", "rpp", "pmp", "prpm", "mrp"])
def test_sums_of_packed_matrices(d: int, ones: bool, kinds: str) -> None:
    """Beside rows, through moving averages and merging, with another form (m), and after its value was read."""
    total, expected = GramSum(ones), torch.zeros(d + ones, d + ones, dtype=F64)
    forms = Tridiagonal(d), Tridiagonal(d, -1.0)
    for step, kind in enumerate(kinds):
        rows = normal(5, d, seed=step)
        batch, M = GramSum(ones, refer=True), rows.T @ rows
        if kind == "r":
            batch.add(rows)
        else:
            form, values = forms[kind == "m"], normal(d + 1, seed=step)
            batch.add_packed(PackedGram(values, form, form.sign * rows.sum(0) if ones else None, 5.0))
            M = form.unpack(values)
        if ones:
            side = rows.sum(0)[:, None]
            M = torch.cat([torch.cat([M, side], 1), torch.cat([side.T, torch.tensor([[5.0]], dtype=F64)], 1)])
        assert batch.shape == M.shape
        total.decay(0.9)
        total.merge(batch)
        expected = 0.9 * expected + M
        assert all(t.isfinite().all() for t in total.witnesses())
    again = GramSum(ones)
    again.merge(total)
    torch.testing.assert_close(GramSum(ones, again.value()).value(), expected, rtol=1e-12, atol=1e-10)
    resumed = GramSum.from_state_dict(total.state_dict(), expected.device, {repr(f): f for f in forms}.__getitem__)
    torch.testing.assert_close(total.value(), expected, rtol=1e-12, atol=1e-10)
    assert torch.equal(total.value(), resumed.value())  # reading has changed nothing


def test_rows_that_are_referred_to_must_stay() -> None:
    rows = normal(2, 3)
    total = GramSum(ones=False, refer=True)
    total.add(rows)
    assert not total.changed
    rows.mul_(2)
    assert total.changed


def test_gram_of_half_precision_and_gradients() -> None:
    for half in (torch.float16, torch.bfloat16):
        rows = (100 * torch.ones(1000, 2)).to(half)
        assert gram(rows).dtype == F32
        assert gram(rows)[0, 0] == 1e7  # overflows in float16
    rows = normal(200, 130).requires_grad_()
    (grad,) = torch.autograd.grad(gram(rows).sum(), rows)
    torch.testing.assert_close(grad, 2 * rows.detach().sum(1, keepdim=True).expand_as(rows))


def test_eigh_is_an_eigendecomposition() -> None:
    for M in (psd(5, 5), psd(3, 4, 4)):
        values, Q = eigh(M)
        torch.testing.assert_close(Q * values[..., None, :] @ Q.mT, M)
        assert bool((values.diff() >= 0).all())
    assert eigh(psd(3, 3).bfloat16())[0].dtype == torch.bfloat16
    empty = eigh(torch.empty(0, 0))
    assert empty[0].shape == (0,)


class Failing:
    """`torch.linalg.eigh` that does not converge in float32, or returns NaN, or never works."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], result: str) -> None:
        self.dtypes, self.result, self.seen, self.eigh = dtypes, result, [], torch.linalg.eigh

    def __call__(self, M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(M.dtype)
        if M.dtype in self.dtypes:
            if self.result == "raise":
                raise RuntimeError("linalg.eigh: failed to converge")  # LinAlgError is one
            return torch.full(M.shape[:-1], torch.nan), torch.full(M.shape, torch.nan)
        return self.eigh(M)


@pytest.mark.parametrize("result", ["raise", "nan"])
def test_eigh_retries_in_float64(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing((F32,), result)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    M = psd(4, 4).to(F32)
    values, Q = eigh(M)
    assert failing.seen == [F32, F64]
    assert values.dtype == Q.dtype == F32
    torch.testing.assert_close(Q * values @ Q.T, M)


def test_eigh_says_what_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", Failing((F32, F64), "raise"))
    with pytest.raises(
        NumericsError,
        match=r"of factor A \[4, 4\] failed in every precision \(torch.float32 on cpu: .*converge; torch.float64",
    ):
        eigh(psd(4, 4).to(F32), "factor A")


def test_eigh_of_a_layer_with_dead_units() -> None:
    """Rank 16 with half of the units dead: PyTorch's float32 `eigh` does not converge on some of these."""
    rows = torch.randn(16, 400, generator=torch.Generator().manual_seed(0))
    rows[:, ::2] = 0
    M = gram(rows)
    values, Q = eigh(M)
    assert int((psd_clip(values) > 0).sum()) == 16
    torch.testing.assert_close(Q.T @ Q, torch.eye(400), atol=1e-4, rtol=0)
    torch.testing.assert_close(Q * values @ Q.T, M, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", [eigh, cholesky_inverse])
def test_matrices_that_are_not_finite(function, bad: float) -> None:
    M = torch.eye(3)
    M[1, 2] = bad
    with pytest.raises(
        NumericsError, match=r"the matrix \[3, 3\] has 1 entries that are NaN or infinite.*half precision"
    ):
        function(M)


def test_cholesky_inverse() -> None:
    M = psd(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(cholesky_inverse(M, 0.1), torch.linalg.inv(M + 0.1 * torch.eye(4)))
    batch, damping = psd(2, 3, 3), torch.tensor([0.1, 0.2], dtype=F64)
    expected = torch.linalg.inv(batch + damping[:, None, None] * torch.eye(3))
    torch.testing.assert_close(cholesky_inverse(batch, damping), expected)
    assert cholesky_inverse(torch.eye(2, dtype=torch.float16)).dtype == torch.float16


def test_cholesky_fallback_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cholesky = torch.linalg.cholesky_ex

    def fails_in_float32(M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        L, info = cholesky(M)
        return L, info + int(M.dtype == F32)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails_in_float32)
    M = psd(3, 3).to(F32)
    with pytest.warns(
        CurvatureWarning, match="Cholesky decomposition of the matrix with damping 1.0e-01 failed in float32"
    ):
        inverse = cholesky_inverse(M, 0.1)
    torch.testing.assert_close(inverse, torch.linalg.inv(M + 0.1 * torch.eye(3)))
    with pytest.raises(SingularMatrixError, match=r"with damping 1.0e-01 is not positive definite in torch.float32"):
        cholesky_inverse(M, 0.1, retry_double_precision=False)


def test_norm_of_a_product_of_which_one_factor_is_tiny() -> None:
    G, A = (s * normal(4, 4).float() for s in (1e-30, 1e25))
    found = Kronecker(Dense(G), Dense(A)).frobenius_norm
    torch.testing.assert_close(found.double(), G.double().norm() * A.double().norm(), rtol=1e-5, atol=0)


def test_psd_clip() -> None:
    values = torch.tensor([[-1e-3, 1e-9, 1.0], [0.0, 0.0, 0.0], [-3.0, -2.0, -1.0]])
    assert psd_clip(values).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(psd_clip(values[0], rtol=0.0), torch.tensor([0.0, 1e-9, 1.0]))
    assert psd_clip(torch.empty(0)).shape == (0,)


def test_standard_normal() -> None:
    like = torch.empty((), dtype=F64)
    draws = numerics.standard_normal(3, 4000, torch.Generator().manual_seed(0), like)
    assert draws.shape == (4000, 3)
    assert torch.equal(draws[:, :2], numerics.standard_normal(2, 4000, torch.Generator().manual_seed(0), like))
    assert abs(draws.mean()) < 4 / 12000**0.5
    assert abs(draws.square().mean() - 1) < 4 * (2 / 12000) ** 0.5
    torch.manual_seed(0)
    first = numerics.standard_normal(1, 3, None, like)
    torch.manual_seed(0)
    assert torch.equal(first, numerics.standard_normal(1, 3, None, like))
