"""Base classes of inverses that solve a system in every product.

They have adjoints and `to_scipy()` like every operator. After a product, `info` says how well it was solved, and a
missed tolerance warns. Products are differentiable in the vector (backward solves with the adjoint), not in what `A` is
made of. For a matrix with structure, such as KFAC, use `A.inverse(damping)`: it is exact and has its own
log-determinant.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.linalg.operator import LinearOperator, Wrapper
from curvlinops_plus.linalg.products import derived
from curvlinops_plus.linalg.solve import SolveInfo
from curvlinops_plus.linalg.structure import Structure

Inverse = TypeVar("Inverse", bound="IterativeInverse")


class IterativeInverse(Wrapper):
    """`A⁻¹`, whose products solve with `A`."""

    in_space = derived("A.out_space")
    out_space = derived("A.in_space")

    def __init__(self, A: LinearOperator, **options: Any) -> None:
        if not isinstance(A, LinearOperator):
            raise TypeError(f"Expected a LinearOperator, got {type(A).__name__}; wrap it: Dense(A) or from_scipy(A).")
        super().__init__(A)
        #: Keywords of the solver.
        self.options = options
        #: How well the last product was solved; None before the first.
        self.info: SolveInfo | None = None

    def _like(self: Inverse, A: LinearOperator, **options: Any) -> Inverse:
        """The same kind of inverse of another matrix, with some options changed."""
        other = copy(self)
        other.A, other.info, other.options = A, None, self.options | options
        return other

    solver: Callable[..., tuple[Any, SolveInfo]]  # called with the matrix, the right-hand sides and the options

    def _solve(self, X: Tensor) -> tuple[Tensor, SolveInfo]:
        return type(self).solver(self.A, X, **self.options)

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._adjoint_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._adjoint_product, self._product)

    def _product(self, X: Tensor) -> Tensor:
        x, self.info = self._solve(X)
        return x

    def _adjoint_product(self, X: Tensor) -> Tensor:
        x, self.info = self.adjoint()._solve(X)
        return x

    @abstractmethod
    def adjoint(self) -> IterativeInverse: ...

    def _to(self: Inverse, device: torch.device | None, dtype: torch.dtype | None) -> Inverse:
        movable = {name: x for name, x in self.options.items() if isinstance(x, (Tensor, LinearOperator))}
        moved = {name: x.to(device=device, dtype=dtype) for name, x in movable.items()}
        return self._like(self.A.to(device, dtype), **moved)


class SymmetricInverse(IterativeInverse):
    """The inverse of a matrix that the method takes for symmetric, whatever it declares."""

    def __init__(self, A: LinearOperator, **options: Any) -> None:
        super().__init__(A, **options)
        need_square(A)

    @property
    def structure(self) -> Structure:
        return max(self.A.structure, Structure.SYMMETRIC)

    def adjoint(self) -> SymmetricInverse:
        return self


def need_square(A: LinearOperator) -> None:
    """Refuse a rectangular matrix."""
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"Expected a square matrix, got {A.label}; use LSMRInverseLinearOperator.")
