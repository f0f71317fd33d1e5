"""The symmetric eigensolver inside of SciPy: as exact as PyTorch's, in three quarters of its time.

Measured on an AMD EPYC with one thread, 512 to 2048 rows: OpenBLAS, which SciPy brings, against MKL, which PyTorch
brings; the benchmark of eigendecompositions among the examples compares them elsewhere. SciPy's own function of it does
not let other threads of Python work meanwhile, so that layers could not be decomposed side by side; a call through
`ctypes` does.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.linalg.gram_sum import blas_threads

__all__ = ["eigh_of_scipy"]

_ROWS = range(192, 32_000)  # fewer take as long either way; of more, sizes do not fit into its integers


def eigh_of_scipy(M: Tensor) -> tuple[Tensor, Tensor] | None:  # [d, d] -> [d], [d, d]
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix; None if it is not one for this.

    It is one if it is a real matrix on the CPU that needs no gradient, neither small nor huge, and if SciPy brings
    OpenBLAS. None also if the iteration did not converge.

    Cost: a copy of the matrix, which becomes the eigenvectors, and work memory of two more.

    Example:
        >>> M = torch.eye(200, dtype=torch.float64) * 3
        >>> found = eigh_of_scipy(M)
        >>> found is None or bool((found[0] == 3).all())
        True
    """
    if M.device.type != "cpu" or M.ndim != 2 or len(M) not in _ROWS or M.requires_grad:
        return None
    solver = _syevd(M.dtype)
    if solver is None:
        return None
    d = len(M)
    Q, values = M.clone(memory_format=torch.contiguous_format), M.new_empty(d)
    work, integers = M.new_empty(1 + 6 * d + 2 * d * d), torch.empty(3 + 5 * d, dtype=torch.int32)
    info = ctypes.c_int(0)
    with blas_threads():
        # Stored by columns, the triangle above the diagonal is the one below it of M, as PyTorch takes it.
        solver(
            *(b"V", b"U", _int(d), _at(Q), _int(d), _at(values)),
            *(_at(work), _int(work.numel()), _at(integers), _int(integers.numel()), ctypes.byref(info)),
        )
    return None if info.value else (values, Q.mT)


@cache
def _syevd(dtype: torch.dtype) -> Any:
    """The function of LAPACK for a precision, with integers of 32 bits; None if there is none."""
    letter = {torch.float32: "s", torch.float64: "d"}.get(dtype)
    try:
        return getattr(ctypes.CDLL(scipy.linalg._flapack.__file__), f"scipy_{letter}syevd_")  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return None


def _int(number: int) -> Any:
    return ctypes.byref(ctypes.c_int(number))


def _at(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())
