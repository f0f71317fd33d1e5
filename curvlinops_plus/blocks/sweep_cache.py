"""What layers saw in one sweep, kept for the next one, as long as it is little.

A second sweep over the same data sends the same vectors (draws depend on the seed alone) and sees the same inputs and
gradients. While these fit into a few megabytes, keeping them costs less than a forward and a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from curvlinops_plus.risk import LayerBatch, Totals

__all__ = ["Kept"]


class Kept:
    """Batches of layers, dropped for good when they become too large or somebody writes into them.

    Args:
        max_bytes: The largest memory that they may hold. A tensor that several layers read counts once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._seen: list[tuple[int, LayerBatch]] | None = []
        self._parts: list[Totals] = []
        self._storages: set[int] = set()  # their addresses
        self._bytes = 0
        self._versions: list[tuple[Tensor, int]] = []

    def add(self, index: int, seen: LayerBatch) -> None:
        """Keep what layer number `index` saw."""
        if self._seen is None:
            return
        calls = [replace(call) for call in seen.calls]  # whoever hands them over takes gradients out of them
        tensors = tree_leaves([(call.args, dict(call.kwargs), call.grads) for call in calls] + [seen.mask])
        for t in tensors:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._bytes += storage.nbytes()
                self._versions.append((t, t._version))
        self._seen.append((index, replace(seen, calls=calls, _shared={})))
        if self._bytes > self.max_bytes:
            self.drop()

    def end_of_batch(self, part: Totals) -> None:
        """Note the totals of a batch."""
        if self._seen is not None:
            self._parts.append(part)

    def drop(self) -> None:
        """Keep nothing any more."""
        self._seen, self._parts, self._storages, self._versions = None, [], set(), []

    def has(self, layers: Iterable[int]) -> bool:
        """Whether all that these layers saw is here, as it was."""
        if self._seen is None or any(t._version != version for t, version in self._versions):
            return False
        return set(layers) <= {index for index, _ in self._seen}

    def replay(
        self, consume: Callable[[int, LayerBatch], None], after_batch: Callable[[Totals], None], desc: str | None
    ) -> None:
        """Show everything once more, as the sweep did.

        Args:
            consume: Called with a layer's number and what it saw.
            after_batch: Called with the totals of each batch.
            desc: Text of a progress bar over what was kept; None for no bar.
        """
        assert self._seen is not None
        for index, seen in tqdm(self._seen, desc=desc, disable=desc is None):
            device = seen.layer.device
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
                consume(index, replace(seen, calls=[replace(call) for call in seen.calls], _shared={}))
        for part in self._parts:
            after_batch(part)
