"""What a pass over data counts, and what several losses weigh by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from curvlinops_plus.risk.losses import Heads

__all__ = ["Shares", "Totals", "UnevenError"]


@dataclass
class Totals:
    """What one sweep saw.

    Attributes:
        examples: N over all batches.
        terms: Loss terms over all batches, N·R.
        loss_count: What PyTorch's mean reduction divides the sum of all terms by.
        loss: Sum of the un-reduced loss; of several losses the weighted sum.
        called: Layers that ran.
        reached: Layers that a gradient reached.
        counts: Of several losses, what each one's mean divides by. `terms` and `loss_count` are the first mean's then.
        losses: Of several losses, each one's un-reduced sum.
        shares: Of several losses, their shares in what was sent back (see `heads.py`); empty if nothing was.
    """

    examples: int = 0
    terms: int = 0
    loss_count: Tensor | float = 0.0
    loss: Tensor | float = 0.0
    called: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    counts: tuple[Tensor | float, ...] = ()
    losses: tuple[Tensor | float, ...] = ()
    shares: tuple[float, ...] = ()

    def clash(self, other: Totals) -> str | None:
        """Why statistics of these and other totals must not be added, None if they may."""
        if not self.shares or not other.shares or _same(self.shares, other.shares):
            return None
        return (
            f"Statistics of several losses can't be added: their shares are {_words(self.shares)} here and "
            f"{_words(other.shares)} there, since their means are over other proportions of terms. Compute them on the "
            "union of the data."
        )

    def add(self, other: Totals) -> None:
        """Add another batch's totals.

        Raises:
            ValueError: If several losses had other shares there.
        """
        if problem := self.clash(other):
            raise ValueError(problem)
        self.examples += other.examples
        self.terms += other.terms
        self.loss_count = self.loss_count + other.loss_count
        self.loss = self.loss + other.loss
        self.called |= other.called
        self.reached |= other.reached
        if other.counts:
            self.counts, self.losses = _sums(self.counts, other.counts), _sums(self.losses, other.losses)
            self.shares = self.shares or other.shares

    def detached(self) -> Totals:
        """The same without a graph behind the loss."""
        return replace(self, loss=_detached(self.loss), losses=tuple(map(_detached, self.losses)))


class UnevenError(ValueError):
    """Shares of losses that one batch can't tell."""


class Shares:
    """The shares of losses during a pass over data.

    Args:
        heads: The losses.
        num_data: As in `EmpiricalRisk`.
        whole: Totals of the data set, if they are known; else each batch must have the shares of the first one.
        single: Whether the first batch is the whole data set.
    """

    def __init__(self, heads: Heads, num_data: int | None, whole: Totals | None = None, single: bool = False) -> None:
        self.heads, self.num_data, self.whole, self.single = heads, num_data, whole, single
        self._found = None if whole is None else heads.shares(whole, num_data)
        self._counts: list[float] = []

    def of(self, part: Totals) -> tuple[float, ...]:
        """The shares, as far as one batch can tell.

        Raises:
            UnevenError: If it can't.
        """
        if self._found is not None and (self.whole is not None or self.single):
            return self._found
        if self.heads.constant or self.single:
            self._found = self.heads.shares(part, self.num_data)
            return self._found
        if self.heads.mixed:
            raise UnevenError(
                f"Losses with reduction {[head.reduction for head in self.heads]} for the outputs {self.heads.keys} "
                "weigh by the size of the whole data set, which is not known from batches that are seen once. Give all "
                'losses the same reduction ("sum" is "mean" with the divisor in the weight), or use curvature(risk, '
                "...) over data that can be read twice."
            )
        counts = [float(count) for count in part.counts]
        if all(count > 0 for count in counts):
            found = self.heads.shares(part, self.num_data)
            self._found, self._counts = self._found or found, self._counts or counts
            if all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(found, self._found)):
                return self._found
        before = f", and {_proportion(self._counts)} before" if self._counts else ""
        raise UnevenError(
            f"The means of the losses for {self.heads.keys} are over {_proportion(counts)} terms in this batch"
            f"{before}. "
            "Their weights belong to the whole data set, which can't be known from batches that are seen once: use "
            "curvature(risk, ...) over data that can be read twice, batches with the same proportion, or "
            'reduction="sum" for all losses with the divisors in the weights. (For another stream make a new '
            "EmpiricalRisk.)"
        )

    def fit(self, totals: Totals) -> bool:
        """Whether these were the shares of the data that was seen."""
        if self.heads.constant or self.whole is None:
            return True
        found = self.heads.shares(totals, self.num_data)
        return all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(found, self._found or ()))

    def changing(self) -> str:
        """What to say if passes don't agree."""
        return (
            f"The numbers of terms that count for the losses of {self.heads.keys} differ from pass to pass, so the "
            "data change: is there random masking or augmentation? Give data that are the same each time."
        )


def _detached(loss: Tensor | float) -> Tensor | float:
    return loss.detach() if isinstance(loss, Tensor) else loss


def _sums(one: tuple[Tensor | float, ...], other: tuple[Tensor | float, ...]) -> tuple[Tensor | float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True)) if one else other


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other))


def _words(shares: tuple[float, ...]) -> str:
    return " : ".join(f"{share:.4g}" for share in shares)


def _proportion(counts: Sequence[float]) -> str:
    return " : ".join(f"{count:g}" for count in counts)
