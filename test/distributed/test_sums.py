"""Several processes compute what one does from all data."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import APPROXIMATIONS
from cases import NETS as MADE

WORLDS = (1, 2, 3, 8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world", WORLDS)
def test_blocks(workers: Any, world: int) -> None:
    for approximation in APPROXIMATIONS:
        found = workers.run(world, "blocks", "mlp", approximation, "empirical")
        assert max(found) < 1e-10, (approximation, found)


@pytest.mark.parametrize(("world", "sizes", "examples"), [(2, (), 21), (2, (3, 1), 21), (3, (), 2)])
def test_groups_of_layers(workers: Any, world: int, sizes: tuple[int, ...], examples: int) -> None:
    """Also where layers share inputs in some processes, in some batches, or some processes have no examples."""
    for found in workers.run(world, "in_groups", sizes, examples):
        assert max(found.values()) < 1e-10, found


@pytest.mark.one_in(2)
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


def test_bytes(workers: Any) -> None:
    """One triangle of each factor is sent, once, the eigenvectors by those that computed them, and little else."""
    A, G = (21, 31, 31), (30, 30, 10)
    triangles = 4 * sum(d * (d + 1) // 2 for d in A + G)
    values, eigenvectors = 4 * sum(a * g for a, g in zip(A, G, strict=True)), 4 * sum(d**2 for d in A + G)
    for approximation, expected in (("KFAC", (triangles, 0)), ("EKFAC", (triangles + values, eigenvectors))):
        for apart in (False, True):  # then sums go to one process only
            for sums, decompositions, to_one, rest in workers.run(3, "traffic", approximation, apart):
                assert (to_one if apart else sums, decompositions) == expected
                assert (sums if apart else to_one) == 0
                assert rest < 2**16
    assert max(rest for *_, rest in workers.run(3, "traffic", "KFAC", False, 500)) < 2**16  # whatever the depth


def test_refused(workers: Any) -> None:
    words = {
        "Jacobian": "UnsupportedError: Jacobian can't be computed by several processes",
        "GGNFactor": "UnsupportedError: GGNFactor can't be computed by several processes",
        "ActivationHessian": "UnsupportedError: ActivationHessian can't be computed by several processes",
        "sampler": "ValueError: The loader has a DistributedSampler, .* would count twice",
        "processes": "TypeError: processes is a ProcessGroup",
        "wrapped": "CurvatureWarning: The model is wrapped by DistributedDataParallel, .*processes=None",
    }
    for found in workers.run(2, "refuses"):
        assert found.keys() == words.keys()
        for name, pattern in words.items():
            assert re.match(pattern, found[name]), found[name]


NETS = ["strided cnn", "attention", "called twice", "tied", "generic layers", "language model", "called rarely"]


@pytest.mark.parametrize("world", [2, 8])
def test_other_networks(workers: Any, world: int) -> None:
    for found in workers.run(world, "nets", [name for name in NETS if name in MADE]):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("world", [2, 3])
def test_several_losses(workers: Any, world: int, reduction: str) -> None:
    """Their relative weights are those of all data."""
    for found in workers.run(world, "several_losses", reduction):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("world", [2, 3])
def test_contiguous_parts(workers: Any, world: int) -> None:
    """Examples are numbered through the processes."""
    for found in workers.run(world, "contiguous"):
        assert max(found.values()) < 1e-10, found


def test_numbers_that_are_not_known(workers: Any) -> None:
    for found in workers.run(2, "unnumbered"):
        assert len(found) == 2
        assert all(re.search(r"shard=.contiguous.*not known here.*example_ids", words) for words in found), found
