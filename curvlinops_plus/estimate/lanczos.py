"""Lanczos tridiagonalization for several vectors at once, the Gauss quadrature that follows, and log-determinants.

For a vector `v` of length 1, `steps` products give nodes `θ` and weights `w` with `vᵀ f(A) v ≈ Σ w f(θ)`, exact for
polynomials `f` up to degree `2 steps - 1` (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.estimate.matrix import (
    Matrix,
    MatrixLike,
    check_at_least,
    check_draws,
    estimator,
    multiplying,
    random_vectors,
)

#: Multiplies a matrix with columns, [n, K] -> [n, K].
Product: TypeAlias = Callable[[Tensor], Tensor]


class Tridiagonal(NamedTuple):
    """Symmetric tridiagonal matrices `[K, steps, steps]`, in float64 on the CPU."""

    alpha: Tensor
    """`[K, steps]`, diagonals."""
    beta: Tensor
    """`[K, steps]`, next to them, and the length of what was left; 0 from where a vector's Krylov space ended."""

    def quadrature(self, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Nodes and weights of the first steps, by default of all, `[K, steps]` each; weights sum to 1."""
        alpha = self.alpha[:, :steps]
        beta = self.beta[:, : alpha.shape[1] - 1]
        T = torch.diag_embed(alpha) + torch.diag_embed(beta, offset=1) + torch.diag_embed(beta, offset=-1)
        nodes, vectors = torch.linalg.eigh(T)
        return nodes, vectors[:, 0].square()


@torch.no_grad()
def lanczos(product: Product, V: Tensor, steps: int, *, reorthogonalize: bool) -> Tridiagonal:
    """Tridiagonalize a symmetric matrix on the Krylov space of every column of `V`.

    Args:
        product: With the matrix, `[n, K] -> [n, K]`.
        V: Starting vectors `[n, K]`; their lengths don't matter.
        steps: How many, at most `n`.
        reorthogonalize: Keep the vectors of all steps and make each new one orthogonal to them. Otherwise only two are
            kept; rounding then repeats eigenvalues that were found, with their weight shared among the copies.

    Cost: `steps` products with `K` columns each; memory of `K` times 4 vectors, or `steps + 4`.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        >>> nodes, weights = lanczos(A.matmul, torch.ones(3, 1), 3, reorthogonalize=True).quadrature()
        >>> nodes.round(decimals=3), (weights * 3).round(decimals=3)
        (tensor([[1., 2., 4.]], dtype=torch.float64), tensor([[1., 1., 1.]], dtype=torch.float64))
    """
    n, K = V.shape
    V = V / torch.linalg.vector_norm(V, dim=0)
    before, beta = torch.zeros_like(V), torch.zeros(K, dtype=V.dtype, device=V.device)
    basis = torch.empty((K, steps if reorthogonalize else 0, n), dtype=V.dtype, device=V.device)
    alive, scale = torch.ones_like(beta, dtype=torch.bool), torch.zeros_like(beta)
    alphas, betas = [], []
    for step in range(steps):
        W = product(V) - beta * before  # before the next line: the stable order (Paige 1976)
        alpha = (V * W).sum(0)
        # A space that has ended goes on with zeros; their node, with weight 0, stays among the eigenvalues.
        alphas.append(torch.where(alive, alpha, alphas[0] if alphas else alpha))
        W = W - alpha * V
        if reorthogonalize:
            basis[:, step] = V.T
            for _ in range(2):  # twice is enough (Giraud, Langou, Rozložník 2005)
                known = basis[:, : step + 1]
                W = W - (known.mT @ (known @ W.T[..., None]))[..., 0].T
        size = torch.linalg.vector_norm(W, dim=0)
        scale = torch.maximum(scale, alpha.abs() + beta)
        alive = alive & (size > 100 * torch.finfo(V.dtype).eps * scale)
        beta = torch.where(alive, size, torch.zeros_like(size))
        before, V = V, torch.where(alive, W / size, torch.zeros_like(W))
        betas.append(beta)
    alpha, beta = (torch.stack(values, 1).to("cpu", torch.float64) for values in (alphas, betas))
    return Tridiagonal(alpha, beta)


@estimator
def logdet(
    A: MatrixLike,
    num_probes: int = 30,
    num_steps: int = 30,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """An estimate of `log det A`, 0-d, for a positive definite `A`; KFAC has an exact one, `K.shift(δ).logdet`.

    It is the trace of `log A`, estimated as the mean of `vᵀ (log A) v` over random vectors, each by Lanczos quadrature
    (Ubaru, Chen, Saad 2017).
    The random vectors make an error of mean zero, which the standard error tells. The quadrature makes one that falls
    as `((√κ - 1) / (√κ + 1)) ** (2 num_steps)` with the condition number `κ`; it is 0 if `num_steps` reaches `n` or the
    number of distinct eigenvalues.

    A matrix with an eigenvalue 0, or below rounding, has the log-determinant -inf. That is returned, with a warning, if
    a quadrature meets such an eigenvalue; if none does, the quadrature has not converged, and that is what the warning
    says. Take `A.shift(delta)` or `A + delta * I` for a finite one. The result carries no gradient.

    Args:
        A: Positive definite `[n, n]`, of any kind that `hutchinson_trace` takes.
        num_probes: Number of random vectors, at least 1 (2 for a standard error).
        num_steps: Products per vector; more than `n` count as `n`.
        distribution: "rademacher" (random signs), "normal", or "sphere"; see `hutchinson_trace`.
        generator: As for `hutchinson_trace`.
        return_error: Return `(estimate, standard error)` instead of the estimate; the error of -inf is NaN.

    Raises:
        ValueError: If `A` is not square or not symmetric, has a negative eigenvalue, or a number is too small.
        TypeError: If `A` is no matrix of real floating-point numbers, or a count no integer.

    Warns:
        CurvatureWarning: If the quadrature has not converged: the last quarter of the steps changed the estimate by
            more than its standard error. Or if an eigenvalue counts as zero.

    Cost: `num_probes * num_steps` products, and two to look for symmetry; memory of `num_steps + 4` vectors for each
    random vector treated at once.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        >>> logdet(A, num_probes=1)  # 6 log 2; signs are exact for a diagonal matrix
        tensor(4.1589)
    """
    check_at_least(1, num_probes=num_probes, num_steps=num_steps)
    check_draws(num_probes, return_error)
    values, rough = [], []
    with multiplying(A) as M:
        M.require_symmetric()
        n = M.shape[0]
        steps = min(num_steps, n)
        for size in M.blocks(num_probes, copies=steps + 4):
            V = random_vectors(size, n, distribution, generator, M.zero)
            T = lanczos(M.matmat, V, steps, reorthogonalize=True)
            squares = V.square().sum(0).to("cpu", torch.float64)
            values.append(squares * _mean_log(*T.quadrature(), M))
            rough.append(squares * _mean_log(*T.quadrature(steps if steps == n else max(1, steps - steps // 4)), M))
        values, rough = torch.cat(values), torch.cat(rough)
        estimate, error = values.mean(), values.std() / sqrt(num_probes) if num_probes > 1 else values.new_zeros(())
        words = ""
        if torch.isinf(estimate):
            words = "A has an eigenvalue that counts as zero; its log-determinant is -inf. Take A.shift(delta)."
        elif (change := float((estimate - rough.mean()).abs())) > max(float(error), n * M.eps**0.5):
            words = (
                f"The quadrature of the log-determinant has not converged: the last of {steps} steps changed it by "
                f"{change:.1e}. Take more num_steps; if the change stays, A is singular or nearly so: A.shift(delta)."
            )
        if words:
            warnings.warn(words, CurvatureWarning, stacklevel=level_of_user())
    estimate, error = estimate.to(M.zero), error.to(M.zero)
    return (estimate, error) if return_error else estimate


def _mean_log(nodes: Tensor, weights: Tensor, A: Matrix) -> Tensor:  # [K, steps] twice -> [K]
    """`Σ w log θ`, with -inf for nodes that count as zero."""
    rounding = A.rounding(nodes.shape[1]) * nodes.abs().amax(1, keepdim=True)
    if bool((nodes < -rounding).any()):
        raise ValueError(
            f"A has a negative eigenvalue, at most {float(nodes.min()):.1e}; expected a positive definite matrix. "
            "Add a multiple of the identity, or take a positive semi-definite curvature matrix such as the GGN."
        )
    logs = torch.where(nodes > rounding, nodes, torch.zeros_like(nodes)).log()
    return (weights.clamp(min=1e-300) * logs).sum(1)
