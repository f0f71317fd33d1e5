"""Log-determinants: unbiased, exact where they say so, and what happens to singular and indefinite matrices."""

from __future__ import annotations

import pytest
import torch
from helpers import F64, seeded, with_eigenvalues
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate import logdet
from curvlinops_plus.linalg import Dense, Structure


@pytest.mark.parametrize("distribution", ["rademacher", "normal", "sphere"])
def test_unbiased_with_an_honest_error(distribution: str) -> None:
    A = with_eigenvalues(torch.logspace(-1, 1, 20).double() * 1.5)
    pairs = [logdet(A, 10, 20, distribution, generator=seeded(s), return_error=True) for s in range(40)]
    values, errors = (torch.stack(part) for part in zip(*pairs))
    assert (values.mean() - A.logdet()).abs() < 4 * values.std() / 40**0.5
    assert 0.6 < errors.square().mean() / values.var() < 1.6
    for left, right in zip(
        pairs[0], logdet(A, 10, 20, distribution, generator=seeded(), return_error=True, chunk_size=4)
    ):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(
    "A",
    [
        torch.diag(torch.rand(20, dtype=F64, generator=seeded()) + 0.1),
        2 * torch.eye(9, dtype=F64),
        torch.diag(torch.logspace(-6, 0, 20, dtype=F64)),  # only the last step makes it exact: no warning
        torch.tensor([[5.0]]),
    ],
)
def test_exact_cases(A: Tensor) -> None:
    """Signs are exact for a diagonal matrix, once there are as many steps as distinct eigenvalues."""
    value, error = logdet(A, 2, 20, generator=seeded(), return_error=True)
    torch.testing.assert_close(value, A.logdet())
    assert error < 1e-5


def test_damping_of_an_operator() -> None:
    A = Dense(with_eigenvalues([0.0] * 20 + [1.0] * 20), Structure.PSD)
    value, error = logdet(A.shift(0.1), generator=seeded(), return_error=True)
    exact = A.shift(0.1).logdet
    assert (value - exact).abs() < 4 * error


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_singular_matrices(dtype: torch.dtype) -> None:
    """-inf, and a warning that says so; never NaN."""
    for A in (
        with_eigenvalues([0.0] * 5 + [1.0, 2.0, 3.0] * 5).to(dtype),
        torch.zeros(3, 3, dtype=dtype),
        torch.diag(torch.tensor([1.0, 0.0], dtype=dtype)),
        torch.zeros(1, 1, dtype=dtype),
    ):
        with pytest.warns(CurvatureWarning, match=r"eigenvalue that counts as zero.*-inf.*A.shift\(delta\)"):
            value, error = logdet(A, generator=seeded(), return_error=True)
        assert value == -torch.inf
        assert torch.isnan(error)


def test_too_few_steps() -> None:
    """A warning if the quadrature has not converged: few steps, or a zero that they don't reach."""
    A = with_eigenvalues(torch.logspace(-6, 0, 60))
    with pytest.warns(CurvatureWarning, match=r"has not converged: the last of 6 steps changed it.*more num_steps"):
        rough = logdet(A, 60, 6, generator=seeded())
    assert rough > A.logdet() + 10  # too large: small eigenvalues are not seen
    torch.testing.assert_close(logdet(A, 60, 60, generator=seeded()), A.logdet(), rtol=0.05, atol=0)
    singular = with_eigenvalues(torch.linspace(0, 1, 100) ** 4)
    with pytest.warns(CurvatureWarning, match="if the change stays, the matrix is singular or nearly so"):
        logdet(singular, 60, 8, generator=seeded())


def test_matrices_that_are_not_positive() -> None:
    with pytest.raises(ValueError, match=r"has a negative eigenvalue, at most -.*expected a positive definite matrix"):
        logdet(with_eigenvalues(torch.linspace(-1, 2, 30)), generator=seeded())
    with pytest.raises(ValueError, match="is not symmetric"):
        logdet(torch.randn(30, 30, generator=seeded()))
    for numbers in ({"num_probes": 0}, {"num_steps": 0}):
        with pytest.raises(ValueError, match=rf"{next(iter(numbers))} \(0\) must be at least 1"):
            logdet(torch.eye(3), **numbers)
    with pytest.raises(ValueError, match="Unknown distribution 'gauss'"):
        logdet(torch.eye(3), distribution="gauss")
