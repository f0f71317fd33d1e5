"""The tensors of one step: gradient, preconditioned gradient, update."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from curvlinops_plus.optim.kfac.block_vectors import BlockVectors
from curvlinops_plus.optim.kfac.policies import Adaptive, NormConstraint, as_norm_constraint, as_weight_decay
from curvlinops_plus.optim.kfac.tensor_lists import products, times, total


class Move:
    """What moves in one step, as vectors over the parameters that have gradient and curvature.

    Args:
        state: The optimizer's, parameter to what is kept of it.
        gradient: `g`.
        direction: `P g`.
        dampings: `λ` of each vector, with the weight decay that is part of the curvature.
        inverted: `λ` in `P`, another one if that keeps the damping of its refresh.
        undoable: Keep the velocity of before until `remember`.

    Attributes:
        update: `δ`, without decoupled weight decay.
        curved: `(C + λ) δ`, where a norm constraint reads it: while `C` stays the same, `(C + λ) P g = g` gives it.
        scale: The least factor of a norm constraint.
    """

    def __init__(
        self,
        vectors: BlockVectors,
        state: MutableMapping[Any, dict[str, Any]],
        gradient: list[Tensor],
        direction: list[Tensor],
        dampings: list[float],
        inverted: list[float],
        undoable: bool = False,
    ) -> None:
        self.vectors, self.groups, self._state, self._undoable = vectors, vectors.groups, state, undoable
        self.gradient, self.direction, self.dampings = gradient, direction, dampings
        self._constraints = [as_norm_constraint(group["norm_constraint"]) for group in self.groups]
        # A velocity was taken with another lr: without this it would go on as fast when a schedule ends.
        rates, before = self.option("lr"), vectors.recall_numbers(state, "velocity_lr")
        self._ratios = [_ratio(rates[k], rate) for k, rate in zip(vectors.at, before, strict=True)]
        self.velocity, self._moving = self._kept("velocity")
        self._curved_velocity, self._curved_moving = self._kept("curved_velocity")
        if any(self._curved_moving):
            self._follow_damping()
        self._sent = gradient  # `(C + λ)` times `direction`
        if inverted != dampings:
            more = times(direction, [λ - other for λ, other in zip(dampings, inverted, strict=True)])
            self._sent = [g + m for g, m in zip(gradient, more, strict=True)]
        self._lr: Sequence[float] = ()
        self.scale = 1.0
        self.update: list[Tensor] = []
        self.curved: list[Tensor] = []

    def _kept(self, name: str) -> tuple[list[Tensor], list[bool]]:
        """What the last step kept, as it would be with the lr of now; and of which parameters."""
        kept, there = self.vectors.recall(self._state, name)
        return kept if all(ratio == 1 for ratio in self._ratios) else self.vectors.times(kept, self._ratios), there

    def _follow_damping(self) -> None:
        """Make what is kept of `(C + λ) v` that of the damping of now."""
        before = self.vectors.recall_numbers(self._state, "velocity_damping")
        more = [0.0 if λ is None else self.dampings[k] - λ for k, λ in zip(self.vectors.at, before, strict=True)]
        if any(more):
            added = self.vectors.times(self.velocity, more)
            self._curved_velocity = [c + a for c, a in zip(self._curved_velocity, added, strict=True)]

    def option(self, name: str, default: Any = None) -> list[Any]:
        """An option of each vector's group; tensors are numbers."""
        values = [group.get(name, default) for group in self.groups]
        return [float(value) if isinstance(value, Tensor) else value for value in values]

    def bound_direction(self) -> None:
        """Shorten the preconditioned gradient where `α P g` is longer than its norm constraint allows."""

        def squares(norm: str) -> list[Tensor]:
            found = self._squares(norm, self.direction, self._sent)
            return [lr**2 * square for lr, square in zip(self.option("lr", 1.0), found, strict=True)]

        if factors := self._factors("step", squares):
            self.direction = times(self.direction, factors)
            self._sent = times(self._sent, factors)

    def combine(self, lr: Sequence[float], momentum: Sequence[float]) -> None:
        """`δ = -α P g + μ v`."""

        def combined(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
            old = [v.clone() for v in old] if self._undoable else old  # else in place: it is not needed any more
            return [v.mul_(μ).add_(d, alpha=-α) for v, d, μ, α in zip(old, new, momentum, lr, strict=True)]

        self._lr = lr
        self.update = combined(self.direction, self.velocity)
        if any(_reads_curved(c) for c in self._constraints):
            self.curved = combined(self._sent, self._curved_velocity)

    def bound_update(self, product: Callable[[], list[Tensor]]) -> None:
        """Shorten the update where it is longer than its norm constraint allows.

        Args:
            product: `C δ`, for steps in which `curved` is not known, as after `C` was renewed.
        """

        def squares(norm: str) -> list[Tensor]:
            if norm == "euclidean":
                return self._squares(norm, self.update, self.curved)
            found = products(self.update, self.curved)
            if self._moving != self._curved_moving or not total(found) > 0:
                curved = product()
                self.curved = [c + λ * u for c, u, λ in zip(curved, self.update, self.dampings, strict=True)]
                found = products(self.update, self.curved)
            return found if norm == "damped" else self._without_damping(found, self.update)

        factors = self._factors("update", squares)
        for vectors in (self.update, self.curved):
            for v, factor in zip(vectors, factors):  # none if nothing is shortened, or curved
                v.mul_(factor)

    def with_decay(self) -> list[Tensor]:
        """The update, with decoupled weight decay."""
        decays = {i: as_weight_decay(group["weight_decay"]) for i, group in self.vectors.distinct_groups.items()}
        strengths = {i: decay.strength if decay.kind == "decoupled" else 0.0 for i, decay in decays.items()}
        if not any(strengths.values()):
            return self.update
        factors = [-self._lr[k] * strengths[i] for k, i in zip(self.vectors.at, self.vectors.groups_of, strict=True)]
        dtype = self.update[0].dtype
        shrink = [factor * p.to(dtype) for p, factor in zip(self.vectors.params, factors, strict=True)]
        return [u + s for u, s in zip(self.update, self.vectors.join(shrink), strict=True)]

    def remember(self) -> None:
        """Keep what the next step needs: the update is its velocity."""
        moving = [momentum != 0 for momentum in self.option("momentum")]
        curved = [m and _reads_curved(c) for m, c in zip(moving, self._constraints, strict=True)]
        for name, found, kept in (("velocity", self.update, moving), ("curved_velocity", self.curved, curved)):
            there = [found[k] if keep else None for k, keep in enumerate(kept)]
            self.vectors.remember(self._state, name, there)
        rates = [None if isinstance(lr, Adaptive) else lr for lr in self.option("lr")]
        for name, found, kept in (("lr", rates, moving), ("damping", self.dampings, curved)):
            there = [found[k] if keep else None for k, keep in enumerate(kept)]
            self.vectors.remember_numbers(self._state, f"velocity_{name}", there)

    # --------------------------------------------------------------------------------------------------------- norms
    def _squares(self, norm: str, one: list[Tensor], curved: list[Tensor]) -> list[Tensor]:
        """The squared norm of each vector; `curved` is `(C + λ)` times `one`."""
        if norm == "euclidean":
            return products(one, one)
        found = products(one, curved)
        return found if norm == "damped" else self._without_damping(found, one)

    def _without_damping(self, squares: list[Tensor], one: list[Tensor]) -> list[Tensor]:
        return [c - λ * e for c, e, λ in zip(squares, products(one, one), self.dampings, strict=True)]

    def _factors(self, of: str, squares: Callable[[str], list[Tensor]]) -> list[float]:
        """What each part is multiplied with; empty if no constraint is active.

        Groups with the same constraint are bounded together, as one vector.
        """
        factors = [1.0] * len(self._constraints)
        for c in {c for c in self._constraints if c is not None and c.of == of}:
            at = [i for i, other in enumerate(self._constraints) if other == c]
            found = squares(c.norm)
            factor = c.factor(total([found[i] for i in at]))
            self.scale = min(self.scale, factor)
            for i in at:
                factors[i] = factor
        return factors if min(factors, default=1.0) < 1 else []


def _ratio(lr: Any, before: float | None) -> float:
    """What a velocity is multiplied with; adaptive coefficients have their own measure of it."""
    return float(lr) / before if before and lr is not None and not isinstance(lr, Adaptive) else 1.0


def _reads_curved(c: NormConstraint | None) -> bool:
    return c is not None and c.of == "update" and c.norm != "euclidean"
