"""Reading batches, outputs and targets in all formats that are accepted.

Accepted batches: `(X, y)` with `X` a tensor or a mapping of tensors, or one mapping that carries its `labels` (Hugging
Face). Accepted outputs: a tensor, an output object with `.logits`, or anything with a selector `output=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, IterableDataset

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.sampling import wide_dtype


@dataclass(frozen=True)
class Batch:
    """One mini-batch: inputs and targets on the parameters' device.

    Attributes:
        X: What the model is called with.
        unpack: Call the model as `model(**X)` rather than `model(X)`.
        first: How many examples came before in this pass.
        weight: Weights of the examples [N], in double precision where there is one; None for ones.
    """

    X: Any
    y: Any
    num_examples: int
    unpack: bool = False
    first: int = 0
    weight: Tensor | None = None


def check_data(data: Any) -> None:
    """Refuse what can't be an iterable of batches; nothing is read.

    A `Dataset` of examples would pass where an example looks like a batch: a sequence [T, C] with targets [T] like T
    examples. So no look at its items could tell, and the caller has to say what they are.

    Raises:
        TypeError: If it can't be iterated over, or is a map-style `Dataset` that doesn't say itself how.
    """
    kind = type(data)
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(
            f"`data` is a {kind.__name__}; expected an iterable of batches (X, y): a DataLoader, or for one batch "
            "data=[(X, y)]."
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not hasattr(kind, "__iter__"):
        raise TypeError(
            f"`data` is a {kind.__name__}, a Dataset, whose items are single examples; expected an iterable of batches "
            "(X, y). Wrap it: DataLoader(dataset, batch_size=...). If its items are batches already: "
            "DataLoader(dataset, batch_size=None)."
        )


def is_iterator(data: Any) -> bool:
    """Whether data can be read only once."""
    return isinstance(data, Iterator)


def require_rereadable(data: Any, reason: str, advice: str = "") -> None:
    """Refuse data that can be read only once.

    Args:
        advice: What else could be done, beginning with a comma.
    """
    if is_iterator(data):
        raise ValueError(
            f"`data` is an iterator, which can be read only once, and {reason}. Pass a list of batches or a DataLoader"
            f"{advice}."
        )


def to_device(tree: Any, device: torch.device) -> Any:
    """Every tensor of a tensor, mapping, list or tuple on `device`; other objects are passed through."""
    if isinstance(tree, Tensor):
        return _usable(tree if tree.device == device else tree.to(device))
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
    if not t.is_inference():
        return t
    with torch.inference_mode(False):
        return t.clone()


def read_batch(
    item: Any,
    index: int,
    device: torch.device,
    batch_size_fn: Callable[[Any], int] | None,
    weight: Callable[..., Any] | None = None,
    first: int = 0,
) -> Batch:
    """Split what the data loader gave into inputs and targets, and count its examples; `first` came before.

    Raises:
        ValueError: If it is neither a pair nor a mapping with `labels`, its examples can't be counted, or `weight`
            gives something else than N finite numbers of at least 0.
    """
    if isinstance(item, Batch):  # was read before
        return item
    X, y, *rest = _entries(item, index, weight is not None)
    unpack = not isinstance(item, (tuple, list))
    X, y = to_device(X, device), to_device(y, device)
    found = None if weight is None else weight(X, y, *rest)  # which may take it out of a mapping
    N = count_examples(X, y, index, batch_size_fn, unpack)
    return Batch(X, y, N, unpack, first, None if weight is None else _checked_weights(found, N, index, device))


def _entries(item: Any, index: int, more: bool) -> Sequence[Any]:
    """Input and target of one item of the data, and `more` if it may have that."""
    if isinstance(item, (tuple, list)) and (len(item) == 2 or (more and len(item) > 2)):
        return item
    if isinstance(item, Mapping):
        if "labels" not in item:
            raise ValueError(
                f"Batch {index} is a mapping with keys {list(item)}; expected a pair (X, y) or a mapping with 'labels'."
            )
        return {key: value for key, value in item.items() if key != "labels"}, item["labels"]
    what = f"{type(item).__name__} of length {len(item)}" if hasattr(item, "__len__") else type(item).__name__
    hint = " For one batch, write data=[(X, y)]." if isinstance(item, Tensor) else ""
    if isinstance(item, (tuple, list)) and len(item) > 2:
        hint = (
            " Targets of several losses stand together: (X, (y1, y2)). For weights of examples: "
            "EmpiricalRisk(..., weight=lambda X, y, w: w)."
        )
    raise ValueError(f"Batch {index} is a {what}; expected a pair (X, y) or a mapping with 'labels'.{hint}")


def _checked_weights(found: Any, N: int, index: int, device: torch.device) -> Tensor:
    """The weights of the examples of one batch."""
    if not isinstance(found, Tensor) or found.shape != (N,) or found.is_complex():
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"`weight` returned {what} for batch {index}; expected a tensor [{N}], a number per example.")
    found = found.detach().to(device, wide_dtype(device))
    if not bool((found.isfinite() & (found >= 0)).all()):
        raise ValueError(
            f"`weight` returned {float(found.min()):g} to {float(found.max()):g} for batch {index}; weights of "
            "examples are finite and at least 0."
        )
    return _usable(found)


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
            "the number, for instance `batch_size_fn=lambda X: len(X[0])`."
        )
    return sizes.pop()


def _name_of(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def scalar_loss(value: Any, f: Tensor, loss: Any) -> Tensor:
    """What a loss returned for output `f`, if that can be differentiated.

    Raises:
        TypeError: If it is no tensor.
        ValueError: If it is no single number, or does not depend on the output.
    """
    name = f"The loss {_name_of(loss)}"
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} returned a {type(value).__name__}; expected a 0-d tensor that is differentiable in the model's "
            "output. Compute it with torch's functions, without .item() or float()."
        )
    if value.numel() != 1:
        raise ValueError(
            f"{name} returned a tensor of shape {list(value.shape)}; expected a single number for the batch, a 0-d "
            'tensor. Average its entries (reduction="mean") or add them up (EmpiricalRisk(..., reduction="sum")).'
        )
    if torch.is_grad_enabled() and f.requires_grad and not value.requires_grad:
        raise ValueError(
            f"{name} does not depend on the model's output in a differentiable way, so it has no curvature. Does it "
            "detach the output, convert it (.item(), .numpy()), round it, or compute under torch.no_grad()?"
        )
    return value


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


def require_numbers(outputs: Iterable[Tensor]) -> None:
    """Refuse outputs without any number, and complex ones: derivatives of their parts would be mixed up."""
    for f in outputs:
        if f.is_complex():
            raise UnsupportedError(
                f"The model returned a tensor of shape {list(f.shape)}, {f.dtype}; expected real ones. Give the loss "
                "real and imaginary parts, output=lambda o: torch.view_as_real(o), or let the model return those."
            )
        if f.numel() == 0:
            raise ValueError(f"The model returned a tensor of shape {list(f.shape)}, which has no numbers.")


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
        N = self.num_examples
        if N in t.shape[:2]:
            self.found = True
            return self._select(t, t.shape.index(N))
        self.unclear |= len(t) != 1
        return self._select(t.unflatten(0, (N, -1)), 0).flatten(0, 1) if t.shape[0] % N == 0 else t

    def _select(self, t: Tensor, axis: int) -> Tensor:
        first, *more = self.examples  # one is a view, which costs a tenth
        return t.index_select(axis, torch.tensor(self.examples, device=t.device)) if more else t.narrow(axis, first, 1)


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
    copied = t.detach().clone()
    if t.requires_grad:  # `torch.func` allows no call that says it is not
        copied.requires_grad_()
    vars(copied).update(vars(t))  # what the user has put there, which models may read
    return copied
