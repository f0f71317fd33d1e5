"""Iterative solvers: conjugate gradients of many columns together, SciPy's MINRES and LSMR, and the
Neumann series.

Right-hand sides are divided by their largest entry first, so that tiny and huge ones neither under-
nor overflow. What `SolveInfo` reports is the true residual `b - A x`, from a product with `A` at
the end; a missed tolerance warns with a `CurvatureWarning`. The operators, such as
`CGInverseLinearOperator`, solve in every product: see `inverses`.

A column in which a number is NaN or infinite, of the right-hand side, the first guess or a product
that it needs, has the solution NaN and counts as not converged; the others don't notice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.linalg.arithmetic import operator_of
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.options import flag, function, integer, number

Preconditioner = LinearOperator | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class SolveInfo:
    """The outcome of an iterative solve.

    Attributes:
        iterations: How many it took, the largest number over columns.
        relative_residual: `‖b - A x‖ / ‖b‖` of each column, [K], from a product with `A` at the
            end; 0 for `b = 0`, and NaN where `x` is.
        converged: Whether each column met its tolerance, [K]; where a number was not finite, none.
        reason: "converged", or why other columns ended.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal, cg
        >>> x, info = cg(Diagonal(torch.tensor([1.0, 4.0])), torch.tensor([1.0, 1.0]))
        >>> info.converged, info.iterations, info.reason
        (tensor([True]), 2, 'converged')
    """

    iterations: int
    relative_residual: Tensor
    converged: Tensor
    reason: str


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

    A positive semi-definite `A` is fine if `b` is in its range. A direction of zero or negative
    curvature ends a column with a warning; its `x` is that of the step before. True residuals are
    computed at the end; a warning says where rounding kept them above the tolerance.

    Args:
        A: The matrix [n, n]; that it is symmetric is not checked.
        b: Right-hand sides, anything that `A` multiplies: a tensor [n] or [n, K], a list, a
            dictionary, NumPy.
        x0: First guess, any of these; a single vector serves all columns. By default 0.
        tol: A column is done when `‖b - A x‖ <= max(tol ‖b‖, atol)` holds for its true residual.
            None: `max_iter` iterations, unless 1e-10 is reached before; 1e-5 is enough for `info`
            and for there being no warning.
        atol: See `tol`.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        preconditioner: Symmetric positive definite approximation of `A⁻¹`: an operator (also one in
            a lower precision), or a function `[n, k] -> [n, k]` for any `k`. KFAC's inverse often
            saves few iterations: compare.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If `A` is not square, shapes do not fit, or an option is out of range.

    Cost: one product with `A` and the preconditioner per iteration, with all columns until the last
    one is done, and one product with `A` at the end. Memory: seven tensors [n, K].

    Example:
        >>> from curvlinops_plus.linalg import Dense, Structure
        >>> A = Dense(torch.tensor([[4.0, 1.0], [1.0, 3.0]]), Structure.PSD)
        >>> x, info = cg(A, torch.tensor([1.0, 2.0]))
        >>> x, info.iterations
        (tensor([0.0909, 0.6364]), 2)
    """
    check_solver_options(tol=tol, atol=atol, max_iter=max_iter, preconditioner=preconditioner)
    A = operator_of(A)
    accepted = 1e-5 if tol is None else tol
    system = System(A, b, x0, preconditioner, max_iter)
    goal = 0.9 * system.goal(1e-10 if tol is None else tol, atol)
    iterations = 0
    with GradMode(False), full_precision(A.device.type):
        # X is the solution so far, R its residual, Z = M R the preconditioned one, and P the
        # direction of the next step.
        X = system.X
        R = system.residual()
        Z = system.M(R)
        P = Z
        rz = (R * Z).sum(0)
        system.leave_out(~rz.isfinite())
        active = (norm(R) > goal) & (rz > 0)
        while iterations < system.limit and bool(active.any()):  # the one question to the device
            Q = system.product(P)
            curvature = (P * Q).sum(0)
            system.leave_out(active & ~curvature.isfinite())
            active = active & (curvature > 0)
            # The step along P to the minimum; 0 for columns that have ended.
            alpha = torch.where(active, rz / curvature, 0.0)
            X = X + alpha * P
            R = R - alpha * Q
            Z = system.M(R)
            rz_before = rz
            rz = (R * Z).sum(0)
            system.leave_out(active & ~rz.isfinite())
            # The next direction is conjugate to the others: Pᵀ A P' = 0.
            P = torch.where(active, rz / rz_before, 0.0) * P + Z
            active = active & (norm(R) > goal) & (rz > 0)
            iterations += 1
        system.X = X
        advice = (
            f"no more progress in {system.dtype}; loosen the tolerance, compute in float64, or add "
            "a damping to A"
        )
        if bool((~active & (norm(R) > goal)).any()):
            advice = (
                "zero or negative curvature: A or the preconditioner is not positive definite; "
                "damp, or use MINRES"
            )
        tolerance = f"tol={accepted:g}, atol={atol:g}"
        enough = system.goal(accepted, atol)
        return system.report("CG", tolerance, iterations, enough, advice)


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

    This is `scipy.sparse.linalg.minres`, on the CPU and for one column after the other, with true
    residuals every 10 iterations.

    Args:
        A: The matrix [n, n]; that it is symmetric is not checked.
        b: Right-hand sides, anything that `A` multiplies: a tensor [n] or [n, K], a list, a
            dictionary, NumPy.
        x0: First guess, any of these; a single vector serves all columns. By default 0.
        tol: A column is done when `‖b - A x‖ <= max(tol ‖b‖, atol)` holds for its true residual.
        atol: See `tol`.
        max_iter: Iteration limit, by default the smaller of `10 n` and 1000.
        preconditioner: Symmetric positive definite, even if `A` is not: an operator (also one in a
            lower precision), or a function `[n, k] -> [n, k]` for any `k`.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If `A` is not square, shapes do not fit, an option is out of range, or the
            preconditioner is indefinite.

    Cost: one product with `A` and the preconditioner per iteration and column, and a tenth more for
    true residuals.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = minres(Diagonal(torch.tensor([1.0, -2.0])), torch.tensor([1.0, 1.0]))
        >>> x, bool(info.converged)
        (tensor([ 1.0000, -0.5000]), True)
    """
    number("tol", tol, low=0)
    check_solver_options(atol=atol, max_iter=max_iter, preconditioner=preconditioner)
    A = operator_of(A)
    system = System(A, b, x0, preconditioner, max_iter)
    goal = system.goal(tol, atol)
    with GradMode(False), full_precision(A.device.type):
        size = system.size_of_A()
        M = None
        if preconditioner is not None:

            def precondition(r: np.ndarray) -> np.ndarray:
                R = torch.as_tensor(size * r[:, None]).to(system.X)
                return _finite(system.M(R).cpu().double().numpy())

            make: Any = scipy.sparse.linalg.LinearOperator
            M = make(A.shape, precondition, dtype=np.float64)
        # SciPy's tolerance is relative to ‖A‖ ‖x‖.
        options = {"rtol": torch.finfo(system.dtype).eps, "maxiter": system.limit, "M": M}

        def solve(op: Any, right: np.ndarray, x: np.ndarray, column: int) -> tuple[np.ndarray, int]:
            return _minres(op, right, x, float(goal[column]), options)

        iterations = system.solve_columns(solve, size)
        advice = (
            "no more progress; if A is singular and b not in its range, x minimizes the residual; "
            "damp A"
        )
        tolerance = f"tol={tol:g}, atol={atol:g}"
        return system.report("MINRES", tolerance, iterations, goal, advice)


class _Met(Exception):
    """Ends SciPy's iteration: the tolerance is met."""


class _NotFinite(Exception):
    """Ends SciPy's iteration: a product has NaN or infinite entries."""


def _finite(product: np.ndarray) -> np.ndarray:
    """The product, if it is finite."""
    if not np.isfinite(product).all():
        raise _NotFinite
    return product


def _minres(
    op: Any, b: np.ndarray, x: np.ndarray, goal: float, options: dict[str, Any]
) -> tuple[np.ndarray, int]:
    """The `x` of the least true residual that was seen, and the number of iterations."""
    best = x
    least = float(np.linalg.norm(b - op @ x))
    iterations = 0

    def callback(x: np.ndarray) -> None:
        nonlocal best, least, iterations
        iterations += 1
        if iterations % 10 == 0:
            residual = float(np.linalg.norm(b - op @ x))
            if residual < least:
                best = x.copy()
                least = residual
        if least <= goal:
            raise _Met

    try:
        x, _ = scipy.sparse.linalg.minres(op, b, x0=x, callback=callback, **options)
    except _Met:
        return best, iterations
    # Where no residual is a number, the last `x` is returned.
    if least < float(np.linalg.norm(b - op @ x)):
        x = best
    return x, iterations


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

    Among several such `x` it is the one closest to `x0`. With `r` the residual of that
    least-squares problem, a column is done when `‖r‖ <= btol ‖b‖ + atol ‖A‖ ‖x‖` (compatible
    systems) or `‖Aᵀ r‖ <= atol ‖A‖ ‖r‖` holds by the recurrence of `scipy.sparse.linalg.lsmr`,
    which does the work, on the CPU and for one column after the other. A converged column may thus
    have a large `relative_residual`: that of the least-squares solution.

    Args:
        A: The matrix [m, n]; its adjoint is needed too.
        b: Right-hand sides, anything that `Aᵀ` multiplies.
        damp: Weight of the distance from `x0`.
        atol: See above.
        btol: See above.
        conlim: A column ends, with a warning, when the estimated condition number exceeds this. 0
            means no limit.
        max_iter: Iteration limit, by default the smaller of `10 min(m, n)` and 1000.
        show: Print a line per iteration.
        x0: First guess, anything that `A` multiplies; a single vector serves all columns. By
            default 0.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If shapes do not fit, or an option is out of range.

    Cost: one product with `A` and one with `Aᵀ` per iteration and column.

    Example:
        >>> from curvlinops_plus.linalg import Dense
        >>> A = Dense(torch.tensor([[1.0], [1.0], [1.0]]))
        >>> x, info = lsmr(A, torch.tensor([1.0, 2.0, 6.0]))
        >>> round(float(x), 4), round(float(info.relative_residual), 2)
        (3.0, 0.58)
    """
    check_solver_options(
        damp=damp, atol=atol, btol=btol, conlim=conlim, max_iter=max_iter, show=show
    )
    A = operator_of(A, square=False)
    system = System(A, b, x0, max_iter=max_iter)
    goal = system.norm_b.new_full(system.norm_b.shape, -1.0)
    with GradMode(False), full_precision(A.device.type):
        size = system.size_of_A()
        options = {
            "atol": atol,
            "btol": btol,
            "conlim": conlim,
            "maxiter": system.limit,
            "show": show,
        }

        def solve(op: Any, right: np.ndarray, x: np.ndarray, column: int) -> tuple[np.ndarray, int]:
            solution = scipy.sparse.linalg.lsmr(op, right, damp / size, x0=x, **options)
            x, reason, iterations = solution[:3]
            # 3 and 6 say that the condition number is above conlim, 7 is the limit.
            if reason not in (3, 6, 7) and system.limit > 0:
                goal[column] = torch.inf
            return x, iterations

        iterations = system.solve_columns(solve, size)
        tolerance = f"atol={atol:g}, btol={btol:g}"
        advice = "condition number above conlim; raise it or damp"
        return system.report("LSMR", tolerance, iterations, goal, advice)


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
    """The truncated Neumann series `x = scale · P Σ_{k=0}^{num_terms} (I - scale · A P)ᵏ b`, `P ≈
    A⁻¹`.

    Converges if all eigenvalues of `scale · A P` are within 1 of 1; for symmetric `A` and no
    preconditioner, if the eigenvalues of `A` are between 0 and `2 / scale`.

    Args:
        A: The matrix [n, n].
        b: Right-hand sides, anything that `A` multiplies: a tensor [n] or [n, K], a list, a
            dictionary, NumPy.
        num_terms: How many terms follow the first.
        scale: See above.
        preconditioner: `P`, by default the identity: an operator, or a function `[n, K] -> [n, K]`.
        tol: Stop when `‖b - A x‖ <= tol ‖b‖` for all columns, and warn where that is not reached.
            By default all terms are added up, and a warning says only where the series made the
            residual larger than that of `x = 0`.
        check_nan: Raise when the series overflows, instead of returning NaN with a warning.

    Returns:
        `x` in the container type of `b`, and a `SolveInfo`.

    Raises:
        ValueError: If `A` is not square, shapes do not fit, an option is out of range, or the terms
            overflow (see `check_nan`).

    Cost: one product with `A` and the preconditioner per term.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = neumann(Diagonal(torch.tensor([0.5, 1.5])), torch.tensor([1.0, 3.0]))
        >>> x.round(decimals=4)
        tensor([2., 2.])
    """
    check_solver_options(
        num_terms=num_terms,
        scale=scale,
        preconditioner=preconditioner,
        tol=tol,
        check_nan=check_nan,
    )
    A = operator_of(A)
    system = System(A, b, None, preconditioner, num_terms + 2)
    goal = system.goal(1.0 if tol is None else tol, 0.0)
    advice = f"scale={scale:g} below 2 / (largest eigenvalue of A), precondition, or use cg"
    with GradMode(False), full_precision(A.device.type):
        R = system.B  # each term is P times the residual of the sum of the terms before it
        terms = 0
        for terms in range(1, num_terms + 2):
            # b - A (x + c M r) = r - c A M r
            Z = system.M(R)
            system.X = system.X + scale * Z
            R = R - scale * system.product(Z)
            size = norm(R)
            if check_nan and not bool(size.isfinite().all()):
                raise ValueError(
                    f"The Neumann series overflowed at term {terms} of {num_terms + 1}: it "
                    f"diverges. Decrease {advice}."
                )
            if tol is not None and bool((size <= goal).all()):
                break
        tolerance = "a residual below that of x = 0" if tol is None else f"tol={tol:g}"
        advice = f"add terms, decrease {advice}"
        return system.report("The Neumann series", tolerance, terms, goal, advice)


def check_solver_options(**options: Any) -> None:
    """Refuse options of the functions in this file that are out of range, by their names."""
    for name, value in options.items():
        if name == "preconditioner":
            form = "[n, k] -> [n, k], or an operator"
            if not isinstance(value, LinearOperator):
                function(name, value, form)
        elif name in ("max_iter", "num_terms"):
            integer(name, value, low=0, optional=name == "max_iter")
        elif name in ("show", "check_nan"):
            flag(name, value)
        elif name == "scale":
            number(name, value)
        elif name != "x0":
            number(name, value, low=0, infinite=name == "conlim", optional=name == "tol")


class System:
    """`A X = B` with columns scaled to a largest entry of 1, as flat tensors in float32 at least.

    Columns that are not finite are 0 in here, and become NaN in the report.

    Args:
        b: Right-hand sides, anything that `A.out_space` reads.
        x0: First guess, anything that `A.in_space` reads; a single one serves all columns. `None`
            is 0.
        preconditioner: Operator or function `[n, k] -> [n, k]`.
        max_iter: Iteration limit, by default the smaller of `10 min(m, n)` and 1000.
    """

    def __init__(
        self,
        A: LinearOperator,
        b: Any,
        x0: Any = None,
        preconditioner: Preconditioner = None,
        max_iter: int | None = None,
    ) -> None:
        self.A = A
        if isinstance(preconditioner, LinearOperator) and preconditioner.shape != A.shape[::-1]:
            raise ValueError(
                f"preconditioner is {preconditioner.label}; expected the shape of {A.label}."
            )
        self.preconditioner = preconditioner
        self.limit = min(10 * min(A.shape), 1000) if max_iter is None else max_iter
        self.dtype = torch.promote_types(A.dtype, torch.float32)
        B, self.container = A.out_space.read(b, A.dtype, A.device)
        B = B.detach().to(self.dtype)
        #: Columns of which all numbers so far were finite, [K].
        self.is_finite = B.isfinite().all(0)
        guess = B.new_zeros(A.shape[1], B.shape[1])
        if x0 is not None:
            guess = guess + A.in_space.read(x0, A.dtype, A.device)[0].detach().to(self.dtype)
            self.leave_out(~guess.isfinite().all(0))
        B = torch.where(self.is_finite, B, 0.0)
        largest = B.abs().amax(0)
        self.scale = torch.where(largest > 0, largest, 1.0)
        self.B = B / self.scale  # [m, K]
        self.norm_b = norm(self.B)
        self.X = torch.where(largest > 0, guess / self.scale, 0.0)

    def leave_out(self, columns: Tensor) -> None:  # [K]
        """Have these columns end as NaN: a number that they need is not finite."""
        self.is_finite = self.is_finite & ~columns

    def M(self, R: Tensor) -> Tensor:  # [n, k] -> [n, k]
        """The product with the preconditioner, which may have a lower precision."""
        M = self.preconditioner
        if isinstance(M, LinearOperator):
            return M._matmat(R.to(M.dtype)).to(self.dtype)
        return R if M is None else M(R)

    def product(self, X: Tensor) -> Tensor:  # [n, k] -> [m, k]
        """`A X`."""
        return self.A._matmat(X.to(self.A.dtype)).to(self.dtype)

    def residual(self) -> Tensor:  # -> [m, K]
        """`B - A X`."""
        return self.B - self.product(self.X) if bool(self.X.any()) else self.B

    def goal(self, tol: float, atol: float) -> Tensor:  # -> [K]
        """The residual of scaled columns that is enough."""
        return (tol * self.norm_b).clamp(min=atol / self.scale)

    def size_of_A(self) -> float:
        """About the norm of `A`: SciPy's methods compare numbers with others that don't depend on
        it, and get `A` divided by it.
        """
        if len(self.norm_b) == 0:
            return 1.0
        products = self.A._rmatmat(self.B.to(self.A.dtype)).to(self.dtype)
        ratios = norm(products) / self.norm_b  # ‖Aᵀ b‖ / ‖b‖
        return float(ratios.nan_to_num(0.0, 0.0).amax()) or 1.0

    def scaled_for_scipy(self, size: float) -> Any:
        """`A / size` for SciPy, whose products raise where they are not finite."""
        A = self.A.to_scipy() * (1 / size)
        make: Any = scipy.sparse.linalg.LinearOperator
        return make(
            A.shape,
            lambda v: _finite(A.matvec(v)),
            lambda v: _finite(A.rmatvec(v)),
            dtype=A.dtype,
        )

    def solve_columns(
        self,
        solve: Callable[[Any, np.ndarray, np.ndarray, int], tuple[np.ndarray, int]],
        size: float,
    ) -> int:
        """Solve column by column in NumPy; returns the largest number of iterations.

        Args:
            solve: Called with `A / size`, the right-hand side, the first guess times `size` and the
                number of the column; returns the solution times `size` and its iterations.
        """
        op = self.scaled_for_scipy(size)
        B = self.B.cpu().double().numpy()
        X = self.X.cpu().double().numpy()
        most = 0
        for column in self.norm_b.nonzero()[:, 0].tolist():
            try:
                x, iterations = solve(op, B[:, column], size * X[:, column], column)
            except _NotFinite:
                self.is_finite[column] = False
                continue
            self.X[:, column] = torch.as_tensor(x / size)
            most = max(most, iterations)
        return most

    def report(
        self, name: str, tolerance: str, iterations: int, goal: Tensor, advice: str
    ) -> tuple[Any, SolveInfo]:
        """The solution in the container type of the right-hand side, and a `SolveInfo`; warns of
        what was not met.

        Args:
            name: The method, for the warning.
            tolerance: In words.
            iterations: How many were made.
            goal: The residual of scaled columns, [K], that is enough.
            advice: Why columns end that are neither converged nor at the limit.
        """
        residual = norm(self.residual())
        self.leave_out(~residual.isfinite())
        self.X = torch.where(self.is_finite, self.X, torch.nan)
        relative = torch.where(self.norm_b == 0, 0.0, residual / self.norm_b)
        relative = torch.where(self.is_finite, relative, torch.nan)
        converged = self.is_finite & ((residual <= goal) | (self.norm_b == 0))
        reason = "converged"
        missed = int((~converged).sum())
        if missed:
            worst = float(relative[~converged].nan_to_num(torch.inf).max())
            reason = advice
            if worst == torch.inf:
                reason = (
                    "the right-hand side, or a product with A or the preconditioner, has NaN or "
                    "infinite entries; x is NaN there"
                )
            elif iterations >= self.limit:
                reason = (
                    f"iteration limit {self.limit} reached; raise it, precondition, or add a "
                    "damping to A"
                )
            warnings.warn(
                f"{name} missed {tolerance} for {missed} of {len(converged)} columns; the largest "
                f"relative residual after {iterations} iterations is {worst:.1e}: {reason}.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
        x = self.A.in_space.write((self.X * self.scale).to(self.A.dtype), self.container)
        return x, SolveInfo(iterations, relative, converged, reason)


def norm(a: Tensor) -> Tensor:  # [n, k] -> [k]
    """2-norm of each column."""
    return torch.linalg.vector_norm(a, dim=0)
