"""What the statistics and blocks of a plan take, before anything is computed, and layers in groups that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from warnings import warn

import torch

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, Needs
from curvlinops_plus.blocks.ekfac import EKFAC
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.plan import LayerPlan, table
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.risk import Layer

_LITTLE = 2**30  # below, nobody asks how much there is


@dataclass(frozen=True)
class Memory:
    """Bytes that the blocks of an operator take, layer by layer. Printed, it is a table.

    Args:
        layers: Layer name to what its approximation needs.
        kfac: Layer name to what KFAC would, where it has Kronecker factors.
        ekfac: The same of EKFAC.

    Example:
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> K = curvature(EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), ()), compute=False)
        >>> K.memory().kept  # A [4, 4] and G [2, 2]
        80
    """

    layers: dict[str, Needs]
    kfac: dict[str, Needs]
    ekfac: dict[str, Needs]

    @property
    def computing(self) -> int:
        """Bytes of all statistics, bases and eigenvalues while blocks are computed."""
        return sum(needs.computing for needs in self.layers.values())

    @property
    def kept(self) -> int:
        """Bytes of all finished blocks."""
        return sum(needs.kept for needs in self.layers.values())

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "computing", "kept", "as KFAC", "as EKFAC")]
        for name, own in self.layers.items():
            others = [_gib(found[name].computing) if name in found else "" for found in (self.kfac, self.ekfac)]
            rows.append((name or "(model)", _gib(own.computing), _gib(own.kept), *others))
        every = [
            sum(found.get(name, own).computing for name, own in self.layers.items())
            for found in (self.kfac, self.ekfac)
        ]
        rows.append(("all, GiB", _gib(self.computing), _gib(self.kept), *map(_gib, every)))
        return "\n".join(table(rows))


def memory_of(plan: Sequence[LayerPlan]) -> Memory:
    """What the layers of a plan need.

    Raises:
        UnsupportedError: If an approximation does not say.
    """
    layers = {entry.layer.name: _needs(entry) for entry in plan}
    affine = [entry.layer for entry in plan if entry.layer.affine]
    kfac, ekfac = ({layer.name: _of(kind, layer) for layer in affine} for kind in (KFAC, EKFAC))
    return Memory(layers, kfac, ekfac)


def _of(kind: type[Accumulator], layer: Layer) -> Needs:
    needs = kind(layer, None, _unscaled).needs()
    assert needs is not None
    return needs


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
        UnsupportedError: If a layer alone needs more; names it, and what takes less.
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
                f"than max_bytes={max_bytes} ({_gib(max_bytes)} GiB). {_advice(entry, max_bytes)}"
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


def _advice(entry: LayerPlan, max_bytes: int) -> str:
    """What takes less for a layer."""
    name, kind = entry.layer.name, entry.approximation.kind
    if issubclass(kind, KFAC):
        sizes = sorted({size for group in entry.layer.groups for size in group.layout.matrix_shape[-2:]})
        pieces = next(
            (s for k in range(1, 12) if _split(entry, s := -(-sizes[-1] // 2**k)) <= max_bytes and s > 1), None
        )
        split = f"{kind.__name__}.using(split={pieces}) keeps the diagonal parts of its factors, " if pieces else ""
        return f"Use less for it: {split}DiagonalBlock its diagonal, as in curvature(risk, {{{name!r}: ...}}, ...)."
    return f"Use less for it, KFAC or DiagonalBlock, as in curvature(risk, {{{name!r}: ...}}, ...)."


def _split(entry: LayerPlan, split: int) -> int:
    options = {**entry.approximation.options, "split": split}
    return _needs(LayerPlan(entry.layer, type(entry.approximation)(entry.approximation.kind, options))).computing


def warn_of_memory(
    plan: Sequence[LayerPlan], first: Mapping[Layer, Mapping[str, Accumulator]], max_bytes: int | None
) -> None:
    """Warn before computing of statistics that will not fit into the memory that is free, and of several groups.

    Args:
        first: The accumulators of the first group of layers.
        max_bytes: Of the statistics of a group; None: there is one.
    """
    if max_bytes is not None:
        groups, _ = groups_within(plan, max_bytes)
        if len(groups) > 1:
            sweeps = [max(map(sweeps_of, group)) for group in groups]
            warn(
                f"max_bytes={max_bytes}: {len(plan)} layers in {len(groups)} groups take {sum(sweeps)} sweeps over the "
                f"data, instead of {max(sweeps)}.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
    needs = [(layer.name, a.needs()) for layer, own in first.items() for a in own.values()]
    total = sum([each.computing for _, each in needs if each is not None])
    if total < _LITTLE or (free := _free(plan[0].layer.device)) is None or total <= free:
        return
    needed = dict.fromkeys([name for name, _ in needs], 0)
    for name, each in needs:
        needed[name] += 0 if each is None else each.computing
    largest = max(needed, key=needed.__getitem__)
    warn(
        f"The statistics of all layers take {_gib(total)} GiB while they are computed, and {_gib(free)} are free on "
        f"{plan[0].layer.device}; {largest!r} takes {_gib(needed[largest])}. Compute some layers at a time by "
        'curvature(..., max_bytes=..., offload="cpu"), or use KFAC.using(split=...) or DiagonalBlock for the largest. '
        "print(curvature(..., compute=False).memory()) lists all.",
        CurvatureWarning,
        stacklevel=level_of_user(),
    )


def _free(device: torch.device) -> int | None:
    """Bytes of memory that are free on a device; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not (listed := Path("/proc/meminfo")).exists():
        return None
    found = [line.split()[1] for line in listed.read_text().splitlines() if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
