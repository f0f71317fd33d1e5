"""The tensors of one step: gradient, preconditioned gradient, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.optim.kfac.policies import NormConstraint, as_norm_constraint, as_weight_decay
from curvlinops_plus.optim.kfac.quadratic_model import sum_of_products

__all__ = ["Move"]


class Move:
    """What moves in one step, in lists over the parameters that have gradient and curvature.

    Args:
        keys: Their keys.
        groups: The option group of each.
        states: The optimizer's state of each.
        gradient: `g`.
        direction: `P g`.
        dampings: `λ` of each, with the weight decay that is part of the curvature.

    Attributes:
        update: `δ`, without decoupled weight decay.
        curved: `(C + λ) δ`, where a norm constraint reads it: exact while `P` stays the same, since `(C + λ) P g = g`.
        scale: The least factor of a norm constraint.
    """

    def __init__(
        self,
        keys: Sequence[str],
        groups: Sequence[Mapping[str, Any]],
        states: Sequence[dict[str, Any]],
        gradient: list[Tensor],
        direction: list[Tensor],
        dampings: list[float],
    ) -> None:
        self.keys, self.groups, self.gradient, self.direction, self.dampings = (
            keys,
            groups,
            gradient,
            direction,
            dampings,
        )
        self.velocity = [s["velocity"] if "velocity" in s else torch.zeros_like(g) for s, g in zip(states, gradient)]
        self._curved_velocity = [
            s["curved_velocity"] if "curved_velocity" in s else torch.zeros_like(g) for s, g in zip(states, gradient)
        ]
        self._sent = gradient  # what `direction` is `P` times
        self._lr: Sequence[float] = ()
        self.scale = 1.0
        self.update: list[Tensor] = []
        self.curved: list[Tensor] = []

    def option(self, name: str) -> list[float]:
        """An option of each parameter's group."""
        return [group[name] for group in self.groups]

    def bound_direction(self) -> None:
        """Shorten the preconditioned gradient where `α P g` is longer than its norm constraint allows."""

        def squares(norm: str) -> list[Tensor]:
            found = self._squares(norm, self.direction, self.gradient)
            return [lr**2 * square for lr, square in zip(self.option("lr"), found, strict=True)]

        if factors := self._factors("step", squares):
            self.direction = torch._foreach_mul(self.direction, factors)
            self._sent = torch._foreach_mul(self.gradient, factors)

    def combine(self, lr: Sequence[float], momentum: Sequence[float]) -> None:
        """`δ = -α P g + μ v`."""

        def combined(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
            return torch._foreach_sub(torch._foreach_mul(old, list(momentum)), torch._foreach_mul(new, list(lr)))

        self._lr = lr
        self.update = combined(self.direction, self.velocity)
        if any(_reads_curved(c) for c in self._constraints):
            self.curved = combined(self._sent, self._curved_velocity)

    def bound_update(self, product: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Shorten the update where it is longer than its norm constraint allows.

        Args:
            product: `C v`, for the case that the inverse was renewed, and `curved` is too far off to be used.
        """

        def squares(norm: str) -> list[Tensor]:
            if norm != "euclidean" and not float(sum_of_products(self.update, self.curved)) > 0:
                damped = torch._foreach_mul(self.update, self.dampings)
                self.curved = torch._foreach_add(product(self.update), damped)
            return self._squares(norm, self.update, self.curved)

        if factors := self._factors("update", squares):
            self.update = torch._foreach_mul(self.update, factors)
            self.curved = torch._foreach_mul(self.curved, factors) if self.curved else []

    def decayed(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The update, with decoupled weight decay."""
        decays = [as_weight_decay(group["weight_decay"]) for group in self.groups]
        shrink = [-lr * d.strength if d.kind == "decoupled" else 0.0 for lr, d in zip(self._lr, decays, strict=True)]
        if not any(shrink):
            return self.update
        return torch._foreach_add(
            self.update, torch._foreach_mul([p.to(u.dtype) for p, u in zip(params, self.update)], shrink)
        )

    def remember(self, states: Sequence[dict[str, Any]]) -> None:
        """Keep what the next step needs: the update is its velocity."""
        for i, (state, group) in enumerate(zip(states, self.groups, strict=True)):
            if group["momentum"] != 0:
                state["velocity"] = self.update[i]
                if _reads_curved(self._constraints[i]):
                    state["curved_velocity"] = self.curved[i]

    # --------------------------------------------------------------------------------------------------------- norms
    @property
    def _constraints(self) -> list[NormConstraint | None]:
        return [as_norm_constraint(group["norm_constraint"]) for group in self.groups]

    def _squares(self, norm: str, one: list[Tensor], curved: list[Tensor]) -> list[Tensor]:
        """The squared norm of each parameter's part; `curved` is `(C + λ)` times `one`."""
        if norm == "euclidean":
            return [t.square().sum() for t in one]
        found = [a.flatten().dot(b.flatten()) for a, b in zip(one, curved, strict=True)]
        if norm == "damped":
            return found
        return [square - λ * t.square().sum() for square, t, λ in zip(found, one, self.dampings, strict=True)]

    def _factors(self, of: str, squares: Callable[[str], list[Tensor]]) -> list[float]:
        """What each part is multiplied with; empty if no constraint is active.

        Groups with the same constraint are bounded together, as one vector.
        """
        constraints = self._constraints
        factors = [1.0] * len(constraints)
        for c in {c for c in constraints if c is not None and c.of == of}:
            at = [i for i, other in enumerate(constraints) if other == c]
            found = squares(c.norm)
            factor = c.factor(float(torch.stack([found[i] for i in at]).sum()))
            self.scale = min(self.scale, factor)
            for i in at:
                factors[i] = factor
        return factors if min(factors, default=1.0) < 1 else []


def _reads_curved(c: NormConstraint | None) -> bool:
    return c is not None and c.of == "update" and c.norm != "euclidean"
