"""Memory doesn't grow with the number of batches: resident memory of a process of its own, over 64 and 256 of them.

What is small and stays alive counts, too: it keeps the allocator from giving back what is large and was freed.

Run as a script, this file prints the largest growth in bytes of everything in `CASES`, for both numbers of batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, GGN, CurvatureEstimator, EmpiricalRisk, Hessian, MonteCarlo, curvature

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import APPROXIMATIONS

FEW, MANY = 64, 256
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the process can't measure itself")


class Batches:
    """As many batches as wanted, of which one exists at a time. Factors of 160 000 bytes get as many rows at a time."""

    def __init__(self, number: int, width: int) -> None:
        self.number, self.width = number, width

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.number):
            yield torch.randn(256, self.width, generator=generator), torch.randint(4, (256,), generator=generator)


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def of_data(what: Callable[[EmpiricalRisk], object], width: int, number: int) -> object:
    return what(EmpiricalRisk(network(width), nn.CrossEntropyLoss(), Batches(number, width)))


def of_updates(approximation: object, width: int, number: int) -> object:
    risk = EmpiricalRisk(network(width), nn.CrossEntropyLoss(), ())
    running = CurvatureEstimator(risk, approximation, vectors=MonteCarlo(seed=0), decay=0.9, damping=0.1)
    for step, batch in enumerate(Batches(number, width)):
        running.update(batch)
        if step % 10 == 0:
            running.refresh()
    return running.operator


def block(approximation: object) -> Callable[[EmpiricalRisk], object]:
    return lambda risk: curvature(risk, approximation, vectors=MonteCarlo(seed=0))


def product(kind: Callable[[EmpiricalRisk], GGN | Hessian]) -> Callable[[EmpiricalRisk], object]:
    return lambda risk: kind(risk) @ torch.ones(risk.space.dim, 2)


#: What is done, with a network as wide as its matrices allow.
CASES: dict[str, Callable[[int], object]] = {
    **{
        name: partial(of_data, block(a), 16 if name in ("FullBlock", "NearestKronecker by sweeps") else 200)
        for name, a in APPROXIMATIONS.items()
    },
    "running KFAC": partial(of_updates, APPROXIMATIONS["KFAC"], 200),
    "running EKFAC": partial(of_updates, EKFAC, 200),
    "GGN": partial(of_data, product(GGN), 200),
    "Hessian": partial(of_data, product(Hessian), 200),
    "loss and gradient": partial(of_data, lambda risk: risk.gradient_and_loss(), 200),
}


def resident(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def growth(task: Callable[[int], object], number: int) -> int:
    """By how much memory grows at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    task(number)
    return resident("VmHWM") - before


@linux
def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    printed = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert set(found) == set(CASES)
    assert {name: both for name, both in found.items() if both[1] > 1.1 * both[0] + 2**22} == {}


def main() -> None:
    from curvlinops_plus.blocks import accumulation

    accumulation.MAX_CACHE_BYTES = 0  # kept batches have a bound of their own
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name, task in CASES.items():
        task(4)  # what is loaded at first use
        found[name] = [growth(task, number) for number in (FEW, MANY)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
