"""Time curvature computations as multiples of one plain gradient pass, beside curvlinops 3.0.1 where it is installed.

Absolute times on shared machines say nothing, so everything is measured in one interleaved run (A B C A B C …) and
given as a ratio of medians. One *yard* is one forward and backward pass to the parameters over the same data.

    python examples/benchmark/run.py --workloads a_mlp e_digits --repeats 5
    pip install curvlinops-for-pytorch==3.0.1    # to see the columns of the peer

Prints a Markdown table; `docs/benchmarks.md` keeps the results.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from types import ModuleType

import torch
from workloads import MAKERS, Workload, make

import curvlinops_plus

try:
    import curvlinops
except ImportError:
    curvlinops = None

Task = Callable[[], object]


def yard(work: Workload) -> Task:
    def run() -> None:
        for X, y in work.data:
            torch.autograd.grad(work.loss(work.model(X), y), work.params)

    return run


def factors(library: ModuleType, work: Workload, **options: object) -> Task:
    """KFAC's factors, weight and bias joined, without the determinism check."""

    def run() -> None:
        K = library.KFACLinearOperator(
            work.model,
            work.loss,
            work.params,
            work.data,
            check_deterministic=False,
            separate_weight_and_bias=False,
            **options,
        )
        K.compute_kronecker_factors()

    return run


def corrected(library: ModuleType, work: Workload) -> Task:
    """EKFAC: factors, eigenvectors, corrected eigenvalues."""
    work = flat(library, work)

    def run() -> None:
        K = library.EKFACLinearOperator(
            work.model, work.loss, work.params, work.data, check_deterministic=False, separate_weight_and_bias=False
        )
        if library is curvlinops_plus:
            K.compute()
        else:
            K.compute_kronecker_factors()
            K.compute_eigenvalue_correction()

    return run


def flat(library: ModuleType, work: Workload) -> Workload:
    """The peer's EKFAC takes logits [N·R, C] only; give it those."""
    if library is curvlinops_plus or work.exact:
        return work
    model = torch.nn.Sequential(work.model, Rows())
    return Workload(work.name, model, [(X, y.flatten()) for X, y in work.data], work.exact)


class Rows(torch.nn.Module):
    """[N, C, R] to [N·R, C]."""

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        return f.transpose(1, 2).flatten(0, 1)


def construction(library: ModuleType, work: Workload) -> Task:
    """KFAC with all defaults, the determinism check included."""
    return lambda: library.KFACLinearOperator(work.model, work.loss, work.params, work.data)


def product(library: ModuleType, work: Workload) -> Task:
    """One GGN-vector product."""
    G = library.GGNLinearOperator(work.model, work.loss, work.params, work.data, check_deterministic=False)
    v = torch.randn(G.shape[0], device=work.data[0][0].device)
    return lambda: G @ v


def applied(library: ModuleType, work: Workload, columns: int | None, inverse: bool) -> Task:
    """KFAC, or its damped inverse, times one or several columns; everything is computed before."""
    K = library.KFACLinearOperator(work.model, work.loss, work.params, work.data, check_deterministic=False)
    K.compute_kronecker_factors()
    A = library.KFACInverseLinearOperator(K, damping=1e-2) if inverse else K
    v = torch.randn(*((K.shape[0],) if columns is None else (K.shape[0], columns)), device=work.data[0][0].device)
    A @ v
    return lambda: A @ v


def tasks(library: ModuleType, work: Workload) -> dict[str, Task]:
    chosen: dict[str, Task] = {"KFAC, Monte Carlo": factors(library, work)}
    if work.exact:
        chosen["KFAC, exact"] = factors(library, work, fisher_type="type-2")
    chosen["EKFAC, Monte Carlo"] = corrected(library, work)
    chosen["construction, defaults"] = construction(library, work)
    chosen["GGN-vector product"] = product(library, work)
    chosen["K @ v"] = applied(library, work, None, False)
    chosen["K @ V, 16 columns"] = applied(library, work, 16, False)
    chosen["damped inverse @ v"] = applied(library, work, None, True)
    return chosen


def measure(contestants: dict[str, Task], repeats: int, synchronize: Task) -> dict[str, float]:
    """Median time of each, taken in turns after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, task in contestants.items():
            synchronize()
            start = time.perf_counter()
            task()
            synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    peer = "" if curvlinops is None else " | curvlinops 3.0.1, yards | ours ÷ theirs"
    machine = f"{platform.machine()}, {arguments.device}, {arguments.threads} threads"
    print(f"{date.today()}, {machine}, torch {torch.__version__}\n")
    print(f"| workload | task | ours, yards{peer} |\n| --- | --- | --- |{'' if curvlinops is None else ' --- | --- |'}")
    for name in arguments.workloads:
        work = make(name, arguments.device)
        ours = tasks(curvlinops_plus, work)
        theirs = {} if curvlinops is None else tasks(curvlinops, work)
        for task, run in ours.items():
            contestants = {"yard": yard(work), "ours": run} | ({"theirs": theirs[task]} if task in theirs else {})
            t = measure(contestants, arguments.repeats, synchronize)
            row = f"| {name} | {task} | {t['ours'] / t['yard']:.3g} |"
            if "theirs" in t:
                row += f" {t['theirs'] / t['yard']:.3g} | {t['ours'] / t['theirs']:.2f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
