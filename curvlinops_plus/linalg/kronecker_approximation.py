"""The one Kronecker product that is nearest to a sum of several, or to a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import eigh


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


def nearest_to_matrix(R: Tensor) -> tuple[Tensor, Tensor]:
    """Positive semi-definite factors `G, A` that minimise `|F - G ⊗ A|` for a positive semi-definite `F`.

    Rearranged as `R[o, p, i, j] = F[(o i), (p j)]`, with pairs `(o, p)` as rows and `(i, j)` as columns, a Kronecker
    product has rank one, so the leading singular pair of `R` is the answer (Van Loan and Pitsianis 1993). Where several
    pairs tie, it is the one that alternating least squares reaches from the identity. What rounding makes indefinite is
    replaced by its absolute value, which is as near and positive semi-definite.

    Args:
        R: The matrix `F`, rearranged: `[*b, o, o, i, i]`, with a batch axis `b` one problem for each of its items.

    Returns:
        `G [*b, o, o]` and `A [*b, i, i]`, with equal mean eigenvalues.

    Raises:
        NumericsError: If an entry is NaN or infinite.

    Cost: one eigendecomposition of size `k²`, with `k` the smaller one of `o` and `i`.

    Example:
        >>> G, A = nearest_to_matrix(torch.einsum("op,ij->opij", torch.eye(2), torch.ones(2, 2)))
        >>> (torch.kron(G, A) - torch.kron(torch.eye(2), torch.ones(2, 2))).abs().max() < 1e-6
        tensor(True)
    """
    o, i = R.shape[-3], R.shape[-1]
    C = R.flatten(-4, -3).flatten(-2)  # [*b, o o, i i]
    if o <= i:
        G = _absolute(_leading(C @ C.mT, o))
        A = (C.mT @ G.flatten(-2)[..., None] / _square_norm(G)).unflatten(-2, (i, i))[..., 0]
        return balanced(G, (A + A.mT) / 2)
    A = _absolute(_leading(C.mT @ C, i))
    G = (C @ A.flatten(-2)[..., None] / _square_norm(A)).unflatten(-2, (o, o))[..., 0]
    return balanced((G + G.mT) / 2, A)


def balanced(G: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The same product `G ⊗ A` from factors of equal mean eigenvalues.

    Args:
        G: `[*b, o, o]`.
        A: `[*b, i, i]`.

    Example:
        >>> balanced(8 * torch.eye(2), torch.diag(torch.tensor([1.0, 3.0])))[1].diagonal()
        tensor([2., 6.])
    """
    mean_G, mean_A = (M.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] for M in (G, A))
    known, one = (mean_G > 0) & (mean_A > 0), torch.ones_like(mean_G)
    root = torch.where(known, mean_G, one).sqrt() / torch.where(known, mean_A, one).sqrt()
    return G / root, A * root


def _leading(M: Tensor, n: int) -> Tensor:  # [*b, n n, n n] -> [*b, n, n]
    """What powers of `M` turn the identity to: of several leading eigenvectors the projection onto all."""
    values, Q = eigh(M, "the rearranged block")
    tie = values >= values[..., -1:] * (1 - 10 * M.shape[-1] * torch.finfo(M.dtype).eps)
    start = torch.eye(n, dtype=M.dtype, device=M.device).flatten()
    return (Q @ (tie * (start @ Q))[..., None])[..., 0].unflatten(-1, (n, n))


def _absolute(M: Tensor) -> Tensor:  # [*b, n, n] -> [*b, n, n]
    """`√(M²)` of symmetric matrices."""
    values, Q = eigh((M + M.mT) / 2)
    result = (Q * values.abs()[..., None, :]) @ Q.mT
    return (result + result.mT) / 2


def _square_norm(M: Tensor) -> Tensor:  # [*b, n, n] -> [*b, 1, 1]
    square = M.square().sum((-2, -1), keepdim=True)
    return torch.where(square > 0, square, torch.ones_like(square))
