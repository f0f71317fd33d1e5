"""The Frobenius norm of a matrix from its products with random vectors."""

from __future__ import annotations

from torch import Generator, Tensor

from curvlinops_plus.estimate.matrix import MatrixLike, check_whole, multiplying
from curvlinops_plus.estimate.probes import (
    Mean,
    check_distribution,
    check_draws,
    check_num_matvecs,
    estimator,
    random_vectors,
)


@estimator
def hutchinson_squared_fro(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The sum of the squared entries of `A [m, n]`, 0-d, as the mean of `|A v|²` over random vectors.

    This is Hutchinson's estimate of the trace of `AᵀA`, or of `AAᵀ` if the matrix is wide (`m < n`): then the products
    are with `Aᵀ`. Unbiased for every matrix. Arguments as for `hutchinson_trace`, except:

    Args:
        A: Any shape `[m, n]`.
        num_matvecs: Number of products, less than `m` and `n`.

    Raises:
        ValueError: As for `hutchinson_trace`, but `A` need not be square.
        NotImplementedError: If `A` is wide and can't multiply with its transpose.

    Cost: `num_matvecs` products; memory of the columns multiplied at once.

    Example:
        >>> import torch
        >>> hutchinson_squared_fro(torch.eye(3, 5), num_matvecs=1)
        tensor(3.)
    """
    check_distribution(distribution)
    with multiplying(
        A, "squared Frobenius norm", num_matvecs, chunk_size=chunk_size, progressbar=progressbar, square=False
    ) as M:
        check_whole(num_matvecs=num_matvecs)
        m, n = M.shape
        if num_matvecs >= min(m, n):
            raise ValueError(
                f"num_matvecs ({num_matvecs}) must be less than the minimum dimension of A, got shape {M.shape}: with "
                "that many products you have the whole matrix, as `A.to_dense()` or `A @ identity`."
            )
        check_num_matvecs(num_matvecs, min(m, n))
        check_draws(num_matvecs, return_error, "num_matvecs=2")
        multiply = M.rmatmat if m < n else M.matmat
        square = Mean()
        for size in M.blocks(num_matvecs):
            V = random_vectors(size, min(m, n), distribution, generator, M.zero)
            square.update(multiply(V).square().sum(0))
    value = M.undo(M.undo(square.value))  # twice: it is quadratic in the products
    return (value, M.undo(M.undo(square.error))) if return_error else value
