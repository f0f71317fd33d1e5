"""LSMR (Fong and Saunders 2011), for least squares with a matrix of any shape."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.iterative_inverse import IterativeInverse
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.solve import (
    Method,
    SolveInfo,
    State,
    Stop,
    System,
    add,
    check_at_least_zero,
    count,
    iterate,
    norm,
    scale,
    times,
)
from curvlinops_plus.linalg.structure import Structure


class LSMR(Method):
    """State: Golub-Kahan vectors `U V` with coefficients `alpha beta`, directions `H Hbar`, and scalars with the names
    of the paper. The last group estimates the norm of the damped residual, section 5 of the paper.
    """

    def __init__(self, system: System, damp: float, atol: float, btol: float, conlim: float, show: bool) -> None:
        super().__init__(system)
        self.damp, self.atol, self.btol = damp, atol, btol
        self.conlim, self.show, self.X0 = conlim, show, system.X
        # The smallest tolerances: those of the recurrence, and those that can be seen through roundings of products.
        # Solutions gain accuracy between the two. (The estimate of ‖A‖ is the Frobenius norm, so these are small.)
        self.visible = torch.full_like(system.norm_b[:1], system.eps)  # [1]
        self.claimed = self.visible / 10

    def start(self, X: Tensor, R: Tensor, columns: Tensor) -> State:
        beta = norm(R)
        U = times(_reciprocal(beta), R)
        V = self.system.adjoint_product(U)
        alpha = norm(V)
        V = times(_reciprocal(alpha), V)
        zero, one = torch.zeros_like(beta), torch.ones_like(beta)
        stop = torch.where(torch.isfinite(alpha * beta), Stop.RUNNING.value, Stop.NOT_FINITE.value)
        # What claims are measured by; halved when one turns out wrong.
        s = State(
            X=X,
            U=U,
            V=V,
            H=V.clone(),
            Hbar=torch.zeros_like(X),
            alpha=alpha,
            norm_b=self.system.norm_b[columns],
            slack=one,
        )
        s.zetabar, s.alphabar, s.zeta = alpha * beta, alpha, zero
        s.rho, s.rhobar, s.cbar, s.sbar = one, zero, one, zero
        s.betadd, s.betad, s.rhod, s.tau, s.thetatilde, s.d = beta, zero, one, zero, zero, zero
        s.norm_A2, s.most, s.least = alpha.square(), zero, torch.full_like(beta, inf)
        s.optimality = torch.where(alpha == 0, 0.0, one)
        s.stop, s.claim = stop, (alpha * beta == 0) | (self._ratio(s, beta, alpha * beta, alpha, self.claimed) <= 1)
        return s

    def step(self, s: State) -> None:
        scale(s.U, -s.alpha).add_(self.system.product(s.V))
        beta = norm(s.U)
        scale(s.U, _reciprocal(beta))
        scale(s.V, -beta).add_(self.system.adjoint_product(s.U))
        alpha = norm(s.V)
        scale(s.V, _reciprocal(alpha))
        finite = torch.isfinite(alpha) & torch.isfinite(beta)

        # The bidiagonal matrix made triangular (with damp, then beta), and that one's transpose once more.
        c_hat, s_hat, alpha_hat = _rotation(s.alphabar, torch.full_like(alpha, self.damp))
        rho_old, rhobar_old, zeta_old = s.rho, s.rhobar, s.zeta
        c, sine, s.rho = _rotation(alpha_hat, beta)
        theta, s.alphabar = sine * alpha, c * alpha
        thetabar, turned = s.sbar * s.rho, s.cbar * s.rho
        s.cbar, s.sbar, s.rhobar = _rotation(turned, theta)
        s.zeta, s.zetabar = s.cbar * s.zetabar, -s.sbar * s.zetabar
        turn = -thetabar * s.rho * _reciprocal(rho_old * rhobar_old)
        scale(s.Hbar, torch.where(finite, turn, 0.0)).add_(s.H)
        add(s.X, torch.where(finite, s.zeta * _reciprocal(s.rho * s.rhobar), 0.0), s.Hbar)
        scale(s.H, -theta * _reciprocal(s.rho)).add_(s.V)
        s.alpha = alpha

        # Norm of the damped residual.
        acute, check = c_hat * s.betadd, -s_hat * s.betadd
        hat, s.betadd = c * acute, -sine * acute
        theta_old = s.thetatilde
        c_tilde, s_tilde, rho_tilde = _rotation(s.rhod, thetabar)
        s.thetatilde, s.rhod = s_tilde * s.rhobar, c_tilde * s.rhobar
        s.betad = c_tilde * hat - s_tilde * s.betad
        s.tau = (zeta_old - theta_old * s.tau) * _reciprocal(rho_tilde)
        last = (s.zeta - s.thetatilde * s.tau) * _reciprocal(s.rhod)
        s.d = s.d + check.square()
        r = (s.d + (s.betad - last).square() + s.betadd.square()).sqrt()

        s.norm_A2 = s.norm_A2 + beta.square()
        norm_A = s.norm_A2.sqrt()
        s.norm_A2 = s.norm_A2 + alpha.square()
        # Before the first step there is no rhobar.
        s.least = torch.where(rhobar_old > 0, torch.minimum(s.least, rhobar_old), s.least)
        s.most = torch.maximum(s.most, rhobar_old)
        condition = torch.maximum(s.most, turned) / torch.minimum(s.least, turned)
        s.optimality = s.zetabar.abs() * _reciprocal(norm_A * r)
        s.claim = finite & (self._ratio(s, r, s.zetabar.abs(), norm_A, self.claimed) <= s.slack)
        too_ill = (condition > self.conlim) if self.conlim > 0 else torch.zeros_like(finite)
        s.stop = torch.where(too_ill, Stop.ILL_CONDITIONED.value, Stop.RUNNING.value)
        s.stop = torch.where(finite, s.stop, Stop.NOT_FINITE.value)

    def _ratio(self, s: State, r: Tensor, normal: Tensor, norm_A: Tensor, precision: Tensor) -> Tensor:
        """The smaller of what `‖r‖` and `‖Aᵀ r‖` are, relative to what they may be."""
        atol, btol = precision.clamp(min=self.atol), precision.clamp(min=self.btol)
        compatible = r / (btol * s.norm_b + atol * norm_A * norm(s.X))
        return torch.minimum(compatible, normal * _reciprocal(atol * norm_A * r)).nan_to_num(nan=inf)

    def distance(self, s: State, R: Tensor, columns: Tensor) -> Tensor:
        away = s.X - self.X0.index_select(1, columns)
        normal = norm(self.system.adjoint_product(R) - self.damp**2 * away)
        precision = torch.where(s.claim, self.visible, self.claimed)
        return self._ratio(s, torch.hypot(norm(R), self.damp * norm(away)), normal, s.norm_A2.sqrt(), precision)

    def at_floor(self, s: State, R: Tensor) -> Tensor:
        return torch.zeros_like(s.claim)  # its residuals need not be small

    def prefers(self, distance: Tensor, best: Tensor) -> Tensor:
        return distance < best  # of the same recurrence

    def resume(self, s: State, chosen: Tensor, R: Tensor, columns: Tensor) -> None:
        # Starting again would move the center of the damping: go on, to a smaller estimate.
        s.slack = s.slack.index_copy(0, chosen, s.slack[chosen] / 2)
        s.claim = s.claim.index_fill(0, chosen, False)

    def log(self, iteration: int, s: State) -> None:
        if self.show:
            print(
                f"LSMR {iteration:5d}: {len(s.alpha)} columns, ‖Aᵀ r‖ / ‖A‖ ‖r‖ up to {float(s.optimality.max()):.2e}"
            )


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


def _rotation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`c, s, r` with `c a + s b = r` and `c b = s a`."""
    r = torch.hypot(a, b)
    return torch.where(r > 0, a / r, 1.0), torch.where(r > 0, b / r, 0.0), r


def _reciprocal(a: Tensor) -> Tensor:
    """`1 / a`, and 0 for 0: directions of length 0 stay out."""
    return torch.where(a == 0, 0.0, 1 / a)
