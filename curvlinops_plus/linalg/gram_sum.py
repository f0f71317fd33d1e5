"""Symmetric products `rowsᵀ rows`, and their sums over many pieces of rows.

Of large ones BLAS's `syrk` computes one triangle in half the time of a general product. PyTorch has no `syrk`; SciPy's
is taken while PyTorch has a single thread, as both have threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32, blas_threads, openblas

_BLOCK = 256  # a tile and its transpose fit the cache
_AS_IT_IS = nullcontext()


def gram(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d, d]
    """The symmetric matrix `rowsᵀ rows`, accumulated in float32 at least; with a batch axis one for each of its items.

    On the CPU, with one thread, only one triangle is computed for large `d`, about 2x faster.

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
    if len(rows) < 192 or rows.requires_grad or not _half_pays(rows):
        return rows.T @ rows
    return mirror(_add_triangle(rows, rows.new_zeros(rows.shape[1], rows.shape[1])))


class PackedForm(Protocol):
    """How a symmetric matrix follows from other numbers; equal if it does so in the same way."""

    def unpack(self, values: Tensor) -> Tensor:
        """The matrix [d, d], which is linear in `values`."""
        ...

    def row_sum(self, total: Tensor) -> Tensor:
        """The sum of rows [d], which is linear in `total`."""
        ...


@dataclass(eq=False)
class PackedGram:
    """`Σ rowsᵀ rows` by other numbers, of rows that were not formed.

    Attributes:
        values: These numbers.
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

    Only one triangle is kept until somebody asks for the sum. Memory: `d²` numbers.

    Args:
        ones: Whether there is a 1 at the end of each row.
        total: A sum to begin with, as `take` returns it; it is taken over.

    Example:
        >>> total = GramSum(ones=True)
        >>> total.add(torch.tensor([[1.0, 2.0]]))
        >>> total.value()
        tensor([[1., 2., 1.],
                [2., 4., 2.],
                [1., 2., 1.]])
    """

    def __init__(self, ones: bool, total: Tensor | None = None) -> None:
        self.ones = ones
        self._triangle = total  # the lower one; what is above may be anything
        self._sum: Tensor | None = None
        self._count: Tensor | float = 0.0
        self._packed: PackedGram | None = None  # another summand
        if total is not None and ones:
            self._triangle = total[:-1, :-1].contiguous()
            self._sum, self._count = total[-1, :-1].clone(), total[-1, -1].clone()

    def add(self, rows: Tensor) -> None:
        """Add the product of rows [M, d]."""
        rows = at_least_float32(rows)
        if self.ones:
            self._add_ones(rows.sum(0), float(len(rows)))
        if self._triangle is None:
            self._triangle = rows.new_zeros(rows.shape[1], rows.shape[1])
        if len(rows):
            _add_triangle(rows.to(self._triangle.dtype), self._triangle)

    def add_packed(self, packed: PackedGram) -> None:
        """Add a product that is packed, whose tensors are taken over."""
        own = self._packed
        if own is None or own.form != packed.form or _shape(own.total) != _shape(packed.total):
            self._unpack()
            self._packed = packed
            return
        own.values += packed.values
        own.rows += packed.rows
        if own.total is not None and packed.total is not None:
            own.total += packed.total

    def value(self) -> Tensor:  # -> [d, d], or [d + 1, d + 1] with ones
        """The sum, as in `plain_mode`; more may be added afterwards."""
        held = self._triangle if self._packed is None else self._packed.values
        assert held is not None  # something was added
        with plain_mode(held.device.type):
            self._unpack()
            assert self._triangle is not None
            return self._full(self._triangle.clone())

    def take(self) -> Tensor:
        """As `value` in the memory of the object, which must not be used afterwards; in `plain_mode`."""
        self._unpack()
        assert self._triangle is not None
        return self._full(self._triangle)

    def _add_ones(self, total: Tensor, count: float) -> None:
        self._sum = total if self._sum is None else self._sum + total
        self._count = self._count + count

    def _unpack(self) -> None:
        packed, self._packed = self._packed, None
        if packed is not None:
            M = packed.form.unpack(packed.values)
            self._triangle = M if self._triangle is None else self._triangle.add_(M)
            if packed.total is not None:
                self._add_ones(packed.form.row_sum(packed.total), packed.rows)

    def _full(self, total: Tensor) -> Tensor:
        if self._sum is not None:
            d = len(total)
            framed = total.new_empty(d + 1, d + 1)
            framed[:-1, :-1], framed[-1, :-1], framed[-1, -1] = total, self._sum, self._count
            total = framed
        return mirror(total)


def _shape(t: Tensor | None) -> torch.Size | None:
    return None if t is None else t.shape


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


def _half_pays(rows: Tensor) -> bool:
    """Whether one triangle is computed faster than all."""
    return (
        rows.shape[1] >= 128
        and rows.device.type == "cpu"
        and rows.dtype in (torch.float32, torch.float64)
        and torch.get_num_threads() == 1
        and openblas() is not None
    )


def _add_triangle(rows: Tensor, total: Tensor) -> Tensor:
    """Add `rowsᵀ rows` to the lower triangle of `total`, in place; above it may stand anything afterwards."""
    if not _half_pays(rows):
        return total.addmm_(rows.T, rows)
    transposed = rows.T.is_contiguous()
    array = rows.detach().numpy() if transposed else rows.detach().contiguous().numpy().T  # BLAS stores by columns
    with blas_threads():
        # BLAS's upper triangle is our lower one. It writes to `total`; a tensor made of what it returns would keep it.
        _syrk(rows.dtype)(1.0, array, 1.0, total.numpy().T, trans=int(transposed), lower=0, overwrite_c=True)
    return total


@cache
def _syrk(dtype: torch.dtype) -> Any:
    return scipy.linalg.get_blas_funcs("syrk", dtype=str(dtype).removeprefix("torch."))
