"""Sums that keep structure: what `A + B` is where both have closed forms that fit together."""

from __future__ import annotations

from operator import add

import torch
from torch import Tensor

from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.deferred import Deferred, DeferredResult, Formed
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import KroneckerSum, same_tensor
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted, Sum
from curvlinops_plus.linalg.packing import tensors_of
from curvlinops_plus.linalg.structured import Dense, Diagonal
from curvlinops_plus.linalg.submatrices import PrincipalPart

STRUCTURED = (BlockDiagonal, Deferred, Dense, Diagonal, Eigendecomposed, Kronecker, KroneckerSum, Scaled, Shifted)


class FormedSum(Sum, Formed):
    """`A + B` of matrices whose sum has entries, or eigenvalues, that are theirs added.

    Products are those of `A` and of `B`; closed forms add the entries as they are then.

    Args:
        A, B: `Dense` or `Diagonal` matrices, or `Eigendecomposed` ones in one basis; their multiples and sums.

    Example:
        >>> d = torch.tensor([1.0, 2.0])
        >>> A = Diagonal(d) + 2 * Diagonal(torch.ones(2))
        >>> d[0] = 2.0
        >>> A.logdet.exp()
        tensor(16.)
    """

    @property
    def tensors(self) -> list[Tensor] | None:
        return tensors_of(self.A, self.B)

    def _form(self) -> LinearOperator:
        A, B = _formed(self.A), _formed(self.B)
        if isinstance(A, BlockDiagonal) and isinstance(B, BlockDiagonal) and isinstance(A + B, BlockDiagonal):
            return A + B
        A, B = (Dense(M.to_dense(), M.structure) if isinstance(M, BlockDiagonal) else M for M in (A, B))
        if isinstance(A, Eigendecomposed) and isinstance(B, Eigendecomposed):
            return Eigendecomposed(A.basis, A.values + B.values, self.structure, _rtol(A, B))
        if isinstance(A, Diagonal) and isinstance(B, Diagonal):
            same = A.batch == B.batch
            return Diagonal(A.vector + B.vector if same else A.vector.flatten() + B.vector.flatten())
        return self._of_entries(*((A, B) if isinstance(A, Dense) else (B, A)))

    def _of_entries(self, D: LinearOperator, other: LinearOperator) -> Dense:
        assert isinstance(D, Dense)
        if isinstance(other, Diagonal):
            total, rtol = D.matrix + torch.diag_embed(other.vector.reshape(*D.batch, D.size)), D.rtol
        else:
            assert isinstance(other, Dense)
            matrices = (D.matrix, other.matrix) if D.batch == other.batch else (D.to_dense(), other.to_dense())
            total, rtol = matrices[0] + matrices[1], _rtol(D, other)
        return Dense(total, self.structure, rtol, in_space=self.in_space, out_space=self.out_space)


def structured_sum(A: LinearOperator, B: LinearOperator) -> LinearOperator | None:
    """`A + B` with closed forms; None where only products are known.

    A sum holds its parts, and factors `c` beside them: it follows when their entries change in place, or an operator
    that is computed at first use is computed anew. `inverse`, `power`, `to` and `nearest_kronecker` make operators of
    the entries as they are then.

    Block-diagonal matrices of equal groups of parameters are added block by block, also with diagonal ones. Kronecker
    products make a `KroneckerSum`; `Dense` and `Diagonal` matrices, and `Eigendecomposed` ones in one basis, a
    `FormedSum`.

    Args:
        A: An operator.
        B: One on the same space, in the same dtype and on the same device.
    """
    if not (isinstance(A, STRUCTURED) and isinstance(B, STRUCTURED)):
        return None
    if any(isinstance(X, Deferred) and not isinstance(X, Formed) for X in (A, B)):
        spaces = Sum(A, B)
        return DeferredResult(add, [A, B], spaces.in_space, spaces.out_space)
    A, B = _factor_inside(A), _factor_inside(B)
    if isinstance(A, Shifted):
        return (A.A + B).shift(A.delta)
    if isinstance(B, Shifted):
        return (A + B.A).shift(B.delta)
    if isinstance(A, BlockDiagonal):
        return _of_blocks(A, B)
    return _of_blocks(B, A) if isinstance(B, BlockDiagonal) else _of_matrices(A, B)


def _of_matrices(A: LinearOperator, B: LinearOperator) -> LinearOperator | None:
    products = [*_products(A), *_products(B)]
    if None not in products:
        return KroneckerSum.of([term for term in products if term is not None])
    kinds = {_kind(A), _kind(B)}
    if kinds <= {Dense, Diagonal} or (kinds == {Eigendecomposed} and _same_basis(_basis(A), _basis(B))):
        return FormedSum(A, B)
    return None


def _factor_inside(A: LinearOperator) -> LinearOperator:
    """`c (K + delta I)` as `c K + c delta I`."""
    if isinstance(A, Scaled) and isinstance(A.A, Shifted) and not isinstance(A.c, Tensor):
        return Shifted(A.A.A._scale(A.c), A.c * A.A.delta)
    return A


def _products(A: LinearOperator) -> list[LinearOperator | None]:
    """The terms of a sum of Kronecker products; None for another matrix."""
    if isinstance(A, KroneckerSum):
        return [*A.terms]
    if isinstance(A, Scaled) and isinstance(A.A, KroneckerSum):
        return [term._scale(A.c) for term in A.A.terms]
    K = A.A if isinstance(A, Scaled) else A
    return [A if isinstance(K, Kronecker) else None]


def _kind(A: LinearOperator) -> type | None:
    """The class of the matrix that has the closed forms of `A`, as far as sums tell classes apart."""
    if isinstance(A, Scaled):
        return _kind(A.A)
    if isinstance(A, FormedSum):
        kinds = {_kind(A.A), _kind(A.B)}
        return Dense if Dense in kinds else kinds.pop()
    if isinstance(A, PrincipalPart):
        return Diagonal if _kind(A.A) is Diagonal else Dense
    return next((kind for kind in (Dense, Diagonal, Eigendecomposed) if isinstance(A, kind)), None)


def _formed(A: LinearOperator) -> LinearOperator:
    """`A` as a `Dense`, `Diagonal` or `Eigendecomposed` matrix; in blocks, if it is a part of a batch of matrices."""
    if isinstance(A, Formed):
        A = A.operator
    if not isinstance(A, Scaled):
        return A
    inner = _formed(A.A)
    if isinstance(inner, BlockDiagonal):
        return A.c * inner
    if isinstance(inner, Dense):
        return Dense(A.c * inner.matrix, A.structure, inner.rtol, in_space=A.in_space, out_space=A.out_space)
    if isinstance(inner, Diagonal):
        return Diagonal(A.c * inner.vector)
    assert isinstance(inner, Eigendecomposed)
    return Eigendecomposed(inner.basis, A.c * inner.values, A.structure, inner.rtol)


def _rtol(A: Dense | Eigendecomposed, B: Dense | Eigendecomposed) -> float | None:
    """Which eigenvalues of a sum count as zero: what is known least well of both decides."""
    if A.rtol == B.rtol:
        return A.rtol
    return None if None in (A.rtol, B.rtol) else max(A.rtol or 0.0, B.rtol or 0.0)


def _basis(A: LinearOperator) -> LinearOperator:
    while not isinstance(A, Eigendecomposed):
        assert isinstance(A, (Scaled, Sum))
        A = A.A
    return A.basis


def _same_basis(P: LinearOperator, Q: LinearOperator) -> bool:
    if isinstance(P, Kronecker) and isinstance(Q, Kronecker):
        return same_tensor(P.G, Q.G) and same_tensor(P.A, Q.A)
    return same_tensor(P, Q)


def _of_blocks(A: BlockDiagonal, B: LinearOperator) -> LinearOperator | None:
    """Block by block, if the groups are the same; a diagonal is cut into blocks."""
    if _kind(B) is Diagonal:
        parts = {name: PrincipalPart(B, at, at) for name, at in A.positions().items()}
    elif isinstance(B, BlockDiagonal) and (found := _matching_blocks(A, B)) is not None:
        parts = found
    else:
        return None
    return A._with({name: block + parts[name] for name, block in A.blocks.items()}, B)


def _matching_blocks(A: BlockDiagonal, B: BlockDiagonal) -> dict[str, LinearOperator] | None:
    """For each block of `A` that of `B` for the same parameters, whatever both are called."""
    if not A.in_space.compatible(B.in_space) or type(A) is not type(B):
        return None
    theirs = {B.group(name): block for name, block in B.blocks.items()}
    found = {name: theirs.get(A.group(name)) for name in A.blocks}
    return {name: block for name, block in found.items() if block is not None} if all(found.values()) else None


# Set from here, because operators are defined without the classes that build on them.
LinearOperator._structured_sum = lambda self, other: structured_sum(self, other)
