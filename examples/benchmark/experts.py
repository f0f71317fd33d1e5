"""KFAC, EKFAC and a step of the K-FAC optimizer for a mixture of experts, beside its dense twin, in
gradient passes of each.

    python examples/benchmark/experts.py

Two blocks of attention and a mixture of eight experts, of which each token visits two; experts are
one parameter `[8, o, i]`, as large language models keep them. The twin has one expert for all. One
thread, float32, in turns; figures are ratios of medians of CPU time.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.nn.functional as F
from measure import Task, cpu_time, interleaved, ratio, table
from torch import Tensor, nn

from curvlinops_plus import EKFAC, KFAC, EmpiricalRisk, KFACOptimizer, MonteCarlo, curvature

WIDTH, HIDDEN, WORDS, LENGTH = 64, 128, 128, 32


class Experts(nn.Module):
    """Each row of the input visits two of the experts, whose outputs are weighted."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, number, bias=False)
        self.up = nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(number, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, d]
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(F.linear(rows[row], self.up[expert]))
            visited = F.linear(hidden, self.down[expert]) * weights[row, place, None]
            out = out.index_add(0, row, visited)
        return out.view_as(x)


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN, bias=False), nn.SiLU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    )


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mixture(self.norm2(x))


class Classes(nn.Module):
    """[N, T, C] to [N, C, T], which cross-entropy reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def network(experts: int) -> nn.Module:
    mixtures = [Experts(experts) if experts > 1 else dense() for _ in range(2)]
    blocks = [Block(mixture) for mixture in mixtures]
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS), Classes()
    )


def tasks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Task]:
    """What is timed, each for one batch."""
    loss = nn.CrossEntropyLoss()
    X, y = batch
    risk = EmpiricalRisk(model, loss, [batch])
    optimizer = KFACOptimizer(model, loss, lr=1e-3)

    def gradient() -> None:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(model.eval()(X), y)
        value.backward()

    def step() -> None:
        optimizer.zero_grad()
        loss(model.train()(X), y).backward()
        optimizer.step()

    vectors = MonteCarlo(1)
    return {
        "gradient": gradient,
        "KFAC": lambda: curvature(risk, KFAC, vectors=vectors),
        "EKFAC": lambda: curvature(risk, EKFAC, vectors=vectors),
        "step": step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name, experts in (("dense twin", 1), ("8 experts", 8)):
        torch.manual_seed(0)
        model = network(experts)
        tokens = torch.randint(WORDS, (16, LENGTH + 1))
        chosen = tasks(model, (tokens[:, :-1], tokens[:, 1:]))
        times = interleaved(chosen, given.repeats, cpu_time)
        gradient = times.pop("gradient")
        rows.append([name, *(ratio(seconds, gradient) for seconds in times.values())])
    print(table(["network", *times], rows))


if __name__ == "__main__":
    main()
