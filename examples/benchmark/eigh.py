"""Time eigendecompositions of Kronecker factors, as multiples of `torch.linalg.eigh` on the same
matrices.

Says what pays on your machine, with a GPU or without: the way through a low rank, several matrices
at once, Cholesky where one damping is known. Measured in turns, medians of ratios.

    python examples/benchmark/eigh.py --device cuda --sizes 512 1024 2048 4096
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from curvlinops_plus.linalg import cholesky_inverse, eigh
from curvlinops_plus.linalg.numerics import side_by_side

Task = Callable[[], object]


def factor(size: int, rank: float, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The Gram matrix of rows whose variances decay, as those of trained layers do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(
        max(1, int(rank * size)), size, generator=generator, dtype=dtype
    ) * torch.logspace(0, -2, size)
    rows = rows.to(device, dtype)
    return rows.T @ rows / len(rows)


def of_one(M: Tensor) -> dict[str, Task]:
    return {
        "torch": lambda: torch.linalg.eigh(M),
        "eigh": lambda: eigh(M, semidefinite=True),
        "inverse": lambda: cholesky_inverse(M, 1e-3),
    }


def of_several(matrices: list[Tensor]) -> dict[str, Task]:
    return {
        "torch": lambda: [torch.linalg.eigh(M) for M in matrices],
        "threads": lambda: side_by_side(torch.linalg.eigh, matrices, lambda M: 10.0 * len(M) ** 3),
        "batched": lambda: torch.linalg.eigh(torch.stack(matrices)),
    }


def ratios(tasks: dict[str, Task], repeats: int, device: str) -> dict[str, float]:
    """Median over turns of the time of each task over that of the first one, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats + 1):
        for name, task in tasks.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            task()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    first = next(iter(times.values()))
    return {
        name: statistics.median(t / u for t, u in zip(own, first, strict=True))
        for name, own in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument(
        "--ranks", nargs="+", type=float, default=[0.1, 0.25, 0.5, 2.0], help="rows per column"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, dtype = options.device, getattr(torch, options.dtype)

    print("| size | rows / size | eigh | damped Cholesky inverse |")
    print("| --- | --- | --- | --- |")
    for size in options.sizes:
        for rank in options.ranks:
            M = factor(size, rank, device, dtype)
            found = ratios(of_one(M), options.repeats, device)
            columns = " | ".join(f"{found[name]:.2f}" for name in ("eigh", "inverse"))
            print(f"| {size} | {rank:g} | {columns} |", flush=True)

    print("\n| 8 matrices of size | side by side | batched |\n| --- | --- | --- |")
    for size in options.sizes:
        matrices = [factor(size, 2.0, device, dtype, seed) for seed in range(8)]
        found = ratios(of_several(matrices), options.repeats, device)
        print(f"| {size} | {found['threads']:.2f} | {found['batched']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
