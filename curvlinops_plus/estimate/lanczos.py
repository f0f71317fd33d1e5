"""Lanczos iterations: the tridiagonal matrix `T` of a symmetric one on Krylov spaces, and what it
tells.

For a vector `v` of length 1, `steps` products give nodes `θ` and weights `w` with `vᵀ f(A) v ≈ Σ w
f(θ)`, exact for polynomials `f` up to degree `2 steps - 1` (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.estimate.matrix import ColumnMap


@torch.no_grad()
def lanczos(
    product: ColumnMap, V: Tensor, steps: int, *, reorthogonalize: bool
) -> tuple[Tensor, Tensor]:
    """Tridiagonalize a symmetric matrix on the Krylov space of every column of `V`.

    Args:
        product: With the matrix, `[n, K] -> [n, K]`.
        V: Starting vectors `[n, K]`; their lengths don't matter.
        steps: How many, at most `n`.
        reorthogonalize: Keep the vectors of all steps and make each new one orthogonal to them.
            Otherwise only two are kept; rounding then repeats eigenvalues that were found, with
            their weight shared among the copies.

    Returns:
        The diagonals `[K, steps]`, and the numbers next to them with, as the last, the length of
        what was left: 0 from where a vector's Krylov space ended. In float64 on the CPU.

    Cost: `steps` products with `K` columns each; memory of `K` times 4 vectors, or `steps + 4`.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        >>> T = lanczos(A.matmul, torch.ones(3, 1), 3, reorthogonalize=True)
        >>> nodes, weights = quadrature(*T)
        >>> nodes.round(decimals=3), (weights * 3).round(decimals=3)
        (tensor([[1., 2., 4.]], dtype=torch.float64), tensor([[1., 1., 1.]], dtype=torch.float64))
    """
    n, K = V.shape
    V = V / torch.linalg.vector_norm(V, dim=0)
    previous = torch.zeros_like(V)
    beta = V.new_zeros(K)
    scale = V.new_zeros(K)
    alive = torch.ones_like(beta, dtype=torch.bool)
    basis = V.new_empty(K, steps if reorthogonalize else 0, n)
    alphas, betas = [], []
    for step in range(steps):
        # The vector before is subtracted first: the stable order (Paige 1976).
        W = product(V) - beta * previous
        alpha = (V * W).sum(0)
        W = W - alpha * V
        # A space that has ended goes on with zeros; their node, with weight 0, stays among the
        # eigenvalues.
        alphas.append(alpha.where(alive, alphas[0]) if alphas else alpha)
        if reorthogonalize:
            basis[:, step] = V.T
            Q = basis[:, : step + 1]
            for _ in range(2):  # twice is enough (Giraud, Langou, Rozložník 2005)
                W = W - (Q.mT @ (Q @ W.T[..., None]))[..., 0].T
        length = torch.linalg.vector_norm(W, dim=0)
        scale = torch.maximum(scale, alpha.abs() + beta)
        alive = alive & (length > 100 * torch.finfo(V.dtype).eps * scale)
        beta = length.where(alive, 0.0)
        previous = V
        V = (W / length).where(alive, 0.0)
        betas.append(beta)
    alpha = torch.stack(alphas, 1).to("cpu", torch.float64)
    return alpha, torch.stack(betas, 1).to("cpu", torch.float64)


def quadrature(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights, `[K, steps]` each, of what `lanczos` returns; weights sum to 1."""
    beside = beta[:, :-1]
    T = alpha.diag_embed() + beside.diag_embed(offset=1) + beside.diag_embed(offset=-1)
    nodes, vectors = torch.linalg.eigh(T)
    return nodes, vectors[:, 0].square()


class End(NamedTuple):
    """An end of the spectrum as far as a Lanczos run knows it: there is an eigenvalue no further
    away than `residual`.
    """

    value: float
    residual: float


def ends(alpha: Tensor, beta: Tensor) -> tuple[End, End]:
    """The smallest and the largest eigenvalue, from one column `[steps]` each of what `lanczos`
    returns.
    """
    T = alpha.diag() + beta[:-1].diag(1) + beta[:-1].diag(-1)
    nodes, vectors = torch.linalg.eigh(T)
    residuals = (beta[-1] * vectors[-1]).abs()
    smallest, largest = map(End, nodes[[0, -1]].tolist(), residuals[[0, -1]].tolist())
    return smallest, largest


class Stretch(NamedTuple):
    """How long `A x` is for a vector `x` of length 1, and `A x - (xᵀA x) x`."""

    length: float
    residual: float


def stretches(product: ColumnMap, start: Tensor, steps: int) -> tuple[Stretch, Stretch]:
    """The longest and the shortest `A x` for `x` of length 1 in a Krylov space of a symmetric `A`.

    They are no longer and no shorter than the largest and the smallest absolute eigenvalue.
    """
    (alpha,), (beta,) = lanczos(product, start, steps, reorthogonalize=False)
    rank = int((beta != 0).cumprod(0).sum()) + 1
    alpha = alpha[:rank]
    beta = beta[:rank]
    # A Q = Q̄ T with the orthonormal basis Q of the space, and Q̄ with one vector more.
    T = torch.zeros(len(alpha) + 1, len(alpha), dtype=torch.float64)
    T.diagonal().copy_(alpha)
    T.diagonal(-1).copy_(beta)
    T.diagonal(1).copy_(beta[:-1])
    lengths, rows = torch.linalg.svd(T)[1:]
    X = rows[[0, -1]].T
    R = T @ X
    R[:-1] -= X * (X * R[:-1]).sum(0)
    residuals = torch.linalg.vector_norm(R, dim=0)
    longest, shortest = map(Stretch, lengths[[0, -1]].tolist(), residuals.tolist())
    return longest, shortest
