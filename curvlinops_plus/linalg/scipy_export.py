"""Any operator of this package as a SciPy one, for SciPy's eigensolvers, iterative solvers and matrix norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import scipy  # its modules are imported where they are first used
import torch

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as SciPyLinearOperator

_OF_TORCH = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.float32),
}


class HasProducts(Protocol):
    """What an operator needs to become a SciPy operator."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def matmat(self, X: Any) -> Any: ...
    def rmatmat(self, X: Any) -> Any: ...


class _ArrayProducts:
    """Products with arrays, in the arrays' dtype."""

    def __init__(self, A: HasProducts, dtype: np.dtype) -> None:
        self.A, self.dtype = A, dtype

    def matmat(self, X: Any) -> Any:
        return self._as_given(self.A.matmat(X), X)

    def rmatmat(self, X: Any) -> Any:
        return self._as_given(self.A.rmatmat(X), X)

    def _as_given(self, found: Any, X: Any) -> Any:
        given = np.asarray(X).dtype
        return np.asarray(found, dtype=given if given.kind == "f" else self.dtype)


def to_scipy(A: HasProducts, dtype: Any = None) -> SciPyLinearOperator:
    """`A` as a `scipy.sparse.linalg.LinearOperator`; vectors are copied between NumPy and the operator's device.

    SciPy's functions ask a matrix for NumPy's dtype and can't take `A` itself, whose dtype is PyTorch's: they raise
    `Cannot interpret 'torch.float32' as a data type`.

    Args:
        A: The operator.
        dtype: NumPy's or PyTorch's dtype that is declared to SciPy's algorithms, which work in it; float64 by default,
            as in curvlinops: they lose nothing to rounding of their own. NumPy has no bfloat16: it becomes float32. A
            product has the dtype of the array it was given, and is computed in the operator's own dtype.

    Raises:
        TypeError: If the dtype is not one of real floating-point numbers.

    Example:
        >>> from scipy.sparse.linalg import eigsh
        >>> from curvlinops_plus.linalg import Diagonal
        >>> A = to_scipy(Diagonal(torch.arange(5.0, dtype=torch.float64)))
        >>> print(eigsh(A, k=1, return_eigenvectors=False).round(6))
        [4.]
    """
    if dtype is None:
        wanted = np.dtype(np.float64)
    elif isinstance(dtype, torch.dtype):
        wanted = _OF_TORCH.get(dtype)
    else:
        try:
            wanted = np.dtype(dtype)
        except TypeError:
            wanted = None
    if wanted is None or wanted.kind != "f":
        raise TypeError(
            f"Expected dtype to be a floating-point one of NumPy or PyTorch, got {dtype!r}; take 'float64'."
        )
    products = _ArrayProducts(A, wanted)
    make: Any = scipy.sparse.linalg.LinearOperator  # whose arguments are those of the class that it returns
    return make(
        A.shape,
        matvec=products.matmat,
        rmatvec=products.rmatmat,
        matmat=products.matmat,
        rmatmat=products.rmatmat,
        dtype=wanted,
    )
