"""Showing one batch to accumulators by a forward pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, Totals, Vectors
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.sweep import RecordedPasses

# Shows a batch to a consumer, with vectors that are drawn from the given random numbers; as often as it is called.
Show = Callable[[Consumer, Draws], Totals]


@dataclass(frozen=True)
class PassStart:
    """What a forward pass begins with, so that another one can begin with the same.

    Attributes:
        buffers: Modules, and names and copies of buffers in them.
    """

    random: RandomState
    buffers: Sequence[tuple[nn.Module, str, Tensor]] = ()

    @classmethod
    def now(cls, model: nn.Module | None = None) -> PassStart:
        """The state of now, with the buffers of a model if one is given."""
        held = () if model is None else model.modules()
        buffers = [(m, name, b.detach().clone()) for m in held for name, b in m._buffers.items() if b is not None]
        return cls(RandomState.now(), buffers)

    @classmethod
    def in_short(cls, device: torch.device) -> PassStart:
        """The state of now of PyTorch's generators alone, where another pass is hardly ever needed: fetching all takes
        as long as a small layer does. A model that depends on more has another output then, and is refused for it.
        """
        return cls(RandomState.now(device))

    def restore(self) -> None:
        """Begin with the same; inside `preserve_state`, which brings the model's own buffers back."""
        self.random.restore()
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer.clone()


@dataclass(frozen=True)
class BatchPass:
    """A batch that is shown in a training loop, where two evaluations of the model need not agree."""

    risk: EmpiricalRisk
    layers: Sequence[Layer]
    vectors: Vectors
    weights: LossWeights
    batch: Batch

    def run(
        self, start: PassStart, add: Callable[[Show], None], check: Callable[[Sequence[Tensor]], None] | None = None
    ) -> None:
        """Call `add` in a pass that leaves the model, its buffers and random state unchanged.

        Args:
            add: Called once.
            check: Called with what the losses read.
        """
        passes = RecordedPasses(self.risk, self.layers, self.vectors, self.weights, repeatable=False)
        with preserve_state(self.risk.model, self.risk.data), passes.hooked():

            def show(consume: Consumer, draws: Draws) -> Totals:
                if not self.batch.num_examples:  # a step of other processes
                    return Totals()
                start.restore()  # a batch that is shown twice has the same dropout
                return passes.observe(self.batch, draws, consume, check)

            add(show)
