"""Models of which each process has parts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

# It needs streams there, which CPUs have not.
runs = pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="models of fully_shard run on GPUs only in 2.6")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("world", "examples"), [(2, 9), (3, 11), (3, 2)])
def test_everything_of_a_model(workers: Any, world: int, examples: int) -> None:
    """Also with other numbers of batches, and in processes without data."""
    for found in workers.run(world, "fully_sharded", examples):
        wrong = {what: number for what, number in found.items() if not number < 1e-10}
        assert not wrong, wrong


@runs
@pytest.mark.parametrize("world", [2, 3])
def test_training(workers: Any, world: int) -> None:
    for found in workers.run(world, "sharded_training"):
        wrong = {what: number for what, number in found.items() if not number < 1e-10}
        assert not wrong, wrong


@pytest.mark.parametrize("world", [2, 3])
def test_vectors_in_parts(workers: Any, world: int) -> None:
    """Results are spread as the vectors are."""
    for found in workers.run(world, "spread_vectors"):
        assert max(found.values()) < 1e-12, found


def test_refused(workers: Any) -> None:
    parallel = (
        r"UnsupportedError: layer '0' \(Linear\): its parameter 'weight' is .* parallelize_module.*full_state_dict=True"
    )
    doors = ("", ", alone", ", optimizer", ", classic", ", one bias")
    words = {f"tensor parallel{door}": parallel for door in doors} | {
        "alone": r"UnsupportedError: The parameters are spread over the processes \[0, 1\].*processes=Processes\(\)",
        "optimizer": r"UnsupportedError: The parameters .* sharded by fully_shard.*DistributedDataParallel.*listen",
        "begin": r"UnsupportedError: `begin` can't watch .* fully_shard. Use `listen` or `update`",
    }
    for found in workers.run(2, "sharded_refusals"):
        assert found.keys() == words.keys()
        for name, pattern in words.items():
            assert re.search(pattern, found[name], re.DOTALL), (name, found[name])
