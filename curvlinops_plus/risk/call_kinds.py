"""Which batches are looked at: those in which a model calls its layers as it did in no batch before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall

#: How many rows a tensor has for each example: one, axes of the input that have as many places, or a number.
Rows = int | tuple[Any, ...]


def batch_kind(calls: Sequence[RecordedCall], outputs: Iterable[Tensor], rows: Sequence[Rows]) -> tuple[Any, ...]:
    """The same for two batches if a model did the same in both, as far as that can be seen.

    Which layers are called, in which order, in which state, with rows of examples in which of their inputs; how many
    operations that autograd knows lie between the calls and the outputs; and rows.

    Args:
        rows: Of each call, see `rows_per_example`.
    """
    nodes = [[_number(slot) for slot in recorded.slots] for recorded in calls]
    start = min((number for numbers in nodes for number in numbers if number is not None), default=0)
    seen = tuple(
        (
            recorded.call.use.name,
            recorded.expanded,
            tuple(number if number is None else number - start for number in numbers),
            state and (state.options, state.changes()),
            carry_rows(recorded),
        )
        for recorded, numbers, state in zip(calls, nodes, map(RecordedCall.seen_state, calls))
    )
    return seen, tuple(rows), tuple(f.grad_fn._sequence_nr() - start for f in outputs if f.grad_fn is not None)


def rows_per_example(calls: Sequence[RecordedCall], batch: Batch) -> list[Rows]:
    """How many rows each call returned for an example, as axes of the input where these say it.

    A number that changes from batch to batch, as the length of sequences, is the same axis in each of them.
    """
    N = batch.num_examples
    numbers = [_rows(recorded.slots[0], N) if recorded.slots else 1 for recorded in calls]
    if all(number == 1 for number in numbers):
        return [*numbers]
    tensors = [t for t in tree_leaves(batch.X) if isinstance(t, Tensor)]
    names = {number: tuple(_axes(tensors, number, N)) or number for number in {*numbers} - {1}}
    return [names.get(number, 1) for number in numbers]


def are_rows_unclear(rows: Sequence[Rows], batch: Batch) -> bool:
    """Whether rows may belong to other examples in every batch.

    If no axis of the input says how many there are, and the input has integers or Booleans, as masks, indices and
    lengths are.
    """
    if all(number == 1 or isinstance(number, tuple) for number in rows):
        return False
    return any(isinstance(t, Tensor) and not t.is_floating_point() for t in tree_leaves(batch.X))


def _rows(slot: OutputSlot, N: int) -> int:
    """Rows for an example; 1 if the user says which rows are whose."""
    return 1 if slot.fold is not None or slot.order is not None else slot.shape[slot.axis] // N


def carry_rows(recorded: RecordedCall) -> tuple[bool, ...]:
    """Which inputs of a module count as rows of examples, by their size alone.

    A table for all examples does if a batch happens to have as many.
    """
    return tuple(axis is not None for axis in recorded.call.in_axes or ())


def _axes(tensors: Sequence[Tensor], number: int, N: int) -> Iterator[tuple[int, int, int]]:
    """Axes of the input, next to each other, that have as many places as an example has rows."""
    for index, t in enumerate(tensors):
        for axis in [axis for axis, size in enumerate(t.shape[:2]) if size == N]:
            sizes = [*t.shape[:axis], *t.shape[axis + 1 :]]
            for start in range(len(sizes)):
                for stop in range(start + 1, len(sizes) + 1):
                    if prod(sizes[start:stop]) == number:
                        yield index, start, stop


def _number(slot: OutputSlot) -> int | None:
    """When the node of an output was made, counted in nodes; None for a leaf, which is no result of an operation."""
    node = None if slot.edge is None else slot.edge.node
    return None if node is None or hasattr(node, "variable") else node._sequence_nr()
