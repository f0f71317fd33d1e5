"""What an accumulator has summed, in tensors and plain Python, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from curvlinops_plus.layer import AffineRule
from curvlinops_plus.likelihood.sampling import wide_dtype
from curvlinops_plus.linalg.gram_sum import GramSum, PackedForm
from curvlinops_plus.risk import Layer, Totals

_KEYS = {"sums", "counts", "examples", "terms", "loss_count", "shares", "constants"}


@dataclass
class StoredSums:
    """The attributes of an accumulator that change.

    Attributes:
        rows: Running sums of which rows wait, or that are packed.
        constants: Tensors, or tuples of them, that are no sums; None where there is none.
    """

    sums: dict[str, Tensor]
    rows: dict[str, GramSum]
    counts: dict[str, Tensor | float]
    totals: Totals
    constants: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """All of it in copies: who goes on from it rounds as who goes on from here."""
        totals = self.totals.plain()
        return {
            "sums": {name: _copied(total) for name, total in self.sums.items()},
            "rows": {name: rows.state_dict() for name, rows in self.rows.items()},
            "counts": {name: _copied(x) if isinstance(x, Tensor) else float(x) for name, x in self.counts.items()},
            "examples": totals.examples,
            "terms": totals.terms,
            "loss_count": totals.loss_count,
            "shares": list(totals.weights),
            "steps": totals.steps,
            "constants": {name: _each(t, _copied) for name, t in self.constants.items() if t is not None},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], layer: Layer, constants: tuple[str, ...]) -> StoredSums:
        """What `state_dict` returned, on the device of the layer.

        Args:
            state: The state; those of earlier versions have no rows that wait.
            constants: Names of what the accumulator has besides of sums.

        Raises:
            ValueError: If keys are missing, or the layer is a convolution of other options.
        """
        if missing := _KEYS - set(state):
            raise ValueError(f"The state of {layer.title} lacks {sorted(missing)}; is the file cut off?")
        form, kept = partial(_packed_form, layer), state["constants"]

        def own(t: Tensor) -> Tensor:
            return t.to(layer.device, copy=True)

        def count(x: Tensor | float) -> Tensor | float:
            return x.to(layer.device, wide_dtype(layer.device)) if isinstance(x, Tensor) else x

        counted = (state[key] for key in ("examples", "terms", "loss_count"))
        return cls(
            {name: own(total) for name, total in state["sums"].items()},
            {name: GramSum.from_state_dict(each, layer.device, form) for name, each in state.get("rows", {}).items()},
            {name: count(x) for name, x in state["counts"].items()},
            Totals(*counted, weights=tuple(state["shares"]), steps=state.get("steps", 0.0)),
            {name: None if kept.get(name) is None else _each(kept[name], own) for name in constants},
        )


def _packed_form(layer: Layer, told: str) -> PackedForm:
    """What packed numbers of a layer's inputs mean, from what the state tells of it."""
    rules = ((use.rule, use.module) for use in layer.uses if isinstance(use.rule, AffineRule))
    form = next((form for rule, module in rules for form in rule.packed_forms(module) if repr(form) == told), None)
    if form is None:
        raise ValueError(f"{layer.title}: the state is that of a convolution of other options, {told}.")
    return form


def _copied(t: Tensor) -> Tensor:
    return t.detach().clone()


def _each(t: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` of a tensor, or of each of several."""
    return function(t) if isinstance(t, Tensor) else tuple(map(function, t))
