"""Sums over data, layer by layer: what a curvature is made of.

A whole data set, one batch, the running average with its open step, the sums of other processes, a loaded state and
the union of two data sets are all objects of one class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.numerics import side_by_side
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

    Of a whole data set there is the stage of the present sweep (`finish`). A stream has all stages, of which those
    after the first one exist as soon as the layer was called. It consists of steps, of one batch or a few: a layer is
    decayed once in each step that calls it, and counts all examples of such steps.

    Args:
        plan: The layers.
        scale: The factor of the loss, as for accumulators.

    Attributes:
        totals: Those of each layer, which are never written to.
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

    def _each(self, make: Callable[[Accumulator], Accumulator]) -> Self:
        """Others with accumulators made of these ones."""
        other = copy.copy(self)
        other.stages = {
            layer: [{name: make(a) for name, a in stage.items()} for stage in stages]
            for layer, stages in self.stages.items()
        }
        other.totals, other.entered, other.step = dict(self.totals), set(self.entered), _joined(Totals(), self.step)
        return other

    def copied(self) -> Self:
        """The same; changes of one are none of the other."""
        with self._plain_mode():
            return self._each(lambda a: a.copy())

    def fresh(self) -> Self:
        """No sums, in the same bases."""
        other = self._each(lambda a: a.empty())
        other._forget()
        return other

    def without_data(self) -> Self:
        """No sums in the same steps, which have called the same layers: for a process that shares those of another."""
        other = self._each(lambda a: a.empty())
        for layer, own in self.totals.items():
            other.totals[layer] = Totals(called=set(own.called), weights=own.weights, steps=own.steps)
        other.step = Totals()
        return other

    def consume(self, batch: LayerBatch, last: bool = False) -> None:
        """Add what a layer received: to all its stages, or to the last one."""
        for stage in self.stages[batch.layer][-1 if last else 0 :]:
            for accumulator in stage.values():
                accumulator.update(batch if accumulator.group is None else batch.restrict(accumulator.group))

    # ----------------------------------------------------------------------------------------------- a whole data set
    @property
    def pending(self) -> list[Layer]:
        """The layers that need a sweep over the data."""
        return [layer for layer, stages in self.stages.items() if stages[-1]]

    def finish(self, totals: Totals, processes: Alone, owners: Mapping[str, int] | None) -> dict[str, LinearOperator]:
        """The blocks that are made of these sums; what needs another sweep stays. Collective.

        Sums are given up as soon as something is made of them.

        Args:
            totals: Those of all processes.
            owners: Accumulator name to the rank of the only process that needs its blocks; None: all do.
        """
        accumulators = list(self._accumulators())
        if processes.world > 1:
            add_over_processes(accumulators, processes)
        for a in accumulators:
            a.totals, a.complete = totals, True
        if processes.world > 1:
            decompose_together(accumulators, processes)
        del accumulators, a
        pending, self.stages = self.stages, {layer: [{}] for layer in self.layers}

        def finish(layer: Layer) -> dict[str, Any]:
            return {
                name: a.finish()
                for name, a in pending.pop(layer)[-1].items()
                if owners is None or a.sweeps > 1 or owners[name] == processes.rank
            }

        blocks: dict[str, LinearOperator] = {}
        with self._plain_mode():
            results = side_by_side(finish, self.layers, lambda layer: _work(pending[layer][-1]))
        for layer, found in zip(self.layers, results, strict=True):
            for name, result in found.items():
                if isinstance(result, Accumulator):
                    self.stages[layer][-1][name] = result
                else:
                    blocks |= {name: result} if isinstance(result, LinearOperator) else result
        return blocks

    # ------------------------------------------------------------------------------------------------ batches of steps
    def see(self, show: Show, processes: Alone | None, totals: Totals | None = None) -> Totals:
        """Add a first batch, and once more to layers that take their bases from it, as EKFAC does.

        Args:
            processes: Those whose batches determine these bases. Collective. None: this one must not make any.
            totals: Of the batch, if it was added already.

        Raises:
            UnsupportedError: If a basis would be needed.
        """
        totals = show(self.consume) if totals is None else totals
        self.totals = dict.fromkeys(self.layers, totals)
        while late := self._advance(processes):
            show(lambda batch: self.consume(batch, last=True) if batch.layer in late else None)
        return totals

    def _advance(self, processes: Alone | None) -> set[Layer]:
        """Append the stage that follows from the sums of the last one, where one is missing; these layers."""
        if not any(map(self._waits, self.layers)):
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
        decompose_together([a for layer in late for a in whole._of(layer, -1).values()], processes)
        with self._plain_mode():
            for layer in late:
                self.stages[layer].append(whole._following(layer))
        return set(late)

    def _waits(self, layer: Layer) -> bool:
        return any(a.sweeps > 1 for a in self.stages[layer][-1].values())

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
            self._join([self.layers[k] for k in self.entered], totals)
            self.enter(totals.called)
            self._take(batch)

    def enter(self, called: Iterable[int]) -> None:
        """The open step calls layers, by their indices: what was before is decayed, and all of the step counts."""
        late = [self.layers[k] for k in set(called) - self.entered]
        self.entered |= set(called)
        self._join(late, self.step, self.decay, 1.0)
        if self.decay != 1:
            accumulators = [a for layer in late for stage in self.stages[layer] for a in stage.values()]
            if tensors := [total for a in accumulators for total in a.raw.values()]:
                with self._plain_mode():
                    torch._foreach_mul_(tensors, self.decay)  # pyright: ignore[reportPrivateImportUsage]
            for a in accumulators:
                a.counts = {name: count * self.decay for name, count in a.counts.items()}

    def _join(self, layers: Iterable[Layer], totals: Totals, decay: float = 1.0, steps: float = 0.0) -> None:
        """Add to the totals of layers, which are one object for those that steps have called together."""
        joined: dict[int, Totals] = {}
        for layer in layers:
            own = self.totals[layer]
            if id(own) not in joined:
                joined[id(own)] = _joined(own, totals, decay, steps)
            self.totals[layer] = joined[id(own)]

    def _take(self, other: Sums) -> None:
        """Add other sums, whose tensors are these afterwards where there were none; not their totals."""
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
        """The sums of both; eigenvalues of the other are carried into the bases of these. Neither changes.

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
        with self._plain_mode():
            mine._take(theirs)
        return mine

    # -------------------------------------------------------------------------------------------------------- reading
    @property
    def called(self) -> list[Layer]:
        """The layers that a batch has called, in the order of the plan."""
        return [layer for k, layer in enumerate(self.layers) if k in self.totals[layer].called]

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
                    if not (result.changes_basis and accumulator.sweeps > 1):
                        raise accumulator.streaming_error()
                    result = result.finish()  # no term has counted yet, and with "sum" that is a matrix, too
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
        # If the sum of squares is finite, so are all entries; else look at them, since it may have overflown by itself.
        if not sums or isfinite(torch.stack(norms).square().sum()):
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
        add_over_processes(list(whole._accumulators()), processes)
        told = processes.gather([totals.plain() for totals in (self.step, *self.totals.values())])
        whole.step, *of_layers = map(Totals.union, zip(*told, strict=True))
        whole.totals = dict(zip(self.layers, of_layers, strict=True))
        return whole

    def renewed(self, processes: Alone) -> tuple[Self, Self]:
        """These sums, and those over all processes, with eigenvalues in the bases that follow from the factors of now.

        Collective.
        """
        whole = self.over(processes)
        several = [layer for layer, stages in whole.stages.items() if len(stages) > 1]
        decompose_together([a for layer in several for a in whole._of(layer, 0).values()], processes)

        def changed(layer: Layer) -> list[Stage]:
            first, *others = whole.stages[layer]
            return [first, *[_in_basis(whole._following(layer), stage) for stage in others]]

        lists = side_by_side(changed, whole.layers, lambda layer: _work(whole.stages[layer][0]))
        new = copy.copy(whole)
        new.stages = dict(zip(whole.layers, lists, strict=True))
        return (new if whole is self else self._in_bases_of(new)), new

    def _in_bases_of(self, other: Sums) -> Self:
        """The same sums, with eigenvalues in the bases of others of the same plan, where these have some."""
        new = copy.copy(self)
        new.stages = {}
        for (layer, (first, *stages)), (_, *theirs) in zip(self.stages.items(), other.stages.values(), strict=True):
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

    def _plain_mode(self) -> Any:
        return plain_mode(self.layers[0].device.type)

    # --------------------------------------------------------------------------------------------------------- saving
    def state_dict(self) -> dict[str, Any]:
        """All sums and totals, in tensors and plain Python: position of the layer, number of the stage, block name."""
        layers = {
            f"{self.layers.index(layer)}": {
                "totals": _plain(self.totals[layer]),
                "stages": [{name: a.state_dict() for name, a in stage.items()} for stage in self.stages[layer]],
            }
            for layer in self.called
        }
        return {"layers": layers, "step": _plain(self.step), "decay": self.decay, "entered": sorted(self.entered)}

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


def _work(stage: Stage) -> float:
    """About how many operations `finish` of a stage takes, for `side_by_side`; 0: in the main thread."""
    if not all(type(a).decompose is not Accumulator.decompose and a.layer.device.type == "cpu" for a in stage.values()):
        return 0.0
    sizes = (size for a in stage.values() for group in a.groups for size in group.layout.matrix_shape[-2:])
    return float(sum(10 * size**3 for size in sizes))


# ---------------------------------------------------------------------------------------------------- several processes


def add_over_processes(accumulators: Sequence[Accumulator], processes: Alone) -> None:
    """Replace sums and divisors by those over all processes, in place. Collective.

    A sum that is missing in some processes, such as that of a layer that their data do not call, counts as zero there.

    Args:
        accumulators: The same ones, in the same order, in all processes.
    """
    shapes = [{name: (t.shape, t.dtype) for name, t in a.sums.items()} for a in accumulators]
    counts = [{n: c.cpu() if isinstance(c, Tensor) else c for n, c in a.counts.items()} for a in accumulators]
    told = processes.gather((shapes, counts))
    for k, a in enumerate(accumulators):
        sums, device = a.sums, a.layer.device
        for name, (shape, dtype) in {n: like for theirs, _ in told for n, like in theirs[k].items()}.items():
            sums[name] = sums[name].contiguous() if name in sums else torch.zeros(shape, dtype=dtype, device=device)
        for name in {n: None for _, theirs in told for n in theirs[k]}:
            count = sum(theirs[k].get(name, 0.0) for _, theirs in told)
            a.counts[name] = count.to(device) if isinstance(count, Tensor) else count
    processes.sum_([a.sums[name] for k, a in enumerate(accumulators) for name in sorted(a.sums)])


def decompose_together(accumulators: Sequence[Accumulator], processes: Alone) -> None:
    """Spread the decompositions that `finish` needs over processes. Collective; arguments as above."""
    if processes.world > 1:
        jobs = [(a, name, M) for a in accumulators for name, M in a.decompositions().items()]
        found = _spread(
            processes, [M for *_, M in jobs], lambda k: [jobs[k][0].decompose(*jobs[k][1:])], lambda k: [jobs[k][2]]
        )
        for (a, name, _), (result,) in zip(jobs, found, strict=True):
            a.decomposed[name] = result


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
    of_products = [f for block in blocks.values() if isinstance(block, Kronecker) for f in (block.G, block.A)]
    factors = list({id(f): f for f in of_products if isinstance(f, Dense) and f.structure == Structure.PSD}.values())

    def eigh(k: int) -> list[Tensor]:
        values, Q = factors[k].eigh()
        return [values, Q.matrix]

    matrices = [f.matrix for f in factors]
    found = _spread(processes, matrices, eigh, lambda k: [matrices[k][..., 0], matrices[k]])
    for factor, (values, Q) in zip(factors, found, strict=True):
        factor.remember_eigh(values, Q)  # also where it was computed: products depend on how it is stored, in the bits


def _spread(processes: Alone, matrices: Sequence[Tensor], compute: Any, like: Any) -> list[Sequence[Tensor]]:
    """`compute(k)` of each matrix, by one process, at a cost of `d³`; tensors as `like(k)` returns. Collective."""
    costs = [float(M.numel() * M.shape[-1]) for M in matrices]
    mine = lambda jobs: side_by_side(compute, jobs, lambda k: 10 * costs[k])  # noqa: E731
    return processes.spread(costs, mine, like)
