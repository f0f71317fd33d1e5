"""Estimators and optimizers of several processes follow those of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from curvlinops_plus import Exact, LevenbergMarquardt

PLAIN = {"lr": 0.1, "inverse_every": 3}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
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
    """Of eight processes some have no examples in some steps."""
    for found in workers.run(world, "streams", approximation, vectors, decay):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_first_batches_without_terms(workers: Any, approximation: str, reduction: str) -> None:
    """EKFAC's bases follow from the first batches with terms, also where no process has had any before."""
    for found in workers.run(2, "late_terms", approximation, reduction):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_reads_that_another_process_finds(workers: Any, approximation: str) -> None:
    for found in workers.run(2, "late_reads", approximation):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize(("world", "options"), [(2, {"vectors": Exact()}), (3, {"damping": 0.01})], ids=str)
@pytest.mark.parametrize("name", ["attention", "few rows", "dead units", "equal outputs"])
def test_bases_of_few_rows(workers: Any, world: int, options: dict[str, Any], name: str) -> None:
    """What is computed in a null space, or of repeated eigenvalues, does not depend on how it was rounded."""
    for found in workers.run(world, "few_rows", name, options):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("decay", [0.8, 1.0])
@pytest.mark.parametrize("approximation", ["KFAC", "FullBlock"])
def test_processes_that_call_other_layers(workers: Any, approximation: str, decay: float) -> None:
    """A layer that some processes call in a step is decayed, and divided by the examples of all of them."""
    for found in workers.run(2, "routes", approximation, decay, True):
        assert max(found.values()) < 1e-10, found
    for found in workers.run(2, "routes", approximation, decay, False):
        if decay == 1:
            assert max(found.values()) < 1e-10, found
        else:
            assert re.search(r"(?s)layer 'heads.*by some of the processes only.*estimator.settle\(\)", found["said"])


def test_training_of_processes_that_call_other_layers(workers: Any) -> None:
    for found in workers.run(2, "routed_training"):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wrapper", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@pytest.mark.parametrize("inverse", ["exact", "factored"])
def test_optimizer(workers: Any, world: int, wrapper: dict[str, Any], inverse: str) -> None:
    """Replicas are the same bit by bit."""
    found = workers.run(world, "train", PLAIN | {"inverse": inverse}, wrapper)
    assert all(one["values"] == found[0]["values"] for one in found)
    assert found[0]["names"] == ["0", "2", "0.weight", "0.bias", "2.weight", "2.bias"]
    assert max(one["away"] for one in found) < 1e-10, found


ADAPTIVE = {"lr": "adaptive", "momentum": "adaptive", "damping": LevenbergMarquardt(0.1, interval=2)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [PLAIN, ADAPTIVE, {"lr": 0.1, "reject": 2.0, "check_loss": True}], ids=str)
def test_unequal_parts(workers: Any, options: dict[str, Any], reduction: str) -> None:
    """The number of a loss belongs to its part of the data; what it makes of the curvature is one number for all."""
    found = workers.run(3, "train", options, {}, 1, reduction)
    assert all(one["values"] == found[0]["values"] for one in found)
    assert max(one["away"] for one in found) < 1e-10, found


@pytest.mark.parametrize("wrapper", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_gradients_are_untouched(workers: Any, wrapper: dict[str, Any]) -> None:
    """Layers have the names of the model inside, whether it or the wrapper is given."""
    for found in workers.run(2, "heard", wrapper):
        assert found.keys() == {"DistributedDataParallel", "Sequential"}
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_states_go_on_elsewhere(workers: Any, approximation: str, tmp_path: Path) -> None:
    """A state of two processes, in one and in three."""
    states = workers.run(2, "half_way", approximation, str(tmp_path))
    assert states[0] == states[1]
    for world in (1, 3):
        for found in workers.run(world, "second_half", approximation, str(tmp_path), states[0]):
            assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_decompositions_are_shared_out(workers: Any, approximation: str) -> None:
    """Each is computed by one process, and all have the same bits."""
    (alone, _), *_ = workers.run(1, "decompositions", approximation)
    found = workers.run(3, "decompositions", approximation)
    assert sum(count for count, _ in found) == alone == 4
    assert max(count for count, _ in found) == 2
    assert all(result == found[0][1] for _, result in found)


@pytest.mark.parametrize("options", [{}, {"reject": 2.0}], ids=str)
def test_a_batch_of_one_process_is_not_finite(workers: Any, options: dict[str, Any]) -> None:
    """All refuse or reject that step, and go on together."""
    found = workers.run(2, "diverging", PLAIN | options)
    assert found[0] == found[1]
    said, values = found[0]
    bad = said.pop(3)
    assert bad is True if options else re.search(r"^NumericsError: The gradient of .* is not finite", bad)
    assert said == [False] * 7
    assert all(value == value for value in values)
