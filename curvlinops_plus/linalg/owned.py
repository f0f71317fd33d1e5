"""Block-diagonal matrices whose blocks are kept by several processes, each by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.damping import BlockDampings, Damping, Scalar
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.operator import OF_PARTS, LinearOperator, about
from curvlinops_plus.linalg.packing import pack, unpack
from curvlinops_plus.linalg.space import Space, Structure

T = TypeVar("T")


class Group(Protocol):
    """What the matrix needs of the processes, see `Processes`."""

    def together(self, work: Callable[[], T]) -> T: ...
    def gather(self, part: T) -> list[T]: ...
    def sum_(self, tensors: list[Tensor]) -> None: ...
    def same(self, facts: Mapping[str, Any]) -> None: ...


class OwnedBlockDiagonal(BlockDiagonal):
    """A `BlockDiagonal` matrix of which each process has some blocks, with the same interface and equal results.

    Products, traces, norms, eigenvalues and draws are computed by all processes together, each with its own blocks: all
    have to ask for them, with the same vectors. So are `inverse` and `power`, which send no blocks. Multiples, shifts
    and sums are made without the others.

    Args:
        blocks: Name to square operator: those of this process.
        layouts: Of all blocks, as for `BlockDiagonal`.
        space: As for `BlockDiagonal`.
        processes: The processes, `Processes()`.
        dtype, device: Of the blocks.
        structure: What all blocks are.

    Raises:
        ProcessError: By what is computed together, in all processes: if it fails in one of them, or they multiply
            different vectors.
        UnsupportedError: If derivatives are asked for, which would have to go through other processes.

    Cost: of a product the sum of a vector over the processes.

    Example: on a single process, which has all blocks.
        >>> from curvlinops_plus.distributed import Alone
        >>> from curvlinops_plus.linalg import Diagonal
        >>> layouts = {"w": Layout({"w": "d -> 1 d"}, {"w": (2,)})}
        >>> blocks, cpu = {"w": Diagonal(torch.ones(2))}, torch.device("cpu")
        >>> OwnedBlockDiagonal(blocks, layouts, Space({"w": (2,)}), Alone(), torch.float32, cpu).trace
        tensor(2.)
    """

    structure: Structure = Structure.PSD  # type: ignore[assignment] (the same in all processes)

    def __init__(
        self,
        blocks: Mapping[str, LinearOperator],
        layouts: Mapping[str, Layout],
        space: Space,
        processes: Group,
        dtype: torch.dtype,
        device: torch.device,
        structure: Structure = Structure.PSD,
    ) -> None:
        LinearOperator.__init__(self, space, dtype, device, structure)
        self.space, self.blocks, self.layouts, self.processes = space, dict(blocks), dict(layouts), processes
        self._places = {name: [space.names.index(key) for key in x.shapes] for name, x in layouts.items()}

    def _with(self, blocks: dict[str, LinearOperator], *others: LinearOperator) -> BlockDiagonal:
        other = copy(self)
        other.blocks, other.structure = blocks, min([self.structure, *(B.structure for B in others)])
        return other

    # Together --------------------------------------------------------------------------------------------------------

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        def work() -> Tensor:
            if product != "_root_matmat":  # draws of any numbers will do
                self.processes.same(
                    {"the vectors that they multiply": [float(X.detach().sum()), float(X.detach().norm())]}
                )
            tree = self.in_space.unflatten(X)
            found = {key: torch.zeros_like(t) for key, t in tree.items()}
            for name in self.blocks:
                layout = self.layouts[name]
                try:
                    found |= layout.split(getattr(self._fetched(name), product)(layout.join(tree)))
                except OF_PARTS as error:
                    raise about(f'block "{name}"', error) from error
            Y = self.out_space.flatten(found).contiguous()
            if Y.requires_grad:
                raise UnsupportedError(
                    f"{self.label} has no derivatives, since they would have to go through other processes. Use "
                    "torch.no_grad() or detach(), or the operator that gather() returns."
                )
            self.processes.sum_([Y])
            return Y

        return self.processes.together(work)

    def _tensors(self, function: Callable[[LinearOperator], Tensor], decomposes: bool = False) -> dict[str, Tensor]:
        def work() -> dict[str, Tensor]:
            own = {name: t.detach().cpu() for name, t in self._each(function, decomposes=decomposes).items()}
            told = {name: t for part in self.processes.gather(own) for name, t in part.items()}
            return {name: told[name].to(self.device) for name in self.layouts}

        return self.processes.together(work)

    def gather(self) -> BlockDiagonal:
        """All blocks in all processes, as a `BlockDiagonal`. Collective.

        Raises:
            ValueError: If a block is known by its products alone.
        """
        told = self.processes.together(lambda: self.processes.gather(self._each(lambda block: pack(block.to("cpu")))))
        packed = {name: state for part in told for name, state in part.items()}
        blocks = {name: unpack(packed[name], self.device) for name in self.layouts}
        return BlockDiagonal(blocks, self.layouts, self.space)

    def state_dict(self) -> dict[str, Any]:
        """That of `gather()`. Collective."""
        return self.gather().state_dict()

    def _to_dense(self) -> Tensor:
        return LinearOperator._to_dense(self)

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> BlockDiagonal:
        """`(K + damping I)⁻¹`, block by block; see `LinearOperator.inverse`. Collective; sends no blocks."""
        options = {"retry_double_precision": retry_double_precision}
        return self.processes.together(lambda: super(OwnedBlockDiagonal, self).inverse(damping, **options))

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> BlockDiagonal:
        """`(K + damping I)ᵖ`, block by block; see `LinearOperator.power`. Collective; sends no blocks."""
        return self.processes.together(lambda: super(OwnedBlockDiagonal, self).power(p, damping, exact=exact))

    # By each by itself -----------------------------------------------------------------------------------------------

    def shift(self, delta: Damping) -> BlockDiagonal:
        """`K + delta I`, block by block."""
        numbers = delta.values() if isinstance(delta, Mapping) else [delta]
        return self._signed(super().shift(delta), [float(torch.as_tensor(x).min()) for x in numbers if not callable(x)])

    def _scale(self, c: Scalar) -> BlockDiagonal:
        return self._signed(super()._scale(c), [float(c)])

    def _signed(self, made: BlockDiagonal, numbers: list[float]) -> BlockDiagonal:
        if min(numbers, default=0.0) < 0:
            made.structure = min(made.structure, Structure.SYMMETRIC)  # type: ignore[misc] (an attribute here)
        return made

    def per_block(self, damping: Any) -> dict[str, Any]:
        damping = damping.find() if isinstance(damping, BlockDampings) else damping
        if isinstance(damping, Tensor) and damping.ndim > 0:
            damping = dict(zip(self.layouts, damping.unbind(), strict=True))
        return {name: damping[name] if isinstance(damping, Mapping) else damping for name in self.blocks}
