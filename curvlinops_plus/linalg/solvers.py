"""Iterative solvers: conjugate gradients of many columns together, SciPy's MINRES and LSMR, and the Neumann series.

Right-hand sides are divided by their largest entry first, so that tiny and huge ones neither under- nor overflow. What
`SolveInfo` reports is the true residual `b - A x`, from a product with `A` at the end; a missed tolerance warns with a
`CurvatureWarning`. The operators, such as `CGInverseLinearOperator`, solve in every product and are differentiable in
the vector, not in what `A` is made of.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import scipy
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.linalg.numerics import whole, wide
from curvlinops_plus.linalg.operator import LinearOperator, Wrapper
from curvlinops_plus.linalg.products import derived, outside_autocast
from curvlinops_plus.linalg.structure import Structure

Preconditioner = LinearOperator | Callable[[Tensor], Tensor] | None
Inverse = TypeVar("Inverse", bound="IterativeInverse")

CONVERGED = "converged"
LIMIT = "iteration limit {limit} reached; raise it, precondition, or add a damping to A"
STAGNATED = "no more progress in {dtype}; loosen the tolerance, compute in float64, or add a damping to A"
LEAST_SQUARES = "no more progress in {dtype}; if A is singular and b not in its range, x minimizes the residual; damp A"
NOT_FINITE = "the right-hand side or a product with A has NaN or infinite entries"
NOT_POSITIVE = "zero or negative curvature, A is not positive definite; add a damping, or use MINRES"
BAD_PRECONDITIONER = "the preconditioner is not symmetric positive definite, or gave NaN"
ILL_CONDITIONED = "condition number above conlim; raise it or damp"


@dataclass(frozen=True)
class SolveInfo:
    """The outcome of an iterative solve.

    Attributes:
        iterations: How many it took, the largest number over columns.
        relative_residual: `‖b - A x‖ / ‖b‖` of each column, [K], from a product with `A` at the end; 0 for `b = 0`.
        converged: Whether each column met its tolerance, [K].
        reason: Why the columns ended, in words.

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
    """`A X = B` with columns scaled to a largest entry of 1, and everything converted to flat tensors.

    Args:
        b: Right-hand sides, anything that `A.out_space` reads.
        x0: First guess, anything that `A.in_space` reads; a single one serves all columns. `None` is 0.
        preconditioner: Operator or function `[n, k] -> [n, k]`.
    """

    def __init__(
        self, A: LinearOperator, b: Any, x0: Any = None, preconditioner: Preconditioner = None, *, square: bool = True
    ) -> None:
        if not isinstance(A, LinearOperator):
            raise TypeError(
                f"Expected A to be a LinearOperator, got {type(A).__name__}; wrap it: Dense(A) or from_scipy(A)."
            )
        if square and A.shape[0] != A.shape[1]:
            raise ValueError(f"Expected a square matrix, got {A.label}; use LSMR for a rectangular one.")
        self.operator = A
        B, self.container = A.out_space.read(b, A.dtype, A.device)
        self.dtype = torch.promote_types(A.dtype, torch.float32)
        B = B.detach().to(self.dtype)
        size = B.abs().amax(0) if B.numel() else B.new_zeros(B.shape[1])  # [K]
        self.finite, self.zero = torch.isfinite(size), size == 0
        self.scale = torch.where(self.finite & ~self.zero, size, torch.ones_like(size))
        self.B = torch.where(self.finite, B / self.scale, torch.zeros_like(B))  # [m, K]
        self.norm_b = norm(self.B)  # [K]
        self.X = torch.zeros(A.shape[1], B.shape[1], dtype=self.dtype, device=A.device)
        if x0 is not None:
            guess, _ = A.in_space.read(x0, A.dtype, A.device)
            if guess.shape[1] not in (1, B.shape[1]):
                raise ValueError(
                    f"Expected a first guess with 1 or {B.shape[1]} columns, as the right-hand side, got "
                    f"{guess.shape[1]}."
                )
            self.X = torch.where(self.zero, self.X, guess.detach().to(self.dtype) / self.scale)
        self.M = self._preconditioner(preconditioner)
        #: Columns with something to solve.
        self.columns = (self.finite & ~self.zero).nonzero()[:, 0]
        #: Why each column ended.
        self.reasons = [CONVERGED if finite else NOT_FINITE for finite in self.finite.tolist()]

    def product(self, X: Tensor) -> Tensor:  # [n, k] -> [m, k]
        """`A X`."""
        return self.operator._matmat(X.to(self.operator.dtype)).to(self.dtype)

    def adjoint_product(self, Y: Tensor) -> Tensor:  # [m, k] -> [n, k]
        """`Aᵀ Y`."""
        return self.operator._rmatmat(Y.to(self.operator.dtype)).to(self.dtype)

    def size(self) -> float:
        """About the norm of `A`; SciPy's methods compare numbers with others that don't depend on it."""
        ratio = norm(self.adjoint_product(self.B)) / self.norm_b
        largest = float(torch.where(torch.isfinite(ratio), ratio, 0.0).max()) if ratio.numel() else 0.0
        return largest or 1.0

    def on_host(
        self, c: float, product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor] | None = None
    ) -> Any:
        """`c` times products with single columns for SciPy, in float64 arrays."""

        def of(multiply: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
            return lambda x: c * to_host(multiply(torch.as_tensor(x).reshape(-1, 1).to(self.X))[:, 0])

        make: Any = scipy.sparse.linalg.LinearOperator  # whose arguments are those of the class that it returns
        return make(
            self.operator.shape, matvec=of(product), rmatvec=None if adjoint is None else of(adjoint), dtype=np.float64
        )

    def residual(self) -> Tensor:  # -> [m, K]
        """`B - A X`."""
        return self.B - self.product(self.X) if bool(self.X.any()) else self.B

    def goal(self, tol: float, atol: float) -> Tensor:  # -> [K]
        """The residual of scaled columns that is enough."""
        return (tol * self.norm_b).clamp(min=atol / self.scale.to(self.norm_b))

    def _preconditioner(self, M: Preconditioner) -> Callable[[Tensor], Tensor]:
        if M is None:
            return lambda R: R
        n = self.operator.shape[0]
        if isinstance(M, LinearOperator):
            if not (M.in_space.matches(self.operator.out_space) and M.out_space.matches(self.operator.in_space)):
                raise ValueError(f"Expected a preconditioner of the shape of {self.operator.label}, got {M.label}.")
            if M.device != self.operator.device:
                raise TypeError(f"Expected a preconditioner on {self.operator.device}, where A is, got {M.label}.")
            own = M.dtype  # a cheaper precision is fine for a preconditioner
            return lambda R: M._matmat(R.to(own)).to(self.dtype)
        if not callable(M):
            raise TypeError(f"Expected a preconditioner that is an operator or a function, got {type(M).__name__}.")

        def call(R: Tensor) -> Tensor:
            Z = M(R)
            if not isinstance(Z, Tensor) or Z.shape != R.shape:
                given = list(Z.shape) if isinstance(Z, Tensor) else type(Z).__name__
                raise ValueError(
                    f"Expected the preconditioner to take and return [{n}, k], for any k: gave it {list(R.shape)}, "
                    f"got {given}."
                )
            return Z.to(self.dtype)

        return call

    def report(
        self, name: str, tolerance: str, iterations: int, limit: int, met: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Any, SolveInfo]:
        """The solution in the container type of the right-hand side, and a `SolveInfo`; warns of what was not met.

        Args:
            name: Of the method, for the warning.
            tolerance: In words.
            iterations: How many were made.
            limit: How many were allowed.
            met: From relative residuals, [K], whether they meet the tolerance. None: where the reason says so.
        """
        residual = torch.where(self.zero, 0.0, norm(self.residual()) / self.norm_b)
        residual = torch.where(self.finite, residual, torch.nan)
        said = torch.tensor([reason == CONVERGED for reason in self.reasons], dtype=torch.bool, device=residual.device)
        converged = said if met is None else met(residual) | self.zero
        for column in (said & ~converged).nonzero()[:, 0].tolist():
            self.reasons[column] = STAGNATED
        for column in (converged & ~said).nonzero()[:, 0].tolist():
            self.reasons[column] = CONVERGED
        reason = explain(self.reasons).format(limit=limit, dtype=self.dtype)
        info = SolveInfo(iterations, residual, converged, reason)
        warn_of_miss(name, tolerance, info)
        return self.operator.in_space.write((self.X * self.scale).to(self.operator.dtype), self.container), info


def to_host(x: Tensor) -> np.ndarray:
    """As a float64 array."""
    return x.detach().cpu().double().numpy()


def explain(reasons: list[str]) -> str:
    """Why columns ended, with their numbers if there are several reasons."""
    kinds = list(dict.fromkeys(sorted(reasons, key=lambda reason: reason != CONVERGED)))
    said = []
    for kind in kinds:
        which = [str(column) for column, reason in enumerate(reasons) if reason == kind]
        where = f" (columns {', '.join(which[:10])}{', …' if len(which) > 10 else ''})" if len(kinds) > 1 else ""
        said.append(kind + where)
    return "; ".join(said) or CONVERGED


def warn_of_miss(name: str, tolerance: str, info: SolveInfo) -> None:
    """Warn if a column did not converge, with the residual reached."""
    missed = (~info.converged).tolist()
    if any(missed):
        worst = max(info.relative_residual[~info.converged].tolist(), key=lambda r: (r != r, r))
        warnings.warn(
            f"{name} missed {tolerance} for {sum(missed)} of {len(missed)} columns; the largest relative residual "
            f"after {info.iterations} iterations is {worst:.1e}: {info.reason}.",
            CurvatureWarning,
            stacklevel=4,
        )


def count(name: str, number: Any, size: int) -> int:
    """An iteration limit; 10 per unknown, at most 1000, if none is given.

    Raises:
        ValueError: If it is not an integer of at least 0, naming the argument.
    """
    if number is None:
        return min(10 * size, 1000)
    found = whole(number)
    if found is None or found < 0:
        raise ValueError(f"Expected {name} to be an integer of at least 0, got {number!r}.")
    return found


def check_at_least_zero(**numbers: float) -> None:
    """Refuse negative tolerances, and NaN."""
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"Expected {name} to be at least 0, got {value}.")


def dot(a: Tensor, b: Tensor) -> Tensor:  # [n, k], [n, k] -> [k]
    """Dot product of each pair of columns, in float64 where the device has it.

    PyTorch sums by halves, so that the error is that of a few roundings in the vectors' own dtype.
    """
    return (a * b).sum(0).to(wide(a))


def norm(a: Tensor) -> Tensor:  # [n, k] -> [k]
    """2-norm of each column, as `dot`, also where squares of its entries under- or overflow."""
    if a.device.type == "cpu":  # where float64 sums of float32 numbers are slow
        squares, limits = (a * a).sum(0), torch.finfo(a.dtype)
        if bool(((squares > limits.tiny / limits.eps) & (squares <= limits.max)).all()):
            return squares.to(torch.float64).sqrt()
    return torch.linalg.vector_norm(a, dim=0, dtype=wide(a))


def tolerance_text(tol: float, atol: float) -> str:
    """The tolerance in words, for warnings."""
    return f"tol={tol:g}" + (f", atol={atol:g}" if atol else "")


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
    with a warning; its `x` is that of the step before. True residuals are computed at the end; columns whose recurrence
    drifted from them go on once more, and a warning says where rounding kept them above the tolerance.

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
    product with `A` at the end. Memory: seven tensors [n, K].

    Example:
        >>> from curvlinops_plus.linalg import Dense, Structure
        >>> A = Dense(torch.tensor([[4.0, 1.0], [1.0, 3.0]]), Structure.PSD)
        >>> x, info = cg(A, torch.tensor([1.0, 2.0]))
        >>> x, info.iterations
        (tensor([0.0909, 0.6364]), 2)
    """
    tol, enough = (1e-10, 1e-5) if tol is None else (tol, 0.0)
    check_at_least_zero(tol=tol, atol=atol)
    system = System(A, b, x0, preconditioner)
    limit = count("max_iter", max_iter, A.shape[1])
    goal, accepted = 0.9 * system.goal(tol, atol), system.goal(max(tol, enough), atol)
    with torch.no_grad(), outside_autocast(A.device):
        iterations = _conjugate_gradients(system, goal, limit)
        if bool((norm(system.residual()) > accepted)[system.columns].any()):  # the recurrence drifted
            iterations += _conjugate_gradients(system, goal, limit - iterations)
        return system.report(
            "CG", tolerance_text(max(tol, enough), atol), iterations, limit, lambda r: r * system.norm_b <= accepted
        )


def _conjugate_gradients(system: System, goal: Tensor, limit: int) -> int:
    """Iterate on the columns of `system.X` until their recurrences say that they are done."""
    columns, iteration = system.columns, 0
    X, R = system.X[:, columns], system.residual()[:, columns].clone()
    P = system.M(R).clone()
    rz, r = dot(R, P), norm(R)
    ended = torch.where((rz > 0) & torch.isfinite(rz), 0, 4).where(torch.isfinite(r), 2).where(r > goal[columns], 1)
    while len(columns):
        if iteration >= limit or bool(ended.any()):  # the one question to the device
            ended = ended.where((ended > 0) | (iteration < limit), 5)
            system.X[:, columns] = X
            for column, code in zip(columns.tolist(), ended.tolist(), strict=True):
                system.reasons[column] = _ENDS[code]
            stays = (ended == 0).nonzero()[:, 0]
            columns, X, R, P, rz, r = columns[stays], X[:, stays], R[:, stays], P[:, stays], rz[stays], r[stays]
            if not len(columns):
                break
        Q = system.product(P)
        curvature = dot(P, Q)
        fine = (curvature > 0) & torch.isfinite(curvature)
        alpha = torch.where(fine, rz / curvature, 0.0).to(X.dtype)
        X.addcmul_(alpha, P)
        R.addcmul_(-alpha, Q)
        Z = system.M(R)
        r, rz_old = norm(R), rz
        rz = dot(R, Z)
        P = P.mul_((rz / rz_old).to(P.dtype)).add_(Z)
        ended = torch.where((rz > 0) & torch.isfinite(rz), 0, 4).where(r > goal[columns], 1)
        ended = ended.where(fine, 3).where(torch.isfinite(curvature), 2)
        iteration += 1
    return iteration


_ENDS = ("", CONVERGED, NOT_FINITE, NOT_POSITIVE, BAD_PRECONDITIONER, LIMIT)


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

    This is `scipy.sparse.linalg.minres`, on the CPU and for one column after the other, with true residuals looked at
    every 10 iterations.

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

    Cost: one product with `A` and the preconditioner per iteration and column, and a tenth more for true residuals.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> x, info = minres(Diagonal(torch.tensor([1.0, -2.0])), torch.tensor([1.0, 1.0]))
        >>> x, bool(info.converged)
        (tensor([ 1.0000, -0.5000]), True)
    """
    check_at_least_zero(tol=tol, atol=atol)
    system = System(A, b, x0, preconditioner)
    limit = count("max_iter", max_iter, A.shape[1])
    goal = system.goal(tol, atol)
    with torch.no_grad(), outside_autocast(A.device):
        given = preconditioner is not None
        size, columns = system.size(), system.columns.tolist()
        made = [_minres(system, size, column, float(goal[column]), limit, given) for column in columns]
        return system.report(
            "MINRES", tolerance_text(tol, atol), max(made, default=0), limit, lambda r: r * system.norm_b <= goal
        )


class _Met(Exception):
    """Ends SciPy's iteration: the tolerance is met, or numbers are not finite."""


def _minres(system: System, size: float, column: int, goal: float, limit: int, preconditioned: bool) -> int:
    """Solve for one column of `system.X`; returns the number of iterations."""
    A = system.on_host(1 / size, system.product)
    b, guess = to_host(system.B[:, column]), size * to_host(system.X[:, column])
    made, least = 0, float("inf")

    def look(x: np.ndarray) -> None:
        nonlocal least
        residual = float(np.linalg.norm(b - A @ x))
        if (
            residual < (1.0 if made >= limit else 0.98) * least or residual <= goal
        ):  # steps along a null space gain less, and are long
            least = residual
            system.X[:, column] = torch.as_tensor(x / size).to(system.X)
            system.reasons[column] = CONVERGED if residual <= goal else LIMIT if made >= limit else LEAST_SQUARES
        if residual <= goal:
            raise _Met

    def count_and_look(x: np.ndarray) -> None:
        nonlocal made
        made += 1
        if not np.isfinite(x).all():
            system.reasons[column] = BAD_PRECONDITIONER if preconditioned else NOT_FINITE
            raise _Met
        if made % 10 == 0 or made & (made - 1) == 0:
            look(x)

    try:
        look(guess)
        eps = 0.1 * torch.finfo(system.dtype).eps  # SciPy's tolerance is relative to ‖A‖ ‖x‖
        M = system.on_host(size, system.M) if preconditioned else None
        x, _ = scipy.sparse.linalg.minres(A, b, x0=guess, rtol=eps, maxiter=limit, M=M, callback=count_and_look)
        look(x)
        if system.reasons[column] == LEAST_SQUARES and made >= limit:
            system.reasons[column] = LIMIT
    except _Met:
        pass
    except ValueError:  # of an indefinite preconditioner
        system.reasons[column] = BAD_PRECONDITIONER
    return made


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
    is done when `‖r‖ <= btol ‖b‖ + atol ‖A‖ ‖x‖` (compatible systems) or `‖Aᵀ r‖ <= atol ‖A‖ ‖r‖` holds by the
    recurrence of `scipy.sparse.linalg.lsmr`, which does the work, on the CPU and for one column after the other. A
    converged column may thus have a large `relative_residual`: that of the least-squares solution.

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

    Cost: one product with `A` and one with `Aᵀ` per iteration and column.

    Example:
        >>> from curvlinops_plus.linalg import Dense
        >>> A = Dense(torch.tensor([[1.0], [1.0], [1.0]]))
        >>> x, info = lsmr(A, torch.tensor([1.0, 2.0, 6.0]))
        >>> round(float(x), 4), round(float(info.relative_residual), 2)
        (3.0, 0.58)
    """
    check_at_least_zero(damp=damp, atol=atol, btol=btol, conlim=conlim)
    system = System(A, b, x0, square=False)
    limit = count("max_iter", max_iter, min(A.shape))
    eps = torch.finfo(system.dtype).eps
    iterations = 0
    with torch.no_grad(), outside_autocast(A.device):
        size = system.size()
        op = system.on_host(1 / size, system.product, system.adjoint_product)
        for column in system.columns.tolist():
            x, end, made, *_ = scipy.sparse.linalg.lsmr(
                op,
                to_host(system.B[:, column]),
                damp=damp / size,
                atol=max(atol, eps),
                btol=max(btol, eps),
                conlim=conlim,
                maxiter=limit,
                show=show,
                x0=size * to_host(system.X[:, column]),
            )
            iterations = max(iterations, made)
            if not np.isfinite(x).all():
                system.reasons[column] = NOT_FINITE
                continue
            system.X[:, column] = torch.as_tensor(x / size).to(system.X)
            system.reasons[column] = (
                LIMIT if end == 7 or limit == 0 else ILL_CONDITIONED if end in (3, 6) else CONVERGED
            )
        return system.report("LSMR", f"atol={atol:g}, btol={btol:g}", iterations, limit)


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
    system = System(A, b, None, preconditioner)
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
        system.X = X
        limit = f"{num_terms + 1} terms are not enough: add terms, change scale={scale:g}, precondition, or use cg"
        diverges = f"the series diverges: decrease scale={scale:g}, precondition, or use cg"
        enough = 1.0 if tol is None else tol
        for column in system.columns.tolist():
            ratio = float(size[column] / system.norm_b[column])
            system.reasons[column] = CONVERGED if ratio <= enough else limit if ratio < 1 else diverges
        wanted = "a residual below that of x = 0" if tol is None else f"tol={tol:g}"
        return system.report("The Neumann series", wanted, terms, num_terms)


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


class MINRESInverseLinearOperator(SymmetricInverse):
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

    solver = staticmethod(lsmr)

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


class NeumannInverseLinearOperator(IterativeInverse):
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

    solver = staticmethod(neumann)

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
        need_square(A)

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
