"""Several processes compute what one does from all data."""

from __future__ import annotations

from typing import Any

import pytest
from cases import APPROXIMATIONS

WORLDS = (1, 2, 3, 8)


@pytest.mark.parametrize("world", WORLDS)
def test_blocks(workers: Any, world: int) -> None:
    for approximation in APPROXIMATIONS:
        found = workers.run(world, "blocks", "mlp", approximation, "empirical")
        assert max(found) < 1e-10, (approximation, found)


@pytest.mark.parametrize("world", WORLDS)
def test_vectors(workers: Any, world: int) -> None:
    """Random ones are the same whatever the number of processes, and the batches."""
    for found in workers.run(world, "vectors", "mlp"):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("name", ["mlp", "attention", "strided cnn"])
def test_exact_operators(workers: Any, world: int, name: str) -> None:
    for found in workers.run(world, "exact", name):
        assert max(found.values()) < 1e-10, found
