"""Operators of this package as SciPy ones, and matrices of SciPy and NumPy as operators of this
package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.linalg.arithmetic import Foreign
from curvlinops_plus.linalg.dense import Dense
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.space import Structure
from curvlinops_plus.options import device_of, instance, type_error

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as SciPyLinearOperator


def to_scipy(A: LinearOperator, dtype: Any = None) -> SciPyLinearOperator:
    """`A` as a `scipy.sparse.linalg.LinearOperator`; vectors are copied between NumPy and the
    operator's device.

    SciPy's functions ask a matrix for NumPy's dtype and can't take `A` itself, whose dtype is
    PyTorch's: they raise `Cannot interpret 'torch.float32' as a data type`.

    Args:
        A: The operator.
        dtype: NumPy's or PyTorch's dtype that is declared to SciPy's algorithms, which work in it;
            float64 by default, as in curvlinops: they lose nothing to rounding of their own. NumPy
            has no bfloat16: it becomes float32. A product has the dtype of the array it was given,
            and is computed in the operator's own dtype.

    Example:
        >>> from scipy.sparse.linalg import eigsh
        >>> from curvlinops_plus.linalg import Diagonal
        >>> A = to_scipy(Diagonal(torch.arange(5.0, dtype=torch.float64)))
        >>> print(eigsh(A, k=1, return_eigenvectors=False).round(6))
        [4.]
    """
    if isinstance(dtype, torch.dtype):
        dtype = "float32" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    declared = np.dtype(np.float64 if dtype is None else dtype)

    def in_numpy(product: Callable[[Any], Any]) -> Callable[[Any], np.ndarray]:
        def multiply(X: Any) -> np.ndarray:
            dtype = np.asarray(X).dtype
            return np.asarray(product(X), dtype=dtype if dtype.kind == "f" else declared)

        return multiply

    matmat = in_numpy(A.matmat)
    rmatmat = in_numpy(A.rmatmat)
    # SciPy returns an instance of another class, whose arguments these are.
    make: Any = scipy.sparse.linalg.LinearOperator
    return make(A.shape, matmat, rmatmat, matmat, rmatmat=rmatmat, dtype=declared)


def from_scipy(
    op: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    structure: Structure = Structure.GENERAL,
) -> LinearOperator:
    """A SciPy operator, sparse matrix or NumPy array as an operator of this package.

    An array becomes a `Dense` copy. For the others, vectors are copied between the device and NumPy
    in each product.

    Args:
        op: `scipy.sparse.linalg.LinearOperator`, sparse matrix or array, or NumPy array [m, n];
            real.
        dtype: What the result computes in; by default float32 for a float32 or half-precision `op`,
            float64 otherwise.
        device: Where the result takes and returns vectors, by default the CPU.
        structure: What is known about the matrix; not checked.

    Raises:
        TypeError: If `op` is not one of these, or complex.

    Example:
        >>> import scipy.sparse
        >>> A = from_scipy(scipy.sparse.diags([1.0, 2.0]), torch.float32, structure=Structure.PSD)
        >>> A @ torch.ones(2)
        tensor([1., 2.])
    """
    if isinstance(op, (Tensor, LinearOperator)):
        raise TypeError(
            f"Expected a SciPy operator, sparse matrix or NumPy array, got a {type(op).__name__}."
        )
    op_dtype = np.dtype(getattr(op, "dtype", None) or np.float64)
    if op_dtype.kind not in "fiub":
        raise TypeError(
            f"Expected a matrix of real numbers, got dtype {op_dtype}; take its real part."
        )
    if dtype is None:
        single = op_dtype in (np.float32, np.float16)
        dtype = torch.float32 if single else torch.float64
    instance("dtype", dtype, torch.dtype, "one of PyTorch, as torch.float64")
    instance("structure", structure, Structure, "one of Structure, as Structure.SYMMETRIC")
    device = device_of("device", "cpu" if device is None else device)
    if isinstance(op, np.ndarray):
        if op.ndim != 2:
            raise ValueError(f"Expected a matrix [m, n], got an array {list(op.shape)}.")
        return Dense(torch.tensor(np.ascontiguousarray(op), dtype=dtype, device=device), structure)
    like = torch.empty(0, dtype=dtype, device=device)
    try:
        scipy_operator = scipy.sparse.linalg.aslinearoperator(op)
    except (TypeError, ValueError) as error:
        kinds = "an operator of this package, a tensor or array [m, n], or one of SciPy's matrices"
        raise type_error("The matrix", op, kinds) from error
    return Foreign(scipy_operator, like, structure)
