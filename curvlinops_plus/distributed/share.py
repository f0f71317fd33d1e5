"""Dealing out data to processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset

# Which examples, or items, a process has, of how many.
Part = Callable[[int], slice]


def share(data: Any, rank: int, world: int, contiguous: bool = False) -> Any:
    """The part of one process, see `Processes.share`.

    Example:
        >>> batches = [(torch.arange(3), torch.arange(3)), (torch.arange(3, 5), torch.arange(3, 5))]
        >>> share(batches, 1, 2)
        [(tensor([1, 3]), tensor([1, 3]))]
        >>> share(batches, 1, 2, contiguous=True)
        [(tensor([2]), tensor([2])), (tensor([3, 4]), tensor([3, 4]))]
    """

    def part(size: int) -> slice:
        if contiguous:
            return slice(size * rank // world, size * (rank + 1) // world)
        return slice(rank, size, world)

    if isinstance(data, DataLoader):
        return _share_loader(data, part)
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"`data` is a {type(data).__name__}, an IterableDataset, which can't be dealt out: give each process its "
            "own part, and the risk `processes=`."
        )
    if isinstance(data, Dataset) and not isinstance(data, Sequence):
        return _subset(data, part)
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise TypeError(
            f"`data` is a {type(data).__name__}, which can't be dealt out. Share a list of batches, a Dataset or a "
            "DataLoader, or give each process its own part, and the risk `processes=`."
        )
    size = number_of_examples(data)
    if size is None:
        return data[part(len(data))]
    return _piece(data, part(size)) if contiguous else _every(data, rank, world)


def _piece(data: Sequence[Any], piece: slice) -> list[Any]:
    """The examples of a piece, in batches of their own."""
    parts, before = [], 0
    for item in data:
        parts.append(_rows(item, slice(max(piece.start - before, 0), max(piece.stop - before, 0))))
        before += _examples(item) or 0
    return [item for item in parts if _examples(item)]


def _every(data: Sequence[Any], rank: int, world: int) -> list[Any]:
    """Every `world`-th example, those of as many batches together."""
    parts, before = [], 0
    for item in data:
        parts.append(_rows(item, slice((rank - before) % world, None, world)))
        before += _examples(item) or 0
    return [batch for start in range(0, len(parts), world) for batch in _joined(parts[start : start + world])]


def number_of_examples(data: Any) -> int | None:
    """The number of examples of a list of batches, or of a loader that reads each example once; None if not known."""
    if isinstance(data, DataLoader):
        whole = data.batch_size is not None and not data.drop_last and not isinstance(data.dataset, IterableDataset)
        return len(data.sampler) if whole and isinstance(data.sampler, Sized) else None
    if not isinstance(data, Sequence):
        return None
    sizes = [_examples(item) for item in data]
    return None if None in sizes else sum(size for size in sizes if size)


def _subset(data: Any, part: Part) -> Subset[Any]:
    if not hasattr(data, "__len__"):
        raise TypeError(f"`data` is a {type(data).__name__} without a length, so it can't be dealt out.")
    return Subset(data, range(len(data))[part(len(data))])


def _examples(item: Any) -> int | None:
    """N of a batch of tensors that all have N rows, None if it is something else."""
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    leaves = tree_leaves(dict(item) if isinstance(item, Mapping) else item) if pair or isinstance(item, Mapping) else []
    if not leaves or not all(isinstance(t, Tensor) and t.ndim for t in leaves):
        return None
    sizes = {t.shape[0] for t in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _rows(item: Any, cut: slice) -> Any:
    """Some examples of a batch."""
    return tree_map(lambda t: t[cut], dict(item) if isinstance(item, Mapping) else item)


def _joined(batches: list[Any]) -> list[Any]:
    """Small batches as one of the usual size, if they fit together: one is faster, but for rounding it is the same."""
    flat = [tree_flatten(batch) for batch in batches]
    like = [(spec, [(t.shape[1:], t.dtype, t.device) for t in leaves]) for leaves, spec in flat]
    if any(one != like[0] for one in like):
        return batches
    return [tree_unflatten([torch.cat(ts) for ts in zip(*(leaves for leaves, _ in flat))], flat[0][1])]


def _share_loader(loader: DataLoader[Any], part: Part) -> DataLoader[Any]:
    """A loader over some of the examples, with batches of the same size."""
    data = loader.dataset
    if isinstance(data, IterableDataset):
        raise TypeError(
            "The loader's data set is an IterableDataset, which can't be dealt out: give each process a loader of its "
            "own part, and the risk `processes=`."
        )
    sampler = loader.sampler
    kind = type(sampler).__name__
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if type(sampler) is not SequentialSampler and not shuffles:
        why = " It repeats examples to make parts even, and those would count twice." if "Distributed" in kind else ""
        raise ValueError(
            f"The loader has a {kind}, and share() deals out the data itself.{why} Share a DataLoader without a "
            "sampler, in order or with shuffle=True; or give each process its own part, and the risk `processes=`."
        )
    if type(loader.batch_sampler) not in (torch.utils.data.BatchSampler, type(None)):
        raise ValueError(
            f"The loader has batches of its own, a {type(loader.batch_sampler).__name__}; share() deals out examples. "
            "Share a DataLoader with a batch size."
        )
    if loader.drop_last:
        raise ValueError(
            "The loader has drop_last=True: each process would leave out other examples than one process alone. Say "
            "drop_last=False; batches may have different sizes."
        )
    options: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "shuffle": shuffles,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return DataLoader(_subset(data, part), **options)
