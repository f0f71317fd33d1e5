"""Random numbers from uniform ones, by inverting distribution functions.

Inversion uses a fixed number of uniforms per draw, so draws don't depend on how the examples are split into batches,
and float64 uniforms make them (up to rounding of the probabilities) the same in every precision of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Cumulative probabilities in float64 are formed in pieces of about this size.
_WORK_BYTES = 2**20


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's MPS devices, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def scalar(value: float, device: torch.device) -> Tensor:
    """A number as a 0-d tensor, created on the device without a copy or synchronization."""
    return torch.full((), value, dtype=wide_dtype(device), device=device)


def inside(uniforms: Tensor) -> Tensor:
    """Uniforms in [0, 1) moved into the open interval, where every inverse distribution function is finite."""
    eps = torch.finfo(uniforms.dtype).eps
    # 0 does occur. Half the spacing of the uniforms, eps / 4, is as far from 0 as their largest value is from 1.
    return uniforms.clamp(eps / 4, 1 - eps / 2)


def normals(uniforms: Tensor) -> Tensor:
    """Standard normal numbers `Φ⁻¹(u)` from uniforms in [0, 1), elementwise and finite."""
    return torch.special.ndtri(inside(uniforms))


def categories(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Class indices [..., num] from probabilities [..., C] (of any sum) and uniforms [..., num] in [0, 1).

    The first class whose cumulative probability exceeds the uniform number: a class of probability zero is never drawn.
    One cumulative sum and a binary search per draw, some rows at a time; nothing of size num x C is formed.

    Example:
        >>> u = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-53], dtype=torch.float64)
        >>> categories(torch.tensor([0.0, 0.5, 0.5, 0.0]), u)
        tensor([1, 1, 2, 2])
    """
    C, num = probabilities.shape[-1], uniforms.shape[-1]
    rows = max(1, _WORK_BYTES // (max(C, 1) * uniforms.element_size()))
    if uniforms.shape[:-1].numel() <= rows:
        return _categories(probabilities, uniforms)
    parts = zip(probabilities.reshape(-1, C).split(rows), uniforms.reshape(-1, num).split(rows), strict=True)
    return torch.cat([_categories(p, u) for p, u in parts]).view(uniforms.shape)


def _categories(probabilities: Tensor, uniforms: Tensor) -> Tensor:  # [..., C], [..., num] -> [..., num]
    # Summing thousands of float32 probabilities in float32 would shift the boundaries by many of their spacings.
    cumulative = probabilities.cumsum(-1, dtype=uniforms.dtype)
    total = cumulative[..., -1:]
    # u * total may round up to total itself, beyond the last class.
    level = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    # searchsorted treats NaN as the largest number; the clamp keeps the index valid, so that NaN appears in the result.
    return torch.searchsorted(cumulative, level.contiguous(), right=True).clamp_(max=probabilities.shape[-1] - 1)


def counts(rates: Tensor, uniforms: Tensor) -> Tensor:
    """Poisson counts with these rates, elementwise from uniforms in [0, 1): smallest k with `P(Y <= k) > u`.

    Bisection between bounds that hold all but 2⁻⁵⁴ of the probability on either side. A rate that is not finite gives
    NaN. Cost: about `5 + log2(√rate) ` incomplete gamma functions per number, for the largest rate of all.

    Example:
        >>> u = torch.tensor([0.0, 0.36, 0.37, 0.99], dtype=torch.float64)
        >>> counts(torch.ones(4, dtype=torch.float64), u)
        tensor([0., 0., 1., 4.], dtype=torch.float64)
    """
    u, spread = inside(uniforms), rates.sqrt()
    # Bernstein: P(Y <= λ - x) <= exp(-x²/2λ) and P(Y >= λ + x) <= exp(-x²/(2λ + 2x/3)).
    low, high = (rates - 9 * spread).floor().clamp(min=0), (rates + 9 * spread + 25).floor()
    widest = (high - low).nan_to_num(0, 0, 0).amax() if rates.numel() else rates.new_zeros(())
    for _ in range(int(widest).bit_length()):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, rates) > u
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        low = torch.minimum(low, high)
    return torch.where(rates.isfinite(), high, torch.nan)
