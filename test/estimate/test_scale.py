"""Estimators don't depend on the scale of a matrix, however near it is to the ends of its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import F64, seeded
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate import logdet
from curvlinops_plus.estimate.boundaries import approximate_boundaries, approximate_boundaries_abs
from curvlinops_plus.estimate.diagonal import hutchinson_diag, xdiag
from curvlinops_plus.estimate.eigen import spectral_norm, top_eigenpairs
from curvlinops_plus.estimate.trace import hutchinson_trace, hutchpp_trace, xtrace
from curvlinops_plus.linalg import Dense

N = 60
SCALES = [(c, torch.float32) for c in (1e-30, 1e-20, 1e20, 1e25)] + [(c, F64) for c in (1e-250, 1e200)]
each_scale = pytest.mark.parametrize(("c", "dtype"), SCALES, ids=str)


def matrix() -> Tensor:
    Q = torch.linalg.qr(torch.randn(N, N, dtype=F64, generator=seeded()))[0]
    A = Q * torch.logspace(0, -2, N, dtype=F64) @ Q.T
    return (A + A.T) / 2


def general(A: Tensor) -> Dense:
    """Not known to be symmetric: norms go through the Gram matrix."""
    return Dense(A)


LINEAR: dict[str, Callable[..., Any]] = {
    "hutchinson_trace": lambda A: hutchinson_trace(A, 6, generator=seeded(), return_error=True),
    "hutchpp_trace": lambda A: hutchpp_trace(A, 6, generator=seeded(), return_error=True),
    "xtrace": lambda A: xtrace(A, 6, "sphere", generator=seeded(), return_error=True),
    "hutchinson_diag": lambda A: hutchinson_diag(A, 6, generator=seeded(), return_error=True),
    "xdiag": lambda A: xdiag(A, 6, generator=seeded(), return_error=True),
    "top_eigenpairs": lambda A: top_eigenpairs(A, 2, generator=seeded())[:1],
    "residuals": lambda A: top_eigenpairs(A, N, generator=seeded())[:1],
    "spectral_norm": lambda A: (spectral_norm(A, generator=seeded()),),
    "spectral_norm of a general one": lambda A: spectral_norm(
        general(A), tol=0.3, generator=seeded(), return_error=True
    ),
    "boundaries": lambda A: torch.tensor(approximate_boundaries(A, generator=seeded()), dtype=F64),
    "absolute boundaries": lambda A: torch.tensor(approximate_boundaries_abs(A, generator=seeded()), dtype=F64),
}


@each_scale
@pytest.mark.parametrize("call", LINEAR)
def test_linear_in_the_matrix(call: str, c: float, dtype: torch.dtype) -> None:
    A = matrix()
    expected = LINEAR[call](A.to(dtype))
    for left, right in zip(LINEAR[call]((A * c).to(dtype)), expected):
        atol = 1e-5 if call == "residuals" or call.startswith("spectral_norm") else 0  # errors may be rounding
        torch.testing.assert_close(left.double() / c, right.double(), rtol=1e-4, atol=atol)


@each_scale
def test_log_determinants(c: float, dtype: torch.dtype) -> None:
    A = matrix()
    expected, error = logdet(A.to(dtype), 4, 40, generator=seeded(), return_error=True)
    found, its_error = logdet((A * c).to(dtype), 4, 40, generator=seeded(), return_error=True)
    torch.testing.assert_close(found.double() - N * math.log(c), expected.double(), rtol=1e-4, atol=2e-2)
    torch.testing.assert_close(its_error, error, rtol=1e-3, atol=0)


def test_what_is_said_is_in_the_matrix_s_units() -> None:
    A = (matrix() * 1e-20).float()
    with pytest.warns(CurvatureWarning, match=r"residuals \d.\de-2\d for eigenvalues \d.\d\d\de-2[01]\."):
        top_eigenpairs(A, max_iter=2, generator=seeded())
    with pytest.warns(CurvatureWarning, match=r"residuals \d.\de-4\d for eigenvalues \d.\d\d\de-4[012]\."):
        spectral_norm(general(A), max_iter=2, generator=seeded())
    A[0, 1] += 1e-18
    with pytest.raises(ValueError, match=r"vᵀ\(Au\) differ by \d.\de-1\d, and |Av| is \d.\de-1\d"):
        top_eigenpairs(A, generator=seeded())
