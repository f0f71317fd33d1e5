"""The one Kronecker product that is nearest to a sum of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["nearest_kronecker"]


def nearest_kronecker(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Factors `G, A` that minimise `|Σ_u G_u ⊗ A_u - G ⊗ A|` in the Frobenius norm.

    `vec(G) vec(A)ᵀ` is the best approximation of rank one to `Σ_u vec(G_u) vec(A_u)ᵀ` (Van Loan and Pitsianis 1993),
    so that `G` is a combination of the `G_u` and `A` one of the `A_u`; only inner products of the given matrices are
    needed to find it. If all of these are positive semi-definite, the result is too.

    Args:
        pairs: `(G_u [o, o], A_u [i, i])`, symmetric positive semi-definite.

    Returns:
        `G` and `A`; the latter is a mean of the `A_u`, with weights that add up to one.

    Cost: U² inner products, with U the number of pairs.

    Example:
        >>> eye, one = torch.eye(2), torch.ones(2, 2)
        >>> G, A = nearest_kronecker([(eye, one), (2 * eye, one)])
        >>> G
        tensor([[3., 0.],
                [0., 3.]])
    """
    (first_G, first_A), *others = pairs
    if not others:
        return first_G, first_A
    P = _inner_products([G for G, _ in pairs])
    R = _inner_products([A for _, A in pairs])
    # The coefficients of A solve an eigenproblem, P R b = s b. All entries are non-negative, and so is the leading
    # eigenvector; scaling makes the problem independent of the units of the pairs.
    scale = R.diagonal().clamp(min=torch.finfo(R.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eig((scale[:, None] ** -1) * (P @ R) * scale)
    b = vectors[:, values.real.argmax()].real.abs() * scale
    b = b / b.sum()
    norm = b @ R @ b
    a = (R @ b) / norm if norm > 0 else torch.ones_like(b)
    G = sum(float(x) * G for x, (G, _) in zip(a, pairs, strict=True))
    A = sum(float(x) * A for x, (_, A) in zip(b, pairs, strict=True))
    assert isinstance(G, Tensor)
    assert isinstance(A, Tensor)
    return G, A


def _inner_products(matrices: Sequence[Tensor]) -> Tensor:  # U matrices -> [U, U], float64 on the CPU
    return torch.tensor([[float((M * N).sum()) for N in matrices] for M in matrices], dtype=torch.float64)
