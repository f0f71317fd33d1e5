"""Random draws: uniform numbers from counters, and what inverting distribution functions makes of
them.

A number depends on where it is used alone, not on what was drawn before. Inversion uses a fixed
number of uniforms per draw, so draws for a data set don't depend on how its examples are split into
batches, and float64 uniforms make them (up to rounding of the probabilities) the same in every
precision of the model. Optimizers take one generator for a batch, which is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.linalg.pieces import rows_at_once

# Cumulative sums are formed for about so many bytes of probabilities at a time.
_DRAW_BYTES = 2**19
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_PIECE = 2**16  # numbers that are made together: they and what they are made with fit the cache


def splitmix64(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, in place: uint64 to uint64, one to one, each bit depending on
    all bits.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; constants
    of Stafford.

    Example:
        >>> int(splitmix64(np.array([(1234567 + 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64))[0])
        6457827717110365317
    """
    shifted = np.empty_like(z)
    for bits, factor in _ROUNDS:
        np.right_shift(z, np.uint64(bits), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, np.uint64(factor), out=z)
    np.right_shift(z, np.uint64(_LAST_SHIFT), out=shifted)
    return np.bitwise_xor(z, shifted, out=z)


def counter_key(*numbers: int) -> int:
    """One 64-bit number from several, such as a seed and the number of an update; their order
    matters.
    """
    key = 0
    for number in numbers:  # `splitmix64` in integers: for one number arrays take ten times as long
        key = (key + number + _GAMMA) % 2**64
        for bits, factor in _ROUNDS:
            key = (key ^ key >> bits) * factor % 2**64
        key ^= key >> _LAST_SHIFT
    return key


def uniforms(
    key: int, examples: Sequence[int] | Tensor, first: int, count: int
) -> Tensor:  # -> [N, count]
    """Uniform numbers in [0, 1), float64 on the CPU: for each example those at some positions.

    Args:
        key: From `counter_key`.
        examples: The numbers of the examples.

    Example:
        >>> whole = uniforms(counter_key(0), range(4), 0, 3)
        >>> bool((uniforms(counter_key(0), [3, 1], 1, 2) == whole[[3, 1], 1:]).all())
        True
    """
    drawn = torch.empty(len(examples), count, dtype=torch.float64, device="cpu")
    rows = drawn.numpy()
    gamma = np.uint64(_GAMMA)
    positions = np.arange(first + 1, first + count + 1, dtype=np.uint64) * gamma
    step = max(1, _PIECE // max(count, 1))
    for start in range(0, len(rows), step):
        piece = examples[start : start + step]
        if isinstance(piece, range):
            numbers = np.arange(piece.start, piece.stop, piece.step, dtype=np.int64)
        else:
            numbers = torch.as_tensor(piece).numpy().astype(np.int64)
        state = splitmix64(numbers.view(np.uint64) * gamma + np.uint64(key))
        bits = splitmix64(state[:, None] + positions)
        np.right_shift(bits, np.uint64(11), out=bits)
        np.multiply(bits, 2.0**-53, out=rows[start : start + step])
    return drawn


def batch_uniforms(key: int, rows: int, count: int) -> Tensor:  # -> [rows, count]
    """Uniform numbers in (0, 1), float32 on the CPU, which belong to a batch as a whole.

    Args:
        key: From `counter_key`.

    Example:
        >>> batch_uniforms(counter_key(0, 1), 2, 3).shape
        torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(key)
    numbers = torch.rand(rows, count, generator=generator, dtype=torch.float32, device="cpu")
    return numbers.clamp_(min=2**-25)  # multiples of 2⁻²⁴, of which 0 has no logarithm


def inside(uniforms: Tensor) -> Tensor:
    """Uniforms in [0, 1) moved into the open interval, where every inverse distribution function is
    finite.
    """
    eps = torch.finfo(uniforms.dtype).eps
    # 0 does occur. Half the spacing of the uniforms, eps / 4, is as far from 0 as their largest
    # value is from 1.
    return uniforms.clamp(eps / 4, 1 - eps / 2)


def normals(uniforms: Tensor) -> Tensor:
    """Standard normal numbers `Φ⁻¹(u)` from uniforms in [0, 1), elementwise and finite."""
    # A fifth of the time of `ndtri`. `2 u - 1` is exact: uniforms are multiples of the spacing of
    # numbers below 1.
    return inside(uniforms).mul_(2).sub_(1).erfinv_().mul_(2**0.5)


def categories(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Class indices [..., num] from probabilities [..., C] (of any sum) and uniforms [..., num] in
    [0, 1).

    The first class whose cumulative probability exceeds the uniform number: a class of probability
    zero is never drawn. One cumulative sum and a binary search per draw, some rows at a time;
    nothing of size num x C is formed.

    Example:
        >>> u = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-53], dtype=torch.float64)
        >>> categories(torch.tensor([0.0, 0.5, 0.5, 0.0]), u)
        tensor([1, 1, 2, 2])
    """
    C = probabilities.shape[-1]
    num = uniforms.shape[-1]
    n = uniforms.shape[:-1].numel()
    rows = rows_at_once(uniforms.device, _DRAW_BYTES, C * probabilities.element_size())
    zero = uniforms.new_zeros((), dtype=torch.float64)
    pieces = []
    for p, u in zip(
        probabilities.reshape(n, C).split(rows),
        uniforms.double().reshape(n, num).split(rows),
        strict=True,
    ):
        # Summing thousands of float32 probabilities in float32 would shift the boundaries by many
        # of their spacings.
        cumulative = p.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # u * total may round up to total itself, beyond the last class.
        level = torch.minimum(u * total, torch.nextafter(total, zero))
        pieces.append(torch.searchsorted(cumulative, level, right=True))
    labels = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    # searchsorted treats NaN as the largest number; the clamp keeps the index valid, so that NaN
    # appears in the result.
    return labels.clamp_(max=C - 1).view(uniforms.shape)


def counts(rates: Tensor, uniforms: Tensor) -> Tensor:
    """Poisson counts with these rates, elementwise from uniforms in [0, 1): smallest k with `P(Y <=
    k) > u`.

    Bisection between bounds that hold all but 2⁻⁵⁴ of the probability on either side. A rate that
    is not finite gives NaN. Cost: about `5 + log2(√rate) ` incomplete gamma functions per number,
    for the largest rate of all.

    Example:
        >>> u = torch.tensor([0.0, 0.36, 0.37, 0.99], dtype=torch.float64)
        >>> counts(torch.ones(4, dtype=torch.float64), u)
        tensor([0., 0., 1., 4.], dtype=torch.float64)
    """
    u = inside(uniforms)
    spread = rates.sqrt()
    # Bernstein: P(Y <= λ - x) <= exp(-x²/2λ) and P(Y >= λ + x) <= exp(-x²/(2λ + 2x/3)).
    low = (rates - 9 * spread).floor().clamp(min=0)
    high = (rates + 9 * spread + 25).floor()
    widest = (high - low).nan_to_num(0, 0, 0).amax() if rates.numel() else rates.new_zeros(())
    for _ in range(int(widest).bit_length()):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, rates) > u
        high = torch.where(enough, middle, high)
        low = torch.minimum(torch.where(enough, low, middle + 1), high)
    return torch.where(rates.isfinite(), high, torch.nan)
