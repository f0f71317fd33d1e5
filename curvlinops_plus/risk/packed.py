"""Packed sequences: which row of the packed tensor belongs to which example.

`pack_padded_sequence` sorts sequences by length, and puts the rows of all of them that have a
first step one after the other, then those of the second step, and so on. How they were sorted is
not known to the functions that read the rows; that of their batch sizes is noted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

#: What `pack_padded_sequence` and `pad_packed_sequence` call.
PACK: Any = torch._C._VariableFunctions._pack_padded_sequence  # pyright: ignore
UNPACK: Any = torch._C._VariableFunctions._pad_packed_sequence  # pyright: ignore
_SORTS = {torch.index_select, Tensor.index_select}


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of packed sequences.

    Attributes:
        order: The sequence at each place after sorting, `[B]`.
        batch_sizes: How many sequences have each step, `[T]`, on the CPU.

    Example: the second of two sequences is the longer one.
        >>> rows = PackedRows(torch.tensor([1, 0]), torch.tensor([2, 1]))
        >>> rows.padded(torch.tensor([5.0, 7.0, 6.0]))
        tensor([[7., 0.],
                [5., 6.]])
        >>> rows.lengths
        tensor([1, 2])
    """

    order: Tensor
    batch_sizes: Tensor

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.order)

    @cached_property
    def places(self) -> Tensor:  # [M]
        """The place of each row among the `B·T` of padded sequences."""
        sizes = self.batch_sizes
        steps = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        starts = (sizes.cumsum(0) - sizes)[steps]
        sequences = torch.arange(len(steps), device="cpu") - starts
        device = self.order.device
        return self.order[sequences.to(device)] * len(sizes) + steps.to(device)

    @cached_property
    def lengths(self) -> Tensor:  # [B]
        """The number of steps of each sequence."""
        return torch.bincount(self.places // len(self.batch_sizes), minlength=len(self.order))

    def padded(self, t: Tensor, axis: int = 0) -> Tensor:  # [.., M, ..] -> [.., B, T, ..]
        """Padded sequences in their own order."""
        sizes = (self.num_sequences, len(self.batch_sizes))
        shape = [*t.shape]
        shape[axis] = sizes[0] * sizes[1]
        return t.new_zeros(shape).index_copy(axis, self.places, t).unflatten(axis, sizes)

    def unsorted(self, t: Tensor, axis: int) -> Tensor:
        """States of sorted sequences in their own order."""
        return t.index_select(axis, self.order.argsort())


class PackedOrders:
    """How sequences were sorted in one forward pass, by their batch sizes.

    Args:
        places_of: Tells what is known of where the rows of a tensor come from: indices among so
            many rows.

    Example:
        >>> from torch.nn.utils.rnn import pack_padded_sequence
        >>> orders, x = PackedOrders(), torch.ones(3, 4, 2)
        >>> index = torch.tensor([1, 0, 2])
        >>> x_sorted = x.index_select(0, index)
        >>> orders.follow(Tensor.index_select, (x, 0, index), {}, x_sorted)
        >>> packed = pack_padded_sequence(x_sorted, torch.tensor([4, 2, 1]), True)
        >>> args = (x_sorted, torch.tensor([4, 2, 1]), True)
        >>> orders.follow(PACK, args, {}, packed[:2])
        >>> orders.rows(packed.batch_sizes, 3).order
        tensor([1, 0, 2])
        >>> orders.rows(torch.tensor([3, 1]), 3) is None
        True
    """

    def __init__(self, places_of: Callable[[Tensor], Any] | None = None) -> None:
        self._places_of = places_of
        #: Tensors, of which entries along an axis were sorted: axis and indices.
        self._sorted = WeakTensorKeyDictionary()
        #: Batch sizes to the order of the sequences.
        self._orders = WeakTensorKeyDictionary()

    def follow(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Note a function that sorts sequences, or packs them."""
        if function in _SORTS and len(args) == 3:
            x, axis, index = args
            if index.ndim == 1 and len(index) == x.shape[axis]:
                before = self.sorted_on(x, axis % x.ndim)
                self._sorted[out] = (axis % x.ndim, index if before is None else before[index])
        elif function is PACK and len(args) == 3:
            x, _, batch_first = args
            self._orders[out[1]] = self._order(x, 0 if batch_first else 1)

    def note_states(self, states: Sequence[Tensor], rows: PackedRows) -> None:
        """States of sorted sequences, on axis 1."""
        for state in states:
            self._sorted[state] = (1, rows.order)

    def same(self, t: Tensor, of: Tensor) -> None:
        """A tensor stands for another one."""
        if of in self._sorted:
            self._sorted[t] = self._sorted[of]

    def sorted_on(self, t: Tensor, axis: int) -> Tensor | None:
        """How entries along an axis were sorted; None if nothing is known."""
        known = self._sorted.get(t)
        if known is None or known[0] != axis:
            return None
        return known[1]

    def _order(self, x: Tensor, axis: int) -> Tensor:
        """The order of the sequences on an axis."""
        if axis == 0 and self._places_of is not None:
            places = self._places_of(x)
            if places is not None:
                return places.index // max(1, places.total // max(1, len(x)))
        index = self.sorted_on(x, axis)
        return torch.arange(x.shape[axis], device=x.device) if index is None else index

    def rows(self, batch_sizes: Tensor, num_examples: int) -> PackedRows | None:
        """The rows of packed sequences; None if nothing is known of their order, or there are not
        as many of each example.
        """
        order = self._orders.get(batch_sizes)
        if order is None or len(order) % num_examples:
            return None
        is_order = torch.equal(order.sort().values, torch.arange(len(order), device=order.device))
        return PackedRows(order, batch_sizes) if is_order else None
