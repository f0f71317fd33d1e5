"""Time and peak memory of every layer's rule, as multiples of the generic rule that runs the module
for each example.

For each layer a network of this layer alone (and a loss of its mean) is given to the library, once
as it is and once with no rules registered. Two columns compare the exact diagonal, which both can
do; two more say what KFAC and EKFAC take in *gradient passes*, of one forward and backward pass to
the parameters, where the layer has Kronecker factors. All contestants take turns (A B C A B C …),
times are medians. Peak memory is what the allocator handed out at once beyond what was there
before.

    python examples/benchmark/layers.py --repeats 5 python examples/benchmark/layers.py --quick
    # a tenth of the examples, one repeat: does it run?

Prints a Markdown table; `docs/benchmarks.md` keeps the results.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date

import torch
from measure import Task, event_time, interleaved, wall_time
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from curvlinops_plus import EKFAC, KFAC, DiagonalBlock, EmpiricalRisk, MonteCarlo, curvature
from curvlinops_plus.layer import RULES, AffineRule, LayerRule, rule_of


class Mean(nn.Module):
    """A layer (given its input twice or thrice if it wants so), then the mean over everything but
    examples and C.
    """

    def __init__(self, layer: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(*[x] * self.inputs)
        out = out[0] if isinstance(out, tuple) else out
        # Channels that have positions before or behind them; squares, or norms would send nothing
        # back.
        return (
            out.square().flatten(1).unfold(1, 8, 8).mean(1)
            if out[0].numel() % 8 == 0
            else out.square().flatten(1)
        )


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda N: torch.randn(N, *shape)


def tokens(vocabulary: int, S: int) -> Callable[[int], Tensor]:
    return lambda N: torch.randint(vocabulary, (N, S))


#: Name to layer, inputs per example, how many of them its `forward` wants, and the number of
#: examples.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int, int]] = {
    "Linear 512-512": (lambda: nn.Linear(512, 512), numbers(512), 1, 128),
    "Linear 128-128, 64 tokens": (lambda: nn.Linear(128, 128), numbers(64, 128), 1, 64),
    "Conv1d 32-32, 3, 128 long": (lambda: nn.Conv1d(32, 32, 3), numbers(32, 128), 1, 64),
    "Conv1d 32, 3, depthwise": (lambda: nn.Conv1d(32, 32, 3, groups=32), numbers(32, 128), 1, 64),
    "Conv2d 32-32, 3×3, 16×16": (
        lambda: nn.Conv2d(32, 32, 3, padding=1),
        numbers(32, 16, 16),
        1,
        64,
    ),
    "Conv2d 32-32, 3×3, 4 groups": (
        lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4),
        numbers(32, 16, 16),
        1,
        64,
    ),
    "Conv2d 32, 3×3, depthwise": (
        lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32),
        numbers(32, 16, 16),
        1,
        64,
    ),
    "Conv3d 8-16, 3×3×3, 8×8×8": (
        lambda: nn.Conv3d(8, 16, 3, padding=1),
        numbers(8, 8, 8, 8),
        1,
        32,
    ),
    "ConvTranspose1d 32-32, 4, stride 2": (
        lambda: nn.ConvTranspose1d(32, 32, 4, 2),
        numbers(32, 64),
        1,
        64,
    ),
    "ConvTranspose2d 32-32, 3×3": (
        lambda: nn.ConvTranspose2d(32, 32, 3, padding=1),
        numbers(32, 16, 16),
        1,
        64,
    ),
    "ConvTranspose2d 32-32, 4×4, stride 2": (
        lambda: nn.ConvTranspose2d(32, 32, 4, 2, padding=1),
        numbers(32, 8, 8),
        1,
        64,
    ),
    "ConvTranspose3d 8-8, 2×2×2, stride 2": (
        lambda: nn.ConvTranspose3d(8, 8, 2, 2),
        numbers(8, 6, 6, 6),
        1,
        32,
    ),
    "Embedding 2000×64, 32 tokens": (lambda: nn.Embedding(2000, 64), tokens(2000, 32), 1, 64),
    "Embedding 50000×16, 32 tokens": (lambda: nn.Embedding(50_000, 16), tokens(50_000, 32), 1, 32),
    "EmbeddingBag 2000×64, 32 tokens": (lambda: nn.EmbeddingBag(2000, 64), tokens(2000, 32), 1, 64),
    "Bilinear 24, 24 to 24": (lambda: nn.Bilinear(24, 24, 24), numbers(24), 2, 64),
    "MultiheadAttention 64, 4 heads, 32 tokens": (
        lambda: nn.MultiheadAttention(64, 4, batch_first=True),
        numbers(32, 64),
        3,
        64,
    ),
    "LayerNorm 256, 64 tokens": (lambda: nn.LayerNorm(256), numbers(64, 256), 1, 64),
    "RMSNorm 256, 64 tokens": (lambda: nn.RMSNorm(256), numbers(64, 256), 1, 64),
    "GroupNorm 8 of 64, 16×16": (lambda: nn.GroupNorm(8, 64), numbers(64, 16, 16), 1, 64),
    "BatchNorm2d 64, 16×16": (lambda: nn.BatchNorm2d(64), numbers(64, 16, 16), 1, 64),
    "InstanceNorm2d 64, 16×16": (
        lambda: nn.InstanceNorm2d(64, affine=True),
        numbers(64, 16, 16),
        1,
        64,
    ),
    "PReLU 64, 16×16": (lambda: nn.PReLU(64), numbers(64, 16, 16), 1, 64),
    "RNN 64-64, 16 steps": (lambda: nn.RNN(64, 64, batch_first=True), numbers(16, 64), 1, 32),
    "GRU 64-64, 16 steps": (lambda: nn.GRU(64, 64, batch_first=True), numbers(16, 64), 1, 32),
    "LSTM 64-64, 16 steps": (lambda: nn.LSTM(64, 64, batch_first=True), numbers(16, 64), 1, 32),
}


class AxesOnly(LayerRule):
    """The generic rule with the axes of another."""

    def __init__(self, rule: LayerRule) -> None:
        self.rule = rule

    def axes(
        self, module: nn.Module, axis: int, leaves: Sequence[Tensor], inputs: bool
    ) -> list[int]:
        return self.rule.axes(module, axis, leaves, inputs)


@contextmanager
def no_rules() -> Iterator[None]:
    """Every module gets the generic rule; recurrent layers one that knows which axes carry the
    examples.
    """
    kept = dict(RULES)
    RULES.clear()
    RULES.update(
        {
            kind: AxesOnly(rule)
            for kind, rule in kept.items()
            if type(rule).axes is not LayerRule.axes
        }
    )
    try:
        yield
    finally:
        RULES.clear()
        RULES.update(kept)


def peak(task: Task, cuda: bool) -> float:
    """Bytes held at once while a task runs, on top of what was held before."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        task()
        return float(torch.cuda.max_memory_allocated() - before)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        task()
    kineto = recorded.profiler
    assert kineto is not None
    changes = [
        (e.start_ns(), e.nbytes()) for e in kineto.kineto_results.events() if e.name() == "[memory]"
    ]
    held = highest = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        held += change
        highest = max(highest, held)
    return float(highest)


def contestants(risk: EmpiricalRisk, affine: bool) -> dict[str, Task]:
    def diagonal() -> object:
        return curvature(risk, DiagonalBlock, vectors=MonteCarlo(1, seed=0))

    def generic() -> object:
        with no_rules():
            return diagonal()

    def of(approximation: type[KFAC] | type[EKFAC]) -> Task:
        return lambda: curvature(risk, approximation, vectors=MonteCarlo(1, seed=0))

    def gradient_pass() -> None:
        for X, y in risk.data:
            torch.autograd.grad(
                F.mse_loss(risk.model(X), y), list(risk.model.parameters()), allow_unused=True
            )

    found: dict[str, Task] = {"gradient_pass": gradient_pass, "rule": diagonal}
    if not rule_of(risk.model.layer).parts(
        risk.model.layer
    ):  # the generic rule can't see functions, only modules
        found["generic"] = generic
    return found | ({"KFAC": of(KFAC), "EKFAC": of(EKFAC)} if affine else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    cuda = arguments.device == "cuda"
    machine = f"{platform.machine()}, {arguments.device}, {arguments.threads} threads"
    print(f"{date.today()}, {machine}, torch {torch.__version__}, float32\n")
    columns = (
        "layer",
        "N",
        "diagonal: time ÷ generic",
        "peak memory ÷ generic",
        "peak, MB",
        "KFAC, gradient passes",
        "EKFAC, gradient passes",
    )
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    for name, (make, inputs, times, N) in LAYERS.items():
        if arguments.only not in name:
            continue
        torch.manual_seed(0)
        N = max(2, N // 10) if arguments.quick else N
        model = Mean(make(), times).eval().to(arguments.device)
        X = inputs(N).to(arguments.device)
        with torch.no_grad():
            y = torch.randn_like(model(X))
        risk = EmpiricalRisk(model, nn.MSELoss(), [(X, y)])
        affine = isinstance(rule_of(model.layer), AffineRule) or bool(
            rule_of(model.layer).parts(model.layer)
        )
        tasks = contestants(risk, affine)
        t = interleaved(
            tasks, 1 if arguments.quick else arguments.repeats, event_time if cuda else wall_time
        )
        memory = {task: peak(tasks[task], cuda) for task in ("rule", "generic") if task in tasks}
        in_passes = [
            f"{t[task] / t['gradient_pass']:.3g}" if task in t else "–"
            for task in ("KFAC", "EKFAC")
        ]
        megabytes = f"{memory['rule'] / 1e6:.1f}"
        ratios = [
            f"{values['rule'] / values['generic']:.2f}" if "generic" in tasks else "–"
            for values in (t, memory)
        ]
        print(f"| {name} | {N} | {' | '.join([*ratios, megabytes, *in_passes])} |", flush=True)


if __name__ == "__main__":
    main()
