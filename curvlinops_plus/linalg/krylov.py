"""Solve `A x = b` by products: CG (positive definite), MINRES (symmetric), LSMR (any shape), Neumann series.

All take many right-hand sides at once, report `SolveInfo`, and warn with a `CurvatureWarning` that says what was
reached if a tolerance is missed. There are no settings but their arguments. Stopping and restarts are explained where
`iterate` is defined.

Solutions carry no graph; operators such as `CGInverseLinearOperator` are differentiable in the vector.

Sources: Hestenes and Stiefel 1952 (CG); Paige and Saunders 1975 (MINRES); Fong and Saunders 2011 (LSMR); Lorraine,
Vicol and Duvenaud 2020 (Neumann series for implicit differentiation).
"""

from __future__ import annotations

from typing import Any

import torch

from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.linalg.recurrences import CG, LSMR, MINRES
from curvlinops_plus.linalg.solve import (
    Preconditioner,
    SolveInfo,
    System,
    check_at_least_zero,
    count,
    iterate,
    norm,
    warn_of_miss,
)

__all__ = ["SolveInfo", "cg", "lsmr", "minres", "neumann"]


def cg(
    A: LinearOperator,
    b: Any,
    *,
    x0: Any = None,
    tol: float = 1e-5,
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
        tol: A column is done when `‖b - A x‖ <= max(tol ‖b‖, atol)` holds for its true residual.
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
    check_at_least_zero(tol=tol, atol=atol)
    system = System(A, b, x0, preconditioner, square=True)
    limit = count("max_iter", max_iter, A.shape[1])
    return iterate(CG(system, tol, atol), limit, "CG", _tolerance(tol, atol))


def minres(
    A: LinearOperator,
    b: Any,
    *,
    x0: Any = None,
    tol: float = 1e-5,
    atol: float = 0.0,
    max_iter: int | None = None,
    preconditioner: Preconditioner = None,
) -> tuple[Any, SolveInfo]:
    """Minimal residual method for a symmetric `A`, also an indefinite one such as a Hessian.

    If `A` is singular and `b` not in its range, the iteration ends at the smallest residual there is, with a warning.
    (With a preconditioner it is the smallest in the norm of that, `<r, M r>`.) True residuals are computed
    every 50 iterations, and when the recurrence claims to be done or its steps become roundings.

    Args:
        A: The matrix [n, n]; that it is symmetric is not checked.
        b: Right-hand sides, anything that `A` multiplies: a tensor [n] or [n, K], a list, a dictionary, NumPy.
        x0: First guess, any of these; a single vector serves all columns. By default 0.
        tol: A column is done when `‖b - A x‖ <= max(tol ‖b‖, atol)` holds for its true residual.
        atol: See `tol`.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        preconditioner: Symmetric positive definite, even if `A` is not: an operator (also one in a lower precision), or
            a function `[n, k] -> [n, k]` for any `k`.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If `A` is not square, shapes do not fit, or a tolerance is negative.

    Cost: one product with `A` and the preconditioner per iteration, with as many columns as are not done yet, and one
    product with `A` for each column at its end. Memory: twelve tensors [n, K].

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = minres(Diagonal(torch.tensor([1.0, -2.0])), torch.tensor([1.0, 1.0]))
        >>> x, bool(info.converged)
        (tensor([ 1.0000, -0.5000]), True)
    """
    check_at_least_zero(tol=tol, atol=atol)
    system = System(A, b, x0, preconditioner, square=True)
    limit = count("max_iter", max_iter, A.shape[1])
    return iterate(MINRES(system, tol, atol), limit, "MINRES", _tolerance(tol, atol))


def lsmr(
    A: LinearOperator,
    b: Any,
    *,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    max_iter: int | None = None,
    show: bool = False,
    x0: Any = None,
) -> tuple[Any, SolveInfo]:
    """LSMR: the `x` of least `‖b - A x‖² + damp² ‖x - x0‖²`, for an `A` of any shape.

    Among several such `x` it is the one closest to `x0`. With `r` the residual of that least-squares problem, a column
    is done when `‖r‖ <= btol ‖b‖ + atol ‖A‖ ‖x‖` (compatible systems) or `‖Aᵀ r‖ <= atol ‖A‖ ‖r‖` holds for the true
    `x`; `‖A‖` is the estimate from the recurrence. A converged column may thus have a large `relative_residual`: that
    of the least-squares solution.

    Args:
        A: The matrix [m, n]; its adjoint is needed too.
        b: Right-hand sides, anything that `Aᵀ` multiplies.
        damp: Weight of the distance from `x0`.
        atol: See above. Values below the machine precision count as that.
        btol: See above. Values below the machine precision count as that.
        conlim: A column ends, with a warning, when the estimated condition number exceeds this. 0 means no limit.
        max_iter: Iteration limit, by default the smaller of `10 min(m, n)` and 1000.
        show: Print a line per iteration.
        x0: First guess, anything that `A` multiplies; a single vector serves all columns. By default 0.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If shapes do not fit, or a number is negative.

    Cost: one product with `A` and one with `Aᵀ` per iteration, with as many columns as are not done yet, and one more
    of each for each column at its end. Memory: nine tensors [m, K] or [n, K].

    Example:
        >>> from curvlinops_plus.linalg import Dense
        >>> A = Dense(torch.tensor([[1.0], [1.0], [1.0]]))
        >>> x, info = lsmr(A, torch.tensor([1.0, 2.0, 6.0]))
        >>> round(float(x), 4), round(float(info.relative_residual), 2)
        (3.0, 0.58)
    """
    check_at_least_zero(damp=damp, atol=atol, btol=btol, conlim=conlim)
    method = LSMR(System(A, b, x0, None, square=False), damp, atol, btol, conlim, show)
    limit = count("max_iter", max_iter, min(A.shape))
    return iterate(method, limit, "LSMR", f"atol={atol:g}, btol={btol:g}")


def neumann(
    A: LinearOperator,
    b: Any,
    *,
    num_terms: int = 100,
    scale: float = 1.0,
    preconditioner: Preconditioner = None,
    tol: float | None = None,
    check_nan: bool = True,
) -> tuple[Any, SolveInfo]:
    """The truncated Neumann series `x = scale · P Σ_{k=0}^{num_terms} (I - scale · A P)ᵏ b`, `P ≈ A⁻¹`.

    Converges if all eigenvalues of `scale · A P` are within 1 of 1; for symmetric `A` and no preconditioner, if the
    eigenvalues of `A` are between 0 and `2 / scale`.

    Args:
        A: The matrix [n, n].
        b: Right-hand sides, anything that `A` multiplies: a tensor [n] or [n, K], a list, a dictionary, NumPy.
        num_terms: How many terms follow the first.
        scale: See above.
        preconditioner: `P`, by default the identity: an operator, or a function `[n, K] -> [n, K]`.
        tol: Stop when `‖b - A x‖ <= tol ‖b‖` for all columns, and warn where that is not reached. By default all terms
            are added up, and a warning says only where the series made the residual larger than that of `x = 0`.
        check_nan: Raise when the series overflows, instead of returning NaN with a warning.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If `A` is not square, shapes do not fit, or the terms overflow (see `check_nan`).

    Cost: one product with `A` and the preconditioner per term.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = neumann(Diagonal(torch.tensor([0.5, 1.5])), torch.tensor([1.0, 3.0]))
        >>> x.round(decimals=4)
        tensor([2., 2.])
    """
    check_at_least_zero(tol=0.0 if tol is None else tol)
    system = System(A, b, None, preconditioner, square=True)
    num_terms = count("num_terms", num_terms, A.shape[1])
    with torch.no_grad(), outside_autocast(A.device):
        # The terms are residuals: V_k is b - A x of the sum of the terms before it.
        V, X, terms = system.B, torch.zeros_like(system.X), 0
        size = norm(V)
        for terms in range(1, num_terms + 2):
            Z = system.M(V)
            X, V = X + scale * Z, V - scale * system.product(Z)
            size = norm(V)
            if check_nan and not bool(torch.isfinite(size[system.finite]).all()):
                raise ValueError(
                    f"The Neumann series overflowed at term {terms} of {num_terms + 1}: it diverges. Decrease scale="
                    f"{scale:g} below 2 / (largest eigenvalue of A), precondition, or use cg."
                )
            if tol is not None and bool((size <= tol * system.norm_b).all()):
                break
        ratio = torch.where(system.norm_b > 0, size / system.norm_b, torch.zeros_like(size))
        ratio = torch.where(system.finite, ratio, torch.nan)
        met = ratio <= tol if tol is not None else (ratio < 1)
        limit = f"{num_terms + 1} terms are not enough: add terms, change scale={scale:g}, precondition, or use cg"
        diverges = f"the series diverges: decrease scale={scale:g}, precondition, or use cg"
        reason = "converged" if bool(met.all()) else limit if bool((ratio < 1).all()) else diverges
        info = SolveInfo(terms, ratio, met, reason)
        warn_of_miss("The Neumann series", "a residual below that of x = 0" if tol is None else f"tol={tol:g}", info)
        return system.solution(X), info


def _tolerance(tol: float, atol: float) -> str:
    return f"tol={tol:g}" + (f", atol={atol:g}" if atol else "")
