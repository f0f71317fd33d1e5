"""What the statistics and blocks of a plan take, before anything is computed, and layers in groups that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from warnings import warn

from curvlinops_plus.blocks.accumulator import LossScale, Needs
from curvlinops_plus.blocks.plan import LayerPlan, table
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user


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
    """What the layers of a plan need.

    Raises:
        UnsupportedError: If an approximation does not say.
    """
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
    groups: list[list[LayerPlan]] = []
    left: list[int] = []
    for entry in plan:
        needed = _needs(entry).computing
        if needed > max_bytes:
            raise UnsupportedError(
                f"{entry.layer.title}: {entry.approximation!r} needs {_gib(needed)} GiB while it is computed, more "
                f"than max_bytes={max_bytes} ({_gib(max_bytes)} GiB). Use less for it, KFAC or DiagonalBlock, as in "
                f"curvature(risk, {{{entry.layer.name!r}: ...}}, ...)."
            )
        if not groups or needed > left[-1]:
            groups.append([])
            left.append(max_bytes)
        groups[-1].append(entry)
        left[-1] -= needed
    return groups, min(left)


def checked_limit(max_bytes: int | None) -> int | None:
    """The option `max_bytes`, checked.

    Raises:
        ValueError: If it is neither None nor an integer of at least 1.
    """
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
        raise ValueError(
            f"max_bytes={max_bytes!r} must be an integer of at least 1, the memory for the statistics of layers that "
            "are computed together, or None for no limit."
        )
    return max_bytes


def sweeps_of(entry: LayerPlan) -> int:
    """How many sweeps over the data the blocks of a layer take."""
    return max(accumulator.sweeps for accumulator in entry.accumulators(_unscaled).values())


def warn_of_groups(plan: Sequence[LayerPlan], groups: Sequence[Sequence[LayerPlan]], max_bytes: int | None) -> None:
    """Say how many sweeps several groups of layers take."""
    if len(groups) > 1:
        sweeps = [max(map(sweeps_of, group)) for group in groups]
        warn(
            f"max_bytes={max_bytes}: {len(plan)} layers in {len(groups)} groups take {sum(sweeps)} sweeps over the "
            f"data, instead of {max(sweeps)}.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
