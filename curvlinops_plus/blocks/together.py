"""Work on sums that several processes, or the cores of one, share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.decisions import read_together
from curvlinops_plus.linalg.numerics import check_finite, side_by_side
from curvlinops_plus.linalg.stacks import decompose_in_stacks

# Accumulators of a layer by block names, as `LayerPlan.accumulators` makes them.
Stage = dict[str, Accumulator]


def add_over_processes(accumulators: Sequence[Accumulator], processes: Alone) -> None:
    """Replace sums and divisors by those over all processes, in place. Collective.

    A sum that is missing in some processes, such as that of a layer that their data do not call,
    counts as zero there.

    Args:
        accumulators: The same ones, in the same order, in all processes.

    Raises:
        NumericsError: If sums of this process are not finite: a sum over all would not say whose.
    """
    for accumulator in accumulators:
        for name, t in accumulator.sums.items():
            check_finite(t, f"{accumulator.layer.title}: the statistic {name!r}")
    shapes = [{name: (t.shape, t.dtype) for name, t in a.sums.items()} for a in accumulators]
    counts = [
        {name: n.cpu() if isinstance(n, Tensor) else n for name, n in a.counts.items()}
        for a in accumulators
    ]
    gathered = processes.gather((shapes, counts))
    for number, accumulator in enumerate(accumulators):
        device = accumulator.layer.device
        sums = accumulator.sums
        for theirs, _ in gathered:
            for name, (shape, dtype) in theirs[number].items():
                if name not in sums:
                    sums[name] = torch.zeros(shape, dtype=dtype, device=device)
        counts = [theirs[number] for _, theirs in gathered]
        for name in dict.fromkeys(name for theirs in counts for name in theirs):
            count = sum(theirs.get(name, 0.0) for theirs in counts)
            accumulator.counts[name] = count.to(device) if isinstance(count, Tensor) else count
        for name in sums:
            sums[name] = sums[name].contiguous()
    processes.sum_([a.sums[name] for a in accumulators for name in sorted(a.sums)])


def decompose_together(accumulators: Sequence[Accumulator], processes: Alone) -> None:
    """Make decompositions that `finish` needs: spread over processes, or on a device those of a
    size at once. Collective; arguments as above.

    On the CPU of one process each `finish` makes its own, and frees its sums.
    """
    device = accumulators[0].layer.device if accumulators else torch.device("cpu")
    if processes.world == 1 and device.type == "cpu":
        return
    jobs = [(a, name, M) for a in accumulators for name, M in a.decompositions().items()]
    if processes.world == 1:
        read_together(lambda: decompose_in_stacks([[M] for _, _, M in jobs]), device)
        for accumulator, name, M in jobs:
            if not M.lacks("eigh"):
                accumulator.decomposed[name] = accumulator.decompose(name, M)
        return

    def decompose(number: int) -> list[Tensor]:
        accumulator, name, M = jobs[number]
        return [accumulator.decompose(name, M)]

    matrices = [M.matrix for _, _, M in jobs]
    results = _spread(processes, matrices, decompose, lambda number: [matrices[number]])
    for (accumulator, name, _), (result,) in zip(jobs, results, strict=True):
        accumulator.decomposed[name] = result


def decompose_factors(blocks: Mapping[str, LinearOperator], damping: Any, processes: Alone) -> None:
    """Spread the eigendecompositions over processes that inverses of Kronecker products with this
    damping need.

    They are remembered by the factors, so that `inverse` and `power` find them. Collective.

    Args:
        blocks: The same ones in all processes.
        damping: Of the inverse. If it is more than numbers, factors may be inverted without
            eigendecompositions.
    """
    dampings = damping.values() if isinstance(damping, Mapping) else [damping]
    if processes.world == 1 or not all(isinstance(number, (Real, Tensor)) for number in dampings):
        return
    # Blocks may share a factor, which is decomposed once.
    factors: dict[int, Dense] = {}
    for block in blocks.values():
        for factor in (block.G, block.A) if isinstance(block, Kronecker) else ():
            if isinstance(factor, Dense) and factor.structure == Structure.PSD:
                factors[id(factor)] = factor
    ordered = list(factors.values())
    matrices = [factor.matrix for factor in ordered]

    def eigh(number: int) -> list[Tensor]:
        eigenvalues, Q = ordered[number].eigh()
        return [eigenvalues, Q.matrix]

    def like(number: int) -> list[Tensor]:
        return [matrices[number][..., 0], matrices[number]]

    for factor, (eigenvalues, Q) in zip(
        ordered, _spread(processes, matrices, eigh, like), strict=True
    ):
        # Also where it was computed: products depend on how it is stored, in the bits.
        factor.remember_eigh(eigenvalues, Q)


def costs_of(stages: Sequence[Stage]) -> float:
    """About how many operations `finish` of a layer's first stage takes, for `side_by_side`; 0: in
    the main thread.
    """
    sizes: list[int] = []
    for accumulator in stages[0].values():
        decomposes = type(accumulator).decompose is not Accumulator.decompose
        if not decomposes or accumulator.layer.device.type != "cpu":
            return 0.0
        for group in accumulator.groups:
            sizes += group.layout.matrix_shape[-2:]
    return float(sum(10 * size**3 for size in sizes))


def _spread(
    processes: Alone,
    matrices: Sequence[Tensor],
    compute: Callable[[int], Sequence[Tensor]],
    like: Callable[[int], Sequence[Tensor]],
) -> list[Sequence[Tensor]]:
    """`compute(k)` of each matrix, by one process, at a cost of `d³`; tensors as `like(k)` returns.
    Collective.
    """
    costs = [float(M.numel() * M.shape[-1]) for M in matrices]

    def compute_mine(jobs: list[int]) -> list[Sequence[Tensor]]:
        return side_by_side(compute, jobs, lambda job: 10 * costs[job])

    return processes.spread(costs, compute_mine, like)
