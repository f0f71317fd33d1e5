"""Block-diagonal matrices whose blocks are each kept by one of several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal, Decomposes
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
        ProcessError: In all processes, if a computation together fails in one of them, or if they
            multiply different vectors, or have made their blocks with different numbers.
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
        # The numbers with which blocks were made of others: what one process has done to its own
        # blocks, the others must have done to theirs.
        self._made_with: tuple[str, ...] = ()

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
            facts: dict[str, Any] = {"how their blocks were made": self._made_with}
            if product != "_root_matmat":  # draws of any numbers will do
                sums = [float(X.detach().sum()), float(X.detach().norm())]
                facts["the vectors that they multiply"] = sums
            self.processes.same(facts)
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
        self,
        function: Callable[[LinearOperator], Tensor],
        decomposes: Decomposes | None = None,
    ) -> list[Tensor]:
        def work() -> dict[str, Tensor]:
            tensors = self._each(function, decomposes)
            tensors = {name: t.detach().cpu() for name, t in tensors.items()}
            self.processes.same({"how their blocks were made": self._made_with})
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
        self,
        function: Callable[[Any], Any],
        damping: Damping,
        decomposes: Decomposes | None = None,
        stacks: bool = False,
    ) -> BlockDiagonal:
        damped = super()._damped

        def work() -> BlockDiagonal:
            self._require_same(damping)
            return damped(function, damping, decomposes, stacks)

        matrix = self.processes.together(work) if decomposes else damped(function, damping)
        number = "of each block" if isinstance(damping, Mapping) else _in_words(damping)
        return _noted(matrix, f"damping {number}")

    def _require_same(self, damping: Any) -> None:
        """Refuse dampings that differ between processes; each may have those of its own blocks
        only. Collective.
        """
        named = damping if isinstance(damping, Mapping) else dict.fromkeys(self.layouts, damping)
        in_all = set(self.layouts).intersection(*self.processes.gather([*named]))
        ordered = [name for name in self.layouts if name in in_all]
        self.processes.same(
            {f"the damping of block {name!r}": _in_words(named[name]) for name in ordered}
        )

    # By each by itself
    # ----------------------------------------------------------------------------------------------

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> BlockDiagonal:
        """`(K + damping I)ᵖ`, block by block; see `LinearOperator.power`. Collective."""
        return _noted(super().power(p, damping, exact=exact), f"power {p}")

    def shift(self, delta: Damping) -> BlockDiagonal:
        """`K + delta I`, block by block. Collective if `delta` is relative to the blocks."""
        dampings = delta.values() if isinstance(delta, Mapping) else [delta]
        numbers = [float(torch.as_tensor(d).min()) for d in dampings if not callable(d)]
        return self._signed(super().shift(delta), min(numbers, default=0.0))

    def _scale(self, c: Scalar) -> BlockDiagonal:
        return self._signed(_noted(super()._scale(c), f"multiple {float(c)}"), float(c))

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


def _noted(matrix: BlockDiagonal, number: str) -> BlockDiagonal:
    """A new matrix, which remembers the number that it was made with."""
    assert isinstance(matrix, OwnedBlockDiagonal)
    matrix._made_with = (*matrix._made_with, number)
    return matrix


def _in_words(damping: Any) -> str:
    return str(damping.tolist()) if isinstance(damping, Tensor) else repr(damping)
