"""Extreme eigenvalues, norms and condition numbers against dense decompositions; residuals and
warnings are true.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.errors import CurvatureWarning, NumericsError
from curvlinops_plus.estimate import (
    approximate_boundaries,
    approximate_boundaries_abs,
    condition_number,
    lanczos_approximate_spectrum,
    logdet,
    spectral_norm,
    top_eigenpairs,
)
from curvlinops_plus.linalg import Dense, Structure
from test.helpers import F64, Counted, normal, seeded, with_eigenvalues

SPECTRA = {
    "flat": torch.linspace(1, 2, 100, dtype=F64),
    "indefinite": torch.linspace(-3, 2, 100, dtype=F64),
    "decaying": torch.arange(1, 61) ** -1.5,
    "multiple": [4.0] * 3 + [3.0] * 2 + [0.0] * 100 + [-1.0] * 3,
    "low rank": [5.0, 2.0] + [0.0] * 98,
    "zero": [0.0] * 10,
    "one": [7.0],
}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 6])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_top_eigenpairs(spectrum: str, k: int, largest: bool) -> None:
    exact = torch.as_tensor(SPECTRA[spectrum], dtype=F64).sort(descending=largest).values
    A, k = with_eigenvalues(SPECTRA[spectrum]), min(k, len(exact))
    values, X, residuals = top_eigenpairs(A, k, largest, generator=seeded())
    torch.testing.assert_close(values, exact[:k], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(X.T @ X, torch.eye(k, dtype=F64), rtol=0, atol=1e-10)
    true = torch.linalg.vector_norm(A @ X - X * values, dim=0)
    torch.testing.assert_close(residuals, true, rtol=1e-3, atol=1e-12)
    assert bool((true <= 2e-8 * A.norm().clamp(min=1e-6)).all())


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_any_small_matrix(values: list[int], seed: int, data: Any) -> None:
    """All multiplicities, every number of eigenpairs up to all of them."""
    k = data.draw(st.integers(1, len(values)))
    A = with_eigenvalues(values, seed)
    found = top_eigenpairs(A, k, generator=seeded(seed))
    expected = torch.tensor(sorted(values, reverse=True)[:k], dtype=F64)
    torch.testing.assert_close(found.eigenvalues, expected, rtol=0, atol=1e-7)
    norm = spectral_norm(A, generator=seeded(seed))
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(A, 2), rtol=1e-7, atol=1e-7)


def test_printed_pairs_have_numbers_and_no_vectors() -> None:
    shown = repr(top_eigenpairs(torch.diag(torch.arange(50.0)), 2, generator=seeded()))
    assert shown.startswith("Eigenpairs(eigenvalues=tensor([49., 48.]), eigenvectors [50, 2], resi")
    assert len(shown) < 200


def test_eigenvalues_near_zero() -> None:
    """Their tolerance is relative to the largest one."""
    A = with_eigenvalues(torch.arange(1, 201) ** -2.0)
    found = top_eigenpairs(A, 1, largest=False, tol=1e-4, generator=seeded())
    assert 0 < found.eigenvalues < 1e-4
    assert found.residuals < 2e-4


@pytest.mark.parametrize("known", [None, (None, None), (1.5, None), (None, 2.5), (0.0, 10.0)])
def test_boundaries(known: tuple | None) -> None:
    A = with_eigenvalues([-2.0, -1.0, 3.0, 4.0, 5.0])
    for function, ends in ((approximate_boundaries, (-2, 5)), (approximate_boundaries_abs, (1, 5))):
        found = function(A, tol=0, boundaries=known, generator=seeded())
        given = known or (None, None)
        assert found == pytest.approx(
            [end if own is None else own for own, end in zip(given, ends)], rel=1e-9
        )
        assert {type(end) for end in found} == {float}


def test_a_loose_tolerance() -> None:
    """It saves products, is told by the error, and is no licence for eigenvalues from inside of the
    spectrum.
    """
    flat = with_eigenvalues(SPECTRA["flat"])
    top_eigenpairs(rough := Counted(flat), tol=1e-2, generator=seeded())
    top_eigenpairs(fine := Counted(flat), tol=1e-10, generator=seeded())
    assert len(rough.seen) < len(fine.seen) / 2 < 150
    for shape in ((200, 200), (70, 300)):
        A = normal(*shape)
        norm, error = spectral_norm(A, tol=0.1, generator=seeded(), return_error=True)
        assert norm - 1e-6 <= torch.linalg.matrix_norm(A, 2) <= norm + error + 1e-6
        assert error < 1e-3 * norm
    A = torch.diag(torch.tensor([-2.0, -1.0, 3.0, 4.0, 5.0], dtype=F64))
    for seed in range(50):
        assert approximate_boundaries_abs(A, generator=seeded(seed)) == pytest.approx((1, 5))


def test_what_is_not_reached_is_said() -> None:
    A = with_eigenvalues(torch.linspace(1, 1.001, 400))
    with pytest.raises(NumericsError, match=r"The 2 largest eigenvalues did not converge"):
        top_eigenpairs(A, 2, tol=1e-12, max_iter=1, generator=seeded())
    spread = with_eigenvalues(torch.logspace(-8, 0, 200))
    with pytest.warns(
        CurvatureWarning, match=r"did not converge in 30 steps; it is at least what is returned"
    ):
        assert 10 < condition_number(spread, max_iter=30, generator=seeded()) < 1e8


@pytest.mark.parametrize("shape", [(20, 20), (30, 7), (7, 30), (1, 5), (1, 1)])
def test_spectral_norm_of_any_shape(shape: tuple[int, int]) -> None:
    A = normal(*shape)
    norm, error = spectral_norm(A, generator=seeded(), return_error=True)
    exact = torch.linalg.matrix_norm(A, 2)
    torch.testing.assert_close(norm, exact, rtol=1e-9, atol=0)
    assert norm <= exact * (1 + 1e-12) <= norm + error + 1e-9
    assert error < 1e-6 * exact
    assert (
        spectral_norm(-with_eigenvalues([3.0, 1.0, 2.0])).round(decimals=9) == 3
    )  # a symmetric one: of both signs


@pytest.mark.parametrize(
    "A",
    [
        with_eigenvalues(torch.logspace(-2, 0, 100)),
        with_eigenvalues([-10.0, 0.001, 3.0, 4.0, 5.0, -0.5]),
        Dense(with_eigenvalues(torch.linspace(1, 5, 50)), Structure.PSD),
        normal(40, 12),
        normal(12, 40),
        torch.tensor([[1.0, 0.5], [0.0, 0.1]]),
        torch.tensor([[2.0]]),
    ],
)
def test_condition_number(A: Any) -> None:
    value, error = condition_number(A, generator=seeded(), return_error=True)
    exact = torch.linalg.cond(A.to_dense())
    torch.testing.assert_close(value, exact, rtol=1e-3, atol=0)
    assert value * (1 - 1e-5) <= exact <= (value + error) * (1 + 1e-5)


@pytest.mark.parametrize("tol", [1e-2, 1e-5, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_products_that_are_rounded(seed: int, tol: float) -> None:
    """No residual gets smaller than what rounding leaves of a product, and it doesn't have to: more
    steps make the smallest singular value too small.
    """
    half = with_eigenvalues(torch.linspace(1, 10, 40)).bfloat16()
    rounded = Counted(half)
    value = condition_number(rounded, generator=seeded(seed), tol=tol)  # without a warning
    exact = torch.linalg.cond(half.double())
    torch.testing.assert_close(value.double(), exact, rtol=0.15, atol=0)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_singular_matrices_have_an_infinite_condition_number(dtype: torch.dtype) -> None:
    for A in (
        with_eigenvalues([1.0, 2.0, 0.0, 3.0] * 10).to(dtype),
        torch.zeros(4, 4, dtype=dtype),
        torch.ones(3, 5, dtype=dtype),
        torch.diag(torch.tensor([1.0, 0.0], dtype=dtype)),
    ):
        assert condition_number(A, generator=seeded(), return_error=True) == (torch.inf, 0)


def test_matrices_that_are_not_symmetric() -> None:
    """Or random; what says that it is symmetric is believed, as of a network in float32 it is only
    up to rounding.
    """
    A = normal(30, 30)
    for estimate in (
        top_eigenpairs,
        logdet,
        approximate_boundaries,
        lambda M: lanczos_approximate_spectrum(M, 5),
    ):
        for M in (A, Counted(torch.eye(30, dtype=F64), noise=1e-3)):
            with pytest.raises(
                ValueError, match=r"A is not symmetric: .*\(A \+ A.T\) / 2.*such as dropout"
            ):
                estimate(M)
    exact, noise = (
        with_eigenvalues(torch.logspace(-4, 0, 300)),
        normal(300, 300, seed=1),
    )
    said = Dense((exact + 5e-3 * noise / 300**0.5).float(), Structure.SYMMETRIC)
    found = top_eigenpairs(said, 3, generator=seeded()).eigenvalues
    assert (found - torch.linalg.eigvalsh(exact).flip(0)[:3]).abs().max() < 1e-2
