"""What layers received in one sweep, kept for the next one up to a given amount of memory.

A second sweep over the same data sends the same vectors (draws depend on the seed alone), so that layers receive the
same inputs and gradients. Keeping a few megabytes of them is cheaper than a forward and a backward pass. Of layers with
many positions, such as first convolutions, gradients of each example are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk import Layer, LayerBatch, Totals
from curvlinops_plus.risk.batches import Batch, tensors_of

# The default memory for what stays between sweeps. On small networks the second sweep is what costs time, on large ones
# eigendecompositions and memory count.
KEPT_BYTES = 2**24


class SweepCache:
    """Batches of layers. All of them are dropped when they become too large, or when one was modified in place.

    What lies in the memory of the data is copied: a loader may fill it anew for each batch, and version counters don't
    notice what NumPy writes.

    Args:
        max_bytes: The largest memory that they may hold. A tensor that several layers read counts once.
        layers: The layers whose batches are kept.
        squares: Those of which nothing but `squared_grads` is read again.
    """

    def __init__(self, max_bytes: int, layers: Iterable[Layer], squares: Iterable[Layer] = ()) -> None:
        self.max_bytes, self.layers, self.squares = max_bytes, set(layers), set(squares)
        self._batches: list[LayerBatch] | None = []
        self._totals: list[Totals] = []
        self._storages: set[int] = set()  # their addresses
        self._bytes = 0
        self._versions: list[tuple[Tensor, int]] = []
        self._of_data: set[int] | None = set()  # addresses of the mini-batch's storages; None: any may be its
        self._copies: dict[Any, Tensor] = {}  # of its tensors

    def begin(self, batch: Batch) -> None:
        """A mini-batch comes."""
        self._copies, self._of_data = {}, None
        if all(isinstance(x, (Tensor, bool, int, float, str, type(None))) for x in tree_leaves([batch.X, batch.y])):
            tensors = tensors_of([batch.X, batch.y])
            self._of_data = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}

    def add(self, batch: LayerBatch) -> None:
        """Keep a batch, if it is of one of the layers."""
        if self._batches is not None and batch.layer in self.layers:
            for part in batch.for_squares() if batch.layer in self.squares else (batch,):
                self._add(part)

    def _add(self, batch: LayerBatch) -> None:
        if self._batches is None:
            return
        # The sweep removes the gradients from its own objects.
        calls = [
            replace(call, args=tuple(map(self._own, call.args)), kwargs=self._own(dict(call.kwargs)))
            for call in batch.calls
        ]
        mask, weights = self._own(batch.mask), self._own(batch.example_weights)
        tensors = tree_leaves([(call.args, call.kwargs, call.grads) for call in calls] + [mask, weights, batch.summed])
        for t in tensors:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._bytes += storage.nbytes()
                self._versions.append((t, t._version))
        kept = replace(batch, calls=calls, mask=mask, example_weights=weights, _shared={}, of_batch=None)
        self._batches.append(kept)
        if self._bytes > self.max_bytes:
            self._batches, self._totals, self._storages, self._versions, self._copies = None, [], set(), [], {}

    def _own(self, tree: Any) -> Any:
        """Tensors outside of the data's memory, or copies."""
        if isinstance(tree, Tensor):
            return self._copy(tree)
        return (
            tree if tree is None or (isinstance(tree, dict) and not tree) else tree_map_only(Tensor, self._copy, tree)
        )

    def _copy(self, t: Tensor) -> Tensor:
        if self._of_data is not None and t.untyped_storage().data_ptr() not in self._of_data:
            return t
        key = t.data_ptr(), t.shape, t.stride(), t.dtype
        if key not in self._copies:
            span = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())) if t.numel() else 0
            if self._bytes + span * t.element_size() > self.max_bytes:
                return t  # all are dropped
            # In the same layout, in which products round alike.
            self._copies[key] = t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride(), 0)
        return self._copies[key]

    def end_of_batch(self, batch_totals: Totals) -> None:
        """Note the totals of a mini-batch."""
        if self._batches is not None:
            self._totals.append(batch_totals)

    def has(self, layers: Iterable[Layer]) -> bool:
        """Whether everything that these layers received is here, unmodified."""
        if self._batches is None or any(t._version != version for t, version in self._versions):
            return False
        return set(layers) <= {batch.layer for batch in self._batches}

    def can_replay(self, layers: Iterable[Layer]) -> bool:
        """Whether it has what these layers received, also if that is nothing: a process may have no examples."""
        nothing = self._batches is not None and not self._batches and not self._totals
        return nothing or self.has(layers)

    def replay(
        self, consume: Callable[[LayerBatch], None], after_batch: Callable[[Totals], None], desc: str | None
    ) -> None:
        """Show everything once more, as the sweep did.

        Args:
            consume: Called with each batch of each layer.
            after_batch: Called with the totals of each mini-batch.
            desc: Text of a progress bar; None for no bar.
        """
        assert self._batches is not None
        for batch in tqdm(self._batches, desc=desc, disable=desc is None):
            with plain_mode(batch.layer.device.type):
                consume(replace(batch, calls=[replace(call) for call in batch.calls], _shared={}))
        for batch_totals in self._totals:
            after_batch(batch_totals)
