"""Which batches are looked at: those in which a model calls its layers as it did in no batch before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall

__all__ = ["batch_kind"]


def batch_kind(calls: Sequence[RecordedCall], outputs: Iterable[Tensor]) -> tuple[Any, ...]:
    """The same for two batches if a model did the same in both, as far as that can be seen.

    Which layers are called, in which order, in which state; and how many operations that autograd knows lie between
    the calls and the outputs.

    Args:
        calls: The recorded calls of a forward pass.
        outputs: What it returned.
    """
    nodes = [[_number(slot) for slot in recorded.slots] for recorded in calls]
    start = min((number for numbers in nodes for number in numbers if number is not None), default=0)
    seen = tuple(
        (
            recorded.call.use.name,
            recorded.expanded,
            tuple(number if number is None else number - start for number in numbers),
            recorded.state and (recorded.state.options, recorded.state.changes()),
        )
        for recorded, numbers in zip(calls, nodes)
    )
    return seen, tuple(f.grad_fn._sequence_nr() - start for f in outputs if f.grad_fn is not None)


def _number(slot: OutputSlot) -> int | None:
    """When the node of an output was made, counted in nodes; None for a leaf, which is no result of an operation."""
    node = None if slot.edge is None else slot.edge.node
    return None if node is None or hasattr(node, "variable") else node._sequence_nr()
