"""Sums of `a aᵀ` over the patches of a convolution, and of `g gᵀ` over images: the products behind
Kronecker factors.

There are two algorithms for the Gram matrix of patches. They agree up to rounding, and the faster
one is taken.

    patch_gram    forms the patches, a few examples at a time: for every convolution packed_gram
    never forms them: for stride 1, zeros around the input and no dilation. If the kernel visited
    every
                  position at which it overlaps the image, the entry for taps `u` and `u'` would
                  depend on `u' - u` alone: it would be an autocorrelation of the image, and the
                  weight gradient of a convolution computes all of them at once. The positions that
                  the convolution does not visit are lines at the border; the Gram matrices of their
                  patches are subtracted. Correlations of images of all sizes add up, and
                  `unpack_gram` makes the matrix of their sum.

A grouped convolution has one Gram matrix per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.linalg.gram_sum import gram

# Work memory for patches; larger pieces exceed the cache and gain nothing.
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
_ADDED = 2**14


def input_gram(geometry: Geometry, x: Tensor) -> Tensor:  # [B, c, *size] -> [c·kernel, c·kernel]
    """Sum of `a aᵀ` over all patches, in the order of the flattened weight."""
    if geometry.pointwise:
        return image_gram(geometry.windows(geometry.pad(x), 2).flatten(2))
    packed = packed_gram(geometry, x)
    return patch_gram(geometry, x) if packed is None else unpack_gram(geometry, x.shape[1], packed)


def image_gram(images: Tensor) -> Tensor:  # [B, *g, c, S] -> [*g, c, c]
    """Sum of `Σ_s v_s v_sᵀ` over images, where `v_s [c]` are the channels (of each group) at one
    position.
    """
    c, S = images.shape[-2:]
    if (
        images.ndim == 3
        and 4 * c <= S
        and c in _SMALL_PRODUCTS
        and images.is_contiguous()
        and not images.is_cuda
    ):
        return (images @ images.mT).sum(0)  # reads images where they are; elsewhere it is slower
    columns = images.movedim(0, -2).flatten(
        -2
    )  # copies whole images, where rows `[B·S, c]` would copy numbers
    return columns @ columns.mT if columns.ndim == 3 else gram(columns.T)


def grouped_gram(
    geometry: Geometry, x: Tensor, groups: int
) -> Tensor:  # [B, g·c, *size] -> [g, c·kernel, c·kernel]
    """Sum of `a aᵀ` over all patches, for each group of channels by itself; all small groups are
    multiplied at once.
    """
    d = x.shape[1] // groups * prod(geometry.kernel)
    if d >= _LARGE_GROUP:
        return torch.stack([input_gram(geometry, channels) for channels in x.chunk(groups, 1)])
    total, one = x.new_zeros(groups, d, d), groups * d * geometry.positions(x) * x.element_size()
    for some in x.split(max(1, _PATCH_BYTES // max(1, one))):
        columns = geometry.group_columns(some, groups)
        total += columns @ columns.mT
    return total


def patch_gram(geometry: Geometry, x: Tensor) -> Tensor:  # [B, c, *size] -> [c·kernel, c·kernel]
    """Sum of `a aᵀ` by forming the patches of a few examples at a time."""
    c, taps = x.shape[1], prod(geometry.kernel)
    d = c * taps
    work = max(
        _PATCH_BYTES // x.element_size(), d * d
    )  # with less, adding up the parts would dominate
    total = x.new_zeros(d, d)
    for some in x.split(max(1, work // max(1, geometry.positions(x) * d))):
        total += gram(geometry.channels_last_rows(some))
    return total.reshape(taps, c, taps, c).permute(1, 0, 3, 2).reshape(d, d)


def packed_gram(geometry: Geometry, x: Tensor, ones: bool = False) -> Tensor | None:
    """Correlations of images, one after the other; with `ones`, then the sum of patches, and their
    number.

    None if `patch_gram` is faster, as measured on CPUs, or the matrix is not twice as many numbers:
    without padding most lines are not visited.
    """
    if (
        geometry.pointwise
        or not geometry.plain
        or x.device.type != "cpu"
        or x.dtype != torch.float32
    ):
        # on CUDA the convolution would also round to TF32 by default; in float64 it is slow
        return None
    if any(size <= k for size, k in zip(x.shape[2:], geometry.kernel, strict=True)):
        return None  # all border
    patches, columns = len(x) * geometry.positions(x), x.shape[1] * prod(geometry.kernel)
    pays = (
        patches >= _MIN_PATCHES
        and patches * columns**2 >= _MIN_PRODUCTS
        and torch.backends.mkldnn.is_available()
    )
    if not pays or sum(_sizes(geometry, x.shape[1])) > columns**2 // 2:
        return None
    row = [geometry.sum_rows(x.sum(0, keepdim=True))[0], x.new_tensor([patches])] if ones else []
    return torch.cat([*correlations(geometry, x), *row])


def unpack_gram(
    geometry: Geometry, c: int, values: Tensor, ones: bool = False
) -> Tensor:  # -> [c·kernel, c·kernel]
    """The Gram matrix of `packed_gram`; with `ones`, that of patches with a 1 at their end."""
    sizes = _sizes(geometry, c)
    total = gram_of_correlations(geometry, c, iter(values[: sum(sizes)].split(sizes)))
    if ones:
        total = F.pad(total, (0, 1, 0, 1))
        total[-1] = total[:, -1] = values[sum(sizes) :]
    return total


def correlations(geometry: Geometry, x: Tensor) -> list[Tensor]:
    """The autocorrelations of images, then those of the lines at their border: flat tensors, sums
    over images.
    """
    if not geometry.kernel:
        return [gram(x).flatten()]
    found = [_correlations(x, geometry.kernel).flatten()]
    for dim, taps, line in _unvisited_lines(geometry):
        size, n = x.shape[2 + dim], taps.stop - taps.start
        pixels = x.narrow(2 + dim, 0 if taps.start else size - n, n)
        found += correlations(line, pixels.movedim(2 + dim, 2).flatten(1, 2))
    return found


@lru_cache(256)
def _sizes(geometry: Geometry, c: int) -> list[int]:
    kernel = geometry.kernel
    first = c * c * (prod(2 * k - 1 for k in kernel[1:]) * kernel[0] if kernel else 1)
    lines = [
        _sizes(line, c * (taps.stop - taps.start)) for _, taps, line in _unvisited_lines(geometry)
    ]
    return [first, *(size for line in lines for size in line)]


def gram_of_correlations(
    geometry: Geometry, c: int, parts: Iterator[Tensor]
) -> Tensor:  # -> [c·kernel, c·kernel]
    """The Gram matrix of what `correlations` returns."""
    kernel, n = geometry.kernel, len(geometry.kernel)
    if not kernel:
        return next(parts).view(c, c)
    half = next(parts).view(c, c, kernel[0], *(2 * k - 1 for k in kernel[1:]))
    mirrored = half.transpose(0, 1).flip(tuple(range(2, n + 2)))
    middle = (
        half[:, :, :1] + mirrored[:, :, -1:]
    ) / 2  # exactly symmetric, not only up to rounding
    R = torch.cat([mirrored[:, :, :-1], middle, half[:, :, 1:]], dim=2)  # [c, c, *(2·kernel - 1)]
    total = (
        R.flatten(1)
        .index_select(1, _places_of_shifts(c, kernel, R.device))
        .view(c, *kernel, c, *kernel)
    )
    for dim, taps, line in _unvisited_lines(geometry):
        block = total[(slice(None),) * (dim + 1) + (taps,) + (slice(None),) * n + (taps,)]
        block = block.movedim(
            (1 + dim, n + 2 + dim), (1, n + 2)
        )  # [c, taps, *other kernel, c, taps, *other kernel]
        block -= gram_of_correlations(line, c * (taps.stop - taps.start), parts).view(block.shape)
    return total.reshape(c * prod(kernel), c * prod(kernel))


@lru_cache(64)
def _places_of_shifts(c: int, kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """Index of `R[c, c', u' - u]` in a flattened row `R[c]`, for all `u`, `c'`, `u'` in this
    order.
    """
    n = len(kernel)
    shape = (c, *(2 * k - 1 for k in kernel))
    with torch.inference_mode(False):
        places = torch.arange(prod(shape), device=device).view(shape)
        for dim, k in enumerate(kernel, 1):
            places = places.unfold(
                dim, k, 1
            )  # windows that start at shift -u and run over u', latest u first
        return places.flip(tuple(range(1, n + 1))).movedim(0, n).flatten()


@lru_cache(256)
def _unvisited_lines(geometry: Geometry) -> list[tuple[int, slice, Geometry]]:
    """Positions where the kernel overlaps the image but that the convolution does not visit, each
    exactly once.

    They lie on lines across one dimension (in 2-D rows, then the rest of the columns). Along a line
    the taps in this dimension always cover the same pixels, so that these are channels of a
    convolution in one dimension less.

    Returns:
        The dimension, the taps in it that overlap the image, and the smaller convolution. The first
        taps lie on the last pixels, all others on the first ones.
    """
    # More padding than this only adds patches of zeros.
    visited = [
        (min(p, k - 1), min(q, k - 1))
        for (p, q), k in zip(geometry.padding, geometry.kernel, strict=True)
    ]
    everywhere = [(k - 1, k - 1) for k in geometry.kernel]
    found = []
    for dim, (k, (before, after)) in enumerate(zip(geometry.kernel, visited, strict=True)):
        others = [i for i in range(len(visited)) if i != dim]
        kernel, ones = tuple(geometry.kernel[i] for i in others), (1,) * len(others)
        line = Geometry(
            kernel, ones, ones, tuple(visited[i] if i < dim else everywhere[i] for i in others)
        )
        found += [(dim, slice(k - n, k), line) for n in range(1, k - before)]
        found += [(dim, slice(0, n), line) for n in range(1, k - after)]
    return found


def _correlations(
    x: Tensor, kernel: tuple[int, ...]
) -> Tensor:  # -> [c, c, k, *(2·kernel - 1)[1:]]
    """`R[c, c', ..., k - 1 + δ] = Σ x[c, q] x[c', q + δ]` for shifts `|δ| < k`; along the first
    dimension `δ >= 0`.

    `R[c, c', -δ] = R[c', c, δ]`, so that half of the shifts are enough.
    """
    n, c, k = len(kernel), x.shape[1], kernel[0]
    if (
        n == 1 and x.numel() * k <= _PATCH_BYTES // x.element_size()
    ):  # short lines: one product is faster
        shifted = (
            F.pad(x, [0, k - 1]).unfold(2, x.shape[2], 1).permute(1, 2, 0, 3)
        )  # [B, c, k, w] -> [c, k, B, w]
        return x.transpose(0, 1).flatten(1) @ shifted.flatten(2).flatten(0, 1).T
    ones, padding = (1,) * n, (0, *(k - 1 for k in kernel[1:]))
    if (
        n == 2 and prod(x.shape[2:]) <= c
    ):  # small images as weights are put in order sooner than many channels
        return F.conv2d(
            F.pad(x, [0, 0, 0, k - 1]).transpose(0, 1), x.transpose(0, 1), padding=padding
        ).transpose(0, 1)
    options = (None, ones, padding, ones, False, (0,) * n, 1, (False, True, False))
    total = x.new_zeros(c, c, k, *(2 * k - 1 for k in kernel[1:]))
    line = max(1, prod(x.shape[3:]))
    lines, examples = max(1, _ADDED // line), max(1, _ADDED // (line * x.shape[2]))
    for some in x.split(examples):
        for start in range(0, x.shape[2], lines):
            seen, met = some[:, :, start : start + lines], some[:, :, start : start + lines + k - 1]
            below = F.pad(met, [0, 0] * (n - 1) + [0, seen.shape[2] + k - 1 - met.shape[2]])
            # How Σ ⟨seen, convolution(below, w)⟩ depends on the weight w.
            weight = below.new_empty(1).expand(total.shape)
            total += torch.ops.aten.convolution_backward(seen, below, weight, *options)[1]
    return total
