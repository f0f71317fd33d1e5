"""`S`, the covariance of log-derivatives, and damped solves with it, in the space of the parameters
or of the samples.

| mode | what is formed | solvers (the first is the default) | | --- | --- | --- | | "lazy" |
nothing | "cg" | | "dense" | derivatives `Ō`, and `S` [P, P] | "cholesky", "cg" | | "kernel" |
derivatives `Ō`, and `Ō Ōᵀ` [n·c, n·c] | "cholesky", "cg" | | "auto" | by sizes: the kernel if P >
n·c, else dense; lazy if both are large | the default of that mode |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, SingularMatrixError, level_of_user
from curvlinops_plus.linalg import Dense, LinearOperator, Structure, eigh
from curvlinops_plus.linalg.numerics import damped_cholesky
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.linalg.solvers import cg
from curvlinops_plus.optim.reconfiguration.scores import (
    Amplitude,
    Ensemble,
    LogAmplitude,
    LogPsi,
    Params,
    Scores,
    full_precision_no_grad,
)

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
        params: Params,
        samples: Any,
        weights: Any = None,
        chunk_size: int | None = None,
        amplitude: Amplitude = "real",
        *,
        stored: bool = False,
    ) -> None:
        psi = LogAmplitude(log_psi, params, amplitude)
        with full_precision_no_grad(psi.device):
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
        """`S @ X`; also a list or dict of complex tensors, without columns."""
        tensors = (
            [*X.values()] if isinstance(X, Mapping) else X if isinstance(X, (list, tuple)) else []
        )
        if not any(isinstance(t, Tensor) and t.is_complex() for t in tensors):
            return super().__matmul__(X)
        psi = self.scores.ensemble.psi
        return psi.write(super().__matmul__(psi.read(X)), like=X)

    def _to_dense(self) -> Tensor:
        with full_precision_no_grad(self.device):
            return self.scores.covariance()

    def diagonal(self) -> Tensor:
        with full_precision_no_grad(self.device):
            return self.scores.variances()

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()


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
        SolveReport(mode='dense', solver='pinv', size=3, residual=1e-16, rank=2, condition=1000.0, iterations=None)
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
        P, n, c = ensemble.psi.space.dim, ensemble.n, ensemble.components
        self.shift, self.tol, self.max_iter = (
            diagonal_shift or damping,
            tol,
            10 * P if max_iter is None else max_iter,
        )
        if mode == "auto":
            stored = n * ensemble.rows * P * ensemble.psi.dtype.itemsize
            large = min(n * c, P) > _LARGEST or stored > _STORED_BYTES
            mode = "lazy" if large else "kernel" if n * c < P and self.shift > 0 else "dense"
            mode = "dense" if solver == "cholesky" and mode == "lazy" else mode
        self.mode: str = mode
        self.solver = solver or ("cg" if mode == "lazy" else "cholesky")
        if mode == "kernel" and not self.shift > 0:
            raise ValueError(
                'mode="kernel" needs a positive damping, 1e-3 or the like: this kernel is singular.'
            )
        rank = (int((ensemble.weights > 0).sum()) - 1) * c
        if not self.shift > 0 and rank < P:
            raise SingularMatrixError(
                f"S of {P} real parameters is singular: the centred derivatives of {n} samples "
                f"have rank {rank} at most. Add a damping (1e-3 is common), or take more samples."
            )
        # The kernel of a module's layers needs no derivatives.
        recorded = mode == "kernel" and ensemble.psi.module is not None and not diagonal_shift
        scores = Scores(ensemble, stored=mode != "lazy" and not recorded)
        self.D = torch.ones((), dtype=scores.dtype, device=scores.device)
        if diagonal_shift:
            squares = scores.variances() + damping / diagonal_shift
            self.D = torch.where(
                squares > 0, squares, torch.ones_like(squares)
            ).sqrt()  # 0: a parameter without effect
            scores.divide(self.D)
        self.scores, self.what = scores, "the kernel" if mode == "kernel" else "S"
        self.matrix: LinearOperator = CenteredFisherLinearOperator.of(scores)
        if mode == "dense":
            self.matrix = Dense(scores.covariance(), Structure.PSD)
        elif mode == "kernel":
            self.matrix = Dense(scores.kernel(), Structure.PSD)

    def direction(
        self, target: Tensor, momentum: float = 0.0, phi: Tensor | None = None
    ) -> tuple[Tensor, SolveReport]:  # [n·c], [P] -> [P]
        """The `δ` of least `|Ō δ - target|² + |δ - μ φ|²_M`, with `M = λI + ε diag(S)`.

        Without `φ` it is `(S + M)⁻¹ Ōᵀ target`. SPRING: with `δ = d + μ φ` the problem is one
        without it, for `d` and `target - μ Ō φ`.
        """
        start: Tensor | float = 0.0
        if phi is not None and momentum:
            start = momentum * phi
            target = target - self.scores @ (self.D * start)
        x, report = self._solve(target if self.mode == "kernel" else self.scores.T @ target)
        return (self.scores.T @ x if self.mode == "kernel" else x) / self.D + start, report

    def inverse(self, g: Tensor) -> tuple[Tensor, SolveReport]:  # [P] -> [P]
        """`(S + λI)⁻¹ g`, of a system without a diagonal shift."""
        x, report = self._solve(self.scores @ g if self.mode == "kernel" else g)
        if self.mode == "kernel":  # Woodbury: (ŌᵀŌ + λ)⁻¹ = (I - Ōᵀ (Ō Ōᵀ + λ)⁻¹ Ō) / λ
            x = (g - self.scores.T @ x) / self.shift
        return x, report

    def square(self, direction: Tensor) -> Tensor:
        """`⟨δ, (S + M) δ⟩`."""
        unknowns = self.D * direction
        return (self.scores @ unknowns).square().sum() + self.shift * unknowns.square().sum()

    def _solve(self, b: Tensor) -> tuple[Tensor, SolveReport]:
        """`(matrix + shift)⁻¹ b`."""
        if self.solver == "cg":
            return self._cg(b)
        M, solver, rank, condition = self.matrix.to_dense(), "cholesky", None, None
        try:
            if not self.shift > 0:  # only the eigenvalues tell whether the matrix is singular
                raise SingularMatrixError("no damping")
            L = damped_cholesky(M, self.shift, retry_double_precision=False, what=self.what)
            x = torch.cholesky_solve(b[:, None], L)[:, 0]
        except SingularMatrixError:
            solver, (x, rank, condition) = "pinv", smoothed_pseudo_inverse(M, b, self.shift)
            if not self.shift > 0 and rank < len(M):
                raise SingularMatrixError(
                    f"{self.what} is singular: {len(M) - rank} of its {len(M)} eigenvalues count "
                    "as zero. Add a damping."
                ) from None
            if self.shift > 0:
                words = (
                    f"{self.what} {list(M.shape)} with damping {self.shift:.1e} is not positive "
                    "definite in "
                )
                words += (
                    f"{M.dtype}; solved with a pseudo-inverse of rank {rank}. Use float64, or a "
                    "larger damping."
                )
                warnings.warn(words, CurvatureWarning, stacklevel=level_of_user())
        residual, size = (
            float(torch.linalg.vector_norm(v)) for v in (b - M @ x - self.shift * x, b)
        )
        return x, SolveReport(
            self.mode, solver, len(b), residual / size if size else 0.0, rank, condition
        )

    def _cg(self, b: Tensor) -> tuple[Tensor, SolveReport]:
        tol = (1e-12 if b.dtype == torch.float64 else 1e-5) if self.tol is None else self.tol
        with warnings.catch_warnings():
            if (
                self.tol is None
            ):  # then rounding may end it before, and only a large residual is worth a warning
                warnings.simplefilter("ignore", CurvatureWarning)
            x, info = cg(self.matrix.shift(self.shift), b, x0=b, tol=tol, max_iter=self.max_iter)
        residual = float(info.relative_residual[0])
        if self.tol is None and not residual <= torch.finfo(b.dtype).eps ** 0.5:
            words = (
                f"cg in mode {self.mode!r} ended at a relative residual of {residual:.1e}: "
                f"{info.reason}."
            )
            warnings.warn(words, CurvatureWarning, stacklevel=level_of_user())
        return x, SolveReport(self.mode, "cg", len(b), residual, iterations=info.iterations)


def check_options(
    mode: Mode, solver: Solver | None, momentum: float = 0.0, **numbers: float
) -> None:
    """Check names and numbers before anything is computed."""
    if not 0 <= momentum < 1:  # directions could grow without bound
        raise ValueError(f"Expected momentum to be at least 0 and below 1, got {momentum!r}.")
    if mode not in get_args(Mode):
        raise ValueError(f"Expected mode to be one of {list(get_args(Mode))}, got {mode!r}.")
    if solver not in (None, *get_args(Solver)) or (mode, solver) == ("lazy", "cholesky"):
        raise ValueError(
            f'Expected solver to be None, "cg" or, unless lazy, "cholesky", got {solver!r}.'
        )
    for name, value in numbers.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"Expected {name} to be a finite number of at least 0, got {value!r}.")


def smoothed_pseudo_inverse(M: Tensor, b: Tensor, shift: float) -> tuple[Tensor, int, float]:
    """Smoothed pseudo-inverse of `M + shift` times b, with the rank and the condition number.

    `1/σ` times `1 / (1 + (r σ_max/σ)⁶)`, and 0 below `r σ_max`, with `r` the size times the machine
    precision, the relative accuracy of eigenvalues; as in netket.
    """
    values, Q = eigh(M)
    values = values + shift
    cut = values.shape[0] * torch.finfo(M.dtype).eps * values.abs().amax()
    kept = values > cut
    safe = torch.where(kept, values, values.amax())
    inverse = torch.where(kept, 1 / (safe * (1 + (cut / safe) ** 6)), torch.zeros_like(values))
    return Q @ (inverse * (Q.T @ b)), int(kept.sum()), float(values.amax() / safe.amin())
