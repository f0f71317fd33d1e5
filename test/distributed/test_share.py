"""Dealing out data: each example is in exactly one part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from curvlinops_plus.distributed import Alone
from curvlinops_plus.distributed.processes import schedule
from curvlinops_plus.distributed.share import share

WORLD = 3


def parts(data: Any, world: int = WORLD) -> list[Any]:
    return [share(data, rank, world) for rank in range(world)]


def test_batches_are_dealt_out_by_examples() -> None:
    """Part `r` has examples r, r + 3, ... of all, in the order of the batches."""
    X = torch.arange(11)
    data = [(x, {"a": x, "b": 2 * x}) for x in X.split(4)]
    for rank, part in enumerate(parts(data)):
        assert torch.equal(torch.cat([x for x, _ in part]), X[rank::WORLD])
        assert torch.equal(torch.cat([y["b"] for _, y in part]), 2 * X[rank::WORLD])
    mappings = [{"tokens": x, "labels": x} for x in X.split(4)]
    assert torch.equal(
        torch.cat([item["labels"] for item in share(mappings, 1, WORLD)]), X[1::WORLD]
    )


def test_other_sequences_are_dealt_out_by_items() -> None:
    assert parts(list(range(7))) == [[0, 3, 6], [1, 4], [2, 5]]
    graphs = [(torch.rand(3, 2), torch.rand(1)) for _ in range(4)]  # rows are not examples
    assert share(graphs, 0, WORLD) == graphs[::3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders(shuffle: bool) -> None:
    data = TensorDataset(torch.arange(11))
    seen: list[int] = []
    for part in parts(DataLoader(data, batch_size=2, shuffle=shuffle)):
        assert part.batch_size == 2
        seen += [int(x) for (batch,) in part for x in batch]
    assert sorted(seen) == list(range(11))
    assert len(share(DataLoader(data), 0, 20)) == 1
    assert len(share(DataLoader(data), 19, 20)) == 0
    assert isinstance(share(data, 1, WORLD), Subset)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield torch.ones(1)


class Endless(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> Any:
        return torch.ones(1)


def test_what_cannot_be_dealt_out() -> None:
    data = TensorDataset(torch.arange(4))
    for given, error, words in (
        (Stream(), TypeError, "is a Stream, which can't be dealt out"),
        (DataLoader(Stream()), ValueError, "has an IterableDataset, and share"),
        (iter([1]), TypeError, "is a list_iterator, which can't be dealt out"),
        (Endless(), TypeError, "a Dataset of known length"),
        (
            DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4)),
            ValueError,
            "has a WeightedRandomSampler",
        ),
        (
            DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
            ValueError,
            "batches of its own, a list",
        ),
        (DataLoader(data, batch_size=3, drop_last=True), ValueError, "drop_last=True"),
    ):
        with pytest.raises(error, match=words):
            share(given, 0, WORLD)


def test_alone() -> None:
    data = [(torch.ones(2), torch.ones(2))]
    assert Alone().share(data) is data
    assert Alone().numbers(5, 2) == range(5, 7)


def test_schedule_is_within_four_thirds_of_the_mean_or_the_longest() -> None:
    costs = [float(d) ** 3 for d in (768, 3072, 768, 2304, 768, 768, 64, 3072, 768, 2304)]
    for workers in (1, 2, 3, 8, 20):
        owners = schedule(costs, workers)
        load = [
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == w)
            for w in range(workers)
        ]
        assert max(load) <= 4 / 3 * max(sum(costs) / workers, max(costs))
        assert owners == schedule(costs, workers)
