"""The Gram matrix of patches without patches, against the plain one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus.layer import convolution_gram as grams
from curvlinops_plus.layer.patches import Geometry


def plain(geometry: Geometry, x: Tensor) -> Tensor:
    rows = geometry.rows(x).flatten(0, 1)
    return rows.T @ rows


def geometry(kernel: tuple[int, ...], padding: tuple[tuple[int, int], ...]) -> Geometry:
    ones = (1,) * len(kernel)
    return Geometry(kernel, ones, ones, padding)


@pytest.mark.parametrize(
    "shape", [(8, 16, 12, 12), (160, 8, 32, 32), (1, 8, 400, 400), (2, 8, 80000)]
)
def test_correlations_are_as_exact_as_float32_allows(shape: tuple[int, ...]) -> None:
    """Also of many and of large images, over which PyTorch's weight gradients add up one number
    after the other.
    """
    n = len(shape) - 2
    where, x = geometry((3,) * n, ((1, 1),) * n), torch.rand(shape) - 0.25
    exact = grams.patch_gram(where, x)
    error = (grams.correlation_gram(where, x.float()) - exact).norm() / exact.norm()
    assert error < 2e-6


@pytest.mark.parametrize(("many", "kernel"), list(product([1, 40], [(3,), (2, 3), (2, 1, 3)])))
def test_patches_in_pieces(
    many: int, kernel: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns in channels-last order, a few examples at a time, as many times as it takes."""
    monkeypatch.setattr(grams, "_PATCH_BYTES", 1)
    n = len(kernel)
    where = Geometry(kernel, (2,) * n, (1,) * n, ((1, 0),) * n)
    x = torch.randn(many, 2, *[6] * n)
    torch.testing.assert_close(grams.patch_gram(where, x), plain(where, x), rtol=1e-12, atol=1e-12)


LARGE = (16, 64, 16, 16)


@pytest.mark.parametrize(
    ("module", "shape", "pays"),
    [
        (nn.Conv2d(64, 8, 3, padding=1), LARGE, True),
        (nn.Conv2d(64, 8, 3), LARGE, False),
        (nn.Conv2d(64, 8, 4, padding="same"), LARGE, True),
        (nn.Conv2d(64, 8, 3, padding=1, stride=2), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=2, dilation=2), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=1, padding_mode="circular"), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=1).double(), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=1), (1, 64, 16, 4), False),
        (nn.Conv2d(2, 8, 3, padding=1), (16, 2, 16, 16), False),
        (nn.Conv2d(64, 8, 3, padding=1), (200, 64, 2, 2), False),
    ],
)
def test_which_way_is_taken(module: nn.Conv2d, shape: tuple[int, ...], pays: bool) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("correlations pay only where oneDNN computes them")
    x = torch.randn(
        shape, dtype=module.weight.dtype if module.weight.dtype == torch.float64 else torch.float32
    )
    where = Geometry.of(module)
    assert grams.correlations_pay(where, x) == pays
    rows = where.rows(x).flatten(0, 1)
    torch.testing.assert_close(grams.input_gram(where, x), rows.T @ rows, rtol=1e-4, atol=1e-2)
