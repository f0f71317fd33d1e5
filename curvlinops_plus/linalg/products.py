"""What every operator does with vectors: take them in all forms, multiply, and answer in the form of the question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.scipy_export import to_scipy
from curvlinops_plus.linalg.space import Form, Space
from curvlinops_plus.linalg.structure import Structure

__all__ = ["Products"]


def outside_autocast(device: torch.device) -> torch.autocast:
    """Context in which matrix products keep their precision, whatever the caller's autocast says."""
    return torch.autocast(device.type, enabled=False)


class Products(ABC):
    """Products with vectors from both sides; `LinearOperator` says more, and adds closed forms and arithmetic."""

    __array_ufunc__ = None  # NumPy hands `array @ A` and `number * A` over to us

    # What a subclass gives -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def in_space(self) -> Space:
        """The space of the vectors that it multiplies."""

    @property
    def out_space(self) -> Space:
        """The space of the results; the same for a square matrix."""
        return self.in_space

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def structure(self) -> Structure:
        """What is known about the matrix."""
        return Structure.GENERAL

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
        x, form = self._read(X, self.in_space, columns_first=False)
        with outside_autocast(self.device):
            return self.out_space.write(self._matmat(x) if x.shape[1] else x.new_zeros(self.shape[0], 0), form)

    def __rmatmul__(self, X: Any) -> Any:
        """`X @ A`, with the `K` axis first."""
        x, form = self._read(X, self.out_space, columns_first=True)
        with outside_autocast(self.device):
            return self.in_space.write(self._rmatmat(x) if x.shape[1] else x.new_zeros(self.shape[1], 0), form)

    def _read(self, X: Any, space: Space, *, columns_first: bool) -> tuple[Tensor, Form]:
        try:
            return space.read(X, self.dtype, self.device, columns_first=columns_first)
        except (TypeError, ValueError) as error:
            product = f"X @ {self.label}" if columns_first else f"{self.label} @ X"
            raise type(error)(f"{product}: {error}") from error

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
        """The matrix `[m, n]`. Cost: one product with `n` columns, or less where a class knows a cheaper way."""
        with outside_autocast(self.device):
            return self._to_dense()

    def _to_dense(self) -> Tensor:
        return self._matmat(torch.eye(self.shape[1], dtype=self.dtype, device=self.device))

    def to_scipy(self, dtype: Any = None) -> Any:
        """The operator for SciPy, see `linalg.scipy.to_scipy`."""
        return to_scipy(self, dtype)
