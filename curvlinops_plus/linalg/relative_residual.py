"""What CG and MINRES share: a column is done when its residual is small relative to the right-hand side."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from curvlinops_plus.linalg.solve import Method, State, Stop, System, dot, norm


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


def tolerance_text(tol: float, atol: float) -> str:
    """The tolerance in words, for warnings."""
    return f"tol={tol:g}" + (f", atol={atol:g}" if atol else "")
