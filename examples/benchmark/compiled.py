"""Time of compiled products, divided by that of the eager ones of this package, and after how many
batches the compiler has paid for itself.

    python examples/benchmark/compiled.py
    python examples/benchmark/compiled.py mlp --repeats 99

One thread, float32. Both take turns; figures are ratios of medians of CPU time.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import Task, cpu_time, figure, interleaved, ratio, table
from torch import nn
from workloads import Workload, images, language, perceptron

from curvlinops_plus import GGN, Empirical, EmpiricalRisk, Hessian


def cnn() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return Workload("cnn", model, images(32, 10, 32, 32))


#: Name to a network with one batch.
MAKERS: dict[str, Callable[[], Workload]] = {
    "tiny": lambda: Workload("tiny", *perceptron(16, 32, 32, 5, N=64)),
    "mlp": lambda: Workload("mlp", *perceptron(784, 256, 128, 10, N=128)),
    "cnn": cnn,
    "gpt": lambda: Workload("gpt", *language(2, 64, 4, 32, 128, N=8, batch=8)),
}


def operators(risk: EmpiricalRisk, compiled: bool) -> dict[str, Task]:
    """What is timed, by name."""
    v = torch.randn(risk.space.dim)
    G, H = (kind(risk, compile=compiled) for kind in (GGN, Hessian))
    F = GGN(risk, Empirical(), compile=compiled)

    def product(A: Any) -> Task:
        return lambda: A @ v

    return {
        "GGN": product(G),
        "empirical Fisher": product(F),
        "Hessian": product(H),
        "gradient and loss": G.gradient_and_loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="default: all")
    parser.add_argument("--repeats", type=int, default=31)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in given.names or MAKERS:
        torch.manual_seed(0)
        work = MAKERS[name]()
        risk = EmpiricalRisk(work.model, work.loss, work.data)
        eager, compiled = operators(risk, False), operators(risk, True)
        ratios = []
        for task, run in compiled.items():
            eager[task]()
            start = time.perf_counter()
            run()
            price = time.perf_counter() - start
            contestants = {"eager": eager[task], "compiled": run}
            seconds = interleaved(contestants, given.repeats, cpu_time)
            ratios.append(ratio(seconds["compiled"], seconds["eager"]))
            if task == "GGN":
                saved = seconds["eager"] - seconds["compiled"]
                pays = f"{price / saved:,.0f}" if saved > 0 else "–"
        rows.append([name, *ratios, f"{figure(price)} s", pays])
    columns = ["network", *compiled, "first call", "GGN pays after products"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
