"""What a pass over the data counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from curvlinops_plus.distributed import Alone
from curvlinops_plus.likelihood.sampling import wide_dtype

Number = Tensor | float


@dataclass
class Totals:
    """What one batch, or all batches of a pass, contained.

    Attributes:
        examples: N.
        terms: Loss terms of the reference loss, N·R.
        loss_count: What PyTorch's mean reduction of the reference loss divides by; of all losses if all are sums.
        called: Indices of the layers that ran.
        reached: Indices of the layers that a gradient reached.
        counts: For each loss, what its mean divides by.
        losses: For each loss, its un-reduced sum.
        weights: For each loss, its relative weight in the vectors (see `LossWeights`); empty if there were none.
        steps: Of a stream, the sum of the weights of its steps: what totals that are added are parts of, too.
    """

    examples: int = 0
    terms: int = 0
    loss_count: Number = 0.0
    called: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    counts: tuple[Number, ...] = ()
    losses: tuple[Number, ...] = ()
    weights: tuple[float, ...] = ()
    steps: float = 0.0

    def mismatch(self, other: Totals) -> str | None:
        """Why statistics of these and other totals must not be added, None if they may."""
        mine, theirs = self.weights, other.weights
        if mine == theirs or not mine or not theirs:
            return None
        if len(mine) == len(theirs) and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(mine, theirs)):
            return None
        return (
            f"Statistics of several losses can't be added: their relative weights are {_ratio(mine)} here and "
            f"{_ratio(theirs)} there, since their means are over other proportions of terms. Compute them on the "
            "union of the data."
        )

    def add(self, other: Totals) -> None:
        """Add another batch's totals.

        Raises:
            ValueError: If several losses had other weights there.
        """
        if problem := self.mismatch(other):
            raise ValueError(problem)
        self.examples += other.examples
        self.terms += other.terms
        self.loss_count = _sum(self.loss_count, other.loss_count)
        self.called |= other.called
        self.reached |= other.reached
        self.weights = self.weights or other.weights
        self.steps = max(self.steps, other.steps)
        if other.counts:
            self.counts = tuple(map(_sum, self.counts, other.counts)) if self.counts else other.counts
            self.losses = tuple(map(_sum, self.losses, other.losses)) if self.losses else other.losses

    def decay(self, factor: float) -> None:
        """Multiply what statistics are divided by."""
        self.loss_count = self.loss_count * factor  # others may have the same tensor
        self.steps *= factor

    def over(self, processes: Alone, error: Exception | None = None) -> Totals:
        """The totals of all processes. Collective.

        Args:
            processes: The processes.
            error: What this process has noticed, which is raised in all.

        Raises:
            ValueError: If there are no examples, or several losses have other weights in other processes.
        """
        if processes.world == 1:
            if error is not None:
                raise error
            return self
        told = processes.gather((self.plain(), error))
        if noticed := [each for _, each in told if each is not None]:
            raise error or noticed[0]
        whole = Totals.union(totals for totals, _ in told)
        if not whole.examples:
            raise ValueError(f"`data` has no examples in any of the {processes.world} processes.")
        return whole

    def plain(self) -> Totals:
        """The same without tensors."""
        counts, losses = tuple(map(float, self.counts)), tuple(map(float, self.losses))
        return replace(self, loss_count=float(self.loss_count), counts=counts, losses=losses)

    @classmethod
    def union(cls, parts: Iterable[Totals]) -> Totals:
        """The totals of all parts together."""
        whole = cls()
        for totals in parts:
            whole.add(totals)
        return whole

    def detached(self) -> Totals:
        """The same without a graph behind the losses, in double precision."""
        counts, losses = tuple(map(_wide, self.counts)), tuple(map(_wide, self.losses))
        return replace(self, loss_count=_wide(self.loss_count), counts=counts, losses=losses)

    def of_stream(self) -> Totals:
        """What a stream of batches adds up, in double precision, as a state has it that is resumed."""
        return replace(self, loss_count=_wide(self.loss_count), counts=(), losses=())


def _wide(x: Number) -> Number:
    return x.detach().to(wide_dtype(x.device)) if isinstance(x, Tensor) else x


def _sum(one: Number, other: Number) -> Number:
    # A zero added to a tensor takes as long as a small layer does.
    if type(one) is float and one == 0:
        return other
    return one if type(other) is float and other == 0 else one + other


def _ratio(weights: tuple[float, ...]) -> str:
    return " : ".join(f"{weight:.4g}" for weight in weights)
