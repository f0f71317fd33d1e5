"""What a pass over data counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

__all__ = ["Totals"]


@dataclass
class Totals:
    """What one sweep saw.

    Attributes:
        examples: N over all batches.
        terms: Loss terms over all batches, N·R.
        loss_count: What PyTorch's mean reduction divides the sum of all terms by.
        loss: Sum of the un-reduced loss.
        called: Layers that ran.
        reached: Layers that a gradient reached.
    """

    examples: int = 0
    terms: int = 0
    loss_count: Tensor | float = 0.0
    loss: Tensor | float = 0.0
    called: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)

    def add(self, other: Totals) -> None:
        """Add another batch's totals."""
        self.examples += other.examples
        self.terms += other.terms
        self.loss_count = self.loss_count + other.loss_count
        self.loss = self.loss + other.loss
        self.called |= other.called
        self.reached |= other.reached

    def detached(self) -> Totals:
        """The same without a graph behind the loss."""
        return replace(self, loss=self.loss.detach() if isinstance(self.loss, Tensor) else self.loss)
