"""What the statistics and blocks of a plan take, before anything is computed: groups that fit, and who keeps what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from curvlinops_plus.blocks.accumulator import LossScale, Needs
from curvlinops_plus.blocks.plan import LayerPlan, table
from curvlinops_plus.distributed.processes import schedule
from curvlinops_plus.errors import UnsupportedError


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
        rows += [(name or "(model)", _gib(own.computing), _gib(own.kept)) for name, own in self.layers.items()]
        return "\n".join(table([*rows, ("all, GiB", _gib(self.computing), _gib(self.kept))]))


def memory_of(plan: Sequence[LayerPlan]) -> Memory:
    """What the layers of a plan need; an UnsupportedError if an approximation does not say."""
    return Memory({entry.layer.name: _needs(entry) for entry in plan})


def _needs(entry: LayerPlan) -> Needs:
    total = Needs(0, 0)
    for accumulator in entry.accumulators(_unscaled).values():
        if (needs := accumulator.needs()) is None:
            raise UnsupportedError(
                f"{entry.layer.title}: {type(accumulator).__name__} does not say how much memory it takes. Define its "
                "method `needs()`, which returns Needs(computing, kept) in bytes, or leave out `max_bytes`."
            )
        total = Needs(total.computing + needs.computing, total.kept + needs.kept)
    return total


_unscaled: LossScale = lambda totals: 1.0  # noqa: E731


def groups_within(plan: Sequence[LayerPlan], max_bytes: int | None) -> tuple[list[list[LayerPlan]], int | None]:
    """Layers in their order, in groups that need at most `max_bytes` while they are computed; None: in one.

    Returns:
        The groups, and what the largest one leaves of `max_bytes`.

    Raises:
        UnsupportedError: If a layer alone needs more; names it.
    """
    if max_bytes is None:
        return [list(plan)], None
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes!r} must be an integer of at least 1, or None for no limit.")
    groups: list[list[LayerPlan]] = []
    left: list[int] = []
    for entry in plan:
        needed = _needs(entry).computing
        if needed > max_bytes:
            raise UnsupportedError(
                f"{entry.layer.title}: {entry.approximation!r} needs {_gib(needed)} GiB while it is computed, more "
                f"than max_bytes={max_bytes} ({_gib(max_bytes)} GiB). Use KFAC or DiagonalBlock for it."
            )
        if not groups or needed > left[-1]:
            groups.append([])
            left.append(max_bytes)
        groups[-1].append(entry)
        left[-1] -= needed
    return groups, min(left, default=max_bytes)


def owners_of(plan: Sequence[LayerPlan], world: int) -> dict[str, int]:
    """The rank of the process that keeps each accumulator, and its blocks: the largest first, to whoever has least."""
    accumulators = {name: a for entry in plan for name, a in entry.accumulators(_unscaled).items()}
    sizes = [
        sum(group.layout.dim for group in a.groups) if (needs := a.needs()) is None else needs.kept
        for a in accumulators.values()
    ]
    ranks = schedule(sizes, world)
    of_blocks = {group.name: rank for a, rank in zip(accumulators.values(), ranks) for group in a.groups}
    return dict(zip(accumulators, ranks, strict=True)) | of_blocks


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
