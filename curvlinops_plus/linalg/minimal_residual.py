"""The minimal residual method (Paige and Saunders 1975), for symmetric matrices, also indefinite ones."""

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
    norm,
    scale,
    times,
)


class MINRES(Relative):
    """State: Lanczos vectors `V0 V1` with norms `g0 g1` and `Z = M V1`; directions `W0 W1`; the last two rotations
    `c0 s0 c1 s1`; `eta`, the residual in the norm of `M`, with a sign; `beta`, the last entry beside the diagonal.

    Of a singular `A` and `b` outside its range, the residual falls to its least, then steps go off along the null
    space: they reduce the residual of the recurrence by about as much as `A` makes roundings of them, and soon the true
    one grows. The first such step is `owed`: it waits for a look at the true residual, which keeps the solution. From
    there on the column is `doubted` (and was so for `ever`), until the residual has fallen by 5 %, or steps of length
    `growth` in all gained no more than their roundings. `spread` is `‖A‖` of a preconditioned system.
    """

    trust = 2.0  # its recurrence loses more than that of CG

    def start(self, X: Tensor, R: Tensor, columns: Tensor) -> State:
        s, Z, rz = self.opening(X, R, columns)
        g, zero, one = rz.clamp(min=0).sqrt(), torch.zeros_like(rz), torch.ones_like(rz)
        s.V0, s.V1, s.Z = torch.zeros_like(R), R.clone(), Z.clone()
        s.W0, s.W1 = torch.zeros_like(X), torch.zeros_like(X)
        s.g0, s.g1, s.eta, s.c0, s.s0, s.c1, s.s1 = one, g, g, one, zero, one, zero
        s.beta = zero
        s.spread = zero
        s.doubted = s.ever = torch.zeros_like(s.claim)
        s.look, s.r_doubted, s.growth, s.owed = s.doubted, s.r, zero, zero
        return s

    def asks(self, s: State) -> Tensor:
        return super().asks(s) | s.look

    def saves(self, s: State) -> Tensor:
        return s.ever

    def improves(self, s: State, distance: Tensor, best: Tensor) -> Tensor:
        less = torch.where(s.doubted & ~s.look, 0.95, 1 - self.system.eps**0.5)
        # Of ill-conditioned systems the error falls on while roundings of x make the residual larger.
        return distance < torch.where(s.ever, less, 1.0 if self.system.guessed else 10.0) * best

    def proceed(self, s: State, chosen: Tensor) -> None:
        owed = s.owed.index_select(0, chosen)
        s.X.index_add_(1, chosen, times(owed, s.W1.index_select(1, chosen)))
        s.owed = s.owed.index_fill(0, chosen, 0.0)

    def step(self, s: State) -> None:
        # Lanczos: the next column (g1, delta, g2) of the tridiagonal matrix.
        Z = times(1 / s.g1, s.Z)
        Q = self.system.product(Z)
        delta = dot(Q, Z)
        V = add(scale(s.V0, -s.g1 / s.g0).add_(Q), -delta / s.g1, s.V1)
        Z_next = self.system.M(V)
        g2_squared = self.square(V, Z_next)
        g2 = g2_squared.clamp(min=0).sqrt()
        # Rotated twice as the columns before, then by a rotation that removes g2.
        above, left = s.s0 * s.g1, s.s1 * delta + s.c0 * s.c1 * s.g1
        here = s.c1 * delta - s.c0 * s.s1 * s.g1
        pivot = torch.hypot(here, g2)
        c, sine = here / pivot, g2 / pivot
        s.norm_A = torch.maximum(s.norm_A, torch.hypot(torch.hypot(s.beta, delta), g2))
        # ‖A r‖ / ‖r‖ of the residual before this step; at 0 nothing reduces it.
        flat = torch.hypot(here, s.c1 * g2) <= 100 * self.system.eps * s.norm_A
        finite = torch.isfinite(delta)
        good_M = (g2_squared >= 0) & torch.isfinite(g2_squared)
        fine = finite & good_M & ~flat
        W = add(scale(s.W0, torch.where(fine, -above, 0.0)).add_(Z), torch.where(fine, -left, 0.0), s.W1)
        whole = s.eta.abs() * dot(W, W).sqrt() / pivot
        scale(W, torch.where(fine, 1 / pivot, 0.0))
        norm_A = s.norm_A
        if self.system.preconditioned:  # that was the norm with M on both sides
            norm_A = s.spread = torch.maximum(s.spread, norm(Q) / norm(Z))
        # By a step of length c `whole` the residual falls by c² / 2, and `A` makes roundings c `noise`, relative to it.
        noise = self.system.eps * norm_A * whole / s.r
        flat |= noise > 1
        fine &= ~flat
        eta = -sine * s.eta
        add(scale(s.R, sine.square()), torch.where(g2 > 0, eta * c / g2, 0.0), V)
        r = dot(s.R, s.R).sqrt()
        s.claim = fine & (r <= s.goal)
        cosine = c.abs()
        s.look = fine & ~s.claim & ~s.doubted & (torch.maximum(cosine, s.c1.abs()) <= 4 * noise)
        step = torch.where(fine, c * s.eta, 0.0)
        s.owed = torch.where(s.look, step, 0.0)
        add(s.X, step - s.owed, W)
        s.ever = s.ever | s.look
        s.r_doubted = torch.where(s.look, s.r, s.r_doubted)
        s.growth = torch.where(s.doubted | s.look, s.growth + cosine * whole, 0.0)
        s.doubted = (s.doubted | s.look) & ((r > 0.95 * s.r_doubted) | ~fine)
        drift = self.system.eps * norm_A * s.growth
        lost = s.doubted & (drift > 0.01 * s.r_doubted) & (s.r_doubted - r <= 4 * drift)
        s.r = r
        s.stop = torch.where(flat | lost, Stop.LEAST_SQUARES.value, Stop.RUNNING.value)
        s.stop = torch.where(good_M, s.stop, Stop.BAD_PRECONDITIONER.value)
        s.stop = torch.where(finite, s.stop, Stop.NOT_FINITE.value)
        s.V0, s.V1, s.Z, s.W0, s.W1 = s.V1, V, Z_next, s.W1, W
        s.g0, s.g1, s.eta, s.c0, s.s0, s.c1, s.s1 = s.g1, g2, eta, s.c1, s.s1, c, sine
        s.beta = g2


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
    return iterate(MINRES(system, tol, atol), limit, "MINRES", tolerance_text(tol, atol))


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
