"""Sums over data, layer by layer: what a curvature is made of.

One batch, the running average with its open step, those of other processes, a loaded state and the union of two data
sets are all objects of one class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, finish_work
from curvlinops_plus.blocks.over_processes import decompose_together, sum_over_processes
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.side_by_side import side_by_side
from curvlinops_plus.risk import Layer, LayerBatch, Totals

if TYPE_CHECKING:
    from typing_extensions import Self

# Accumulators by block names, as `LayerPlan.accumulators` makes them.
Stage = dict[str, Accumulator]
# Shows data to a consumer, as often as it is called, and returns its totals.
Show = Callable[[Callable[[LayerBatch], None]], Totals]

_COUNTED = ("examples", "terms", "loss_count", "steps")


class Sums:
    """For each layer of a plan stages of named sums, one for each sweep of its approximation, and totals.

    Stages after the first one exist as soon as the layer was called. A stream consists of steps, of one batch or a few:
    a layer is decayed once in each step that calls it, and counts all examples of such steps.

    Args:
        plan: The layers.
        scale: The factor of the loss, as for accumulators.

    Attributes:
        totals: Those of each layer; layers with the same past share them, so that they are never written to.
        step: The totals of the step that batches are added to.
        decay: What layers that it calls are multiplied with.
        entered: The indices of these.
    """

    def __init__(self, plan: Sequence[LayerPlan], scale: LossScale) -> None:
        self.layers = [entry.layer for entry in plan]
        self.stages: dict[Layer, list[Stage]] = {entry.layer: [entry.accumulators(scale)] for entry in plan}
        self._forget()

    def _forget(self) -> None:
        self.totals = dict.fromkeys(self.layers, Totals())
        self.step, self.decay, self.entered = Totals(), 1.0, set[int]()
        self.open = False  # whether a step was begun

    def fresh(self) -> Self:
        """No sums, in the same bases."""
        other = copy.copy(self)
        other.stages = {
            layer: [{name: a.empty() for name, a in stage.items()} for stage in stages]
            for layer, stages in self.stages.items()
        }
        other._forget()
        return other

    def without_data(self) -> Self:
        """No sums in the same steps, which have called the same layers: for a process that shares those of another."""
        other = self.fresh()
        other.totals = {
            layer: Totals(called=set(own.called), weights=own.weights, steps=own.steps)
            for layer, own in self.totals.items()
        }
        other.decay, other.entered = self.decay, set(self.entered)
        return other

    def copied(self) -> Self:
        """The same; changes of one are none of the other."""
        other = copy.copy(self)
        with self._plain_mode():
            other.stages = {
                layer: [{name: a.copy() for name, a in stage.items()} for stage in stages]
                for layer, stages in self.stages.items()
            }
        other.totals, other.entered, other.step = dict(self.totals), set(self.entered), _joined(Totals(), self.step)
        return other

    # --------------------------------------------------------------------------------------------------------- adding
    def consume(self, batch: LayerBatch, last: bool = False) -> None:
        """Add what a layer received: to all its stages, or to the last one."""
        for stage in self.stages[batch.layer][-1 if last else 0 :]:
            for accumulator in stage.values():
                accumulator.update(batch if accumulator.group is None else batch.restrict(accumulator.group))

    def see(self, show: Show, processes: Alone | None) -> Totals:
        """Add a first batch, and once more to layers that take their bases from it, as EKFAC does.

        Args:
            processes: Those whose batches determine these bases. Collective. None: this one must not make any.

        Raises:
            UnsupportedError: If a basis would be needed.
        """
        totals = show(self.consume)
        self.see_again(show, totals, processes)
        return totals

    def see_again(self, show: Show, totals: Totals, processes: Alone | None) -> None:
        """Show a batch with these totals to layers that take their bases from it."""
        self.totals = dict.fromkeys(self.layers, totals)
        while late := self._advance(processes):
            show(lambda batch: self.consume(batch, last=True) if batch.layer in late else None)

    def _advance(self, processes: Alone | None) -> set[Layer]:
        """Append the stage that follows from the sums of the last one, where one is missing; these layers."""
        if not any(self._waits(layer) for layer in self.layers):
            return set()
        whole = self if processes is None else self.over(processes)
        late = [layer for layer in whole.called if self._waits(layer)]
        if not late or not float(whole.totals[late[0]].loss_count) > 0:  # without a term there are no gradients
            return set()
        if processes is None:
            raise UnsupportedError(
                f"{late[0].title} was called by no process in the first update with terms, and is called now. EKFAC's "
                "eigenvectors have to be the same in all processes, and these agree on them in that update only. Use "
                "KFAC for this layer, or begin with batches that call it."
            )
        decompose_together([a for layer in late for a in whole.stages[layer][-1].values()], processes)
        for layer in late:
            self.stages[layer].append(whole.following(layer))
        return set(late)

    def _waits(self, layer: Layer) -> bool:
        return any(a.needs_another_sweep for a in self.stages[layer][-1].values())

    def following(self, layer: Layer, number: int = 0) -> Stage:
        """The stage of a layer that follows from that of this number, without sums.

        Raises:
            UnsupportedError: If it can't take over what others of its class have summed.
        """
        found: Stage = {}
        for name, accumulator in self._of(layer, number).items():
            result = accumulator.finish()
            if isinstance(result, Accumulator):
                if not result.changes_basis:
                    raise result.streaming_error()
                found[name] = result
        return found

    def add(self, batch: Sums, totals: Totals, decay: float) -> None:
        """Add the sums of one batch, which are taken over: to the open step with `decay=1`, else to a new one.

        Raises:
            ValueError: If several losses had other weights before; nothing has changed then.
        """
        for own in {id(own): own for own in self.totals.values()}.values():
            if problem := own.mismatch(totals):
                raise ValueError(problem)
        if decay != 1:
            if self.open and not self.entered and not self.step.examples:  # one of several processes, without examples
                self.enter(range(len(self.layers)))  # others call what they did
            self.step, self.decay, self.entered = Totals(), decay, set()
        self.open = True
        with self._plain_mode():
            self.step.add(totals)
            self._count(self.entered, lambda before: _joined(before, totals))
            self.enter(totals.called)
            self._take(batch)

    def enter(self, called: Iterable[int]) -> None:
        """The open step calls layers, by their indices: what was before is decayed, and all of the step counts."""
        late = set(called) - self.entered
        self.entered |= late
        self._count(late, lambda before: _joined(before, self.step, self.decay, 1.0))
        if self.decay != 1 and late:
            accumulators = [a for k in late for stage in self.stages[self.layers[k]] for a in stage.values()]
            if tensors := [total for a in accumulators for total in a.sums.values()]:
                with self._plain_mode():
                    torch._foreach_mul_(tensors, self.decay)  # pyright: ignore[reportPrivateImportUsage]
            for a in accumulators:
                a.counts = {name: count * self.decay for name, count in a.counts.items()}

    def _count(self, called: Iterable[int], change: Callable[[Totals], Totals]) -> None:
        changed: dict[int, tuple[Totals, Totals]] = {}
        for layer in [self.layers[k] for k in called]:
            before = self.totals[layer]
            if id(before) not in changed:
                changed[id(before)] = before, change(before)
            self.totals[layer] = changed[id(before)][1]

    def _take(self, other: Sums) -> None:
        """Add other sums, whose tensors are these afterwards where there were none; not their totals."""
        totals: list[Tensor] = []
        values: list[Tensor] = []
        for mine, stages in zip(self.stages.values(), other.stages.values(), strict=True):
            for own, stage in zip(mine, stages):
                for name, accumulator in stage.items():
                    sums = own[name].sums
                    for key, value in accumulator.sums.items():
                        if key in sums:
                            totals.append(sums[key])
                            values.append(value)
                        else:
                            sums[key] = value
                    for key, count in accumulator.counts.items():
                        own[name].counts[key] = own[name].counts.get(key, 0.0) + count
            mine += stages[len(mine) :]
        if totals:
            torch._foreach_add_(totals, values)  # pyright: ignore[reportPrivateImportUsage]

    def merged(self, other: Sums) -> Self:
        """The sums of both; eigenvalues of the other are carried into the bases of these. Neither changes.

        A layer that one of them calls in the step that it is in was called by both.

        Raises:
            ValueError: If several losses had other weights there.
        """
        mine, theirs = self.copied(), other.in_bases_of(self).copied()
        mine.enter(other.entered)
        theirs.enter(self.entered)
        pairs = zip(mine.totals.items(), theirs.totals.values(), strict=True)
        mine.totals = {layer: _joined(one, two) for (layer, one), two in pairs}
        mine.step = _joined(mine.step, theirs.step)
        with self._plain_mode():
            mine._take(theirs)
        return mine

    # -------------------------------------------------------------------------------------------------------- reading
    @property
    def called(self) -> list[Layer]:
        """The layers that a batch has called, in the order of the plan."""
        return [layer for k, layer in enumerate(self.layers) if k in self.totals[layer].called]

    @property
    def steps(self) -> list[float]:
        """The sum of weights of the steps that have called each layer."""
        return [totals.steps for totals in self.totals.values()]

    @property
    def begins(self) -> bool:
        """Whether a batch of now makes the bases that an approximation needs before it can be summed."""
        return all(len(own) == 1 for own in self.stages.values()) and any(map(self._waits, self.layers))

    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator, of all layers that were called."""
        blocks: dict[str, LinearOperator] = {}
        for layer in self.called:
            for name, accumulator in self._of(layer, -1).items():
                result = accumulator.finish()
                if isinstance(result, Accumulator):
                    if not (result.changes_basis and accumulator.needs_another_sweep):
                        raise result.streaming_error()
                    result = result.finish()  # no term has counted yet, and with "sum" that is a matrix, too
                assert not isinstance(result, Accumulator)
                blocks |= {name: result} if isinstance(result, LinearOperator) else result
        return blocks

    def require_finite(self) -> None:
        """Refuse sums of a batch with NaN or infinite entries.

        Raises:
            NumericsError: Naming layer and statistic.
        """
        sums = [(a, name, total) for a in self._accumulators() for name, total in a.sums.items()]
        if not sums:
            return  # no layer was called
        # Of a positive semi-definite matrix the diagonal tells.
        witnesses = [
            t.diagonal(dim1=-2, dim2=-1) if a.symmetric and t.ndim > 1 and t.shape[-1] == t.shape[-2] else t
            for a, _, t in sums
        ]
        norms = torch._foreach_norm(witnesses)  # pyright: ignore[reportPrivateImportUsage]
        # If the sum of squares is finite, so are all entries; else look at them, since it may have overflown by itself.
        if isfinite(torch.stack(norms).square().sum()):
            return
        for a, name, total in sums:
            if not bool(total.isfinite().all()):
                raise NumericsError(
                    f"{a.layer.title}: the statistic {name!r} of this batch has NaN or infinite entries. The batch was "
                    "not added, the estimator is as before it. Look for NaN in the batch, for an overflow, or for "
                    "parameters that diverged."
                )

    def over(self, processes: Alone) -> Self:
        """The sums of all processes; these stay as they are. Collective.

        Moving averages are linear: the average of sums is the sum of averages.
        """
        if processes.world == 1:
            return self
        whole = self.copied()
        for layer in whole.layers:
            for k in range(len(whole.stages[layer])):
                whole._of(layer, k)
        sum_over_processes(whole._accumulators(), processes)
        whole.step = Totals.union(processes.gather(self.step.plain()))
        whole.totals = {layer: next(iter(stages[0].values())).totals for layer, stages in whole.stages.items()}
        return whole

    def renewed(self, processes: Alone) -> tuple[Self, Self]:
        """These sums, and those over all processes, with eigenvalues in the bases that follow from the factors of now.

        Collective.
        """
        whole = self.over(processes)
        decompose_together(
            [a for layer, stages in whole.stages.items() if len(stages) > 1 for a in whole._of(layer, 0).values()],
            processes,
        )

        def changed(layer: Layer) -> list[Stage]:
            stages = whole.stages[layer]
            return [stages[0], *[_in_basis(whole.following(layer), stage) for stage in stages[1:]]]

        lists = side_by_side(changed, whole.layers, lambda layer: finish_work(layer, whole.stages[layer][0]))
        new = copy.copy(whole)
        new.stages = dict(zip(whole.layers, lists, strict=True))
        return (new if whole is self else self.in_bases_of(new)), new

    def in_bases_of(self, other: Sums) -> Self:
        """The same sums, with eigenvalues in the bases of others of the same plan, where these have some."""
        new, both = copy.copy(self), zip(self.stages.items(), other.stages.values(), strict=True)
        new.stages = {
            layer: [
                stages[0],
                *map(_in_basis, theirs[1:], [*stages[1:], None][: len(theirs) - 1]),
                *stages[len(theirs) :],
            ]
            for (layer, stages), theirs in both
        }
        return new

    def _of(self, layer: Layer, number: int) -> Stage:
        """A stage of a layer, whose accumulators know its totals."""
        for accumulator in self.stages[layer][number].values():
            accumulator.totals = self.totals[layer]
        return self.stages[layer][number]

    def _accumulators(self) -> Iterator[Accumulator]:
        return (a for stages in self.stages.values() for stage in stages for a in stage.values())

    def _plain_mode(self) -> Any:
        return plain_mode(self.layers[0].device.type)

    # --------------------------------------------------------------------------------------------------------- saving
    def state_dict(self) -> dict[str, Any]:
        """All sums and totals, in tensors and plain Python: position of the layer, number of the stage, block name."""
        return {
            "layers": {
                f"{k}": {
                    "totals": _plain(self.totals[layer]),
                    "stages": [{name: a.state_dict() for name, a in stage.items()} for stage in self.stages[layer]],
                }
                for k, layer in enumerate(self.layers)
                if layer in self.called
            },
            "step": _plain(self.step),
            "decay": self.decay,
            "entered": sorted(self.entered),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; these have no sums yet.

        Raises:
            ValueError: If something is missing.
        """
        known: dict[str, Totals] = {}
        for key, own in state["layers"].items():
            layer = self.layers[int(key)]
            self.totals[layer] = known.setdefault(repr(own["totals"]), _totals(own["totals"]))
            for number, stage in enumerate(own["stages"]):
                if number:
                    self.stages[layer].append(self.following(layer))
                for name, accumulator in self.stages[layer][number].items():
                    accumulator.load_state_dict(stage[name])
        self.step, self.decay, self.entered = _totals(state["step"]), state["decay"], set(state["entered"])


def _in_basis(stage: Stage, before: Stage | None) -> Stage:
    """An empty stage like this one with the sums of another one of the same number, expressed in its basis."""
    found = {name: accumulator.empty() for name, accumulator in stage.items()}
    for name, accumulator in found.items():
        if before is not None and before[name].sums:
            accumulator.change_basis(before[name])
    return found


def _joined(one: Totals, other: Totals, decay: float = 1.0, steps: float = 0.0) -> Totals:
    """The totals of both, of which the first ones are decayed, and belong to that many steps more."""
    new = replace(one, called=set(one.called), reached=set(one.reached))
    new.decay(decay)
    new.steps += steps
    new.add(other)
    return new


def _plain(totals: Totals) -> dict[str, Any]:
    own = totals.plain()
    found = {name: getattr(own, name) for name in _COUNTED}
    return {**found, "called": sorted(own.called), "weights": list(own.weights)}


def _totals(state: Mapping[str, Any]) -> Totals:
    counted = {name: state[name] for name in _COUNTED}
    return Totals(**counted, called=set(state["called"]), weights=tuple(state["weights"]))
