"""Symmetric products `rowsᵀ rows`, and their sums over many pieces of rows.

Only the lower triangle of a large one is computed, in strips of columns, each from its diagonal
down: `d / 128` products of PyTorch, on PyTorch's threads, with little more than half of the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32

_BLOCK = 256  # a tile and its transpose fit the cache
_STRIP = 128  # columns; narrower strips are products that are too thin to be fast


def gram(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d, d]
    """The symmetric matrix `rowsᵀ rows`, accumulated in float32 at least; with a batch axis one for
    each of its items.

    On the CPU only one triangle is computed for large `d`, up to 1.7x faster.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[1., 2.],
                [2., 5.]])
    """
    rows = at_least_float32(rows)
    if rows.ndim == 3:
        items = rows.transpose(0, 1)
        return items.mT @ items
    # Half of the work, M d² operations, must pay for mirroring d² entries; what is written in place
    # has no derivative.
    if len(rows) < 192 or rows.requires_grad or not _triangle_pays(rows):
        return rows.T @ rows
    return mirror(add_gram(rows))


def add_gram(rows: Tensor, total: Tensor | None = None) -> Tensor:  # [M, d], [d, d] -> [d, d]
    """Add `rowsᵀ rows` to the lower triangle of `total`, in place; above it may stand anything: see
    `mirror`. Without a total, begin one.
    """
    if not _triangle_pays(rows):
        return torch.mm(rows.T, rows) if total is None else total.addmm_(rows.T, rows)
    if total is None:
        total = rows.new_zeros(rows.shape[1], rows.shape[1])
    for start in range(0, rows.shape[1], _STRIP):
        strip = slice(start, start + _STRIP)
        total[start:, strip].addmm_(rows[:, start:].T, rows[:, strip])
    return total


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


def _triangle_pays(rows: Tensor) -> bool:
    """Whether strips of one triangle are faster than one product: measured, on one and two threads,
    with rows 64 to 4096.
    """
    M, d = rows.shape
    return d >= 192 and M * d >= 2**15 and rows.device.type == "cpu"
