"""Symmetric products `rowsᵀ rows`, and their sums over many pieces of rows.

Of large ones BLAS's `syrk` computes one triangle in half the time of a general product. PyTorch has
no `syrk`; SciPy's is taken while PyTorch has a single thread, as both have threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32

_BLOCK = 256  # a tile and its transpose fit the cache
_AS_IT_IS = nullcontext()


def gram(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d, d]
    """The symmetric matrix `rowsᵀ rows`, accumulated in float32 at least; with a batch axis one for
    each of its items.

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
    # Half of the work, M d² operations, must pay for mirroring d² entries; what is written in place
    # has no derivative.
    if len(rows) < 192 or rows.requires_grad or not _half_pays(rows):
        return rows.T @ rows
    return mirror(add_gram(rows, rows.new_zeros(rows.shape[1], rows.shape[1])))


def add_gram(rows: Tensor, total: Tensor) -> Tensor:  # [M, d], [d, d] -> [d, d]
    """Add `rowsᵀ rows` to the lower triangle of `total`, in place; above it may stand anything: see
    `mirror`.
    """
    if not (total.is_contiguous() and _half_pays(rows)):
        return total.addmm_(rows.T, rows)
    transposed = rows.T.is_contiguous()
    array = (
        rows.detach().numpy() if transposed else rows.detach().contiguous().numpy().T
    )  # BLAS stores by columns
    # BLAS's upper triangle is our lower one. It writes to `total`; a tensor made of what it returns
    # would keep it.
    _syrk(rows.dtype)(
        1.0, array, 1.0, total.numpy().T, trans=int(transposed), lower=0, overwrite_c=True
    )
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


def plain_mode(device: str) -> AbstractContextManager[None]:
    """Context without autograd and autocast, whatever the modes around it: sums are the same
    wherever they are made.

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


def _half_pays(rows: Tensor) -> bool:
    """Whether one triangle is computed faster than all."""
    return (
        rows.shape[1] >= 128
        and rows.device.type == "cpu"
        and rows.dtype in (torch.float32, torch.float64)
        and torch.get_num_threads() == 1
    )


@cache
def _syrk(dtype: torch.dtype) -> Any:
    return scipy.linalg.get_blas_funcs("syrk", dtype=str(dtype).removeprefix("torch."))
