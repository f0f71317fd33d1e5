"""Symmetric products `rowsᵀ rows` at half the work of a general matrix product, where that pays."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import scipy.linalg
import torch
from torch import Tensor

__all__ = ["GramSum", "blas_threads", "gram", "mirror"]

_SYRK: dict[torch.dtype, Any] = {
    torch.float32: scipy.linalg.get_blas_funcs("syrk", dtype="float32"),
    torch.float64: scipy.linalg.get_blas_funcs("syrk", dtype="float64"),
}
_BLOCK = 256  # a tile and its transpose fit the cache
_WAITING = 128  # rows; products with half as many cost what one with all does


def gram(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d, d]
    """The symmetric matrix `rowsᵀ rows`, accumulated in float32 at least; with a batch axis one for each of its items.

    On the CPU only one triangle is computed for large `d`, about 2x faster with one thread and 1.3x with several.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[1., 2.],
                [2., 5.]])
    """
    rows = _single_at_least(rows)
    if rows.ndim == 3:
        items = rows.transpose(0, 1)
        return items.mT @ items
    M, d = rows.shape
    # Half of the work, M d² operations, must pay for mirroring d² entries; what is written in place has no derivative.
    if M < 192 or not _half_pays(rows) or rows.requires_grad:
        return rows.T @ rows
    return mirror(_add_triangle(rows, rows.new_zeros(d, d)))


class GramSum:
    """`Σ rowsᵀ rows` over many pieces of rows, if wanted as if each row had a 1 at its end.

    Of a large sum only one triangle is kept until somebody asks for it. Pieces of few rows are copied and wait for
    more: a product with few rows costs less than adding up its result. Memory: `d²` numbers, and 128 rows.

    Args:
        ones: Whether there is a 1 at the end of each row.

    Example:
        >>> total = GramSum(ones=True)
        >>> total.add(torch.tensor([[1.0, 2.0]]))
        >>> total.value()
        tensor([[1., 2., 1.],
                [2., 4., 2.],
                [1., 2., 1.]])
    """

    def __init__(self, ones: bool) -> None:
        self.ones = ones
        self._rows: Tensor | None = None  # of which the first `_number` wait
        self._number = 0
        self._triangle: Tensor | None = None  # the lower one; what is above may be anything
        self._sum: Tensor | None = None
        self._count = 0
        self._device = "cpu"

    def add(self, rows: Tensor) -> None:
        """Add the product of rows [M, d]."""
        M, d = rows.shape
        self._device = rows.device.type
        if self.ones:
            total = rows.sum(0)
            self._sum = total if self._sum is None else self._sum.add_(total)
            self._count += M
        limit = min(d, _WAITING)
        if limit <= 2 * M:
            return self._multiply(rows)
        if self._number + M > limit:
            self._flush()
        if self._rows is None:
            self._rows = rows.new_empty(limit, d)
        self._rows[self._number : self._number + M] = rows
        self._number += M

    def value(self) -> Tensor:  # -> [d, d], or [d + 1, d + 1] with ones
        """The sum. The object must not be used afterwards.

        Wherever this is asked for, it is computed as if it had been when the rows were given: without autocast.
        """
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._device, enabled=False):
            return self._total()

    def _total(self) -> Tensor:
        self._flush()
        self._rows = None
        assert self._triangle is not None  # something was added
        total = mirror(self._triangle)
        if self._sum is None:
            return total
        framed = total.new_empty(len(total) + 1, len(total) + 1)
        framed[:-1, :-1], framed[-1, :-1], framed[:-1, -1], framed[-1, -1] = total, self._sum, self._sum, self._count
        return framed

    def _flush(self) -> None:
        if self._rows is not None and (self._number or self._triangle is None):
            self._multiply(self._rows[: self._number])
            self._number = 0

    def _multiply(self, rows: Tensor) -> None:
        rows = _single_at_least(rows)
        if self._triangle is None:
            self._triangle = rows.new_zeros(rows.shape[1], rows.shape[1])
        _add_triangle(rows, self._triangle)


def mirror(C: Tensor) -> Tensor:  # [d, d] -> [d, d]
    """Copy the lower triangle of `C` onto the upper one, in place.

    Example:
        >>> mirror(torch.tensor([[1.0, 7.0], [2.0, 3.0]]))
        tensor([[1., 2.],
                [2., 3.]])
    """
    for start in range(0, C.shape[0], _BLOCK):
        stop = start + _BLOCK
        tile = C[start:stop, start:stop]
        tile.copy_(tile.tril() + tile.tril(-1).T)
        C[start:stop, stop:] = C[stop:, start:stop].T
    return C


def _single_at_least(rows: Tensor) -> Tensor:
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows


def _half_pays(rows: Tensor) -> bool:
    """Whether one triangle is computed faster than all."""
    return rows.shape[1] >= 128 and rows.device.type == "cpu" and rows.dtype in _SYRK


def _add_triangle(rows: Tensor, total: Tensor) -> Tensor:
    """Add `rowsᵀ rows` to the lower triangle of `total`, in place; above it may stand anything afterwards."""
    if not _half_pays(rows):
        return total.add_(rows.T @ rows)
    if torch.get_num_threads() == 1 and _openblas() is not None:
        return _add_rank_k(rows, total)
    return _add_quarters(rows, total)


def _add_rank_k(rows: Tensor, total: Tensor) -> Tensor:
    """The same by BLAS `syrk`, which reads the rows where they are."""
    transposed = rows.T.is_contiguous()
    array = rows.detach().numpy() if transposed else rows.detach().contiguous().numpy().T  # BLAS stores by columns
    with blas_threads():
        # BLAS's upper triangle is our lower one. It writes to `total`; a tensor made of what it returns would keep it.
        _SYRK[rows.dtype](1.0, array, 1.0, total.numpy().T, trans=int(transposed), lower=0, overwrite_c=True)
    return total


def _add_quarters(rows: Tensor, total: Tensor) -> Tensor:
    """The same by three of the four quarters; PyTorch has no `syrk`."""
    h = rows.shape[1] // 2
    a, b = rows[:, :h], rows[:, h:]
    total[:h, :h].addmm_(a.T, a)
    total[h:, h:].addmm_(b.T, b)
    total[h:, :h].addmm_(b.T, a)
    return total


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
