"""Sums over data, layer by layer.

All data of a risk, one batch, the running average of a stream with its open step, the sums of
other processes, a loaded state and the union of two streams are all objects of one class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.blocks.together import Stage, add_over_processes, costs_of, decompose_together
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import Diagonal, LinearOperator
from curvlinops_plus.linalg.decisions import is_finite, read_together
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.linalg.numerics import side_by_side
from curvlinops_plus.linalg.packing import require_dim, require_sound, require_structure
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.risk import Layer, LayerBatch, Totals

if TYPE_CHECKING:
    from typing_extensions import Self

# Shows data to a consumer, as often as it is called, and returns its totals.
DataShow = Callable[[Callable[[LayerBatch], None]], Totals]

# What a state has of `Totals`, besides the layers called and the weights of losses.
_COUNTED = ("examples", "terms", "loss_count", "steps")


class Sums:
    """For each layer of a plan stages of named sums, one for each sweep of its approximation, and
    totals.

    Of a data set each layer has the stage that it is in, and `finish` makes blocks, or the next
    stage, of it. Of a stream a layer has all its stages: those after the first one exist as soon as
    it was called. A stream consists of steps, of one batch or a few: a layer is decayed once in
    each step that calls it, and counts all examples of such steps.

    Args:
        plan: The layers.
        scale: The factor of the loss, as for accumulators.

    Attributes:
        stages: Of each layer that is not finished.
        history: For each layer a key of `totals`, the same for layers that the same steps have
            called.
        totals: What these steps contained. They are never written to.
        step: The totals of the step that batches are added to.
        decay: What layers that it calls are multiplied with.
        entered: The indices of these.
        withdrawn: Layers to which nothing is added any more; their blocks are identities.
    """

    def __init__(self, plan: Iterable[LayerPlan], scale: LossScale) -> None:
        self.stages: dict[Layer, list[Stage]] = {
            entry.layer: [entry.accumulators(scale)] for entry in plan
        }
        self.layers = list(self.stages)
        self.device = self.layers[0].device.type
        self.withdrawn: set[Layer] = set()
        self._begin(Totals())

    def _begin(self, totals: Totals) -> None:
        """The sums of all layers are of data with these totals, and no step was begun."""
        self.history = dict.fromkeys(self.layers, 0)
        self.totals = {0: totals}
        self.step = Totals()
        self.decay = 1.0
        self.entered: set[int] = set()
        self.open = False  # whether a step was begun

    def consume(self, batch: LayerBatch) -> None:
        """Add what a layer received to all its stages."""
        for stage in self.stages.get(batch.layer, ()):
            _update(stage, batch)

    # --------------------------------------------------------------------------------- all the data
    @property
    def waiting(self) -> set[Layer]:
        """The layers that need one more stage."""
        waiting = set()
        for layer, stages in self.stages.items():
            for accumulator in stages[-1].values():
                if accumulator.sweeps > 1 and layer not in self.withdrawn:
                    waiting.add(layer)
        return waiting

    def finish(
        self,
        totals: Totals,
        processes: Alone,
        names: Collection[str] | None = None,
        unvisited: Collection[Layer] = (),
    ) -> dict[str, LinearOperator]:
        """The blocks of layers that need no further stage; the stage of the others is the next one.

        Sums are given up as soon as they are used. Collective.

        Args:
            totals: Of all data, which every layer was shown.
            names: Of the accumulators whose blocks this process keeps; None: of all.
            unvisited: Layers that no example has called: experts, whose blocks are zero.
        """
        blocks: dict[str, LinearOperator] = {}
        for layer in unvisited:
            stage = self.stages.pop(layer, [{}])[0]
            kept = [name for name in stage if names is None or name in names]
            for group in layer.groups if kept else ():
                zeros = torch.zeros(group.layout.dim, dtype=layer.accumulation_dtype)
                blocks[group.name] = Diagonal(zeros.to(layer.device))
        accumulators = [a for (stage,) in self.stages.values() for a in stage.values()]
        totals = totals.plain()
        accumulator = None
        for accumulator in accumulators:
            accumulator.totals = totals
            accumulator.complete = True
        if processes.world > 1:
            add_over_processes(accumulators, processes)
        self._look_at(accumulators)
        with plain_mode(self.device):
            decompose_together(accumulators, processes)
        del accumulators, accumulator

        def finished(stages: list[Stage]) -> dict[str, Any]:
            stage = stages.pop()
            return {
                name: accumulator.finish()
                for name, accumulator in stage.items()
                if names is None or accumulator.sweeps > 1 or name in names
            }

        layers = list(self.stages)
        with plain_mode(self.device):
            results = side_by_side(finished, list(self.stages.values()), costs_of)
        self.stages = {}
        for layer, of_layer in zip(layers, results, strict=True):
            stage: Stage = {}
            for name, result in of_layer.items():
                if isinstance(result, Accumulator):
                    stage[name] = result
                else:
                    blocks |= {name: result} if isinstance(result, LinearOperator) else result
            if stage:
                self.stages[layer] = [stage]
        return blocks

    # ----------------------------------------------------------------------------- batches of steps
    def fresh(self) -> Self:
        """No sums, in the same bases."""
        other = self._with(Accumulator.empty)
        other._begin(Totals())
        return other

    def _with(self, make: Callable[[Accumulator], Accumulator]) -> Self:
        """The same with accumulators made of these ones."""
        other = object.__new__(type(self))  # as `copy.copy`, which takes several times as long
        vars(other).update(vars(self))
        other.stages = {}
        for layer, stages in self.stages.items():
            other.stages[layer] = [{n: make(a) for n, a in stage.items()} for stage in stages]
        other.withdrawn = set(self.withdrawn)
        return other

    def see(self, show: DataShow, processes: Alone | None, totals: Totals | None = None) -> Totals:
        """Add a first batch, and once more to layers that take their bases from it, as EKFAC does.

        Args:
            processes: Those whose batches determine these bases. Collective. None: this one must
                not make any.
            totals: Of the batch, if it was added already.

        Raises:
            UnsupportedError: If a basis would be needed.
        """
        if totals is None:
            totals = show(self.consume)
        self._begin(totals)
        while waiting := self.waiting:
            overall = self if processes is None else self.over(processes)
            late = [layer for layer in overall.called if layer in waiting]
            # Without a term there are no gradients.
            if not late or not float(overall.totals_of(late[0]).loss_count) > 0:
                break
            if processes is None:
                raise UnsupportedError(
                    f"{late[0].title} was called by no process in the first update with terms, and "
                    "is called now. EKFAC's eigenvectors have to be the same in all processes, and "
                    "these agree on them in that update only. Use KFAC for this layer, or begin "
                    "with batches that call it."
                )
            with plain_mode(self.device):
                decompose_together(overall._of(late, -1), processes)
                added = {layer: overall._following(layer) for layer in late}
            for layer, stage in added.items():
                self.stages[layer].append(stage)
            show(lambda batch, added=added: _update(added.get(batch.layer, {}), batch))
        return totals

    def _following(self, layer: Layer, number: int = 0) -> Stage:
        """The stage of a layer that follows from that of this number, without sums.

        Raises:
            UnsupportedError: If it can't take over what others of its class have summed.
        """
        following: Stage = {}
        for accumulator in self._of([layer], number):
            result = accumulator.finish()
            if isinstance(result, Accumulator):
                if not result.changes_basis:
                    raise accumulator.streaming_error()
                following[accumulator.block_name] = result
        return following

    def added(self, batch: Sums, totals: Totals, decay: float) -> Self:
        """These sums and those of one batch, which are taken over: in the open step with `decay=1`,
        else in a new one.

        Nothing changes here, so that an interrupt leaves the sums of before or those of afterwards.

        Raises:
            ValueError: If several losses had other weights before.
        """
        for before in self.totals.values():
            if problem := before.mismatch(totals):
                raise ValueError(problem)
        after = self.copied(Accumulator.shared)
        if decay != 1:
            # The step of one of several processes, without examples: others call what they did.
            if self.open and not self.entered and not self.step.examples:
                after.enter(range(len(self.layers)))
            after.step = Totals()
            after.decay = decay
            after.entered = set()
        after.open = True
        after.step.add(totals)
        after._join([self.layers[index] for index in after.entered], totals)
        after.enter(totals.called, batch)
        return after

    def enter(self, called: Iterable[int], batch: Sums | None = None) -> None:
        """The open step calls layers, by their indices: what was before is decayed, and all of the
        step counts.

        Args:
            batch: Sums that are added, see `_fold`.
        """
        late = [self.layers[index] for index in set(called) - self.entered]
        self.entered.update(called)
        self._join(late, self.step, self.decay, steps=1.0)
        self._fold({*late} if self.decay != 1 else set(), batch)

    def _join(
        self, layers: Iterable[Layer], totals: Totals, decay: float = 1.0, steps: float = 0.0
    ) -> None:
        """Add to the totals of layers, of which those before are decayed."""
        joined: dict[int, int] = {}
        for layer in layers:
            key = self.history[layer]
            if key not in joined:
                joined[key] = max(self.totals) + 1
                self.totals[joined[key]] = _union(self.totals[key], totals, decay, steps)
            self.history[layer] = joined[key]
        if joined:
            self.totals = {key: self.totals[key] for key in {*self.history.values()}}

    def _fold(self, decayed: set[Layer], batch: Sums | None = None) -> None:
        """Sums and counts become `ρ x + x_batch`, with ρ = 1 for layers that don't decay; totals
        stay.

        Args:
            decayed: Layers whose sums decay.
            batch: What is added, None for nothing; its tensors hold the results. Tensors of before
                are not written to, since other sums may share them.
        """
        # What ρ multiplies, by ρ, and the tensors that it is added to.
        before: dict[float, list[Tensor]] = {1.0: [], self.decay: []}
        values: dict[float, list[Tensor]] = {1.0: [], self.decay: []}
        added = [[]] * len(self.stages) if batch is None else list(batch.stages.values())
        for (layer, stages), more in zip(self.stages.items(), added, strict=True):
            rho = self.decay if layer in decayed else 1.0
            for stage, of_batch in zip_longest(stages, more[: len(stages)], fillvalue={}):
                for name, accumulator in stage.items():
                    if rho != 1:
                        accumulator.counts = {n: rho * c for n, c in accumulator.counts.items()}
                    sums = accumulator.raw
                    new: dict[str, Tensor] = {}
                    if name in of_batch:
                        new = of_batch[name].raw
                        accumulator.halves |= of_batch[name].halves
                        for key, count in of_batch[name].counts.items():
                            accumulator.counts[key] = accumulator.counts.get(key, 0.0) + count
                    elif rho == 1:
                        continue
                    for key, total in sums.items():
                        if key not in new and rho == 1:
                            continue
                        if key not in new:
                            new[key] = torch.zeros_like(total)
                        before[rho].append(total)
                        values[rho].append(new[key])
                    accumulator.raw = sums | new
            stages += more[len(stages) :]
        with plain_mode(self.device):
            for rho, totals in before.items():
                if totals:
                    torch._foreach_add_(values[rho], totals, alpha=rho)  # pyright: ignore[reportPrivateImportUsage]

    def _look_at(self, accumulators: list[Accumulator]) -> None:
        """Tell accumulators that their sums are finite: on a GPU one answer for all, where each
        answer is waited for.
        """
        if self.device != "cpu":
            finite = _all_finite(accumulators)
            for accumulator in accumulators:
                accumulator.is_finite = finite

    def require_finite(self) -> None:
        """Refuse sums of a batch with NaN or infinite entries.

        Raises:
            NumericsError: Naming layer and statistic.
        """
        accumulators = list(self._accumulators())
        if _all_finite(accumulators):
            return
        # Look at them: a norm may have overflown by itself.
        for accumulator in accumulators:
            for name, total in accumulator.raw.items():
                if bool(total.isfinite().all()):
                    continue
                raise NumericsError(
                    f"{accumulator.layer.title}: the statistic {name!r} of this batch has NaN or "
                    "infinite entries. The batch was not added, the estimator is as before it. "
                    "Look for NaN in the batch, for an overflow, or for parameters that diverged."
                )

    # --------------------------------------------------------------------------- sums of other sums
    def copied(self, make: Callable[[Accumulator], Accumulator] = Accumulator.copy) -> Self:
        """The same, with accumulators made of these ones; changes of one are none of the other."""
        with plain_mode(self.device):
            other = self._with(make)
        other.history = dict(self.history)
        other.totals = dict(self.totals)
        other.entered = set(self.entered)
        other.step = _union(Totals(), self.step)
        return other

    def without_data(self) -> Self:
        """No sums in the same steps, which have called the same layers: for a process that shares
        those of another.
        """
        other = self.copied(Accumulator.empty)
        other.totals = {
            key: Totals(called=set(totals.called), weights=totals.weights, steps=totals.steps)
            for key, totals in self.totals.items()
        }
        other.step = Totals()
        return other

    def merged(self, other: Sums) -> Self:
        """The sums of both; eigenvalues of the other are carried into the bases of these. Neither
        changes.

        A layer that one of them calls in the step that it is in was called by both.

        Raises:
            ValueError: If several losses had other weights there.
        """
        mine = self.copied()
        theirs = other._in_bases_of(self).copied()
        mine.enter(other.entered)
        theirs.enter(self.entered)
        mine._set_totals(map(_union, mine._totals_by_layer(), theirs._totals_by_layer()))
        mine.step = _union(mine.step, theirs.step)
        mine.withdrawn |= {mine.layers[other.layers.index(layer)] for layer in other.withdrawn}
        mine._fold(set(), theirs)
        return mine

    def over(self, processes: Alone) -> Self:
        """The sums of all processes; these stay as they are. Collective.

        Moving averages are linear: the average of sums is the sum of averages.
        """
        if processes.world == 1:
            return self
        overall = self.copied()
        add_over_processes(list(overall._accumulators()), processes)
        parts = [totals.plain() for totals in (self.step, *self._totals_by_layer())]
        overall.step, *of_layers = map(Totals.union, zip(*processes.gather(parts), strict=True))
        overall._set_totals(of_layers)
        return overall

    def renewed(self, processes: Alone) -> tuple[Self, Self]:
        """These sums, and those over all processes, with eigenvalues in the bases that follow from
        the factors of now.

        Collective.
        """
        overall = self.over(processes)
        corrected = [layer for layer, stages in overall.stages.items() if len(stages) > 1]
        decompose_together(overall._of(corrected, 0), processes)

        def renewed_stages(layer: Layer) -> list[Stage]:
            factors, *corrections = overall.stages[layer]
            carried = [_in_basis(overall._following(layer), stage) for stage in corrections]
            return [factors, *carried]

        stages = side_by_side(
            renewed_stages, overall.layers, lambda layer: costs_of(overall.stages[layer])
        )
        new = copy.copy(overall)
        new.stages = dict(zip(overall.layers, stages, strict=True))
        return (new if overall is self else self._in_bases_of(new)), new

    def _in_bases_of(self, other: Sums) -> Self:
        """The same sums, with eigenvalues in the bases of others of the same plan, where these have
        some.
        """
        new = copy.copy(self)
        new.stages = {}
        for layer, theirs in zip(self.stages, other.stages.values(), strict=True):
            factors, *corrections = self.stages[layer]
            bases = theirs[1:]
            carried = map(_in_basis, bases, [*corrections, *[None] * len(bases)])
            new.stages[layer] = [factors, *carried, *corrections[len(bases) :]]
        return new

    # -------------------------------------------------------------------------------------- reading
    @property
    def called(self) -> list[Layer]:
        """The layers that a batch has called, or that are withdrawn, in the order of the plan."""
        called = []
        for index, layer in enumerate(self.layers):
            if index in self.totals[self.history[layer]].called or layer in self.withdrawn:
                called.append(layer)
        return called

    @property
    def begins(self) -> bool:
        """Whether a batch of now makes the bases that an approximation needs before it can be
        summed.
        """
        return all(len(stages) == 1 for stages in self.stages.values()) and bool(self.waiting)

    def blocks(self, layers: Iterable[Layer] | None = None) -> dict[str, LinearOperator]:
        """Block name to operator, of these layers of a stream; default: of all that were called."""
        ordered = list(self.called if layers is None else layers)
        return read_together(lambda: self._blocks(ordered), torch.device(self.device))

    def _blocks(self, layers: list[Layer]) -> dict[str, LinearOperator]:
        # Layers share few totals, whose numbers are read once.
        plain = {key: self.totals[key].plain() for key in {self.history[it] for it in layers}}
        blocks: dict[str, LinearOperator] = {}
        self._look_at([*self._accumulators()])
        for layer in layers:
            if layer in self.withdrawn:
                blocks |= _identities(layer)
                continue
            for accumulator in self._of([layer], -1):
                accumulator.totals = plain[self.history[layer]]
                result = accumulator.finish()
                if isinstance(result, Accumulator):
                    if not (result.changes_basis and accumulator.sweeps > 1):
                        raise accumulator.streaming_error()
                    # No term has counted yet, and with "sum" that is a matrix, too.
                    result = result.finish()
                assert not isinstance(result, Accumulator)
                if isinstance(result, LinearOperator):
                    result = {accumulator.block_name: result}
                blocks |= result
        return blocks

    def totals_of(self, layer: Layer) -> Totals:
        """The totals of the steps that have called a layer."""
        return self.totals[self.history[layer]]

    def _totals_by_layer(self) -> list[Totals]:
        return [self.totals_of(layer) for layer in self.layers]

    def _set_totals(self, totals: Iterable[Totals]) -> None:
        """Totals of each layer, in the order of the plan."""
        self.totals = dict(enumerate(totals))
        self.history = {layer: index for index, layer in enumerate(self.layers)}

    def _of(self, layers: Iterable[Layer], number: int) -> list[Accumulator]:
        """The accumulators of a stage of some layers, which know their totals."""
        accumulators: list[Accumulator] = []
        for layer in layers:
            for accumulator in self.stages[layer][number].values():
                accumulator.totals = self.totals_of(layer)
                accumulators.append(accumulator)
        return accumulators

    def _accumulators(self) -> Iterator[Accumulator]:
        return (a for stages in self.stages.values() for stage in stages for a in stage.values())

    # --------------------------------------------------------------------------------------- saving
    def state_dict(self) -> dict[str, Any]:
        """All sums and totals, in tensors and plain Python: position of the layer, number of the
        stage, block name.
        """
        layers: dict[str, Any] = {}
        for layer in self.called:
            layers[f"{self.layers.index(layer)}"] = {
                "totals": _totals_as_data(self.totals_of(layer)),
                "stages": [
                    {name: a.state_dict() for name, a in stage.items()}
                    for stage in self.stages[layer]
                ],
            }
        return {
            "layers": layers,
            "step": _totals_as_data(self.step),
            "decay": self.decay,
            "entered": sorted(self.entered),
            "withdrawn": [k for k, layer in enumerate(self.layers) if layer in self.withdrawn],
        }

    def load_state_dict(self, state: Fields) -> None:
        """Take over what `state_dict` returned; these have no sums yet.

        Raises:
            ValueError: If it is not of these layers, or damaged; blocks that can be made of the
                sums without a decomposition are looked at.
        """
        with reading(state.title):
            self._load(state)
            self._require_sound_blocks(state.title)

    def _load(self, state: Fields) -> None:
        """Read totals first: stages after the first one are made of those before."""
        totals = self._totals_by_layer()
        stages: dict[Layer, Fields] = {}
        for index, of_layer in state.part("layers").parts():
            if index not in [str(k) for k in range(len(self.layers))]:
                raise state.error("a layer", index, f"an index below {len(self.layers)}")
            totals[int(index)] = self._totals_of_data(of_layer.part("totals"))
            stages[self.layers[int(index)]] = of_layer.sequence("stages")
        self._set_totals(totals)
        for layer, numbered in stages.items():
            numbered.require([0])
            for number, stage in numbered.parts():
                if number:
                    self.stages[layer].append(self._following(layer))
                for name, accumulator in self.stages[layer][number].items():
                    _load_accumulator(accumulator, stage.part(name))
        self.step = self._totals_of_data(state.part("step"))
        self.decay = state.number("decay", 0.0)
        self.entered = set(state.indices("entered", len(self.layers)))
        if "withdrawn" in state.data:  # earlier versions withdrew none
            indices = state.indices("withdrawn", len(self.layers))
            self.withdrawn = {self.layers[index] for index in indices}

    def _require_sound_blocks(self, title: str) -> None:
        """Refuse sums whose blocks are of other sizes than the parameters, or not what they say."""
        # Where no term has counted, or nothing was added, there is no block yet.
        layers = [
            layer
            for layer in self.called
            if self.totals_of(layer).loss_count > 0
            and all(accumulator.raw for accumulator in self.stages[layer][-1].values())
        ]
        dims = {group.name: group.layout.dim for layer in layers for group in layer.groups}
        for name, block in self.blocks(layers).items():
            require_dim(block, dims[name], f"{title}, block {name!r}")
            require_sound(block, f"{title}, block {name!r}")
        for accumulator in self._of(layers, 0):
            for name, M in accumulator.decompositions().items():
                require_structure(M, f"{title}, {accumulator.layer.title}, {name!r}")

    def _totals_of_data(self, data: Fields) -> Totals:
        """Undo `_totals_as_data`."""
        weights = data.sequence("weights")
        return Totals(
            examples=data.count("examples"),
            terms=data.count("terms"),
            loss_count=data.number("loss_count", 0.0),
            steps=data.number("steps", 0.0),
            called=set(data.indices("called", len(self.layers))),
            weights=tuple([weights.number(k, 0.0) for k in weights.data]),
        )


def _load_accumulator(accumulator: Accumulator, state: Fields) -> None:
    """Give an accumulator the sums of a state, as finite tensors in its precision or a higher
    one.
    """
    least = accumulator.layer.accumulation_dtype
    for part in ("sums", "constants"):
        tensors = state.part(part)
        for name in tensors.data:
            t = tensors.tensor(name)
            if t.is_floating_point() and torch.promote_types(t.dtype, least) != t.dtype:
                raise tensors.error(repr(name), t, f"a tensor of {least}")
    counts = state.part("counts")
    for name, count in counts.data.items():
        if isinstance(count, Tensor):
            counts.tensor(name)
        else:
            counts.number(name, 0.0)
    accumulator.load_state_dict(state.data)


def _all_finite(accumulators: Iterable[Accumulator]) -> bool:
    """Whether the norms of all sums are finite, and so all entries are."""
    tensors = [total for accumulator in accumulators for total in accumulator.raw.values()]
    if not tensors:
        return True
    norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    return is_finite(torch.stack(norms).sum())


def _update(stage: Stage, batch: LayerBatch) -> None:
    for accumulator in stage.values():
        group = accumulator.group
        accumulator.update(batch if group is None else batch.restrict(group))


def _in_basis(stage: Stage, before: Stage | None) -> Stage:
    """An empty stage like this one with the sums of another one of the same number, expressed in
    its basis.
    """
    new = {name: accumulator.empty() for name, accumulator in stage.items()}
    for name, accumulator in new.items():
        if before is not None and before[name].sums:
            accumulator.change_basis(before[name])
    return new


def _identities(layer: Layer) -> dict[str, LinearOperator]:
    """Blocks whose inverse leaves gradients as they are, up to the damping."""
    blocks: dict[str, LinearOperator] = {}
    for group in layer.groups:
        size = sum(layer.params[key].numel() for key in group.keys)
        ones = torch.ones(size, dtype=layer.accumulation_dtype, device=layer.device)
        blocks[group.name] = Diagonal(ones)
    return blocks


def _union(before: Totals, more: Totals, decay: float = 1.0, steps: float = 0.0) -> Totals:
    """The totals of both, of which the first ones are decayed, and belong to that many steps
    more.
    """
    new = Totals(
        examples=before.examples,
        terms=before.terms,
        loss_count=before.loss_count * decay,
        called=set(before.called),
        reached=set(before.reached),
        counts=before.counts,
        losses=before.losses,
        weights=before.weights,
        steps=before.steps * decay + steps,
    )
    new.add(more)
    return new


def _totals_as_data(totals: Totals) -> dict[str, Any]:
    plain = totals.plain()
    data = {name: getattr(plain, name) for name in _COUNTED}
    return {**data, "called": sorted(plain.called), "weights": list(plain.weights)}
