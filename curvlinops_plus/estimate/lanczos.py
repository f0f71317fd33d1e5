"""Lanczos tridiagonalization of a symmetric matrix for several vectors at once, and the Gauss quadrature that follows.

For a vector `v` of length 1, `steps` products give nodes `θ` and weights `w` with `vᵀ f(A) v ≈ Σ w f(θ)`, exact for
polynomials `f` up to degree `2 steps - 1` (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate.columns import length
from curvlinops_plus.estimate.matrix import Matrix
from curvlinops_plus.linalg.eigendecomposition import eigh

GROSS = 0.1  # relative asymmetry that no rounding explains


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
        ValueError: If the products show that `A` is not symmetric, or not the same for the same vector.

    Warns:
        CurvatureWarning: If rounding makes `A` less symmetric than its dtype leads to expect.

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
            check_symmetric((before * W).sum(0), beta, W, before, A)
        W = W - beta * before  # before the next line: the stable order (Paige 1976)
        alpha = (V * W).sum(0)
        # A space that has ended goes on with zeros; their node, with weight 0, stays among the eigenvalues.
        alphas.append(torch.where(alive, alpha, alphas[0] if alphas else alpha))
        W = W - alpha * V
        if reorthogonalize:
            basis[:, step] = V.T
            for _ in range(2):  # twice is enough (Giraud, Langou, Rozložník 2005)
                known = basis[:, : step + 1]
                W = W - (known.mT @ (known @ W.T[..., None]))[..., 0].T
        size = length(W)
        scale = torch.maximum(scale, alpha.abs() + beta)
        alive = alive & (size > 100 * torch.finfo(V.dtype).eps * scale)
        beta = torch.where(alive, size, torch.zeros_like(size))
        before, V = V, torch.where(alive, W / size, torch.zeros_like(W))
        betas.append(beta)
    warn_of_rounding(A)
    alpha, beta = (A.undo(torch.stack(values, 1).to("cpu", torch.float64)) for values in (alphas, betas))
    return Tridiagonal(alpha, beta[:, :-1])


def check_symmetric(left: Tensor, right: Tensor, products: Tensor, vectors: Tensor, A: Matrix) -> None:
    """Refuse a matrix for which `uᵀ (A v)` and `vᵀ (A u)` differ by more than rounding.

    Where a matrix is computed from a model, terms may cancel, and rounding may be far above that of the last operation.
    So what is above it is measured again: a product that is the same for the same vector is not random, and its
    asymmetry, unless gross, counts as rounding. Then `A.eps` is raised to it, and `warn_of_rounding` has to be called.

    Args:
        left: Values of `uᵀ (A v)`, for vectors of length 1.
        right: Those of `vᵀ (A u)`.
        products: The products `A v`, one per column; what rounding may do is relative to their lengths.
        vectors: Some vectors of length 1, one per column; the first is used for measuring again.
        A: The matrix; its precision tells how large it may be.

    Raises:
        ValueError: If they differ by more than a tenth, or because products with the same vector differ.

    Cost: two products, the first time that something is to be measured again.

    Example:
        >>> from curvlinops_plus.estimate.matrix import as_matrix
        >>> A = as_matrix(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
        >>> check_symmetric(torch.tensor(1.0), torch.tensor(2.0), torch.ones(2, 1), torch.eye(2), A)
        Traceback (most recent call last):
        ValueError: Tensor(2 x 2, torch.float32, cpu) is not symmetric: ...
    """
    difference = float((left - right).abs().amax())
    size = float(length(products).amax())
    if difference <= A.eps**0.5 * size:
        if A.repeated is not None:
            A.eps = max(A.eps, difference / size if size else 0.0)
        return
    repeated = A.repeat_by(vectors[:, :1])
    unit = A.unit or 1.0
    asymmetry = (
        f"for some vectors of length 1, uᵀ(Av) and vᵀ(Au) differ by {difference * unit:.1e}, and |Av| is "
        f"{size * unit:.1e}"
    )
    if repeated > difference / 10:
        raise ValueError(
            f"{A.label} is not symmetric: {asymmetry}. Expected a symmetric matrix. Its products are not reproducible: "
            f"two with the same vector differ by {repeated * unit:.1e}. Look for dropout, a shuffled loader or batch "
            "normalization in training mode."
        )
    if difference > GROSS * size:
        raise ValueError(
            f"{A.label} is not symmetric: {asymmetry}. Expected a symmetric matrix; take `A.T @ A` or `(A + A.T) / 2`. "
            "It is neither rounding, which would be smaller, nor randomness: products with the same vector agree."
        )
    A.eps = difference / size  # above the former


def warn_of_rounding(A: Matrix) -> None:
    """Say how accurate results are, if `check_symmetric` has put an asymmetry down to rounding.

    Warns:
        CurvatureWarning: With the largest asymmetry found, relative to the length of products.
    """
    if A.repeated is not None:
        advice = "if it should be symmetric, compute in float64; " if A.dtype != torch.float64 else ""
        warnings.warn(
            f"{A.label} is symmetric only up to {A.eps:.0e}, relative to the length of its products. They are "
            f"reproducible, so this counts as rounding, and results are about that accurate, relative to the largest "
            f"eigenvalue. For better ones, {advice}if it is not symmetric by its nature, take `(A + A.T) / 2`.",
            CurvatureWarning,
            stacklevel=5,  # the caller of the estimator
        )
