"""Extreme eigenvalues, norms and condition numbers against dense decompositions; residuals and warnings are true."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from helpers import F64, seeded, with_eigenvalues
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate import logdet
from curvlinops_plus.estimate.boundaries import approximate_boundaries
from curvlinops_plus.estimate.columns import inner, orthonormal
from curvlinops_plus.estimate.eigen import (
    condition_number,
    spectral_norm,
    top_eigenpairs,
)
from curvlinops_plus.estimate.lanczos import lanczos
from curvlinops_plus.estimate.matrix import as_matrix
from curvlinops_plus.estimate.spectrum import lanczos_approximate_spectrum
from curvlinops_plus.linalg import Dense, Diagonal, Structure

SPECTRA = {
    "flat": torch.linspace(1, 2, 100, dtype=F64),
    "indefinite": torch.linspace(-3, 2, 100, dtype=F64),
    "decaying": torch.arange(1, 61) ** -1.5,
    "multiple": [4.0] * 3 + [3.0] * 2 + [0.0] * 100 + [-1.0] * 3,
    "low rank": [5.0, 2.0] + [0.0] * 98,
    "identity": [1.0] * 50,
    "zero": [0.0] * 10,
    "small": [3.0, 1.0, -2.0],
    "one": [7.0],
}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_top_eigenpairs(spectrum: str, k: int, largest: bool) -> None:
    exact = torch.as_tensor(SPECTRA[spectrum], dtype=F64).sort(descending=largest).values
    A, k = with_eigenvalues(SPECTRA[spectrum]), min(k, len(exact))
    values, X, residuals, converged = top_eigenpairs(A, k, largest, generator=seeded())
    assert converged
    torch.testing.assert_close(values, exact[:k], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(X.T @ X, torch.eye(k, dtype=F64), rtol=0, atol=1e-10)
    true = torch.linalg.vector_norm(A @ X - X * values, dim=0)
    torch.testing.assert_close(residuals, true, rtol=1e-3, atol=1e-12)
    assert bool((true <= 2e-8 * A.norm().clamp(min=1e-6)).all())


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=12), seed=st.integers(0, 10**6), data=st.data())
def test_any_small_matrix(values: list[int], seed: int, data: Any) -> None:
    """All multiplicities, every number of eigenpairs up to all of them."""
    k = data.draw(st.integers(1, len(values)))
    A = with_eigenvalues(values, seed)
    found = top_eigenpairs(A, k, generator=seeded(seed))
    expected = torch.tensor(sorted(values, reverse=True)[:k], dtype=F64)
    torch.testing.assert_close(found.eigenvalues, expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(
        spectral_norm(A, generator=seeded(seed)), torch.linalg.matrix_norm(A, 2), rtol=1e-7, atol=1e-7
    )


def test_long_columns_in_single_precision() -> None:
    """A hundred thousand rows: orthonormal to six digits, where plain float32 has four."""
    Y = torch.randn(100_000, 4, generator=seeded())
    Q, R = orthonormal(Y)
    eye = torch.eye(4, dtype=F64)
    torch.testing.assert_close(Q.double().T @ Q.double(), eye, rtol=0, atol=2e-6)
    torch.testing.assert_close(Q @ R, Y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inner(Y, Q).double(), Y.double().T @ Q.double(), rtol=1e-6, atol=1e-4)
    diagonal = torch.linspace(0, 1, 100_000)
    diagonal[7], diagonal[50_000] = 6, 5
    values, X, _, _ = top_eigenpairs(Diagonal(diagonal), 2, generator=seeded())
    torch.testing.assert_close(values, torch.tensor([6.0, 5.0]), rtol=2e-6, atol=0)
    torch.testing.assert_close(X.double().T @ X.double(), eye[:2, :2], rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(20, 20), (30, 7), (7, 30), (1, 5), (5, 1), (1, 1)])
def test_spectral_norm_of_any_shape(shape: tuple[int, int]) -> None:
    A = torch.randn(*shape, dtype=F64, generator=seeded())
    norm, error = spectral_norm(A, generator=seeded(), return_error=True)
    exact = torch.linalg.matrix_norm(A, 2)
    torch.testing.assert_close(norm, exact, rtol=1e-9, atol=0)
    assert norm <= exact * (1 + 1e-12) <= norm + error + 1e-9
    assert spectral_norm(-with_eigenvalues([3.0, 1.0, 2.0])).round(decimals=9) == 3  # a symmetric one: of both signs


@pytest.mark.parametrize(
    ("A", "rtol"),
    [
        (with_eigenvalues(torch.logspace(-2, 0, 100)), 1e-3),
        (with_eigenvalues([-10.0, 0.001, 3.0, 4.0, 5.0, -0.5]), 1e-3),
        (Dense(with_eigenvalues(torch.linspace(1, 5, 50)), Structure.PSD), 1e-3),
        (torch.randn(40, 12, dtype=F64, generator=seeded()), 1e-3),
        (torch.randn(12, 40, dtype=F64, generator=seeded()), 1e-3),
        (torch.tensor([[1.0, 0.5], [0.0, 0.1]]), 1e-3),
        (torch.tensor([[2.0]]), 1e-6),
    ],
)
def test_condition_number(A: Any, rtol: float) -> None:
    dense = A.to_dense()
    value, error = condition_number(A, generator=seeded(), return_error=True)
    exact = torch.linalg.cond(dense)
    torch.testing.assert_close(value, exact, rtol=rtol, atol=0)
    assert value * (1 - 1e-5) <= exact <= (value + error) * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_singular_matrices_have_an_infinite_condition_number(dtype: torch.dtype) -> None:
    for A in (
        with_eigenvalues([1.0, 2.0, 0.0, 3.0] * 10).to(dtype),
        torch.zeros(4, 4, dtype=dtype),
        torch.ones(3, 5, dtype=dtype),
        torch.diag(torch.tensor([1.0, 0.0], dtype=dtype)),
    ):
        value, error = condition_number(A, generator=seeded(), return_error=True)
        assert value == torch.inf
        assert error == 0


@pytest.mark.parametrize("k", [0, 4])
def test_numbers_of_eigenpairs(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k \({k}\) must be between 1 and A's size \(3\)"):
        top_eigenpairs(torch.eye(3), k)
    with pytest.raises(ValueError, match=r"max_iter \(0\) must be at least 1"):
        top_eigenpairs(torch.eye(3), max_iter=0)


def test_matrices_that_are_not_symmetric() -> None:
    A = torch.randn(30, 30, dtype=F64, generator=seeded())
    with pytest.raises(
        ValueError, match=r"Tensor\(30 x 30, .*is not symmetric.*take `A.T @ A` or.*neither rounding.*nor randomness"
    ):
        top_eigenpairs(A, 2)

    class Noisy:
        shape, dtype, device = (30, 30), F64, torch.device("cpu")

        def __matmul__(self, X: Tensor) -> Tensor:
            return X + 1e-3 * torch.randn(X.shape, dtype=F64, generator=noise)

    noise = seeded()
    with pytest.raises(
        ValueError,
        match=r"Its products are not reproducible: two with the same vector differ by .*Look for dropout, a shuffled",
    ):
        top_eigenpairs(Noisy(), 2)
    for estimate in (logdet, lambda A: lanczos_approximate_spectrum(A, 5, boundaries=(0, 2))):
        with pytest.raises(ValueError, match="Its products are not reproducible"):
            estimate(Noisy())


NOISE = {"dense": torch.randn(300, 300, dtype=F64, generator=seeded(1)) / 300**0.5}
NOISE["low rank"] = torch.outer(*torch.linalg.qr(NOISE["dense"])[0][:, :2].T)


@pytest.mark.parametrize(("noise", "size"), [("dense", 5e-3), ("dense", 3e-2), ("low rank", 3e-2)])
def test_asymmetry_that_may_be_rounding(noise: str, size: float) -> None:
    """Products of a float32 model in which terms cancel: a warning says how accurate results are, and they are."""
    exact = with_eigenvalues(torch.logspace(-4, 0, 300))
    A = (exact + size * NOISE[noise]).float()
    message = r"is symmetric only up to .e-0., relative to .*counts as rounding.*that accurate.*compute in float64"
    for estimate in (
        lambda: top_eigenpairs(A, 3, generator=seeded()),
        lambda: spectral_norm(Dense(A, Structure.SYMMETRIC), generator=seeded()),
        lambda: approximate_boundaries(A, generator=seeded()),
    ):
        with pytest.warns(CurvatureWarning, match=message) as caught:
            found = estimate()
        said = max(float(re.findall(r"up to (\de-\d\d), relative", str(w.message))[0]) for w in caught)
        assert size / 100 < said < 2 * size
        assert not any("did not converge" in str(w.message) for w in caught)  # it stops where rounding is
        if isinstance(found, tuple) and len(found) == 2:
            assert abs(found[1] - 1) < 2 * said + 1e-2
        elif isinstance(found, Tensor):
            assert abs(found - 1) < 2 * said
        else:
            largest = torch.linalg.eigvalsh(exact).flip(0)[:3]
            assert (found.eigenvalues - largest).abs().max() < 2 * said
            assert found.residuals.max() < 2 * size


def test_more_products_are_spent_only_where_asymmetry_is_seen() -> None:
    class Counted:
        shape, dtype, device = (300, 300), torch.float32, torch.device("cpu")

        def __init__(self, matrix: Tensor) -> None:
            self.matrix, self.products = matrix.float(), 0

        def __matmul__(self, X: Tensor) -> Tensor:
            self.products += X.shape[1]
            return self.matrix @ X

    clean = with_eigenvalues(torch.logspace(-4, 0, 300))
    V = torch.eye(300)[:, :4]
    for noise, expected in ((0.0, 20), (0.02, 22)):
        A = Counted(clean + noise * NOISE["dense"])
        M = as_matrix(A)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lanczos(M, V, 5, reorthogonalize=True)
        assert (A.products, len(caught)) == (expected, int(noise > 0))
