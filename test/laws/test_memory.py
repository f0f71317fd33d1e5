"""Memory doesn't grow with the number of batches.

Resident memory is measured, in a process of its own, over 8 and 72 batches. What is small and stays
alive counts, too: it keeps the allocator from giving back what is large and was freed. Run as a
script, this file prints the largest growth in bytes of everything in `CASES`, for both numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    CurvatureEstimator,
    EmpiricalRisk,
    Hessian,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.risk import Vectors
from test.cases import APPROXIMATIONS
from test.helpers import seeded
from test.nets import tanh_net

FEW, MANY = 8, 72  # what is kept of each batch, its inputs at least, are 6.5 MB more
WIDTH = 200  # a batch has 102 400 bytes, a factor 160 000


class Batches:
    """As many batches as wanted, of which one exists at a time."""

    def __init__(self, number: int, width: int, classes: int = 4, examples: int = 128) -> None:
        self.number, self.width, self.classes, self.examples = number, width, classes, examples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = seeded()
        for _ in range(self.number):
            X = torch.randn(self.examples, self.width, generator=generator)
            yield X, torch.randint(self.classes, (self.examples,), generator=generator)


def network(width: int, classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return tanh_net(width, width, classes)


def of_data(what: Callable[[EmpiricalRisk], object], width: int, number: int) -> object:
    return what(EmpiricalRisk(network(width), nn.CrossEntropyLoss(), Batches(number, width)))


def of_updates(approximation: object, width: int, number: int) -> object:
    loss = nn.CrossEntropyLoss()
    risk = EmpiricalRisk(network(width), loss, ())
    running = CurvatureEstimator(
        risk, approximation, vectors=MonteCarlo(seed=0), decay=0.9, damping=0.1
    )
    for step, batch in enumerate(Batches(number, width)):
        if step % 2:
            running.update(batch)
        else:
            with running.listen(batch):
                value = loss(risk.model(batch[0]), batch[1])
            value.backward()
        if step % 10 == 0:
            running.refresh()
    return running.operator


def block(
    approximation: object, vectors: Vectors | None = None
) -> Callable[[EmpiricalRisk], object]:
    # Kept batches have a bound of their own.
    return lambda risk: curvature(
        risk, approximation, vectors=vectors or MonteCarlo(seed=0), max_kept_bytes=0
    )


def product(kind: Callable[[EmpiricalRisk], GGN | Hessian]) -> Callable[[EmpiricalRisk], object]:
    return lambda risk: kind(risk) @ torch.ones(risk.space.dim, 2)


#: What is done, with a network as wide as its matrices allow.
CASES: dict[str, Callable[[int], object]] = {
    **{
        name: partial(of_data, block(APPROXIMATIONS[name]), WIDTH)
        for name in ("KFAC", "EKFAC", "DiagonalBlock", "TNT")
    },
    "FullBlock": partial(of_data, block(APPROXIMATIONS["FullBlock"]), 16),
    "running EKFAC": partial(of_updates, EKFAC, WIDTH),
    "GGN": partial(of_data, product(GGN), WIDTH),
    "Hessian": partial(of_data, product(Hessian), WIDTH),
}


def resident(name: str) -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return 1024 * int(line.split()[1])


def growth(task: Callable[[int], object], number: int) -> int:
    """By how much memory grows at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    task(number)
    return resident("VmHWM") - before


def taken() -> dict[str, tuple[int, int]]:
    """What each task takes for few and for many batches, in bytes; measured in a process of its
    own.
    """
    # What is freed goes back to the system at once, so that nothing is hidden by what was there
    # before.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    printed = subprocess.run(
        [sys.executable, "-m", "test.laws.test_memory"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(printed.stdout.splitlines()[-1])


def bound(few: int, many: int) -> bool:
    return many <= 1.1 * few + 2**22


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the process can't measure itself"
)
def test_memory_does_not_grow_with_batches() -> None:
    found = taken()
    assert set(found) == set(CASES)
    assert {name: both for name, both in found.items() if not bound(*both)} == {}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[int]] = {}
    for name, task in CASES.items():
        task(4)  # what is loaded at first use
        few, many = (growth(task, number) for number in (FEW, MANY))
        if not bound(
            few, many
        ):  # what the allocator takes by chance is there once; what grows, each time
            many = min(many, growth(task, MANY))
        found[name] = [few, many]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
