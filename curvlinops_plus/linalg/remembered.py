"""Results that are remembered until the tensors that they were computed from change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def needs_gradient(tensors: Sequence[Tensor]) -> bool:
    """Whether derivatives may be taken of what is computed from them now."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def remember(
    memory: dict[str, tuple[Any, Any]], name: str, tensors: Sequence[Tensor] | None, compute: Callable[[], T]
) -> T:
    """The result of `compute`, which is called again only when a tensor has changed.

    Args:
        memory: Where results are kept.
        name: Of the result.
        tensors: All that it depends on; None if that is not known, then nothing is kept.
    """
    # Tensors of inference mode have no version to look at; a graph can be used only once.
    if tensors is None or needs_gradient(tensors) or any(tensor.is_inference() for tensor in tensors):
        return compute()
    state, known = [(tensor._version, tensor.data_ptr()) for tensor in tensors], memory.get(name)
    if known is not None and known[0] == state:
        return known[1]
    if torch.is_inference_mode_enabled():  # what is kept may be used where derivatives are taken
        with torch.inference_mode(False), torch.no_grad():
            value = compute()
    else:
        value = compute()
    memory[name] = state, value
    return value
