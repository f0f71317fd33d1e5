"""Which approximation each layer gets, what it takes, and which process keeps it: before anything
is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from warnings import warn

from curvlinops_plus.blocks.accumulator import Accumulator, Approximation, LossScale, Needs
from curvlinops_plus.blocks.approximations import approximation_of
from curvlinops_plus.blocks.per_example import DiagonalBlock
from curvlinops_plus.distributed.processes import schedule
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.layer import why_generic
from curvlinops_plus.layer.broadcast import BroadcastRule
from curvlinops_plus.layer.rule import EnclosedRule
from curvlinops_plus.options import flag, whole
from curvlinops_plus.risk import EmpiricalRisk, Group, Layer, as_vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.found_reads import describe_reads, extent, rebuild_reads
from curvlinops_plus.risk.function_reads import (
    layers_of,
    look_for_functions,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class LayerPlan:
    """A layer and the approximation it gets."""

    layer: Layer
    approximation: Approximation

    def accumulators(self, scale: LossScale = lambda totals: 1.0) -> dict[str, Accumulator]:
        """One accumulator per block, or one for all blocks of the layer under the layer's name."""
        kind = self.approximation.kind
        options = self.approximation.options
        layer = self.layer
        if kind.per_group:
            return {group.name: kind(layer, group, scale, **options) for group in layer.groups}
        return {layer.name: kind(layer, None, scale, **options)}


@dataclass(eq=False)
class Plan:
    """The layers of a risk with the approximations that they get; it does not change.

    Attributes:
        risk: Whose layers they are, as far as they are known; with all that the vectors need.
        approximation, default, vectors, separate_weight_and_bias, owned: As for `curvature`.
        entries: The layers with their approximations.
        reads: How functions read parameters, as the risk knew it when the plan was made.
        owners: Accumulator and block name to the rank of the only process that keeps it; None if
            all do.
    """

    risk: EmpiricalRisk
    approximation: Any
    default: Any
    vectors: Any = None
    separate_weight_and_bias: bool = False
    owned: bool = False

    def __post_init__(self) -> None:
        flag("separate_weight_and_bias", self.separate_weight_and_bias)
        flag("owned", self.owned)
        self.vectors = as_vectors(self.vectors)
        self.risk = self.risk.for_vectors(self.vectors)
        layers = layers_of(self.risk, self.separate_weight_and_bias)
        self.entries = assigned(layers, self.approximation, self.default)
        if not self.vectors.backward:
            refuse_missing_gradients(self.entries)
        self.reads = self.risk.reads
        world = self.risk.processes.world
        self.owners = owners_of(self.entries, world) if self.owned and world > 1 else None
        self._confirmed = False

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> LayerPlan:
        return self.entries[index]

    @property
    def groups(self) -> list[Group]:
        """The groups of parameters of all blocks."""
        return [group for entry in self.entries for group in entry.layer.groups]

    @property
    def kept_blocks(self) -> list[str]:
        """Names of the blocks that this process keeps."""
        rank = self.risk.processes.rank
        names = [group.name for group in self.groups]
        return [name for name in names if self.owners is None or self.owners[name] == rank]

    # -------------------------------------------------------------------------------- another plan
    def renewed(self) -> Self:
        """The same choices for the layers that the risk has now."""
        return replace(self)

    def learned(self, batch: Batch | None = None, error: ValueError | None = None) -> Self:
        """The plan after a look at how functions read parameters, see `look_for_functions`."""
        if self.reads is self.risk.reads:  # else another operator of the risk has looked
            look_for_functions(self.risk, batch, error)
        return self.renewed()

    def agreed(self) -> Self:
        """The plan by what all processes know of functions that read parameters; some may have no
        examples. Collective.
        """
        mine = describe_reads(self.risk.reads)
        described = [reads for reads in self.risk.processes.gather(mine) if reads is not None]
        widest = max(described, key=extent, default=None)
        if widest == mine:
            return self
        self.risk.reads = rebuild_reads(self.risk.params, widest)
        if mine is not None and widest is not None and {**mine, "gathered": True} == widest:
            self.reads = self.risk.reads  # of the same layers
            return self
        return self.renewed()

    def of_risk(self, risk: EmpiricalRisk) -> Self:
        """The same layers of another object for the same risk."""
        moved = copy.copy(self)
        moved.risk = risk
        return moved

    def only(self, names: Collection[str]) -> Self:
        """The plan of these layers alone; of all, if it has none of these."""
        entries = [entry for entry in self.entries if entry.layer.name in names]
        if not entries or len(entries) == len(self.entries):
            return self
        keys = [key for entry in entries for key in entry.layer.params]
        part = self.of_risk(self.risk.restricted(keys))
        part.entries = entries
        return part

    # ------------------------------------------------------------------------------------ its facts
    def confirm(self) -> None:
        """Warn once of layers without Kronecker factors: the plan has gone through a batch, and
        will not change.
        """
        if self._confirmed:
            return
        self._confirmed = True
        if replaced := [entry.layer for entry in self.entries if entry.approximation is INSTEAD]:
            warn_of_replaced(replaced, len(self.entries))

    def described(self) -> dict[str, Any]:
        """The choices, by the names of arguments: they have to be the same in all processes."""
        names = ("approximation", "default", "vectors", "separate_weight_and_bias", "owned")
        return {f"{name}=": getattr(self, name) for name in names}


def assigned(layers: list[Layer], approximation: Any, default: Any) -> list[LayerPlan]:
    """Decide for every layer: exact name, then glob, then type, then the default.

    Layers without an affine rule, and shared parameters, get their exact diagonal where a Kronecker
    approximation was meant; `warn_of_replaced` says so, and `plan_table` gives the reasons.

    Args:
        approximation: An approximation, or a mapping from layer names, globs or module types to
            one.
        default: For layers that the mapping does not name.

    Raises:
        ValueError: If a key of the mapping matches no layer, or names what is no approximation.
        UnsupportedError: If a layer named exactly can't have the approximation asked for.
    """
    rules: dict[Any, Approximation] = {}
    approximation_of(default)  # also where no layer gets it
    if isinstance(approximation, Mapping):
        rules = {key: approximation_of(value) for key, value in approximation.items()}
        approximation = default
    without_rule = approximation_of(approximation)
    plan: list[LayerPlan] = []
    for layer in layers:
        keys = _matching_keys(layer, rules) if rules else []
        chosen = rules[keys[0]] if keys else without_rule
        if chosen.kind.affine and not layer.affine:
            if keys and keys[0] in [use.name for use in layer.named_uses]:
                why = _why_not_affine(layer)
                advice = "" if "DiagonalBlock" in why else " Use DiagonalBlock or FullBlock for it."
                raise UnsupportedError(
                    f"layer {keys[0]!r} ({layer.type_name}) can't have {chosen!r}: {why}.{advice}"
                )
            chosen = INSTEAD
        plan.append(LayerPlan(layer, chosen))
    for key in rules:
        if not any(key in _matching_keys(layer, rules) for layer in layers):
            raise ValueError(
                f"No layer matches {key!r}. Layers with parameters here: "
                f"{[layer.name for layer in layers]}, of types "
                f"{sorted({layer.type_name for layer in layers})}. A key is a name, a glob or "
                "the class of a module."
            )
    return plan


def refuse_missing_gradients(plan: list[LayerPlan]) -> None:
    """Refuse approximations that are made of gradients, where none are backpropagated."""
    if refused := [entry for entry in plan if entry.approximation.kind.needs_gradients]:
        kinds = ", ".join(f"{entry.layer.type_name}: ScaledIdentity" for entry in refused)
        raise UnsupportedError(
            f"{refused[0].layer.title}: {refused[0].approximation!r} is made of gradients, and "
            "ForwardOnly() sends nothing back. Use Exact(), MonteCarlo() or Empirical(), or "
            f"curvature(risk, {{{kinds}}}, ...)."
        )


def warn_of_replaced(replaced: Sequence[Layer], number: int) -> None:
    """Warn of layers without Kronecker factors, among this number."""
    first = replaced[0]
    warn(
        f"{len(replaced)} of {number} layers get their exact diagonal (DiagonalBlock) instead of "
        f"Kronecker factors{', such as' if replaced[1:] else ':'} {first.name or 'the model'!r} "
        f"({first.type_name}: {_why_not_affine(first)}). Print the operator for a table with "
        "the reasons.",
        CurvatureWarning,
        stacklevel=level_of_user(),
    )


# What layers without Kronecker factors get where some were meant.
INSTEAD = Approximation(DiagonalBlock)


def _matching_keys(layer: Layer, keys: Mapping[Any, Any]) -> list[Any]:
    """The keys that match a layer: names first, then globs, then types, the nearest ancestor
    first.
    """
    names = [use.name for use in layer.named_uses]
    ancestors = [type(use.owner).__mro__ for use in layer.named_uses]
    exact = [key for key in keys if key in names]
    globs = [
        key
        for key in keys
        if isinstance(key, str) and any(fnmatchcase(name, key) for name in names)
    ]
    types = [key for key in keys if isinstance(key, type) and any(key in mro for mro in ancestors)]
    types.sort(key=lambda key: min(mro.index(key) for mro in ancestors if key in mro))
    return [*exact, *globs, *types]


def _why_not_affine(layer: Layer) -> str:
    uses = layer.named_uses
    if len(uses) > 1:
        names = [use.name for use in uses]
        difference = "as different matrices"
        if len({use.keys.get("bias") for use in uses}) > 1:
            difference = "with different biases, or as different matrices"
        return f"its parameter is shared by {names} {difference}"
    use = uses[0]
    if isinstance(use.rule, EnclosedRule):
        return (
            f"{list(use.keys.values())} are read by functions without a rule, make a table for all "
            "examples, see rows in an order of their own, or have a rule that autograd contradicts"
        )
    if isinstance(use.rule, BroadcastRule):
        return (
            f"{list(layer.params)} are added, multiplied entry by entry, or in a weight that is "
            "computed"
        )
    return (
        why_generic(use.owner)
        or f"its rule {type(use.rule).__name__} is not that of an affine layer"
    )


def plan_table(plan: Iterable[LayerPlan]) -> str:
    """One line per layer: modules, rules, parameters, approximation, sizes of the blocks."""
    heads = (
        "layer",
        "module",
        "rule",
        "parameters",
        "approximation",
        "blocks",
        "why no Kronecker factors",
    )
    rows = []
    for entry in plan:
        layer = entry.layer
        sizes = ", ".join("x".join(map(str, group.layout.matrix_shape)) for group in layer.groups)
        modules = "+".join(type(use.owner).__name__ for use in layer.uses)
        rules = "+".join(type(use.rule).__name__ for use in layer.uses)
        params = ", ".join(layer.params)
        approximation = repr(entry.approximation)
        if remark := entry.approximation.kind.remark(layer, **entry.approximation.options):
            approximation += f", {remark}"
        why = _why_not_affine(layer) if entry.approximation is INSTEAD else ""
        rows.append((layer.name or "(model)", modules, rules, params, approximation, sizes, why))
    rows.insert(0, heads if any(row[-1] for row in rows) else (*heads[:-1], ""))
    return "\n".join(f"  {line}" for line in table(rows))


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table, with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# ------------------------------------------------------------------------------------------- memory
@dataclass(frozen=True)
class Memory:
    """Bytes that the blocks of an operator take, layer by layer. Printed, it is a table.

    Args:
        layers: Layer name to what its approximation needs.

    Example:
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> K = curvature(EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), ()), compute=False)
        >>> K.memory().kept  # A [4, 4] and G [2, 2]
        80
    """

    layers: dict[str, Needs]

    @property
    def computing(self) -> int:
        """Bytes of all statistics, bases and eigenvalues while blocks are computed."""
        return sum(needs.computing for needs in self.layers.values())

    @property
    def kept(self) -> int:
        """Bytes of all finished blocks."""
        return sum(needs.kept for needs in self.layers.values())

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "computing", "kept")]
        rows += [
            (name or "(model)", gib(needs.computing), gib(needs.kept))
            for name, needs in self.layers.items()
        ]
        return "\n".join(table([*rows, ("all, GiB", gib(self.computing), gib(self.kept))]))


def memory_of(plan: Iterable[LayerPlan]) -> Memory:
    """What the layers of a plan need.

    Raises:
        UnsupportedError: If an approximation does not say; names the layer.
    """
    layers: dict[str, Needs] = {}
    for entry in plan:
        computing = 0
        kept = 0
        for accumulator in entry.accumulators().values():
            needs = accumulator.needs()
            if needs is None:
                raise UnsupportedError(
                    f"{entry.layer.title}: {entry.approximation!r} does not say how much memory it "
                    "takes. Define its method `needs()`, which returns Needs(computing, kept) in "
                    "bytes, or leave out `max_bytes`."
                )
            computing += needs.computing
            kept += needs.kept
        layers[entry.layer.name] = Needs(computing, kept)
    return Memory(layers)


def groups_within(plan: Iterable[LayerPlan], max_bytes: int) -> tuple[list[list[LayerPlan]], int]:
    """Layers in their order, in groups that need at most `max_bytes` while they are computed.

    Returns:
        The groups, and what the largest one leaves of `max_bytes`.

    Raises:
        UnsupportedError: If a layer alone needs more; names it.
    """
    if whole(max_bytes) is None or max_bytes < 1:
        raise ValueError(
            f"max_bytes={max_bytes!r} must be an integer of at least 1, or None for no limit."
        )
    groups: list[list[LayerPlan]] = []
    left: list[int] = []
    needs = memory_of(plan).layers
    for entry in plan:
        needed = needs[entry.layer.name].computing
        if needed > max_bytes:
            raise UnsupportedError(
                f"{entry.layer.title}: {entry.approximation!r} needs {gib(needed)} GiB while it is "
                f"computed, more than max_bytes={max_bytes} ({gib(max_bytes)} GiB). Use KFAC or "
                "DiagonalBlock for it."
            )
        if not groups or needed > left[-1]:
            groups.append([])
            left.append(max_bytes)
        groups[-1].append(entry)
        left[-1] -= needed
    return groups, min(left, default=max_bytes)


def owners_of(plan: Sequence[LayerPlan], world: int) -> dict[str, int]:
    """The rank of the process that keeps each accumulator, and its blocks: the largest first, to
    whoever has least.
    """
    accumulators = {name: a for entry in plan for name, a in entry.accumulators().items()}
    sizes: list[int] = []
    for accumulator in accumulators.values():
        needs = accumulator.needs()
        parameters = sum(group.layout.dim for group in accumulator.groups)
        sizes.append(parameters if needs is None else needs.kept)
    ranks = schedule(sizes, world)
    owners = dict(zip(accumulators, ranks, strict=True))
    for name, accumulator in accumulators.items():
        owners |= dict.fromkeys([group.name for group in accumulator.groups], owners[name])
    return owners


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.3g}"
