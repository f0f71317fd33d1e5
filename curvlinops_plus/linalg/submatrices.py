"""Some rows and columns of a matrix: `A[rows, cols]`, and the matrix with all others set to zero.

What may be picked is said at `select`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.deferred import Deferred
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import KroneckerSum
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted, Wrapper
from curvlinops_plus.linalg.selection import Selection, select
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator

__all__ = ["ProjectedLinearOperator", "SubmatrixLinearOperator", "submatrix"]

#: Parts of Kronecker products and of matrices in an eigenbasis are formed up to this number of bytes.
LARGEST = 2**31


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
        return SubmatrixLinearOperator(A, _again(self.rows), _again(self.cols))

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def diagonal(self) -> Tensor:
        if not self._principal:
            raise self._no_closed_form("diagonal")
        return self.cols.gather(self.A.diagonal())


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
        return ProjectedLinearOperator(self.A.to(device, dtype), _again(self.kept))

    def diagonal(self) -> Tensor:
        return self._project(self.A.diagonal())

    @property
    def trace(self) -> Tensor:
        return self.kept.gather(self.A.diagonal()).sum()


def submatrix(A: LinearOperator, rows: Any, cols: Any) -> LinearOperator:
    """The submatrix of some rows and columns, as the operator with the most closed forms: what `A[rows, cols]` returns.

    Of a `Dense` matrix it is `Dense`, with entries copied as they are now. With the same rows and columns, of a
    `Diagonal` it is `Diagonal`, and of a block-diagonal matrix such as KFAC block-diagonal, with inverse, determinant
    and so on. A part of a Kronecker product is a Kronecker product if it is made of whole rows and columns of the
    parameters' matrix; otherwise it is formed, like a part of a matrix in an eigenbasis, if it has at most 2 GiB.
    Everything else is a `SubmatrixLinearOperator`.

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
    return SubmatrixLinearOperator(A, rows, cols) if known is None else known


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


def _again(selection: Selection) -> Any:
    """What picks the same once more."""
    return selection.positions if selection.names is None else list(selection.names)


@singledispatch
def _structured(A: LinearOperator, rows: Selection, cols: Selection) -> LinearOperator | None:
    """The submatrix as an operator with closed forms, or None. One function per structure."""
    return None


@_structured.register
def _(A: Dense, rows: Selection, cols: Selection) -> LinearOperator | None:
    if A.batch:
        b, at = cols.positions // A.size, cols.positions % A.size
        if not rows.same(cols) or not _may_be_formed(A, at):
            return None
        return Dense(_entries(A, b, at) * (b[:, None] == b), A.structure)
    structure = A.structure if rows.same(cols) else Structure.GENERAL
    matrix = A.matrix.index_select(0, rows.positions).index_select(1, cols.positions)
    return Dense(matrix, structure, A.rtol, in_space=cols.space, out_space=rows.space)


@_structured.register
def _(A: Diagonal, rows: Selection, cols: Selection) -> LinearOperator | None:
    return Diagonal(cols.gather(A.vector.flatten())) if rows.same(cols) else None


@_structured.register
def _(A: IdentityLinearOperator, rows: Selection, cols: Selection) -> LinearOperator | None:
    return IdentityLinearOperator(cols.space, A.device, A.dtype) if rows.same(cols) else None


@_structured.register
def _(A: Kronecker, rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols) or min(A.structure, Structure.SYMMETRIC) == Structure.GENERAL:
        return None
    return _of_kronecker(A, cols.positions)


@_structured.register
def _(A: Eigendecomposed, rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols) or not _may_be_formed(A, cols.positions):
        return None
    units = torch.zeros(A.shape[0], len(cols.positions), dtype=A.dtype, device=A.device)
    units[cols.positions, torch.arange(len(cols.positions), device=A.device)] = 1
    return Dense(cols.gather(A._matmat(units)), A.structure)


@_structured.register
def _(A: KroneckerSum, rows: Selection, cols: Selection) -> LinearOperator | None:
    if not rows.same(cols):
        return None
    parts = [submatrix(term, _again(rows), _again(cols)) for term in A.terms]
    return sum(parts[1:], parts[0])


@_structured.register
def _(A: Scaled, rows: Selection, cols: Selection) -> LinearOperator | None:
    return A.c * submatrix(A.A, _again(rows), _again(cols))


@_structured.register
def _(A: Shifted, rows: Selection, cols: Selection) -> LinearOperator | None:
    return submatrix(A.A, _again(rows), _again(cols)).shift(A.delta) if rows.same(cols) else None


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


def _cut_blocks(A: BlockDiagonal, picked: Selection) -> BlockDiagonal:
    """A part of each block; what is picked of one in a run, or of one parameter, makes one tensor of the space."""
    at = A.in_space.unflatten(torch.arange(A.shape[0], device=A.device)[:, None])
    owner, place = torch.empty(2, A.shape[0], dtype=torch.long, device=A.device)
    for number, layout in enumerate(A.layouts.values()):
        entries = layout.join(at)[:, 0]
        owner[entries], place[entries] = number, torch.arange(layout.dim, device=A.device)
    owner, place = owner[picked.positions], place[picked.positions]
    if picked.names is None:
        names = list(A.blocks)
        ends = [*((owner[1:] != owner[:-1]).nonzero()[:, 0] + 1).tolist(), len(owner)]
        sizes = [end - start for start, end in zip([0, *ends], ends)]
        owners = owner[[end - 1 for end in ends]].tolist()
        space = Space({f"{names[o]}[{run}]": (size,) for run, (o, size) in enumerate(zip(owners, sizes, strict=True))})
    else:
        space = picked.space
    tensors: dict[int, list[str]] = {}
    for name, (start, size) in space.extents.items():
        if size:
            tensors.setdefault(int(owner[start]), []).append(name)
    blocks, layouts = {}, {}
    for number, (name, block) in enumerate(A.blocks.items()):
        if number in tensors:
            inside = place[owner == number]
            blocks[name] = block if _is_whole(inside, block.shape[0]) else submatrix(block, inside, inside)
            shapes = {tensor: space.shapes[tensor] for tensor in tensors[number]}
            layouts[name] = Layout({tensor: _one_row(len(shape)) for tensor, shape in shapes.items()}, shapes)
    return BlockDiagonal(blocks, layouts, space)


def _is_whole(positions: Tensor, n: int) -> bool:
    return len(positions) == n and torch.equal(positions, torch.arange(n, device=positions.device))


def _one_row(axes: int) -> str:
    """The pattern of a tensor as one row of a matrix."""
    names = " ".join(f"a{axis}" for axis in range(axes))
    return f"{names} -> 1 ({names})"


def _of_kronecker(A: Kronecker, positions: Tensor) -> LinearOperator | None:
    """A Kronecker product of parts if whole rows and columns of the matrix of parameters are picked; else formed."""
    b, rest = positions // (A.G.size * A.A.size), positions % (A.G.size * A.A.size)
    o, i = rest // A.A.size, rest % A.A.size
    if not A.batch and len(o):
        others = (o != o[0]).nonzero()
        width = int(others[0, 0]) if len(others) else len(o)
        of_G, of_A = o[::width], i[:width]
        if torch.equal((of_G[:, None] * A.A.size + of_A).flatten(), positions):
            G, F = submatrix(A.G, of_G, of_G), submatrix(A.A, of_A, of_A)
            assert isinstance(G, Factor)
            assert isinstance(F, Factor)
            return Kronecker(G, F)
    if not _may_be_formed(A, positions):
        return None
    entries = _entries(A.G, b, o) * _entries(A.A, b, i)
    return Dense(entries * (b[:, None] == b) if A.batch else entries, A.structure)


def _entries(factor: Factor, b: Tensor, at: Tensor) -> Tensor:  # [k], [k] -> [k, k]
    """`F[at, at']` of a factor; of a batch, with the matrices that `b` says for the rows."""
    if isinstance(factor, Dense):
        rows = factor.matrix[b, at] if factor.batch else factor.matrix[at]
        return rows[:, at]
    entries = factor.diagonals()
    return (entries[b, at] if factor.batch else entries[at])[:, None] * (at[:, None] == at)


def _may_be_formed(A: LinearOperator, positions: Tensor) -> bool:
    return len(positions) ** 2 * torch.finfo(A.dtype).bits // 8 <= LARGEST


class _Later(Deferred):
    """A submatrix of an operator that may not be computed yet, or that may be computed again."""

    def __init__(self, A: Deferred, rows: Selection, cols: Selection) -> None:
        super().__init__(cols.space, A.dtype, A.device, A.structure)
        self.A, self.rows, self.cols = A, rows, cols
        self._known: tuple[LinearOperator, LinearOperator] | None = None

    @property
    def operator(self) -> LinearOperator:
        whole = self.A.operator
        if self._known is None or self._known[0] is not whole:
            self._known = whole, submatrix(whole, _again(self.rows), _again(self.cols))
        return self._known[1]


@_structured.register
def _(A: Deferred, rows: Selection, cols: Selection) -> LinearOperator | None:
    return _Later(A, rows, cols) if rows.same(cols) else None
