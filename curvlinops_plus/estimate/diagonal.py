"""The diagonal of a matrix from its products with random vectors."""

from __future__ import annotations

from torch import Generator, Tensor

from curvlinops_plus.estimate.matrix import (
    MatrixLike,
    Mean,
    estimator,
    mean_of_draws,
    multiplying,
    number_of_draws,
    random_vectors,
)
from curvlinops_plus.estimate.trace import leave_one_out


@estimator
def hutchinson_diag(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The diagonal, `[n]`, as the mean of `v * (A v)` over random vectors (Bekas, Kokiopoulou, Saad 2007).

    Unbiased for every square matrix. With signs the variance of entry `i` in one draw is the sum of the squared
    off-diagonal entries of row `i`. Arguments as for `hutchinson_trace`; the standard error has one value per entry.

    Raises:
        ValueError: As for `hutchinson_trace`.

    Cost: `num_matvecs` products; memory of the columns multiplied at once.

    Example:
        >>> import torch
        >>> hutchinson_diag(torch.diag(torch.arange(4.0)), num_matvecs=1)  # signs are exact for a diagonal matrix
        tensor([0., 1., 2., 3.])
    """
    with multiplying(A) as M:
        number_of_draws(num_matvecs, M, return_error)
        diagonal = mean_of_draws(M, num_matvecs, distribution, generator, lambda V: V * M.matmat(V))
    return (diagonal.value, diagonal.error) if return_error else diagonal.value


@estimator
def xdiag(
    A: MatrixLike,
    num_matvecs: int,
    *,
    generator: Generator | None = None,
    return_error: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The diagonal, `[n]`, by XDiag: exact on a subspace, by random signs on the rest.

    As XTrace, every vector plays both parts (Epperly, Tropp, Webber 2024). Unbiased for every square matrix, and exact
    if the rank is below `num_matvecs / 2`; needs products with the transposed matrix.
    Arguments as for `hutchinson_trace`, except:

    Args:
        num_matvecs: Number of products, even and less than `n`; half of them are with `Aᵀ`.
        return_error: The standard error of each entry treats the estimates of the vectors as independent, which they
            nearly are; it needs `num_matvecs >= 4`.

    Raises:
        ValueError: As for `hutchinson_trace`; also if `num_matvecs` is odd.
        NotImplementedError: If `A` can't multiply with its transpose.

    Cost: `num_matvecs` products and `O(n num_matvecs²)`; memory of `3 num_matvecs` vectors.

    Example:
        >>> import torch
        >>> u = torch.arange(16.0, 64.0).sqrt()
        >>> xdiag(torch.outer(u, u), num_matvecs=4)[:5].round()  # rank 1: exact
        tensor([16., 17., 18., 19., 20.])
    """
    with multiplying(A) as M:
        draws = number_of_draws(num_matvecs, M, return_error, divisor=2)
        V = random_vectors(draws, M.shape[0], "rademacher", generator, M.zero)
        AV = M.matmat(V)
        Q, S = leave_one_out(AV)
        B = M.rmatmat(Q)  # Qᵀ A = Bᵀ
        # With Qᵢ Qᵢᵀ = Q (I - sᵢ sᵢᵀ) Qᵀ, for all i at once: the diagonal of Qᵢ Qᵢᵀ A, then what A vᵢ has besides.
        inside = (Q * B).sum(1, keepdim=True) - (Q @ S) * (B @ S)
        C = Q.T @ AV
        C = C - S * (S * C).sum(0)
        diagonal = Mean()
        diagonal.update(inside + V * (AV - Q @ C))
    return (diagonal.value, diagonal.error) if return_error else diagonal.value
