"""What layers received in one sweep, kept for the next one up to a given amount of memory.

A second sweep over the same data sends the same vectors (draws depend on the seed alone), so that layers receive the
same inputs and gradients. Keeping a few megabytes of them is cheaper than a forward and a backward pass. Of layers with
many positions, such as first convolutions, gradients of each example are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk import Layer, LayerBatch, Totals

# The default memory for what stays between sweeps. On small networks the second sweep is what costs time, on large ones
# eigendecompositions and memory count.
KEPT_BYTES = 2**24


class SweepCache:
    """Batches of layers. All of them are dropped when they become too large, or when one was modified in place.

    For data in lists, which stay where they are: a loader may fill one memory for all batches.

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

    def add(self, batch: LayerBatch) -> None:
        """Keep a batch, if it is of one of the layers."""
        if self._batches is not None and batch.layer in self.layers:
            for part in batch.for_squares() if batch.layer in self.squares else (batch,):
                self._add(part)

    def _add(self, batch: LayerBatch) -> None:
        if self._batches is None:
            return
        calls = [replace(call) for call in batch.calls]  # the sweep removes the gradients from its own objects
        tensors = tree_leaves([(call.args, dict(call.kwargs), call.grads) for call in calls])
        tensors += [batch.mask, batch.example_weights, batch.summed]
        for t in tensors:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._bytes += storage.nbytes()
                self._versions.append((t, t._version))
        self._batches.append(replace(batch, calls=calls, _shared={}))
        if self._bytes > self.max_bytes:
            self._batches, self._totals, self._storages, self._versions = None, [], set(), []

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
