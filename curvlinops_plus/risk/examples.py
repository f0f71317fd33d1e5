"""Selecting some of the examples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.risk.reading import Batch

__all__ = ["take_examples"]


def take_examples(batch: Batch, examples: Sequence[int], axis: int | None = None) -> Batch | None:
    """Some examples of a batch, with every tensor that carries them.

    Args:
        axis: The axis that carries them; None for the first one where the sizes fit.

    Returns:
        None if no tensor of the input carries examples.
    """
    picker = _Picker(examples, batch.num_examples, axis)
    X = picker.pick(batch.X)
    return Batch(X, picker.pick(batch.y), len(examples), batch.unpack) if picker.found else None


class _Picker:
    """Picks examples out of tensors, at any depth.

    Args:
        axis: The axis that carries them, None for the first one where the sizes fit.

    Attributes:
        found: Whether any tensor carried examples.
    """

    def __init__(self, examples: Sequence[int], num_examples: int, axis: int | None) -> None:
        self.examples, self.num_examples, self.axis, self.found = examples, num_examples, axis, False

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
        N, axis, index = self.num_examples, self.axis, torch.tensor(self.examples, device=t.device)
        if axis is None:
            at = next((k for k in range(min(t.ndim, 2)) if t.shape[k] == N), None)
        else:
            at = axis if t.ndim > axis and t.shape[axis] == N else None
        if at is not None:
            self.found = True
            return t.index_select(at, index)
        if t.shape[0] % N == 0 and axis in (None, 0):
            self.found = True
            return t.unflatten(0, (N, -1)).index_select(0, index).flatten(0, 1)
        return t
