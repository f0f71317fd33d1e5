"""The iteration that all solvers share: many right-hand sides at once, each stopped by its own true residual.

A solver works on the columns of `B` [n, K] together, one product with `A` per iteration. Every column has its own
scalars and its own end. When its recurrence says that a column has converged, and every 50 iterations, the true
residual `b - A x` is computed, because the residual of a recurrence drifts from it in finite precision. If the
tolerance is met, the column leaves the batch: it does not change again and costs no more. If the recurrence was wrong,
the solver restarts from the true residual, unless that is no larger than rounding errors of `x` make it, and only while
it halves from one restart to the next. Otherwise the column has stagnated in this precision.

A smaller residual is not always a smaller error. A drifting recurrence leaves a residual of `A` times the rounding
errors of `x`, which hardly affects the error of `x`; a restart takes the rounding errors of a product for part of the
residual, and solves for them too. For ill-conditioned float32 systems errors were up to 7 times larger with restarts.
So nothing is restarted before the recurrence reports convergence, and a restarted solution that misses the tolerance
too must have a tenth of the residual to be preferred (for MINRES, half).

MINRES asks for the true residual before the first step whose rounding errors exceed its reduction of the residual:
where `b` is outside the range of `A`, all later steps are along the null space. From then on the solution with the
smallest true residual is kept.

Right-hand sides are divided by their largest entry first, so that tiny and huge ones neither under- nor overflow, and
scalars are kept in float64. Each iteration synchronizes host and device once: did any column end?

Solvers have no settings but their arguments, and warn with a `CurvatureWarning` that says what was reached if a
tolerance is missed. Solutions carry no graph; operators such as `CGInverseLinearOperator` are differentiable in the
vector.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg.numerics import whole, wide
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.linalg.space import Container

Preconditioner = LinearOperator | Callable[[Tensor], Tensor] | None
Product = Callable[[Tensor], Tensor]  # [n, k] -> [m, k]
_LOOK_EVERY = 50  # iterations between true residuals, which cost 2 % more


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


class Stop(IntEnum):
    """Why a column ended. `RUNNING` while it has not."""

    RUNNING = 0
    CONVERGED = 1
    LIMIT = 2
    STAGNATED = 3
    NOT_FINITE = 4
    NOT_POSITIVE = 5
    BAD_PRECONDITIONER = 6
    LEAST_SQUARES = 7
    ILL_CONDITIONED = 8


_WORDS = {
    Stop.CONVERGED: "converged",
    Stop.LIMIT: "iteration limit {limit} reached; raise it, precondition, or add a damping to A",
    Stop.STAGNATED: "no more progress in {dtype}; loosen the tolerance, compute in float64, or add a damping to A",
    Stop.NOT_FINITE: "the right-hand side or a product with A has NaN or infinite entries",
    Stop.NOT_POSITIVE: "zero or negative curvature, A is not positive definite; add a damping, or use MINRES",
    Stop.BAD_PRECONDITIONER: "the preconditioner is not symmetric positive definite, or gave NaN",
    Stop.LEAST_SQUARES: "A is singular in {dtype} and b not in its range: x minimizes the residual; add a damping",
    Stop.ILL_CONDITIONED: "condition number above conlim; raise it or damp",
}


class State(SimpleNamespace):
    """What a method knows of the running columns: tensors whose last axis is the column."""

    def select(self, columns: Tensor) -> State:
        """Only these columns."""
        return State(**{name: t.index_select(-1, columns) for name, t in vars(self).items()})

    def replace(self, columns: Tensor, other: State) -> None:
        """Put the columns of `other` in the place of these."""
        for name, t in vars(other).items():
            vars(self)[name] = getattr(self, name).index_copy(-1, columns, t)


class System:
    """`A X = B` with columns scaled to a largest entry of 1, and everything converted to flat tensors.

    Args:
        b: Right-hand sides, anything that `A.out_space` reads.
        x0: First guess, anything that `A.in_space` reads; a single one serves all columns. `None` is 0.
        preconditioner: Operator or function `[n, k] -> [n, k]`.
    """

    def __init__(self, A: LinearOperator, b: Any, x0: Any, preconditioner: Preconditioner, *, square: bool) -> None:
        if not isinstance(A, LinearOperator):
            raise TypeError(
                f"Expected A to be a LinearOperator, got {type(A).__name__}; wrap it: Dense(A) or from_scipy(A)."
            )
        if square and A.shape[0] != A.shape[1]:
            raise ValueError(f"Expected a square matrix, got {A.label}; use LSMR for a rectangular one.")
        self.operator = A
        self.container: Container
        B, self.container = A.out_space.read(b, A.dtype, A.device)
        self.dtype = torch.promote_types(A.dtype, torch.float32)
        self.eps = torch.finfo(self.dtype).eps
        B = B.detach().to(self.dtype)
        K = B.shape[1]
        size = B.abs().amax(0) if B.numel() else B.new_zeros(K)  # [K]
        self.finite = torch.isfinite(size)
        self.zero = size == 0
        self.scale = torch.where(self.finite & ~self.zero, size, torch.ones_like(size))
        self.B = torch.where(self.finite, B / self.scale, torch.zeros_like(B))  # [m, K]
        self.norm_b = norm(self.B)  # [K]
        self.X = self._guess(x0, K)  # [n, K]
        self.guessed = x0 is not None
        self.M = self._preconditioner(preconditioner)
        self.preconditioned = preconditioner is not None

    def _guess(self, x0: Any, K: int) -> Tensor:
        A = self.operator
        if x0 is None:
            return torch.zeros(A.shape[1], K, dtype=self.dtype, device=A.device)
        X, _ = A.in_space.read(x0, A.dtype, A.device)
        if X.shape[1] not in (1, K):
            raise ValueError(f"Expected a first guess with 1 or {K} columns, as the right-hand side, got {X.shape[1]}.")
        return X.detach().to(self.dtype) / self.scale

    def product(self, X: Tensor) -> Tensor:  # [n, k] -> [m, k]
        """`A X`."""
        return self.operator._matmat(X.to(self.operator.dtype)).to(self.dtype)

    def adjoint_product(self, Y: Tensor) -> Tensor:  # [m, k] -> [n, k]
        """`Aᵀ Y`."""
        return self.operator._rmatmat(Y.to(self.operator.dtype)).to(self.dtype)

    def residual(self, X: Tensor, columns: Tensor) -> Tensor:  # [n, k], [k] -> [m, k]
        """`B - A X` of some columns."""
        return self.B.index_select(1, columns) - self.product(X)

    def _preconditioner(self, M: Preconditioner) -> Product:
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

    def solution(self, X: Tensor) -> Any:
        """Scaled columns [n, K] in the container type of the right-hand side."""
        return self.operator.in_space.write((X * self.scale).to(self.operator.dtype), self.container)


class Method(ABC):
    """An iterative method, by its recurrences. The state has at least `X`, `claim` (converged, by the recurrence) and
    `stop` (a `Stop` other than `RUNNING` where it cannot go on).

    Vectors are [n, k] in the dtype of the solve, scalars [k] in float64. A state owns its vectors and changes them in
    place: large new tensors cost more than the arithmetic. Results of products may share memory with the operator, and
    are only read.
    """

    def __init__(self, system: System) -> None:
        self.system = system

    @abstractmethod
    def start(self, X: Tensor, R: Tensor, columns: Tensor) -> State:
        """The state before the first step of these columns, from guesses `X` and their residuals `R`."""

    @abstractmethod
    def step(self, s: State) -> None:
        """One iteration: one product with `A`. A column that cannot go on keeps its `X`."""

    @abstractmethod
    def distance(self, s: State, R: Tensor, columns: Tensor) -> Tensor:
        """How far true residuals `R` are from the tolerance: met at 1 or below, [k]."""

    @abstractmethod
    def at_floor(self, s: State, R: Tensor) -> Tensor:
        """Whether true residuals `R` are as small as roundings of the solution let them be, [k]."""

    @abstractmethod
    def prefers(self, distance: Tensor, best: Tensor) -> Tensor:
        """Whether a solution is more accurate than one of an earlier claim, [k], if both miss the tolerance."""

    @abstractmethod
    def resume(self, s: State, chosen: Tensor, R: Tensor, columns: Tensor) -> None:
        """Go on with chosen columns whose recurrence was wrong; their true residuals are `R`."""

    def asks(self, s: State) -> Tensor:
        """Whether the true residual must be computed now, [k]."""
        return s.claim | (s.stop != Stop.RUNNING)

    def improves(self, s: State, distance: Tensor, best: Tensor) -> Tensor:
        """Whether a solution replaces the last one before anything was claimed wrongly, [k]."""
        return torch.isfinite(distance)

    def saves(self, s: State) -> Tensor:
        """Whether better solutions are kept at every true residual, not only at claims and at the end, [k]."""
        return torch.zeros_like(s.claim)

    def proceed(self, s: State, chosen: Tensor) -> None:
        """Called after the true residuals of chosen columns."""
        return

    def log(self, iteration: int, s: State) -> None:
        """Called before every step."""
        return


def iterate(method: Method, max_iter: int, name: str, tolerance: str, enough: float = 0.0) -> tuple[Any, SolveInfo]:
    """Run a method on all columns and report; warns with a `CurvatureWarning` if a column missed its tolerance.

    Args:
        method: The method, with the tolerance at which it stops.
        name: Of the method, for the warning.
        tolerance: In words.
        enough: A relative residual with which a column counts as converged, wherever it stopped.
    """
    system = method.system
    with torch.no_grad(), outside_autocast(system.operator.device):
        X, residual, stops, iterations = _iterate(method, max_iter)
        met = (stops == Stop.CONVERGED) | (residual <= enough)
        info = SolveInfo(iterations, residual, met, explain(stops, max_iter, system.dtype))
        warn_of_miss(name, tolerance, info)
        return system.solution(X), info


def _iterate(method: Method, max_iter: int) -> tuple[Tensor, Tensor, Tensor, int]:
    system = method.system
    X = system.X
    # b = 0 has the solution 0, whatever the first guess.
    X = torch.where(system.zero, torch.zeros_like(X), X)
    residual = torch.where(system.zero, torch.zeros_like(system.norm_b), torch.nan)
    stops = torch.where(system.finite, Stop.CONVERGED.value, Stop.NOT_FINITE.value)
    columns = (system.finite & ~system.zero).nonzero()[:, 0]
    if not len(columns):
        return X, residual, stops, 0
    guess = X.index_select(1, columns)
    R = system.residual(guess, columns) if system.guessed else system.B.index_select(1, columns)
    s = method.start(guess, R, columns)
    residual[columns] = norm(R) / system.norm_b[columns]
    best = residual.index_copy(0, columns, method.distance(s, R, columns))
    last = best.clone()  # distance at the last claim; `best` is that of the solution in X
    claimed = torch.zeros_like(system.zero)
    iteration = 0
    while True:
        ended = method.asks(s)
        everything = iteration >= max_iter or (iteration > 0 and iteration % _LOOK_EVERY == 0)
        if everything or bool(ended.any()):  # the one question to the device
            chosen = torch.arange(len(columns), device=X.device) if everything else ended.nonzero()[:, 0]
            which, part = columns.index_select(0, chosen), s.select(chosen)
            R = system.residual(part.X, which)
            distance = method.distance(part, R, which)
            met, able = distance <= 1, part.stop == Stop.RUNNING
            wrong = able & part.claim & ~met
            gains = (distance < 0.5 * last[which]) & ~method.at_floor(part, R)
            goes_on = ~met & able & (~wrong | gains) & (iteration < max_iter)
            first = method.improves(part, distance, best[which])
            keep = torch.where(claimed[which], method.prefers(distance, best[which]), first)
            keep = met | (keep & (wrong | ~goes_on | method.saves(part)))
            X[:, which] = torch.where(keep, part.X, X[:, which])
            residual[which] = torch.where(keep, norm(R) / system.norm_b[which], residual[which])
            why = torch.where(wrong, Stop.STAGNATED.value, Stop.LIMIT.value)
            stops[which] = torch.where(met, Stop.CONVERGED.value, torch.where(able, why, part.stop))
            best[which] = torch.where(keep, distance, best[which])
            last[which] = torch.where(wrong, distance, last[which])
            claimed[which] |= wrong
            if bool((again := goes_on & wrong).any()):
                retry = again.nonzero()[:, 0]
                method.resume(s, chosen[retry], R.index_select(1, retry), which[retry])
            method.proceed(s, chosen)
            stays = torch.ones(len(columns), dtype=torch.bool, device=X.device)
            stays[chosen] = goes_on
            stays = stays.nonzero()[:, 0]
            if not len(stays):
                return X, residual, stops, iteration
            if len(stays) < len(columns):
                s, columns = s.select(stays), columns[stays]
        method.log(iteration, s)
        method.step(s)
        iteration += 1


def explain(stops: Tensor, max_iter: int, dtype: torch.dtype) -> str:
    """Why columns ended, with their numbers if there are several kinds of ends."""
    codes = stops.tolist()
    kinds = [stop for stop in Stop if stop in codes]
    said = []
    for stop in kinds:
        which = [str(column) for column, code in enumerate(codes) if code == stop]
        where = f" (columns {', '.join(which[:10])}{', …' if len(which) > 10 else ''})" if len(kinds) > 1 else ""
        said.append(_WORDS[stop].format(limit=max_iter, dtype=dtype) + where)
    return "; ".join(said) if said else _WORDS[Stop.CONVERGED]


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


def times(factor: Tensor, a: Tensor) -> Tensor:  # [k], [n, k] -> [n, k]
    """Columns, each times its factor, in their own dtype."""
    return factor.to(a.dtype) * a


def scale(a: Tensor, factor: Tensor) -> Tensor:  # [n, k], [k]
    """Columns times their factors, in place."""
    return a.mul_(factor.to(a.dtype))


def add(a: Tensor, factor: Tensor, b: Tensor) -> Tensor:  # [n, k], [k], [n, k]
    """`a + factor * b` for each column, in place of `a`."""
    return a.addcmul_(factor.to(a.dtype), b)
