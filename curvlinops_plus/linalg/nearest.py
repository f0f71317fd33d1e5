"""The Kronecker product that is nearest to a sum of Kronecker products, or to a matrix.

Rearranged so that pairs of indices `(o, p)` of `G` are rows and pairs `(i, j)` of `A` columns, a
Kronecker product `G ⊗ A` is the matrix `vec(G) vec(A)ᵀ` of rank one: the best approximation of rank
one is the answer (Van Loan and Pitsianis 1993).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import eigh


def nearest_kronecker(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Factors `G, A` that minimise `|Σ_u G_u ⊗ A_u - G ⊗ A|` in the Frobenius norm.

    `vec(G) vec(A)ᵀ` is the best approximation of rank one to `Σ_u vec(G_u) vec(A_u)ᵀ` (Van Loan and
    Pitsianis 1993), so that `G` is a combination of the `G_u` and `A` one of the `A_u`; only inner
    products of the given matrices are needed to find it. If all of these are positive
    semi-definite, the result is too.

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
    if len(pairs) == 1:
        return pairs[0]
    Gs = [G for G, _ in pairs]
    As = [A for _, A in pairs]
    P = _inner_products(Gs)
    R = _inner_products(As)
    # The coefficients of A solve an eigenproblem, P R b = s b. All entries are non-negative, and so
    # is the leading eigenvector; scaling makes the problem independent of the units of the pairs.
    scale = R.diagonal().clamp(min=torch.finfo(R.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eig((scale[:, None] ** -1) * (P @ R) * scale)
    b = vectors[:, values.real.argmax()].real.abs() * scale
    b = b / b.sum()
    # Given A = Σ b_u A_u, the coefficients of G are those of least squares: a = R b / (bᵀ R b).
    norm = b @ R @ b
    a = (R @ b) / norm if norm > 0 else torch.ones_like(b)
    return _combination(a, Gs), _combination(b, As)


def _inner_products(matrices: Sequence[Tensor]) -> Tensor:  # -> [U, U], float64 on the CPU
    products = [[float((M * N).sum()) for N in matrices] for M in matrices]
    return torch.tensor(products, dtype=torch.float64)


def _combination(coefficients: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(matrices[0])
    for c, M in zip(coefficients.tolist(), matrices, strict=True):
        total = total + c * M
    return total


def nearest_to_matrix(R: Tensor) -> tuple[Tensor, Tensor]:
    """Positive semi-definite factors `G, A` that minimise `|F - G ⊗ A|` for a positive
    semi-definite `F`.

    Rearranged as `R[o, p, i, j] = F[(o i), (p j)]`, with pairs `(o, p)` as rows and `(i, j)` as
    columns, a Kronecker product has rank one, so the leading singular pair of `R` is the answer
    (Van Loan and Pitsianis 1993). Where several pairs tie, it is the one that alternating least
    squares reaches from the identity. What rounding makes indefinite is replaced by its absolute
    value, which is as near and positive semi-definite.

    Args:
        R: The matrix `F`, rearranged: `[*b, o, o, i, i]`, with a batch axis `b` one problem for
            each of its items.

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
    o = R.shape[-3]
    i = R.shape[-1]
    C = R.flatten(-4, -3).flatten(-2)  # [*b, o o, i i]
    if o <= i:
        G = _absolute(_leading(C @ C.mT, o))
        A = _partner(C.mT, G, i)
    else:
        A = _absolute(_leading(C.mT @ C, i))
        G = _partner(C, A, o)
    return balanced(G, A)


def _leading(M: Tensor, n: int) -> Tensor:  # [*b, n n, n n] -> [*b, n, n]
    """The projection of the identity onto all leading eigenvectors of `M`: powers of `M` turn it to
    that.
    """
    values, Q = eigh(M, "the rearranged block")
    tie = values >= values[..., -1:] * (1 - 10 * M.shape[-1] * torch.finfo(M.dtype).eps)
    start = torch.eye(n, dtype=M.dtype, device=M.device).flatten()
    projection = Q @ (tie * (start @ Q))[..., None]
    return projection[..., 0].unflatten(-1, (n, n))


def _absolute(M: Tensor) -> Tensor:  # [*b, n, n] -> [*b, n, n]
    """`√(M²)` of symmetric matrices."""
    # Q |v| Qᵀ, made symmetric to the last bit.
    values, Q = eigh((M + M.mT) / 2)
    root = (Q * values.abs()[..., None, :]) @ Q.mT
    return (root + root.mT) / 2


def _partner(C: Tensor, F: Tensor, n: int) -> Tensor:  # [*b, n n, m m], [*b, m, m] -> [*b, n, n]
    """The factor that fits the other one best: `C vec(F) / ‖F‖²`."""
    square = F.square().sum((-2, -1), keepdim=True)
    square = torch.where(square > 0, square, torch.ones_like(square))
    M = (C @ F.flatten(-2)[..., None] / square).unflatten(-2, (n, n))[..., 0]
    return (M + M.mT) / 2


def balanced(G: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The same product `G ⊗ A` from factors of equal mean eigenvalues.

    Args:
        G: `[*b, o, o]`.
        A: `[*b, i, i]`.

    Example:
        >>> balanced(8 * torch.eye(2), torch.diag(torch.tensor([1.0, 3.0])))[1].diagonal()
        tensor([2., 6.])
    """
    # (G / r) ⊗ (r A) with r² = mean_G / mean_A; as they are if a mean is not positive.
    mean_G = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    mean_A = A.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    usable = (mean_G > 0) & (mean_A > 0)
    ones = torch.ones_like(mean_G)
    root = torch.where(usable, mean_G, ones).sqrt() / torch.where(usable, mean_A, ones).sqrt()
    return G / root, A * root
