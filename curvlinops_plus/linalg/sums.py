"""Sums that keep structure: what `A + B` is where both have closed forms that fit together."""

from __future__ import annotations

from torch import Tensor

from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.deferred import Deferred
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import KroneckerSum, scaled_product
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted
from curvlinops_plus.linalg.structured import Dense, Diagonal

__all__ = ["structured_sum"]

STRUCTURED = (BlockDiagonal, Deferred, Dense, Diagonal, Eigendecomposed, Kronecker, KroneckerSum, Scaled, Shifted)


def structured_sum(A: LinearOperator, B: LinearOperator) -> LinearOperator | None:
    """`A + B` with closed forms, from the entries as they are now; None where only products are known.

    Args:
        A: An operator.
        B: One on the same space, in the same dtype and on the same device.
    """
    if not (isinstance(A, STRUCTURED) and isinstance(B, STRUCTURED)):
        return None
    A, B = _without_factor(A), _without_factor(B)
    if isinstance(A, Shifted):
        return (A.A + B).shift(A.delta)
    if isinstance(B, Shifted):
        return (A + B.A).shift(B.delta)
    for first, second in ((A, B), (B, A)):
        if isinstance(first, BlockDiagonal):
            return _of_blocks(first, second)
        if isinstance(first, Dense):
            return _of_dense(first, second)
    if isinstance(A, Diagonal) and isinstance(B, Diagonal):
        return Diagonal(_vector(A, B) + _vector(B, A))
    if isinstance(A, (Kronecker, KroneckerSum)) and isinstance(B, (Kronecker, KroneckerSum)):
        return _of_products(A, B)
    if isinstance(A, Eigendecomposed) and isinstance(B, Eigendecomposed) and A.basis is B.basis:
        return Eigendecomposed(A.basis, A.values + B.values, min(A.structure, B.structure))
    return None


def _without_factor(A: LinearOperator) -> LinearOperator:
    """`c` times a structured matrix as one of the same structure; blocks instead of what stands for them."""
    if isinstance(A, Deferred):
        return _without_factor(A.operator)
    if not isinstance(A, Scaled):
        return A
    inner, c = _without_factor(A.A), A.c
    if isinstance(inner, Dense):
        return inner._on_spaces(c * inner.matrix, A.structure, inner.rtol)
    if isinstance(inner, Diagonal):
        return Diagonal(c * inner.vector)
    if isinstance(inner, Kronecker):
        return scaled_product(inner, c)
    if isinstance(inner, Eigendecomposed):
        return Eigendecomposed(inner.basis, c * inner.values, A.structure, inner.rtol)
    if isinstance(inner, Shifted):
        return Shifted(_without_factor(Scaled(inner.A, c)), c * inner.delta)
    return A


def _of_blocks(A: BlockDiagonal, B: LinearOperator) -> LinearOperator | None:
    """Block by block, if the groups are the same; a diagonal is cut into blocks."""
    if isinstance(B, Diagonal):
        parts = {name: Diagonal(part) for name, part in A.split(B.diagonal()).items()}
    elif isinstance(B, BlockDiagonal) and (found := _matching_blocks(A, B)) is not None:
        parts = found
    else:
        return None
    return A._with({name: block + parts[name] for name, block in A.blocks.items()})


def _matching_blocks(A: BlockDiagonal, B: BlockDiagonal) -> dict[str, LinearOperator] | None:
    """For each block of `A` that of `B` for the same parameters, whatever both are called."""
    if not A.in_space.compatible(B.in_space):
        return None
    theirs = {_groups(B, name): block for name, block in B.blocks.items()}
    found = {name: theirs.get(_groups(A, name)) for name in A.blocks}
    return {name: block for name, block in found.items() if block is not None} if all(found.values()) else None


def _groups(K: BlockDiagonal, name: str) -> tuple[object, ...]:
    """What the parameters of a block are and how they make its vector."""
    layout = K.layouts[name]
    return (*K._places[name], *layout.patterns.values(), *layout.sizes.items())


def _of_dense(A: Dense, B: LinearOperator) -> LinearOperator | None:
    """All entries, of a sum with another such matrix or a diagonal one."""
    if isinstance(B, Diagonal):
        B = Dense(B.vector.diag_embed() if A.batch == B.batch else B.to_dense(), B.structure)
    if not isinstance(B, Dense):
        return None
    M, N = (A.matrix, B.matrix) if A.batch == B.batch else (A.to_dense(), B.to_dense())
    space = A if not A.in_space.is_flat else B
    structure = min(A.structure, B.structure)
    return Dense(M + N, structure, in_space=space.in_space, out_space=space.out_space)


def _vector(A: Diagonal, other: Diagonal) -> Tensor:
    return A.vector if A.batch == other.batch else A.vector.flatten()


def _of_products(A: Kronecker | KroneckerSum, B: Kronecker | KroneckerSum) -> LinearOperator | None:
    """Their terms; two with one factor in common are one product."""
    terms = [*(A.terms if isinstance(A, KroneckerSum) else [A]), *(B.terms if isinstance(B, KroneckerSum) else [B])]
    if len({(*term.batch, term.G.size, term.A.size) for term in terms}) > 1:
        return None
    if any(term.G.rows != term.G.size or term.A.rows != term.A.size for term in terms):
        return None
    if isinstance(A, Kronecker) and isinstance(B, Kronecker):
        if _same(A.G, B.G) and isinstance(total := A.A + B.A, Factor):
            return Kronecker(A.G, total)
        if _same(A.A, B.A) and isinstance(total := A.G + B.G, Factor):
            return Kronecker(total, A.A)
    return KroneckerSum(terms)


def _same(F: Factor, G: Factor) -> bool:
    """Whether both are one tensor."""
    return F is G or (isinstance(F, Dense) and isinstance(G, Dense) and F.matrix is G.matrix)


# Set from here, because operators are defined without the classes that build on them.
LinearOperator._structured_sum = lambda self, other: structured_sum(self, other)
