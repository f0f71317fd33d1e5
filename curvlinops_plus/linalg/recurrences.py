"""The recurrences of CG, MINRES and LSMR, for many columns at once; `iterate` starts and stops them.

Vectors are [n, k] in the dtype of the solve, scalars [k] in float64. A state owns its vectors and changes them in
place: large new tensors cost more than the arithmetic. Results of products may share memory with the operator, and are
only read.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from curvlinops_plus.linalg.solve import Method, State, Stop, System, add, dot, norm, scale, times

__all__ = ["CG", "LSMR", "MINRES"]


class Relative(Method):
    """Methods that are done when the residual is below a tolerance."""

    trust: float  # in a recurrence: a restarted solution is preferred if its residual is smaller by this factor

    def __init__(self, system: System, tol: float, atol: float) -> None:
        super().__init__(system)
        self.goal = (tol * system.norm_b).clamp(min=atol / system.scale.to(system.norm_b))  # [K], of scaled columns

    def distance(self, s: State, R: Tensor, columns: Tensor) -> Tensor:
        r, goal = norm(R), self.goal[columns]
        return (r / goal.clamp(min=torch.finfo(goal.dtype).tiny)).nan_to_num(nan=inf)

    def at_floor(self, s: State, R: Tensor) -> Tensor:
        return norm(R) <= self.system.eps * s.norm_A * norm(s.X)

    def prefers(self, distance: Tensor, best: Tensor) -> Tensor:
        return distance < best / self.trust

    def resume(self, s: State, chosen: Tensor, R: Tensor, columns: Tensor) -> None:
        goal = s.goal.index_select(0, chosen) / 2  # what was claimed was not enough
        fresh = self.start(s.X.index_select(1, chosen), R, columns)
        fresh.goal, fresh.claim = goal, fresh.r <= goal
        s.replace(chosen, fresh)

    def square(self, R: Tensor, Z: Tensor) -> Tensor:
        """`<R, Z>` of `Z = M R`."""
        return dot(R, Z) if self.system.preconditioned else norm(R).square()

    def opening(self, X: Tensor, R: Tensor, columns: Tensor) -> tuple[State, Tensor, Tensor]:
        """What both methods begin with, the preconditioned residual `Z = M R`, and `<Z, R>`."""
        Z = self.system.M(R)
        r, goal = norm(R), self.goal[columns]
        rz = self.square(R, Z)
        stop = torch.where((rz > 0) & torch.isfinite(rz), Stop.RUNNING.value, Stop.BAD_PRECONDITIONER.value)
        stop = torch.where(torch.isfinite(r), stop, Stop.NOT_FINITE.value)
        return State(X=X, R=R, r=r, goal=goal, stop=stop, claim=r <= goal, norm_A=torch.zeros_like(r)), Z, rz


class CG(Relative):
    """State: direction `P`, residual `R` with norm `r`, `rz = <R, M R>`."""

    trust = 10.0

    def start(self, X: Tensor, R: Tensor, columns: Tensor) -> State:
        s, Z, rz = self.opening(X, R, columns)
        s.P, s.rz = Z.clone(), rz
        return s

    def step(self, s: State) -> None:
        Q = self.system.product(s.P)
        curvature, p_squared = dot(s.P, Q), dot(s.P, s.P)
        s.norm_A = torch.maximum(s.norm_A, curvature / p_squared)  # a bound from below
        alpha = s.rz / curvature
        add(s.R, -alpha, Q)
        r = dot(s.R, s.R).sqrt()
        # Below this the sign of the curvature is not known, if products are rounded like those of a dense matrix. A
        # step that reduces the residual is right all the same; one that doesn't goes off along the null space.
        doubtful = (curvature <= self.system.eps * s.norm_A * p_squared) & ~(r < s.r)
        fine = (curvature > 0) & torch.isfinite(curvature) & ~doubtful
        add(s.X, torch.where(fine, alpha, 0.0), s.P)
        Z = self.system.M(s.R)
        rz = dot(s.R, Z) if self.system.preconditioned else r.square()
        scale(s.P, rz / s.rz).add_(Z)
        s.r, s.rz, s.claim = r, rz, fine & (r <= s.goal)
        broken = torch.where(torch.isfinite(curvature), Stop.NOT_POSITIVE.value, Stop.NOT_FINITE.value)
        good_M = (rz > 0) & torch.isfinite(rz)
        s.stop = torch.where(
            fine, torch.where(good_M | s.claim, Stop.RUNNING.value, Stop.BAD_PRECONDITIONER.value), broken
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


def _rotation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`c, s, r` with `c a + s b = r` and `c b = s a`."""
    r = torch.hypot(a, b)
    return torch.where(r > 0, a / r, 1.0), torch.where(r > 0, b / r, 0.0), r


def _reciprocal(a: Tensor) -> Tensor:
    """`1 / a`, and 0 for 0: directions of length 0 stay out."""
    return torch.where(a == 0, 0.0, 1 / a)
