"""Spectral divide and conquer: as accurate as LAPACK on every kind of spectrum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import divide_and_conquer
from curvlinops_plus.linalg.spectral_division import polar

from .cases import F64, normal

F32 = torch.float32
D = 90

SPECTRA: dict[str, Tensor] = {
    "even": torch.linspace(-1, 1, D, dtype=F64),
    "positive": torch.linspace(0.1, 2, D, dtype=F64),
    "decaying": torch.logspace(0, -12, D, dtype=F64),
    "of low rank": torch.cat([torch.zeros(D - 9, dtype=F64), torch.linspace(1, 2, 9, dtype=F64)]),
    "two clusters": 1 + 1e-13 * torch.arange(D) * (1 - 2.0 * (torch.arange(D) % 3 == 0)) - 2.0 * (torch.arange(D) % 2),
    "clusters of all sizes": torch.tensor([-3.0, 1, 1, 1, 2, 2, 5, 5, 5], dtype=F64).repeat(D // 9),
    "one that is far": torch.cat([torch.ones(D - 1, dtype=F64), torch.tensor([1e8], dtype=F64)]),
    "a close cluster": 1 + 1e-9 * torch.linspace(-1, 1, D, dtype=F64),
    "huge": 1e20 * torch.linspace(-1, 3, D, dtype=F64),
    "tiny": 1e-15 * torch.linspace(-1, 3, D, dtype=F64),
}


def matrix(values: Tensor) -> Tensor:
    Q = torch.linalg.qr(normal(len(values), len(values)))[0]
    M = Q * values @ Q.T
    return (M + M.T) / 2


def check(M: Tensor, values: Tensor, Q: Tensor) -> None:
    bound = 1e-12 if M.dtype == F64 else 1e-5
    assert (M.double() @ Q.double() - Q.double() * values.double()).norm() <= bound * M.double().norm()
    torch.testing.assert_close(Q.T @ Q, torch.eye(len(M), dtype=M.dtype), rtol=0, atol=bound)
    assert bool((values.diff() >= 0).all())
    torch.testing.assert_close(
        values.double(), torch.linalg.eigvalsh(M.double()), rtol=0, atol=bound * float(M.double().norm())
    )


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("smallest", [1, 20])
@pytest.mark.parametrize("kind", SPECTRA)
def test_every_spectrum(kind: str, smallest: int, dtype: torch.dtype) -> None:
    M = matrix(SPECTRA[kind]).to(dtype)
    before = M.clone()
    check(M, *divide_and_conquer(M, smallest))
    assert torch.equal(M, before)


def test_batches_and_large_leaves() -> None:
    M = torch.stack([matrix(SPECTRA["even"]), matrix(SPECTRA["decaying"])]).expand(3, 2, D, D)
    values, Q = divide_and_conquer(M, smallest=16)
    assert values.shape == (3, 2, D)
    check(M[2, 1], values[2, 1], Q[2, 1])
    check(M[0, 0], *divide_and_conquer(M[0, 0]))  # a single leaf


def test_polar() -> None:
    values = torch.cat([-torch.logspace(0, -9, 20, dtype=F64), torch.logspace(0, -9, 15, dtype=F64)])
    Q = torch.linalg.qr(normal(35, 35))[0]
    torch.testing.assert_close(polar(Q * values @ Q.T), Q * values.sign() @ Q.T, rtol=0, atol=1e-6)
    torch.testing.assert_close(polar(Q * values.sign() @ Q.T), Q * values.sign() @ Q.T, rtol=0, atol=1e-13)
    assert not polar(torch.zeros(2, 2)).any()


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(NumericsError, match=r"polar iteration of a \[35, 35\] matrix did not converge in 1 steps"):
        polar(normal(35, 35) + normal(35, 35).T, steps=1)
    nearly = matrix(SPECTRA["even"])
    nearly[0, 1] += 0.1  # not symmetric
    with pytest.raises(NumericsError, match=r"A part of \d+ eigenvalues of a symmetric matrix could not be split"):
        divide_and_conquer(nearly, smallest=1)
