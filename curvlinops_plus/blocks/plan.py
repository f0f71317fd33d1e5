"""Which approximation each layer gets, and the sweeps that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from warnings import warn

from curvlinops_plus.blocks.accumulator import Accumulator, Approximation
from curvlinops_plus.blocks.per_example import DiagonalBlock
from curvlinops_plus.blocks.sweep_cache import Kept
from curvlinops_plus.errors import CurvatureWarning, NumericsError, UnsupportedError
from curvlinops_plus.layer import why_generic
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.risk import EmpiricalRisk, Layer, LayerBatch, Totals, Vectors
from curvlinops_plus.risk.loss_weights import LossWeights, loss_weights
from curvlinops_plus.risk.nonfinite import first_nonfinite
from curvlinops_plus.risk.reading import is_iterator
from curvlinops_plus.risk.sweep import sweep

__all__ = ["Entry", "Sums", "make_plan"]

# What layers see is kept for another sweep while it is no more than this.
_KEPT_BYTES = 2**26


@dataclass(frozen=True)
class Entry:
    """A layer and the approximation it gets."""

    layer: Layer
    approximation: Approximation

    def accumulators(self, risk: EmpiricalRisk) -> dict[str, Accumulator]:
        """One accumulator per block, or one for all blocks of the layer under the layer's name."""
        if self.approximation.kind.per_group:
            return {group.name: self.approximation(self.layer, group, risk.scale) for group in self.layer.groups}
        return {self.layer.name: self.approximation(self.layer, None, risk.scale)}


def make_plan(layers: list[Layer], approximation: Any, default: Any) -> list[Entry]:
    """Decide for every layer: exact name, then glob, then type, then the default.

    Layers without an affine rule, and shared parameters, get their exact diagonal where a Kronecker approximation was
    meant; one warning lists them.

    Args:
        layers: The layers.
        approximation: An approximation, or a mapping from layer names, globs or module types to one.
        default: For layers that the mapping does not name.

    Raises:
        ValueError: If a key of the mapping matches no layer, or names what is no approximation.
        UnsupportedError: If a layer named exactly can't have the approximation asked for.
    """
    if not isinstance(approximation, Mapping):
        rules, rest = {}, Approximation.of(approximation)
    else:
        rules, rest = {key: Approximation.of(value) for key, value in approximation.items()}, Approximation.of(default)
    used: set[Any] = set()
    plan, fallen = [], []
    for layer in layers:
        key = _matching(layer, rules)
        used |= _all_matching(layer, rules)
        chosen = rest if key is None else rules[key]
        if chosen.kind.affine and not layer.affine:
            if key in _names(layer):
                why = _why(layer)
                advice = "" if "DiagonalBlock" in why else " Use DiagonalBlock or FullBlock for it."
                raise UnsupportedError(f"layer {key!r} ({_type_name(layer)}) can't have {chosen!r}: {why}.{advice}")
            fallen.append(layer)
            chosen = Approximation(DiagonalBlock)
        plan.append(Entry(layer, chosen))
    unused = [key for key in rules if key not in used]
    if unused:
        raise ValueError(
            f"No layer matches {unused[0]!r}. Layers with parameters here: {[layer.name for layer in layers]}, of "
            "types "
            f"{sorted({_type_name(layer) for layer in layers})}."
        )
    if fallen:
        listing = ", ".join(f"{layer.name or 'the model'!r} ({_type_name(layer)}: {_why(layer)})" for layer in fallen)
        warn(
            f"{len(fallen)} of {len(layers)} layers get their exact diagonal (DiagonalBlock) instead of Kronecker "
            f"factors: {listing}.",
            CurvatureWarning,
            stacklevel=4,
        )
    return plan


def _names(layer: Layer) -> set[str]:
    return {use.name for use in layer.uses}


def _all_matching(layer: Layer, rules: Mapping[Any, Approximation]) -> set[Any]:
    names = _names(layer)
    return {
        key
        for key in rules
        if (isinstance(key, str) and any(fnmatchcase(name, key) or name == key for name in names))
        or (isinstance(key, type) and any(isinstance(use.owner, key) for use in layer.uses))
    }


def _matching(layer: Layer, rules: Mapping[Any, Approximation]) -> Any:
    found = _all_matching(layer, rules)
    by_rank = sorted(found, key=lambda key: 0 if key in _names(layer) else 1 if isinstance(key, str) else 2)
    types = [key for key in by_rank if isinstance(key, type)]
    if by_rank and isinstance(by_rank[0], str):
        return by_rank[0]
    # Among types the nearest ancestor decides.
    mros = [type(use.owner).__mro__ for use in layer.uses]
    return min(types, key=lambda t: min(mro.index(t) for mro in mros if t in mro)) if types else None


def _type_name(layer: Layer) -> str:
    return type(layer.uses[0].owner).__name__


def _why(layer: Layer) -> str:
    if layer.tied:
        return f"its parameter is shared by {[use.name for use in layer.uses]} as different matrices"
    use = layer.uses[0]
    return why_generic(use.owner) or f"its rule {type(use.rule).__name__} is not that of an affine layer"


class Sums:
    """Accumulators of a plan between sweeps.

    Args:
        risk: Model, loss and data.
        plan: The layers with their approximations.
        vectors: What is sent back.
        keep: Keep what layers see for the next sweep, while it is little. Model and data must not change until then.
    """

    def __init__(self, risk: EmpiricalRisk, plan: list[Entry], vectors: Vectors, keep: bool = False) -> None:
        self.risk, self.plan, self.vectors = risk, plan, vectors
        self.pending: list[dict[str, Accumulator]] = [entry.accumulators(risk) for entry in plan]
        self.blocks: dict[str, LinearOperator] = {}
        self.totals: list[Totals] = []
        self._kept = Kept(_KEPT_BYTES if keep else 0)
        self._weights: LossWeights | None = None

    @property
    def done(self) -> bool:
        """Whether no layer wants another sweep."""
        return not any(self.pending)

    def sweep(self, desc: str) -> None:
        """Read the data once for all layers that want it, or look at what was kept of the sweep before.

        Raises:
            ValueError: If a layer never ran, or the number of examples differs from the sweep before.
        """
        active = [index for index, accumulators in enumerate(self.pending) if accumulators]
        layers = [self.plan[index].layer for index in active]
        if self.totals and is_iterator(self.risk.data):
            raise ValueError(
                "`data` is an iterator, which can be read only once, and another sweep over it is needed. Pass a "
                "list of batches or a DataLoader."
            )
        position = {id(layer): index for index, layer in zip(active, layers)}
        again = {index for index in active if any(accumulator.more for accumulator in self.pending[index].values())}

        def update(index: int, seen: LayerBatch) -> None:
            for group in seen.layer.groups:
                accumulator = self.pending[index].get(group.name)
                if accumulator is not None and type(accumulator).per_group:
                    accumulator.update(seen.restrict(group))
            for accumulator in self.pending[index].values():
                if not type(accumulator).per_group:
                    accumulator.update(seen)

        def consume(seen: LayerBatch) -> None:
            index = position[id(seen.layer)]
            update(index, seen)
            if index in again:
                self._kept.add(index, seen)

        def count(part: Totals) -> None:
            for index in active:
                for accumulator in self.pending[index].values():
                    accumulator.count(part)

        def after_batch(part: Totals) -> None:
            count(part)
            self._kept.end_of_batch(part)

        if self._kept.has(active):
            bar = f"{desc} (kept)" if self.risk.options.progressbar else None
            self._kept.replay(lambda index, seen: update(index, seen) if index in active else None, count, bar)
            return
        self._kept = Kept(self._kept.max_bytes)
        if self._weights is None and self.vectors.backward:
            self._weights = loss_weights(self.risk)
        totals = sweep(self.risk, layers, self.vectors, consume, after_batch, desc, self._weights)
        self._check(totals, layers)
        self.totals.append(totals)

    def finish(self) -> None:
        """Turn sums into blocks, or into the accumulators of the next sweep.

        Raises:
            NumericsError: If a statistic is not finite; names layer and batch.
        """
        try:
            for index, accumulators in enumerate(self.pending):
                following: dict[str, Accumulator] = {}
                for name, accumulator in accumulators.items():
                    result = accumulator.finish()
                    if isinstance(result, Accumulator):
                        following[name] = result
                    elif isinstance(result, LinearOperator):
                        self.blocks[name] = result
                    else:
                        self.blocks.update(result)
                self.pending[index] = following
        except NumericsError as error:
            where = first_nonfinite(self.risk)
            raise NumericsError(
                f"{error} {f'First seen: {where}.' if where else 'The forward pass is finite.'}"
            ) from error

    def _check(self, totals: Totals, layers: list[Layer]) -> None:
        for problem, reached in (("was never called", totals.called), ("does not reach the output", totals.reached)):
            missing = [layer for index, layer in enumerate(layers) if index not in reached]
            if missing:
                layer = missing[0]
                raise ValueError(
                    f"{layer.title} ({_type_name(layer)}) {problem} in any batch, so its parameters "
                    f"{list(layer.params)} have no curvature here. Leave "
                    "them out of `params`, or check the model's forward. (Modules whose weight is used without "
                    "calling them can't be seen.)"
                )
        if self.totals and totals.examples != self.totals[0].examples:
            raise ValueError(
                f"`data` gave {self.totals[0].examples} examples in one sweep and {totals.examples} in the next; "
                "every sweep must see the same data."
            )
