"""Time and memory of curvature computations, beside curvlinops 3.0.1 where it is installed and
beside the limit.

Absolute times on shared machines say nothing: every figure is a ratio of medians in one interleaved
run, A B C A B C …. A *gradient pass* is one forward and backward pass to the parameters over the
same data. The *limit* is necessary for a task, measured in plain PyTorch in the same run
(`limits.py`).

    python examples/benchmark/run.py --quick                        # smaller networks, under three
    minutes python examples/benchmark/run.py --workloads a_mlp --tables time --repeats 5 python
    examples/benchmark/run.py --device cuda                  # larger networks, timed by events of
    the GPU pip install curvlinops-for-pytorch==3.0.1                       # to see the columns of
    the peer

Prints Markdown tables; `docs/benchmarks.md` keeps the table of ratios, with the picture that
`--picture` draws.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from datetime import date
from pathlib import Path

import torch
from limits import Limits, decaying
from measure import CLOCKS, Clock, figure, interleaved, ratio, table
from memory import growth
from slopes import AXES, QUICK_AXES, exponent, slopes
from tasks import curvlinops, gradient_pass, tasks, training_tasks
from workloads import CPU, CUDA, MAKERS, make

import curvlinops_plus

#: Decompositions of a symmetric matrix that are compared; another algorithm is a line here.
EIGH = {"torch.linalg.eigh": torch.linalg.eigh}
TABLES = ["time", "eigh", "training", "memory", "slopes"]


def _contestants(ours: dict, theirs: dict) -> dict:
    named = {f"ours {task}": run for task, run in ours.items()}
    return named | {f"theirs {task}": run for task, run in theirs.items()}


def time_tables(
    names: list[str],
    device: str,
    quick: bool,
    repeats: int,
    clock: Clock,
    picture: Path | None = None,
) -> None:
    """Every task in gradient passes beside the peer and the limit, what limits are made of, and
    ratios to the peer.
    """
    print("## Time\n\nIn gradient passes; less is better.\n")
    libraries = [curvlinops_plus] if curvlinops is None else [curvlinops_plus, curvlinops]
    if quick:  # each turn counts then
        for run in [
            run for library in libraries for run in tasks(library, make("tiny", device)).values()
        ]:
            run()
    parts: list[list[str]] = []
    passes: dict[str, dict[str, float]] = {}  # by task and workload
    ratios: dict[str, dict[str, str]] = {}
    header = ["workload", "task", "ours", "3.0.1", "ours ÷ 3.0.1", "limit", "ours ÷ limit"]
    print(table(header, []).rstrip(), flush=True)
    for name in names:
        work = make(name, device, quick)
        ours, theirs = (
            tasks(curvlinops_plus, work),
            {} if curvlinops is None else tasks(curvlinops, work),
        )
        limits = Limits(work)
        plain = {"gradient_pass": gradient_pass(work), **limits.contestants()}
        plain["gradient_pass"]()
        t = interleaved(
            plain | _contestants(ours, theirs),
            10 * repeats if name == "tiny" else repeats,
            clock,
            warm_up=not quick,
        )
        least = limits.of(t)
        for task in ours:
            mine, other, limit = t[f"ours {task}"], t.get(f"theirs {task}"), least.get(task)
            passes.setdefault(task, {})[name] = mine / t["gradient_pass"]
            ratios.setdefault(task, {})[name] = ratio(mine, other)
            in_passes = [figure(x and x / t["gradient_pass"]) for x in (mine, other, limit)]
            row = [name, task, *in_passes[:2], ratio(mine, other), in_passes[2], ratio(mine, limit)]
            print(f"| {' | '.join(row)} |", flush=True)
        parts.append([name, *(figure(x / t["gradient_pass"]) for x in limits.parts(t).values())])
    print("\nWhat the limits are made of, in gradient passes.\n")
    columns = [
        "forward",
        "backward to outputs",
        "Grams of inputs",
        "Grams of gradients",
        "eigh",
        "squares",
    ]
    print(table(["workload", *columns], parts), flush=True)
    print("Ours ÷ 3.0.1.\n")
    print(
        table(
            ["task", *names],
            [[task, *(of.get(n, "–") for n in names)] for task, of in ratios.items()],
        ),
        flush=True,
    )
    if picture is not None:
        draw(passes, picture)


#: Colours that people of all kinds of colour vision can tell apart (Okabe & Ito), and marks for
#: print without colour.
_LOOK = dict(
    zip(
        CPU,
        [
            ("#000000", "D"),
            ("#CC79A7", "v"),
            ("#0072B2", "o"),
            ("#009E73", "^"),
            ("#D55E00", "s"),
            ("#E69F00", "P"),
        ],
    )
)


def draw(passes: dict[str, dict[str, float]], path: Path) -> None:
    """Gradient passes that each task takes, a mark for each network; large type, as it is shown at
    400 pixels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panel = plt.subplots(figsize=(6.4, 5.4), layout="constrained")
        for name in dict.fromkeys(name for of in passes.values() for name in of):
            tasks = [task for task in passes if name in passes[task]]
            colour, mark = _LOOK.get(name, ("#56B4E9", "o"))
            panel.semilogx(
                [passes[task][name] for task in tasks], tasks, mark, color=colour, ms=8, label=name
            )
        panel.axvline(1, color="black", lw=1)
        panel.set(xlabel="time ÷ gradient pass")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.invert_yaxis()
        panel.grid(alpha=0.3)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(path, dpi=125)
        plt.close(figure)


def eigh_table(names: list[str], device: str, quick: bool, repeats: int, clock: Clock) -> None:
    """Eigendecompositions by size, in gradient passes of the workload that has factors of this
    size.
    """
    print("## Eigendecompositions\n\nOf one factor, in gradient passes of its workload.\n")
    rows = []
    for name in names:
        work = make(name, device, quick)
        sizes = Limits(work).sizes
        for size in sorted({s for s in sizes if s >= 64}):
            M = decaying(size, work.device)
            runs = {label: lambda f=f, M=M: f(M) for label, f in EIGH.items()}
            t = interleaved({"gradient_pass": gradient_pass(work), **runs}, repeats, clock)
            rows.append(
                [
                    name,
                    str(size),
                    str(sizes.count(size)),
                    *(figure(t[label] / t["gradient_pass"]) for label in EIGH),
                ]
            )
    print(table(["workload", "size", "factors", *EIGH], rows), flush=True)


def training_table(names: list[str], device: str, quick: bool, repeats: int, clock: Clock) -> None:
    """Steps while an estimator listens, as multiples of plain ones."""
    print(
        "## Listening in a training loop\n\nTime of a step (forward, backward, descent) ÷ a plain "
        "step.\n"
    )
    rows = []
    for name in names:
        work = make(name, device, quick)
        t = interleaved(training_tasks(work), repeats, clock)
        heard = [key for key in t if key != "plain"]
        rows.append([name, *(ratio(t[key], t["plain"]) for key in heard)])
    print(table(["workload", *heard], rows), flush=True)


def memory_table(names: list[str], device: str, quick: bool, threads: int) -> None:
    """Peak memory above the start."""
    print("## Memory\n\nPeak above what was there before, MB.\n")
    rows = []
    for name in names:
        for task, found in growth(name, device, quick, threads).items():
            mine, other = found["ours"], found.get("theirs")
            rows.append(
                [name, task, figure(mine / 1e6), figure(other and other / 1e6), ratio(mine, other)]
            )
    print(table(["workload", "task", "ours", "3.0.1", "ours ÷ 3.0.1"], rows), flush=True)


def slopes_table(device: str, quick: bool, repeats: int, clock: Clock) -> None:
    """Gradient passes at four sizes of everything that grows."""
    print(
        "## Slopes\n\nIn gradient passes of the same network; the exponent of a fitted power of "
        "the size.\n"
    )
    axes = QUICK_AXES if quick else AXES
    found = slopes(axes, device, repeats, clock)
    rows = []
    for axis, by_task in found.items():
        sizes = axes[axis][0]
        for task, values in by_task.items():
            at = ", ".join(f"{figure(value)} at {size}" for size, value in zip(sizes, values))
            rows.append([axis, task, at, f"{exponent(sizes, values):+.2f}"])
    print(table(["grows", "task", "gradient passes", "exponent"], rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(MAKERS))
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=TABLES,
        help="default: all; with --quick on a CPU without eigh",
    )
    parser.add_argument("--quick", action="store_true", help="smaller networks, two repeats")
    parser.add_argument("--repeats", type=int, help="default: 5, or 2 with --quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clock", choices=CLOCKS, help="default: CPU time, or events of the GPU")
    parser.add_argument(
        "--picture", type=Path, help="where times are drawn, such as docs/benchmark.png"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    device, quick = given.device, given.quick
    names = given.workloads or (CUDA if device == "cuda" else CPU)
    repeats = given.repeats or (2 if quick else 5)
    kind = given.clock or ("events" if device == "cuda" else "cpu")
    clock = CLOCKS[kind]
    large = ("b_resnet", "d_wide") if quick and len(names) > 3 else ()
    few = [n for n in names if n not in ("tiny", *large)]
    chosen = given.tables or [t for t in TABLES if not (t == "eigh" and quick and device == "cpu")]
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    print(
        f"{date.today()}, {machine}, {given.threads} threads, torch {torch.__version__}, float32, "
        f"clock: {kind}, ",
        end="",
    )
    print(f"{'quick sizes' if quick else 'full sizes'}, {repeats} repeats.\n")
    if "time" in chosen:
        time_tables(names, device, quick, repeats, clock, given.picture)
    if "eigh" in chosen:
        eigh_table(names, device, quick, repeats, clock)
    if "training" in chosen:
        training_table(few, device, quick, repeats, clock)
    if "memory" in chosen:
        memory_table(few, device, quick, given.threads)
    if "slopes" in chosen:
        slopes_table(device, quick, repeats, clock)


if __name__ == "__main__":
    main()
