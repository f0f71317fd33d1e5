"""The evidence as a function of logarithms, against autograd of dense determinants."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from curvlinops_plus.applications.evidence import DenseBlock, Evidence, Spectrum
from test.cases import close
from test.helpers import F64, normal


def evidence(has_noise: bool) -> tuple[Evidence, Tensor]:
    """With a spectrum, and a matrix whose parameters have two precisions; also the matrix `K`."""
    root = normal(5, 4)
    K = torch.block_diag(
        torch.tensor([[2.0]], dtype=F64), torch.zeros(1, 1).double(), root @ root.T
    )
    parts = [
        Spectrum(torch.tensor([2.0, 0.0], dtype=F64), 0),
        DenseBlock(root @ root.T, torch.tensor([1, 0, 1, 2, 2])),
    ]
    squares = torch.tensor([1.5, 0.2, 3.0], dtype=F64)
    return Evidence(parts, squares, math.log(7.0), 4.0, 6.0, 1.7, has_noise), K


@pytest.mark.parametrize("has_noise", [False, True])
def test_values_and_derivatives(has_noise: bool) -> None:
    E, K = evidence(has_noise)
    groups = torch.tensor([0, 0, 1, 0, 1, 2, 2])

    def plain(x: Tensor) -> Tensor:
        noise = x[3].exp() if has_noise else torch.ones((), dtype=F64)
        delta = x[:3].exp()
        ratio = 7.0 / noise**2 * K / delta[groups]
        data = 4.0 / noise**2 + 6 * (noise.log() + math.log(2 * math.pi) / 2)
        squares = (delta * E.squares).sum()
        return data / 1.7 + (squares + torch.logdet(torch.eye(7, dtype=F64) + ratio)) / 2

    x = torch.tensor([0.3, -2.0, 1.0, -0.4], dtype=F64)[: 3 + has_noise]
    close(E.value(x), plain(x))
    gradient, hessian = E.derivatives(x)
    close(gradient, torch.autograd.functional.jacobian(plain, x))
    close(hessian, torch.autograd.functional.hessian(plain, x))
    assert bool((torch.linalg.eigvalsh(hessian) > 0).all())


@pytest.mark.parametrize("start", [-25.0, 0.0, 25.0])
def test_the_minimum_from_anywhere(start: float) -> None:
    E, _ = evidence(True)
    steps = []
    x, is_minimum = E.minimum(torch.full((4,), start, dtype=F64), lambda: steps.append(1))
    assert is_minimum
    assert len(steps) < 100
    assert float(E.derivatives(x)[0].abs().max()) < 1e-8


def test_without_a_minimum() -> None:
    """Parameters that are zero want an infinite precision, those without curvature none."""
    for square, eigenvalue, sign in ((0.0, 1.0, 1), (1.0, 0.0, -1), (0.0, 0.0, 0)):
        parts = [Spectrum(torch.tensor([eigenvalue], dtype=F64), 0)]
        E = Evidence(parts, torch.tensor([square], dtype=F64), 0.0, 1.0, 0.0, 1.0, False)
        x, is_minimum = E.minimum(torch.zeros(1, dtype=F64), lambda: None)
        assert is_minimum
        assert (sign and sign * float(x) > 20) or (not sign and not x.any())
