"""Tensors and options in a few numbers and plain Python, which tell later, or in another process, if they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from math import cos, isfinite
from math import sin as sine_of
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Waves of a longer tensor are those of one piece, shifted.
_PIECE = 2**18
# Shorter tensors are summed up together.
_SHORT = 2**12
# Of lists and dictionaries among options; longer ones are data.
_LONG = 64
_DEPTH = 4
# Relative to the sum of absolute values: another order of the same summands.
_ROUNDING = 1e-12


class Sums(Mapping[str, list[float]]):
    """For each tensor `Σ|p|` and `Σ p·cos(index)`. Short ones are copied, and summed up when a number is asked for.

    Args:
        tensors: The tensors, by name, of whatever device and dtype.
        device: Where the numbers of all are gathered.

    Cost: one pass over their memory, 2 ms for a million numbers on one core.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, -2.0])
        >>> Sums({"x": x}, x.device)["x"] == Sums({"x": x.flip(0)}, x.device)["x"]
        False
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        together = device if device.type in ("cpu", "cuda") else None
        short = {
            key: p
            for key, p in tensors.items()
            if type(p) in (Tensor, nn.Parameter) and p.device == together and p.numel() <= _SHORT
            if p.dtype.is_floating_point and p.layout == torch.strided
        }
        self._copy = torch.cat([*map(torch.flatten, short.values())]).detach() if short else None
        self._shapes = {key: p.shape for key, p in short.items()}
        self._long: dict[str, Tensor] = {}
        if len(short) < len(tensors):
            with torch.no_grad():
                long = {key: _sums(p) for key, p in tensors.items() if key not in short}
                self._long = {key: torch.stack(sums).to(device) for key, sums in long.items()}
        self._keys = list(tensors)

    @cached_property
    def _numbers(self) -> dict[str, list[float]]:
        lengths = tuple(shape.numel() for shape in self._shapes.values())
        parts = [] if self._copy is None else [_short_sums(self._copy, lengths)]
        # Read together: every answer of a GPU is waited for.
        found = [sums.view(-1, 2) for sums in (*parts, *self._long.values())]
        read = torch.cat(found).tolist() if found else []
        numbers = dict(zip([*self._shapes, *self._long], read, strict=True))
        self._copy = None
        return {key: numbers[key] for key in self._keys}

    def __getitem__(self, key: str) -> list[float]:
        return self._numbers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True, eq=False)
class TensorSums:
    """A tensor as it is told to other processes: equal to those whose sums differ by rounding only.

    Attributes:
        kind: Dtype and shape.
        size: `Σ|p|`.
        wave: `Σ p·cos(index)`.
        rounding: What they may differ by, relative to the first one.

    Example:
        >>> import torch
        >>> one, other = compared({"x": torch.ones(3), "y": torch.tensor([1.0, -1.0, 1.0])}).values()
        >>> one
        float32 [3] with Σ|x| = 3, Σ x·cos(k) = 1.124155
        >>> one == other
        False
    """

    kind: str
    size: float
    wave: float
    rounding: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSums) or self.kind != other.kind:
            return False
        room = max(self.rounding, other.rounding) * max(self.size, other.size)
        return all(abs(a - b) <= room for a, b in ((self.size, other.size), (self.wave, other.wave)))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.kind} with Σ|x| = {self.size:.7g}, Σ x·cos(k) = {self.wave:.7g}"


def compared(tensors: Mapping[str, Tensor], rounding: float = _ROUNDING) -> dict[str, TensorSums]:
    """What other processes are told of tensors, which may differ by `rounding`. NaN and infinities count as numbers."""
    # A part of a tensor is no tensor that others have.
    whole: dict[str, Any] = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}  # type: ignore[operator]
    device = next((t.device for t in whole.values()), torch.device("cpu"))
    found = dict(Sums(whole, device))
    strange = {name: t for name, t in whole.items() if not all(map(isfinite, found[name]))}
    if strange:
        found |= Sums({name: _finite(t) for name, t in strange.items()}, device)
    kinds = {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in whole.items()}
    return {name: TensorSums(kind, found[name][0], found[name][1], rounding) for name, kind in kinds.items()}


def rounding_of(dtype: torch.dtype) -> float:
    """By what vectors may differ that processes compute each by itself, relative to the sum of absolute values."""
    return max(1e-10, 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps)


def described(value: Any, other: Callable[[Any], Any] = lambda value: None, depth: int = _DEPTH) -> Any:
    """An option in plain Python that can be sent: numbers, words, sums of tensors, types with attributes.

    Args:
        other: What is said of other objects: anything but None counts.
        depth: How far attributes of attributes are looked at.
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
    if isinstance(value, (torch.dtype, type)):
        return str(value)
    if depth == 0:
        return type(value).__name__
    return _parts(value, partial(described, other=other, depth=depth - 1))


def _parts(value: Any, again: Callable[[Any], Any]) -> Any:
    """Items of a list or dictionary, what a function holds, or attributes, each as `again` says it."""
    if isinstance(value, (list, tuple)):
        return [again(item) for item in value] if len(value) <= _LONG else len(value)
    if isinstance(value, Mapping):
        return {str(key): again(item) for key, item in value.items()} if len(value) <= _LONG else len(value)
    if isinstance(value, partial):
        return [again(part) for part in (value.func, value.args, value.keywords)]
    name = getattr(value, "__qualname__", type(value).__name__)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_full(cell)]
    held = [*cells, *(getattr(value, "__defaults__", None) or ()), getattr(value, "__self__", None)]
    return [name, again(dict(getattr(value, "__dict__", {}))), again(held)]


def _is_full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _finite(t: Tensor) -> Tensor:
    """The same with numbers that are unlikely otherwise in place of NaN and infinities."""
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    t = t.cpu().double() if t.device.type == "mps" else t.double()
    return torch.nan_to_num(t, nan=0.5772156649, posinf=2.7182818285, neginf=-3.1415926536)


def _short_sums(flat: Tensor, lengths: tuple[int, ...]) -> Tensor:  # -> [number of tensors, 2]
    """The same as `_sums`, of all tensors at once."""
    waves, ends = _short_waves(lengths, flat.device)
    flat = flat.double()
    return torch.segment_reduce(torch.stack((flat.abs(), flat * waves), 1), "sum", lengths=ends)


@lru_cache(16)
def _short_waves(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        cosine = _waves(device)[0]
        return torch.cat([cosine[:length] for length in lengths]), torch.tensor(lengths, device=device)


def _sums(p: Tensor) -> tuple[Tensor, Tensor]:
    if p.is_meta:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    p = p if p.layout == torch.strided else p.to_dense()
    flat = (torch.view_as_real(p) if p.is_complex() else p).reshape(-1)
    flat = flat.cpu() if flat.device.type == "mps" else flat  # which has no float64
    cosine, sine = _waves(flat.device)
    if len(flat) <= _PIECE:
        x = flat.double()
        return x.abs().sum(), x.dot(cosine[: len(x)])
    size = wave = flat.new_zeros((), dtype=torch.float64)
    for start in range(0, len(flat), _PIECE):
        x = flat[start : start + _PIECE].double()
        size = size + x.abs().sum()
        # cos(s + k) = cos s cos k - sin s sin k
        wave = wave + cos(start) * x.dot(cosine[: len(x)]) - sine_of(start) * x.dot(sine[: len(x)])
    return size, wave


@cache
def _waves(device: torch.device) -> tuple[Tensor, Tensor]:
    k = torch.arange(_PIECE, dtype=torch.float64, device=device)
    return k.cos(), k.sin()
