"""Tensors and options in a few numbers and plain Python, which tell later, or in another process, if they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of lists and dictionaries among options; longer ones are data.
_LONG = 64
# Relative to the size: another order of the same summands.
_ROUNDING = 1e-12


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """For each tensor `Σ x` and `Σ x²` in double precision; NaN and infinities count as numbers.

    Cost: one pass over their memory.

    Example:
        >>> sums_of({"x": torch.tensor([1.0, -2.0])})
        {'x': [-1.0, 5.0]}
    """
    found = []
    with torch.no_grad():
        for t in tensors.values():
            # A part of a tensor is no tensor that others have.
            t = t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[operator]
            t = t.to_dense() if t.layout != torch.strided else t
            t = torch.view_as_real(t) if t.is_complex() else t
            x = (t.cpu() if t.device.type == "mps" else t).double()
            x = torch.nan_to_num(x, nan=0.5772156649, posinf=2.7182818285, neginf=-3.1415926536)
            found.append(torch.stack((x.sum(), x.square().sum())))
    together = [sums.to(found[0].device) for sums in found]  # every answer of a GPU is waited for
    return dict(zip(tensors, torch.stack(together).tolist() if found else [], strict=True))


@dataclass(frozen=True, eq=False)
class TensorSums:
    """A tensor as it is told to other processes: equal to those whose sums differ by rounding only.

    Attributes:
        kind: Dtype and shape.
        total: `Σ x`.
        squares: `Σ x²`.
        rounding: What they may differ by, relative to the largest sums that such squares can have.
    """

    kind: str
    total: float
    squares: float
    rounding: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSums) or self.kind != other.kind:
            return False
        room, size = max(self.rounding, other.rounding), max(self.squares, other.squares)
        apart = abs(self.total - other.total)
        return abs(self.squares - other.squares) <= 2 * room * size and apart <= room * (size + size**0.5)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.kind} with Σ x = {self.total:.7g}, Σ x² = {self.squares:.7g}"


def compared(tensors: Mapping[str, Tensor], rounding: float = _ROUNDING) -> dict[str, TensorSums]:
    """What other processes are told of tensors, which may differ by `rounding`."""
    kinds = {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()}
    return {name: TensorSums(kinds[name], sums[0], sums[1], rounding) for name, sums in sums_of(tensors).items()}


def rounding_of(dtype: torch.dtype) -> float:
    """By what vectors may differ that processes compute each by itself, relative to their size."""
    return max(1e-10, 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps)


def described(value: Any, other: Callable[[Any], Any] = lambda value: None) -> Any:
    """An option in plain Python that can be sent: numbers, words, sums of tensors, names of functions and types.

    Args:
        other: What is said of other objects: anything but None counts.
    """
    own = other(value)
    if own is not None:
        return own
    if value is None or isinstance(value, (str, Number)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        return compared({"": value})[""]
    if isinstance(value, (list, tuple)):
        return [described(item, other) for item in value] if len(value) <= _LONG else len(value)
    if isinstance(value, Mapping):
        return {str(key): described(item, other) for key, item in value.items()} if len(value) <= _LONG else len(value)
    if isinstance(value, torch.dtype) or hasattr(value, "__qualname__"):
        return getattr(value, "__qualname__", str(value))
    plain = {name: item for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, (str, Number))}
    return [type(value).__name__, plain]
