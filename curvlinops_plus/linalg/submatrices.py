"""Some rows and columns of a matrix: `A[rows, cols]`, and the matrix with all others set to zero.

What may be picked is said at `select`.
"""

from __future__ import annotations

from functools import partial, singledispatch
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.deferred import Deferred, DeferredResult, Formed
from curvlinops_plus.linalg.entries import formed_part, may_be_formed
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import KroneckerSum
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted, Sum, Wrapper
from curvlinops_plus.linalg.owned import OwnedBlockDiagonal
from curvlinops_plus.linalg.packing import tensors_of
from curvlinops_plus.linalg.positioned_blocks import PositionedBlocks
from curvlinops_plus.linalg.selection import Selection, select
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator


class SubmatrixLinearOperator(Wrapper):
    """The submatrix of the picked rows and columns of `A`; one product with `A` per product.

    With the same rows and columns it is as symmetric and positive semi-definite as `A`. `submatrix(A, rows, cols)` may
    give an operator that knows more of itself.

    Args:
        A: The matrix.
        row_idxs: Which rows: integers, a boolean mask, a slice, or names of parameters; see `submatrix`.
        col_idxs: Which columns.

    Raises:
        TypeError: If `A` is no operator of this package.
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
        """Pick other rows and columns."""
        rows, cols = _both(self.A, row_idxs, col_idxs)
        self.rows, self.cols = rows, cols
        self.out_space, self.in_space = rows.space, cols.space
        self._principal = self.A.in_space.matches(self.A.out_space) and rows.same(cols)

    @property
    def structure(self) -> Structure:
        return self.A.structure if self._principal else Structure.GENERAL

    def _matmat(self, X: Tensor) -> Tensor:
        if X.shape[1] == 0:  # also when no column was picked: `A` need not know products without columns
            return X.new_zeros(self.shape[0], 0)
        return self.rows.gather(self.A._matmat(self.cols.scatter(X)))

    def _rmatmat(self, X: Tensor) -> Tensor:
        if X.shape[1] == 0:
            return X.new_zeros(self.shape[1], 0)
        return self.cols.gather(self.A._rmatmat(self.rows.scatter(X)))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        A = self.A.to(device, dtype)
        return SubmatrixLinearOperator(A, self.rows, self.cols)

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def diagonal(self) -> Tensor:
        if not self._principal:
            raise self._no_closed_form("diagonal")
        return self.cols.gather(self.A.diagonal())


class PrincipalPart(SubmatrixLinearOperator, Formed):
    """The same rows and columns of a structured matrix, whose closed forms are those of its entries.

    Products are those of `A`; entries are formed when a closed form is asked for, those of each matrix of a batch.

    Args:
        A: A `Dense`, `Diagonal`, `Kronecker` or `Eigendecomposed` matrix.
        row_idxs: See `SubmatrixLinearOperator`.
        col_idxs: The same.

    Raises:
        NoClosedForm: If entries are needed that take more than 2 GiB.

    Example:
        >>> S = PrincipalPart(Kronecker(torch.eye(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])), [0, 1, 3], [0, 1, 3])
        >>> S.logdet.exp(), S.inverse().diagonal()
        (tensor(6.), tensor([0.6667, 0.6667, 0.5000]))
    """

    @property
    def tensors(self) -> list[Tensor] | None:
        return tensors_of(self.A)

    def _form(self) -> LinearOperator:
        return formed_part(self.A, self.cols.positions)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return PrincipalPart(self.A.to(device, dtype), self.rows, self.cols)

    def _to_dense(self) -> Tensor:
        small = may_be_formed(self.A, self.shape[0])
        return self.operator.to_dense() if small else LinearOperator._to_dense(self)


class ProjectedLinearOperator(Wrapper):
    """`P A P`: the square matrix `A` with all rows and columns set to zero that were not picked.

    Args:
        A: A square matrix.
        idxs: What stays: integers, a boolean mask, a slice, or names of parameters; see `submatrix`.

    Raises:
        TypeError: If `A` is no operator of this package.
        ValueError: If `A` is not square, integers repeat or are out of bounds, or a name is unknown.

    Example:
        >>> A = Dense(torch.tensor([[1.0, 2.0], [2.0, 5.0]]), Structure.PSD)
        >>> ProjectedLinearOperator(A, [0]).to_dense()
        tensor([[1., 0.],
                [0., 0.]])
    """

    def __init__(self, A: LinearOperator, idxs: Any) -> None:
        _check_operator(A)
        if A.shape[0] != A.shape[1]:
            raise ValueError(f"Only a square matrix can be projected from both sides, got {A.label}.")
        self.A, self.kept = A, select(idxs, A.in_space, A.device, "row")

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
        return self.kept.gather(self.A.diagonal()).sum()


def submatrix(A: LinearOperator, rows: Any, cols: Any) -> LinearOperator:
    """The submatrix of some rows and columns, as the operator with the most closed forms: what `A[rows, cols]` returns.

    Of a `Dense` matrix it is `Dense`, with entries copied as they are now. With the same rows and columns, of a
    `Diagonal` it is `Diagonal`, and of a block-diagonal matrix such as KFAC block-diagonal, with inverse, determinant
    and so on; blocks of which everything is picked stay what they are, in any order. A part of a Kronecker product is
    a Kronecker product if it is made of whole rows and columns of the parameters' matrix. Other parts, and those of
    matrices in an eigenbasis, are a `PrincipalPart`, whose entries are formed when a closed form is asked for, if they
    take at most 2 GiB. Everything else is a `SubmatrixLinearOperator`.

    Args:
        A: The matrix.
        rows: Integers, a boolean mask, a slice, or names of parameters; see `submatrix`.
        cols: The same.

    Raises:
        TypeError: If `A` is no operator of this package.
        ValueError: If integers repeat or are out of bounds, or a name is unknown.

    Example:
        >>> submatrix(Diagonal(torch.tensor([1.0, 2.0, 4.0])), [0, 2], [0, 2]).logdet.exp()
        tensor(4.)
    """
    chosen = _both(A, rows, cols)
    known = _structured(A, *chosen)
    return SubmatrixLinearOperator(A, *chosen) if known is None else known


def _getitem(self: LinearOperator, key: tuple[Any, Any]) -> LinearOperator:
    """`A[rows, cols]`, see `submatrix`."""
    if not isinstance(key, tuple) or len(key) != 2:
        raise ValueError(f"Expected A[rows, cols], with : for all rows or columns; got A[{key!r}].")
    return submatrix(self, *key)


# Set from here, because operators are defined without the classes that build on them.
LinearOperator.__getitem__ = _getitem


def _check_operator(A: Any) -> None:
    if not isinstance(A, LinearOperator):
        advice = "use Dense(A), or index it as it is" if isinstance(A, Tensor) else "use from_scipy(A) or Dense(A)"
        raise TypeError(f"Expected A to be a LinearOperator, got {type(A).__name__}; {advice}.")


def _both(A: LinearOperator, rows: Any, cols: Any) -> tuple[Selection, Selection]:
    _check_operator(A)
    return select(rows, A.out_space, A.device, "row"), select(cols, A.in_space, A.device, "column")


@singledispatch
def _structured(A: LinearOperator, rows: Selection, cols: Selection) -> LinearOperator | None:
    """The submatrix as an operator with closed forms, or None. One function per structure."""
    return None


@_structured.register
def _(A: Dense, rows: Selection, cols: Selection) -> LinearOperator | None:
    if A.batch:
        return _principal(A, rows, cols)
    structure = A.structure if rows.same(cols) else Structure.GENERAL
    matrix = A.matrix.index_select(0, rows.positions).index_select(1, cols.positions)
    return Dense(matrix, structure, A.rtol, in_space=cols.space, out_space=rows.space)


def _principal(A: LinearOperator, rows: Selection, cols: Selection) -> LinearOperator | None:
    return PrincipalPart(A, rows, cols) if rows.same(cols) else None


@_structured.register
def _(A: Diagonal, rows: Selection, cols: Selection) -> LinearOperator | None:
    return Diagonal(cols.gather(A.vector.flatten())) if rows.same(cols) else None


@_structured.register
def _(A: IdentityLinearOperator, rows: Selection, cols: Selection) -> LinearOperator | None:
    return IdentityLinearOperator(cols.space, A.device, A.dtype) if rows.same(cols) else None


@_structured.register
def _(A: Kronecker, rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols) or A.structure == Structure.GENERAL:
        return None
    product = None if A.batch else _of_whole_rows_and_columns(A, cols.positions)
    return _principal(A, rows, cols) if product is None else product


@_structured.register
def _(A: Eigendecomposed, rows: Selection, cols: Selection) -> LinearOperator | None:
    return _principal(A, rows, cols)


@_structured.register
def _(A: KroneckerSum, rows: Selection, cols: Selection) -> LinearOperator | None:
    return _of_sum(A.terms, rows, cols)


@_structured.register
def _(A: Formed, rows: Selection, cols: Selection) -> LinearOperator | None:
    return _of_sum((A.A, A.B), rows, cols) if isinstance(A, Sum) else None


def _of_sum(terms: tuple[LinearOperator, ...], rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols):
        return None
    parts = [submatrix(term, rows, cols) for term in terms]
    return sum(parts[1:], parts[0])


@_structured.register
def _(A: Scaled, rows: Selection, cols: Selection) -> LinearOperator | None:
    return A.c * submatrix(A.A, rows, cols)


@_structured.register
def _(A: Shifted, rows: Selection, cols: Selection) -> LinearOperator | None:
    return submatrix(A.A, rows, cols).shift(A.delta) if rows.same(cols) else None


@_structured.register
def _(A: BlockDiagonal, rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols) or not len(cols.positions):
        return None
    if cols.names is not None:
        names = [block for block, layout in A.layouts.items() if set(layout.names) <= set(cols.names)]
        if sum(len(A.layouts[block].names) for block in names) == len(cols.names):  # no block is cut
            layouts = {block: A.layouts[block] for block in names}
            return BlockDiagonal({block: A.blocks[block] for block in names}, layouts, cols.space)
    return _cut_blocks(A, cols)


@_structured.register
def _(A: OwnedBlockDiagonal, rows: Selection, cols: Selection) -> LinearOperator | None:
    return None  # a part may be one of no process


def _cut_blocks(A: BlockDiagonal, picked: Selection) -> PositionedBlocks:
    """A part of each block, in the order of the block; those of which everything is picked stay what they are."""
    new = torch.full((A.shape[0],), -1, device=A.device)
    new[picked.positions] = torch.arange(len(picked.positions), device=A.device)
    blocks, positions = {}, {}
    for name, at in A.positions().items():
        inside = (new[at] >= 0).nonzero()[:, 0]
        if len(inside):
            block = A.blocks[name]
            blocks[name] = block if len(inside) == len(at) else submatrix(block, inside, inside)
            positions[name] = new[at[inside]]
    return PositionedBlocks(blocks, positions, picked.space)


def _of_whole_rows_and_columns(A: Kronecker, positions: Tensor) -> Kronecker | None:
    """A Kronecker product of parts, if they make one."""
    if not len(positions):
        return None
    o, i = positions // A.A.size, positions % A.A.size
    others = (o != o[0]).nonzero()
    width = int(others[0, 0]) if len(others) else len(o)
    of_G, of_A = o[::width], i[:width]
    if not torch.equal((of_G[:, None] * A.A.size + of_A).flatten(), positions):
        return None
    G, F = submatrix(A.G, of_G, of_G), submatrix(A.A, of_A, of_A)
    return Kronecker(G, F) if isinstance(G, Factor) and isinstance(F, Factor) else None


@_structured.register
def _(A: Deferred, rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols):
        return None
    return DeferredResult(partial(submatrix, rows=rows, cols=cols), [A], cols.space, rows.space)
