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
    parts, before = [], 0
    for item, size in zip(data, sizes, strict=True):
        cut = slice((rank - before) % world, None, world)
        parts.append(
            tree_map(lambda t, cut=cut: t[cut], dict(item) if isinstance(item, Mapping) else item)
        )
        before += size or 0
    return [
        batch
        for start in range(0, len(parts), world)
        for batch in _joined(parts[start : start + world])
    ]


def _examples(item: Any) -> int | None:
    """N of a batch of tensors that all have N rows, None if it is something else."""
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    leaves = (
        tree_leaves(dict(item) if isinstance(item, Mapping) else item)
        if pair or isinstance(item, Mapping)
        else []
    )
    if not leaves or not all(isinstance(t, Tensor) and t.ndim for t in leaves):
        return None
    sizes = {t.shape[0] for t in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _joined(batches: list[Any]) -> list[Any]:
    """Small batches as one of the usual size, if they fit together: one is faster, but for rounding
    it is the same.
    """
    flat = [tree_flatten(batch) for batch in batches]
    like = [(spec, [(t.shape[1:], t.dtype, t.device) for t in leaves]) for leaves, spec in flat]
    if any(one != like[0] for one in like):
        return batches
    return [
        tree_unflatten([torch.cat(ts) for ts in zip(*(leaves for leaves, _ in flat))], flat[0][1])
    ]


def _share_loader(loader: DataLoader[Any], rank: int, world: int) -> DataLoader[Any]:
    """A loader over some of the examples, with batches of the same size."""
    sampler, own = loader.sampler, loader.batch_sampler
    shuffles = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    )
    told = (
        "an IterableDataset" if isinstance(loader.dataset, IterableDataset) else "",
        f"a {type(sampler).__name__}"
        if type(sampler) is not SequentialSampler and not shuffles
        else "",
        f"batches of its own, a {type(own).__name__}"
        if type(own) not in (BatchSampler, type(None))
        else "",
        "drop_last=True" if loader.drop_last else "",
    )
    if why := next(filter(None, told), None):
        raise ValueError(
            f"The loader has {why}, and share() deals out each example once: a DistributedSampler "
            "repeats examples, which would count twice. Share a DataLoader in order or with "
            "shuffle=True and with all batches; or give each process its own part, and the risk "
            "`processes=`."
        )
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
    names += ("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers")
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    return DataLoader(share(loader.dataset, rank, world), shuffle=shuffles, **options)
