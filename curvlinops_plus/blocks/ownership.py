"""Which processes keep which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.distributed.schedule import schedule
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import BlockDiagonal, Elsewhere, LinearOperator
from curvlinops_plus.linalg.owned import OwnedBlockDiagonal
from curvlinops_plus.risk import EmpiricalRisk

T = TypeVar("T")


class Everyone:
    """Each process keeps all blocks."""

    def __init__(self, plan: Iterable[LayerPlan], risk: EmpiricalRisk) -> None:
        self.risk = risk
        self.groups = {group.name: group.layout for entry in plan for group in entry.layer.groups}

    def owner(self, name: str, accumulator: Accumulator) -> int | None:
        """The rank of the only process that needs the sums of an accumulator of this name; None if all do."""
        return None

    def finishes(self, name: str, accumulator: Accumulator) -> bool:
        """Whether this process calls `finish`."""
        return True

    def keeps(self, block: str) -> bool:
        """Whether this process keeps the block."""
        return True

    def checked(self, accumulator: Accumulator, result: T) -> T:
        """What `finish` returned, unless others need it, too."""
        return result

    def arranged(self, blocks: Mapping[str, LinearOperator], dtype: torch.dtype, device: torch.device) -> BlockDiagonal:
        """The matrix with the blocks that this process keeps, in this precision and on this device."""
        mine: dict[str, LinearOperator] = {}
        for name in self.groups:
            if self.keeps(name):
                block = blocks[name]
                mine[name] = block if block.dtype == dtype and block.device == device else block.to(device, dtype)
        return self._of(mine, dtype, device)

    def _of(self, blocks: Mapping[str, LinearOperator], dtype: torch.dtype, device: torch.device) -> BlockDiagonal:
        return BlockDiagonal(blocks, self.groups, self.risk.space)


class Owners(Everyone):
    """Each process keeps some blocks, of about the same memory: the largest first, to whoever has least.

    Who keeps which depends on the plan alone. Blocks of one accumulator stay together.
    """

    def __init__(self, plan: Iterable[LayerPlan], risk: EmpiricalRisk) -> None:
        plan = list(plan)
        super().__init__(plan, risk)
        made = {name: a for entry in plan for name, a in entry.accumulators(risk.scale).items()}
        ranks = schedule([_size(a) for a in made.values()], self.processes.world)
        self._of_accumulators = dict(zip(made, ranks, strict=True))
        #: Block name to rank.
        self.ranks = {group.name: rank for a, rank in zip(made.values(), ranks, strict=True) for group in a.groups}

    @property
    def processes(self) -> Any:
        return self.risk.processes

    def owner(self, name: str, accumulator: Accumulator) -> int | None:
        together = accumulator.needs_another_sweep and not accumulator.finishes_decomposed
        return None if together else self._of_accumulators[name]

    def finishes(self, name: str, accumulator: Accumulator) -> bool:
        decomposed = accumulator.finishes_decomposed and bool(accumulator.needs_another_sweep)
        return decomposed or self.owner(name, accumulator) in (None, self.processes.rank)

    def keeps(self, block: str) -> bool:
        return self.ranks[block] == self.processes.rank

    def checked(self, accumulator: Accumulator, result: T) -> T:
        if isinstance(result, Accumulator) and not accumulator.needs_another_sweep:
            raise UnsupportedError(
                f"{accumulator.layer.title}: finish() of {type(accumulator).__name__} returns another accumulator, "
                "which all processes need. With owned=True its property `sweeps` has to be their number."
            )
        return result

    def _of(self, blocks: Mapping[str, LinearOperator], dtype: torch.dtype, device: torch.device) -> BlockDiagonal:
        told = self.processes.gather("what blocks are", {name: block.structure for name, block in blocks.items()})
        structures = {name: structure for part in told for name, structure in part.items()}
        arranged = {
            name: blocks[name]
            if name in blocks
            else Elsewhere(layout.dim, dtype, device, structures[name], self.ranks[name])
            for name, layout in self.groups.items()
        }
        return OwnedBlockDiagonal(arranged, self.groups, self.risk.space, self.processes)


def _size(accumulator: Accumulator) -> int:
    """Bytes of the blocks of an accumulator; if it does not say, those of its parameters."""
    if (needs := accumulator.needs()) is not None:
        return needs.kept
    return accumulator.layer.accumulation_dtype.itemsize * sum(group.layout.dim for group in accumulator.groups)


def keepers_of(plan: Iterable[LayerPlan], risk: EmpiricalRisk, owned: bool) -> Everyone:
    """Who keeps the blocks of a plan: everyone, or with `owned` and several processes one of them each."""
    return Owners(plan, risk) if owned and risk.processes.world > 1 else Everyone(plan, risk)
