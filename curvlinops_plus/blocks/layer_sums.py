"""Sums over a stream of batches, layer by layer.

One batch, the running average with its open step, the sums of other processes, a loaded state and
the union of two streams are all objects of one class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.blocks.sweeps import Stage, add_over_processes, costs_of, decompose_together
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import Diagonal, LinearOperator
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.numerics import side_by_side
from curvlinops_plus.risk import Group, Layer, LayerBatch, Totals

if TYPE_CHECKING:
    from typing_extensions import Self

# Shows data to a consumer, as often as it is called, and returns its totals.
Show = Callable[[Callable[[LayerBatch], None]], Totals]

_COUNTED = ("examples", "terms", "loss_count", "steps")


class Sums:
    """For each layer of a plan stages of named sums, one for each sweep of its approximation, and
    totals.

    Those after the first one exist as soon as the layer was called. A stream consists of steps, of
    one batch or a few: a layer is decayed once in each step that calls it, and counts all examples
    of such steps.

    Args:
        plan: The layers.
        scale: The factor of the loss, as for accumulators.

    Attributes:
        totals: Those of each layer, which are never written to.
        step: The totals of the step that batches are added to.
        decay: What layers that it calls are multiplied with.
        entered: The indices of these.
        withdrawn: Layers to which nothing is added any more; their blocks are identities.
    """

    def __init__(self, plan: Sequence[LayerPlan], scale: LossScale) -> None:
        self.layers = [entry.layer for entry in plan]
        self.stages: dict[Layer, list[Stage]] = {
            entry.layer: [entry.accumulators(scale)] for entry in plan
        }
        self.device = self.layers[0].device.type
        self.withdrawn: set[Layer] = set()
        self._forget()

    def _forget(self) -> None:
        self.totals = dict.fromkeys(self.layers, Totals())
        self.step, self.decay, self.entered = Totals(), 1.0, set[int]()
        self.open = False  # whether a step was begun

    def _each(self, make: Callable[[Accumulator], Accumulator]) -> Self:
        """Others with accumulators made of these ones."""
        other = copy.copy(self)
        other.stages = {
            layer: [{name: make(a) for name, a in stage.items()} for stage in stages]
            for layer, stages in self.stages.items()
        }
        other.totals, other.entered, other.step = (
            dict(self.totals),
            set(self.entered),
            _joined(Totals(), self.step),
        )
        other.withdrawn = set(self.withdrawn)
        return other

    def copied(self) -> Self:
        """The same; changes of one are none of the other."""
        with plain_mode(self.device):
            return self._each(Accumulator.copy)

    def fresh(self) -> Self:
        """No sums, in the same bases."""
        other = self._each(Accumulator.empty)
        other._forget()
        return other

    def without_data(self) -> Self:
        """No sums in the same steps, which have called the same layers: for a process that shares
        those of another.
        """
        other = self._each(Accumulator.empty)
        for layer, own in self.totals.items():
            other.totals[layer] = Totals(
                called=set(own.called), weights=own.weights, steps=own.steps
            )
        other.step = Totals()
        return other

    def consume(self, batch: LayerBatch, last: bool = False) -> None:
        """Add what a layer received: to all its stages, or to the last one."""
        for a in (
            a for stage in self.stages[batch.layer][-1 if last else 0 :] for a in stage.values()
        ):
            a.update(batch if a.group is None else batch.restrict(a.group))

    # ----------------------------------------------------------------------------- batches of steps
    def see(self, show: Show, processes: Alone | None, totals: Totals | None = None) -> Totals:
        """Add a first batch, and once more to layers that take their bases from it, as EKFAC does.

        Args:
            processes: Those whose batches determine these bases. Collective. None: this one must
                not make any.
            totals: Of the batch, if it was added already.

        Raises:
            UnsupportedError: If a basis would be needed.
        """
        totals = show(self.consume) if totals is None else totals
        self.totals = dict.fromkeys(self.layers, totals)
        while waiting := self.waiting:
            whole = self if processes is None else self.over(processes)
            late = [layer for layer in whole.called if layer in waiting]
            if (
                not late or not float(whole.totals[late[0]].loss_count) > 0
            ):  # without a term there are no gradients
                break
            if processes is None:
                raise UnsupportedError(
                    f"{late[0].title} was called by no process in the first update with terms, and "
                    "is called now. EKFAC's eigenvectors have to be the same in all processes, and "
                    "these agree on them in that update only. Use KFAC for this layer, or begin "
                    "with batches that call it."
                )
            decompose_together(
                [a for layer in late for a in whole._of(layer, -1).values()], processes
            )
            with plain_mode(self.device):
                for layer in late:  # the stage that follows from the sums of the last one
                    self.stages[layer].append(whole._following(layer))
            show(
                lambda batch, late=late: (
                    self.consume(batch, last=True) if batch.layer in late else None
                )
            )
        return totals

    @property
    def waiting(self) -> set[Layer]:
        """The layers that need one more stage."""
        several = {
            layer
            for layer, own in self.stages.items()
            if any(a.sweeps > 1 for a in own[-1].values())
        }
        return several - self.withdrawn

    def _following(self, layer: Layer, number: int = 0) -> Stage:
        """The stage of a layer that follows from that of this number, without sums.

        Raises:
            UnsupportedError: If it can't take over what others of its class have summed.
        """
        found: Stage = {}
        for name, accumulator in self._of(layer, number).items():
            result = accumulator.finish()
            if isinstance(result, Accumulator):
                if not result.changes_basis:
                    raise accumulator.streaming_error()
                found[name] = result
        return found

    def add(self, batch: Sums, totals: Totals, decay: float) -> None:
        """Add the sums of one batch, which are taken over: to the open step with `decay=1`, else to
        a new one.

        Raises:
            ValueError: If several losses had other weights before; nothing has changed then.
        """
        for own in {id(own): own for own in self.totals.values()}.values():
            if problem := own.mismatch(totals):
                raise ValueError(problem)
        if decay != 1:
            if (
                self.open and not self.entered and not self.step.examples
            ):  # one of several processes, without examples
                self.enter(range(len(self.layers)))  # others call what they did
            self.step, self.decay, self.entered = Totals(), decay, set()
        self.open = True
        with plain_mode(self.device):
            self.step.add(totals)
            self._join([self.layers[k] for k in self.entered], totals)
            self.enter(totals.called)
            self._take(batch)

    def enter(self, called: Iterable[int]) -> None:
        """The open step calls layers, by their indices: what was before is decayed, and all of the
        step counts.
        """
        late = [self.layers[k] for k in set(called) - self.entered]
        self.entered |= set(called)
        self._join(late, self.step, self.decay, 1.0)
        if self.decay != 1:
            accumulators = [
                a for layer in late for stage in self.stages[layer] for a in stage.values()
            ]
            if tensors := [total for a in accumulators for total in a.raw.values()]:
                with plain_mode(self.device):
                    torch._foreach_mul_(tensors, self.decay)  # pyright: ignore[reportPrivateImportUsage]
            for a in accumulators:
                a.counts = {name: count * self.decay for name, count in a.counts.items()}

    def _join(
        self, layers: Iterable[Layer], totals: Totals, decay: float = 1.0, steps: float = 0.0
    ) -> None:
        """Add to the totals of layers, which are one object for those that steps have called
        together.
        """
        joined: dict[int, Totals] = {}
        for layer in layers:
            own = self.totals[layer]
            if id(own) not in joined:
                joined[id(own)] = _joined(own, totals, decay, steps)
            self.totals[layer] = joined[id(own)]

    def _take(self, other: Sums) -> None:
        """Add other sums, whose tensors are these afterwards where there were none; not their
        totals.
        """
        totals: list[Tensor] = []
        values: list[Tensor] = []
        for mine, stages in zip(self.stages.values(), other.stages.values(), strict=True):
            for own, stage in zip(mine, stages):
                for name, accumulator in stage.items():
                    sums, counts = own[name].raw, own[name].counts
                    own[name].halves |= accumulator.halves
                    for key, value in accumulator.raw.items():
                        if key in sums:
                            totals.append(sums[key])
                            values.append(value)
                        else:
                            sums[key] = value
                    for key, count in accumulator.counts.items():
                        counts[key] = counts.get(key, 0.0) + count
            mine += stages[len(mine) :]
        if totals:
            torch._foreach_add_(totals, values)  # pyright: ignore[reportPrivateImportUsage]

    def merged(self, other: Sums) -> Self:
        """The sums of both; eigenvalues of the other are carried into the bases of these. Neither
        changes.

        A layer that one of them calls in the step that it is in was called by both.

        Raises:
            ValueError: If several losses had other weights there.
        """
        mine, theirs = self.copied(), other._in_bases_of(self).copied()
        mine.enter(other.entered)
        theirs.enter(self.entered)
        pairs = zip(mine.totals.items(), theirs.totals.values(), strict=True)
        mine.totals = {layer: _joined(one, two) for (layer, one), two in pairs}
        mine.step = _joined(mine.step, theirs.step)
        mine.withdrawn |= {mine.layers[other.layers.index(layer)] for layer in other.withdrawn}
        with plain_mode(self.device):
            mine._take(theirs)
        return mine

    # -------------------------------------------------------------------------------------- reading
    @property
    def called(self) -> list[Layer]:
        """The layers that a batch has called, or that are withdrawn, in the order of the plan."""
        totals, withdrawn = self.totals, self.withdrawn
        return [
            layer
            for k, layer in enumerate(self.layers)
            if k in totals[layer].called or layer in withdrawn
        ]

    @property
    def begins(self) -> bool:
        """Whether a batch of now makes the bases that an approximation needs before it can be
        summed.
        """
        return all(len(own) == 1 for own in self.stages.values()) and bool(self.waiting)

    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator, of all layers that were called."""
        blocks: dict[str, LinearOperator] = {}
        for layer in self.called:
            if layer in self.withdrawn:
                blocks |= {group.name: _identity(layer, group) for group in layer.groups}
                continue
            for name, accumulator in self._of(layer, -1).items():
                result = accumulator.finish()
                if isinstance(result, Accumulator):
                    if not (result.changes_basis and accumulator.sweeps > 1):
                        raise accumulator.streaming_error()
                    result = (
                        result.finish()
                    )  # no term has counted yet, and with "sum" that is a matrix, too
                assert not isinstance(result, Accumulator)
                blocks |= {name: result} if isinstance(result, LinearOperator) else result
        return blocks

    def require_finite(self) -> None:
        """Refuse sums of a batch with NaN or infinite entries.

        Raises:
            NumericsError: Naming layer and statistic.
        """
        sums = [(a, name, total) for a in self._accumulators() for name, total in a.raw.items()]
        norms = torch._foreach_norm([t for *_, t in sums]) if sums else []  # pyright: ignore[reportPrivateImportUsage]
        # If the sum of squares is finite, so are all entries; else look at them, since it may have
        # overflown by itself.
        if not sums or isfinite(torch.stack(norms).square().sum()):
            return
        for a, name, total in sums:
            if not bool(total.isfinite().all()):
                raise NumericsError(
                    f"{a.layer.title}: the statistic {name!r} of this batch has NaN or infinite "
                    "entries. The batch was not added, the estimator is as before it. Look for NaN "
                    "in the batch, for an overflow, or for parameters that diverged."
                )

    def over(self, processes: Alone) -> Self:
        """The sums of all processes; these stay as they are. Collective.

        Moving averages are linear: the average of sums is the sum of averages.
        """
        if processes.world == 1:
            return self
        whole = self.copied()
        add_over_processes(list(whole._accumulators()), processes)
        told = processes.gather([totals.plain() for totals in (self.step, *self.totals.values())])
        whole.step, *of_layers = map(Totals.union, zip(*told, strict=True))
        whole.totals = dict(zip(self.layers, of_layers, strict=True))
        return whole

    def renewed(self, processes: Alone) -> tuple[Self, Self]:
        """These sums, and those over all processes, with eigenvalues in the bases that follow from
        the factors of now.

        Collective.
        """
        whole = self.over(processes)
        several = [layer for layer, stages in whole.stages.items() if len(stages) > 1]
        decompose_together(
            [a for layer in several for a in whole._of(layer, 0).values()], processes
        )

        def changed(layer: Layer) -> list[Stage]:
            first, *others = whole.stages[layer]
            return [first, *[_in_basis(whole._following(layer), stage) for stage in others]]

        lists = side_by_side(changed, whole.layers, lambda layer: costs_of(whole.stages[layer][0]))
        new = copy.copy(whole)
        new.stages = dict(zip(whole.layers, lists, strict=True))
        return (new if whole is self else self._in_bases_of(new)), new

    def _in_bases_of(self, other: Sums) -> Self:
        """The same sums, with eigenvalues in the bases of others of the same plan, where these have
        some.
        """
        new = copy.copy(self)
        new.stages = {}
        for (layer, (first, *stages)), (_, *theirs) in zip(
            self.stages.items(), other.stages.values(), strict=True
        ):
            carried = map(_in_basis, theirs, [*stages, *[None] * len(theirs)])
            new.stages[layer] = [first, *carried, *stages[len(theirs) :]]
        return new

    def _of(self, layer: Layer, number: int) -> Stage:
        """A stage of a layer, whose accumulators know its totals."""
        for accumulator in self.stages[layer][number].values():
            accumulator.totals = self.totals[layer]
        return self.stages[layer][number]

    def _accumulators(self) -> Iterator[Accumulator]:
        return (a for stages in self.stages.values() for stage in stages for a in stage.values())

    # --------------------------------------------------------------------------------------- saving
    def state_dict(self) -> dict[str, Any]:
        """All sums and totals, in tensors and plain Python: position of the layer, number of the
        stage, block name.
        """
        layers = {
            f"{self.layers.index(layer)}": {
                "totals": _plain(self.totals[layer]),
                "stages": [
                    {name: a.state_dict() for name, a in stage.items()}
                    for stage in self.stages[layer]
                ],
            }
            for layer in self.called
        }
        withdrawn = [k for k, layer in enumerate(self.layers) if layer in self.withdrawn]
        step = {"step": _plain(self.step), "decay": self.decay, "entered": sorted(self.entered)}
        return {"layers": layers, **step, "withdrawn": withdrawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; these have no sums yet."""
        for key, own in state["layers"].items():
            layer = self.layers[int(key)]
            self.totals[layer] = _totals(own["totals"])
            for number, stage in enumerate(own["stages"]):
                if number:
                    self.stages[layer].append(self._following(layer))
                for name, accumulator in self.stages[layer][number].items():
                    accumulator.load_state_dict(stage[name])
        self.step, self.decay, self.entered = (
            _totals(state["step"]),
            state["decay"],
            set(state["entered"]),
        )
        self.withdrawn = {
            self.layers[k] for k in state.get("withdrawn", ())
        }  # earlier versions withdrew none


def _in_basis(stage: Stage, before: Stage | None) -> Stage:
    """An empty stage like this one with the sums of another one of the same number, expressed in
    its basis.
    """
    found = {name: accumulator.empty() for name, accumulator in stage.items()}
    for name, accumulator in found.items():
        if before is not None and before[name].sums:
            accumulator.change_basis(before[name])
    return found


def _identity(layer: Layer, group: Group) -> LinearOperator:
    """A block whose inverse leaves gradients as they are, up to the damping."""
    size = sum(layer.params[key].numel() for key in group.keys)
    return Diagonal(torch.ones(size, dtype=layer.accumulation_dtype, device=layer.device))


def _joined(one: Totals, other: Totals, decay: float = 1.0, steps: float = 0.0) -> Totals:
    """The totals of both, of which the first ones are decayed, and belong to that many steps
    more.
    """
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
