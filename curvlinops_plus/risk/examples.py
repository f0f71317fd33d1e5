"""Selecting some of the examples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.risk.reading import Batch


def take_examples(batch: Batch, examples: Sequence[int]) -> Batch | None:
    """Some examples of a batch, with every tensor that carries them; None if no tensor of the input does."""
    picker = _Picker(examples, batch.num_examples)
    X = picker.pick(batch.X)
    return Batch(X, picker.pick(batch.y), len(examples), batch.unpack) if picker.found else None


class _Picker:
    """Picks examples out of tensors, at any depth."""

    def __init__(self, examples: Sequence[int], num_examples: int) -> None:
        self.examples, self.num_examples = examples, num_examples
        self.found = False  # whether any tensor carried examples

    def pick(self, tree: Any) -> Any:
        """The same structure with the examples alone."""
        if isinstance(tree, MutableMapping) and not isinstance(tree, dict):  # UserDict, BatchEncoding
            picked = type(tree)()
            picked.update({key: self.pick(value) for key, value in tree.items()})
            return picked
        if isinstance(tree, Mapping):
            return {key: self.pick(value) for key, value in tree.items()}
        if isinstance(tree, (tuple, list)):
            picked = [self.pick(value) for value in tree]
            return type(tree)(*picked) if hasattr(tree, "_fields") else type(tree)(picked)
        return self._pick_rows(tree) if isinstance(tree, Tensor) and tree.ndim else tree

    def _pick_rows(self, t: Tensor) -> Tensor:
        N, index = self.num_examples, torch.tensor(self.examples, device=t.device)
        if N in t.shape[:2]:
            self.found = True
            return t.index_select(t.shape.index(N), index)
        if t.shape[0] % N == 0:
            self.found = True
            return t.unflatten(0, (N, -1)).index_select(0, index).flatten(0, 1)
        return t
