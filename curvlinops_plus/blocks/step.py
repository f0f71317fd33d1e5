"""The steps that a stream of batches consists of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from curvlinops_plus.risk import Totals

_COUNTED = ("examples", "terms", "loss_count")


@dataclass
class Step:
    """The step that batches are added to. Layers that none of them calls are as before it.

    Attributes:
        decay: What the sums of layers that it calls are multiplied with, once.
        totals: Of its batches until now.
        called: Indices of the layers that it has called, in any process as far as this one knows.
        ever: The same of all steps.
        untold: For each step of which other processes don't know yet what it has called here: these layers, and whether
            it has added anything.
    """

    decay: float = 1.0
    totals: Totals = field(default_factory=Totals)
    called: set[int] = field(default_factory=set)
    ever: set[int] = field(default_factory=set)
    untold: list[tuple[set[int], bool]] = field(default_factory=list)

    def copy(self) -> Step:
        """The same; changes of one are none of the other."""
        totals = replace(self.totals, called=set(self.totals.called), reached=set(self.totals.reached))
        return replace(self, totals=totals, called=set(self.called), ever=set(self.ever), untold=list(self.untold))

    def state_dict(self) -> dict[str, Any]:
        """The step in plain Python."""
        totals = {name: getattr(self.totals.plain(), name) for name in _COUNTED}
        return {
            "decay": self.decay,
            "totals": totals | {"called": sorted(self.totals.called), "weights": list(self.totals.weights)},
            "called": sorted(self.called),
            "ever": sorted(self.ever),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Step:
        """The step that `state_dict` returned."""
        given = state["totals"]
        totals = Totals(**{name: given[name] for name in _COUNTED})
        totals.called, totals.weights = set(given["called"]), tuple(given["weights"])
        return cls(state["decay"], totals, set(state["called"]), set(state["ever"]))

    def following(self, decay: float) -> Step:
        """The step that comes next."""
        return Step(decay, ever=self.ever, untold=self.untold)

    def merged(self, other: Step) -> Step:
        """The step that two streams are in."""
        totals = Totals.union([self.totals, other.totals])
        return Step(self.decay, totals, self.called | other.called, self.ever | other.ever)

    def call(self, indices: Iterable[int]) -> set[int]:
        """Note that layers are called, and return those that were not called before."""
        late = set(indices) - self.called
        self.called |= late
        self.ever |= late
        return late
