"""Sums and decompositions of accumulators by several processes, each of which has seen a part of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError, ProcessError
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.side_by_side import side_by_side
from curvlinops_plus.risk import Totals

# Name of a sum to its shape and dtype, and the same of divisors that are tensors.
Shapes = dict[str, tuple[list[int], torch.dtype]]


def sum_over_processes(accumulators: Iterable[Accumulator], processes: Alone) -> None:
    """Replace sums, divisors and totals by those over all processes, in place. Collective.

    A sum that is missing in some processes, such as that of a layer that their data do not call, counts as zero there.

    Args:
        accumulators: The same ones, in the same order, in all processes.

    Raises:
        NumericsError: If a sum of this process has NaN or infinite entries; names layer and statistic.
        ProcessError: If the accumulators of the processes are of different layers or shapes.
        ValueError: If several losses had other weights in other processes.
    """
    if processes.world == 1:
        return
    accumulators = list(accumulators)
    for accumulator in accumulators:
        _require_finite(accumulator)
    told = processes.gather(_described(accumulators))
    _require_same_kinds([one["kinds"] for one in told])
    tensors: list[Tensor] = []
    unions: dict[tuple[int, ...], Totals] = {}  # most accumulators have the same totals
    for index, accumulator in enumerate(accumulators):
        own = {name: [one[name][index] for one in told] for name in told[0]}
        tensors += _completed(accumulator, own)
        key = tuple(map(id, own["totals"]))
        unions[key] = unions.get(key) or Totals.union(own["totals"])
        accumulator.totals = replace(unions[key])
    processes.sum_(tensors)


def _completed(accumulator: Accumulator, told: Mapping[str, list[Any]]) -> Iterator[Tensor]:
    """The tensors of an accumulator that processes add, with zeros for what others have alone.

    Divisors that are numbers are added at once.
    """
    sums, counts, device = accumulator.sums, accumulator.counts, accumulator.layer.device
    for name, (shape, dtype) in _united(told["kinds"][0], told["sums"]).items():
        sums[name] = sums[name].contiguous() if name in sums else torch.zeros(shape, dtype=dtype, device=device)
        yield sums[name]
    with_axes = _united(told["kinds"][0], told["tensor counts"])
    for name, (shape, dtype) in with_axes.items():
        counts[name] = own = torch.zeros(shape, dtype=dtype, device=device) + counts.get(name, 0.0)
        yield own
    for name in {name for numbers in told["counts"] for name in numbers} - with_axes.keys():
        counts[name] = sum(numbers.get(name, 0.0) for numbers in told["counts"])


def decompose_together(accumulators: Iterable[Accumulator], processes: Alone) -> None:
    """Spread the decompositions that `finish` needs over processes, by their cost, `d³`. Collective.

    Args:
        accumulators: The same ones, in the same order, in all processes.

    Raises:
        NumericsError: If one of this process fails; names layer and factor.
    """
    if processes.world == 1:
        return
    jobs = [(a, name, M) for a in accumulators for name, M in a.decompositions().items()]
    found = spread(processes, [M for *_, M in jobs], lambda k: [jobs[k][0].decompose(*jobs[k][1:])], lambda M: [M])
    for (accumulator, name, _), (result,) in zip(jobs, found, strict=True):
        accumulator.decomposed[name] = result


def decompose_factors(blocks: Mapping[str, LinearOperator], damping: Any, processes: Alone) -> None:
    """Spread the eigendecompositions over processes that inverses of Kronecker products with this damping need.

    They are remembered by the factors, so that `inverse` and `power` find them. Collective.

    Args:
        blocks: The same ones in all processes.
        damping: Of the inverse. If it is more than numbers, factors may be inverted without eigendecompositions.
    """
    numbers = damping.values() if isinstance(damping, Mapping) else [damping]
    if processes.world == 1 or not all(isinstance(number, (Real, Tensor)) for number in numbers):
        return
    products = [block for block in blocks.values() if isinstance(block, Kronecker)]
    of_products = [factor for block in products for factor in (block.G, block.A)]
    factors = {id(f): f for f in of_products if isinstance(f, Dense) and f.structure == Structure.PSD}
    jobs = list(factors.values())

    def eigh(k: int) -> list[Tensor]:
        values, Q = jobs[k].eigh()
        return [values, Q.matrix]

    found = spread(processes, [factor.matrix for factor in jobs], eigh, lambda M: [M[..., 0], M])
    for factor, (values, Q) in zip(jobs, found, strict=True):
        factor.remember_eigh(values, Q)  # also where it was computed: products depend on how it is stored, in the bits


def spread(
    processes: Alone,
    matrices: Sequence[Tensor],
    compute: Callable[[int], Sequence[Tensor]],
    like: Callable[[Tensor], Sequence[Tensor]],
) -> list[Sequence[Tensor]]:
    """Results of decompositions of these matrices, at a cost of `d³`, each computed by one process. Collective."""
    costs = [float(M.numel() * M.shape[-1]) for M in matrices]
    mine = lambda jobs: side_by_side(compute, jobs, lambda k: 10 * costs[k])  # noqa: E731
    return processes.spread(costs, mine, lambda k: like(matrices[k]))


def _described(accumulators: Sequence[Accumulator]) -> dict[str, Any]:
    """What processes tell each other: small objects."""
    totals: list[Totals] = []
    for accumulator in accumulators:
        own = accumulator.totals.plain()
        totals.append(totals[-1] if totals and totals[-1] == own else own)  # the same object is sent once
    return {
        "kinds": [f"{type(a).__name__} of layer {a.layer.name!r}" for a in accumulators],
        "sums": [_shapes(a.sums) for a in accumulators],
        "tensor counts": [_shapes(a.counts) for a in accumulators],
        "counts": [{name: float(c) for name, c in a.counts.items() if not _has_axes(c)} for a in accumulators],
        "totals": totals,
    }


def _has_axes(count: Any) -> bool:
    return isinstance(count, Tensor) and count.ndim > 0


def _shapes(tensors: Mapping[str, Any]) -> Shapes:
    return {name: ([*t.shape], t.dtype) for name, t in tensors.items() if _has_axes(t)}


def _united(kind: str, told: Sequence[Shapes]) -> Shapes:
    """The sums that any process has."""
    united: Shapes = {}
    for rank, shapes in enumerate(told):
        for name, shape in shapes.items():
            if united.setdefault(name, shape) != shape:
                raise ProcessError(
                    f"{kind}: the statistic {name!r} has {shape[1]} {shape[0]} in process {rank}, and "
                    f"{united[name][1]} {united[name][0]} in another one. Models and options have to be the same."
                )
    return united


def _require_same_kinds(told: Sequence[Sequence[str]]) -> None:
    for rank, kinds in enumerate(told):
        if kinds != told[0]:
            here, there = [*dict.fromkeys(told[0])], [*dict.fromkeys(kinds)]
            raise ProcessError(
                f"The processes have statistics of different layers: {[k for k in here if k not in there]} only in "
                f"process 0, {[k for k in there if k not in here]} only in process {rank} (of {len(here)} and "
                f"{len(there)}). Models, parameters and approximations have to be the same."
            )


def _require_finite(accumulator: Accumulator) -> None:
    for name, total in accumulator.sums.items():
        if not bool(total.sum().isfinite()) and not bool(total.isfinite().all()):
            raise NumericsError(f"{accumulator.layer.title}: the statistic {name!r} has NaN or infinite entries.")
