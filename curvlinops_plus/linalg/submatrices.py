"""Some rows and columns of a matrix: `A[rows, cols]`, and the matrix with all others set to zero.

What may be picked is, for rows and columns alike,

* positions: a list, range, tensor or array of different integers from 0, in any order,
* a boolean mask with one entry per row (or column),
* a slice; `:` picks everything and keeps names and shapes,
* parameters: a name, or a list of names of the operator's space. The result keeps their names and
  shapes, and multiplies lists and dictionaries of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.arithmetic import Deferred, Scaled, operator_of
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.damping import is_zero
from curvlinops_plus.linalg.dense import Dense, Diagonal, IdentityMultiple
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.owned_blocks import OwnedBlockDiagonal
from curvlinops_plus.linalg.space import Space, Structure

_COLUMNS = 1024  # that are multiplied together where entries of a part are formed


def submatrix(A: LinearOperator, rows: Any, cols: Any) -> LinearOperator:
    """The submatrix of some rows and columns, as the operator with the most closed forms: what
    `A[rows, cols]` returns.

    Of a `Dense` matrix it is `Dense`. With the same rows and columns it is `Diagonal` of a
    `Diagonal` one, and block-diagonal of a block-diagonal matrix such as KFAC, with inverse,
    determinant and so on: blocks that are selected as a whole keep their form, other parts of
    blocks, Kronecker products and matrices in an eigenbasis are dense. Everything else is a
    `SubmatrixLinearOperator`.

    Args:
        A: The matrix.
        rows: Integers, a boolean mask, a slice, or names of parameters.
        cols: The same.

    Raises:
        ValueError: If integers repeat or are out of bounds, or a name is unknown.

    Cost: memory for `k²` numbers for a block of which only `k` rows are selected.

    Example:
        >>> submatrix(Diagonal(torch.tensor([1.0, 2.0, 4.0])), [0, 2], [0, 2]).logdet.exp()
        tensor(4.)
    """
    A = operator_of(A, square=False)
    row_selection = select(rows, A.out_space, A.device, "row")
    selection = select(cols, A.in_space, A.device, "column")
    if isinstance(A, Deferred):
        A = A.operator
    same = row_selection.same(selection)
    if isinstance(A, Dense) and not A.batch:
        matrix = row_selection.gather(A.matrix).index_select(1, selection.positions)
        structure = A.structure if same else Structure.GENERAL
        spaces: Any = {"in_space": selection.space, "out_space": row_selection.space}
        return Dense(matrix, structure, A.rtol, **spaces)
    if isinstance(A, Scaled) and (same or is_zero(A.delta)):
        # Off the diagonal there is no shift.
        part = submatrix(A.A, row_selection, selection)._scale(A.c)
        return part if is_zero(A.delta) else part.shift(A.delta)
    if same:
        principal = _principal(A, selection)
        if principal is not None:
            return principal
    return SubmatrixLinearOperator(A, row_selection, selection)


@dataclass(frozen=True, eq=False)
class Selection:
    """Some entries of a vector of size `dim`: their positions, and the space that they make."""

    space: Space
    positions: Tensor  # [k], on the operator's device
    dim: int

    def gather(self, V: Tensor) -> Tensor:  # [dim, *K] -> [k, *K]
        """The picked entries."""
        return V.index_select(0, self.positions)

    def scatter(self, X: Tensor) -> Tensor:  # [k, *K] -> [dim, *K]
        """A vector that is zero elsewhere."""
        return X.new_zeros(self.dim, *X.shape[1:]).index_copy_(0, self.positions, X)

    def same(self, other: Selection) -> bool:
        """Whether both pick the same entries in the same order."""
        if self.dim != other.dim or len(self.positions) != len(other.positions):
            return False
        # The device waits for no comparison of a tensor with itself.
        return self.positions is other.positions or torch.equal(self.positions, other.positions)


def select(which: Any, space: Space, device: torch.device, axis: str) -> Selection:
    """Read a choice of entries of a vector of `space`, or take a selection that was read before.

    Args:
        device: Where positions are wanted.
        axis: "row" or "column", for messages.

    Raises:
        ValueError: If it is of no known kind, out of bounds, or has duplicates.
    """
    n = space.dim
    if isinstance(which, Selection):
        return Selection(which.space, which.positions.to(device), n)
    every = torch.arange(n, device=device)
    if isinstance(which, slice):
        if which == slice(None):
            return Selection(space, every, n)
        positions = every[list(range(n)[which])]
        return Selection(Space.flat(len(positions)), positions, n)
    names = [which] if isinstance(which, str) else which
    if isinstance(names, Sequence) and len(names) and all(isinstance(name, str) for name in names):
        if len(set(names)) != len(names) or not set(names) <= set(space.names):
            raise ValueError(
                f"Expected different names of {axis}s out of {space.names}, got {list(names)}."
            )
        tree = space.unflatten(every)
        positions = torch.cat([tree[name].flatten() for name in names])
        return Selection(Space({name: space.shapes[name] for name in names}), positions, n)
    positions = _positions(which, every)
    if positions is None:
        raise ValueError(
            f"Expected {axis}s as different integers between 0 and {n - 1}, a mask of {n} "
            f"entries, a slice, or names of parameters out of {space.names}; got {which!r}."
        )
    return Selection(Space.flat(len(positions)), positions, n)


def _positions(which: Any, every: Tensor) -> Tensor | None:
    """The positions of a mask or of different integers; None of anything else."""
    try:
        if isinstance(which, (Sequence, np.ndarray)):
            which = np.asarray(which)
        numbers = torch.as_tensor(which, device=every.device)
    except (TypeError, RuntimeError, ValueError, OverflowError):
        return None
    if numbers.numel() == 0:
        numbers = numbers.long()
    if numbers.dtype == torch.bool:
        return every[numbers] if numbers.shape == every.shape else None
    if numbers.ndim != 1 or numbers.is_floating_point():
        return None
    inside = (numbers >= 0) & (numbers < len(every))
    if not bool(inside.all()) or len(numbers.unique()) != len(numbers):
        return None
    return numbers.long()


def _principal(A: LinearOperator, selection: Selection) -> LinearOperator | None:
    """The submatrix of the same rows and columns with closed forms, or None if it has none."""
    space = selection.space
    positions = selection.positions
    if isinstance(A, IdentityMultiple):
        return IdentityMultiple(space, A.c, A.device, A.dtype)
    if isinstance(A, Diagonal):
        return Diagonal(selection.gather(A.vector.flatten()))
    if isinstance(A, BlockDiagonal) and not isinstance(A, OwnedBlockDiagonal) and len(positions):
        return _part_of_blocks(A, selection)
    if A.structure == Structure.GENERAL or not isinstance(A, (Dense, Kronecker, Eigendecomposed)):
        return None
    if isinstance(A, Kronecker) and not A.batch:
        G, F = A.factors
        if isinstance(G, Dense) and isinstance(F, Dense):
            # The entry (o i, p j) of G ⊗ F is G[o, p] F[i, j].
            o = positions // F.size
            i = positions % F.size
            entries = G.matrix[o][:, o] * F.matrix[i][:, i]
            return Dense(entries, A.structure, in_space=space)
    # Others are formed, from their products with some columns of the identity at a time.
    part = SubmatrixLinearOperator(A, selection, selection)
    eye = torch.eye(len(positions), dtype=A.dtype, device=A.device)
    entries = torch.cat([part._matmat(X) for X in eye.split(_COLUMNS, 1)], 1)
    return Dense(entries, A.structure, in_space=space)


def _part_of_blocks(A: BlockDiagonal, selection: Selection) -> BlockDiagonal:
    """A part of each block, in the order of the block; those of which everything is picked stay
    what they are.
    """
    layouts = _uncut_layouts(A, selection)
    if layouts is not None:
        blocks = {block: A.blocks[block] for block in layouts}
        return BlockDiagonal(blocks, layouts, selection.space)
    # Where each entry of the vector is in the part; -1 if it is not in it.
    places = torch.full((A.shape[0],), -1, device=A.device)
    places[selection.positions] = torch.arange(len(selection.positions), device=A.device)
    blocks = {}
    positions = {}
    for name, block_positions in A.positions().items():
        block_places = places[block_positions]
        inside = (block_places >= 0).nonzero()[:, 0]
        if len(inside):
            block = A._fetched(name)
            is_cut = len(inside) < len(block_places)
            if is_cut:
                picked = Selection(Space.flat(len(inside)), inside, len(block_places))
                block = submatrix(block, picked, picked)
            blocks[name] = block
            positions[name] = block_places[inside]
    return PositionedBlocks(blocks, positions, selection.space)


def _uncut_layouts(A: BlockDiagonal, selection: Selection) -> dict[str, Layout] | None:
    """The layouts of the blocks that make the selection; None if it cuts a block or was not made by
    names.
    """
    names = selection.space.names
    by_name = not isinstance(A, PositionedBlocks) and set(names) <= set(A.space.names)
    if not by_name or not selection.same(select(names, A.space, A.device, "row")):
        return None
    layouts = {
        block: layout for block, layout in A.layouts.items() if set(layout.names) <= set(names)
    }
    number = sum(len(layout.names) for layout in layouts.values())
    return layouts if number == len(names) else None


class SubmatrixLinearOperator(LinearOperator):
    """The submatrix of selected rows and columns of `A`; one product with `A` per product.

    With the same rows and columns it is as symmetric and positive semi-definite as `A`.
    `submatrix(A, rows, cols)` may give an operator that knows more of itself.

    Args:
        A: The matrix.
        row_idxs: Which rows: integers, a boolean mask, a slice, or names of parameters; see
            `submatrix`.
        col_idxs: Which columns.

    Raises:
        ValueError: If integers repeat or are out of bounds, or a name is unknown.

    Example:
        >>> A = Dense(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        >>> SubmatrixLinearOperator(A, [1], [2, 0]).to_dense()
        tensor([[6., 4.]])
    """

    _made_of = ("A", "rows", "cols")

    def __init__(self, A: LinearOperator, row_idxs: Any, col_idxs: Any) -> None:
        self.A = operator_of(A, square=False)
        self.set_submatrix(row_idxs, col_idxs)

    def set_submatrix(self, row_idxs: Any, col_idxs: Any) -> None:
        """Select other rows and columns."""
        A = self.A
        self.rows = select(row_idxs, A.out_space, A.device, "row")
        self.cols = select(col_idxs, A.in_space, A.device, "column")
        self._is_principal = A.in_space.matches(A.out_space) and self.rows.same(self.cols)
        structure = A.structure if self._is_principal else Structure.GENERAL
        super().__init__(self.cols.space, A.dtype, A.device, structure, self.rows.space)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.rows.gather(self.A._matmat(self.cols.scatter(X)))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.cols.gather(self.A._rmatmat(self.rows.scatter(X)))

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def diagonal(self) -> Tensor:
        if not self._is_principal:
            raise self._no_closed_form("diagonal")
        return self.cols.gather(self.A.diagonal())


class ProjectedLinearOperator(LinearOperator):
    """`P A P`: the square matrix `A` with all other rows and columns set to zero.

    Args:
        A: A square matrix.
        idxs: The rows and columns that stay: integers, a boolean mask, a slice, or names of
            parameters; see `submatrix`.

    Raises:
        ValueError: If integers repeat or are out of bounds, or a name is unknown.

    Example:
        >>> A = Dense(torch.tensor([[1.0, 2.0], [2.0, 5.0]]), Structure.PSD)
        >>> ProjectedLinearOperator(A, [0]).to_dense()
        tensor([[1., 0.],
                [0., 0.]])
    """

    _made_of = ("A", "selection")

    def __init__(self, A: LinearOperator, idxs: Any) -> None:
        A = operator_of(A, square=False)
        super().__init__(A.in_space, A.dtype, A.device, A.structure, A.out_space)
        self.A = A
        self.selection = select(idxs, A.out_space, A.device, "row")

    def _project(self, X: Tensor) -> Tensor:
        return self.selection.scatter(self.selection.gather(X))

    def _matmat(self, X: Tensor) -> Tensor:
        # P A P X, where P sets all entries that are not selected to zero.
        return self._project(self.A._matmat(self._project(X)))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._project(self.A._rmatmat(self._project(X)))

    def diagonal(self) -> Tensor:
        return self._project(self.A.diagonal())

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()


class PositionedBlocks(BlockDiagonal):
    """A `BlockDiagonal` matrix, given by the positions of each block's entries in the vector: a
    part of another one.

    Args:
        blocks: Name to square operator.
        positions: The same names to positions `[k]`; together each position of the vector once.
        space: The space of the whole vector.

    Raises:
        ValueError: If names, sizes, dtypes or devices do not fit.

    Example:
        >>> blocks = {"a": Diagonal(torch.tensor([1.0, 2.0])), "b": Diagonal(torch.tensor([3.0]))}
        >>> PositionedBlocks(
        ...     blocks, {"a": torch.tensor([2, 0]), "b": torch.tensor([1])}, Space.flat(3)
        ... ).diagonal()
        tensor([2., 3., 1.])
    """

    def __init__(
        self, blocks: Mapping[str, LinearOperator], positions: Mapping[str, Tensor], space: Space
    ) -> None:
        shapes = {name: (len(places),) for name, places in positions.items()}
        layouts = {
            name: Layout({name: "d -> 1 d"}, {name: shape}) for name, shape in shapes.items()
        }
        super().__init__(blocks, layouts, Space(shapes))
        order = torch.cat(list(positions.values())).to(self.device)
        #: For each entry of all blocks its position in the vector, and the other way round.
        self._order = order
        self._back = order.argsort()
        if not torch.equal(order[self._back], torch.arange(space.dim, device=order.device)):
            raise ValueError(f"Expected each position from 0 to {space.dim - 1} in one block.")
        self.in_space = space
        self.out_space = space

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        return super()._blockwise(product, X[self._order])[self._back]

    def _split(self, X: Tensor) -> dict[str, Tensor]:
        return super()._split(X[self._order])

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        return super().merge(parts)[self._back]

    def state_dict(self) -> dict[str, Any]:
        raise UnsupportedError(
            "A part of a matrix that cuts blocks has no state: save the whole matrix."
        )
