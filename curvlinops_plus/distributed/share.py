"""Dealing out data to processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)


def share(data: Any, rank: int, world: int) -> Any:
    """The part of one process, see `Processes.share`.

    Example:
        >>> batches = [(torch.arange(3), torch.arange(3)), (torch.arange(3, 5), torch.arange(3, 5))]
        >>> share(batches, 1, 2)
        [(tensor([1, 3]), tensor([1, 3]))]
    """
    if isinstance(data, DataLoader):
        return _share_loader(data, rank, world)
    if isinstance(data, Dataset) and not isinstance(data, Sequence) and hasattr(data, "__len__"):
        return Subset(data, range(rank, len(data), world))  # type: ignore[arg-type]
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise TypeError(
            f"`data` is a {type(data).__name__}, which can't be dealt out. Share a list of "
            "batches, a Dataset of known length or a DataLoader, or give each process its own "
            "part, and the risk `processes=`."
        )
    sizes = [_examples(item) for item in data]
    if None in sizes:
        return data[rank::world]
    # Of all examples in their order this process has those of number rank, rank + world, ...
    parts = []
    before = 0  # examples of the items so far
    for item, size in zip(data, sizes, strict=True):
        mine = slice((rank - before) % world, None, world)
        parts.append(tree_map(lambda t, mine=mine: t[mine], _tree(item)))
        before += size
    # A part has a `world`-th of each batch: so many of them together are of the usual size.
    batches = []
    for start in range(0, len(parts), world):
        batches += _joined(parts[start : start + world])
    return batches


def _tree(item: Any) -> Any:
    """A batch as a pytree: mappings of any class as a dictionary."""
    return dict(item) if isinstance(item, Mapping) else item


def _examples(item: Any) -> Any:
    """N of a batch of tensors that all have N rows, None if it is something else."""
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    if not pair and not isinstance(item, Mapping):
        return None
    leaves = tree_leaves(_tree(item))
    if not all(isinstance(t, Tensor) and t.ndim for t in leaves):
        return None
    sizes = {len(t) for t in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _joined(batches: list[Any]) -> list[Any]:
    """Small batches as one of the usual size, if they fit together: one is faster, but for rounding
    it is the same.
    """
    flat = [tree_flatten(batch) for batch in batches]
    # Batches fit together if they differ in nothing but their numbers of examples.
    kinds = [(spec, [(t.shape[1:], t.dtype, t.device) for t in leaves]) for leaves, spec in flat]
    if kinds.count(kinds[0]) < len(kinds):
        return batches
    columns = zip(*[leaves for leaves, _ in flat])
    return [tree_unflatten([torch.cat(tensors) for tensors in columns], flat[0][1])]


def _share_loader(loader: DataLoader[Any], rank: int, world: int) -> DataLoader[Any]:
    """A loader over some of the examples, with batches of the same size."""
    sampler: Any = loader.sampler
    batch_sampler = loader.batch_sampler
    shuffles = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    )
    obstacle = None
    if isinstance(loader.dataset, IterableDataset):
        obstacle = "an IterableDataset"
    elif type(sampler) is not SequentialSampler and not shuffles:
        obstacle = f"a {type(sampler).__name__}"
    elif batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        obstacle = f"batches of its own, a {type(batch_sampler).__name__}"
    elif loader.drop_last:
        obstacle = "drop_last=True"
    if obstacle is not None:
        raise ValueError(
            f"The loader has {obstacle}, and share() deals out each example once: a "
            "DistributedSampler repeats examples, which would count twice. Share a DataLoader in "
            "order or with shuffle=True and with all batches; or give each process its own part, "
            "and the risk `processes=`."
        )
    names = (
        "batch_size num_workers collate_fn pin_memory timeout worker_init_fn "
        "multiprocessing_context generator prefetch_factor persistent_workers"
    )
    options: dict[str, Any] = {name: getattr(loader, name) for name in names.split()}
    return DataLoader(share(loader.dataset, rank, world), shuffle=shuffles, **options)
