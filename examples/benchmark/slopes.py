"""How time grows with examples, width, depth, tokens and classes: at four sizes each, and as an
exponent.

Times are in gradient passes of the same network, so an exponent of 0 means: grows as a gradient
pass does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from measure import Clock, Task, interleaved
from tasks import ekfac, exact, gradient_pass, kfac, product
from torch import Tensor, nn
from workloads import Made, Workload, batches, perceptron, workload

import curvlinops_plus


class Tokens(nn.Module):
    """The same perceptron at every position; logits [N, C, T]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).transpose(1, 2)


def _tokens(T: int, width: int) -> Made:
    return Tokens(width), batches(torch.randn(32, T, width), torch.randint(10, (32, T)), 32)


Axes = dict[str, tuple[list[int], Callable[[int], Made]]]


def axes(d: int, N: int) -> Axes:
    """What grows, its sizes, and the network of one size; the others have width `d` and `N`
    examples.
    """
    return {
        "examples": ([N // 2, N, 2 * N, 4 * N], lambda n: perceptron(d, d, d, 10, N=n)),
        "width": ([d // 2, d, 2 * d, 4 * d], lambda w: perceptron(w, w, w, 10, N=N)),
        "depth": ([2, 4, 8, 16], lambda L: perceptron(*[d] * L, 10, N=N)),
        "tokens": ([8, 16, 32, 64], lambda T: _tokens(T, d)),
        "classes": ([4, 8, 16, 32], lambda C: perceptron(d, d, d, C, N=N)),
    }


AXES, QUICK_AXES = axes(256, 1024), axes(128, 512)
TASKS = ["KFAC, Monte Carlo", "KFAC, exact", "EKFAC, Monte Carlo", "GGN product"]


def _tasks(work: Workload) -> dict[str, Task]:
    found: dict[str, Task] = {
        "gradient_pass": gradient_pass(work),
        "KFAC, Monte Carlo": lambda: kfac(curvlinops_plus, work),
        "EKFAC, Monte Carlo": lambda: ekfac(curvlinops_plus, work),
        "GGN product": product(exact(curvlinops_plus, work, "GGN"), work, before=2),
    }
    if work.data[0][1].ndim == 1:  # not one backward pass per class and token
        found["KFAC, exact"] = lambda: kfac(curvlinops_plus, work, fisher_type="type-2")
    return found


def slopes(
    axes: Axes, device: str, repeats: int, clock: Clock
) -> dict[str, dict[str, list[float]]]:
    """Gradient passes by axis and task, one for each size; all sizes of an axis take turns."""
    found: dict[str, dict[str, list[float]]] = {}
    for axis, (sizes, make) in axes.items():
        torch.manual_seed(0)
        by_size = {size: _tasks(workload(axis, *make(size), device)) for size in sizes}
        t = interleaved(
            {f"{n} {size}": run for size, ts in by_size.items() for n, run in ts.items()},
            repeats,
            clock,
        )
        chosen = [task for task in TASKS if task in by_size[sizes[0]]]
        found[axis] = {
            task: [t[f"{task} {size}"] / t[f"gradient_pass {size}"] for size in sizes]
            for task in chosen
        }
    return found


def exponent(sizes: list[int], values: list[float]) -> float:
    """The least-squares slope of log(value) against log(size)."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
