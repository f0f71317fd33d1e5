"""Random numbers from counters: a number depends on where it is used alone, not on what was drawn before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS, _LAST = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31
_PIECE = 2**16  # numbers that are made together: they and what they are made with fit the cache


def splitmix64(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, in place: uint64 to uint64, one to one, each bit depending on all bits.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; constants of Stafford.

    Example:
        >>> int(splitmix64(np.array([(1234567 + 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64))[0])
        6457827717110365317
    """
    shifted = np.empty_like(z)
    for bits, factor in _ROUNDS:
        np.right_shift(z, np.uint64(bits), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, np.uint64(factor), out=z)
    np.right_shift(z, np.uint64(_LAST), out=shifted)
    return np.bitwise_xor(z, shifted, out=z)


def counter_key(*numbers: int) -> int:
    """One 64-bit number from several, such as a seed and the number of an update; their order matters."""
    key = 0
    for number in numbers:  # `splitmix64` in integers: for one number arrays take ten times as long
        key = (key + number + _GAMMA) % 2**64
        for bits, factor in _ROUNDS:
            key = (key ^ key >> bits) * factor % 2**64
        key ^= key >> _LAST
    return key


def uniforms(key: int, examples: Sequence[int] | Tensor, first: int, count: int) -> Tensor:  # -> [N, count]
    """Uniform numbers in [0, 1), float64 on the CPU: for each example those at some positions.

    Args:
        key: From `counter_key`.
        examples: The numbers of the examples.

    Example:
        >>> whole = uniforms(counter_key(0), range(4), 0, 3)
        >>> bool((uniforms(counter_key(0), [3, 1], 1, 2) == whole[[3, 1], 1:]).all())
        True
    """
    found = torch.empty(len(examples), count, dtype=torch.float64)
    rows, step, gamma = found.numpy(), max(1, _PIECE // max(count, 1)), np.uint64(_GAMMA)
    positions = np.arange(first + 1, first + count + 1, dtype=np.uint64) * gamma
    for start in range(0, len(rows), step):
        piece = examples[start : start + step]
        run = (
            np.arange(piece.start, piece.stop, piece.step)
            if isinstance(piece, range)
            else torch.as_tensor(piece).numpy()
        )
        state = run.astype(np.int64).view(np.uint64)  # a copy
        state *= gamma
        state += np.uint64(key)
        bits = splitmix64(splitmix64(state)[:, None] + positions)
        np.right_shift(bits, np.uint64(11), out=bits)
        np.multiply(bits, 2.0**-53, out=rows[start : start + step])
    return found
