"""`S`, the covariance of log-derivatives, and damped solves with it, in the space of the parameters
or of the samples.

- "lazy" forms nothing; solver "cg".
- "dense" forms the derivatives `Ō`, and `S` [P, P]; solvers "cholesky" (default), "cg".
- "kernel" forms the derivatives `Ō`, and `Ō Ōᵀ` [n·c, n·c]; solvers "cholesky" (default), "cg".
- "auto" goes by sizes: the kernel if P > n·c, else dense; lazy if both are large.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from curvlinops_plus.errors import CurvatureWarning, SingularMatrixError, level_of_user
from curvlinops_plus.linalg import Dense, LinearOperator, Structure, eigh
from curvlinops_plus.linalg.numerics import check_finite, damped_cholesky
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.linalg.solvers import cg
from curvlinops_plus.optim.reconfiguration.amplitude import (
    Amplitude,
    LogAmplitude,
    LogPsi,
    PsiParams,
)
from curvlinops_plus.optim.reconfiguration.scores import Ensemble, Scores
from curvlinops_plus.options import flag, integer, number, one_of

Mode = Literal["lazy", "dense", "kernel", "auto"]
Solver = Literal["cholesky", "cg"]

# "auto" decomposes matrices up to this size and stores derivatives up to this many bytes.
_LARGEST = 8192
_STORED_BYTES = 2**32


class CenteredFisherLinearOperator(LinearOperator):
    """`S = Cov(∇ log|ψ|)`, the covariance of log-derivatives over samples; also called quantum
    geometric tensor.

    With `p = |ψ|²/Z` the score is `2 (O - ⟨O⟩)`, so that `S` is ¼ of the Fisher matrix of `p`; for
    `log ψ = log p` (any log-density with samples from it) `S` is the Fisher matrix itself. Adding a
    function of the parameters alone to `log ψ` changes nothing: normalisation does not matter.

    It multiplies tensors like the parameters, also one list or dict of complex tensors; as a flat
    vector a complex parameter is `torch.view_as_real` of it, real and imaginary parts in turn. For
    a holomorphic amplitude that is the complex matrix `S = Cov(O*, O)` on complex vectors; for a
    complex one its real part, `Re⟨O* O⟩ - …`.

    The matrix is that of the parameters' values when it was made.

    Args:
        log_psi: A module called with the samples, or a function `(params, samples)`; returns `log
            ψ` of each, `[n]`.
        params: Parameters, a list or a dict; of a module its own, None for all that require a
            gradient.
        samples: `[n, ...]`, or a tuple, list or dict of such tensors; drawn from |ψ|², or with
            `weights`.
        weights: Weights `[n]` of the samples, for instance |ψ|²/q for samples from q, or |ψ|² of an
            enumeration; divided by their sum.
        chunk_size: How many samples are differentiated at once; None: all. Does not change the
            result.
        amplitude: "real", "complex" or "holomorphic", see `LogAmplitude`.
        stored: Keep all derivatives, n·P numbers (twice that if complex): each product is then two
            matrix products.

    Raises:
        ValueError: If arguments do not fit each other, or fewer than two samples count.
        NumericsError: If `log ψ` or its derivatives are NaN or infinite; names the samples.
        UnsupportedError: If `log ψ` is random, or mixes samples.

    Cost: one forward pass to make it. A product with one vector takes three backward passes, and
        with chunks two
        forward passes more; without chunks the graph of one forward pass stays in memory. Stored,
        one backward pass per sample once, and two matrix products each time.

    Source: Amari 1998, "Natural gradient works efficiently in learning"; Sorella 1998, arXiv
    cond-mat/9803107.

    Example:
        >>> psi = lambda params, x: (
        ...     -((x - params[0]) ** 2) / 4
        ... )  # log ψ of a normal distribution with variance 1
        >>> x = torch.tensor([-1.0, 1.0, 3.0])
        >>> S = CenteredFisherLinearOperator(psi, [torch.zeros(())], x)
        >>> S @ [torch.tensor(1.0)]  # the variance of x/2
        [tensor(0.6667)]
    """

    def __init__(
        self,
        log_psi: LogPsi,
        params: PsiParams,
        samples: Any,
        weights: Any = None,
        chunk_size: int | None = None,
        amplitude: Amplitude = "real",
        *,
        stored: bool = False,
    ) -> None:
        flag("stored", stored)
        psi = LogAmplitude(log_psi, params, amplitude)
        with plain_mode(psi.device.type):
            self._set(Scores(Ensemble(psi, samples, weights, chunk_size), stored))

    @classmethod
    def of(cls, scores: Scores) -> CenteredFisherLinearOperator:
        """`Ōᵀ Ō` of an operator `Ō`."""
        self = cls.__new__(cls)
        self._set(scores)
        return self

    def _set(self, scores: Scores) -> None:
        super().__init__(scores.in_space, scores.dtype, scores.device, Structure.PSD)
        self.scores = scores

    def _product(self, X: Tensor) -> Tensor:
        return self.scores._rmatmat(self.scores._matmat(X))

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._product)

    def __matmul__(self, X: Any) -> Any:
        """`S @ X`; also a list or dict of complex tensors, without columns.

        If all parameters are real, `S` is, and multiplies real and imaginary parts by themselves.
        """
        psi = self.scores.ensemble.psi
        tensors = [t for t in tree_leaves(X) if isinstance(t, Tensor)]
        if not any(t.is_complex() for t in tensors):
            return super().__matmul__(X)
        if not any(p.is_complex() for p in psi.params.values()):
            real = super().__matmul__(tree_map(torch.real, X))
            imaginary = super().__matmul__(tree_map(_imaginary, X))
            return tree_map(torch.complex, real, imaginary)
        if isinstance(X, Tensor):
            return super().__matmul__(X)
        return psi.write(super().__matmul__(psi.read(X)), like=X)

    def _to_dense(self) -> Tensor:
        with plain_mode(self.device.type):
            return self.scores.covariance()

    def diagonal(self) -> Tensor:
        with plain_mode(self.device.type):
            return self.scores.variances()

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()


def _imaginary(t: Tensor) -> Tensor:
    return t.imag if t.is_complex() else torch.zeros_like(t)


@dataclass(frozen=True)
class SolveReport:
    """Accuracy and cost of a solve.

    Attributes:
        mode: "lazy", "dense" or "kernel".
        solver: "cholesky", "cg", or "pinv": the smoothed pseudo-inverse, where Cholesky failed or
            there is no damping.
        size: Number of unknowns: P or n·c.
        residual: Norm of the final residual of the damped system over that of its right-hand side.
        rank: Number of eigenvalues of the damped matrix that are not zero up to rounding; of
            "pinv".
        condition: Condition number of the damped matrix; of "pinv".
        iterations: Of "cg".

    Example:
        >>> SolveReport("dense", "pinv", size=3, residual=1e-16, rank=2, condition=1e3)
        SolveReport(mode='dense', solver='pinv', size=3, residual=1e-16, rank=2, condition=1000.0,
            iterations=None)
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

    A diagonal shift `ε` makes it `S + ε diag(S) + λI`. That is `D (Ŝ + ε I) D` with `D² = diag(S) +
    λ/ε` and `Ŝ` made of `Ō D⁻¹`: the same problem in unknowns `D δ`, with damping `ε`.

    Args:
        damping: `λ`.
        mode: "lazy", "dense", "kernel" or "auto".
        solver: "cholesky" or "cg"; None: the default of the mode.
        diagonal_shift: `ε`.
        tol: Relative residual at which "cg" stops; None: 1e-5 in float32, 1e-12 in float64 or what
            rounding allows.
        max_iter: Its largest number of iterations; None: 10·P.

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
    ) -> None:
        P = ensemble.psi.space.dim
        self.shift = diagonal_shift or damping
        self.tol = tol
        self.max_iter = 10 * P if max_iter is None else max_iter
        self.mode: str = self._mode_by_sizes(ensemble, solver) if mode == "auto" else mode
        self.solver = solver or ("cg" if self.mode == "lazy" else "cholesky")
        if self.mode == "kernel" and not self.shift > 0:
            raise ValueError(
                'mode="kernel" needs a positive damping, 1e-3 or the like: this kernel is singular.'
            )
        # Centring takes one sample's rank away.
        rank = (int((ensemble.weights > 0).sum()) - 1) * ensemble.components
        if not self.shift > 0 and rank < P:
            raise SingularMatrixError(
                f"S of {P} real parameters is singular: the centred derivatives of {ensemble.n} "
                f"samples have rank {rank} at most. Add a damping (1e-3 is common), or take more "
                "samples."
            )
        # The kernel of a module's layers needs no derivatives.
        recorded = self.mode == "kernel" and ensemble.psi.module is not None and not diagonal_shift
        self.scores = Scores(ensemble, stored=self.mode != "lazy" and not recorded)
        self.D = torch.ones((), dtype=self.scores.dtype, device=self.scores.device)
        if diagonal_shift:
            squares = self.scores.variances() + damping / diagonal_shift
            # A parameter without effect has variance 0 and keeps its unit.
            self.D = torch.where(squares > 0, squares, torch.ones_like(squares)).sqrt()
            self.scores.divide(self.D)
        self.matrix: LinearOperator
        if self.mode == "dense":
            self.matrix = Dense(self.scores.covariance(), Structure.PSD)
        elif self.mode == "kernel":
            self.matrix = Dense(self.scores.kernel(), Structure.PSD)
        else:
            self.matrix = CenteredFisherLinearOperator.of(self.scores)
        self.title = "the kernel" if self.mode == "kernel" else "S"

    def _mode_by_sizes(self, ensemble: Ensemble, solver: Solver | None) -> Mode:
        """The mode that "auto" stands for."""
        P = ensemble.psi.space.dim
        size = ensemble.n * ensemble.components
        stored_bytes = ensemble.n * ensemble.rows * P * ensemble.psi.dtype.itemsize
        large = min(size, P) > _LARGEST or stored_bytes > _STORED_BYTES
        if large:
            return "dense" if solver == "cholesky" else "lazy"
        return "kernel" if size < P and self.shift > 0 else "dense"

    def direction(
        self, target: Tensor, momentum: float = 0.0, previous: Tensor | None = None
    ) -> tuple[Tensor, SolveReport]:
        """The `δ` [P] of least `|Ō δ - target|² + |δ - μ φ|²_M`, with `M = λI + ε diag(S)`, for a
        target [n·c] and the previous direction `φ` [P].

        Without `φ` it is `(S + M)⁻¹ Ōᵀ target`. SPRING: with `δ = d + μ φ` the problem is one
        without it, for `d` and `target - μ Ō φ`.
        """
        start: Tensor | float = 0.0
        if previous is not None and momentum:
            start = momentum * previous
            target = target - self.scores @ (self.D * start)
        if self.mode == "kernel":
            # Ōᵀ (Ō Ōᵀ + λ)⁻¹ target
            y, report = self._solve(target)
            unknowns = self.scores.T @ y
        else:
            # (Ōᵀ Ō + λ)⁻¹ Ōᵀ target
            unknowns, report = self._solve(self.scores.T @ target)
        return unknowns / self.D + start, report

    def inverse(self, g: Tensor) -> tuple[Tensor, SolveReport]:
        """`(S + λI)⁻¹ g` [P], of a system without a diagonal shift."""
        if self.mode != "kernel":
            return self._solve(g)
        # Woodbury: (ŌᵀŌ + λ)⁻¹ = (I - Ōᵀ (Ō Ōᵀ + λ)⁻¹ Ō) / λ
        y, report = self._solve(self.scores @ g)
        return (g - self.scores.T @ y) / self.shift, report

    def square(self, direction: Tensor) -> Tensor:
        """`⟨δ, (S + M) δ⟩`."""
        unknowns = self.D * direction
        return (self.scores @ unknowns).square().sum() + self.shift * unknowns.square().sum()

    def _solve(self, b: Tensor) -> tuple[Tensor, SolveReport]:
        """`(matrix + shift)⁻¹ b`.

        Raises:
            NumericsError: If `b` or the solution is NaN or infinite.
        """
        check_finite(b, "the right-hand side, made of costs and of the previous direction,")
        x, report = self._cg(b) if self.solver == "cg" else self._decomposed(b)
        check_finite(x, "the direction")
        return x, report

    def _decomposed(self, b: Tensor) -> tuple[Tensor, SolveReport]:
        """The solution by a decomposition of the matrix."""
        M = self.matrix.to_dense()
        solver = "cholesky"
        rank = None
        condition = None
        try:
            if not self.shift > 0:  # only the eigenvalues tell whether the matrix is singular
                raise SingularMatrixError("no damping")
            L = damped_cholesky(M, self.shift, retry_double_precision=False, what=self.title)
            x = torch.cholesky_solve(b[:, None], L)[:, 0]
        except SingularMatrixError:
            solver = "pinv"
            x, rank, condition = smoothed_pseudo_inverse(M, b, self.shift)
            self._report_rank(M, rank)
        residual = float(torch.linalg.vector_norm(b - M @ x - self.shift * x))
        size = float(torch.linalg.vector_norm(b))
        relative = residual / size if size else 0.0
        return x, SolveReport(self.mode, solver, len(b), relative, rank, condition)

    def _report_rank(self, M: Tensor, rank: int) -> None:
        """Refuse a singular matrix without damping; warn of an indefinite one with it."""
        if self.shift > 0:
            warnings.warn(
                f"{self.title} {list(M.shape)} with damping {self.shift:.1e} is not positive "
                f"definite in {M.dtype}; solved with a pseudo-inverse of rank {rank}. Use float64, "
                "or a larger damping.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
        elif rank < len(M):
            raise SingularMatrixError(
                f"{self.title} is singular: {len(M) - rank} of its {len(M)} eigenvalues count as "
                "zero. Add a damping."
            ) from None

    def _cg(self, b: Tensor) -> tuple[Tensor, SolveReport]:
        tol = self.tol
        if tol is None:
            tol = 1e-12 if b.dtype == torch.float64 else 1e-5
        with warnings.catch_warnings():
            # By default rounding may end it before, and only a large residual is worth a warning.
            if self.tol is None:
                warnings.simplefilter("ignore", CurvatureWarning)
            x, info = cg(self.matrix.shift(self.shift), b, x0=b, tol=tol, max_iter=self.max_iter)
        residual = float(info.relative_residual[0])
        if self.tol is None and not residual <= torch.finfo(b.dtype).eps ** 0.5:
            warnings.warn(
                f"cg in mode {self.mode!r} ended at a relative residual of {residual:.1e}: "
                f"{info.reason}.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
        return x, SolveReport(self.mode, "cg", len(b), residual, iterations=info.iterations)


def check_options(
    mode: Mode,
    solver: Solver | None,
    tol: float | None,
    max_iter: int | None,
    momentum: float = 0.0,
    **numbers: float,
) -> None:
    """Check names and numbers before anything is computed."""
    number("momentum", momentum, low=0, below=1)  # directions could grow without bound
    one_of("mode", mode, *get_args(Mode))
    one_of("solver", solver, *get_args(Solver), None)
    if mode == "lazy" and solver == "cholesky":
        raise ValueError(
            'solver="cholesky" needs the matrix, which mode="lazy" does not form; expected "cg".'
        )
    number("tol", tol, low=0, optional=True)
    integer("max_iter", max_iter, low=0, optional=True)
    for name, value in numbers.items():
        number(name, value, low=0)


def smoothed_pseudo_inverse(M: Tensor, b: Tensor, shift: float) -> tuple[Tensor, int, float]:
    """Smoothed pseudo-inverse of `M + shift` times b, with the rank and the condition number.

    `1/σ` times `1 / (1 + (r σ_max/σ)⁶)`, and 0 below `r σ_max`, with `r` the size times the machine
    precision, the relative accuracy of eigenvalues; as in netket.
    """
    eigenvalues, Q = eigh(M)
    eigenvalues = eigenvalues + shift
    cut = len(eigenvalues) * torch.finfo(M.dtype).eps * eigenvalues.abs().amax()
    nonzero = eigenvalues > cut
    # Where an eigenvalue counts as zero any positive number stands in for it.
    safe = torch.where(nonzero, eigenvalues, eigenvalues.amax())
    smoothed = 1 / (safe * (1 + (cut / safe) ** 6))
    inverse = torch.where(nonzero, smoothed, torch.zeros_like(smoothed))
    condition = float(eigenvalues.amax() / safe.amin())
    return Q @ (inverse * (Q.T @ b)), int(nonzero.sum()), condition
