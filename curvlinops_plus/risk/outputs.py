"""Reading what the user's model and data give us: batches, outputs and targets of many forms, into one.

Accepted batches: `(X, y)` with `X` a tensor or a mapping of tensors, or one mapping that carries its `labels` (Hugging
Face). Accepted outputs: a tensor, an output object with `.logits`, or anything with a selector `output=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Batch", "naming_dtypes", "read_batch", "select_output", "to_device"]


@dataclass(frozen=True)
class Batch:
    """One mini-batch: inputs and targets on the parameters' device.

    Attributes:
        X: What the model is called with.
        y: Targets.
        num_examples: N.
        unpack: Call the model as `model(**X)` rather than `model(X)`.
    """

    X: Any
    y: Any
    num_examples: int
    unpack: bool = False


def to_device(tree: Any, device: torch.device) -> Any:
    """Every tensor of a tensor, mapping, list or tuple on `device`; other objects are passed through."""
    if isinstance(tree, Tensor):
        return _usable(tree.to(device))
    if isinstance(tree, MutableMapping) and not isinstance(tree, dict):  # UserDict, BatchEncoding
        if callable(move := getattr(tree, "to", None)):
            return move(device)
        moved = type(tree)()
        for key, value in tree.items():
            moved[key] = to_device(value, device)
        return moved
    return tree_map_only(Tensor, lambda t: _usable(t.to(device)), tree)


def _usable(t: Tensor) -> Tensor:
    """Tensors made in inference mode can't take part in differentiation; a copy can."""
    return t.clone() if t.is_inference() else t


def read_batch(item: Any, index: int, device: torch.device, batch_size_fn: Callable[[Any], int] | None) -> Batch:
    """Split what the data loader gave into inputs and targets, and count its examples.

    Raises:
        ValueError: If it is neither a pair nor a mapping with `labels`, or its examples can't be counted.
    """
    unpack = False
    if isinstance(item, Mapping):
        if "labels" not in item:
            raise ValueError(
                f"Batch {index} is a mapping with keys {list(item)}; expected a pair (X, y) or a mapping with 'labels'."
            )
        X, y = {key: value for key, value in item.items() if key != "labels"}, item["labels"]
        unpack = True
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        X, y = item
    else:
        what = f"{type(item).__name__} of length {len(item)}" if hasattr(item, "__len__") else type(item).__name__
        hint = " For one batch, write data=[(X, y)]." if isinstance(item, Tensor) else ""
        if isinstance(item, (tuple, list)) and len(item) > 2:
            hint = " Targets of several losses stand together: (X, (y1, y2))."
        raise ValueError(f"Batch {index} is a {what}; expected a pair (X, y) or a mapping with 'labels'.{hint}")
    return Batch(to_device(X, device), to_device(y, device), count_examples(X, y, index, batch_size_fn, unpack), unpack)


def count_examples(X: Any, y: Any, index: int, batch_size_fn: Callable[[Any], int] | None, unpack: bool) -> int:
    """N of one batch: from `batch_size_fn(X)`, the first axis of X, or the first axis that a mapping's tensors
    share.
    """
    if batch_size_fn is not None:
        return int(batch_size_fn(X))
    if isinstance(X, Tensor):
        if X.ndim == 0:
            raise ValueError(f"The input of batch {index} is a 0-d tensor; its first axis should carry the examples.")
        return X.shape[0]
    if unpack and isinstance(y, Tensor) and y.ndim:
        return y.shape[0]
    sizes = {t.shape[0] for t in (X.values() if isinstance(X, Mapping) else ()) if isinstance(t, Tensor) and t.ndim}
    if len(sizes) != 1:
        raise ValueError(
            f"Can't tell how many examples batch {index} has: its input is a {type(X).__name__}. Pass "
            "`batch_size_fn`, a function of X that returns "
            f"the number, for instance `batch_size_fn=lambda X: len(X['x'])`."
        )
    return sizes.pop()


def select_output(out: Any, selector: Callable[[Any], Any] | None) -> tuple[Tensor, bool]:
    """The tensor that the loss reads, and whether its classes are on the last axis (Hugging Face logits).

    Raises:
        ValueError: If the output is no tensor and nothing says which part of it is meant.
    """
    chosen = selector(out) if selector is not None else out
    logits = getattr(out, "logits", None)
    if selector is None and isinstance(logits, Tensor):
        chosen = logits
    if not isinstance(chosen, Tensor):
        if selector is not None:
            raise ValueError(f"`output` selected a {type(chosen).__name__}; expected the tensor that the loss reads.")
        raise ValueError(
            f"The model returned a {type(out).__name__}{_parts(out)}. Say which tensor the loss reads, for "
            f"instance `output=lambda o: {_hint(out)}`."
        )
    return chosen, chosen is logits


def _parts(out: Any) -> str:
    if isinstance(out, Mapping):
        return f" with fields {list(out)}"
    if isinstance(out, (tuple, list)):
        return f" of length {len(out)}"
    return f" with fields {[f.name for f in fields(out)]}" if is_dataclass(out) else ""


def _hint(out: Any) -> str:
    if isinstance(out, Mapping) and out:
        return f"o[{next(iter(out))!r}]"
    return "o[0]" if isinstance(out, (tuple, list)) else "o.logits"


@contextmanager
def naming_dtypes(batch: Batch, params: Mapping[str, Tensor]) -> Iterator[None]:
    """If a forward pass fails and inputs and parameters have different dtypes, say so beside the model's own error."""
    try:
        yield
    except RuntimeError as error:
        given = {t.dtype for t in tree_leaves(_plain(batch.X)) if isinstance(t, Tensor) and t.is_floating_point()}
        own = {p.dtype for p in params.values()}
        if given and not given <= own:
            raise TypeError(
                f"The model failed on an input of dtype {_dtypes(given)}; its parameters have {_dtypes(own)}. Convert "
                f"the data or the model. Its own message: {error}"
            ) from error
        raise


def _plain(X: Any) -> Any:
    return dict(X) if isinstance(X, Mapping) else X


def _dtypes(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
