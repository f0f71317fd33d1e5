"""The entries of a part of a structured matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg.deferred import Formed
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.operator import LinearOperator, Scaled
from curvlinops_plus.linalg.positioned_blocks import PositionedBlocks
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator

#: Parts of structured matrices are formed up to this number of bytes.
LARGEST = 2**31


def formed_part(A: LinearOperator, at: Tensor) -> LinearOperator:
    """`A[at, at]` of a `Dense`, `Diagonal`, `Kronecker` or `Eigendecomposed` matrix or a multiple, with its entries.

    Raises:
        NoClosedForm: If they take more than `LARGEST` bytes.
    """
    if isinstance(A, Formed):
        A = A.operator
    if isinstance(A, Scaled):
        return A.c * formed_part(A.A, at)
    factors = (A.G, A.A) if isinstance(A, Kronecker) else (A,)
    if all(isinstance(factor, (Diagonal, IdentityLinearOperator)) for factor in factors):
        return Diagonal(A.diagonal()[at])
    if len(at) and (b := _batch(A)):
        return _of_batch(A, b, at)
    if not may_be_formed(A, len(at)):
        size = _bytes(A, len(at)) / 2**30
        raise NoClosedForm(
            f"The {len(at)} x {len(at)} part of {A.label} is not formed, its entries take {size:.3g} GiB: multiply "
            "with it, or solve with CGInverseLinearOperator(A.shift(damping)). Of a Kronecker product, parts of whole "
            "rows and columns of the parameters' matrix need not be formed."
        )
    if isinstance(A, Kronecker):
        o, i = at // A.A.size, at % A.A.size
        return Dense(_entries(A.G, o) * _entries(A.A, i), A.structure)
    if isinstance(A, Eigendecomposed):
        return Dense(_of_eigendecomposed(A, at), A.structure)
    assert isinstance(A, Dense)
    return Dense(A.matrix.reshape(A.shape)[at[:, None], at], A.structure, A.rtol)


def may_be_formed(A: LinearOperator, k: int) -> bool:
    """Whether a part of `k` rows and columns is small enough."""
    return _bytes(A, k) <= LARGEST


def _bytes(A: LinearOperator, k: int) -> int:
    return k**2 * torch.finfo(A.dtype).bits // 8


def _batch(A: LinearOperator) -> int:
    """The number of matrices on the diagonal; 0 of one without a batch."""
    part = A.basis if isinstance(A, Eigendecomposed) else A
    batch = getattr(part, "batch", ())
    return batch[0] if batch else 0


def _of_batch(A: LinearOperator, b: int, at: Tensor) -> LinearOperator:
    """A part of each matrix of a batch."""
    n = A.shape[0] // b
    blocks: dict[str, LinearOperator] = {}
    positions: dict[str, Tensor] = {}
    order = (at // n).argsort(stable=True)
    counts = torch.bincount(at // n, minlength=b).tolist()
    for k, where in enumerate(order.split(counts)):
        if len(where):
            blocks[str(k)], positions[str(k)] = formed_part(_member(A, k, n), at[where] - k * n), where
    return PositionedBlocks(blocks, positions, Space.flat(len(at)))


def _member(A: Any, k: int, n: int) -> Any:
    """One matrix of a batch; one that all share is itself."""
    if isinstance(A, Eigendecomposed):
        return Eigendecomposed(_member(A.basis, k, n), A.values[k * n : (k + 1) * n], A.structure, A.rtol)
    if not A.batch:
        return A
    if isinstance(A, Kronecker):
        return Kronecker(_member(A.G, k, n), _member(A.A, k, n))
    return Diagonal(A.vector[k]) if isinstance(A, Diagonal) else Dense(A.matrix[k], A.structure, A.rtol)


def _entries(factor: Factor, at: Tensor) -> Tensor:  # [k] -> [k, k]
    """`F[at, at]`."""
    if isinstance(factor, Dense):
        return factor.matrix[at][:, at]
    return factor.diagonals()[at][:, None] * (at[:, None] == at)


def _of_eigendecomposed(E: Eigendecomposed, at: Tensor) -> Tensor:  # [k] -> [k, k]
    """The entries at `at` of `Q diag(values) Qᵀ`, for a Kronecker product `Q` without forming its rows.

    With `u` different columns among those of the parameters' matrix `[o, i]`, or rows if these are fewer, it costs
    `u² o i + k² o` operations.
    """
    Q = E.basis
    if not isinstance(Q, Kronecker):
        rows = Q.to_dense()[at]
        return (rows * E.values) @ rows.T
    G, A = Q.G.to_dense(), Q.A.to_dense()
    o, i, V = at // len(A), at % len(A), E.values.reshape(len(G), len(A))
    if len(i.unique()) > len(o.unique()):
        G, A, o, i, V = A, G, i, o, V.T
    used, which = i.unique(return_inverse=True)
    entries = V.new_empty(len(at), len(at))
    for number, column in enumerate(used.tolist()):
        T = (V * A[column]) @ A[used].T  # [o, u]
        here = (which == number).nonzero()[:, 0]
        entries[here] = G[o[here]] @ (T[:, which] * G[o].T)
    return entries
