"""Inverses as linear operators that solve a system in every product; names and arguments as in curvlinops 3.0.1.

They have adjoints and `to_scipy()` like every operator. After a product, `info` says how well it was solved, and a
missed tolerance warns. Products are differentiable in the vector (backward solves with the adjoint), not in what `A` is
made of. For a matrix with structure, such as KFAC, use `A.inverse(damping)`: it is exact and has its own
log-determinant.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.linalg.krylov import cg, lsmr, minres, neumann
from curvlinops_plus.linalg.operator import LinearOperator, Wrapper
from curvlinops_plus.linalg.products import derived
from curvlinops_plus.linalg.solve import Preconditioner, SolveInfo
from curvlinops_plus.linalg.structure import Structure

__all__ = [
    "CGInverseLinearOperator",
    "LSMRInverseLinearOperator",
    "MINRESInverseLinearOperator",
    "NeumannInverseLinearOperator",
]


Inverse = TypeVar("Inverse", bound="_IterativeInverse")


class _IterativeInverse(Wrapper):
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

    @abstractmethod
    def _solve(self, X: Tensor) -> tuple[Tensor, SolveInfo]: ...

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
    def adjoint(self) -> _IterativeInverse: ...

    def to(self: Inverse, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Inverse:
        movable = {name: x for name, x in self.options.items() if isinstance(x, (Tensor, LinearOperator))}
        moved = {name: x.to(device=device, dtype=dtype) for name, x in movable.items()}
        return self._like(self.A.to(device, dtype), **moved)


class _SymmetricInverse(_IterativeInverse):
    """The inverse of a matrix that the method takes for symmetric, whatever it declares."""

    def __init__(self, A: LinearOperator, **options: Any) -> None:
        super().__init__(A, **options)
        _need_square(A)

    @property
    def structure(self) -> Structure:
        return max(self.A.structure, Structure.SYMMETRIC)

    def adjoint(self) -> _SymmetricInverse:
        return self


class CGInverseLinearOperator(_SymmetricInverse):
    """`A⁻¹` of a symmetric positive definite `A`, by conjugate gradients; see `cg`.

    Args:
        A: The matrix. It is taken for symmetric, whatever it declares.
        tolerance: A column is solved when `‖b - A x‖ <= tolerance ‖b‖`.
        eps: Accepted for code written for curvlinops, without effect: no division needs to be guarded.
        stop_updating_after: If larger than `tolerance`, it takes its place.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        max_tridiag_iter: Accepted for code written for curvlinops, without effect: nothing is tridiagonalized.
        initial_guess: First guess, anything that `A` multiplies; by default 0.
        preconditioner: Approximation of `A⁻¹`, symmetric positive definite: an operator, for example the inverse of an
            EKFAC, or a function `[n, k] -> [n, k]`.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> inverse = CGInverseLinearOperator(Diagonal(torch.tensor([1.0, 4.0])))
        >>> inverse @ [torch.tensor([1.0, 2.0])], inverse.info.converged
        ([tensor([1.0000, 0.5000])], tensor([True]))
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        tolerance: float = 1e-5,
        eps: float = 1e-10,
        stop_updating_after: float | None = None,
        max_iter: int | None = None,
        max_tridiag_iter: int | None = None,
        initial_guess: Any = None,
        preconditioner: Preconditioner = None,
    ) -> None:
        tol = tolerance if stop_updating_after is None else max(tolerance, stop_updating_after)
        super().__init__(A, tol=tol, max_iter=max_iter, x0=initial_guess, preconditioner=preconditioner)

    def _solve(self, X: Tensor) -> tuple[Tensor, SolveInfo]:
        return cg(self.A, X, **self.options)


class MINRESInverseLinearOperator(_SymmetricInverse):
    """`A⁻¹` of a symmetric `A` that may be indefinite, such as a Hessian, by MINRES; see `minres`.

    Args:
        A: The matrix. It is taken for symmetric, whatever it declares.
        tol: A column is solved when `‖b - A x‖ <= tol ‖b‖`.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        x0: First guess, anything that `A` multiplies; by default 0.
        preconditioner: Symmetric positive definite operator, or function `[n, k] -> [n, k]`.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> MINRESInverseLinearOperator(Diagonal(torch.tensor([1.0, -4.0]))) @ torch.tensor([1.0, 2.0])
        tensor([ 1.0000, -0.5000])
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        tol: float = 1e-5,
        max_iter: int | None = None,
        x0: Any = None,
        preconditioner: Preconditioner = None,
    ) -> None:
        super().__init__(A, tol=tol, max_iter=max_iter, x0=x0, preconditioner=preconditioner)

    def _solve(self, X: Tensor) -> tuple[Tensor, SolveInfo]:
        return minres(self.A, X, **self.options)


class LSMRInverseLinearOperator(_IterativeInverse):
    """`A⁻¹`, or the pseudo-inverse `(AᵀA + damp² I)⁻¹ Aᵀ` of an `A` of any shape, by LSMR; see `lsmr`.

    Args:
        A: The matrix [m, n]; its adjoint is needed too.
        damp: Weight of the distance from `x0`.
        atol: Tolerance relative to `A`.
        btol: Tolerance relative to the right-hand side.
        conlim: Largest condition number; 0 means no limit.
        maxiter: Iteration limit, by default the smaller of `10 min(m, n)` and 1000.
        show: Print a line per iteration.
        x0: First guess, anything that `A` multiplies; by default 0. The adjoint starts from 0.

    Example:
        >>> from curvlinops_plus.linalg import Dense
        >>> pinv = LSMRInverseLinearOperator(Dense(torch.tensor([[1.0], [1.0]])))
        >>> pinv.shape, (pinv @ torch.tensor([1.0, 3.0])).round(decimals=4), pinv.T.to_dense().round(decimals=4)
        ((1, 2), tensor([2.]), tensor([[0.5000],
                [0.5000]]))
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        damp: float = 0.0,
        atol: float = 1e-6,
        btol: float = 1e-6,
        conlim: float = 1e8,
        maxiter: int | None = None,
        show: bool = False,
        x0: Any = None,
    ) -> None:
        super().__init__(A, damp=damp, atol=atol, btol=btol, conlim=conlim, max_iter=maxiter, show=show, x0=x0)

    def adjoint(self) -> LSMRInverseLinearOperator:
        return self if self.structure >= Structure.SYMMETRIC else self._like(self.A.adjoint(), x0=None)

    def _solve(self, X: Tensor) -> tuple[Tensor, SolveInfo]:
        return lsmr(self.A, X, **self.options)


class NeumannInverseLinearOperator(_IterativeInverse):
    """`A⁻¹ ≈ scale · P Σ_{k=0}^{num_terms} (I - scale · A P)ᵏ`, a truncated Neumann series; see `neumann`.

    Args:
        A: The matrix [n, n].
        num_terms: How many terms follow the first.
        scale: For symmetric `A` without preconditioner, below 2 / (largest eigenvalue).
        check_nan: Raise a `ValueError` when the series overflows.
        preconditioner: `P ≈ A⁻¹`, an operator or a function `[n, K] -> [n, K]`; by default the identity.
        tol: Stop at this relative residual, and warn if it is not reached; by default add up all terms.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> inverse = NeumannInverseLinearOperator(Diagonal(torch.tensor([1.0, 4.0])), scale=0.4)
        >>> inverse @ torch.tensor([1.0, 2.0])
        tensor([1.0000, 0.5000])
    """

    def __init__(
        self,
        A: LinearOperator,
        num_terms: int = 100,
        scale: float = 1.0,
        check_nan: bool = True,
        *,
        preconditioner: Preconditioner = None,
        tol: float | None = None,
    ) -> None:
        super().__init__(
            A, num_terms=num_terms, scale=scale, preconditioner=preconditioner, tol=tol, check_nan=check_nan
        )
        _need_square(A)

    @property
    def structure(self) -> Structure:
        P = self.options["preconditioner"]
        known = P is None or (isinstance(P, LinearOperator) and P.structure >= Structure.SYMMETRIC)
        return min(self.A.structure, Structure.SYMMETRIC) if known else Structure.GENERAL

    def adjoint(self) -> NeumannInverseLinearOperator:
        if self.structure >= Structure.SYMMETRIC:
            return self
        P = self.options["preconditioner"]
        if P is not None and not isinstance(P, LinearOperator):
            raise NotImplementedError(
                "The adjoint of a preconditioned Neumann series needs the adjoint of the preconditioner, which a "
                "function does not have; pass a LinearOperator."
            )
        return self._like(self.A.adjoint(), preconditioner=None if P is None else P.adjoint())

    def _solve(self, X: Tensor) -> tuple[Tensor, SolveInfo]:
        return neumann(self.A, X, **self.options)


def _need_square(A: LinearOperator) -> None:
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"Expected a square matrix, got {A.label}; use LSMRInverseLinearOperator.")
