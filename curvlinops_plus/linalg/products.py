"""Products of every operator with vectors in all the containers that `Space.read` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg.scipy_export import to_scipy
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which matrix products keep their precision, whatever the caller's autocast says."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class error_context:
    """Errors of this package that are raised inside begin with the name of the part of the matrix they are about."""

    def __init__(self, part: str) -> None:
        self.part = part

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (NumericsError, NotImplementedError, TypeError, ValueError)):
            raise type(error)(f"{self.part}: {error}") from error


class _Derived:
    """See `derived`."""

    def __init__(self, path: str | None) -> None:
        self.read = None if path is None else attrgetter(path)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, operator: Any, owner: type | None = None) -> Any:
        if operator is None:
            return self
        if self.read is None:
            raise AttributeError(
                f"{type(operator).__name__} has no `{self.name}`: pass it to LinearOperator.__init__(in_space, dtype, "
                "device), or set it as an attribute of the class."
            )
        return self.read(operator)


def derived(path: str | None = None) -> Any:
    """The default of an attribute: another attribute, read when it is asked for, or (`None`) an error that says so.

    A subclass or an instance replaces it by plain assignment.
    """
    return _Derived(path)


class Products(ABC):
    """Products with vectors from both sides; arguments are those of `LinearOperator`, which adds arithmetic."""

    __array_ufunc__ = None  # NumPy hands `array @ A` and `number * A` over to us

    # `Wrapper` forwards these attributes: a new one has its default here and a line there.
    in_space: Space = derived()
    out_space: Space = derived("in_space")
    dtype: torch.dtype = derived()
    device: torch.device = derived()
    structure: Structure = Structure.GENERAL

    def __init__(
        self,
        in_space: Space | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        structure: Structure | None = None,
        out_space: Space | None = None,
    ) -> None:
        if in_space is not None:
            self.in_space = in_space
        if dtype is not None:
            self.dtype = dtype
        if device is not None:
            self.device = device
        if structure is not None:
            self.structure = structure
        if out_space is not None:
            self.out_space = out_space

    @abstractmethod
    def _matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [m, K]
        """The product with a matrix of the right shape, dtype and device."""

    def _rmatmat(self, X: Tensor) -> Tensor:  # [m, K] -> [n, K]
        """The product of the transposed matrix."""
        if self.structure >= Structure.SYMMETRIC:
            return self._matmat(X)
        raise NotImplementedError(
            f"{type(self).__name__} has no adjoint: it is not declared symmetric and does not define "
            "`_rmatmat(self, X)`. Write that method, or a `structure` of Structure.SYMMETRIC if it is symmetric."
        )

    # Shapes ----------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """`(m, n)`: rows and columns."""
        return self.out_space.dim, self.in_space.dim

    @property
    def in_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the tensors that it multiplies."""
        return tuple(self.in_space.shapes.values())

    @property
    def out_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the tensors of a result."""
        return tuple(self.out_space.shapes.values())

    def __repr__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """The operator in one line, for messages."""
        m, n = self.shape
        return f"{type(self).__name__}({m} x {n}, {self.structure.name}, {self.dtype}, {self.device})"

    # Products --------------------------------------------------------------------------------------------------------

    def __matmul__(self, X: Any) -> Any:
        """`A @ X`."""
        if isinstance(X, Products):
            return self._compose(X)
        try:
            x, container = self.in_space.read(X, self.dtype, self.device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.label} @ X: {error}") from error
        with outside_autocast(self.device):
            return self.out_space.write(self._matmat(x) if x.shape[1] else x.new_zeros(self.shape[0], 0), container)

    def __rmatmul__(self, X: Any) -> Any:
        """`X @ A`, with the `K` axis first."""
        try:
            x, container = self.out_space.read(X, self.dtype, self.device, columns_first=True)
        except (TypeError, ValueError) as error:
            raise type(error)(f"X @ {self.label}: {error}") from error
        with outside_autocast(self.device):
            return self.in_space.write(self._rmatmat(x) if x.shape[1] else x.new_zeros(self.shape[1], 0), container)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make an array whose only entry is the operator."""
        raise TypeError(
            f"{self.label} is not an array. For its entries write A.to_dense().cpu().numpy(), for SciPy A.to_scipy(); "
            "products with arrays are A @ x and x @ A."
        )

    @abstractmethod
    def _compose(self, other: Products) -> Products:
        """The product with another operator."""

    def matmat(self, X: Any) -> Any:
        """`A @ X`, under SciPy's name."""
        return self @ X

    def matvec(self, x: Any) -> Any:
        """`A @ x`, under SciPy's name."""
        return self @ x

    def rmatmat(self, X: Any) -> Any:
        """`Aᵀ @ X`, under SciPy's name."""
        return self.adjoint() @ X

    def rmatvec(self, x: Any) -> Any:
        """`Aᵀ @ x`, under SciPy's name."""
        return self.adjoint() @ x

    @abstractmethod
    def adjoint(self) -> Products:
        """The transposed matrix."""

    def to_dense(self) -> Tensor:
        """The matrix `[m, n]`. Cost: one product with `n` columns, or less where a class knows a cheaper way.

        Raises:
            NumericsError: If there is not enough memory for it.
        """
        try:
            with outside_autocast(self.device):
                return self._to_dense()
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            (m, n), size = self.shape, torch.empty((), dtype=self.dtype).element_size()
            raise NumericsError(
                f"There is not enough memory for the entries of {self.label}, {m * n * size / 2**30:.3g} GiB and what "
                "it takes to compute them. Multiply with it, A @ v, take some of its rows and columns, A[rows, "
                "columns], or estimate numbers from products (`curvlinops_plus.estimate`)."
            ) from error

    def _to_dense(self) -> Tensor:
        return self._matmat(torch.eye(self.shape[1], dtype=self.dtype, device=self.device))

    def to_scipy(self, dtype: Any = None) -> Any:
        """The operator as a SciPy one; see `to_scipy`."""
        return to_scipy(self, dtype)
