"""Some examples of a batch."""

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
        batch: The batch.
        examples: Numbers of the examples.
        axis: The axis that carries them; None for the first one where the sizes fit.

    Returns:
        None if no tensor of the input carries examples.
    """
    N, found = batch.num_examples, []

    def take(t: Any) -> Any:
        if isinstance(t, MutableMapping) and not isinstance(t, dict):
            picked = type(t)()
            for key, value in t.items():
                picked[key] = take(value)
            return picked
        if isinstance(t, Mapping):
            return {key: take(value) for key, value in t.items()}
        if isinstance(t, (tuple, list)):
            return type(t)(take(value) for value in t)
        if not isinstance(t, Tensor) or t.ndim == 0:
            return t
        index = torch.tensor(examples, device=t.device)
        at = axis if axis is not None else next((k for k in range(min(t.ndim, 2)) if t.shape[k] == N), None)
        if at is not None and t.ndim > at and t.shape[at] == N:
            found.append(t)
            return t.index_select(at, index)
        if t.shape[0] % N == 0 and axis in (None, 0):
            found.append(t)
            return t.unflatten(0, (N, -1)).index_select(0, index).flatten(0, 1)
        return t

    X = take(batch.X)
    return Batch(X, take(batch.y), len(examples), batch.unpack) if found else None
