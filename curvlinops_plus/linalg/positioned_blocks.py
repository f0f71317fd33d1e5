"""Block-diagonal matrices whose blocks are anywhere in the vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.packing import copied
from curvlinops_plus.linalg.products import error_context
from curvlinops_plus.linalg.space import Space


class PositionedBlocks(BlockDiagonal):
    """A `BlockDiagonal` matrix, given by the positions of each block's entries in the vector: a part of another one.

    Args:
        blocks: Name to square operator.
        positions: The same names to positions `[k]`; together each position of the vector once.
        space: The space of the whole vector.

    Raises:
        ValueError: If names, sizes, dtypes or devices do not fit.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> blocks = {"a": Diagonal(torch.tensor([1.0, 2.0])), "b": Diagonal(torch.tensor([3.0]))}
        >>> PositionedBlocks(blocks, {"a": torch.tensor([2, 0]), "b": torch.tensor([1])}, Space.flat(3)).diagonal()
        tensor([2., 3., 1.])
    """

    _state_key = "positions"

    def __init__(self, blocks: Mapping[str, LinearOperator], positions: Mapping[str, Tensor], space: Space) -> None:
        if not blocks or blocks.keys() != positions.keys():
            raise ValueError(
                f"Expected positions of each block, got blocks {list(blocks)}, positions {list(positions)}."
            )
        first = next(iter(blocks.values()))
        LinearOperator.__init__(self, space, first.dtype, first.device)
        self.space, self.blocks, self.layouts = space, dict(blocks), {}
        self._at = {name: positions[name].to(first.device) for name in blocks}
        places, self._order = torch.cat(list(self._at.values())).sort()
        if not torch.equal(places, torch.arange(space.dim, device=first.device)):
            raise ValueError(f"Expected each position from 0 to {space.dim - 1} in one block.")
        self._check_blocks({name: len(at) for name, at in self._at.items()})

    def positions(self) -> dict[str, Tensor]:
        return dict(self._at)

    def group(self, name: str) -> Any:
        return self._at[name].cpu().numpy().tobytes()

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        results = {}
        for name, part in self._split(X).items():
            with error_context(f'block "{name}"'):
                results[name] = getattr(self.blocks[name], product)(part)
        return self._merge(results)

    def _split(self, X: Tensor) -> dict[str, Tensor]:
        return {name: X.index_select(0, at) for name, at in self._at.items()}

    def _merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name] for name in self.blocks]).index_select(0, self._order)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> PositionedBlocks:
        blocks = {name: block.to(device, dtype) for name, block in self.blocks.items()}
        return PositionedBlocks(blocks, self._at, self.space)

    def _places_state(self) -> dict[str, Any]:
        return {"positions": {name: copied(at) for name, at in self._at.items()}}

    @classmethod
    def _from_state(cls, blocks: Mapping[str, LinearOperator], space: Space, state: Mapping[str, Any]) -> BlockDiagonal:
        return cls(blocks, state["positions"], space)
