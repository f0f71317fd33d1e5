"""Spectral densities against the exact spectrum smoothed in the same way; log-determinants."""

from __future__ import annotations

import inspect
from math import log, pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate import (
    LanczosApproximateLogSpectrumCached,
    LanczosApproximateSpectrumCached,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    logdet,
    matrix,
)
from curvlinops_plus.estimate.lanczos import lanczos, quadrature
from curvlinops_plus.linalg import Dense, Structure
from test.cases import close
from test.helpers import F64, Counted, normal, seeded, with_eigenvalues

BULK_AND_PEAKS = torch.cat([torch.linspace(0.01, 0.5, 150), torch.tensor([2.0, 3.0, 5.0])]).double()
INDEFINITE = torch.cat([torch.linspace(-1, 1, 150), torch.tensor([-2.0, 4.0])]).double()


def smoothed(
    values: Tensor, ncv: int, kappa: float, margin: float, num_points: int
) -> tuple[Tensor, Tensor]:
    """The twin: one bump per eigenvalue."""
    low, high = float(values.min()), float(values.max())
    low, high = low - margin * (high - low), high + margin * (high - low)
    grid = torch.linspace(low, high, num_points, dtype=F64)
    sigma = (high - low) / (ncv - 1) / sqrt(8 * log(kappa))
    return grid, torch.exp(-(((grid[:, None] - values) / sigma) ** 2) / 2).mean(1) / (
        sigma * sqrt(2 * pi)
    )


def mass(grid: Tensor, density: Tensor) -> float:
    return float(torch.trapezoid(density.double(), grid.double()))


@pytest.mark.parametrize(
    ("values", "ncv", "kappa", "margin"),
    [(BULK_AND_PEAKS, 30, 3.0, 0.05), (INDEFINITE, 60, 1.5, 0.2)],
)
def test_density(values: Tensor, ncv: int, kappa: float, margin: float) -> None:
    boundaries = (values.min().item(), values.max().item())
    grid, density = lanczos_approximate_spectrum(
        with_eigenvalues(values), ncv, 500, 200, kappa, boundaries, margin, generator=seeded()
    )
    expected_grid, expected = smoothed(values, ncv, kappa, margin, 500)
    torch.testing.assert_close(grid, expected_grid)
    assert mass(grid, (density - expected).abs()) < 0.05  # 200 random vectors
    assert abs(mass(grid, density) - 1) < 0.02


@pytest.mark.parametrize(("values", "distance"), [(BULK_AND_PEAKS, 0.05), (INDEFINITE, 0.2)])
def test_log_density(values: Tensor, distance: float) -> None:
    """The density is that of |λ| + ε, on a grid of constant ratio; zeros in the middle are
    harder.
    """
    epsilon, ncv = 1e-2, 60
    boundaries = (values.abs().min().item(), values.abs().max().item())
    grid, density = lanczos_approximate_log_spectrum(
        with_eigenvalues(values),
        ncv,
        500,
        200,
        1.1,
        boundaries,
        epsilon=epsilon,
        generator=seeded(),
    )
    expected_grid, expected = smoothed((values.abs() + epsilon).log(), ncv, 1.1, 0.05, 500)
    torch.testing.assert_close(grid, expected_grid.exp())
    assert torch.trapezoid((density * grid - expected).abs(), grid.log()) < distance
    assert abs(mass(grid, density) - 1) < 0.02


@pytest.mark.parametrize(
    "A", [torch.eye(5), 3 * torch.eye(1), torch.zeros(4, 4), 1e-9 * torch.eye(3)]
)
def test_one_eigenvalue_only(A: Tensor) -> None:
    """The bump has room, and mass 1 at the right place."""
    value = A[0, 0].item()
    grid, density = lanczos_approximate_spectrum(A, 10, generator=seeded())
    assert abs(mass(grid, density) - 1) < 0.01
    assert abs(grid[density.argmax()] - value) < 0.01 * (value or 1.0)
    sigma = float(grid[-1] - grid[0]) / 9 / sqrt(8 * log(3))  # 10 bumps side by side, kappa = 3
    assert density.max().item() == pytest.approx(1 / (sigma * sqrt(2 * pi)), rel=1e-3)
    grid, density = lanczos_approximate_log_spectrum(A, 40, generator=seeded(), kappa=3.0)
    assert abs(mass(grid, density) - 1) < 0.01
    assert abs(grid[density.argmax()] - (value + 1e-5)) < 0.02 * (value + 1e-5)


def test_small_and_singular_matrices() -> None:
    grid, density = lanczos_approximate_spectrum(
        with_eigenvalues([1.0, 2.0, 3.0]), 50, num_repeats=100
    )
    assert abs(mass(grid, density) - 1) < 0.05
    A = with_eigenvalues([0.0] * 30 + [1.0] * 10)
    grid, density = lanczos_approximate_log_spectrum(
        A, 40, num_repeats=50, kappa=3.0, generator=seeded()
    )
    assert grid[0] < 1e-5
    assert abs(mass(grid[grid < 1e-2], density[grid < 1e-2]) - 0.75) < 0.1


@pytest.mark.parametrize(
    ("kind", "name", "direct"),
    [
        (LanczosApproximateSpectrumCached, "approximate_spectrum", lanczos_approximate_spectrum),
        (
            LanczosApproximateLogSpectrumCached,
            "approximate_log_spectrum",
            lanczos_approximate_log_spectrum,
        ),
    ],
)
def test_repeats_are_averaged_and_cached(kind: Any, name: str, direct: Any) -> None:
    A = Counted(with_eigenvalues(BULK_AND_PEAKS))
    approximate = getattr(kind(A, 12, (0.01, 5.0), generator=seeded()), name)
    assert sum(A.seen) == 2  # to look for symmetry
    grid, three = approximate(3)
    assert (sum(A.seen), grid.shape, three.shape) == (36 + 2, (1024,), (1024,))
    assert torch.equal(approximate(num_repeats=3, kappa=3.0)[1], three)
    assert not torch.equal(approximate(3, kappa=2.0)[1], three)
    one = approximate(1)[1]
    assert sum(A.seen) == 36 + 2
    assert approximate(4, num_points=10)[1].shape == (10,)
    assert sum(A.seen) == 48 + 2
    alone = getattr(kind(A, 12, (0.01, 5.0), generator=seeded()), name)(1)[1]
    torch.testing.assert_close(
        alone, one, rtol=1e-4, atol=1e-4
    )  # the first run does not know of the others
    found = direct(A, 12, num_repeats=2, kappa=3.0, generator=seeded())
    assert all(map(torch.equal, found, getattr(kind(A, 12, generator=seeded()), name)(2)))
    with torch.random.fork_rng():
        assert not torch.equal(direct(A, 10)[1], direct(A, 10)[1])  # fresh numbers by default


# Log-determinants
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["rademacher", "normal", "sphere"])
def test_logdet_is_unbiased_with_an_honest_error(distribution: str) -> None:
    A = with_eigenvalues(torch.logspace(-1, 1, 20).double() * 1.5)
    pairs = [
        logdet(A, 10, 20, distribution, generator=seeded(s), return_error=True) for s in range(40)
    ]
    values, errors = (torch.stack(part) for part in zip(*pairs))
    assert (values.mean() - A.logdet()).abs() < 4 * values.std() / 40**0.5
    assert 0.6 < errors.square().mean() / values.var() < 1.6


def test_exact_logdets() -> None:
    """Signs are exact for a diagonal matrix, once there are as many steps as distinct
    eigenvalues.
    """
    for A in (
        2 * torch.eye(9, dtype=F64),
        torch.diag(torch.logspace(-6, 0, 20, dtype=F64)),
        torch.tensor([[5.0]]),
    ):
        value, error = logdet(A, 2, 20, generator=seeded(), return_error=True)
        torch.testing.assert_close(value, A.logdet())
        assert error < 1e-5
    A = Dense(with_eigenvalues([0.0] * 20 + [1.0] * 20), Structure.PSD).shift(0.1)
    value, error = logdet(A, generator=seeded(), return_error=True)
    assert (value - A.logdet).abs() < 4 * error


@pytest.mark.parametrize("reorthogonalize", [True, False])
def test_quadrature(reorthogonalize: bool) -> None:
    """m steps are exact up to degree 2m - 1, no further, n steps for the logarithm; one vector does
    not see another.
    """
    A, V = (
        with_eigenvalues(torch.linspace(-1, 2, 30)),
        normal(30, 2, seed=1),
    )
    V = V / V.norm(dim=0)
    nodes, weights = quadrature(*lanczos(A.matmul, V, 4, reorthogonalize=reorthogonalize))
    for degree in range(9):
        exact = (V * (torch.linalg.matrix_power(A, degree) @ V)).sum(0)
        found = (weights * nodes**degree).sum(1)
        assert torch.allclose(found, exact, rtol=1e-10, atol=1e-10) == (degree <= 7), degree
    alone = quadrature(*lanczos(A.matmul, V[:, 1:], 4, reorthogonalize=reorthogonalize))[0]
    torch.testing.assert_close(alone, nodes[1:])
    for n in (1, 5, 30):
        A, V = (
            with_eigenvalues(torch.linspace(0.1, 1, n)),
            normal(n, 3, seed=1),
        )
        nodes, weights = quadrature(*lanczos(A.matmul, V, n, reorthogonalize=True))
        eigenvalues, Q = torch.linalg.eigh(A)
        expected = (V * (Q * eigenvalues.log() @ Q.T @ V)).sum(0)
        torch.testing.assert_close(V.square().sum(0) * (weights * nodes.log()).sum(1), expected)


def test_spaces_that_end_early() -> None:
    """A vector in an invariant subspace: nodes after its end have weight 0 and stay among the
    eigenvalues.
    """
    A = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64))
    V = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], dtype=F64)
    alpha, beta = lanczos(A.matmul, V, 4, reorthogonalize=True)
    nodes, weights = quadrature(alpha, beta)
    assert (beta == 0).any(1)[0]
    torch.testing.assert_close(nodes, torch.stack([torch.ones(4), torch.arange(1.0, 5.0)]).double())
    torch.testing.assert_close(weights.sum(1), torch.ones(2, dtype=F64))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_logdet_of_matrices_that_are_not_positive(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of singular ones -inf, never NaN; of indefinite ones an error."""
    for A in (
        with_eigenvalues([0.0] * 5 + [1.0, 2.0, 3.0] * 5),
        torch.zeros(3, 3),
        torch.diag(torch.tensor([1.0, 0.0])),
    ):
        for block_bytes in (2**27, 64):
            monkeypatch.setattr(matrix, "BLOCK_BYTES", block_bytes)
            value, error = logdet(A.to(dtype), generator=seeded(), return_error=True)
            assert value == -torch.inf
            assert torch.isnan(error)
    with pytest.raises(
        ValueError,
        match=r"has a negative eigenvalue, at most -.*expected a positive definite matrix",
    ):
        logdet(with_eigenvalues(torch.linspace(-1, 2, 30)).to(dtype), generator=seeded())


def test_too_few_steps() -> None:
    """A warning if the quadrature has not converged: few steps, or a zero that they don't reach."""
    A = with_eigenvalues(torch.logspace(-6, 0, 60))
    with pytest.warns(
        CurvatureWarning, match=r"has not converged: the last of 6 steps changed it.*more num_steps"
    ):
        rough = logdet(A, 60, 6, generator=seeded())
    assert rough > A.logdet() + 10  # too large: small eigenvalues are not seen
    torch.testing.assert_close(logdet(A, 60, 60, generator=seeded()), A.logdet(), rtol=0.05, atol=0)


# Names and the picture
# ----------------------------------------------------------------------------------------------

BOTH = "kappa={}, boundaries=None, margin=0.05, boundaries_tol=0.01"
CACHED = "A, ncv, boundaries=None, boundaries_tol=0.01"
SETTINGS = "self, num_repeats=1, num_points=1024, kappa=3.0, margin=0.05"
NAMES_OF_3_0_1 = {
    lanczos_approximate_spectrum: f"A, ncv, num_points=1024, num_repeats=1, {BOTH.format(3.0)}",
    lanczos_approximate_log_spectrum: f"A, ncv, num_points=1024, num_repeats=1, {BOTH.format(1.04)}, epsilon=1e-05",
    LanczosApproximateSpectrumCached: CACHED,
    LanczosApproximateLogSpectrumCached: CACHED,
    LanczosApproximateSpectrumCached.approximate_spectrum: SETTINGS,
    LanczosApproximateLogSpectrumCached.approximate_log_spectrum: f"{SETTINGS}, epsilon=1e-05",
}


def test_names_of_curvlinops_3_0_1() -> None:
    for thing, names in NAMES_OF_3_0_1.items():
        parameters = inspect.signature(thing).parameters.values()
        positional = [
            p.replace(annotation=p.empty) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD
        ]
        assert ", ".join(map(str, positional)) == names


@pytest.mark.parametrize("log", [False, True])
def test_the_error_of_a_density_is_that_of_its_mean_over_runs(log: bool) -> None:
    A = with_eigenvalues(BULK_AND_PEAKS)
    kind = LanczosApproximateLogSpectrumCached if log else LanczosApproximateSpectrumCached
    cached = kind(A, 20, generator=seeded())
    method = cached.approximate_log_spectrum if log else cached.approximate_spectrum
    means = [method(num_repeats=k)[1] for k in range(1, 5)]
    # The densities of the runs, from the means over the first ones.
    runs = [
        k * mean - (k - 1) * before
        for k, (mean, before) in enumerate(zip(means, [0 * means[0], *means[:-1]], strict=True), 1)
    ]
    _, density, error = method(num_repeats=4, return_error=True)
    close(density, means[-1])
    close(error, torch.stack(runs).std(0) / 2)
    assert method(num_repeats=1, return_error=True)[2].isnan().all()
    function = lanczos_approximate_log_spectrum if log else lanczos_approximate_spectrum
    kappa = {"kappa": 3.0}  # the log spectrum has another default
    found = function(A, 20, num_repeats=4, generator=seeded(), return_error=True, **kappa)
    again = kind(A, 20, generator=seeded())
    method = again.approximate_log_spectrum if log else again.approximate_spectrum
    assert all(map(torch.equal, found, method(num_repeats=4, return_error=True)))


@pytest.mark.parametrize("low", [1e-6, -0.5])
def test_ends_are_found_in_the_run(low: float) -> None:
    """Of a spectrum like that of a network: a bulk at zero, and some large eigenvalues."""
    bulk = torch.linspace(low, 0.1, 180, dtype=torch.float64)
    values = torch.cat([bulk, torch.linspace(0.2, 8, 20, dtype=torch.float64)])
    A = Counted(with_eigenvalues(values))
    cached = LanczosApproximateSpectrumCached(A, 20, generator=seeded())
    assert sum(A.seen) <= 22  # two for symmetry
    for found, exact in zip(cached.boundaries, (low, 8.0), strict=True):
        assert abs(found - exact) <= 8e-2
    cached.approximate_spectrum(1)
    assert sum(A.seen) <= 22
    _, density = cached.approximate_spectrum(3)
    assert sum(A.seen) <= 62
    known = LanczosApproximateSpectrumCached(A, 20, cached.boundaries, generator=seeded())
    assert torch.allclose(density, known.approximate_spectrum(3)[1])  # the same runs


def test_ends_that_the_run_does_not_find_are_computed() -> None:
    A = Counted(with_eigenvalues(torch.linspace(-3, 8, 200, dtype=torch.float64)))
    for tol in (1e-2, 1e-6):
        A.seen.clear()
        cached = LanczosApproximateSpectrumCached(A, 3, boundaries_tol=tol, generator=seeded())
        for found, exact in zip(cached.boundaries, (-3.0, 8.0), strict=True):
            assert abs(found - exact) <= 2 * tol * 8
        assert sum(A.seen) > 5
