"""What a sweep over the data carries along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from curvlinops_plus.risk import Draws, Totals
from curvlinops_plus.risk.loss_passes import LossWeights


@dataclass
class Reading:
    """One time that the data are read.

    Attributes:
        weights: The relative weights of the losses.
        draws: Random numbers, which go on with the examples of each batch.
        totals: Of the batches so far.
    """

    weights: LossWeights
    draws: Draws
    totals: Totals = field(default_factory=Totals)


#: From columns `X [n, K]` (None for a dense matrix), what the batches add up to.
AddUp: TypeAlias = Callable[[Any, Reading], Tensor]
