"""Lanczos tridiagonalization of a symmetric matrix for several vectors at once, and Gauss quadrature by it.

For a vector `v` of length 1, `steps` products give nodes `θ` and weights `w` with `vᵀ f(A) v ≈ Σ w f(θ)`, exact for
polynomials `f` up to degree `2 steps - 1` (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops_plus.estimate.columns import length
from curvlinops_plus.estimate.matrix import Matrix
from curvlinops_plus.linalg.numerics import eigh

__all__ = ["Tridiagonal", "check_symmetric", "lanczos"]


@dataclass(frozen=True)
class Tridiagonal:
    """Symmetric tridiagonal matrices `[K, steps, steps]`, in float64 on the CPU."""

    alpha: Tensor  # [K, steps], diagonals
    beta: Tensor  # [K, steps - 1], next to them; 0 from where a vector's Krylov space ended

    @property
    def exact(self) -> Tensor:
        """Whether a vector's Krylov space ended within the steps, so that its quadrature is exact: `[K]`."""
        return (self.beta == 0).any(1)

    def quadrature(self, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Nodes and weights, `[K, steps]` each; weights are not negative and sum to 1.

        Args:
            steps: Of the first so many steps only; by default of all.
        """
        alpha, beta = self.alpha[:, :steps], self.beta[:, : self.alpha[:, :steps].shape[1] - 1]
        T = torch.diag_embed(alpha) + torch.diag_embed(beta, offset=1) + torch.diag_embed(beta, offset=-1)
        nodes, vectors = eigh(T, "the Lanczos tridiagonal matrix")
        return nodes, vectors[:, 0].square()


@torch.no_grad()
def lanczos(A: Matrix, V: Tensor, steps: int, *, reorthogonalize: bool) -> Tridiagonal:  # V [n, K]
    """Tridiagonalize `A` on the Krylov space of every column of `V`.

    Args:
        A: Symmetric `[n, n]`.
        V: Starting vectors `[n, K]`; their lengths don't matter.
        steps: How many, at most `n`.
        reorthogonalize: Keep the vectors of all steps and make each new one orthogonal to them. Otherwise only two are
            kept; rounding then repeats eigenvalues that were found, with their weight shared among the copies.

    Raises:
        ValueError: If the products show that `A` is not symmetric.

    Cost: `steps` products with `K` columns each; memory of `K` times 4 vectors, or `steps + 4`.

    Example:
        >>> from curvlinops_plus.estimate.matrix import as_matrix
        >>> A = as_matrix(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
        >>> nodes, weights = lanczos(A, torch.ones(3, 1), 3, reorthogonalize=True).quadrature()
        >>> nodes.round(decimals=3), (weights * 3).round(decimals=3)
        (tensor([[1., 2., 4.]], dtype=torch.float64), tensor([[1., 1., 1.]], dtype=torch.float64))
    """
    n, K = V.shape
    V = V / length(V)
    before, beta = torch.zeros_like(V), torch.zeros(K, dtype=V.dtype, device=V.device)
    basis = torch.empty((K, steps if reorthogonalize else 0, n), dtype=V.dtype, device=V.device)
    alive, scale = torch.ones_like(beta, dtype=torch.bool), torch.zeros_like(beta)
    alphas, betas = [], []
    for step in range(steps):
        W = A.matmat(V)
        if step == 1:
            check_symmetric((before * W).sum(0), beta, W, A)
        W = W - beta * before  # before the next line: the stable order (Paige 1976)
        alpha = (V * W).sum(0)
        # A space that has ended goes on with zeros; their node, with weight 0, stays among the eigenvalues.
        alphas.append(torch.where(alive, alpha, alphas[0] if alphas else alpha))
        W = W - alpha * V
        if reorthogonalize:
            basis[:, step] = V.T
            for _ in range(2):  # twice is enough (Giraud, Langou, Rozložník 2005)
                seen = basis[:, : step + 1]
                W = W - (seen.mT @ (seen @ W.T[..., None]))[..., 0].T
        size = length(W)
        scale = torch.maximum(scale, alpha.abs() + beta)
        alive = alive & (size > 100 * torch.finfo(V.dtype).eps * scale)
        beta = torch.where(alive, size, torch.zeros_like(size))
        before, V = V, torch.where(alive, W / size, torch.zeros_like(W))
        betas.append(beta)
    alpha, beta = (torch.stack(values, 1).to("cpu", torch.float64) for values in (alphas, betas))
    return Tridiagonal(alpha, beta[:, :-1])


def check_symmetric(left: Tensor, right: Tensor, products: Tensor, A: Matrix) -> None:
    """Refuse a matrix for which `uᵀ (A v)` and `vᵀ (A u)` differ by more than rounding.

    Args:
        left: Values of `uᵀ (A v)`, for vectors of length 1.
        right: Those of `vᵀ (A u)`.
        products: The products `A v`, one per column; what rounding may do is relative to their lengths.
        A: The matrix; its precision tells how large it may be.

    Raises:
        ValueError: If they differ.

    Example:
        >>> from curvlinops_plus.estimate.matrix import as_matrix
        >>> A = as_matrix(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
        >>> check_symmetric(torch.tensor(1.0), torch.tensor(2.0), torch.ones(2, 1), A)
        Traceback (most recent call last):
        ValueError: Tensor(2 x 2, torch.float32, cpu) is not symmetric: ...
    """
    difference = float((left - right).abs().amax())
    size = float(length(products).amax())
    if difference > A.eps**0.5 * size:
        raise ValueError(
            f"{A.label} is not symmetric: for some vectors, uᵀ(Av) and vᵀ(Au) differ by {difference:.1e}, and |Av| is "
            f"{size:.1e}. Expected a symmetric matrix; take `A.T @ A` or `(A + A.T) / 2`. "
            "If A should be symmetric, its products are not reproducible: look for dropout, a shuffled loader or "
            "batch normalization in training mode."
        )
