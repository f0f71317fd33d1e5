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
from curvlinops_plus.distributed.schedule import schedule
from curvlinops_plus.errors import NumericsError, ProcessError
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.side_by_side import side_by_side
from curvlinops_plus.risk import Totals

# Name of a sum to its shape and dtype, and the same of divisors that are tensors.
Shapes = dict[str, tuple[list[int], torch.dtype]]


# Of each accumulator the rank of the only process that needs its sums, None if all do.
Needed = Sequence[int | None]


def sum_over_processes(accumulators: Iterable[Accumulator], processes: Alone, owners: Needed | None = None) -> None:
    """Replace sums, divisors and totals by those over all processes, in place. Collective.

    A sum that is missing in some processes, such as that of a layer that their data do not call, counts as zero there.

    Args:
        accumulators: The same ones, in the same order, in all processes.
        owners: Of each accumulator the rank of the only process that needs its sums, which are those of a part of the
            data in others; default: all need all.

    Raises:
        NumericsError: If a sum of this process has NaN or infinite entries; names layer and statistic.
        ProcessError: If the accumulators of the processes are of different layers or shapes.
        ValueError: If several losses had other weights in other processes.

    Cost: one triangle of each symmetric sum is sent, and all numbers of others.
    """
    if processes.world == 1:
        return
    accumulators = list(accumulators)
    for accumulator in accumulators:
        _require_finite(accumulator)
    told = processes.gather("comparing statistics", _described(accumulators))
    _require_same_kinds([one["kinds"] for one in told])
    tensors: list[Tensor] = []
    symmetric: list[bool] = []
    receivers: list[int | None] = []
    unions: dict[tuple[int, ...], Totals] = {}  # most accumulators have the same totals
    for index, accumulator in enumerate(accumulators):
        own = {name: [one[name][index] for one in told] for name in told[0]}
        for t, half in _completed(accumulator, own):
            tensors.append(t)
            symmetric.append(half)
            receivers.append(None if owners is None else owners[index])
        key = tuple(map(id, own["totals"]))
        unions[key] = unions.get(key) or Totals.union(own["totals"])
        accumulator.totals = replace(unions[key])
    processes.sum_("adding statistics", tensors, symmetric, receivers)


def _completed(accumulator: Accumulator, told: Mapping[str, list[Any]]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of an accumulator that processes add, with zeros for what others have alone; and whether symmetric.

    Divisors that are numbers are added at once.
    """
    sums, counts, device = accumulator.sums, accumulator.counts, accumulator.layer.device
    for name, (shape, dtype) in _united(told["kinds"][0], told["sums"]).items():
        sums[name] = sums[name].contiguous() if name in sums else torch.zeros(shape, dtype=dtype, device=device)
        yield sums[name], accumulator.symmetric and len(shape) > 1 and shape[-1] == shape[-2]
    with_axes = _united(told["kinds"][0], told["tensor counts"])
    for name, (shape, dtype) in with_axes.items():
        counts[name] = own = torch.zeros(shape, dtype=dtype, device=device) + counts.get(name, 0.0)
        yield own, False
    for name in {name for numbers in told["counts"] for name in numbers} - with_axes.keys():
        counts[name] = sum(numbers.get(name, 0.0) for numbers in told["counts"])


def decompose_together(accumulators: Iterable[Accumulator], processes: Alone, owners: Needed | None = None) -> None:
    """Spread the decompositions that `finish` needs over processes, by their cost, `d³`. Collective.

    Args:
        accumulators: The same ones, in the same order, in all processes.
        owners: Of each accumulator the rank of the only process that has its sums, which decomposes them; default: all
            have all.

    Raises:
        NumericsError: If one of this process fails; names layer and factor.
    """
    if processes.world == 1:
        return
    accumulators = list(accumulators)
    known = [None] * len(accumulators) if owners is None else owners
    jobs, ranks = [], []
    for a, rank in zip(accumulators, known, strict=True):
        for name, M in a.decompositions().items():
            jobs.append((a, name, M))
            ranks.append(rank)
    matrices = [M for _, _, M in jobs]
    found = _share_out(
        [[M] for M in matrices], matrices, lambda k: [jobs[k][0].decompose(*jobs[k][1:])], processes, ranks
    )
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

    matrices = [factor.matrix for factor in jobs]
    found = _share_out([[M[..., 0], M] for M in matrices], matrices, eigh, processes)
    for factor, (values, Q) in zip(jobs, found, strict=True):
        factor.remember_eigh(values, Q)  # also where it was computed: products depend on how it is stored, in the bits


def _share_out(
    like: Sequence[Sequence[Tensor]],
    matrices: Sequence[Tensor],
    compute: Callable[[int], Sequence[Tensor]],
    processes: Alone,
    owners: Needed | None = None,
) -> list[list[Tensor]]:
    """Results of decompositions, each computed by one process. Collective.

    Args:
        like: For each, tensors of the shapes and dtypes of its results.
        matrices: What is decomposed, at a cost of `d³`.
        compute: Computes the results of number `k`.
        owners: The rank that computes each, where it is given.
    """
    costs = [float(M.numel() * M.shape[-1]) for M in matrices]
    workers = schedule(costs, processes.world)
    if owners is not None:
        workers = [worker if owner is None else owner for worker, owner in zip(workers, owners, strict=True)]
    mine = [k for k, worker in enumerate(workers) if worker == processes.rank]
    results = [[torch.empty_like(t, memory_format=torch.contiguous_format) for t in each] for each in like]
    for k, found in zip(mine, side_by_side(compute, mine, lambda k: 10 * costs[k]), strict=True):
        for result, t in zip(results[k], found, strict=True):
            result.copy_(t)
    sent = [(t, worker) for each, worker in zip(results, workers, strict=True) for t in each]
    processes.hand_out("decompositions", [t for t, _ in sent], [worker for _, worker in sent])
    return results


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
