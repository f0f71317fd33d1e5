"""The sweeps over the data that turn a plan into blocks, in one process or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.plan import groups_within
from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.numerics import side_by_side
from curvlinops_plus.risk import ForwardOnly, Layer, LayerBatch, Totals
from curvlinops_plus.risk.batches import require_rereadable
from curvlinops_plus.risk.loss_passes import LossWeights, loss_weights, require_same
from curvlinops_plus.risk.preserve import preserve_state, untraced
from curvlinops_plus.risk.record import sweep

# The default memory for what stays between sweeps. On small networks the second sweep is what costs
# time, on large ones eigendecompositions and memory count.
KEPT_BYTES = 2**24

# Accumulators of a layer by block names, as `LayerPlan.accumulators` makes them.
Stage = dict[str, Accumulator]


class Sweeps:
    """Sweeps over the data, for one group of layers after the other, and the blocks that are
    finished so far.

    Args:
        K: The `BlockwiseLinearOperator` whose blocks they are, with its plan and options.
        max_kept_bytes: Memory for what layers receive that is kept for the next sweep, all or
            nothing. Model and data must not change until then.

    Attributes:
        groups: Of each group the layers that need a sweep, with their accumulators for it.
        totals: Of each pass over the data.

    Raises:
        UnsupportedError: If a layer alone needs more than the operator's `max_bytes`.
    """

    def __init__(self, K: Any, max_kept_bytes: int = 0) -> None:
        self.K, self.risk = K, K.risk
        self.layers = [entry.layer for entry in K.plan]
        groups, left = (
            ([K.plan], max_kept_bytes)
            if K.max_bytes is None
            else groups_within(K.plan, K.max_bytes)
        )
        self.groups: list[dict[Layer, Stage]] = [
            {entry.layer: entry.accumulators(K.risk.scale) for entry in group} for group in groups
        ]
        self.blocks: dict[str, LinearOperator] = {}
        self.totals: list[Totals] = []
        self._group = self._number = 0
        self._max_bytes = min(max_kept_bytes, left)
        self._kept: Kept | None = None  # what this sweep keeps, or the one before has kept
        self._weights: LossWeights | None = None

    @untraced
    def run(self, max_sweeps: int | None = None) -> None:
        """Sweep until all blocks are finished.

        With the operator's `check_deterministic` the total loss of the first two passes over the
        data is compared; unless `max_sweeps` is given, a single one is followed by a forward pass
        for that. None: two evaluations of a few examples have to agree. False: not even these.

        Args:
            max_sweeps: Stop after this number of sweeps.

        Raises:
            ValueError: If a layer never ran, a second pass sees another number of examples, or the
                data can be read only once and are needed again.
            NumericsError: If a statistic is not finite; names layer and statistic.
            RuntimeError: If two passes disagree.
        """
        last, check = (
            None if max_sweeps is None else self._number + max_sweeps,
            self.K.check_deterministic,
        )
        with preserve_state(self.risk.model, self.risk.data):
            while self._number != last:
                if not self.groups[self._group]:
                    if self._group == len(self.groups) - 1:
                        break
                    self._group, self._kept = self._group + 1, None
                self._sweep(self.groups[self._group])
                if check and len(self.totals) == 2:
                    require_same(self.risk, *self.totals)
                self.groups[self._group] = self._finish(self.groups[self._group])
            if check and last is None and len(self.totals) == 1:
                advice = ", or check_deterministic=False"
                require_rereadable(self.risk.data, "the determinism check reads it again", advice)
                again = sweep(
                    self.risk, [], ForwardOnly(), lambda batch: None, desc="determinism check"
                )
                require_same(self.risk, self.totals[0], again)

    def _sweep(self, stages: dict[Layer, Stage]) -> None:
        """Show all data to accumulators: read them, or replay what was kept of the sweep before."""
        risk, vectors = self.risk, self.K.vectors
        if self.totals:
            require_rereadable(risk.data, "another sweep over it is needed")
        self._number += 1
        desc = f"{type(self.K).__name__} sweep {self._number}"
        if len(self.groups) > 1:
            desc += f", group {self._group + 1} of {len(self.groups)}"

        def consume(batch: LayerBatch) -> None:
            for a in stages.get(batch.layer, {}).values():
                a.update(batch if a.group is None else batch.restrict(a.group))
            if kept is not None:
                kept.add(batch)

        kept, before = None, self._kept
        if before is not None and all(risk.processes.gather(before.has(stages))):
            bar = f"{desc} (kept)" if risk.options.progressbar else None
            for batch in tqdm(before.batches, desc=bar, disable=bar is None):
                with plain_mode(batch.layer.device.type):
                    consume(_copied(batch))
            return
        again = {layer for layer, own in stages.items() if any(a.sweeps > 1 for a in own.values())}
        keeps = self._max_bytes and again and isinstance(risk.data, (list, tuple))
        self._kept = kept = Kept(self._max_bytes, again) if keeps else None
        if self._weights is None and vectors.backward:
            self._weights = loss_weights(risk)
        # All layers, also those that are finished or come later: so vectors are sent in the same
        # pieces, and numbers do not depend on groups and on what is kept.
        repeatable = self.K.check_deterministic is not False
        totals = sweep(
            risk,
            self.layers,
            vectors,
            consume,
            desc=desc,
            weights=self._weights,
            repeatable=repeatable,
        )
        for problem, reached in (
            ("was never called", totals.called),
            ("does not reach the output", totals.reached),
        ):
            layer = next(
                (layer for index, layer in enumerate(self.layers) if index not in reached), None
            )
            if layer is not None:
                raise ValueError(
                    f"{layer.title} ({type(layer.uses[0].owner).__name__}) {problem} in any batch, "
                    f"so its parameters {list(layer.params)} have no curvature here. Leave them "
                    "out of `params`, or check the model's forward."
                )
        if self.totals and totals.examples != self.totals[0].examples:
            raise ValueError(
                f"`data` gave {self.totals[0].examples} examples in one sweep and "
                f"{totals.examples} in the next; every sweep must see the same data."
            )
        self.totals.append(totals)

    def _finish(self, stages: dict[Layer, Stage]) -> dict[Layer, Stage]:
        """Make blocks of sums, which are given up as soon as they are used; what needs another
        sweep. Collective.
        """
        processes, owners, device = self.risk.processes, self.K.owners, self.K.kept_on
        accumulators = [a for stage in stages.values() for a in stage.values()]
        if processes.world > 1:
            add_over_processes(accumulators, processes)
        for a in accumulators:
            a.totals, a.complete = self.totals[-1], True
        if processes.world > 1:
            decompose_together(accumulators, processes)
        del accumulators, a

        def finish(layer: Layer) -> dict[str, Any]:
            return {
                name: a.finish()
                for name, a in stages.pop(layer).items()
                if owners is None or a.sweeps > 1 or owners[name] == processes.rank
            }

        layers, pending = list(stages), dict[Layer, Stage]()
        with plain_mode(self.risk.device.type):
            results = side_by_side(finish, layers, lambda layer: costs_of(stages[layer]))
        for layer, found in zip(layers, results, strict=True):
            for name, result in found.items():
                if isinstance(result, Accumulator):
                    pending.setdefault(layer, {})[name] = result
                    continue
                blocks = {name: result} if isinstance(result, LinearOperator) else result
                self.blocks |= (
                    blocks
                    if device is None
                    else {n: b.to(device, self.risk.dtype) for n, b in blocks.items()}
                )
        return pending


class Kept:
    """What layers received in a sweep, which the next one sends them again: cheaper than running
    the model once more.

    All of it is dropped when it becomes too large. For data in lists, which stay where they are: a
    loader may fill one memory for all batches.

    Args:
        max_bytes: The largest memory that it may hold. A tensor that several layers read counts
            once.
        layers: The layers whose batches are kept.
    """

    def __init__(self, max_bytes: int, layers: set[Layer]) -> None:
        self._left, self._layers = max_bytes, layers
        self.batches: list[LayerBatch] = []
        self._storages: set[int] = set()  # their addresses
        self._versions: list[tuple[Tensor, int]] = []

    def add(self, batch: LayerBatch) -> None:
        """Keep a batch, if it is of one of the layers."""
        if self._left < 0 or batch.layer not in self._layers:
            return
        own = _copied(batch)
        parts = [(call.args, dict(call.kwargs), call.grads) for call in own.calls]
        for t in tree_leaves([parts, own.mask, own.example_weights]):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._left -= storage.nbytes()
                self._versions.append((t, t._version))
        self.batches.append(own)
        if self._left < 0:
            self.batches, self._versions = [], []

    def has(self, layers: Iterable[Layer]) -> bool:
        """Whether everything that these layers received is here, unmodified."""
        unmodified = all(t._version == version for t, version in self._versions)
        return self._left >= 0 and unmodified and set(layers) <= self._layers


def _copied(batch: LayerBatch) -> LayerBatch:
    """A batch of its own calls, as a sweep removes the gradients from its own ones."""
    return replace(batch, calls=[replace(call) for call in batch.calls])


def costs_of(stage: Stage) -> float:
    """About how many operations `finish` of a stage takes, for `side_by_side`; 0: in the main
    thread.
    """
    if not all(
        type(a).decompose is not Accumulator.decompose and a.layer.device.type == "cpu"
        for a in stage.values()
    ):
        return 0.0
    sizes = (
        size
        for a in stage.values()
        for group in a.groups
        for size in group.layout.matrix_shape[-2:]
    )
    return float(sum(10 * size**3 for size in sizes))


# -------------------------------------------------------------------------------- several processes


def add_over_processes(accumulators: Sequence[Accumulator], processes: Alone) -> None:
    """Replace sums and divisors by those over all processes, in place. Collective.

    A sum that is missing in some processes, such as that of a layer that their data do not call,
    counts as zero there.

    Args:
        accumulators: The same ones, in the same order, in all processes.
    """
    shapes = [{name: (t.shape, t.dtype) for name, t in a.sums.items()} for a in accumulators]
    counts = [
        {n: c.cpu() if isinstance(c, Tensor) else c for n, c in a.counts.items()}
        for a in accumulators
    ]
    told = processes.gather((shapes, counts))
    for k, a in enumerate(accumulators):
        sums, device = a.sums, a.layer.device
        for name, (shape, dtype) in {
            n: like for theirs, _ in told for n, like in theirs[k].items()
        }.items():
            sums[name] = (
                sums[name].contiguous()
                if name in sums
                else torch.zeros(shape, dtype=dtype, device=device)
            )
        for name in {n: None for _, theirs in told for n in theirs[k]}:
            count = sum(theirs[k].get(name, 0.0) for _, theirs in told)
            a.counts[name] = count.to(device) if isinstance(count, Tensor) else count
    processes.sum_([a.sums[name] for k, a in enumerate(accumulators) for name in sorted(a.sums)])


def decompose_together(accumulators: Sequence[Accumulator], processes: Alone) -> None:
    """Spread the decompositions that `finish` needs over processes. Collective; arguments as
    above.
    """
    if processes.world > 1:
        jobs = [(a, name, M) for a in accumulators for name, M in a.decompositions().items()]
        found = _spread(
            processes,
            [M for *_, M in jobs],
            lambda k: [jobs[k][0].decompose(*jobs[k][1:])],
            lambda k: [jobs[k][2]],
        )
        for (a, name, _), (result,) in zip(jobs, found, strict=True):
            a.decomposed[name] = result


def decompose_factors(blocks: Mapping[str, LinearOperator], damping: Any, processes: Alone) -> None:
    """Spread the eigendecompositions over processes that inverses of Kronecker products with this
    damping need.

    They are remembered by the factors, so that `inverse` and `power` find them. Collective.

    Args:
        blocks: The same ones in all processes.
        damping: Of the inverse. If it is more than numbers, factors may be inverted without
            eigendecompositions.
    """
    numbers = damping.values() if isinstance(damping, Mapping) else [damping]
    if processes.world == 1 or not all(isinstance(number, (Real, Tensor)) for number in numbers):
        return
    of_products = [
        f for block in blocks.values() if isinstance(block, Kronecker) for f in (block.G, block.A)
    ]
    factors = list(
        {
            id(f): f for f in of_products if isinstance(f, Dense) and f.structure == Structure.PSD
        }.values()
    )

    def eigh(k: int) -> list[Tensor]:
        values, Q = factors[k].eigh()
        return [values, Q.matrix]

    matrices = [f.matrix for f in factors]
    found = _spread(processes, matrices, eigh, lambda k: [matrices[k][..., 0], matrices[k]])
    for factor, (values, Q) in zip(factors, found, strict=True):
        factor.remember_eigh(
            values, Q
        )  # also where it was computed: products depend on how it is stored, in the bits


def _spread(
    processes: Alone, matrices: Sequence[Tensor], compute: Any, like: Any
) -> list[Sequence[Tensor]]:
    """`compute(k)` of each matrix, by one process, at a cost of `d³`; tensors as `like(k)` returns.
    Collective.
    """
    costs = [float(M.numel() * M.shape[-1]) for M in matrices]
    mine = lambda jobs: side_by_side(compute, jobs, lambda k: 10 * costs[k])  # noqa: E731
    return processes.spread(costs, mine, like)
