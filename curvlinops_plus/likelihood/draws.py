"""Random numbers from uniform ones, by inverting distribution functions.

Inversion uses a fixed number of uniforms per draw, so draws don't depend on how the examples are split into batches,
and float64 uniforms make them (up to rounding of the probabilities) the same in every precision of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["categories", "inside", "normals", "number", "wide_dtype"]


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on the one kind of device (Apple's MPS) that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def number(value: float, device: torch.device) -> Tensor:
    """A number as a 0-d tensor, made on the device: nothing is copied to it, so nothing waits."""
    return torch.full((), value, dtype=wide_dtype(device), device=device)


def inside(uniforms: Tensor) -> Tensor:
    """Uniforms in [0, 1) moved into the open interval, where every inverse distribution function is finite."""
    eps = torch.finfo(uniforms.dtype).eps
    # 0 does occur. Half the spacing of the uniforms, eps / 4, is as far from 0 as their largest value is from 1.
    return uniforms.clamp(eps / 4, 1 - eps / 2)


def normals(uniforms: Tensor) -> Tensor:
    """Standard normal numbers `Φ⁻¹(u)` from uniforms in [0, 1), elementwise and finite.

    Example:
        >>> normals(torch.tensor([0.5], dtype=torch.float64))
        tensor([0.], dtype=torch.float64)
    """
    return torch.special.ndtri(inside(uniforms))


def categories(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Class indices [..., num] from probabilities [..., C] (of any sum) and uniforms [..., num] in [0, 1).

    The first class whose cumulative probability exceeds the uniform number: a class of probability zero is never drawn.
    One cumulative sum and a binary search per draw; nothing of size num x C is formed.

    Example:
        >>> u = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-53], dtype=torch.float64)
        >>> categories(torch.tensor([0.0, 0.5, 0.5, 0.0]), u)
        tensor([1, 1, 2, 2])
    """
    # Summing thousands of float32 probabilities in float32 would shift the boundaries by many of their spacings.
    cumulative = probabilities.cumsum(-1, dtype=uniforms.dtype)
    total = cumulative[..., -1:]
    # u * total may round up to total itself, beyond the last class.
    level = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN is larger than everything to searchsorted; the clamp lets it surface in the numbers, not as a bad index.
    return torch.searchsorted(cumulative, level.contiguous(), right=True).clamp_(max=probabilities.shape[-1] - 1)
