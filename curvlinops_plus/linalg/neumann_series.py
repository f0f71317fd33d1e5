"""The truncated Neumann series (for implicit differentiation: Lorraine, Vicol and Duvenaud 2020)."""

from __future__ import annotations

from typing import Any

import torch

from curvlinops_plus.linalg.iterative_inverse import IterativeInverse, need_square
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.linalg.solve import (
    Preconditioner,
    SolveInfo,
    System,
    check_at_least_zero,
    count,
    norm,
    warn_of_miss,
)
from curvlinops_plus.linalg.structure import Structure


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
