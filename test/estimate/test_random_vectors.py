"""Estimators by random vectors: unbiased, exact where they say so, with an honest standard error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import F64, normal, seeded
from torch import Tensor

from curvlinops_plus.estimate.diagonal import hutchinson_diag, xdiag
from curvlinops_plus.estimate.norm import hutchinson_squared_fro
from curvlinops_plus.estimate.probes import random_vector, random_vectors
from curvlinops_plus.estimate.trace import hutchinson_trace, hutchpp_trace, xtrace

SEEDS = 300


def decaying(n: int = 30) -> Tensor:
    """Positive definite, eigenvalues 1, 1/4, 1/9, …"""
    Q = torch.linalg.qr(normal(n, n))[0]
    return Q / torch.arange(1, n + 1, dtype=F64) ** 2 @ Q.T


def low_rank(rank: int, n: int = 30) -> Tensor:
    """Of this rank and not symmetric."""
    return normal(n, rank, seed=1) @ normal(rank, n, seed=2)


def squared_fro(A: Tensor) -> Tensor:
    return A.square().sum()


MATRICES = {"general": normal(30, 30), "decaying": decaying(), "low rank": low_rank(4)}
DISTRIBUTIONS = ["rademacher", "normal", "sphere"]
EACH = [{"distribution": name} for name in DISTRIBUTIONS]
ESTIMATORS = [(f, o, torch.trace) for f in (hutchinson_trace, hutchpp_trace, xtrace) for o in EACH]
ESTIMATORS += [(hutchinson_diag, o, torch.diagonal) for o in EACH]
ESTIMATORS += [(xdiag, {}, torch.diagonal)]
ESTIMATORS += [(hutchinson_squared_fro, o, squared_fro) for o in EACH]
every_estimator = pytest.mark.parametrize(
    ("estimate", "options", "truth"),
    ESTIMATORS,
    ids=[f"{f.__name__}-{o.get('distribution', '')}" for f, o, _ in ESTIMATORS],
)


def over_seeds(
    estimate: Callable, A: Any, num_matvecs: int, seeds: int = SEEDS, **options: Any
) -> tuple[Tensor, Tensor]:
    """Estimates and their own standard errors, `[seeds, *]`."""
    pairs = [estimate(A, num_matvecs, generator=seeded(s), return_error=True, **options) for s in range(seeds)]
    return torch.stack([e for e, _ in pairs]), torch.stack([s for _, s in pairs])


@pytest.mark.slow
@every_estimator
@pytest.mark.parametrize("matrix", MATRICES)
def test_unbiased(estimate: Callable, options: dict, truth: Callable, matrix: str) -> None:
    """The mean over seeds is within four of its standard errors (of the largest of 30 for diagonals)."""
    A = MATRICES[matrix]
    values, _ = over_seeds(estimate, A, 6, **options)
    assert values[0].shape == truth(A).shape
    error = values.std(0) / SEEDS**0.5
    assert bool(((values.mean(0) - truth(A)).abs() <= 4 * error + 1e-12).all())
    if not (matrix == "low rank" and estimate in (xtrace, xdiag)):  # these two can be exact
        assert bool((error > 0).all())


def test_the_check_of_bias_can_fail() -> None:
    """Hutch++ whose last third forgets to leave out the subspace is off by more than four standard errors."""
    A = MATRICES["decaying"]
    values, _ = over_seeds(hutchpp_trace, A, 6)
    biased = values + torch.stack([hutchinson_trace(A, 2, generator=seeded(s)) for s in range(SEEDS)]) / 10
    assert (biased.mean() - A.trace()).abs() > 4 * biased.std() / SEEDS**0.5


@every_estimator
def test_own_standard_error(estimate: Callable, options: dict, truth: Callable) -> None:
    """On the average over seeds, the square of the standard error is the variance of the estimate."""
    values, errors = over_seeds(estimate, MATRICES["decaying"], 12, **options)
    ratio = errors.square().mean(0).sum() / values.var(0).sum()
    if estimate in (hutchinson_trace, hutchinson_diag, hutchinson_squared_fro):
        assert 0.8 < ratio < 1.25  # independent draws
    else:
        assert 0.3 < ratio < 1.6  # nearly so


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_exact_for_low_rank(rank: int, distribution: str, dtype: torch.dtype, device: torch.device) -> None:
    A = low_rank(rank).to(device, dtype)
    tolerance = {"rtol": 1e-10 if dtype == F64 else 1e-4, "atol": 1e-10 if dtype == F64 else 1e-4}
    for estimate, num_matvecs in ((hutchpp_trace, 9), (xtrace, 8), (xtrace, 20)):
        value, error = estimate(A, num_matvecs, distribution, generator=seeded(), return_error=True)
        torch.testing.assert_close(value, A.trace(), **tolerance)
        assert error <= tolerance["atol"]
    for num_matvecs in (8, 20):
        value, error = xdiag(A, num_matvecs, generator=seeded(), return_error=True)
        torch.testing.assert_close(value, A.diagonal(), **tolerance)
        assert bool((error <= tolerance["atol"]).all())


def test_signs_are_exact_for_diagonal_matrices() -> None:
    A = torch.diag(normal(7))
    for estimate, truth in ((hutchinson_trace, torch.trace), (hutchinson_diag, torch.diagonal)):
        value, error = estimate(A, 3, return_error=True)
        torch.testing.assert_close(value, truth(A))
        assert error.abs().max() < 1e-12
    torch.testing.assert_close(hutchinson_squared_fro(A, 2), squared_fro(A))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_hutchpp_against_its_definition(distribution: str) -> None:
    A = MATRICES["general"]
    V = random_vectors(8, 30, distribution, seeded(), A)
    Q = torch.linalg.qr(A @ V[:, :4])[0]
    P = torch.eye(30, dtype=F64) - Q @ Q.T
    expected = (Q.T @ A @ Q).trace() + (V[:, 4:].T @ P @ A @ P @ V[:, 4:]).trace() / 4
    torch.testing.assert_close(hutchpp_trace(A, 12, distribution, generator=seeded()), expected)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_draws_of_the_global_generator_are_those_of_plain_calls(dtype: torch.dtype) -> None:
    plain = {
        "rademacher": lambda: torch.empty(50, dtype=dtype).bernoulli_(0.5) * 2 - 1,
        "normal": lambda: torch.randn(50, dtype=dtype),
        "sphere": lambda: (v := torch.randn(50, dtype=dtype)) * 50**0.5 / v.norm(),
    }
    with torch.random.fork_rng():
        for distribution, draw in plain.items():
            torch.manual_seed(1)
            expected = torch.stack([draw() for _ in range(3)], 1)
            torch.manual_seed(1)
            torch.testing.assert_close(
                random_vectors(3, 50, distribution, None, torch.zeros((), dtype=dtype)), expected
            )
            torch.manual_seed(1)
            torch.testing.assert_close(random_vector(50, distribution, dtype=dtype), expected[:, 0])
