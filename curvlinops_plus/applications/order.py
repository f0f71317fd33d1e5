"""Data that are read in the order in which they are stored, so that examples have numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import tensors_of
from curvlinops_plus.risk.preserve import preserve_state

#: Orders that are listed beforehand: the caller knows them.
_LISTED = (Sequence, Tensor, np.ndarray)


def require_order(risk: EmpiricalRisk) -> None:
    """Refuse data that are shuffled, where results are listed by example.

    Raises:
        ValueError: Naming what shuffles.

    Cost: nothing for lists, iterators and the usual loaders; an unknown sampler is run, and of
    other iterables the first batch is read twice.
    """
    data = risk.data
    if isinstance(data, (*_LISTED, Iterator)):
        return
    with preserve_state(risk.model, data):
        cause = _disorder(data)
    if cause:
        raise ValueError(
            f"Results are listed in the order in which examples are read, and {cause}, so number n "
            "would not be dataset[n]. Make a second loader for this one, DataLoader(dataset, "
            "batch_size=..., shuffle=False), and pass risk.with_data(loader); or read the data "
            "once, as a list of batches, list(loader)."
        )


def _disorder(data: Any) -> str:
    """The reason why the data's order is unknown; "" if it is known."""
    for loader in _loaders(data):
        if isinstance(loader.dataset, IterableDataset):
            continue
        sampler = _unordered_sampler(loader)
        if sampler is not None:
            shuffles = " (shuffle=True)" if type(sampler) is RandomSampler else ""
            return (
                f"the {type(loader).__name__} has the order of a {type(sampler).__name__}{shuffles}"
            )
    plain_loader = getattr(type(data), "__iter__", None) is DataLoader.__iter__
    if plain_loader and not isinstance(data.dataset, IterableDataset):
        return ""  # its sampler is all that matters
    before = _first_batch(data)
    again = _first_batch(data)  # random states go on between the two
    if len(before) == len(again) and all(map(_equal, before, again)):
        return ""
    return f"this {type(data).__name__} begins with another batch each time it is read"


def _loaders(data: Any, depth: int = 3) -> list[DataLoader[Any]]:
    """The data if it is a DataLoader, else those that it wraps."""
    if isinstance(data, DataLoader):
        return [data]
    if not depth:
        return []
    wrapped = [part for part in getattr(data, "__dict__", {}).values() if hasattr(part, "__iter__")]
    return [loader for part in wrapped for loader in _loaders(part, depth - 1)]


def _unordered_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler of a loader if the indices that it gives are neither listed nor 0, 1, 2, …; else
    None.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if getattr(type(sampler), "__iter__", None) is BatchSampler.__iter__:
        sampler = sampler.sampler
    if isinstance(sampler, (*_LISTED, SequentialSampler)):
        return None
    if isinstance(sampler, (RandomSampler, Iterator)):
        return sampler
    expected = 0
    for item in sampler:
        for index in item if isinstance(item, (list, tuple)) else [item]:
            if not isinstance(index, (int, np.integer)) or index != expected:
                return sampler
            expected += 1
    return None


def _first_batch(data: Any) -> list[Tensor]:
    """All tensors of the first batch."""
    batch = next(iter(data), ())
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    return [t for part in parts for t in tensors_of(part)]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are equal; NaN is equal to itself."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
