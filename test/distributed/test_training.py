"""Estimators and optimizers of several processes follow those of one."""

from __future__ import annotations

from typing import Any

import pytest

PLAIN = {"lr": 0.1, "inverse_every": 3}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("approximation", "vectors", "decay"),
    [
        ("KFAC", "mc", 0.9),
        ("KFAC", "exact", 1.0),
        ("EKFAC", "mc", 0.9),
        ("EKFAC", "exact", 1.0),
        ("FullBlock", "mc", 0.5),
    ],
)
def test_estimator(workers: Any, world: int, approximation: str, vectors: str, decay: float) -> None:
    for found in workers.run(world, "streams", approximation, vectors, decay):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wrapper", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@pytest.mark.parametrize("inverse", ["exact", "factored"])
def test_optimizer(workers: Any, world: int, wrapper: dict[str, Any], inverse: str) -> None:
    """Replicas are the same bit by bit."""
    found = workers.run(world, "train", PLAIN | {"inverse": inverse}, wrapper)
    assert all(one["values"] == found[0]["values"] for one in found)
    assert found[0]["names"] == ["0", "2"]
    assert max(one["away"] for one in found) < 1e-10, found


@pytest.mark.parametrize("wrapper", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_gradients_are_untouched(workers: Any, wrapper: dict[str, Any]) -> None:
    """Layers have the names of the model inside, whether it or the wrapper is given."""
    for found in workers.run(2, "heard", wrapper):
        assert found.keys() == {"DistributedDataParallel", "Sequential"}
        assert max(found.values()) < 1e-10, found
