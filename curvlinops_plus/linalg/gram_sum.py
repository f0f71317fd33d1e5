"""Symmetric products `rowsᵀ rows` at half the work of a general matrix product, where that pays."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32

_BLOCK = 256  # a tile and its transpose fit the cache
_AS_IT_IS = nullcontext()
_PACKED = "packed", "packed_total"  # in states: numbers of which other summands are made


def gram(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d, d]
    """The symmetric matrix `rowsᵀ rows`, accumulated in float32 at least; with a batch axis one for each of its items.

    On the CPU only one triangle is computed for large `d`, about 2x faster with one thread and 1.3x with several.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[1., 2.],
                [2., 5.]])
    """
    rows = at_least_float32(rows)
    if rows.ndim == 3:
        items = rows.transpose(0, 1)
        return items.mT @ items
    # Half of the work, M d² operations, must pay for mirroring d² entries; what is written in place has no derivative.
    if len(rows) < 192 or not _half_pays(rows) or rows.requires_grad:
        return rows.T @ rows
    return mirror(lower_gram(rows))


def lower_gram(rows: Tensor, room: bool = False) -> Tensor:  # [M, d] -> [d, d]
    """The lower triangle of `gram(rows)`, and above it anything: what `mirror` takes, also as a sum of several.

    With `room`, large ones have memory for one more row and column.
    """
    rows, d = at_least_float32(rows), rows.shape[1]
    if not _half_pays(rows):
        return rows.T @ rows
    return _add_triangle(rows, rows.new_zeros((d + room) ** 2)[: d * d].view(d, d))


class PackedForm(Protocol):
    """How a symmetric matrix follows from other numbers; equal if it does so in the same way."""

    @property
    def columns(self) -> int: ...

    def unpack(self, values: Tensor) -> Tensor:
        """The matrix [columns, columns], which is linear in `values`."""
        ...

    def row_sum(self, total: Tensor) -> Tensor:
        """The sum of rows [columns], which is linear in `total`."""
        ...


@dataclass(eq=False)
class PackedGram:
    """`Σ rowsᵀ rows` by other numbers, of rows that were not formed.

    Attributes:
        values: These numbers. Only values of one shape are added up.
        form: What they mean.
        total: What the sum of rows is made of; None if that is not wanted.
        rows: How many rows there are.
    """

    values: Tensor
    form: PackedForm
    total: Tensor | None
    rows: float


class GramSum:
    """`Σ rowsᵀ rows` over many pieces of rows, if wanted as if each row had a 1 at its end.

    Of a large sum only one triangle is kept until somebody asks for it. Memory: `d²` numbers.

    Args:
        ones: Whether there is a 1 at the end of each row.
        total: A sum to begin with, as `take` returns it; it is taken over.
        refer: Whether pieces wait, up to `2 d` rows, without being copied: for a short-lived sum that is merged into
            another one. Rows must not be written to before that, see `changed`.

    Example:
        >>> total = GramSum(ones=True)
        >>> total.add(torch.tensor([[1.0, 2.0]]))
        >>> total.value()
        tensor([[1., 2., 1.],
                [2., 4., 2.],
                [1., 2., 1.]])
    """

    def __init__(self, ones: bool, total: Tensor | None = None, refer: bool = False) -> None:
        self.ones = ones
        self._refer = refer
        self._pieces: list[tuple[Tensor, int]] = []  # that are referred to, and their versions
        self._changed = False
        self._triangle: Tensor | None = None  # the lower one, which `_factor` belongs to; what is above may be anything
        self._factor = 1.0
        self._packed: tuple[PackedForm, Sequence[Tensor]] | None = None  # of which other summands are made
        self._sum: Tensor | None = None
        self._count: Tensor | float = 0.0
        if total is not None:
            self._triangle = (total[:-1, :-1] if ones else total).contiguous()
            self._sum, self._count = (total[-1, :-1].clone(), total[-1, -1].clone()) if ones else (None, 0.0)

    def add(self, rows: Tensor) -> None:
        """Add the product of rows [M, d]."""
        self._count = self._count + float(rows.shape[0])
        if self.ones:
            self._add_ones(rows.sum(0))
        self._add_piece(rows)

    def add_packed(self, packed: PackedGram) -> None:
        """Add a product that is packed."""
        self._count = self._count + packed.rows
        self._add_values(packed.form, [packed.values] if packed.total is None else [packed.values, packed.total])

    def merge(self, other: GramSum) -> None:
        """Add another sum, which stays as it is; in `plain_mode`."""
        self._count = self._count + other._count
        if other._sum is not None:
            self._add_ones(other._sum.clone() if self._sum is None else other._sum)
        if other._packed is not None:
            form, values = other._packed
            self._add_values(form, values if self._packed is not None else [t.clone() for t in values])
        for rows, _ in other._pieces:
            self._add_piece(rows)
        if other._triangle is not None:
            own = self._triangle is None or other._factor != 1
            self._add_matrix(other._triangle * other._factor if own else other._triangle)

    def decay(self, factor: float) -> None:
        """Multiply what was added until now. A triangle is multiplied when the next rows are added to it."""
        self._flush()
        self._factor *= factor
        for t in () if self._packed is None else self._packed[1]:
            t.mul_(factor)
        if self._sum is not None:
            self._sum *= factor
        self._count = self._count * factor

    @property
    def changed(self) -> bool:
        """Whether rows were written to before they were multiplied."""
        return self._changed or any(rows._version != version for rows, version in self._pieces)

    def witnesses(self) -> list[Tensor]:
        """Tensors whose squares have a finite sum only if all entries of the sum are finite."""
        found = [rows for rows, _ in self._pieces]
        if self._packed is not None:
            found.append(self._packed[1][0])
        return found if self._triangle is None else [*found, self._triangle.diagonal()]

    @property
    def shape(self) -> torch.Size:
        """That of `value`."""
        d = (self._packed[0].columns if self._packed is not None else self._held.shape[1]) + self.ones
        return torch.Size((d, d))

    @property
    def _held(self) -> Tensor:
        """Something that was added."""
        packed = () if self._packed is None else self._packed[1]
        held = (self._triangle, *packed, *(rows for rows, _ in self._pieces))
        return next(t for t in held if t is not None)

    def value(self) -> Tensor:  # -> [d, d], or [d + 1, d + 1] with ones
        """The sum, as in `plain_mode`; more may be added afterwards."""
        with plain_mode(self._held.device.type):
            other = copy(self)  # whose total is made in these; the rest is only read
            other._triangle, other._sum, other._pieces = _cloned(self._triangle), _cloned(self._sum), [*self._pieces]
            return other.take()

    def state_dict(self) -> dict[str, Any]:
        """What was added, and in which parts: who goes on from here rounds as this object."""
        self._flush()
        form, values = (None, ()) if self._packed is None else self._packed
        found = {"triangle": self._triangle, "sum": self._sum, **dict(zip(_PACKED, values))}
        tensors = {name: t.detach().clone() for name, t in found.items() if t is not None}
        told = {} if form is None else {"form": repr(form)}
        return {"ones": self.ones, "factor": self._factor, "count": _cloned(self._count), **told, **tensors}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], device: torch.device, form: Callable[[str], PackedForm] | None = None
    ) -> GramSum:
        """The sum that `state_dict` returned; `form` makes a form of what its `repr` was, if numbers are packed."""
        kept: dict[str, Any] = {
            name: t.to(device, copy=True) if isinstance(t, Tensor) else t for name, t in state.items()
        }
        total = cls(kept["ones"])
        total._triangle, total._factor = kept.get("triangle"), kept["factor"]
        total._sum, total._count = kept.get("sum"), kept["count"]
        if "form" in kept:
            assert form is not None
            total._packed = form(kept["form"]), [kept[name] for name in _PACKED if name in kept]
        return total

    def take(self) -> Tensor:
        """As `value` in the memory of the object, which must not be used afterwards; in `plain_mode`."""
        self._flush()
        self._unpack()
        total = self._triangle
        assert total is not None  # something was added
        if self._factor != 1:
            total *= self._factor
        if self._sum is None:
            return mirror(total)
        framed = _with_frame(total)
        framed[-1, :-1], framed[-1, -1] = self._sum, self._count
        self._triangle = None
        del total
        return mirror(framed)

    def _add_ones(self, total: Tensor) -> None:
        self._sum = total if self._sum is None else self._sum.add_(total)

    def _add_values(self, form: PackedForm, values: Sequence[Tensor]) -> None:
        own = () if self._packed is None else self._packed[1]
        if self._packed is None or self._packed[0] != form or [t.shape for t in own] != [t.shape for t in values]:
            self._unpack()
            self._packed = form, values
            return
        for total, t in zip(own, values):
            total.add_(t)

    def _unpack(self) -> None:
        if self._packed is not None:
            form, (values, *totals) = self._packed
            self._packed = None
            self._add_matrix(form.unpack(values))
            for total in totals:
                self._add_ones(form.row_sum(total))

    def _add_matrix(self, total: Tensor) -> None:
        """Add a matrix of which the lower triangle counts; the first one is taken over."""
        own = self._triangle
        self._triangle = total if own is None else torch.add(total, own, alpha=self._factor, out=own)
        self._factor = 1.0

    def _add_piece(self, rows: Tensor) -> None:
        M, d = rows.shape
        if not self._refer or 2 * d < M:
            return self._multiply(rows)
        if sum(len(piece) for piece, _ in self._pieces) + M > 2 * d:
            self._flush()
        self._pieces.append((rows, rows._version))

    def _flush(self) -> None:
        if self._pieces:
            self._changed = self.changed
            for rows, _ in self._pieces:
                self._multiply(rows)
            self._pieces = []

    def _multiply(self, rows: Tensor) -> None:
        total = self._triangle
        if total is None:
            self._triangle = lower_gram(rows, room=self.ones)
        elif not len(rows):
            return
        elif _half_pays(rows := rows.to(total.dtype)):
            _add_triangle(rows, total, self._factor)
        else:
            total.addmm_(rows.T, rows, beta=self._factor)
        self._factor = 1.0


def plain_mode(device: str) -> AbstractContextManager[None]:
    """Context without autograd and autocast, whatever the modes around it: sums are the same wherever they are made.

    Args:
        device: Type of the device.
    """
    # Each context costs as much as a small product does.
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device):
        return _plain_mode(device)
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


@contextmanager
def _plain_mode(device: str) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        yield


def mirror(C: Tensor) -> Tensor:  # [d, d] -> [d, d]
    """Copy the lower triangle of `C` onto the upper one, in place.

    Example:
        >>> mirror(torch.tensor([[1.0, 7.0], [2.0, 3.0]]))
        tensor([[1., 2.],
                [2., 3.]])
    """
    if C.shape[0] <= _BLOCK:
        return C.tril_().add_(C.tril(-1).T)
    for start in range(0, C.shape[0], _BLOCK):
        stop = start + _BLOCK
        tile = C[start:stop, start:stop]
        tile.copy_(tile.tril() + tile.tril(-1).T)
        if stop < C.shape[0]:
            C[start:stop, stop:] = C[stop:, start:stop].T
    return C


def _with_frame(C: Tensor) -> Tensor:  # [d, d] -> [d + 1, d + 1]
    """`C` with one more row and column of anything, made in its memory if there is room: `C` is no more then."""
    d = C.shape[0]
    room = C.is_contiguous() and not C.storage_offset() and C.untyped_storage().nbytes() == (d + 1) ** 2 * C.itemsize
    framed = C.as_strided((d + 1, d + 1), (d + 1, 1)) if room else C.new_empty(d + 1, d + 1)
    for start in reversed(range(0, d, _BLOCK)):  # rows move towards the end
        stop = min(start + _BLOCK, d)
        framed[start:stop, :d] = C[start:stop].clone()
    return framed


def _cloned(t: Any) -> Any:
    return t.clone() if isinstance(t, Tensor) else t


def _half_pays(rows: Tensor) -> bool:
    """Whether one triangle is computed faster than all."""
    return rows.shape[1] >= 128 and rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def _add_triangle(rows: Tensor, total: Tensor, factor: float = 1.0) -> Tensor:
    """Add `rowsᵀ rows` to the lower triangle of `factor * total`, in place; above it may stand anything afterwards."""
    if torch.get_num_threads() == 1 and _openblas() is not None:
        return _add_rank_k(rows, total, factor)
    return _add_quarters(rows, total, factor)


def _add_rank_k(rows: Tensor, total: Tensor, factor: float = 1.0) -> Tensor:
    """The same by BLAS `syrk`, which reads the rows where they are."""
    transposed = rows.T.is_contiguous()
    array = rows.detach().numpy() if transposed else rows.detach().contiguous().numpy().T  # BLAS stores by columns
    with blas_threads():
        # BLAS's upper triangle is our lower one. It writes to `total`; a tensor made of what it returns would keep it.
        _syrk(rows.dtype)(1.0, array, factor, total.numpy().T, trans=int(transposed), lower=0, overwrite_c=True)
    return total


def _add_quarters(rows: Tensor, total: Tensor, factor: float = 1.0) -> Tensor:
    """The same by three of the four quarters; PyTorch has no `syrk`."""
    h = rows.shape[1] // 2
    a, b = rows[:, :h], rows[:, h:]
    total[:h, :h].addmm_(a.T, a, beta=factor)
    total[h:, h:].addmm_(b.T, b, beta=factor)
    total[h:, :h].addmm_(b.T, a, beta=factor)
    return total


@cache
def _syrk(dtype: torch.dtype) -> Any:
    return scipy.linalg.get_blas_funcs("syrk", dtype=str(dtype).removeprefix("torch."))


@cache
def _openblas() -> Any:
    """The BLAS inside of SciPy if its threads can be bounded, which else compete with PyTorch's; None elsewhere."""
    try:
        library = ctypes.CDLL(scipy.linalg._fblas.__file__)  # type: ignore[attr-defined]
        return library if library.scipy_openblas_get_num_threads() > 0 else None
    except (AttributeError, OSError):
        return None


_BOUND = threading.Lock()
_INSIDE: list[int] = []  # how many threads BLAS had before, once per caller that is inside


@contextmanager
def blas_threads() -> Iterator[None]:
    """As many threads of SciPy's BLAS as PyTorch has: else both compete. Several threads may be inside at once."""
    if (library := _openblas()) is None:
        yield
        return
    with _BOUND:
        _INSIDE.append(_INSIDE[0] if _INSIDE else library.scipy_openblas_get_num_threads())
        library.scipy_openblas_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        with _BOUND:
            before = _INSIDE.pop()
            if not _INSIDE:
                library.scipy_openblas_set_num_threads(before)
