"""Conjugate gradients (Hestenes and Stiefel 1952), for symmetric positive definite matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.iterative_inverse import SymmetricInverse
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.relative_residual import Relative, tolerance_text
from curvlinops_plus.linalg.solve import (
    Preconditioner,
    SolveInfo,
    State,
    Stop,
    System,
    add,
    check_at_least_zero,
    count,
    dot,
    iterate,
    scale,
)


class CG(Relative):
    """State: direction `P`, residual `R` with norm `r`, `rz = <R, M R>`."""

    trust = 10.0

    def start(self, X: Tensor, R: Tensor, columns: Tensor) -> State:
        s, Z, rz = self.opening(X, R, columns)
        s.P, s.rz = Z.clone(), rz
        return s

    def step(self, s: State) -> None:
        Q = self.system.product(s.P)
        curvature, p_squared = dot(s.P, Q), dot(s.P, s.P)
        s.norm_A = torch.maximum(s.norm_A, curvature / p_squared)  # a bound from below
        alpha = s.rz / curvature
        add(s.R, -alpha, Q)
        r = dot(s.R, s.R).sqrt()
        # Below this the sign of the curvature is not known, if products are rounded like those of a dense matrix. A
        # step that reduces the residual is right all the same; one that doesn't goes off along the null space.
        doubtful = (curvature <= self.system.eps * s.norm_A * p_squared) & ~(r < s.r)
        fine = (curvature > 0) & torch.isfinite(curvature) & ~doubtful
        add(s.X, torch.where(fine, alpha, 0.0), s.P)
        Z = self.system.M(s.R)
        rz = dot(s.R, Z) if self.system.preconditioned else r.square()
        scale(s.P, rz / s.rz).add_(Z)
        s.r, s.rz, s.claim = r, rz, fine & (r <= s.goal)
        broken = torch.where(torch.isfinite(curvature), Stop.NOT_POSITIVE.value, Stop.NOT_FINITE.value)
        good_M = (rz > 0) & torch.isfinite(rz)
        s.stop = torch.where(
            fine, torch.where(good_M | s.claim, Stop.RUNNING.value, Stop.BAD_PRECONDITIONER.value), broken
        )


def cg(
    A: LinearOperator,
    b: Any,
    *,
    x0: Any = None,
    tol: float | None = 1e-5,
    atol: float = 0.0,
    max_iter: int | None = None,
    preconditioner: Preconditioner = None,
) -> tuple[Any, SolveInfo]:
    """Conjugate gradients for a symmetric positive definite `A`, all columns of `b` together.

    A positive semi-definite `A` is fine if `b` is in its range. A direction of zero or negative curvature ends a column
    with a warning; its `x` is that of the step before.

    Args:
        A: The matrix [n, n]; that it is symmetric is not checked.
        b: Right-hand sides, anything that `A` multiplies: a tensor [n] or [n, K], a list, a dictionary, NumPy.
        x0: First guess, any of these; a single vector serves all columns. By default 0.
        tol: A column is done when `‖b - A x‖ <= max(tol ‖b‖, atol)` holds for its true residual. None: `max_iter`
            iterations, unless 1e-10 is reached before; 1e-5 is enough for `info` and for there being no warning.
        atol: See `tol`.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        preconditioner: Symmetric positive definite approximation of `A⁻¹`: an operator (also one in a lower precision),
            or a function `[n, k] -> [n, k]` for any `k`.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If `A` is not square, shapes do not fit, or a tolerance is negative.

    Cost: one product with `A` and the preconditioner per iteration, with as many columns as are not done yet, and one
    product with `A` for each column at its end. Memory: seven tensors [n, K].

    Example:
        >>> from curvlinops_plus.linalg import Dense, Structure
        >>> A = Dense(torch.tensor([[4.0, 1.0], [1.0, 3.0]]), Structure.PSD)
        >>> x, info = cg(A, torch.tensor([1.0, 2.0]))
        >>> x, info.iterations
        (tensor([0.0909, 0.6364]), 2)
    """
    tol, enough = (1e-10, 1e-5) if tol is None else (tol, 0.0)
    check_at_least_zero(tol=tol, atol=atol)
    system = System(A, b, x0, preconditioner, square=True)
    limit = count("max_iter", max_iter, A.shape[1])
    return iterate(CG(system, tol, atol), limit, "CG", tolerance_text(max(tol, enough), atol), enough)


class CGInverseLinearOperator(SymmetricInverse):
    """`A⁻¹` of a symmetric positive definite `A`, by conjugate gradients; see `cg`.

    Args:
        A: The matrix. It is taken for symmetric, whatever it declares.
        tolerance: A column is solved when `‖b - A x‖ <= tolerance ‖b‖`. Default: 1e-5; if `max_iter` is given alone, so
            many iterations are made, unless 1e-10 is reached before.
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
        tol = tolerance if tolerance is not None else 1e-5 if max_iter is None else None
        if stop_updating_after is not None:
            tol = stop_updating_after if tol is None else max(tol, stop_updating_after)
        super().__init__(A, tol=tol, max_iter=max_iter, x0=initial_guess, preconditioner=preconditioner)
