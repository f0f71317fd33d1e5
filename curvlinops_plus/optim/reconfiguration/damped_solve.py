"""Damped solves with `S = Ōᵀ Ō`, in the space of the parameters or of the samples.

| mode | what is formed | solvers (the first is the default) |
| --- | --- | --- |
| "lazy" | nothing | "cg", "lsmr" |
| "dense" | derivatives `Ō`, and `S` [P, P] for a decomposition | "cholesky", "eigh", "cg", "lsmr" |
| "kernel" | `Ō Ōᵀ` [n·c, n·c] | "cholesky", "eigh", "cg" |
| "auto" | by sizes: the kernel if P > n·c, else dense; lazy if both are large | the default of that mode |
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import Dense, Diagonal, LinearOperator, Product, Structure, eigh, psd_clip
from curvlinops_plus.linalg.numerics import damped_cholesky, powers, standard_normal
from curvlinops_plus.linalg.solvers import cg, lsmr
from curvlinops_plus.optim.reconfiguration.ensemble import Ensemble
from curvlinops_plus.optim.reconfiguration.fisher import CenteredFisherLinearOperator
from curvlinops_plus.optim.reconfiguration.scores import MatrixFreeScores, StoredScores

Mode = Literal["lazy", "dense", "kernel", "auto"]
Solver = Literal["cholesky", "eigh", "cg", "lsmr"]

_SOLVERS: dict[str, tuple[Solver, ...]] = {
    "lazy": ("cg", "lsmr"),
    "dense": ("cholesky", "eigh", "cg", "lsmr"),
    "kernel": ("cholesky", "eigh", "cg"),
}
# "auto" decomposes matrices up to this size and stores derivatives up to this many bytes.
_LARGEST = 8192
_STORED_BYTES = 2**32


@dataclass(frozen=True)
class SolveReport:
    """Accuracy and cost of a solve.

    Attributes:
        mode: "lazy", "dense" or "kernel".
        solver: "cholesky", "eigh", "cg", "lsmr", or "pinv": the smoothed pseudo-inverse, where Cholesky failed.
        size: Number of unknowns: P or n·c.
        residual: Norm of the final residual of the damped system over that of its right-hand side.
        rank: Number of eigenvalues of the matrix without damping that are not zero up to rounding; None of solvers that
            compute no eigenvalues.
        condition: Condition number of the damped matrix; of "cholesky" estimated by power iterations, a lower bound
            that is rarely off by more than 2; None of "cg" and "lsmr".
        iterations: Of "cg" and "lsmr".

    Example:
        >>> SolveReport("dense", "eigh", size=3, residual=1e-16, rank=2, condition=1e3)
        SolveReport(mode='dense', solver='eigh', size=3, residual=1e-16, rank=2, condition=1000.0, iterations=None)
    """

    mode: str
    solver: str
    size: int
    residual: float
    rank: int | None = None
    condition: float | None = None
    iterations: int | None = None


class DampedSystem:
    """Linear systems with `S + λI` of one ensemble, in one mode.

    A diagonal shift `ε` makes it `S + ε diag(S) + λI`. That is `D (Ŝ + ε I) D` with `D² = diag(S) + λ/ε` and `Ŝ` made
    of `Ō D⁻¹`: the same problem in unknowns `D δ`, with damping `ε`.

    Args:
        damping: `λ`.
        mode: "lazy", "dense", "kernel" or "auto".
        solver: "cholesky", "eigh", "cg" or "lsmr"; None: the default of the mode.
        diagonal_shift: `ε`.
        tol: Relative residual at which "cg" and "lsmr" stop; None: 1e-5 in float32, 1e-12 in float64 or what rounding
            allows.
        max_iter: Their largest number of iterations; None: 10·P.
        proj_reg: Added to the kernel, times the projection onto the directions that centring removes.

    Raises:
        ValueError: If names are unknown or incompatible, or numbers out of range.
        SingularMatrixError: Without damping, if there are too few samples for the parameters.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        damping: float,
        mode: Mode = "auto",
        solver: Solver | None = None,
        diagonal_shift: float = 0.0,
        tol: float | None = None,
        max_iter: int | None = None,
        proj_reg: float = 0.0,
    ) -> None:
        check_options(mode, solver, damping=damping, diagonal_shift=diagonal_shift, proj_reg=proj_reg)
        self.ensemble, self.damping, self.diagonal_shift = ensemble, damping, diagonal_shift
        self.shift = diagonal_shift if diagonal_shift > 0 else damping
        self.mode, self.solver = self._choose(mode, solver)
        self._check_rank()
        self.tol, self.max_iter = tol, 10 * ensemble.psi.space.dim if max_iter is None else max_iter
        self.D: Tensor | None = None
        if diagonal_shift:
            squares = MatrixFreeScores(ensemble).variances() + damping / diagonal_shift
            self.D = torch.where(squares > 0, squares, torch.ones_like(squares)).sqrt()  # 0: a parameter without effect
        self.scores, kernel = self._scores_and_kernel()
        if kernel is not None and proj_reg:
            null = MatrixFreeScores(ensemble).null_directions()
            kernel = kernel + proj_reg * null @ null.T
        self.kernel = kernel

    # Solutions --------------------------------------------------------------------------------------------------------

    def direction(self, target: Tensor) -> tuple[Tensor, SolveReport]:  # [n·c] -> [P]
        """The `d` of least `|Ō d - target|² + |d|²_M`, with `M = λI + ε diag(S)`: `(S + M)⁻¹ Ōᵀ target`."""
        if self.kernel is not None:
            x, report = self._solve_dense(self.kernel, target)
            return self.from_unknowns(self.scores._rmatmat(x[:, None])[:, 0]), report
        if self.solver == "lsmr":
            d, report = self._lsmr(target)
        else:
            d, report = self._solve(self.scores._rmatmat(target[:, None])[:, 0])
        return self.from_unknowns(d), report

    def inverse(self, g: Tensor) -> tuple[Tensor, SolveReport]:  # [P] -> [P]
        """`(S + M)⁻¹ g`."""
        g = self.from_unknowns(g)
        if self.kernel is None:
            x, report = self._solve(g)
        else:  # Woodbury: (ŌᵀŌ + λ)⁻¹ = (I - Ōᵀ (Ō Ōᵀ + λ)⁻¹ Ō) / λ
            y, report = self._solve_dense(self.kernel, self.product(g))
            x = (g - self.scores._rmatmat(y[:, None])[:, 0]) / self.shift
        return self.from_unknowns(x), report

    def product(self, unknowns: Tensor) -> Tensor:  # [P] -> [n·c]
        """`Ō δ` of unknowns `D δ`."""
        return self.scores._matmat(unknowns[:, None])[:, 0]

    def to_unknowns(self, v: Tensor) -> Tensor:
        """`D v`."""
        return v if self.D is None else v * self.D

    def from_unknowns(self, v: Tensor) -> Tensor:
        """`D⁻¹ v`."""
        return v if self.D is None else v / self.D

    # Setup -----------------------------------------------------------------------------------------------------------

    def _choose(self, mode: Mode, solver: Solver | None) -> tuple[str, Solver]:
        if mode != "auto":
            return mode, solver or _SOLVERS[mode][0]
        e = self.ensemble
        rows, P, fits = e.n * e.components, e.psi.space.dim, e.stored_bytes <= _STORED_BYTES
        recorded = e.psi.module is not None and rows < P and not self.diagonal_shift
        if min(rows, P) > _LARGEST or not (fits or recorded):
            chosen = "lazy"
        else:
            chosen = "kernel" if rows < P and self.shift > 0 else "dense"
        if solver is not None and solver not in _SOLVERS[chosen]:
            chosen = "lazy" if solver in _SOLVERS["lazy"] and not fits else "dense"
        return chosen, solver or _SOLVERS[chosen][0]

    def _check_rank(self) -> None:
        if self.shift > 0:
            return
        if self.mode == "kernel":
            raise ValueError(
                'mode="kernel" needs a positive damping: the kernel of centred derivatives is always singular, '
                'and Woodbury\'s identity divides by λ. Take damping=1e-3 or the like, or mode="dense".'
            )
        e = self.ensemble
        rank, P = (int((e.weights > 0).sum()) - 1) * e.components, e.psi.space.dim
        if rank < P:
            raise SingularMatrixError(
                f"S of {P} real parameters is singular: the centred derivatives of {e.n} samples have rank {rank} at "
                "most. Add a damping (1e-3 is common), or take more samples."
            )

    def _scores_and_kernel(self) -> tuple[LinearOperator, Tensor | None]:
        """`Ō D⁻¹`, and in mode "kernel" the kernel."""
        free = MatrixFreeScores(self.ensemble)
        if self.mode == "lazy":
            return (free if self.D is None else Product(free, Diagonal(1 / self.D))), None
        if self.mode == "kernel" and self.D is None and (recorded := free.recorded_kernel()) is not None:
            return free, recorded
        stored = StoredScores(self.ensemble, self.D)
        return stored, stored.kernel() if self.mode == "kernel" else None

    # Solvers ---------------------------------------------------------------------------------------------------------

    def _solve(self, b: Tensor) -> tuple[Tensor, SolveReport]:
        """`(Ŝ + shift)⁻¹ b`."""
        S = CenteredFisherLinearOperator.of(self.scores)
        if self.solver in ("cholesky", "eigh"):
            return self._solve_dense(S.to_dense(), b)
        return self._cg(S, b)

    def _cg(self, A: LinearOperator, b: Tensor) -> tuple[Tensor, SolveReport]:
        with self._solver_warnings():
            x, info = cg(A.shift(self.shift), b, x0=b, tol=self._tolerance(), max_iter=self.max_iter)
        residual = float(info.relative_residual[0])
        self._warn_of_residual(residual, info.reason)
        return x, SolveReport(self.mode, "cg", len(b), residual, iterations=info.iterations)

    def _lsmr(self, target: Tensor) -> tuple[Tensor, SolveReport]:
        tolerance = self._tolerance()
        with self._solver_warnings():
            x, info = lsmr(
                self.scores,
                target,
                damp=self.shift**0.5,
                atol=tolerance,
                btol=tolerance,
                conlim=0.0,
                max_iter=self.max_iter,
            )
        b = self.scores._rmatmat(target[:, None])[:, 0]
        left = b - self.scores._rmatmat(self.product(x)[:, None])[:, 0] - self.shift * x
        residual = relative(left, b)
        self._warn_of_residual(residual, info.reason)
        return x, SolveReport(self.mode, "lsmr", len(x), residual, iterations=info.iterations)

    def _solve_dense(self, M: Tensor, b: Tensor) -> tuple[Tensor, SolveReport]:
        """`(M + shift)⁻¹ b` with a dense matrix."""
        what = "the kernel" if self.kernel is not None else "S"
        check_finite(M, what)
        if self.solver == "cg":
            return self._cg(Dense(M, Structure.PSD), b)
        solver, rank, condition = self.solver, None, None
        if solver == "cholesky" and self.shift > 0:
            try:
                L = damped_cholesky(M, self.shift, retry_double_precision=False, what=what)
                x = torch.cholesky_solve(b[:, None], L)[:, 0]
                condition = _condition(M, L, self.shift)
            except SingularMatrixError:
                solver, (x, rank, condition) = "pinv", _smoothed_pseudo_inverse(M, b, self.shift)
                warnings.warn(
                    f"{what} {list(M.shape)} with damping {self.shift:.1e} is not positive definite in {M.dtype}; "
                    f"solved with a smoothed pseudo-inverse of rank {rank}. Compute in float64, or take a larger "
                    "damping.",
                    CurvatureWarning,
                    stacklevel=2,
                )
        else:  # without damping only the eigenvalues tell whether the matrix is singular
            solver = "eigh"
            values, Q = eigh(M, what)
            values = psd_clip(values)
            x = Q @ (powers(values + self.shift, -1.0, what) * (Q.T @ b))
            rank = int((values > 0).sum())
            condition = float((values[-1] + self.shift) / (values[0] + self.shift))
        return x, SolveReport(self.mode, solver, len(b), relative(b - M @ x - self.shift * x, b), rank, condition)

    def _tolerance(self) -> float:
        if self.tol is not None:
            return self.tol
        return 1e-12 if self.ensemble.psi.dtype == torch.float64 else 1e-5

    @contextmanager
    def _solver_warnings(self) -> Iterator[None]:
        """Context without the solver's own warnings if no tolerance was given: `_warn_of_residual` gives one then."""
        with warnings.catch_warnings():
            if self.tol is None:
                warnings.simplefilter("ignore", CurvatureWarning)
            yield

    def _warn_of_residual(self, residual: float, reason: str) -> None:
        limit = torch.finfo(self.ensemble.psi.dtype).eps ** 0.5
        if self.tol is None and not residual <= limit:
            warnings.warn(
                f"{self.solver} in mode {self.mode!r} ended at a relative residual of {residual:.1e}: {reason}.",
                CurvatureWarning,
                stacklevel=2,
            )


def check_options(mode: Mode, solver: Solver | None, **numbers: float) -> None:
    """Check names and numbers before anything is computed."""
    if mode not in get_args(Mode):
        raise ValueError(f"Expected mode to be one of {list(get_args(Mode))}, got {mode!r}.")
    if solver is not None and solver not in get_args(Solver):
        raise ValueError(f"Expected solver to be None or one of {list(get_args(Solver))}, got {solver!r}.")
    if mode != "auto" and solver is not None and solver not in _SOLVERS[mode]:
        fitting = [m for m, solvers in _SOLVERS.items() if solver in solvers]
        raise ValueError(
            f"solver={solver!r} does not go with mode={mode!r}: take one of {list(_SOLVERS[mode])}, or mode {fitting}."
        )
    for name, value in numbers.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"Expected {name} to be a finite number of at least 0, got {value!r}.")


def check_finite(M: Tensor, what: str) -> None:
    """Refuse a matrix with NaN or infinite entries; those of derivatives are checked earlier."""
    if not bool(torch.isfinite(M).all()):
        raise NumericsError(
            f"{what} {list(M.shape)} has NaN or infinite entries, from derivatives too large for {M.dtype}. Compute in "
            "float64, or look for samples near nodes of ψ."
        )


def relative(residual: Tensor, b: Tensor) -> float:
    """`|residual| / |b|`, 0 for 0."""
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(residual)) / size if size else 0.0


def _smoothed_pseudo_inverse(M: Tensor, b: Tensor, shift: float) -> tuple[Tensor, int, float]:
    """Smoothed pseudo-inverse of `M + shift` times b: `1/σ` times `1 / (1 + (r σ_max/σ)⁶)`, and 0 below `r σ_max`.

    `r` is the size times the machine precision, the relative accuracy of eigenvalues; as in netket.
    """
    values, Q = eigh(M)
    values = values + shift
    cut = values.shape[0] * torch.finfo(M.dtype).eps * values.abs().amax()
    kept = values > cut
    safe = torch.where(kept, values, torch.ones_like(values))
    inverse = torch.where(kept, 1 / (safe * (1 + (cut / safe) ** 6)), torch.zeros_like(values))
    smallest = torch.where(kept, values, values.amax()).amin()
    return Q @ (inverse * (Q.T @ b)), int(kept.sum()), float(values.amax() / smallest)


def _condition(M: Tensor, L: Tensor, shift: float) -> float:
    """Largest eigenvalue of `M + shift` over the smallest, each from five power iterations."""
    start = standard_normal(1, len(M), torch.Generator().manual_seed(0), M)
    largest = smallest = torch.ones((), dtype=M.dtype, device=M.device)
    v = w = start / torch.linalg.vector_norm(start)
    for _ in range(5):
        v, w = M @ v + shift * v, torch.cholesky_solve(w, L)
        largest, smallest = torch.linalg.vector_norm(v), 1 / torch.linalg.vector_norm(w)
        v, w = v / largest, w * smallest
    return float(largest / smallest)
