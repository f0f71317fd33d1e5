"""Sums of a plan that grow batch by batch: what a streaming estimator keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isfinite
from typing import Any

import torch

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, add_batch, finish_work, share_totals
from curvlinops_plus.blocks.over_processes import decompose_together, sum_over_processes
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.blocks.step import Step
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.side_by_side import side_by_side
from curvlinops_plus.risk import Layer, LayerBatch, Totals
from curvlinops_plus.risk.record import OutsideReads

# Accumulators by block names, as `LayerPlan.accumulators` makes them.
Stage = dict[str, Accumulator]


class RunningSums:
    """For each layer a list of stages, one for each sweep that its approximation needs.

    Stages after the first one exist as soon as the layer was called.

    Args:
        stages: The stages of each layer.

    The totals of a layer are those of the steps that have called it; layers with the same past share them.
    """

    def __init__(self, stages: Mapping[Layer, list[Stage]]) -> None:
        self.stages = dict(stages)
        #: The accumulators of each layer, by its index.
        self._of_layers = [_all_of(own) for own in self.stages.values()]
        for first, *others in self._of_layers:
            share_totals(others, first.totals)

    @classmethod
    def of_plan(cls, plan: Sequence[LayerPlan], scale: LossScale) -> RunningSums:
        """No sums yet."""
        return cls({entry.layer: [entry.accumulators(scale)] for entry in plan})._sharing(Totals())

    # --------------------------------------------------------------------------------------------------------- adding
    def of_batch(
        self, show: Callable[[Callable[[LayerBatch], None]], Totals], processes: Alone
    ) -> tuple[RunningSums, Totals]:
        """The sums of one batch alone, in the bases of these.

        Args:
            show: Shows the batch to a consumer and returns its totals; called more than once if a layer is called for
                the first time whose approximation needs several sweeps.
            processes: Those whose batches determine the bases of such layers. Collective.

        Raises:
            OutsideReads: In all processes, if functions turn out to read parameters in one of them.
        """
        fresh = RunningSums(
            {layer: [_map(stage, Accumulator.of_batch) for stage in stages] for layer, stages in self.stages.items()}
        )
        totals, outside = Totals(), None
        try:
            totals = fresh._add(show)
        except OutsideReads as error:
            outside = error
        if noticed := [error for error in processes.gather("adding a batch", outside) if error is not None]:
            raise outside or noticed[0]
        known, whole = set(self.called), fresh.over(processes)
        new = {layer: whole.stages[layer][-1:] for layer in whole.called if layer not in known or self._waits(layer)}
        if new and not _counts(whole):
            return fresh, totals
        while new := RunningSums(new)._following(processes):
            RunningSums(new)._add(show)
            for layer, (stage,) in new.items():
                fresh._append(layer, stage)
            new = RunningSums(new).over(processes).stages
        return fresh, totals

    def _waits(self, layer: Layer) -> bool:
        """Whether a layer has no basis yet: its batches until now had no term that counts, so their gradients are 0."""
        return len(self.stages[layer]) == 1 and any(a.needs_another_sweep for a in self.stages[layer][0].values())

    def _following(self, processes: Alone) -> dict[Layer, list[Stage]]:
        """The stages of the next sweep, of layers whose approximations need one."""
        last = {layer: stages[-1] for layer, stages in self.stages.items()}
        decompose_together(chain.from_iterable(stage.values() for stage in last.values()), processes)
        return {layer: [stage] for layer, before in last.items() if (stage := _following(before))}

    def over(self, processes: Alone) -> RunningSums:
        """The sums of all processes; these stay as they are. Collective.

        Moving averages are linear: the average of sums is the sum of averages.
        """
        if processes.world == 1:
            return self
        copies = self._copied()
        sum_over_processes(copies._accumulators(), processes)
        return RunningSums(copies.stages)

    def _append(self, layer: Layer, stage: Stage) -> None:
        """One more stage of a layer; all its batches until now count for it, too."""
        known = self._of_layers[list(self.stages).index(layer)]
        share_totals(stage.values(), known[0].totals)
        self.stages[layer].append(stage)
        known += stage.values()

    def _sharing(self, totals: Totals) -> RunningSums:
        """The same, of which all layers have these totals."""
        share_totals(self._accumulators(), totals)
        return self

    def _accumulators(self) -> Iterator[Accumulator]:
        return chain.from_iterable(self._of_layers)

    def _add(self, show: Callable[[Callable[[LayerBatch], None]], Totals]) -> Totals:
        """Add the first batch."""
        pending = {layer: dict(enumerate(own)) for layer, own in zip(self.stages, self._of_layers, strict=True)}
        totals = show(partial(add_batch, pending))
        self._sharing(totals)
        for accumulator in self._accumulators():
            accumulator.require_unchanged()
        return totals

    def add(self, batch: RunningSums, totals: Totals, step: Step) -> None:
        """Add the sums of one batch.

        Args:
            batch: These sums.
            totals: Of the batch.
            step: That it belongs to.
        """
        with self._plain_mode():
            self.enter(totals.called, step)
            step.totals.add(totals)
            for own in self._distinct_totals(step.called):
                own.add(totals)
            for layer, stages in batch.stages.items():
                mine = self.stages[layer]
                for own, stage in zip(mine, stages):
                    for name, accumulator in stage.items():
                        own[name].add_sums(accumulator)
                for stage in stages[len(mine) :]:  # the first batch of this layer
                    self._append(layer, stage)

    def enter(self, called: Iterable[int], step: Step) -> None:
        """Note that a step calls layers: what was before it is decayed, and its batches until now count for them.

        Args:
            called: Their indices.
            step: The step.
        """
        late, changed = step.call(called), dict[int, tuple[Totals, Totals]]()
        with self._plain_mode() if late else nullcontext():
            for index in late:
                accumulators = self._of_layers[index]
                before = accumulators[0].totals
                if id(before) not in changed:
                    after = replace(before, called=set(before.called), reached=set(before.reached))
                    after.decay(step.decay)
                    after.steps += 1
                    after.add(step.totals)
                    changed[id(before)] = before, after
                for accumulator in accumulators:
                    accumulator.totals = changed[id(before)][1]
                    if step.decay != 1:
                        accumulator.decay_sums(step.decay)

    def require_fitting(self, totals: Totals) -> None:
        """Refuse a batch with other totals.

        Raises:
            ValueError: If several losses had other weights there.
        """
        for own in self._distinct_totals(range(len(self._of_layers))):
            if problem := own.mismatch(totals):
                raise ValueError(problem)

    def _copied(self) -> RunningSums:
        with self._plain_mode():
            return RunningSums(
                {layer: [_map(stage, _copied) for stage in stages] for layer, stages in self.stages.items()}
            )

    def merged(self, other: RunningSums, step: Step, others: Step) -> RunningSums:
        """The sums of both. A layer that one of them calls in the step that they are in was called by both.

        Args:
            other: The other ones; neither changes.
            step: That these are in.
            others: That the other ones are in.

        Raises:
            ValueError: If they are in different bases.
        """

        def total(one: Accumulator, two: Accumulator) -> Accumulator:
            result = one.empty()
            result.merge(one)
            result.merge(two)
            return result

        merged: dict[Layer, list[Stage]] = {}
        mine, theirs = self._copied(), other._copied()
        mine.enter(others.called, step.copy())
        theirs.enter(step.called, others.copy())
        with self._plain_mode():
            for (layer, stages), added in zip(mine.stages.items(), theirs.stages.values(), strict=True):
                pairs = zip(_padded(stages, added), _padded(added, stages), strict=True)
                merged[layer] = [{name: total(a, two[name]) for name, a in one.items()} for one, two in pairs]
        return RunningSums(merged)._sharing_equal()

    def _sharing_equal(self) -> RunningSums:
        """The same, of which layers with equal totals share them."""
        known: dict[str, Totals] = {}
        for own in self._of_layers:
            totals = own[0].totals
            share_totals(own, known.setdefault(repr(totals.plain()), totals))
        return self

    def _distinct_totals(self, indices: Iterable[int]) -> Iterable[Totals]:
        """The totals of some layers, each once."""
        return {id(totals := self._of_layers[index][0].totals): totals for index in indices}.values()

    def _plain_mode(self) -> AbstractContextManager[None]:
        return plain_mode(next(iter(self.stages)).device.type)

    # -------------------------------------------------------------------------------------------------------- reading
    @property
    def called(self) -> list[Layer]:
        """The layers that a batch has called, in the order of the plan."""
        return [layer for k, layer in enumerate(self.stages) if k in self._of_layers[k][0].totals.called]

    @property
    def need_bases(self) -> bool:
        """Whether an approximation needs a basis before it can be summed."""
        return any(a.needs_another_sweep for stages in self.stages.values() for a in stages[0].values())

    @property
    def have_bases(self) -> bool:
        """Whether any layer has a basis; of several processes, none or all."""
        return any(len(stages) > 1 for stages in self.stages.values())

    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator, of all layers that were called."""
        blocks: dict[str, LinearOperator] = {}
        for layer in self.called:
            for name, accumulator in self.stages[layer][-1].items():
                result = accumulator.finish()
                if isinstance(result, Accumulator):  # no term has counted yet, and with "sum" that is a matrix, too
                    result = result.finish_zeros()
                blocks |= {name: result} if isinstance(result, LinearOperator) else result
        return blocks

    def require_finite(self) -> None:
        """Refuse sums of a batch with NaN or infinite entries.

        Raises:
            NumericsError: Naming layer and statistic.
        """
        if not (witnesses := [t for accumulator in self._accumulators() for t in accumulator.witnesses()]):
            return  # no layer was called
        norms = torch._foreach_norm(witnesses)  # pyright: ignore[reportPrivateImportUsage]
        # If the sum of squares is finite, so are all entries; else look at them, since it may have overflown by itself.
        if isfinite(torch.stack(norms).square().sum()):
            return
        for accumulator in self._accumulators():
            for name, total in accumulator.sums.items():
                if not bool(total.isfinite().all()):
                    raise NumericsError(
                        f"{accumulator.layer.title}: the statistic {name!r} of this batch has NaN or infinite entries. "
                        "The batch was not added, the estimator is as before it. Look for NaN in the batch, for an "
                        "overflow, or for parameters that diverged."
                    )

    def renewed(self, processes: Alone) -> tuple[RunningSums, RunningSums]:
        """These sums, and those over all processes, with later sweeps in the bases that follow from the first one now.

        Collective.
        """
        whole = self.over(processes)
        first = [a for stages in whole.stages.values() if len(stages) > 1 for a in stages[0].values()]
        decompose_together(first, processes)
        new = whole.in_new_bases()
        return (new if whole is self else self.in_bases_of(new)), new

    def in_new_bases(self) -> RunningSums:
        """The same sums, those of later sweeps expressed in the bases that follow from the first one now."""
        called = self.called

        def changed(layer: Layer) -> list[Stage]:
            stages = self.stages[layer]
            changed = stages[:1] if layer in called else stages
            for stage in stages[len(changed) :]:
                changed = [*changed, _changed_basis(_following(changed[-1]), stage)]
            return changed

        lists = side_by_side(changed, self.stages, lambda layer: finish_work(layer, self.stages[layer][0]))
        return RunningSums(dict(zip(self.stages, lists, strict=True)))

    def in_bases_of(self, other: RunningSums) -> RunningSums:
        """The same sums, those of later sweeps expressed in the bases of others of the same plan, where these have
        some.
        """
        changed: dict[Layer, list[Stage]] = {}
        called = self.called
        for (layer, stages), others in zip(self.stages.items(), other.stages.values(), strict=True):
            changed[layer] = stages[:1]
            for number, theirs in enumerate(others[1:], 1):
                stage = _map(theirs, Accumulator.empty)
                mine = number < len(stages) and layer in called
                changed[layer].append(_changed_basis(stage, stages[number]) if mine else stage)
            changed[layer] += stages[len(changed[layer]) :]
        return RunningSums(changed)

    def emptied(self) -> RunningSums:
        """No sums, in the same bases."""
        empty = {layer: [_map(stage, Accumulator.empty) for stage in stages] for layer, stages in self.stages.items()}
        return RunningSums(empty)._sharing(Totals())

    # --------------------------------------------------------------------------------------------------------- saving
    def state_dict(self) -> dict[str, Any]:
        """All sums, in tensors and plain Python: position of the layer, number of the sweep, block name."""
        called = self.called
        state: dict[str, Any] = {
            f"{index}": {
                f"{k}": {n: a.state_dict() for n, a in stage.items()}
                for k, stage in enumerate(stages if layer in called else stages[:1])
            }
            for index, (layer, stages) in enumerate(self.stages.items())
        }
        return {**state, "called": [k for k, layer in enumerate(self.stages) if layer in called]}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], plan: Sequence[LayerPlan], scale: LossScale, steps: float
    ) -> RunningSums:
        """The sums that `state_dict` returned.

        Args:
            state: The state.
            plan: What they are sums of.
            scale: As for `of_plan`.
            steps: The sum of the weights of all steps, for states that don't tell it for each layer.

        Raises:
            ValueError: If some are missing.
        """
        loaded = cls.of_plan(plan, scale)
        for index, (layer, stages) in enumerate(loaded.stages.items()):
            for number in range(len(state[f"{index}"])):
                if number:
                    loaded._append(layer, _following(stages[-1]))
                for name, accumulator in stages[number].items():
                    accumulator.load_state_dict(state[f"{index}"][f"{number}"][name])
        called = state["called"]
        for index, own in enumerate(loaded._of_layers):
            totals = replace(own[0].totals, called=set(called)) if index in called else Totals()
            totals.steps = totals.steps or (steps if index in called else 0.0)
            share_totals(own, totals)
        return loaded._sharing_equal()


def _counts(sums: RunningSums) -> bool:
    """Whether a term counts: else there are no gradients, from which bases could follow."""
    return float(next(sums._accumulators()).totals.loss_count) > 0


def _map(stage: Stage, function: Callable[[Accumulator], Accumulator]) -> Stage:
    return {name: function(accumulator) for name, accumulator in stage.items()}


def _all_of(stages: Iterable[Stage]) -> list[Accumulator]:
    return [accumulator for stage in stages for accumulator in stage.values()]


def _copied(accumulator: Accumulator) -> Accumulator:
    copied = accumulator.empty()
    copied.add_sums(accumulator)
    copied.totals = accumulator.totals
    return copied


def _padded(stages: list[Stage], like: list[Stage]) -> list[Stage]:
    """At least as many stages as `like`: those of a layer that was not called yet have no sums."""
    missing = [_map(stage, Accumulator.empty) for stage in like[len(stages) :]]
    share_totals(_all_of(missing), _all_of(stages)[0].totals)
    return [*stages, *missing]


def _changed_basis(stage: Stage, before: Stage) -> Stage:
    """An empty stage with the sums of another one of the same sweep, expressed in its basis."""
    for name, accumulator in stage.items():
        accumulator.change_basis(before[name])
    return stage


def _following(stage: Stage) -> Stage:
    """The accumulators of the next sweep, of those that need one.

    Raises:
        UnsupportedError: If they can't take over what others of their class have summed.
    """
    finished = {name: accumulator.finish() for name, accumulator in stage.items()}
    following = {name: result for name, result in finished.items() if isinstance(result, Accumulator)}
    for accumulator in following.values():
        if not accumulator.changes_basis:
            raise accumulator.streaming_error()
    return following
