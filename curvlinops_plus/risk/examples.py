"""The tensors of a batch: copies of them, some of their examples, and the model's output for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlinops_plus.risk.reading import Batch


def take_examples(batch: Batch, examples: Sequence[int]) -> Batch | None:
    """Some examples of a batch, with every tensor that carries them.

    None if no tensor of the input does, or if one may have examples times positions on its first axis, or something
    else, as a bag of tokens or the nodes of a graph.
    """
    inputs, targets = (_Picker(examples, batch.num_examples) for _ in range(2))
    X = inputs.pick(batch.X)
    clear = inputs.found and not inputs.unclear
    return Batch(X, targets.pick(batch.y), len(examples), batch.unpack) if clear else None


class _Picker:
    """Picks examples out of tensors, at any depth."""

    def __init__(self, examples: Sequence[int], num_examples: int) -> None:
        self.examples, self.num_examples = examples, num_examples
        self.found = False  # whether any tensor carried examples
        self.unclear = False  # whether any has other rows

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
        self.unclear |= len(t) != 1
        if t.shape[0] % N == 0:
            return t.unflatten(0, (N, -1)).index_select(0, index).flatten(0, 1)
        return t


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    """What the model returns for a batch, which stays as it is: a model may write to its input.

    It may also differentiate by itself (forces from an energy), which needs a graph also where we need none.
    """

    def call() -> Any:
        given = copied(batch.X)
        return model(**given) if batch.unpack else model(given)

    try:
        return call()
    except RuntimeError as error:
        if torch.is_grad_enabled() or "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return call()


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tensor, mapping, list or tuple."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for t in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree) if isinstance(t, Tensor)]


def copied(tree: Any) -> Any:
    """Copies of the tensors in a tensor, mapping, list or tuple; other objects are passed through."""
    if isinstance(tree, Tensor):
        return _copy(tree)
    if isinstance(tree, MutableMapping) and not isinstance(tree, dict):  # UserDict, BatchEncoding
        made = copy(tree)
        for key, value in tree.items():
            made[key] = copied(value)
        return made
    return tree_map_only(Tensor, _copy, tree)


def _copy(t: Tensor) -> Tensor:
    copied = t.detach().clone().requires_grad_(t.requires_grad)
    vars(copied).update(vars(t))  # what the user has put there, which models may read
    return copied
