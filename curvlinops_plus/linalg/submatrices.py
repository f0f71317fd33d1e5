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
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal, OwnedBlockDiagonal
from curvlinops_plus.linalg.damping import is_zero
from curvlinops_plus.linalg.dense import Dense, Diagonal, IdentityLinearOperator
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.operator import Deferred, LinearOperator, Scaled
from curvlinops_plus.linalg.space import Space, Structure

_COLUMNS = 1024  # that are multiplied together where entries of a part are formed


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
        return self is other or (
            self.dim == other.dim and torch.equal(self.positions, other.positions)
        )


def select(which: Any, space: Space, device: torch.device, axis: str) -> Selection:
    """Read what was picked from a vector of `space`, or take a selection that was read before.

    Args:
        device: Where positions are wanted.
        axis: "row" or "column", for messages.

    Raises:
        ValueError: If it is of no known kind, out of bounds, or has duplicates.
    """
    if isinstance(which, Selection):
        return Selection(which.space, which.positions.to(device), which.dim)
    n, every = space.dim, torch.arange(space.dim, device=device)
    if isinstance(which, slice) and which == slice(None):
        return Selection(space, every, n)
    names = [which] if isinstance(which, str) else which
    if isinstance(names, Sequence) and len(names) and all(isinstance(name, str) for name in names):
        if len(set(names)) != len(names) or not set(names) <= set(space.names):
            raise ValueError(
                f"Expected different names of {axis}s out of {space.names}, got {list(names)}."
            )
        picked = torch.cat([space.unflatten(every)[name].flatten() for name in names])
        return Selection(Space({name: space.shapes[name] for name in names}), picked, n)
    if isinstance(which, slice):
        picked = every[list(range(n)[which])]
    else:
        picked = torch.as_tensor(
            np.asarray(which) if isinstance(which, (Sequence, np.ndarray)) else which, device=device
        )
        picked = picked.long() if picked.numel() == 0 else picked
        if picked.dtype == torch.bool and picked.shape == (n,):
            picked = every[picked]
        wrong = picked.ndim != 1 or picked.dtype == torch.bool or picked.is_floating_point()
        if (
            wrong
            or bool(((picked < 0) | (picked >= n)).any())
            or len(picked.unique()) != len(picked)
        ):
            raise ValueError(
                f"Expected {axis}s as different integers between 0 and {n - 1}, a mask of {n} "
                f"entries, a slice, or names of parameters out of {space.names}; got {which!r}."
            )
    return Selection(Space.flat(len(picked)), picked.to(device, torch.long), n)


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

    def __init__(self, A: LinearOperator, row_idxs: Any, col_idxs: Any) -> None:
        self.A = A
        self.set_submatrix(row_idxs, col_idxs)

    def set_submatrix(self, row_idxs: Any, col_idxs: Any) -> None:
        """Select other rows and columns."""
        A = self.A
        self.rows, self.cols = rows, cols = _both(A, row_idxs, col_idxs)
        self._principal = A.in_space.matches(A.out_space) and rows.same(cols)
        structure = A.structure if self._principal else Structure.GENERAL
        super().__init__(cols.space, A.dtype, A.device, structure, rows.space)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.rows.gather(self.A._matmat(self.cols.scatter(X)))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.cols.gather(self.A._rmatmat(self.rows.scatter(X)))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return SubmatrixLinearOperator(self.A.to(device, dtype), self.rows, self.cols)

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def diagonal(self) -> Tensor:
        if not self._principal:
            raise self._no_closed_form("diagonal")
        return self.cols.gather(self.A.diagonal())


class ProjectedLinearOperator(LinearOperator):
    """`P A P`: the square matrix `A` with all other rows and columns set to zero.

    Args:
        A: A square matrix.
        idxs: What stays: integers, a boolean mask, a slice, or names of parameters; see
            `submatrix`.

    Raises:
        ValueError: If integers repeat or are out of bounds, or a name is unknown.

    Example:
        >>> A = Dense(torch.tensor([[1.0, 2.0], [2.0, 5.0]]), Structure.PSD)
        >>> ProjectedLinearOperator(A, [0]).to_dense()
        tensor([[1., 0.],
                [0., 0.]])
    """

    def __init__(self, A: LinearOperator, idxs: Any) -> None:
        self.kept, _ = _both(A, idxs, slice(None))
        super().__init__(A.in_space, A.dtype, A.device, A.structure, A.out_space)
        self.A = A

    def _project(self, X: Tensor) -> Tensor:
        return self.kept.scatter(self.kept.gather(X))

    def _matmat(self, X: Tensor) -> Tensor:
        return self._project(self.A._matmat(self._project(X)))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._project(self.A._rmatmat(self._project(X)))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return ProjectedLinearOperator(self.A.to(device, dtype), self.kept)

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
        shapes = {name: (len(at),) for name, at in positions.items()}
        layouts = {
            name: Layout({name: "d -> 1 d"}, {name: shape}) for name, shape in shapes.items()
        }
        super().__init__(blocks, layouts, Space(shapes))
        at = torch.cat([positions[name] for name in shapes]).to(self.device)
        #: For each entry of all blocks its position in the vector, and the other way round.
        self._order, self._back = at, at.argsort()
        if not torch.equal(at[self._back], torch.arange(space.dim, device=at.device)):
            raise ValueError(f"Expected each position from 0 to {space.dim - 1} in one block.")
        self.in_space = self.out_space = space

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
    picked_rows, picked = _both(A, rows, cols)
    A = A.operator if isinstance(A, Deferred) else A
    at, same = picked.positions, picked_rows.same(picked)
    if isinstance(A, Dense) and not A.batch:
        matrix = A.matrix.index_select(0, picked_rows.positions).index_select(1, at)
        structure = A.structure if same else Structure.GENERAL
        return Dense(matrix, structure, A.rtol, in_space=picked.space, out_space=picked_rows.space)
    if isinstance(A, Scaled) and (same or is_zero(A.delta)):
        part = submatrix(A.A, picked_rows, picked)._scale(A.c)
        return part if is_zero(A.delta) else part.shift(A.delta)
    if same and isinstance(A, IdentityLinearOperator):
        return IdentityLinearOperator(picked.space, A.device, A.dtype)._scale(A.c)
    if same and isinstance(A, Diagonal):
        return Diagonal(picked.gather(A.vector.flatten()))
    if same and len(at) and isinstance(A, BlockDiagonal) and not isinstance(A, OwnedBlockDiagonal):
        return _part_of_blocks(A, picked)
    part = SubmatrixLinearOperator(A, picked_rows, picked)
    if (
        not same
        or A.structure == Structure.GENERAL
        or not isinstance(A, (Dense, Kronecker, Eigendecomposed))
    ):
        return part
    if (
        isinstance(A, Kronecker)
        and not A.batch
        and isinstance(A.G, Dense)
        and isinstance(A.A, Dense)
    ):
        o, i = at // A.A.size, at % A.A.size
        return Dense(A.G.matrix[o][:, o] * A.A.matrix[i][:, i], A.structure, in_space=picked.space)
    columns = torch.eye(len(at), dtype=A.dtype, device=A.device).split(_COLUMNS, 1)
    return Dense(
        torch.cat([part._matmat(X) for X in columns], 1), A.structure, in_space=picked.space
    )


def _part_of_blocks(A: BlockDiagonal, picked: Selection) -> BlockDiagonal:
    """A part of each block, in the order of the block; those of which everything is picked stay
    what they are.
    """
    names = picked.space.names
    whole = {
        block: layout for block, layout in A.layouts.items() if set(layout.names) <= set(names)
    }
    if sorted(name for layout in whole.values() for name in layout.names) == sorted(
        names
    ):  # no block is cut
        return BlockDiagonal({block: A.blocks[block] for block in whole}, whole, picked.space)
    new = torch.full((A.shape[0],), -1, device=A.device)
    new[picked.positions] = torch.arange(len(picked.positions), device=A.device)
    blocks, positions = {}, {}
    for name, at in A.positions().items():
        inside = (new[at] >= 0).nonzero()[:, 0]
        if len(inside):
            block = A._fetched(name)
            blocks[name] = block if len(inside) == len(at) else submatrix(block, inside, inside)
            positions[name] = new[at[inside]]
    return PositionedBlocks(blocks, positions, picked.space)


def _both(A: LinearOperator, rows: Any, cols: Any) -> tuple[Selection, Selection]:
    return select(rows, A.out_space, A.device, "row"), select(cols, A.in_space, A.device, "column")


def _getitem(self: LinearOperator, key: tuple[Any, Any]) -> LinearOperator:
    """`A[rows, cols]`, see `submatrix`."""
    if not isinstance(key, tuple) or len(key) != 2:
        raise ValueError(f"Expected A[rows, cols], with : for all rows or columns; got A[{key!r}].")
    return submatrix(self, *key)


# Set from here, because operators are defined without the classes that build on them.
LinearOperator.__getitem__ = _getitem
