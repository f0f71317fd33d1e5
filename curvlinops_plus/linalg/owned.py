"""Block-diagonal matrices whose blocks are kept by several processes, each by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.compared import compared, described, rounding_of
from curvlinops_plus.linalg.damping import BlockDampings, Damping, Scalar
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.offload import in_turn
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.packing import pack, unpack
from curvlinops_plus.linalg.products import error_context
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Diagonal

T = TypeVar("T")


class Group(Protocol):
    """What the matrix needs of the processes, see `Processes`."""

    rank: int
    world: int

    def together(self, what: str, work: Callable[[], T]) -> T: ...
    def gather(self, what: str, part: T) -> list[T]: ...
    def hand_out(self, what: str, tensors: Sequence[Tensor], owners: Sequence[int], to: int | None = None) -> None: ...
    def same(self, what: str, describe: Callable[[], Mapping[str, Any]]) -> None: ...


class Elsewhere(LinearOperator):
    """A block that another process keeps: what is known of it here, and of its inverse, powers, shifts and multiples.

    Args:
        size: Rows and columns.
        dtype: Of the block.
        device: Where this process computes.
        structure: Of the block.
        owner: The rank of the process that keeps it.

    Raises:
        UnsupportedError: If its entries are asked for.

    Example:
        >>> Elsewhere(3, torch.float32, torch.device("cpu"), Structure.PSD, owner=2)
        a block 3x3 of process 2
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, structure: Structure, owner: int) -> None:
        super().__init__(Space.flat(size), dtype, device, structure)
        self.owner = owner

    @property
    def label(self) -> str:
        return f"a block {self.shape[0]}x{self.shape[1]} of process {self.owner}"

    def refused(self, member: str) -> UnsupportedError:
        """The error about what can't be had here."""
        return UnsupportedError(
            f"{self.label} has no `{member}` here: only process {self.owner} has its entries. Use the whole matrix, by "
            "all processes together, or its gather(), which brings all blocks to one of them."
        )

    def _no_closed_form(self, member: str) -> Any:
        return self.refused(member)

    def _matmat(self, X: Tensor) -> Tensor:
        raise self.refused("@")

    def _like(self, structure: Structure) -> Elsewhere:
        return Elsewhere(self.shape[0], self.dtype, self.device, structure, self.owner)

    def _signed(self, c: Scalar) -> Elsewhere:
        return self if c >= 0 else self._like(min(self.structure, Structure.SYMMETRIC))

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> LinearOperator:
        return self

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        return self

    def shift(self, delta: Damping) -> LinearOperator:
        return self if callable(delta) else self._signed(delta)  # type: ignore[arg-type]

    def _scale(self, c: Scalar) -> LinearOperator:
        return self._signed(c)

    def adjoint(self) -> LinearOperator:
        return self

    def _entrywise_square(self) -> LinearOperator:
        return self._like(Structure.GENERAL)

    def _structured_sum(self, other: LinearOperator) -> LinearOperator:
        return self._like(min(self.structure, other.structure))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Elsewhere(self.shape[0], dtype or self.dtype, device or self.device, self.structure, self.owner)


class OwnedBlockDiagonal(BlockDiagonal):
    """A `BlockDiagonal` matrix of which each process has some blocks. It has the whole interface, and equal results.

    Products, traces, norms, eigenvalues, draws and everything else that has to do with entries is computed by all
    processes together: each with its own blocks, whose results are sent to all. What they multiply has to be equal in
    all; that is checked. `inverse` and `power` send no blocks, but all processes have to make them, with the same
    damping, so that all learn if one fails. Multiples, shifts and sums are made without the others, and their numbers
    are compared in the next product.

    Args:
        blocks: Name to square operator: those of this process, and for the others an `Elsewhere`.
        layouts: As for `BlockDiagonal`.
        space: As for `BlockDiagonal`.
        processes: The processes, `Processes()`.

    Raises:
        ValueError: If names, sizes, dtypes or devices do not fit.
        ProcessError: By what is computed together, in all processes: if it fails in one of them, or they multiply
            different vectors.
        UnsupportedError: If derivatives are asked for, which would have to go through other processes.

    Cost: of a product with K columns `(W - 1) / W n K` numbers are received, if there are W processes.

    Example: on a single process, which has all blocks.
        >>> from curvlinops_plus.distributed import Alone
        >>> from curvlinops_plus.linalg import Diagonal
        >>> layouts = {"w": Layout({"w": "d -> 1 d"}, {"w": (2,)})}
        >>> K = OwnedBlockDiagonal({"w": Diagonal(torch.ones(2))}, layouts, Space({"w": (2,)}), Alone())
        >>> K.trace
        tensor(2.)
    """

    def __init__(
        self,
        blocks: Mapping[str, LinearOperator],
        layouts: Mapping[str, Layout],
        space: Space,
        processes: Group,
    ) -> None:
        super().__init__(blocks, layouts, space)
        self.processes = processes
        #: Block name to the rank of the process that keeps it.
        self.owners = {
            name: block.owner if isinstance(block, Elsewhere) else processes.rank for name, block in blocks.items()
        }

        #: What was made of the blocks since they were computed: numbers that have to be the same in all processes.
        self._made: list[Any] = []

    def _with(self, blocks: dict[str, LinearOperator], *more: Any) -> BlockDiagonal:
        other = super()._with(blocks, *more)
        assert isinstance(other, OwnedBlockDiagonal)
        other._made = [*self._made, described(more, _made)]
        return other

    def _require_same(self, what: str, X: Tensor | None = None) -> None:
        """Refuse processes whose vectors, or numbers that the matrix was made with, differ. Collective."""

        def describe() -> dict[str, Any]:
            vectors = {} if X is None else {"the vector": X.detach()}
            made = {"what the matrix was made with, as dampings and multiples": self._made}
            return made | compared(vectors, rounding_of(self.dtype))

        self.processes.same(what, describe)

    @property
    def here(self) -> dict[str, LinearOperator]:
        return {name: block for name, block in self.blocks.items() if self.owners[name] == self.processes.rank}

    def group(self, name: str) -> Any:
        return (*super().group(name), self.owners[name])

    # Together --------------------------------------------------------------------------------------------------------

    def _handed_out(
        self,
        what: str,
        shapes: Mapping[str, tuple[int, ...]],
        compute: Callable[[], Mapping[str, Tensor]],
        X: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Block name to tensor, where `compute` gives those of the own blocks, from the same `X`. Collective."""

        def work() -> dict[str, Tensor]:
            self._require_same("what they multiply", X)
            found = {name: torch.empty(shape, dtype=self.dtype, device=self.device) for name, shape in shapes.items()}
            for name, result in compute().items():
                if result.requires_grad:
                    raise UnsupportedError(
                        f"{self.label} has no derivatives, since they would have to go through other processes. "
                        "Use torch.no_grad() or detach(), or the operator that gather(rank=None) returns."
                    )
                found[name].copy_(result)
            self.processes.hand_out(what, list(found.values()), [self.owners[name] for name in found])
            return found

        return self.processes.together(f"{what} of {self.label}", work)

    def _some(self, function: Callable[[LinearOperator], bool]) -> bool:
        return any(self.processes.gather("what blocks are", super()._some(function)))

    def _tensors(
        self, function: Callable[[LinearOperator], Tensor], shape: tuple[int, ...] | None, decomposes: bool = False
    ) -> dict[str, Tensor]:
        shapes = {name: (block.shape[0],) if shape is None else shape for name, block in self.blocks.items()}
        compute = partial(self._each, function, decomposes=decomposes, among=self.here)
        return self._handed_out("closed forms", shapes, compute)

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        # Draws of any numbers will do, if each block is multiplied once.
        compared_too = None if product == "_root_matmat" else X
        tree, here = self.in_space.unflatten(X), self.here
        parts = {name: self.layouts[name].join(tree) for name in here}

        def compute() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name, block in in_turn(here):
                with error_context(f'block "{name}"'):
                    found[name] = getattr(block, product)(parts[name])
            return found

        shapes = {name: (layout.dim, X.shape[1]) for name, layout in self.layouts.items()}
        return self._merge(self._handed_out("a product", shapes, compute, compared_too))

    def _to_dense(self) -> Tensor:
        return LinearOperator._to_dense(self)

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> BlockDiagonal:
        """`(K + damping I)⁻¹`, block by block; see `LinearOperator.inverse`. Collective; sends no blocks."""
        inverse = partial(super().inverse, damping, retry_double_precision=retry_double_precision)
        return self.processes.together(f"an inverse of {self.label}", lambda: _agreed(inverse(), "the inverse"))

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> BlockDiagonal:
        """`(K + damping I)ᵖ`, block by block; see `LinearOperator.power`. Collective; sends no blocks."""
        power = partial(super().power, p, damping, exact=exact)
        return self.processes.together(f"a power of {self.label}", lambda: _agreed(power(), "the power"))

    def offload(self, where: str | torch.device | None = None, dtype: torch.dtype | None = None) -> BlockDiagonal:
        """The same, each process with its blocks elsewhere; see `BlockDiagonal.offload`. Collective."""
        offload = partial(super().offload, where, dtype)
        return self.processes.together(f"offloading blocks of {self.label}", offload)

    def gather(self, rank: int | None = 0) -> BlockDiagonal | None:
        """All blocks in one process, as a `BlockDiagonal`. Collective.

        Args:
            rank: Of the process that gets them; None for all.

        Returns:
            The operator there, None in the other processes.

        Raises:
            ValueError: If a block is known by its products alone, or there is no such process.

        Cost: the memory of all blocks in that process.
        """
        if rank is not None and not (isinstance(rank, int) and 0 <= rank < self.processes.world):
            raise ValueError(f"rank={rank!r}: expected one from 0 to {self.processes.world - 1}, or None for all.")

        def work() -> dict[str, Any]:
            own = self._each(pack, among=self.here)
            told = self.processes.gather(
                "what blocks are", tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), own)
            )
            trees = {name: tree for part in told for name, tree in part.items()}
            mine = rank is None or rank == self.processes.rank
            sent: list[Tensor] = []
            owners: list[int] = []
            found: dict[str, Any] = {}
            for name, tree in trees.items():
                if name not in own and mine:
                    tree = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=self.device), tree)
                found[name] = own.get(name, tree)
                tensors = [t for t in tree_leaves(found[name]) if isinstance(t, Tensor)]
                sent += tensors
                owners += [self.owners[name]] * len(tensors)
            self.processes.hand_out("blocks", sent, owners, rank)
            return found if mine else {}

        packed = self.processes.together(f"gathering blocks of {self.label}", work)
        if not packed:
            return None
        blocks = {name: unpack(packed[name], self.device) for name in self.blocks}
        return BlockDiagonal(blocks, self.layouts, self.space)

    def own_state_dict(self) -> dict[str, Any]:
        """The state of the blocks of this process: part of that of a `BlockDiagonal`."""
        return super().own_state_dict() | {"class": "BlockDiagonal"}

    def state_dict(self) -> dict[str, Any]:
        """That of `gather(rank=None)`, in all processes. Collective."""
        whole = self.gather(None)
        assert whole is not None
        return whole.state_dict()


def _made(value: Any) -> Any:
    """What other processes are told of a matrix that was added."""
    if isinstance(value, OwnedBlockDiagonal):
        return value._made
    if isinstance(value, LinearOperator):
        return described(value.vector) if isinstance(value, Diagonal) else value.label
    return described(value.given, _made) if isinstance(value, BlockDampings) else None


def _agreed(made: BlockDiagonal, what: str) -> BlockDiagonal:
    assert isinstance(made, OwnedBlockDiagonal)
    made._require_same(f"{what} that they make")
    return made
