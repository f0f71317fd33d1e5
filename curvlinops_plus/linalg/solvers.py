"""Iterative solvers: conjugate gradients of many columns together, SciPy's MINRES and LSMR, and the
Neumann series.

Right-hand sides are divided by their largest entry first, so that tiny and huge ones neither under-
nor overflow. What `SolveInfo` reports is the true residual `b - A x`, from a product with `A` at
the end; a missed tolerance warns with a `CurvatureWarning`. The operators, such as
`CGInverseLinearOperator`, solve in every product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.linalg.operator import Foreign, LinearOperator, linear_in, outside_autocast
from curvlinops_plus.linalg.space import Structure

if TYPE_CHECKING:
    from typing_extensions import Self

Preconditioner = LinearOperator | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class SolveInfo:
    """The outcome of an iterative solve.

    Attributes:
        iterations: How many it took, the largest number over columns.
        relative_residual: `‖b - A x‖ / ‖b‖` of each column, [K], from a product with `A` at the
            end; 0 for `b = 0`.
        converged: Whether each column met its tolerance, [K].
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


class System:
    """`A X = B` with columns scaled to a largest entry of 1, as flat tensors in float32 at least.

    Args:
        b: Right-hand sides, anything that `A.out_space` reads.
        x0: First guess, anything that `A.in_space` reads; a single one serves all columns. `None`
            is 0.
        preconditioner: Operator or function `[n, k] -> [n, k]`.
    """

    def __init__(
        self, A: LinearOperator, b: Any, x0: Any = None, preconditioner: Preconditioner = None
    ) -> None:
        self.A, self.dtype = A, torch.promote_types(A.dtype, torch.float32)
        B, self.container = A.out_space.read(b, A.dtype, A.device)
        B = B.detach().to(self.dtype)
        size = B.abs().amax(0)
        self.scale = torch.where((size > 0) & size.isfinite(), size, 1.0)
        self.B = B / self.scale  # [m, K]
        self.norm_b = norm(self.B)
        self.X = B.new_zeros(A.shape[1], B.shape[1])
        if x0 is not None:
            guess = A.in_space.read(x0, A.dtype, A.device)[0].detach().to(self.dtype)
            self.X = torch.where(size == 0, self.X, guess / self.scale)
        if isinstance(preconditioner, LinearOperator):
            M = preconditioner  # a cheaper precision is fine
            self.M: Callable[[Tensor], Tensor] = lambda R: M._matmat(R.to(M.dtype)).to(self.dtype)
        else:
            self.M = (lambda R: R) if preconditioner is None else preconditioner

    def product(self, X: Tensor) -> Tensor:  # [n, k] -> [m, k]
        """`A X`."""
        return self.A._matmat(X.to(self.A.dtype)).to(self.dtype)

    def residual(self) -> Tensor:  # -> [m, K]
        """`B - A X`."""
        return self.B - self.product(self.X) if bool(self.X.any()) else self.B

    def goal(self, tol: float, atol: float) -> Tensor:  # -> [K]
        """The residual of scaled columns that is enough."""
        return (tol * self.norm_b).clamp(min=atol / self.scale)

    def for_scipy(self) -> tuple[Any, float, list[tuple[int, np.ndarray, np.ndarray]]]:
        """`A / size`, about of norm 1, `size`, and number, right-hand side and first guess times
        `size` of each column.

        SciPy's methods compare numbers with others that don't depend on the norm of `A`.
        """
        ratio = norm(self.A._rmatmat(self.B.to(self.A.dtype)).to(self.dtype)) / self.norm_b
        size = float(ratio.nan_to_num(0.0, 0.0).amax()) if len(ratio) else 0.0
        size = size or 1.0
        B, X = (t.cpu().double().numpy() for t in (self.B, self.X))
        todo = ((self.norm_b > 0) & self.norm_b.isfinite()).nonzero()[:, 0].tolist()
        return self.A.to_scipy() * (1 / size), size, [(k, B[:, k], size * X[:, k]) for k in todo]

    def report(
        self,
        name: str,
        tolerance: str,
        iterations: int,
        limit: int,
        met: Callable[[Tensor], Tensor],
        advice: str,
    ) -> tuple[Any, SolveInfo]:
        """The solution in the container type of the right-hand side, and a `SolveInfo`; warns of
        what was not met.

        Args:
            name: Of the method, for the warning.
            tolerance: In words.
            iterations: How many were made.
            limit: How many were allowed.
            met: From residuals of scaled columns, [K], whether they are small enough.
            advice: Why columns end that are neither converged nor at the limit.
        """
        residual = norm(self.residual())
        relative = torch.where(self.norm_b == 0, 0.0, residual / self.norm_b)
        converged, reason = met(residual) | (self.norm_b == 0), "converged"
        if missed := int((~converged).sum()):
            worst = float(relative[~converged].nan_to_num(torch.inf).max())
            if worst == torch.inf:
                reason = (
                    "the right-hand side, or a product with A or the preconditioner, has NaN or "
                    "infinite entries"
                )
            elif iterations >= limit:
                reason = (
                    f"iteration limit {limit} reached; raise it, precondition, or add a damping to "
                    "A"
                )
            else:
                reason = advice
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


def _operator(A: Any, square: bool = True) -> LinearOperator:
    """`A`; an operator of curvlinops or the like is wrapped."""
    if not isinstance(A, LinearOperator):
        if isinstance(A, Tensor) or not isinstance(getattr(A, "dtype", None), torch.dtype):
            raise TypeError(
                f"Expected a LinearOperator, got {type(A).__name__}; wrap it: Dense(A) or "
                "from_scipy(A)."
            )
        A = Foreign(A)
    if square and A.shape[0] != A.shape[1]:
        raise ValueError(
            f"Expected a square matrix, got {A.label}; use LSMR for a rectangular one."
        )
    return A


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
        ValueError: If `A` is not square or shapes do not fit.

    Cost: one product with `A` and the preconditioner per iteration, with all columns until the last
    one is done, and one product with `A` at the end. Memory: seven tensors [n, K].

    Example:
        >>> from curvlinops_plus.linalg import Dense, Structure
        >>> A = Dense(torch.tensor([[4.0, 1.0], [1.0, 3.0]]), Structure.PSD)
        >>> x, info = cg(A, torch.tensor([1.0, 2.0]))
        >>> x, info.iterations
        (tensor([0.0909, 0.6364]), 2)
    """
    tol, accepted = (1e-10, 1e-5) if tol is None else (tol, tol)
    A = _operator(A)
    system = System(A, b, x0, preconditioner)
    limit = min(10 * A.shape[1], 1000) if max_iter is None else max_iter
    goal, enough = 0.9 * system.goal(tol, atol), system.goal(accepted, atol)
    with torch.no_grad(), outside_autocast(A.device):
        X, R = system.X, system.residual()
        P = Z = system.M(R)
        rz, iterations = (R * Z).sum(0), 0
        active = (norm(R) > goal) & (rz > 0)
        while iterations < limit and bool(active.any()):  # the one question to the device
            Q = system.product(P)
            curvature = (P * Q).sum(0)
            active = active & (curvature > 0)
            alpha = torch.where(active, rz / curvature, 0.0)
            X, R = X + alpha * P, R - alpha * Q
            Z, before = system.M(R), rz
            rz = (R * Z).sum(0)
            P = torch.where(active, rz / before, 0.0) * P + Z
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
        return system.report(
            "CG",
            f"tol={accepted:g}, atol={atol:g}",
            iterations,
            limit,
            lambda r: r <= enough,
            advice,
        )


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
        ValueError: If `A` is not square, shapes do not fit, or the preconditioner is indefinite.

    Cost: one product with `A` and the preconditioner per iteration and column, and a tenth more for
    true residuals.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = minres(Diagonal(torch.tensor([1.0, -2.0])), torch.tensor([1.0, 1.0]))
        >>> x, bool(info.converged)
        (tensor([ 1.0000, -0.5000]), True)
    """
    A = _operator(A)
    system = System(A, b, x0, preconditioner)
    limit = min(10 * A.shape[1], 1000) if max_iter is None else max_iter
    goal, iterations = system.goal(tol, atol), 0
    with torch.no_grad(), outside_autocast(A.device):
        (op, size, columns), M = system.for_scipy(), None
        if preconditioner is not None:
            make: Any = (
                scipy.sparse.linalg.LinearOperator
            )  # whose arguments are those of the class that it returns
            M = make(
                A.shape,
                lambda r: (
                    system.M(size * torch.as_tensor(r[:, None]).to(system.X)).cpu().double().numpy()
                ),
            )
        for column, right, x in columns:
            x, made = _minres(
                op, right, x, float(goal[column]), limit, M, torch.finfo(system.dtype).eps
            )
            system.X[:, column], iterations = torch.as_tensor(x / size), max(iterations, made)
        advice = (
            "no more progress; if A is singular and b not in its range, x minimizes the residual; "
            "damp A"
        )
        return system.report(
            "MINRES", f"tol={tol:g}, atol={atol:g}", iterations, limit, lambda r: r <= goal, advice
        )


class _Met(Exception):
    """Ends SciPy's iteration: the tolerance is met."""


def _minres(
    op: Any, b: np.ndarray, x: np.ndarray, goal: float, limit: int, M: Any, eps: float
) -> tuple[np.ndarray, int]:
    """The `x` of the least true residual that was seen, and the number of iterations."""
    best, least, made = x, float(np.linalg.norm(b - op @ x)), 0

    def look(x: np.ndarray) -> None:
        nonlocal best, least, made
        made += 1
        if made % 10 == 0 and (residual := float(np.linalg.norm(b - op @ x))) < least:
            best, least = x.copy(), residual
        if least <= goal:
            raise _Met

    try:  # SciPy's tolerance is relative to ‖A‖ ‖x‖
        x, _ = scipy.sparse.linalg.minres(op, b, x0=x, rtol=eps, maxiter=limit, M=M, callback=look)
    except _Met:
        return best, made
    return best if least < float(np.linalg.norm(b - op @ x)) else x, made


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
        ValueError: If shapes do not fit.

    Cost: one product with `A` and one with `Aᵀ` per iteration and column.

    Example:
        >>> from curvlinops_plus.linalg import Dense
        >>> A = Dense(torch.tensor([[1.0], [1.0], [1.0]]))
        >>> x, info = lsmr(A, torch.tensor([1.0, 2.0, 6.0]))
        >>> round(float(x), 4), round(float(info.relative_residual), 2)
        (3.0, 0.58)
    """
    A = _operator(A, square=False)
    system = System(A, b, x0)
    limit = min(10 * min(A.shape), 1000) if max_iter is None else max_iter
    iterations, ended = 0, system.norm_b.isfinite()
    with torch.no_grad(), outside_autocast(A.device):
        op, size, columns = system.for_scipy()
        stop = {"atol": atol, "btol": btol, "conlim": conlim, "maxiter": limit, "show": show}
        for column, right, x in columns:
            x, end, made, *_ = scipy.sparse.linalg.lsmr(op, right, damp / size, x0=x, **stop)
            system.X[:, column], iterations = torch.as_tensor(x / size), max(iterations, made)
            ended[column] = end not in (3, 6, 7) and limit > 0 and bool(np.isfinite(x).all())
        wanted, advice = (
            f"atol={atol:g}, btol={btol:g}",
            "condition number above conlim; raise it or damp",
        )
        return system.report("LSMR", wanted, iterations, limit, lambda r: ended, advice)


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
        ValueError: If `A` is not square, shapes do not fit, or the terms overflow (see
            `check_nan`).

    Cost: one product with `A` and the preconditioner per term.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = neumann(Diagonal(torch.tensor([0.5, 1.5])), torch.tensor([1.0, 3.0]))
        >>> x.round(decimals=4)
        tensor([2., 2.])
    """
    A = _operator(A)
    system = System(A, b, None, preconditioner)
    goal = system.goal(1.0 if tol is None else tol, 0.0)
    wanted = "a residual below that of x = 0" if tol is None else f"tol={tol:g}"
    with torch.no_grad(), outside_autocast(A.device):
        V, terms = (
            system.B,
            0,
        )  # the terms are residuals: V is b - A x of the sum of the terms before it
        for terms in range(1, num_terms + 2):
            Z = system.M(V)
            system.X, V = system.X + scale * Z, V - scale * system.product(Z)
            size = norm(V)
            if check_nan and not bool((size.isfinite() | ~system.norm_b.isfinite()).all()):
                raise ValueError(
                    f"The Neumann series overflowed at term {terms} of {num_terms + 1}: it "
                    f"diverges. Decrease scale={scale:g} below 2 / (largest eigenvalue of A), "
                    "precondition, or use cg."
                )
            if tol is not None and bool((size <= goal).all()):
                break
        advice = (
            f"add terms, decrease scale={scale:g} below 2 / (largest eigenvalue of A), "
            "precondition, or use cg"
        )
        return system.report(
            "The Neumann series", wanted, terms, num_terms + 2, lambda r: r <= goal, advice
        )


class IterativeInverse(LinearOperator):
    """`A⁻¹`, whose products solve with `A`: `solver` is called with the matrix, right-hand sides
    and `options`.
    """

    solver: Callable[..., tuple[Any, SolveInfo]]
    square = symmetric = (
        True  # whether the method takes the matrix for symmetric, whatever it declares
    )

    def __init__(self, A: LinearOperator, **options: Any) -> None:
        self.A = A = _operator(A, self.square)
        super().__init__(A.out_space, A.dtype, A.device, out_space=A.in_space)
        #: Keywords of the solver.
        self.options = options
        #: How well the last product was solved; None before the first.
        self.info: SolveInfo | None = None

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        return max(self.A.structure, Structure.SYMMETRIC) if self.symmetric else self.A.structure

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._adjoint_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._adjoint_product, self._product)

    def _product(self, X: Tensor) -> Tensor:
        x, self.info = type(self).solver(self.A, X, **self.options)
        return x

    def _adjoint_product(self, X: Tensor) -> Tensor:
        adjoint = self.adjoint()
        x = adjoint._product(X)
        self.info = adjoint.info
        return x

    def adjoint(self) -> Self:
        return (
            self if self.structure >= Structure.SYMMETRIC else self._like(self.A.adjoint(), x0=None)
        )

    def _like(self, A: LinearOperator, **options: Any) -> Self:
        """The same kind of inverse of another matrix, with some options changed."""
        other = copy(self)
        other.A, other.info, other.options = A, None, self.options | options
        LinearOperator.__init__(other, A.out_space, A.dtype, A.device, out_space=A.in_space)
        return other

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Self:
        movable = {
            name: x for name, x in self.options.items() if isinstance(x, (Tensor, LinearOperator))
        }
        moved = {name: x.to(device=device, dtype=dtype) for name, x in movable.items()}
        return self._like(self.A.to(device, dtype), **moved)


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
        tol = tolerance if tolerance is not None else 1e-5 if max_iter is None else None
        if stop_updating_after is not None:
            tol = stop_updating_after if tol is None else max(tol, stop_updating_after)
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
        >>> MINRESInverseLinearOperator(Diagonal(torch.tensor([1.0, -4.0]))) @ torch.tensor([1.0, 2.0])
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
    square = symmetric = False

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
        super().__init__(
            A,
            num_terms=num_terms,
            scale=scale,
            preconditioner=preconditioner,
            tol=tol,
            check_nan=check_nan,
        )

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        P = self.options["preconditioner"]
        known = P is None or (isinstance(P, LinearOperator) and P.structure >= Structure.SYMMETRIC)
        return min(self.A.structure, Structure.SYMMETRIC) if known else Structure.GENERAL

    def adjoint(self) -> Self:
        if self.structure >= Structure.SYMMETRIC:
            return self
        P = self.options["preconditioner"]  # of which a function has no adjoint
        return self._like(self.A.adjoint(), preconditioner=None if P is None else P.adjoint())
