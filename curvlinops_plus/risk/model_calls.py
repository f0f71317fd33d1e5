"""Calling the user's model on a batch so that the batch stays as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.autograd_graph import REENTRANT
from curvlinops_plus.risk.process_state import exclusive
from curvlinops_plus.risk.reading import Batch


class ModelCalls:
    """Calls of a model, which remember two habits of it.

    A model may write to its input (`nn.ReLU(inplace=True)` comes first, or `x.requires_grad_()`): batches are read
    more than once and belong to the user, so the first call gets a copy, and all others if that was written to. And it
    may differentiate by itself (forces from an energy), which needs a graph also where we need none.
    """

    def __init__(self) -> None:
        self._writes: bool | None = None  # whether it writes to its input; None before the first call
        self._differentiates = False
        self._looked = False  # whether its graph was looked at for gaps

    def expect_from(self, chain: nn.Module) -> None:
        """Take note before the first call that PyTorch's own modules write to nothing, unless they work in place."""
        if self._writes is None and not any(getattr(module, "inplace", False) for module in chain.modules()):
            self._writes = False

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """What the model returns for a batch.

        Raises:
            UnsupportedError: If it writes to its input, which it did not in its first call, or if reentrant activation
                checkpointing leaves parameters out of the graph.
        """
        if torch.is_grad_enabled():
            if self._looked:
                return self._call(model, batch)
            with _without_gaps():
                out = self._call(model, batch)
            self._looked = True
            return out
        if not self._differentiates:
            try:
                return self._call(model, batch)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
        with torch.enable_grad():
            out = self._call(model, batch)
        self._differentiates = True
        return out

    def _call(self, model: Callable[..., Any], batch: Batch) -> Any:
        given = copied(batch.X) if self._writes is not False else batch.X
        tensors = tensors_of(given)
        before = [_mark(t) for t in tensors]
        try:
            return model(**given) if batch.unpack else model(given)
        finally:
            written = before != [_mark(t) for t in tensors]
            if self._writes is None:
                self._writes = written or not all(map(_equal, tensors, tensors_of(batch.X)))
            elif written and not self._writes:
                self._writes = True
                raise UnsupportedError(
                    "The model wrote to its input in place, which it did not do in its first call. This batch of the "
                    "data may have changed. Let the model write to a copy (`x = x.clone()`), or do without the "
                    "in-place operation."
                )


@contextmanager
def _without_gaps() -> Iterator[None]:
    """Refuse a checkpointed segment whose input needs no gradient: its parameters have none then, and nothing fails."""
    with exclusive(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="None of the inputs have requires_grad=True")
        try:
            yield
        except UserWarning as warning:
            raise UnsupportedError(REENTRANT) from warning


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tensor, mapping, list or tuple."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for t in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree) if isinstance(t, Tensor)]


def _mark(t: Tensor) -> tuple[Any, ...]:
    """What changes with a tensor when it is written to."""
    return None if t.is_inference() else t._version, t.requires_grad, t.shape


def _equal(one: Tensor, other: Tensor) -> bool:
    # `x.data` is written to without telling the version counter.
    return one.layout != torch.strided or one.is_nested or torch.equal(one, other)


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
