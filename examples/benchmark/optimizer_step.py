"""Time of a step of the K-FAC optimizer, by part, beside plain training and the least that it can
take.

    python examples/benchmark/optimizer_step.py --quick
    python examples/benchmark/optimizer_step.py --workloads cnn transformer --turns 9

A gradient pass is a forward and a backward pass of the same batch, without an optimizer. Plain
passes and all optimizers train in turns; figures are medians of CPU time of one thread, per step.
The least is a gradient pass and, in plain PyTorch, the backward pass to the layers' outputs and
half of the multiplications of the Gram matrices (see `limits.py`), over the steps between two
updates of the statistics; decompositions of all factors, over the steps between two refreshes; and
in every step the matrix products that apply the inverse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from limits import Limits, decaying
from measure import Task, cpu_time, figure, interleaved, table
from torch import nn
from workloads import Workload, digits, language, perceptron

from curvlinops_plus import KFACOptimizer

T = TypeVar("T")

PERIOD = 10  # steps that are timed together: they have one refresh

#: Name to options of the optimizer.
OPTIONS: dict[str, dict[str, Any]] = {
    "statistics in every step": {},
    "every 10": {"statistics_every": 10},
    "every 10, factored": {"statistics_every": 10, "inverse": "factored"},
    "every 10, adaptive": {"statistics_every": 10, "lr": "adaptive", "momentum": "adaptive"},
}


def autoencoder() -> Workload:
    widths = [64, 48, 24, 8, 24, 48, 64]
    model = nn.Sequential(
        *(nn.Tanh() if isinstance(m, nn.ReLU) else m for m in perceptron(*widths, N=1)[0])
    )
    X = torch.rand(500, 64)
    return Workload("autoencoder", model, [(X, X)], loss=nn.MSELoss())


#: Name to a network with one batch.
MAKERS: dict[str, Callable[[], Workload]] = {
    "autoencoder": autoencoder,
    "mlp": lambda: Workload("mlp", *perceptron(784, 512, 512, 10, N=128)),
    "cnn": lambda: Workload("cnn", *digits(256)),
    "transformer": lambda: Workload("transformer", *language(2, 64, 4, 32, 32, N=32, batch=32)),
}


class Training:
    """Steps of an optimizer, and how long its parts take.

    Args:
        work: Network, loss and one batch.
        options: Of the optimizer.
    """

    def __init__(self, work: Workload, options: dict[str, Any]) -> None:
        work.model.train()
        self.work = work
        self.optimizer = KFACOptimizer(
            work.model, work.loss, **{"lr": 1e-4, "inverse_every": PERIOD, **options}
        )
        self.turns: list[dict[str, float]] = []  # seconds of each part
        for owner, name in (
            (self.optimizer.curvature, "refresh"),
            (self.optimizer, "_precondition"),
        ):
            setattr(owner, name, self._clocked(name, getattr(owner, name)))

    def _clocked(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        def run(*args: Any, **options: Any) -> T:
            start = time.process_time()
            result = function(*args, **options)
            self.turns[-1][part] += time.process_time() - start
            return result

        return run

    def run(self) -> None:
        """One turn."""
        self.turns.append(defaultdict(float))
        passes, step = (
            self._clocked("passes", self._passes),
            self._clocked("step", self.optimizer.step),
        )
        for _ in range(PERIOD):
            passes()
            step()

    def _passes(self) -> None:
        (X, y) = self.work.data[0]
        self.work.model.zero_grad()
        self.work.loss(self.work.model(X), y).backward()

    def parts(self) -> dict[str, float]:
        """Seconds of each part in a step, medians over the turns but the first one."""
        passes, step, refresh, precondition = (
            statistics.median(turn[part] / PERIOD for turn in self.turns[1:])
            for part in ("passes", "step", "refresh", "_precondition")
        )
        return {"passes": passes, "step": step, "refresh": refresh, "apply": precondition - refresh}


def applying(work: Workload, limits: Limits, factored: bool) -> Task:
    """The matrix products that apply an inverse, two or four of each layer."""
    device = work.device
    layers = [
        (
            torch.randn(r.outputs, r.inputs, device=device),
            *(decaying(d, device) for d in (r.outputs, r.inputs)),
        )
        for r in limits.rows
    ]

    def run() -> None:
        for W, G, A in layers:
            V = G @ W @ A
            if not factored:
                G.T @ V @ A.T

    return run


def inverting(limits: Limits) -> Task:
    """The Cholesky decompositions and inverses of all factors."""
    matrices = [decaying(d, torch.device("cpu")) + torch.eye(d) for d in limits.sizes]
    return lambda: [torch.cholesky_inverse(torch.linalg.cholesky(M)) for M in matrices]


def rows(name: str, turns: int) -> list[list[str]]:
    torch.manual_seed(0)
    work = MAKERS[name]()
    limits = Limits(work)
    trainings = {title: Training(MAKERS[name](), options) for title, options in OPTIONS.items()}
    (X, y) = work.data[0]

    def plain() -> None:
        for _ in range(PERIOD):
            work.model.zero_grad()
            work.loss(work.model(X), y).backward()

    contestants: dict[str, Task] = {"gradient_pass": plain} | {
        title: t.run for title, t in trainings.items()
    }
    bare = limits.contestants() | {
        "products": applying(work, limits, False),
        "products, factored": applying(work, limits, True),
        "inverses": inverting(limits),
    }
    times = interleaved(contestants, turns, cpu_time)
    gradient_pass = times["gradient_pass"] / PERIOD
    necessary = interleaved(bare, turns, cpu_time)
    parts = limits.parts(necessary)
    update = parts["backward to outputs"] + parts["Grams of inputs"] + parts["Grams of gradients"]
    found = []
    for title, options in OPTIONS.items():
        factored, every = options.get("inverse") == "factored", options.get("statistics_every", 1)
        refresh, apply = (
            ("inverses", "products, factored") if factored else ("limit: eigh", "products")
        )
        least = gradient_pass + update / every + necessary[refresh] / PERIOD + necessary[apply]
        mine, total = trainings[title].parts(), times[title] / PERIOD
        rest = mine["step"] - mine["refresh"] - mine["apply"]
        figures = [
            least,
            mine["passes"] - gradient_pass,
            mine["refresh"],
            mine["apply"],
            rest,
            total,
        ]
        found.append(
            [name, title, *(figure(t / gradient_pass) for t in figures), f"{total / least:.2f}"]
        )
    print(f"{name}: a gradient pass is {1000 * gradient_pass:.2f} ms", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--turns", type=int, default=7, help="of ten steps each")
    parser.add_argument("--quick", action="store_true", help="two turns, autoencoder and CNN alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names, turns = (["autoencoder", "cnn"], 2) if chosen.quick else (chosen.workloads, chosen.turns)
    columns = [
        "network",
        "options",
        "least",
        "statistics",
        "refresh",
        "apply",
        "rest",
        "step",
        "step ÷ least",
    ]
    print(table(columns, [row for name in names for row in rows(name, turns)]))


if __name__ == "__main__":
    main()
