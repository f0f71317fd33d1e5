"""Block-diagonal matrices whose blocks are each kept by one of several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.damping import Damping, Scalar
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.packing import pack, unpack
from curvlinops_plus.linalg.space import Space, Structure

T = TypeVar("T")


class ProcessVerbs(Protocol):
    """The verbs of `Processes` that the matrix needs."""

    def together(self, work: Callable[[], T]) -> T: ...
    def gather(self, part: T) -> list[T]: ...
    def sum_(self, tensors: list[Tensor]) -> None: ...
    def same(self, facts: Mapping[str, Any]) -> None: ...


class OwnedBlockDiagonal(BlockDiagonal):
    """A `BlockDiagonal` matrix of which each process has some blocks, with the same interface and
    equal results.

    Products, traces, norms, eigenvalues and draws are computed by all processes together, each with
    its own blocks: all have to ask for them, with the same vectors. So are `inverse` and `power`,
    which send no blocks. Multiples, shifts and sums are made without the others.

    Args:
        blocks: Name to square operator: those of this process.
        layouts: Those of all blocks, as for `BlockDiagonal`.
        space: As for `BlockDiagonal`.
        processes: The processes, `Processes()`.
        dtype, device: Those of the blocks.
        structure: What all blocks are.

    Raises:
        ProcessError: In all processes, if a computation together fails in one of them, or they
            multiply different vectors.
        UnsupportedError: If derivatives are asked for, which would have to go through other
            processes.

    Cost: of a product the sum of a vector over the processes.

    Example: on a single process, which has all blocks.
        >>> from curvlinops_plus.distributed import Alone
        >>> from curvlinops_plus.linalg import Diagonal
        >>> layouts = {"w": Layout({"w": "d -> 1 d"}, {"w": (2,)})}
        >>> blocks, space = {"w": Diagonal(torch.ones(2))}, Space({"w": (2,)})
        >>> precision = {"dtype": torch.float32, "device": torch.device("cpu")}
        >>> OwnedBlockDiagonal(blocks, layouts, space, Alone(), **precision).trace
        tensor(2.)
    """

    structure: Structure = Structure.PSD  # type: ignore[assignment] (the same in all processes)

    def __init__(
        self,
        blocks: Mapping[str, LinearOperator],
        layouts: Mapping[str, Layout],
        space: Space,
        processes: ProcessVerbs,
        dtype: torch.dtype,
        device: torch.device,
        structure: Structure = Structure.PSD,
    ) -> None:
        LinearOperator.__init__(self, space, dtype, device, structure)
        self._set_groups(blocks, layouts, space)
        self.processes = processes

    def _with(self, blocks: dict[str, Any], *others: LinearOperator) -> BlockDiagonal:
        matrix = copy(self)
        matrix.blocks = blocks
        matrix.structure = min([self.structure, *(B.structure for B in others)])
        return matrix

    # Together
    # ----------------------------------------------------------------------------------------------

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        blockwise = super()._blockwise

        def work() -> Tensor:
            if product != "_root_matmat":  # draws of any numbers will do
                sums = [float(X.detach().sum()), float(X.detach().norm())]
                self.processes.same({"the vectors that they multiply": sums})
            Y = blockwise(product, X).contiguous()
            if Y.requires_grad:
                raise UnsupportedError(
                    f"{self.label} has no derivatives, since they would have to go through other "
                    "processes. Use torch.no_grad() or detach(), or the operator that gather() "
                    "returns."
                )
            self.processes.sum_([Y])
            return Y

        return self.processes.together(work)

    def _tensors(
        self, function: Callable[[LinearOperator], Tensor], decomposes: bool = False
    ) -> list[Tensor]:
        def work() -> dict[str, Tensor]:
            tensors = self._each(function, decomposes)
            tensors = {name: t.detach().cpu() for name, t in tensors.items()}
            return self._of_all(tensors)

        tensors = self.processes.together(work)
        return [t.to(self.device) for t in tensors.values()]

    def gather(self) -> BlockDiagonal:
        """All blocks in all processes, as a `BlockDiagonal`. Collective.

        Raises:
            ValueError: If a block is known by its products alone.
        """
        states = self.processes.together(
            lambda: self._of_all(self._each(lambda block: pack(block.to("cpu"))))
        )
        blocks = {name: unpack(state, self.device) for name, state in states.items()}
        return BlockDiagonal(blocks, self.layouts, self.space)

    def _of_all(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of the blocks of all processes, in the order of the layouts."""
        gathered: dict[str, Any] = {}
        for part in self.processes.gather(values):
            gathered |= part
        return {name: gathered[name] for name in self.layouts}

    def state_dict(self) -> dict[str, Any]:
        """That of `gather()`. Collective."""
        return self.gather().state_dict()

    def _to_dense(self) -> Tensor:
        return LinearOperator._to_dense(self)

    def _damped(
        self, function: Callable[[Any], Any], damping: Damping, decomposes: bool = False
    ) -> BlockDiagonal:
        damped = super()._damped
        if not decomposes:
            return damped(function, damping)
        return self.processes.together(lambda: damped(function, damping, decomposes))

    # By each by itself
    # ----------------------------------------------------------------------------------------------

    def shift(self, delta: Damping) -> BlockDiagonal:
        """`K + delta I`, block by block. Collective if `delta` is relative to the blocks."""
        dampings = delta.values() if isinstance(delta, Mapping) else [delta]
        numbers = [float(torch.as_tensor(d).min()) for d in dampings if not callable(d)]
        return self._signed(super().shift(delta), min(numbers, default=0.0))

    def _scale(self, c: Scalar) -> BlockDiagonal:
        return self._signed(super()._scale(c), float(c))

    def _signed(self, matrix: BlockDiagonal, number: float) -> BlockDiagonal:
        """The matrix, which a negative number has made indefinite."""
        if number < 0:
            matrix.structure = min(matrix.structure, Structure.SYMMETRIC)  # type: ignore[misc] (an attribute here)
        return matrix

    def per_block(self, damping: Any) -> dict[str, Any]:
        if isinstance(damping, Tensor) and damping.ndim > 0:
            damping = dict(zip(self.layouts, damping.unbind(), strict=True))
        if not isinstance(damping, Mapping):
            damping = dict.fromkeys(self.layouts, damping)
        numbers = self._with_numbers(damping)
        return {name: numbers[name] for name in self.blocks}
