"""Symmetric products `rowsᵀ rows` at half the work of a general matrix product, where that pays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import scipy.linalg
import torch
from torch import Tensor

__all__ = ["GramSum", "gram", "mirror"]

_SYRK: dict[torch.dtype, Any] = {
    torch.float32: scipy.linalg.get_blas_funcs("syrk", dtype="float32"),
    torch.float64: scipy.linalg.get_blas_funcs("syrk", dtype="float64"),
}
_BLOCK = 256  # a tile and its transpose fit the cache


def gram(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d, d]
    """The symmetric matrix `rowsᵀ rows`, accumulated in float32 at least; with a batch axis one for each of its items.

    On the CPU only one triangle is computed for large `d`, about 2x faster with one thread and 1.3x with several.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[1., 2.],
                [2., 5.]])
    """
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    if rows.ndim == 3:
        items = rows.transpose(0, 1)
        return items.mT @ items
    if not _half_pays(rows):
        return rows.T @ rows
    return mirror(_rank_k_update(rows)) if _by_rank_k(rows) else _by_halves(rows)


class GramSum:
    """`Σ rowsᵀ rows` over many pieces of rows, if wanted as if each row had a 1 at its end.

    Pieces of few rows are copied and wait until there are as many as columns, and of a large sum only one triangle is
    kept until somebody asks for it: a product with few rows costs less than mirroring its result and adding it up.
    Memory: two times `d²` numbers.

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
        self._rows: Tensor | None = None  # [d, d], of which the first `_number` wait
        self._number = 0
        self._triangle: Tensor | None = None
        self._rest: Tensor | None = None  # of products that were not made by halves
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
        if d <= M:
            return self._multiply(rows)
        if self._number + M > d:
            self._flush()
        if self._rows is None:
            self._rows = rows.new_empty(d, d)
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
        parts = [] if self._triangle is None else [mirror(self._triangle)]
        parts += [] if self._rest is None else [self._rest]
        total = sum(parts[1:], parts[0])
        if self._sum is None:
            return total
        framed = total.new_empty(len(total) + 1, len(total) + 1)
        framed[:-1, :-1], framed[-1, :-1], framed[:-1, -1], framed[-1, -1] = total, self._sum, self._sum, self._count
        return framed

    def _flush(self) -> None:
        nothing = self._triangle is None and self._rest is None
        if self._rows is not None and (self._number or nothing):
            self._multiply(self._rows[: self._number])
            self._number = 0

    def _multiply(self, rows: Tensor) -> None:
        if _by_rank_k(rows):
            self._triangle = _rank_k_update(rows, self._triangle)
        else:
            part = gram(rows)
            self._rest = part if self._rest is None else self._rest.add_(part)


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


def _half_pays(rows: Tensor) -> bool:
    """Whether half of the work, M d² operations, pays for mirroring d² entries; SciPy has no derivative."""
    M, d = rows.shape
    return d >= 128 and M >= 192 and rows.device.type == "cpu" and not rows.requires_grad and rows.dtype in _SYRK


def _by_rank_k(rows: Tensor) -> bool:
    return _half_pays(rows) and torch.get_num_threads() == 1 and _openblas() is not None


def _rank_k_update(rows: Tensor, total: Tensor | None = None) -> Tensor:
    """The lower triangle by BLAS `syrk`, which reads the rows where they are; added to `total`, in place, if given."""
    transposed = rows.T.is_contiguous()
    array = rows.numpy() if transposed else rows.contiguous().numpy().T  # BLAS stores column by column
    with _as_many_threads_as_torch():
        # BLAS's upper triangle is our lower one.
        if total is None:
            C = _SYRK[rows.dtype](1.0, array, trans=int(transposed), lower=0)
        else:
            C = _SYRK[rows.dtype](1.0, array, 1.0, total.numpy().T, trans=int(transposed), lower=0, overwrite_c=True)
            if C.ctypes.data == total.data_ptr():  # a new tensor would keep the old one, and that all before it
                return total
    return torch.from_numpy(C.T)


def _by_halves(rows: Tensor) -> Tensor:
    """Three of the four quarters; PyTorch has no `syrk`."""
    d = rows.shape[1]
    a, b = rows[:, : d // 2], rows[:, d // 2 :]
    C = rows.new_empty(d, d)
    torch.mm(a.T, a, out=C[: d // 2, : d // 2])
    torch.mm(b.T, b, out=C[d // 2 :, d // 2 :])
    torch.mm(b.T, a, out=C[d // 2 :, : d // 2])
    C[: d // 2, d // 2 :] = C[d // 2 :, : d // 2].T
    return C


@cache
def _openblas() -> Any:
    """The BLAS inside of SciPy if its threads can be bounded, which else compete with PyTorch's; None elsewhere."""
    try:
        library = ctypes.CDLL(scipy.linalg._fblas.__file__)  # type: ignore[attr-defined]
        return library if library.scipy_openblas_get_num_threads() > 0 else None
    except (AttributeError, OSError):
        return None


@contextmanager
def _as_many_threads_as_torch() -> Iterator[None]:
    library = _openblas()
    before = library.scipy_openblas_get_num_threads()
    library.scipy_openblas_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        library.scipy_openblas_set_num_threads(before)
