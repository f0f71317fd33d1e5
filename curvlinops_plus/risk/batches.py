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
    if unpack := isinstance(item, Mapping) and "labels" in item:
        entries: Sequence[Any] = {key: value for key, value in item.items() if key != "labels"}, item["labels"]
    elif isinstance(item, (tuple, list)) and (len(item) == 2 or (weight is not None and len(item) > 2)):
        entries = item
    else:
        size = f" of length {len(item)}" if isinstance(item, (tuple, list)) else ""
        what = f"mapping with keys {list(item)}" if isinstance(item, Mapping) else f"{type(item).__name__}{size}"
        raise ValueError(
            f"Batch {index} is a {what}; expected a pair (X, y) or a mapping with 'labels'. For one batch, write "
            "data=[(X, y)]. Targets of several losses stand together, (X, (y1, y2)); weights of examples take "
            "EmpiricalRisk(..., weight=lambda X, y, w: w)."
        )
    X, y = (to_device(entry, device) for entry in entries[:2])
    found = None if weight is None else weight(X, y, *entries[2:])  # which may take it out of a mapping
    N = count_examples(X, y, index, batch_size_fn, unpack)
    if weight is not None:
        if not isinstance(found, Tensor) or found.shape != (N,) or not (found.isfinite() & (found >= 0)).all():
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"`weight` returned {what} for batch {index}; expected a tensor [{N}], a finite number of at least 0 "
                "for each example."
            )
        found = _usable(found.detach().to(device, wide_dtype(device)))
    return Batch(X, y, N, unpack, first, found)


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


# ------------------------------------------------------------------------------------------------- what the loss reads
def scalar_loss(value: Any, f: Tensor, loss: Any) -> Tensor:
    """What a loss returned for output `f`, if that can be differentiated.

    Raises:
        TypeError: If it is no tensor.
        ValueError: If it is no single number, or does not depend on the output.
    """
    name = f"The loss {getattr(loss, '__name__', type(loss).__name__)}"
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise (ValueError if isinstance(value, Tensor) else TypeError)(
            f"{name} returned a {came}; expected a 0-d tensor, a single number for the batch that is differentiable in "
            'the output: without .item(), with its entries averaged (reduction="mean") or added up '
            '(EmpiricalRisk(..., reduction="sum")).'
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
    logits = getattr(out, "logits", None)
    chosen = selector(out) if selector is not None else logits if isinstance(logits, Tensor) else out
    if not isinstance(chosen, Tensor):
        named = [*out] if isinstance(out, Mapping) else [f.name for f in fields(out)] if is_dataclass(out) else ""
        raise ValueError(
            f"`output` selected a {type(chosen).__name__}; expected the tensor that the loss reads."
            if selector is not None
            else f"The model returned a {type(out).__name__}{f' with fields {named}' if named else ''}. Say which "
            "tensor the loss reads, as `output=lambda o: o[0]` or `output=lambda o: o.logits`."
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
    """The same with every tensor on `device`."""
    return mapped(lambda t: _usable(t.to(device)), tree)


def copied(tree: Any) -> Any:
    """The same with copies of its tensors."""
    return mapped(_copy, tree)


def _usable(t: Tensor) -> Tensor:
    """Tensors made in inference mode can't take part in differentiation; a copy can."""
    if not t.is_inference():
        return t
    with torch.inference_mode(False):
        return t.clone()


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


def _copy(t: Tensor) -> Tensor:
    made = t.detach().clone()
    if t.requires_grad:  # `torch.func` allows no call that says it is not
        made.requires_grad_()
    vars(made).update(vars(t))  # what the user has put there, which models may read
    return made
