"""The interface of a matrix to estimators: products with blocks of columns, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import frexp
from typing import Any, Protocol

import numpy as np
import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor
from tqdm import tqdm

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg.numerics import whole
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.linalg.structure import Structure

BLOCK_BYTES = 2**27  # of the columns that are multiplied at once, unless the caller says how many


class MatrixLike(Protocol):
    """An operator of this package, a 2-d tensor or NumPy array, a SciPy operator or sparse matrix.

    Operators of other libraries do as well if their `dtype` and `device` are PyTorch's and `A @ X` and `A.T @ X`
    multiply tensors `[n, K]` (`A.adjoint()` if there is no `A.T`).
    """

    @property
    def shape(self) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...


@dataclass
class Matrix:
    """A matrix `[m, n]` with its products `[n, K] -> [m, K]`, made by `as_matrix`.

    `dtype` is what estimators compute in: float32 if the matrix itself is in half precision. Products are divided by
    `unit`, a power of two near the largest entry of the first one, so that their squares neither overflow nor vanish;
    estimators multiply their result by it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    eps: float  # relative rounding error of products: that of the matrix's dtype, or more if `check_symmetric` saw more
    device: torch.device
    label: str
    product: Callable[[Tensor], Tensor]
    adjoint_product: Callable[[Tensor], Tensor]
    looks_symmetric: Callable[[], bool]
    columns: int | None = None  # to multiply at once
    bar: Any = field(default=None, repr=False)
    unit: float | None = None  # of products, once there was one that is not 0; 1 for those that need none
    repeated: float | None = field(default=None, repr=False)  # what `repeat_by` found

    @property
    def zero(self) -> Tensor:
        """A 0-d tensor of the dtype and device in which to compute."""
        return torch.zeros((), dtype=self.dtype, device=self.device)

    def rounding(self, terms: int) -> float:
        """Relative rounding error of sums of so many terms in `dtype`, or of a product where that is larger."""
        return max(terms * torch.finfo(self.dtype).eps, self.eps)

    def blocks(self, total: int, copies: int = 1) -> Iterator[int]:
        """Sizes of the blocks in which `total` columns go through, when `copies` vectors are kept per column."""
        size = self.columns or max(1, BLOCK_BYTES // (max(self.shape) * self.zero.element_size() * copies))
        for start in range(0, total, size):
            yield min(size, total - start)

    def undo(self, value: Tensor) -> Tensor:
        """A value that is linear in the products, in the units of the matrix."""
        return value if self.unit is None else value * self.unit

    def repeat_by(self, v: Tensor) -> float:  # [n, 1]
        """The length of the difference of two products with the same vector; measured once."""
        if self.repeated is None:
            self.repeated = float(torch.linalg.vector_norm(self.matmat(v) - self.matmat(v)))
        return self.repeated

    def matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [m, K]
        """`A @ X`, divided by `unit`, in blocks of columns."""
        return self._in_blocks(self.product, X, self.shape[0])

    def rmatmat(self, X: Tensor) -> Tensor:  # [m, K] -> [n, K]
        """`Aᵀ @ X`, divided by `unit`, in blocks of columns."""
        return self._in_blocks(self.adjoint_product, X, self.shape[1])

    def gram(self) -> Matrix:
        """`AᵀA` or `AAᵀ`, whichever is smaller, as a matrix that costs two products; in the square of `unit`."""
        first, then = (self.rmatmat, self.matmat) if self.shape[0] < self.shape[1] else (self.matmat, self.rmatmat)
        d = min(self.shape)

        def product(X: Tensor) -> Tensor:
            return then(first(X))

        label = f"Gram matrix of {self.label}"
        return Matrix((d, d), self.dtype, self.eps, self.device, label, product, product, lambda: True, unit=1.0)

    def _in_blocks(self, product: Callable[[Tensor], Tensor], X: Tensor, rows: int) -> Tensor:
        if X.shape[1] == 0:
            return X.new_zeros((rows, 0))
        results: list[Tensor] = []
        for block in X.split(list(self.blocks(X.shape[1])), dim=1):
            result = product(block)
            if not bool(torch.isfinite(result).all()):
                raise NumericsError(
                    f"A product with {self.label} has NaN or infinite entries; look for them in the matrix, or in the "
                    "model and the data that it comes from."
                )
            if self.unit is None:
                self.unit = _unit(result)
            results.append(result if self.unit in (None, 1.0) else result / self.unit)
            if self.bar is not None:
                self.bar.update(block.shape[1])
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)


def _unit(result: Tensor) -> float | None:
    """The largest power of two not above the largest entry, None if all are 0."""
    largest = float(result.detach().abs().amax())
    limit = 64 * torch.finfo(result.dtype).tiny  # its inverse is still a number of this dtype
    return min(max(2.0 ** (frexp(largest)[1] - 1), limit), 1 / limit) if largest else None


def as_matrix(A: Any) -> Matrix:
    """Read a matrix of any of the kinds of `MatrixLike`.

    Raises:
        TypeError: If it is none of them, or its entries are complex, or a tensor's are integers.

    Example:
        >>> as_matrix(np.eye(2)).matmat(torch.ones(2, 1, dtype=torch.float64))
        tensor([[1.],
                [1.]], dtype=torch.float64)
    """
    if isinstance(A, np.ndarray):
        return as_matrix(torch.from_numpy(np.array(A, dtype=_real_numpy(A.dtype, A), order="C")))
    if isinstance(getattr(A, "dtype", None), torch.dtype) and hasattr(A, "device") and hasattr(A, "shape"):
        return _of_torch(A)
    if scipy.sparse.issparse(A) or (hasattr(A, "shape") and (hasattr(A, "matmat") or hasattr(A, "matvec"))):
        return _of_scipy(A)
    raise TypeError(
        f"Expected a LinearOperator, a tensor, a NumPy array, or a SciPy operator or sparse matrix, got {_kind(A)}."
    )


def _of_torch(A: Any) -> Matrix:
    if not A.dtype.is_floating_point:
        raise TypeError(
            f"Expected a matrix of real floating-point numbers, got {A.dtype}; convert it, as to torch.float64."
        )
    working = torch.promote_types(A.dtype, torch.float32)
    if isinstance(A, Tensor):
        A = A.to(working)

    def product(X: Tensor) -> Tensor:
        return (A @ X.to(A.dtype)).to(working)

    def adjoint_product(X: Tensor) -> Tensor:
        transposed = A.T if hasattr(A, "T") else A.adjoint()
        return (transposed @ X.to(A.dtype)).to(working)

    def looks_symmetric() -> bool:
        if not isinstance(A, Tensor):
            return getattr(A, "structure", Structure.GENERAL) >= Structure.SYMMETRIC
        if A.layout != torch.strided or A.shape[0] != A.shape[1]:
            return False
        return bool((A - A.T).abs().max() <= 10 * torch.finfo(A.dtype).eps * A.abs().max())

    label = getattr(A, "label", f"{_kind(A)}({' x '.join(str(d) for d in A.shape)}, {A.dtype}, {A.device})")
    eps, device = torch.finfo(A.dtype).eps, torch.device(A.device)
    return Matrix(tuple(A.shape), working, eps, device, label, product, adjoint_product, looks_symmetric)


def _of_scipy(A: Any) -> Matrix:
    operator = scipy.sparse.linalg.aslinearoperator(A)
    dtype = _real_numpy(operator.dtype, A)

    def product(X: Tensor) -> Tensor:
        return torch.from_numpy(np.array(operator.matmat(X.numpy()), dtype=dtype, order="C"))

    def adjoint_product(X: Tensor) -> Tensor:
        try:
            Y = operator.rmatmat(X.numpy())
        except (NotImplementedError, TypeError, ValueError) as error:  # SciPy says it in several ways
            raise NotImplementedError(
                f"{_kind(A)} has no product with its transpose, which is needed here; give it `rmatvec` or `rmatmat` "
                f"(SciPy said: {error})."
            ) from error
        return torch.from_numpy(np.array(Y, dtype=dtype, order="C"))

    def looks_symmetric() -> bool:
        if not scipy.sparse.issparse(A) or A.shape[0] != A.shape[1]:
            return False
        return bool(abs(A - A.T).max() <= 10 * np.finfo(dtype).eps * abs(A).max())

    label = f"{_kind(A)}({' x '.join(str(d) for d in A.shape)}, {dtype.name})"
    working = torch.float32 if dtype == np.float32 else torch.float64
    eps, device = torch.finfo(working).eps, torch.device("cpu")
    return Matrix(tuple(A.shape), working, eps, device, label, product, adjoint_product, looks_symmetric)


def _real_numpy(dtype: Any, A: Any) -> np.dtype:
    """The dtype to compute in with NumPy's; integers are taken for numbers in double precision."""
    dtype = np.dtype(np.float64 if dtype is None else dtype)
    if dtype.kind not in "fiub":
        raise TypeError(f"Expected a matrix of real numbers, got {_kind(A)} of {dtype}.")
    return np.dtype(np.float32 if dtype in (np.float16, np.float32) else np.float64)


def _kind(A: Any) -> str:
    return type(A).__name__


@contextmanager
def multiplying(
    A: Any, what: str, total: int | None, *, chunk_size: int | None, progressbar: bool, square: bool = True
) -> Iterator[Matrix]:
    """The matrix with its progress bar and block size set, outside of autocast.

    Args:
        A: What `as_matrix` takes.
        what: Name of the estimate, for the bar.
        total: How many products there will be, if known.
        chunk_size: Columns to multiply at once; by default as many as fit into 128 MiB.

    Raises:
        NumericsError: Inside, if a product is NaN or infinite.
        ValueError: If the matrix has not two axes, or not the same number of rows and columns, or no entries.
    """
    if chunk_size is not None:
        check_at_least(1, chunk_size=chunk_size)
    matrix = as_matrix(A)
    if square and (len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]):
        raise ValueError(
            f"Operator must be square. Got shape {matrix.shape}. Of a rectangular matrix there are "
            "`hutchinson_squared_fro`, `spectral_norm` and `condition_number`."
        )
    if len(matrix.shape) != 2:
        raise ValueError(f"A must be a matrix. Got shape {matrix.shape}; expected two axes (rows, columns).")
    if 0 in matrix.shape:
        raise ValueError(f"A must have entries. Got shape {matrix.shape}.")
    with outside_autocast(matrix.device), tqdm(total=total, desc=what, disable=not progressbar) as bar:
        matrix.columns, matrix.bar = chunk_size, bar
        yield matrix


def check_whole(**numbers: Any) -> None:
    """Refuse counts that are no integers of Python or NumPy, by name.

    Example:
        >>> check_whole(k=2.0)
        Traceback (most recent call last):
        TypeError: k (2.0) must be an integer, got float; take k=2.
    """
    for name, number in numbers.items():
        if whole(number) is None:
            real = isinstance(number, (float, np.floating)) and np.isfinite(number)
            advice = f"; take {name}={int(number)}" if real else ""
            raise TypeError(f"{name} ({number!r}) must be an integer, got {_kind(number)}{advice}.")


def check_at_least(smallest: int, **numbers: int) -> None:
    """Refuse counts that are too small, by name."""
    check_whole(**numbers)
    for name, number in numbers.items():
        if number < smallest:
            raise ValueError(f"{name} ({number}) must be at least {smallest}.")
