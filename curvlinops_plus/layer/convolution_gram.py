"""Sums of `a aᵀ` over the patches of a convolution, and of `g gᵀ` over images: the products behind
Kronecker factors.

Two algorithms for the Gram matrix of patches agree up to rounding:

    patch_gram        forms the patches, a few examples at a time: for every convolution
    correlation_gram  never forms them: for stride 1, zeros around the input and no dilation

If the kernel visited every position at which it overlaps the image, the entry for taps `u` and `u'`
would depend on `u' - u` alone: it would be an autocorrelation of the image, and the weight gradient
of a convolution computes all of them at once. The positions that the convolution does not visit
are lines at the border; the Gram matrices of their patches are subtracted.

Correlations are used in float32 on CPUs, where they make KFAC of a residual network 1.1 to 1.6
times as fast.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.pieces import rows_at_once

# Work memory for patches on a CPU; larger pieces exceed the cache and gain nothing.
_PATCH_BYTES = 8 * 2**20
# Groups with this many columns are worth a product of their own.
_LARGE_GROUP = 128
# With so many channels, a product for each image of four times as many positions is faster than one
# for all (.3 to .9).
_SMALL_PRODUCTS = range(16, 65)
# Fewer patches, or fewer multiplications in their Gram matrix, do not repay the fixed costs of
# correlations.
_MIN_PATCHES = 512
_MIN_PRODUCTS = 4e7
# PyTorch adds up all positions one after the other on CPUs; of more than these too many digits get
# lost.
_SUMMANDS = 2**14


def input_gram(geometry: Geometry, x: Tensor, groups: int = 1) -> Tensor:
    """Sum of `a aᵀ` over all patches, in the order of the flattened weight.

    Args:
        x: Images `[B, g·c, *size]`.

    Returns:
        `[*g, c·kernel, c·kernel]`, without an axis of groups if there is one. All small groups are
        multiplied at once.
    """
    columns = x.shape[1] // groups * prod(geometry.kernel)
    if groups > 1 and columns >= _LARGE_GROUP:
        return torch.stack([input_gram(geometry, channels) for channels in x.chunk(groups, 1)])
    if groups == 1 and correlations_pay(geometry, x):
        return correlation_gram(geometry, x)
    return patch_gram(geometry, x, groups)


def image_gram(images: Tensor) -> Tensor:  # [B, *g, c, S] -> [*g, c, c]
    """Sum of `Σ_s v_s v_sᵀ` over images, where `v_s [c]` are the channels (of each group) at one
    position.
    """
    c, S = images.shape[-2:]
    small = images.ndim == 3 and c in _SMALL_PRODUCTS and 4 * c <= S
    if small and images.is_contiguous() and not images.is_cuda:
        # This reads images where they are; elsewhere it is slower.
        return (images @ images.mT).sum(0)
    # This copies whole images, where rows `[B·S, c]` would copy numbers.
    columns = images.movedim(0, -2).flatten(-2)
    return columns @ columns.mT if columns.ndim == 3 else gram(columns.T)


def patch_gram(geometry: Geometry, x: Tensor, groups: int = 1) -> Tensor:
    """Sum of `a aᵀ` by forming the patches of a few examples at a time, as `input_gram`."""
    d = x.shape[1] // groups * prod(geometry.kernel)
    # With fewer numbers than d², adding up the parts would dominate.
    cpu_bytes = max(_PATCH_BYTES, d * d * x.element_size())
    image_bytes = geometry.positions(x) * groups * d * x.element_size()
    pieces = x.split(rows_at_once(x.device, cpu_bytes, image_bytes))
    # One at a time: each may be as large as all else.
    grams = (image_gram(geometry.columns(images, groups).squeeze(1)) for images in pieces)
    return reduce(Tensor.add_, grams)


def correlations_pay(geometry: Geometry, x: Tensor) -> bool:
    """Whether `correlation_gram` applies and is faster than `patch_gram`, as measured on CPUs.

    On CUDA the convolution would also round to TF32 by default, and in float64 it is slow.
    """
    if geometry.pointwise or not geometry.plain:
        return False
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    # With less padding most lines are not visited, and small images are all border.
    for size, k, padding in zip(x.shape[2:], geometry.kernel, geometry.padding, strict=True):
        if size <= k or min(padding) < (k - 1) // 2:
            return False
    patches = len(x) * geometry.positions(x)
    columns = x.shape[1] * prod(geometry.kernel)
    large = patches >= _MIN_PATCHES and patches * columns**2 >= _MIN_PRODUCTS
    return large and torch.backends.mkldnn.is_available()


def correlation_gram(geometry: Geometry, x: Tensor) -> Tensor:
    """Sum of `a aᵀ` over all patches of a plain convolution, from correlations of its images.

    Args:
        x: Images `[B, c, *size]`.

    Returns:
        `[c·kernel, c·kernel]`.
    """
    kernel = geometry.kernel
    if not kernel:
        return gram(x)
    c = x.shape[1]
    n = len(kernel)
    R = _autocorrelation(x, kernel).flatten(1)
    total = R.index_select(1, _places_of_shifts(c, kernel, R.device)).view(c, *kernel, c, *kernel)
    for line in _unvisited_lines(geometry):
        taps = len(line.taps)
        axis = 2 + line.dim
        start = 0 if line.first_pixels else x.shape[axis] - taps
        pixels = x.narrow(axis, start, taps).movedim(axis, 2).flatten(1, 2)
        # [c, taps, *other kernel, c, taps, *other kernel]
        block = total.movedim((1 + line.dim, n + 2 + line.dim), (1, n + 2))
        block = block.narrow(1, line.taps.start, taps).narrow(n + 2, line.taps.start, taps)
        block -= correlation_gram(line.convolution, pixels).view(block.shape)
    return total.reshape(c * prod(kernel), c * prod(kernel))


@lru_cache(64)
def _places_of_shifts(c: int, kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """Index of `R[c, c', u' - u]` in a flattened row `R[c]`, for all `u`, `c'`, `u'` in this
    order.
    """
    n = len(kernel)
    shape = (c, *[2 * k - 1 for k in kernel])
    with torch.inference_mode(False):
        places = torch.arange(prod(shape), device=device).view(shape)
        for dim, k in enumerate(kernel, 1):
            # Windows that start at shift -u and run over u', latest u first.
            places = places.unfold(dim, k, 1)
        return places.flip(tuple(range(1, n + 1))).movedim(0, n).flatten()


class Line(NamedTuple):
    """Positions on a line across one dimension, at which some taps overlap the border of an image.

    Along it the taps in this dimension always cover the same pixels, so that these are channels
    of a convolution in one dimension less.
    """

    dim: int
    taps: range
    first_pixels: bool  # else the last ones
    convolution: Geometry


@lru_cache(256)
def _unvisited_lines(geometry: Geometry) -> list[Line]:
    """Positions where the kernel overlaps the image but that the convolution does not visit, each
    exactly once: in 2-D rows, then the rest of the columns.
    """
    # More padding than this only adds patches of zeros.
    everywhere = [(k - 1, k - 1) for k in geometry.kernel]
    visited = [
        (min(before, k - 1), min(after, k - 1))
        for (before, after), k in zip(geometry.padding, geometry.kernel, strict=True)
    ]
    lines = []
    for dim, k in enumerate(geometry.kernel):
        kernel = geometry.kernel[:dim] + geometry.kernel[dim + 1 :]
        ones = (1,) * len(kernel)
        padding = (*visited[:dim], *everywhere[dim + 1 :])
        convolution = Geometry(kernel, ones, ones, padding)
        before, after = visited[dim]
        for taps in range(1, k - before):
            lines.append(Line(dim, range(k - taps, k), True, convolution))
        for taps in range(1, k - after):
            lines.append(Line(dim, range(taps), False, convolution))
    return lines


def _autocorrelation(x: Tensor, kernel: tuple[int, ...]) -> Tensor:  # -> [c, c, *(2·kernel - 1)]
    """`R[c, c', k - 1 + δ] = Σ x[c, q] x[c', q + δ]` for shifts `|δ| < k` in each dimension.

    `R[c, c', -δ] = R[c', c, δ]`, so that the shifts with `δ >= 0` in the first dimension are
    enough.
    """
    half = _half_autocorrelation(x, kernel)
    mirrored = half.transpose(0, 1).flip(tuple(range(2, half.ndim)))
    # Exactly symmetric, not only up to rounding.
    middle = (half[:, :, :1] + mirrored[:, :, -1:]) / 2
    return torch.cat([mirrored[:, :, :-1], middle, half[:, :, 1:]], dim=2)


def _half_autocorrelation(x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """The same for shifts `0 <= δ < k` in the first dimension."""
    n = len(kernel)
    c = x.shape[1]
    below = kernel[0] - 1
    padding = (0, *[k - 1 for k in kernel[1:]])
    ones = (1,) * n
    options = (None, ones, padding, ones, False, (0,) * n, 1, (False, True, False))
    total = x.new_zeros(c, c, kernel[0], *[2 * k - 1 for k in kernel[1:]])
    weight = x.new_empty(1).expand(total.shape)
    line = max(1, prod(x.shape[3:]))
    num_lines = max(1, _SUMMANDS // line)
    num_images = max(1, _SUMMANDS // (line * x.shape[2]))
    for images in x.split(num_images):
        padded = F.pad(images, [0, 0] * (n - 1) + [0, below])
        for start in range(0, x.shape[2], num_lines):
            g = images[:, :, start : start + num_lines]
            shifted = padded[:, :, start : start + g.shape[2] + below]
            # How Σ ⟨g, convolution(shifted, w)⟩ depends on the weight w.
            total += torch.ops.aten.convolution_backward(g, shifted, weight, *options)[1]
    return total
