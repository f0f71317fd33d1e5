"""Networks of other kinds than those of `workloads.py`, beside curvlinops 3.0.1: that no figure is
true of five alone.

    pip install curvlinops-for-pytorch==3.0.1 python examples/benchmark/others.py
    # some minutes; --repeats 5 for steadier figures python examples/benchmark/others.py vit mixer

Small data on purpose, a few batches of each: what is done once for a network weighs more here than
in a sweep over much data. Prints one table, time divided by that of the peer, worst rows first.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable
from statistics import mean

import torch
from measure import CLOCKS, interleaved, ratio, table
from tasks import curvlinops, tasks
from torch import Tensor, nn
from workloads import Attention, Bottleneck, Workload, batches, language, workload

import curvlinops_plus

Loss = nn.Module
Case = tuple[nn.Module, list[tuple[Tensor, Tensor]], Loss]


def classes(model: nn.Module, *shape: int, C: int = 10, N: int, batch: int) -> Case:
    """Images, sequences or vectors, and a class of each."""
    return (
        model,
        batches(torch.randn(N, *shape), torch.randint(C, (N,)), batch),
        nn.CrossEntropyLoss(),
    )


def pictures(image: tuple[int, ...], N: int, batch: int, layers: list[nn.Module], out: int) -> Case:
    """Images, convolutions, a mean over the places, and a linear layer."""
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, 10))
    return classes(model.eval(), *image, N=N, batch=batch)


def regression(model: nn.Module, i: int, out: int, N: int, batch: int) -> Case:
    """Vectors, and numbers for each."""
    return model, batches(torch.randn(N, i), torch.randn(N, out), batch), nn.MSELoss()


def perceptron(*widths: int, act: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    layers = [
        part for i, o in itertools.pairwise(widths) for part in (nn.Linear(i, o, bias), act())
    ]
    return nn.Sequential(*layers[:-1])


def convolutions(*given: tuple) -> list[nn.Module]:
    """Convolutions with the arguments `(c_in, c_out, kernel, stride, padding, dilation, groups)`,
    and ReLUs.
    """
    return [part for arguments in given for part in (nn.Conv2d(*arguments), nn.ReLU())]


class Mean(nn.Module):
    """Over the places of a sequence [N, T, d]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def sequences() -> nn.Sequential:
    """A perceptron at each place, and the mean over places before the last layer."""
    return nn.Sequential(
        perceptron(32, 64, 64, 64, act=nn.GELU), nn.GELU(), Mean(), nn.Linear(64, 5)
    )


class Swapped(nn.Module):
    """Another model on [N, d, T] instead of [N, T, d]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """Places are mixed, then channels, with a norm before and a shortcut around both."""

    def __init__(self, d: int, mix: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.mix = nn.LayerNorm(d), nn.LayerNorm(d), mix
        self.mlp = perceptron(d, 4 * d, d, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        return x + self.mlp(self.second(x))


def patches(mix: Callable[[], nn.Module], d: int = 64) -> nn.Sequential:
    """Patches of 4×4 pixels, and three blocks."""
    blocks = [Block(d, mix()) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, d, 4, 4), nn.Flatten(2), Transposed(), *blocks, Mean(), nn.Linear(d, 10)
    )


class Transposed(nn.Module):
    """[N, d, T] to [N, T, d]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def labels(model: nn.Module, i: int, out: int, N: int, batch: int) -> Case:
    """Vectors, and several labels of each."""
    y = torch.randint(2, (N, out)).float()
    return model, batches(torch.randn(N, i), y, batch), nn.BCEWithLogitsLoss()


tanh = nn.Tanh
CASES: dict[str, Callable[[], Case]] = {
    "5×5, stride 2": lambda: pictures(
        (3, 32, 32),
        128,
        64,
        convolutions((3, 16, 5, 2, 2), (16, 32, 5, 2, 2), (32, 64, 5, 2, 2)),
        64,
    ),
    "7×7 stem": lambda: pictures(
        (3, 64, 64), 32, 16, convolutions((3, 32, 7, 2, 3), (32, 32, 3, 1, 1)), 32
    ),
    "bottlenecks": lambda: pictures(
        (32, 24, 24),
        32,
        16,
        [Bottleneck(32, 16, 1), Bottleneck(64, 16, 1), Bottleneck(64, 32, 2)],
        128,
    ),
    "1×1 convolutions": lambda: pictures(
        (3, 24, 24),
        32,
        16,
        convolutions((3, 32, 3, 1, 1), (32, 32, 1), (32, 64, 1), (64, 64, 1)),
        64,
    ),
    "depthwise": lambda: pictures(
        (32, 16, 16),
        64,
        32,
        convolutions((32, 32, 3, 1, 1, 1, 32), (32, 64, 1), (64, 64, 3, 2, 1, 1, 64)),
        64,
    ),
    "dilated": lambda: pictures(
        (3, 32, 32),
        32,
        16,
        convolutions((3, 16, 3, 1, 2, 2), (16, 16, 3, 1, 4, 4), (16, 16, 3, 1, 1)),
        16,
    ),
    "few channels, large images": lambda: pictures(
        (3, 128, 128), 4, 2, convolutions((3, 8, 3, 1, 1), (8, 8, 3, 1, 1), (8, 8, 3, 2, 1)), 8
    ),
    "many channels, small images": lambda: pictures(
        (64, 8, 8),
        32,
        16,
        convolutions((64, 64, 3, 1, 1), (64, 128, 3, 2, 1), (128, 128, 3, 1, 1)),
        128,
    ),
    "vit": lambda: classes(patches(lambda: Attention(64, 4)), 3, 32, 32, N=32, batch=16),
    "mixer": lambda: classes(
        patches(lambda: Swapped(perceptron(64, 128, 64, act=nn.GELU))), 3, 32, 32, N=32, batch=16
    ),
    "language model": lambda: (*language(2, 64, 4, 64, 200, N=8, batch=4), nn.CrossEntropyLoss()),
    "sequences": lambda: classes(sequences(), 32, 32, C=5, N=64, batch=32),
    "20 layers of 32, tanh": lambda: classes(
        perceptron(16, *[32] * 20, 4, act=tanh), 16, C=4, N=1024, batch=256
    ),
    "4096-64-10": lambda: classes(perceptron(4096, 64, 10), 4096, N=512, batch=128),
    "1024 wide, 64 examples": lambda: classes(
        perceptron(1024, 1024, 1024, 10, bias=False), 1024, N=64, batch=16
    ),
    "100 classes": lambda: classes(perceptron(64, 128, 100), 64, C=100, N=512, batch=256),
    "1000 classes": lambda: classes(perceptron(128, 256, 1000), 128, C=1000, N=256, batch=128),
    "20 labels": lambda: labels(perceptron(64, 128, 128, 20), 64, 20, N=512, batch=128),
    "one number": lambda: regression(perceptron(13, 64, 64, 1, act=tanh), 13, 1, N=512, batch=128),
    "50 numbers": lambda: regression(
        perceptron(32, 128, 128, 50, act=tanh), 32, 50, N=512, batch=128
    ),
    "batches of 1": lambda: classes(perceptron(64, 64, 64, 10), 64, N=48, batch=1),
    "batches of 4": lambda: classes(perceptron(64, 64, 64, 10), 64, N=256, batch=4),
    "one batch of 8192": lambda: classes(perceptron(100, 100, 100, 10), 100, N=8192, batch=8192),
    "8-16-16-3, 20000 examples": lambda: classes(
        perceptron(8, 16, 16, 3, act=tanh), 8, C=3, N=20000, batch=512
    ),
}


def work_of(name: str) -> Workload:
    """A case by name, always the same numbers."""
    torch.manual_seed(0)
    model, data, loss = CASES[name]()
    work = workload(name, model, data)
    work.loss, work.exact = loss, not name.startswith("1000") and name != "language model"
    for p in work.model.parameters():
        p.requires_grad_(any(p is q for q in work.params))
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    given = parser.parse_args()
    if curvlinops is None:
        raise SystemExit(
            "There is nothing to compare with: pip install curvlinops-for-pytorch==3.0.1"
        )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns, rows = [], {}
    for name in given.names or CASES:
        work = work_of(name)
        ours, theirs = tasks(curvlinops_plus, work), tasks(curvlinops, work)
        contestants = ours | {f"theirs {task}": run for task, run in theirs.items()}
        time = interleaved(contestants, given.repeats, CLOCKS[given.clock])
        rows[name] = {task: time[task] / time[f"theirs {task}"] for task in ours}
        columns += [task for task in ours if task not in columns]
    worst = sorted(rows, key=lambda name: -mean(rows[name].values()))
    print(
        table(
            ["network", *columns],
            [[name, *(ratio(rows[name].get(c), 1.0) for c in columns)] for name in worst],
        )
    )


if __name__ == "__main__":
    main()
