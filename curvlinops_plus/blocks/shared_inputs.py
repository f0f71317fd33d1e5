"""Layers that read the same tensor, such as those of queries, keys and values: their input factors are one.

Which layers do is seen in the first batch. In each later one, before anything of it is added, it is looked whether they
still do; a layer that reads something else goes on with a copy of the sum until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.distributed import Alone
from curvlinops_plus.risk import Layer
from curvlinops_plus.risk.layers import Call

Calls = Mapping[Layer, Sequence[Call]]


class SharedInputs:
    """Which of some accumulators of a sweep share an input factor.

    Args:
        pending: The accumulators of each layer. Those of KFAC and EKFAC that read what another one reads are told so.
        owner: The rank of the only process that needs the sums of an accumulator of this name, None if all do. What
            belongs to different processes is not shared.
    """

    def __init__(
        self, pending: Mapping[Layer, Mapping[str, Accumulator]], owner: Callable[[str, Accumulator], int | None]
    ) -> None:
        self.candidates: dict[Layer, KFAC] = {}
        self._owners: dict[Layer, int | None] = {}
        for layer, own in pending.items():
            for name, a in own.items():
                if isinstance(a, KFAC) and a.may_share_inputs:
                    self.candidates[layer], self._owners[layer] = a, owner(name, a)
        self._calls: Calls | None = None  # of the present batch
        self._begun = False

    def begin(self, calls: Calls | None) -> None:
        """Look at the calls of a batch before something of it is added; called once for each layer of the batch."""
        if calls is None or calls is self._calls or len(self.candidates) < 2:
            return
        first, self._begun, self._calls = not self._begun, True, calls
        if first:
            return self._find_leaders(calls)
        for follower, leader in self._pairs():
            mine, theirs = (calls.get(a.layer, ()) for a in (follower, leader))
            if (mine or theirs) and (_read(mine) is None or _read(mine) != _read(theirs)):
                follower.part_from_leader()

    def end(self) -> None:
        """All of a batch was added; what layers read need not stay while the model runs on the next one."""
        self._calls = None

    def _find_leaders(self, calls: Calls) -> None:
        """Let layers that read the same in the first batch share."""
        found: dict[Any, list[KFAC]] = {}
        for layer, accumulator in self.candidates.items():
            if (key := _read(calls.get(layer, ()))) is not None:
                before = found.setdefault((key, self._owners[layer]), [])
                same = [a for a in before if a.input_kind == accumulator.input_kind]
                accumulator.leader = same[0] if same else None
                before.append(accumulator)

    def _pairs(self) -> Iterator[tuple[KFAC, KFAC]]:
        for accumulator in self.candidates.values():
            if accumulator.leader is not None:
                yield accumulator, accumulator.leader

    def agree(self, processes: Alone) -> None:
        """Share in all processes what is shared in each that has examples. Collective."""
        if processes.world == 1:
            return
        own = {(f.layer.name, leader.layer.name) for f, leader in self._pairs()} if self._begun else None
        told = [pairs for pairs in processes.gather("inputs that layers share", own) if pairs is not None]
        common = set.intersection(*told) if told else set()
        if own is None:
            by_name = {layer.name: a for layer, a in self.candidates.items()}
            for follower, leader in common:
                by_name[follower].leader = by_name[leader]
        for follower, leader in list(self._pairs()):
            if (follower.layer.name, leader.layer.name) not in common:
                follower.part_from_leader()

    def units(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """The layers, each with those that share its input factor behind it."""
        units = {layer: [layer] for layer in layers if not self._follows(layer)}
        for layer in layers:
            if self._follows(layer):
                units[self.candidates[layer].leader.layer].append(layer)  # type: ignore[union-attr]
        return list(units.values())

    def _follows(self, layer: Layer) -> bool:
        return layer in self.candidates and self.candidates[layer].leader is not None


def _read(calls: Sequence[Call]) -> Any:
    """What identifies the rows of some calls among those of one batch, None if that is not known."""
    keys = []
    for call in calls:
        if not vars(type(call.rule)).get("rows_are_inputs", False):
            return None
        x = call.input
        keys.append((x.data_ptr(), x.shape, x.stride(), x.dtype, "bias" in call.use.keys))
    return tuple(keys) or None
