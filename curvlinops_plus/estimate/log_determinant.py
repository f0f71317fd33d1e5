"""The log-determinant of a positive definite matrix from its products, by stochastic Lanczos quadrature."""

from __future__ import annotations

import warnings
from math import sqrt
from typing import Literal, overload

import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate.lanczos import lanczos
from curvlinops_plus.estimate.matrix import Matrix, MatrixLike, check_at_least, multiplying
from curvlinops_plus.estimate.probes import check_distribution, check_draws, random_vectors


@overload
def logdet(
    A: MatrixLike,
    num_probes: int = 30,
    num_steps: int = 30,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: Literal[False] = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor: ...
@overload
def logdet(
    A: MatrixLike,
    num_probes: int = 30,
    num_steps: int = 30,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: Literal[True],
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def logdet(
    A: MatrixLike,
    num_probes: int = 30,
    num_steps: int = 30,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The logarithm of the determinant, 0-d, of a positive definite matrix (Ubaru, Chen, Saad 2017).

    It is the trace of `log A`, estimated as the mean of `vᵀ (log A) v` over random vectors, each by Lanczos quadrature.
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
        progressbar: Show a bar that counts products.
        chunk_size: Random vectors to treat at once; by default as many as fit, with their `num_steps` products each,
            into 128 MiB.

    Raises:
        ValueError: If `A` is not square or not symmetric, has a negative eigenvalue, or a number is too small.
        TypeError: If `A` is no matrix of real floating-point numbers, or a count no integer.

    Warns:
        CurvatureWarning: If the quadrature has not converged: the last quarter of the steps changed the estimate by
            more than its standard error. Or if an eigenvalue counts as zero; or if rounding makes products less
            symmetric than their dtype leads to expect.

    Cost: `num_probes * num_steps` products; memory of `num_steps + 4` vectors for each random vector treated at once.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        >>> logdet(A, num_probes=1)  # 6 log 2; signs are exact for a diagonal matrix
        tensor(4.1589)
    """
    check_at_least(1, num_probes=num_probes, num_steps=num_steps)
    check_distribution(distribution)
    check_draws(num_probes, return_error, "num_probes=2")
    values, rough = [], []
    with multiplying(A, "log-determinant", None, chunk_size=chunk_size, progressbar=progressbar) as M:
        n = M.shape[0]
        steps = int(min(num_steps, n))
        for size in M.blocks(num_probes, copies=steps + 4):
            V = random_vectors(size, n, distribution, generator, M.zero)
            T = lanczos(M, V, steps, reorthogonalize=True)
            squares = V.square().sum(0).to("cpu", torch.float64)
            value = squares * _mean_log(*T.quadrature(), M)
            values.append(value)
            fewer = squares * _mean_log(*T.quadrature(max(1, steps - steps // 4)), M)
            rough.append(torch.where(T.exact | (steps == n), value, fewer))
        values, rough = torch.cat(values), torch.cat(rough)
        estimate, error = values.mean(), values.std() / sqrt(num_probes) if num_probes > 1 else values.new_zeros(())
        if torch.isinf(estimate):
            _warn(
                f"{M.label} has an eigenvalue that counts as zero (below rounding of the largest), so that its "
                "log-determinant is -inf. Add a multiple of the identity for a finite one: A.shift(delta)."
            )
        elif (change := float((estimate - rough.mean()).abs())) > max(float(error), n * M.eps**0.5):
            _warn(
                f"The quadrature of the log-determinant has not converged: the last of {steps} steps changed it by "
                f"{change:.1e}, to {float(estimate):.6g} with standard error {float(error):.1e}. Take more num_steps; "
                "if the change stays, the matrix is singular or nearly so: add a multiple of the identity to it."
            )
    estimate, error = estimate.to(M.zero), error.to(M.zero)
    return (estimate, error) if return_error else estimate


def _mean_log(nodes: Tensor, weights: Tensor, A: Matrix) -> Tensor:  # [K, steps] twice -> [K]
    """`Σ w log θ`, with -inf for nodes that count as zero."""
    rounding = A.rounding(nodes.shape[1]) * nodes.abs().amax(1, keepdim=True)
    if bool((nodes < -rounding).any()):
        raise ValueError(
            f"{A.label} has a negative eigenvalue, at most {float(nodes.min()):.1e}; expected a positive definite "
            "matrix. Add a multiple of the identity, or take a positive semi-definite curvature matrix such as the GGN."
        )
    logs = torch.where(nodes > rounding, nodes, torch.zeros_like(nodes)).log()
    return (weights.clamp(min=1e-300) * logs).sum(1)


def _warn(message: str) -> None:
    warnings.warn(message, CurvatureWarning, stacklevel=3)
