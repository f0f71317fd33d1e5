"""The sweeps over the data that turn a plan into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from curvlinops_plus.blocks.accumulator import Accumulator, add_batch, finish_work
from curvlinops_plus.blocks.memory import groups_within
from curvlinops_plus.blocks.over_processes import decompose_together, sum_over_processes
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.blocks.stored_options import same_data
from curvlinops_plus.blocks.sweep_cache import SweepCache
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.side_by_side import side_by_side
from curvlinops_plus.risk import EmpiricalRisk, ForwardOnly, Layer, LayerBatch, Totals, Vectors
from curvlinops_plus.risk.batches import require_rereadable
from curvlinops_plus.risk.determinism import require_same
from curvlinops_plus.risk.function_reads import describe_reads, rebuild_reads
from curvlinops_plus.risk.losses import LossWeights, loss_weights
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import untraced
from curvlinops_plus.risk.record import OutsideReads
from curvlinops_plus.risk.sweep import sweep


class Accumulation:
    """The accumulators of a plan, and the blocks that are finished so far.

    Args:
        title: Begins the text of progress bars.
        max_kept_bytes: Memory for what layers receive that is kept for the next sweep, all or nothing. Model and data
            must not change until then.
        max_bytes: Memory for the statistics of layers: they are taken in groups that fit, each with sweeps of its own.
            None: all at once.
        offload: The device to which the blocks of a group are moved when they are finished; None leaves them.
        owners: Accumulator name to the rank of the only process that needs its blocks; default: all do.

    Raises:
        UnsupportedError: If a layer alone needs more than `max_bytes`.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        plan: Iterable[LayerPlan],
        vectors: Vectors,
        title: str,
        max_kept_bytes: int = 0,
        max_bytes: int | None = None,
        offload: str | torch.device | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self.risk, self.vectors, self.title = risk, vectors, title
        plan = list(plan)
        self.owners = owners
        self.layers = [entry.layer for entry in plan]
        self._waiting, left = groups_within(plan, max_bytes)
        self._groups = len(self._waiting)
        #: Per layer, the accumulators of the next sweep; empty if its blocks are finished.
        self.pending: dict[Layer, dict[str, Accumulator]] = self._next_group()
        self.blocks: dict[str, LinearOperator] = {}
        #: Of each pass over the data.
        self.totals: list[Totals] = []
        self.sweeps = 0
        self._max_bytes = max_kept_bytes if left is None else min(max_kept_bytes, left)
        self._offload = offload
        self._cache: SweepCache | None = None  # what this sweep keeps, or the one before has kept
        self._weights: LossWeights | None = None

    @untraced
    def run(self, max_sweeps: int | None = None, check_deterministic: bool | None = None) -> None:
        """Sweep until all blocks are finished.

        Args:
            max_sweeps: Stop after this number of sweeps.
            check_deterministic: Compare the total loss of the first two passes over the data. Unless `max_sweeps` is
                given, a single one is followed by a forward pass for that. None: two evaluations of a few examples have
                to agree. False: not even these.

        Raises:
            ValueError: If a layer never ran, a second pass sees another number of examples, or the data can be read
                only once and are needed again.
            NumericsError: If a statistic is not finite; names layer and statistic.
            RuntimeError: If two passes disagree.
        """
        last = None if max_sweeps is None else self.sweeps + max_sweeps
        with preserve_state(self.risk.model, self.risk.data):
            while self._goes_on() and self.sweeps != last:
                self._sweep(repeatable=check_deterministic is not False)
                if check_deterministic and len(self.totals) == 2:
                    require_same(self.risk, *self.totals)
                self._finish()
            if check_deterministic and last is None and len(self.totals) == 1:
                require_rereadable(
                    self.risk.data, "the determinism check reads it again", ", or check_deterministic=False"
                )
                again = sweep(self.risk, [], ForwardOnly(), _ignore, desc="determinism check")
                require_same(self.risk, self.totals[0], again)

    def _next_group(self) -> dict[Layer, dict[str, Accumulator]]:
        return {entry.layer: entry.accumulators(self.risk.scale) for entry in self._waiting.pop(0)}

    def _goes_on(self) -> bool:
        """Whether something is left to do; begins with the next group of layers if the present one is finished."""
        if not any(self.pending.values()) and self._waiting:
            self.pending, self._cache = self._next_group(), None
        return any(self.pending.values())

    def _sweep(self, repeatable: bool) -> None:
        """Show all data to the pending accumulators: read them, or replay what was kept of the sweep before.

        Args:
            repeatable: Whether two evaluations of the model have to agree.
        """
        layers = [layer for layer, accumulators in self.pending.items() if accumulators]
        if self.totals:
            require_rereadable(self.risk.data, "another sweep over it is needed")
        self.sweeps += 1
        desc = f"{self.title} sweep {self.sweeps}{self._of_groups()}"
        self._share_totals()
        kept, self._cache = self._cache, None
        if kept is not None and all(self.risk.processes.gather(kept.can_replay(layers))):
            kept.replay(self._add, self._count, f"{desc} (kept)" if self.risk.options.progressbar else None)
            self._cache = kept
            return
        again = [layer for layer in layers if any(a.needs_another_sweep for a in self.pending[layer].values())]
        if self._max_bytes and again and isinstance(self.risk.data, (list, tuple)):
            self._cache = SweepCache(self._max_bytes, again, filter(self._squares_again, again))
        if self._weights is None and self.vectors.backward:
            self._weights = loss_weights(self.risk)
        # All layers, also those that are finished or come later: so vectors are sent in the same pieces, and numbers
        # do not depend on groups and on what is kept.
        totals = sweep(self.risk, self.layers, self.vectors, self._add, self._count, desc, self._weights, repeatable)
        self._check(totals)
        self.totals.append(totals)

    def _squares_again(self, layer: Layer) -> bool:
        return all(accumulator.squares_again for accumulator in self.pending[layer].values())

    def _share_totals(self) -> None:
        """Let accumulators that begin now count their batches together."""
        every = [a for own in self.pending.values() for a in own.values()]
        begun = Totals()
        for a in every:
            a.totals = a.totals if a.totals.examples else begun
        self._counted = [*{id(a.totals): a.totals for a in every}.values()]

    def _of_groups(self) -> str:
        return f", group {self._groups - len(self._waiting)} of {self._groups}" if self._groups > 1 else ""

    def _add(self, batch: LayerBatch) -> None:
        add_batch(self.pending, batch)
        if self._cache is not None:
            self._cache.add(batch)

    def _count(self, batch_totals: Totals) -> None:
        for totals in self._counted:
            totals.add(batch_totals)
        if self._cache is not None:
            self._cache.end_of_batch(batch_totals)

    def _finish(self) -> None:
        """Turn sums into blocks, or into the accumulators of the next sweep."""
        if self.risk.processes.world > 1:
            self._add_over_processes()
        finished: dict[str, LinearOperator] = {}
        for layer, results in self._finish_accumulators().items():
            for name, result in results.items():
                if isinstance(result, Accumulator):
                    self.pending[layer][name] = result
                else:
                    found = {name: result} if isinstance(result, LinearOperator) else result
                    finished |= found
        if self._offload is not None:
            finished = {name: block.to(self._offload, self.risk.dtype) for name, block in finished.items()}
        self.blocks |= finished

    def _add_over_processes(self) -> None:
        """Sums of all processes in place of those of this one, and their decompositions."""
        accumulators = [a for of_layer in self.pending.values() for a in of_layer.values()]
        sum_over_processes(accumulators, self.risk.processes)
        decompose_together(accumulators, self.risk.processes)

    def _finish_accumulators(self) -> dict[Layer, dict[str, Any]]:
        """What `finish` of every accumulator returns; its sums are given up as soon as it has."""
        pending, self.pending = self.pending, {layer: {} for layer in self.pending}

        def finish(layer: Layer) -> dict[str, Any]:
            return {
                name: accumulator.finish_for_good()
                for name, accumulator in pending.pop(layer).items()
                if self.owners is None
                or accumulator.needs_another_sweep
                or self.owners[name] == self.risk.processes.rank
            }

        layers = list(pending)
        with plain_mode(self.risk.device.type):
            results = side_by_side(finish, layers, lambda layer: finish_work(layer, pending[layer]))
        return dict(zip(layers, results, strict=True))

    def _check(self, totals: Totals) -> None:
        for problem, reached in (("was never called", totals.called), ("does not reach the output", totals.reached)):
            layer = next((layer for index, layer in enumerate(self.layers) if index not in reached), None)
            if layer is not None:
                raise ValueError(
                    f"{layer.title} ({type(layer.uses[0].owner).__name__}) {problem} in any batch, so its parameters "
                    f"{list(layer.params)} have no curvature here. Leave "
                    "them out of `params`, or check the model's forward."
                )
        if self.totals and totals.examples != self.totals[0].examples:
            raise ValueError(
                f"`data` gave {self.totals[0].examples} examples in one sweep and {totals.examples} in the next; "
                "every sweep must see the same data."
            )


def _ignore(batch: LayerBatch) -> None:
    pass


class Planned(Protocol):
    """What an accumulation needs of the operator whose blocks it computes."""

    risk: EmpiricalRisk
    vectors: Vectors
    plan: list[LayerPlan]

    @property
    def owners(self) -> Mapping[str, int] | None: ...

    def described(self) -> dict[str, Any]:
        """Its options, which have to be the same in all processes."""
        ...

    def learn_reads(self, *, error: OutsideReads) -> None:
        """Take into the plan how functions read parameters."""

    def renew_plan(self) -> None:
        """Make the plan anew, from how functions read parameters."""

    def confirm_plan(self) -> None:
        """Say what the plan leaves to say, as it will not change any more."""


def run_accumulation(
    K: Planned,
    max_kept_bytes: int = 0,
    max_bytes: int | None = None,
    offload: str | torch.device | None = None,
    **options: Any,
) -> Accumulation:
    """An accumulation of an operator that has run, with options of `Accumulation.run`. Collective.

    If a parameter turns out to be read outside of its layer, its reads are taken into the plan.
    """

    title = type(K).__name__

    def work() -> Accumulation:
        while True:
            _agree_on_reads(K)
            accumulation = Accumulation(K.risk, K.plan, K.vectors, title, max_kept_bytes, max_bytes, offload, K.owners)
            try:
                accumulation.run(**options)
            except OutsideReads as error:
                require_rereadable(K.risk.data, "it is looked at again for functions that read parameters")
                K.learn_reads(error=error)  # raises the error again if it finds no more than was known
            else:
                K.confirm_plan()
                return accumulation

    return K.risk.together(work, same=K.described)


def _agree_on_reads(K: Planned) -> None:
    if K.risk.processes.world > 1:
        take_reads(K, K.risk.processes.gather(describe_reads(K.risk.reads)))


def take_reads(K: Planned, told: Iterable[Any]) -> None:
    """Take over what processes know of functions that read parameters; those without examples know nothing."""
    found = [one for one in told if one is not None]
    most = max(found, key=lambda one: len(one["products"]) + len(one["enclosing"]), default=None)
    if not same_data(most, describe_reads(K.risk.reads)):
        K.risk.reads = rebuild_reads(K.risk, most)
        K.renew_plan()
