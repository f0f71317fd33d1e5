"""Inverses that solve iteratively in every product: operators of the functions in `solvers`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.arithmetic import operator_of
from curvlinops_plus.linalg.operator import LinearOperator, linear_in, moved
from curvlinops_plus.linalg.solvers import (
    Preconditioner,
    SolveInfo,
    cg,
    check_solver_options,
    lsmr,
    minres,
    neumann,
)
from curvlinops_plus.linalg.space import Structure
from curvlinops_plus.options import number

if TYPE_CHECKING:
    from typing_extensions import Self


class IterativeInverse(LinearOperator):
    """`A⁻¹`, whose products solve with `A`: `solver` is called with the matrix, right-hand sides
    and `options`.
    """

    solver: Callable[..., tuple[Any, SolveInfo]]
    #: Whether the method takes the matrix for symmetric, whatever it declares.
    symmetric = True
    square = True

    def __init__(self, A: LinearOperator, **options: Any) -> None:
        check_solver_options(**options)
        #: Keywords of the solver.
        self.options = options
        self._set_matrix(operator_of(A, self.square))

    def _set_matrix(self, A: LinearOperator) -> None:
        self.A = A
        #: How well the last product was solved; None before the first.
        self.info: SolveInfo | None = None
        super().__init__(A.out_space, A.dtype, A.device, out_space=A.in_space)

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        if self.symmetric:
            return max(self.A.structure, Structure.SYMMETRIC)
        return self.A.structure

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._adjoint_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._adjoint_product, self._product)

    def _product(self, X: Tensor) -> Tensor:
        x, self.info = type(self).solver(self.A, X, **self.options)
        return x

    def _adjoint_product(self, X: Tensor) -> Tensor:
        adjoint: Any = self.adjoint()
        x = adjoint._product(X)
        self.info = adjoint.info
        return x

    def _adjoint(self) -> Self:
        return self._like(self.A.adjoint(), x0=None)

    def _like(self, A: LinearOperator, **options: Any) -> Self:
        """The same kind of inverse of another matrix, with some options changed."""
        inverse = copy(self)
        inverse.options = self.options | options
        inverse._set_matrix(A)
        return inverse

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Self:
        options = {name: moved(value, device, dtype) for name, value in self.options.items()}
        return self._like(self.A.to(device, dtype), **options)


class CGInverseLinearOperator(IterativeInverse):
    """`A⁻¹` of a symmetric positive definite `A`, by conjugate gradients; see `cg`.

    Args:
        A: The matrix. It is taken for symmetric, whatever it declares.
        tolerance: A column is solved when `‖b - A x‖ <= tolerance ‖b‖`. Default: 1e-5; if
            `max_iter` is given alone, so many iterations are made, unless 1e-10 is reached before.
        eps: Accepted for code written for curvlinops, without effect: no division needs to be
            guarded.
        stop_updating_after: If larger than `tolerance`, it takes its place.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        max_tridiag_iter: Accepted for code written for curvlinops, without effect: nothing is
            tridiagonalized.
        initial_guess: First guess, anything that `A` multiplies; by default 0.
        preconditioner: Approximation of `A⁻¹`, symmetric positive definite: an operator, for
            example the inverse of an EKFAC, or a function `[n, k] -> [n, k]`.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> inverse = CGInverseLinearOperator(Diagonal(torch.tensor([1.0, 4.0])))
        >>> inverse @ [torch.tensor([1.0, 2.0])], inverse.info.converged
        ([tensor([1.0000, 0.5000])], tensor([True]))
    """

    solver = staticmethod(cg)

    def __init__(
        self,
        A: LinearOperator,
        *,
        tolerance: float | None = None,
        eps: float = 1e-10,
        stop_updating_after: float | None = None,
        max_iter: int | None = None,
        max_tridiag_iter: int | None = None,
        initial_guess: Any = None,
        preconditioner: Preconditioner = None,
    ) -> None:
        tol = number("tolerance", tolerance, low=0, optional=True)
        if tol is None and max_iter is None:
            tol = 1e-5
        if stop_updating_after is not None:
            number("stop_updating_after", stop_updating_after, low=0)
            tol = max(tol or 0.0, stop_updating_after)
        super().__init__(
            A, tol=tol, max_iter=max_iter, x0=initial_guess, preconditioner=preconditioner
        )


class MINRESInverseLinearOperator(IterativeInverse):
    """`A⁻¹` of a symmetric `A` that may be indefinite, such as a Hessian, by MINRES; see `minres`.

    Args:
        A: The matrix. It is taken for symmetric, whatever it declares.
        tol: A column is solved when `‖b - A x‖ <= tol ‖b‖`.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        x0: First guess, anything that `A` multiplies; by default 0.
        preconditioner: Symmetric positive definite operator, or function `[n, k] -> [n, k]`.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> A = Diagonal(torch.tensor([1.0, -4.0]))
        >>> MINRESInverseLinearOperator(A) @ torch.tensor([1.0, 2.0])
        tensor([ 1.0000, -0.5000])
    """

    solver = staticmethod(minres)

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


class LSMRInverseLinearOperator(IterativeInverse):
    """`A⁻¹`, or the pseudo-inverse `(AᵀA + damp² I)⁻¹ Aᵀ` of an `A` of any shape, by LSMR; see
    `lsmr`.

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
        >>> (
        ...     pinv.shape,
        ...     (pinv @ torch.tensor([1.0, 3.0])).round(decimals=4),
        ...     pinv.T.to_dense().round(decimals=4),
        ... )
        ((1, 2), tensor([2.]), tensor([[0.5000],
                [0.5000]]))
    """

    solver = staticmethod(lsmr)
    symmetric = False
    square = False

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
        super().__init__(
            A, damp=damp, atol=atol, btol=btol, conlim=conlim, max_iter=maxiter, show=show, x0=x0
        )


class NeumannInverseLinearOperator(IterativeInverse):
    """`A⁻¹ ≈ scale · P Σ_{k=0}^{num_terms} (I - scale · A P)ᵏ`, a truncated Neumann series; see
    `neumann`.

    Args:
        A: The matrix [n, n].
        num_terms: How many terms follow the first.
        scale: For symmetric `A` without preconditioner, below 2 / (largest eigenvalue).
        check_nan: Raise a `ValueError` when the series overflows.
        preconditioner: `P ≈ A⁻¹`, an operator or a function `[n, K] -> [n, K]`; by default the
            identity.
        tol: Stop at this relative residual, and warn if it is not reached; by default add up all
            terms.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> inverse = NeumannInverseLinearOperator(Diagonal(torch.tensor([1.0, 4.0])), scale=0.4)
        >>> inverse @ torch.tensor([1.0, 2.0])
        tensor([1.0000, 0.5000])
    """

    solver = staticmethod(neumann)
    symmetric = False

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
        options = {"num_terms": num_terms, "scale": scale, "tol": tol, "check_nan": check_nan}
        super().__init__(A, preconditioner=preconditioner, **options)

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        P = self.options["preconditioner"]
        if P is None or (isinstance(P, LinearOperator) and P.structure >= Structure.SYMMETRIC):
            return min(self.A.structure, Structure.SYMMETRIC)
        return Structure.GENERAL

    def _adjoint(self) -> Self:
        P = self.options["preconditioner"]  # a function has no adjoint
        return self._like(self.A.adjoint(), preconditioner=None if P is None else P.adjoint())
