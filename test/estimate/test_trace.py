"""Estimators by random vectors: unbiased, exact where they say so, with an honest standard
error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvlinops_plus.estimate import (
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    matrix,
    xdiag,
    xtrace,
)
from curvlinops_plus.estimate.matrix import random_vector, random_vectors
from test.helpers import F64, normal, seeded

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


MATRICES = {"general": normal(30, 30), "decaying": decaying()}
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
    pairs = [
        estimate(A, num_matvecs, generator=seeded(s), return_error=True, **options)
        for s in range(seeds)
    ]
    return torch.stack([e for e, _ in pairs]), torch.stack([s for _, s in pairs])


@every_estimator
def test_unbiased(estimate: Callable, options: dict, truth: Callable) -> None:
    """The mean over seeds is within four of its standard errors (of the largest of 30 for
    diagonals).
    """
    A = MATRICES["general"]
    values, _ = over_seeds(estimate, A, 6, **options)
    assert values[0].shape == truth(A).shape
    error = values.std(0) / SEEDS**0.5
    assert bool(((values.mean(0) - truth(A)).abs() <= 4 * error + 1e-12).all())
    assert bool((error > 0).all())


@every_estimator
def test_own_standard_error(estimate: Callable, options: dict, truth: Callable) -> None:
    """On the average over seeds, the square of the standard error is the variance of the
    estimate.
    """
    values, errors = over_seeds(estimate, MATRICES["decaying"], 12, **options)
    ratio = errors.square().mean(0).sum() / values.var(0).sum()
    if estimate in (hutchinson_trace, hutchinson_diag, hutchinson_squared_fro):
        assert 0.8 < ratio < 1.25  # independent draws
    else:
        assert 0.3 < ratio < 1.6  # nearly so


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_exact_cases(dtype: torch.dtype, device: torch.device) -> None:
    """Matrices of low rank; with signs diagonal ones; with directions of one length multiples of
    the identity.
    """
    tolerance = {"rtol": 1e-10 if dtype == F64 else 1e-4, "atol": 1e-10 if dtype == F64 else 1e-4}

    def exact(estimate: Callable, truth: Callable, A: Tensor, *arguments: Any) -> None:
        value, error = estimate(A, *arguments, generator=seeded(), return_error=True)
        torch.testing.assert_close(value, truth(A), **tolerance)
        assert error.abs().max() <= tolerance["atol"]

    for rank in (0, 1, 3):
        A = low_rank(rank).to(device, dtype)
        for distribution in DISTRIBUTIONS:
            for estimate, num_matvecs in ((hutchpp_trace, 9), (xtrace, 8), (xtrace, 20)):
                exact(estimate, torch.trace, A, num_matvecs, distribution)
        exact(xdiag, torch.diagonal, A, 8)
        exact(xdiag, torch.diagonal, A, 20)
    A = torch.diag(normal(7)).to(device, dtype)
    for estimate, truth in (
        (hutchinson_trace, torch.trace),
        (hutchinson_diag, torch.diagonal),
        (hutchinson_squared_fro, squared_fro),
    ):
        exact(estimate, truth, A, 3)
    exact(xtrace, torch.trace, 3 * torch.eye(30, dtype=dtype, device=device), 8, "sphere")


def slow_twin(A: Tensor, V: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """XTrace and XDiag with a decomposition of its own for each left-out vector."""
    traces, diagonals = [], []
    for i in range(V.shape[1]):
        v = V[:, i]
        others = torch.cat([V[:, :i], V[:, i + 1 :]], 1)
        U, sigma, _ = torch.linalg.svd(A @ others, full_matrices=False)
        Q = U[:, sigma > 1e-10 * sigma.max()] if len(sigma) else U
        P = torch.eye(len(A), dtype=F64) - Q @ Q.T
        w = P @ v
        scale = Q.shape[0] - Q.shape[1]
        traces.append(
            (Q.T @ A @ Q).trace() + (w @ A @ w) * (scale / w.square().sum() if normalize else 1)
        )
        diagonals.append((Q @ Q.T @ A).diagonal() + v * (P @ A @ v))
    return torch.stack(traces).mean(), torch.stack(diagonals).mean(0)


@settings(max_examples=40, deadline=None)
@given(
    draws=st.integers(1, 6),
    rank=st.integers(0, 14),
    seed=st.integers(0, 10**6),
    distribution=st.sampled_from(DISTRIBUTIONS),
)
def test_downdating_against_a_slow_twin(
    draws: int, rank: int, seed: int, distribution: str
) -> None:
    A = normal(14, rank, seed=seed) @ normal(rank, 14, seed=seed + 1)
    trace = xtrace(A, 2 * draws, distribution, generator=seeded(seed))
    V = random_vectors(draws, 14, distribution, seeded(seed), A)
    twin, diagonal = slow_twin(A, V, distribution == "sphere")
    torch.testing.assert_close(trace, twin, rtol=1e-6, atol=1e-6)
    if distribution == "rademacher":
        torch.testing.assert_close(
            xdiag(A, 2 * draws, generator=seeded(seed)), diagonal, rtol=1e-6, atol=1e-6
        )


@every_estimator
def test_draws(
    estimate: Callable, options: dict, truth: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They depend on the generator alone, not on blocks or dtype; without one they are PyTorch's
    own.
    """
    A, expected = (
        decaying(),
        estimate(decaying(), 12, generator=seeded(), return_error=True, **options),
    )
    before = torch.get_rng_state()
    for columns in (1, 5):
        monkeypatch.setattr(matrix, "BLOCK_BYTES", columns * A[0].nbytes)
        torch.testing.assert_close(
            estimate(A, 12, generator=seeded(), return_error=True, **options), expected
        )
    single = estimate(A.float(), 12, generator=seeded(), return_error=True, **options)
    assert {t.dtype for t in single} == {torch.float32}
    torch.testing.assert_close([t.double() for t in single], list(expected), rtol=1e-3, atol=1e-5)
    assert torch.equal(before, torch.get_rng_state())
    generator = seeded()
    first, second = (estimate(A, 6, generator=generator, **options) for _ in range(2))
    assert not torch.equal(first, second)
    with torch.random.fork_rng():
        assert not torch.equal(estimate(A, 6, **options), estimate(A, 6, **options))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_draws_of_the_global_generator_are_those_of_plain_calls(dtype: torch.dtype) -> None:
    plain = {
        "rademacher": lambda: torch.empty(50, dtype=dtype).bernoulli_(0.5) * 2 - 1,
        "normal": lambda: torch.randn(50, dtype=dtype),
        "sphere": lambda: (v := torch.randn(50, dtype=dtype)) * 50**0.5 / v.norm(),
    }
    like = torch.zeros((), dtype=dtype)
    for distribution, draw in plain.items():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            expected = torch.stack([draw() for _ in range(3)], 1)
            torch.manual_seed(1)
            torch.testing.assert_close(random_vectors(3, 50, distribution, None, like), expected)
            torch.manual_seed(1)
            torch.testing.assert_close(random_vector(50, distribution, dtype=dtype), expected[:, 0])
        generator = seeded()  # the first draws stay when more are asked for
        parts = [random_vectors(num, 3, distribution, generator, like) for num in (2, 3)]
        assert torch.equal(random_vectors(5, 3, distribution, seeded(), like), torch.cat(parts, 1))


def test_gradients_of_a_tensor() -> None:
    """The estimate of a tensor's trace or norm is differentiable, as products with it are."""
    A = normal(6, 6).requires_grad_()
    (grad,) = torch.autograd.grad(hutchinson_squared_fro(A, 3, generator=seeded()), A)
    V = random_vectors(3, 6, "rademacher", seeded(), A)
    torch.testing.assert_close(grad, 2 * A.detach() @ V @ V.T / 3)
