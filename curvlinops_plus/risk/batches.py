"""Reading batches in all formats that are accepted, and calling the model on them.

Accepted batches: `(X, y)` with `X` a tensor or a mapping of tensors, or one mapping that carries its `labels` (Hugging
Face).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, IterableDataset


@dataclass(frozen=True)
class Batch:
    """One mini-batch: inputs and targets on the parameters' device.

    Attributes:
        X: What the model is called with.
        unpack: Call the model as `model(**X)` rather than `model(X)`.
        first: How many examples came before in this pass.
        weight: Weights of the examples [N], in double precision; None for ones.
    """

    X: Any
    y: Any
    num_examples: int
    unpack: bool = False
    first: int = 0
    weight: Tensor | None = None


# ------------------------------------------------------------------------------------------------------------- reading
def check_data(data: Any) -> None:
    """Refuse what can't be an iterable of batches; nothing is read.

    A `Dataset` of examples would pass where an example looks like a batch: a sequence [T, C] with targets [T] like T
    examples. So no look at its items could tell, and the caller has to say what they are.

    Raises:
        TypeError: If it can't be iterated over, or is a map-style `Dataset` that doesn't say itself how.
    """
    kind = type(data)
    dataset = isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not hasattr(kind, "__iter__")
    if dataset or not (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")):
        advice = (
            "A Dataset holds single examples: wrap it, DataLoader(dataset, batch_size=...), or if its items are "
            "batches already, DataLoader(dataset, batch_size=None)."
        )
        raise TypeError(
            f"`data` is a {kind.__name__}; expected an iterable of batches (X, y): a DataLoader, or for one batch "
            f"data=[(X, y)].{' ' + advice if dataset else ''}"
        )


def require_rereadable(data: Any, reason: str, advice: str = "") -> None:
    """Refuse data that can be read only once.

    Args:
        advice: What else could be done, beginning with a comma.
    """
    if isinstance(data, Iterator):
        raise ValueError(
            f"`data` is an iterator, which can be read only once, and {reason}. Pass a list of batches or a DataLoader"
            f"{advice}."
        )


def count_examples(X: Any, y: Any, index: int, batch_size_fn: Callable[[Any], int] | None, unpack: bool) -> int:
    """N of one batch: from `batch_size_fn(X)`, the first axis of X, or the first axis that a mapping's tensors
    share.
    """
    if batch_size_fn is not None:
        return int(batch_size_fn(X))
    carriers = [X] if isinstance(X, Tensor) else [y] if unpack and isinstance(y, Tensor) and y.ndim else []
    if not carriers and isinstance(X, Mapping):
        carriers = [t for t in X.values() if isinstance(t, Tensor) and t.ndim]
    sizes = {len(t) if t.ndim else -1 for t in carriers}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"Can't tell how many examples batch {index} has: its input is a {type(X).__name__}, without a first axis "
            "that carries them. Pass `batch_size_fn`, a function of X that returns the number, for instance "
            "`batch_size_fn=lambda X: len(X[0])`."
        )
    return sizes.pop()


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    """What the model returns for a batch, which stays as it is: a model may write to its input.

    It may also differentiate by itself (forces from an energy), which needs a graph also where we need none.
    """
    X = copied(batch.X)
    try:
        return model(**X) if batch.unpack else model(X)
    except RuntimeError as error:
        if torch.is_grad_enabled() or "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return call_model(model, batch)


# --------------------------------------------------------------------------------------------------- trees of tensors
def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A tensor, mapping, list or tuple with its tensors replaced; other objects are passed through."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping) and not isinstance(tree, dict):  # UserDict, BatchEncoding
        made = copy(tree)
        for key, value in tree.items():
            made[key] = mapped(function, value)
        return made
    return tree_map_only(Tensor, function, tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """The same with every tensor on `device`, and none that was made in inference mode: it has no derivatives."""

    def placed(t: Tensor) -> Tensor:
        t = t.to(device)
        if t.is_inference():
            with torch.inference_mode(False):
                t = t.clone()
        return t

    return mapped(placed, tree)


def copied(tree: Any) -> Any:
    """The same with copies of its tensors, and what the user has put into these, which models may read."""

    def copy(t: Tensor) -> Tensor:
        made = t.detach().clone()
        if t.requires_grad:  # `torch.func` allows no call that says it is not
            made.requires_grad_()
        vars(made).update(vars(t))
        return made

    return mapped(copy, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tensor, mapping, list or tuple."""
    return [t for t in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree) if isinstance(t, Tensor)]


def take_examples(batch: Batch, examples: Sequence[int]) -> Batch | None:
    """Some examples of a batch, with every tensor that carries them.

    None if no tensor of the input does, or if one may have examples times positions on its first axis, or something
    else, as a bag of tokens or the nodes of a graph.
    """
    N, seen = batch.num_examples, set[str]()
    first, *more = examples  # one is a view, which costs a tenth

    def pick(t: Tensor) -> Tensor:
        if not t.ndim:
            return t
        if N in t.shape[:2]:
            seen.add("examples")
            axis = t.shape.index(N)
        elif len(t) % N:
            seen.update(["other"] * (len(t) != 1))
            return t
        else:
            seen.add("other")
            return pick(t.unflatten(0, (N, -1))).flatten(0, 1)
        return t.index_select(axis, torch.tensor(examples, device=t.device)) if more else t.narrow(axis, first, 1)

    X = mapped(pick, batch.X)
    clear = seen == {"examples"}
    return Batch(X, mapped(pick, batch.y), len(examples), batch.unpack) if clear else None
