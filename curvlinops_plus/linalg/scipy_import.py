"""Matrices of SciPy and NumPy as operators of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as SciPyLinearOperator


class _FromSciPy(LinearOperator):
    def __init__(self, op: SciPyLinearOperator, dtype: torch.dtype, device: torch.device, structure: Structure) -> None:
        m, n = op.shape
        super().__init__(Space.flat(n), dtype, device, structure, None if m == n else Space.flat(m))
        self.op = op

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return from_scipy(self.op, dtype or self.dtype, device or self.device, self.structure)

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._adjoint_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._adjoint_product, self._product)

    def _product(self, X: Tensor) -> Tensor:
        return self._on_host(X, self.op.matmat)

    def _adjoint_product(self, X: Tensor) -> Tensor:
        if self.structure >= Structure.SYMMETRIC:
            return self._product(X)
        try:
            return self._on_host(X, self.op.rmatmat)
        except (NotImplementedError, TypeError) as error:  # which of them depends on how the operator was written
            raise NotImplementedError(
                f"The SciPy operator {self.op!r} cannot multiply from the left; give it `rmatvec`, or call "
                "from_scipy(op, structure=Structure.SYMMETRIC) if it is symmetric."
            ) from error

    def _on_host(self, X: Tensor, product: Any) -> Tensor:
        given = np.float64 if self.dtype == torch.float64 else np.float32
        array = X.detach().cpu().to(torch.float64 if given is np.float64 else torch.float32).numpy()
        return torch.tensor(np.asarray(product(array)), dtype=self.dtype, device=self.device)


def from_scipy(
    op: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    structure: Structure = Structure.GENERAL,
) -> LinearOperator:
    """A SciPy operator, sparse matrix or NumPy array as an operator of this package.

    An array becomes a `Dense` copy. For the others, vectors are copied between the device and NumPy in each product.

    Args:
        op: `scipy.sparse.linalg.LinearOperator`, sparse matrix or array, or NumPy array [m, n]; real.
        dtype: What the result computes in; by default float32 for a float32 or half-precision `op`, float64 otherwise.
        device: Where the result takes and returns vectors, by default the CPU.
        structure: What is known about the matrix; not checked, except that symmetric matrices are square.

    Raises:
        TypeError: If `op` is not one of these, or complex, or `dtype` is no floating-point dtype of PyTorch.
        ValueError: If a symmetric matrix is not square.

    Example:
        >>> import scipy.sparse
        >>> A = from_scipy(scipy.sparse.diags([1.0, 2.0]), torch.float32, structure=Structure.PSD)
        >>> A @ torch.ones(2)
        tensor([1., 2.])
    """
    if isinstance(op, Tensor):
        raise TypeError("Expected a SciPy operator, sparse matrix or NumPy array, got a tensor; use Dense(op).")
    if isinstance(op, LinearOperator):
        raise TypeError(f"Expected a SciPy operator, got {op.label}, which is one of ours already.")
    sparse = scipy.sparse.issparse(op)
    if not (sparse or (hasattr(op, "shape") and any(hasattr(op, name) for name in ("dtype", "matvec", "matmat")))):
        raise TypeError(
            f"Expected a SciPy operator, sparse matrix or NumPy array, got {op!r} of type {type(op).__name__}; make it "
            "an array, as by np.array(op, dtype=float)."
        )
    dtype = _working_dtype(op, dtype)
    where = torch.empty(0, device="cpu" if device is None else device).device
    if isinstance(op, np.ndarray):
        return Dense(torch.tensor(op, dtype=dtype, device=where), structure)
    known = sparse or hasattr(op, "matvec")
    wrapped = scipy.sparse.linalg.aslinearoperator(op) if known else _of_matmat(op)
    if structure > Structure.GENERAL and wrapped.shape[0] != wrapped.shape[1]:
        raise ValueError(f"Expected a {structure.name} matrix to be square, got {list(wrapped.shape)}.")
    return _FromSciPy(wrapped, dtype, where, structure)


def _of_matmat(op: Any) -> SciPyLinearOperator:
    """An object with `matmat` alone, which SciPy does not take."""
    adjoint = {"rmatmat": op.rmatmat, "rmatvec": _column(op.rmatmat)} if hasattr(op, "rmatmat") else {}
    make: Any = scipy.sparse.linalg.LinearOperator  # whose arguments are those of the class that it returns
    dtype = getattr(op, "dtype", np.float64)
    return make(op.shape, matvec=_column(op.matmat), matmat=op.matmat, dtype=dtype, **adjoint)


def _column(product: Any) -> Any:
    return lambda x: product(x.reshape(-1, 1))[:, 0]


def _working_dtype(op: Any, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype asked for, if it is one; by default float32 for a float32 or half-precision `op`, float64 otherwise."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"Expected dtype to be a floating-point torch.dtype such as torch.float32, got {dtype!r}.")
    given = np.dtype(getattr(op, "dtype", None) or np.float64)
    if given.kind not in "fiub":
        raise TypeError(f"Expected a matrix of real numbers, got dtype {given}; take its real part.")
    if dtype is not None:
        return dtype
    return torch.float32 if given in (np.dtype(np.float32), np.dtype(np.float16)) else torch.float64
