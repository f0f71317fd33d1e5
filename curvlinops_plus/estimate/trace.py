"""Trace, diagonal and squared Frobenius norm of a matrix from its products with random vectors."""

from __future__ import annotations

import torch
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


@estimator
def hutchinson_trace(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The trace, 0-d, as the mean of `vᵀ A v` over random vectors (Girard 1989; Hutchinson 1989).

    Unbiased for every square matrix. With signs the variance of one draw of a symmetric matrix is twice the sum of the
    squared off-diagonal entries; with normal vectors, twice the sum of all squared entries; on the sphere a little less
    (none for a multiple of the identity). The error falls as `num_matvecs ** -0.5`.

    Args:
        A: Square `[n, n]`: an operator of this package, a tensor, a NumPy array, a SciPy operator or sparse matrix.
        num_matvecs: Number of products, less than `n`.
        distribution: "rademacher" (random signs), "normal", or "sphere": directions of normal vectors with length √n.
        generator: Where the random numbers come from. By default PyTorch's global generator, as in `torch.randn`; with
            a generator the global one stays untouched, and draws depend on neither dtype nor device.
        return_error: Return `(estimate, standard error)` instead of the estimate.

    Raises:
        ValueError: If `A` is not square, `num_matvecs` is below 1 (below 2 for a standard error) or not below `n`, or
            the distribution is unknown.
        TypeError: If `A` is no matrix of real floating-point numbers, or a count no integer.

    Cost: `num_matvecs` products; memory of the columns multiplied at once, at most 128 MiB.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 101.0))
        >>> hutchinson_trace(A, num_matvecs=5)  # signs are exact for a diagonal matrix
        tensor(5050.)
        >>> seeded = torch.Generator().manual_seed(0)
        >>> estimate, error = hutchinson_trace(A, 50, "normal", generator=seeded, return_error=True)
        >>> bool((estimate - 5050).abs() < 3 * error)
        True
    """
    with multiplying(A) as M:
        number_of_draws(num_matvecs, M, return_error)
        trace = mean_of_draws(M, num_matvecs, distribution, generator, lambda V: (V * M.matmat(V)).sum(0))
    return (trace.value, trace.error) if return_error else trace.value


@estimator
def hutchpp_trace(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The trace, 0-d, by Hutch++: exact on a subspace, by random vectors on the rest.

    A third of the products finds the range of `A`, a third gives the trace on it, a third estimates what is left
    (Meyer, Musco, Musco, Woodruff 2021). Unbiased for every square matrix, and exact if the rank is at most
    `num_matvecs / 3`. The error of a positive semi-definite matrix falls as `1 / num_matvecs`. Arguments as for
    `hutchinson_trace`, except:

    Args:
        num_matvecs: Number of products, a multiple of 3 and less than `n`.
        return_error: The standard error is that of the last third, given the subspace; it needs `num_matvecs >= 6`.

    Raises:
        ValueError: As for `hutchinson_trace`; also if `num_matvecs` is no multiple of 3.

    Cost: `num_matvecs` products and `O(n num_matvecs²)`; memory of `2 num_matvecs` vectors.

    Example:
        >>> u = torch.arange(1.0, 101.0).sqrt()
        >>> hutchpp_trace(torch.outer(u, u), num_matvecs=3).round()  # rank 1: exact
        tensor(5050.)
    """
    with multiplying(A) as M:
        draws = number_of_draws(num_matvecs, M, return_error, divisor=3)
        V = random_vectors(2 * draws, M.shape[0], distribution, generator, M.zero)
        sketch, probes = V[:, :draws], V[:, draws:]
        Q = torch.linalg.qr(M.matmat(sketch))[0]
        inside = (Q * M.matmat(Q)).sum()
        probes = probes - Q @ (Q.T @ probes)
        AP = M.matmat(probes)
        rest = Mean((probes * (AP - Q @ (Q.T @ AP))).sum(0))
    trace = inside + rest.value
    return (trace, rest.error) if return_error else trace


@estimator
def xtrace(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The trace, 0-d, by XTrace: Hutch++ in which every vector plays both parts.

    Each random vector estimates what the range of the products of all others leaves over (Epperly, Tropp, Webber 2024).
    The mean of these estimates is unbiased, does not depend on the order of the vectors, and is exact if the rank is
    below `num_matvecs / 2`. Mostly the most accurate of the three. With "sphere", what is left of a vector outside the
    range is set to its mean length, which "normal" leaves to chance. Arguments as for `hutchinson_trace`, except:

    Args:
        num_matvecs: Number of products, even and less than `n`.
        return_error: The standard error treats the estimates of the vectors as independent, which they nearly are if
            the eigenvalues decay; it is too small, by up to a half, if they don't. It needs `num_matvecs >= 4`.

    Raises:
        ValueError: As for `hutchinson_trace`; also if `num_matvecs` is odd.

    Cost: `num_matvecs` products and `O(n num_matvecs²)`; memory of `3 num_matvecs` vectors.

    Example:
        >>> u = torch.arange(1.0, 101.0).sqrt()
        >>> xtrace(torch.outer(u, u), num_matvecs=4).round()  # rank 1: exact
        tensor(5050.)
    """
    with multiplying(A) as M:
        draws = number_of_draws(num_matvecs, M, return_error, divisor=2)
        V = random_vectors(draws, M.shape[0], distribution, generator, M.zero)
        AV = M.matmat(V)
        Q, S = leave_one_out(AV)
        AQ = M.matmat(Q)
        # With Qᵢ Qᵢᵀ = Q (I - sᵢ sᵢᵀ) Qᵀ, for all i at once: trace(Qᵢᵀ A Qᵢ), then vᵢ and A vᵢ without Qᵢ.
        H = Q.T @ AQ
        inside = H.trace() - (S * (H @ S)).sum(0)
        C = Q.T @ V
        C = C - S * (S * C).sum(0)
        V = V - Q @ C
        outside = (V * (AV - AQ @ C)).sum(0)
        if distribution == "sphere":  # the length of what is left of vᵢ says nothing about A: set it to its mean
            outside = outside * (M.shape[0] - Q.shape[1] + S.square().sum(0)) / V.square().sum(0)
        trace = Mean(inside + outside)
    return (trace.value, trace.error) if return_error else trace.value


@estimator
def hutchinson_squared_fro(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
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

    Cost: `num_matvecs` products; memory of the columns multiplied at once, at most 128 MiB.

    Example:
        >>> hutchinson_squared_fro(torch.eye(3, 5), num_matvecs=1)
        tensor(3.)
    """
    with multiplying(A, square=False) as M:
        number_of_draws(num_matvecs, M, return_error)
        multiply = M.rmatmat if M.shape[0] < M.shape[1] else M.matmat
        square = mean_of_draws(M, num_matvecs, distribution, generator, lambda V: multiply(V).square().sum(0))
    return (square.value, square.error) if return_error else square.value


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
        >>> D = torch.diag(torch.arange(4.0))
        >>> hutchinson_diag(D, num_matvecs=1)  # signs are exact for a diagonal matrix
        tensor([0., 1., 2., 3.])
    """
    with multiplying(A) as M:
        number_of_draws(num_matvecs, M, return_error)
        diagonal = mean_of_draws(M, num_matvecs, distribution, generator, lambda V: V * M.matmat(V))
    return (diagonal.value, diagonal.error) if return_error else diagonal.value


@estimator
def xdiag(
    A: MatrixLike, num_matvecs: int, *, generator: Generator | None = None, return_error: bool = False
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
        diagonal = Mean(inside + V * (AV - Q @ C))
    return (diagonal.value, diagonal.error) if return_error else diagonal.value


def leave_one_out(Y: Tensor) -> tuple[Tensor, Tensor]:  # [n, N] -> [n, r], [r, N]
    """A basis `Q` of the range of `Y`, and for every column `i` the direction `sᵢ` that only this column adds.

    `Q (I - sᵢ sᵢᵀ) Qᵀ` is the projection on the range of all other columns. `sᵢ` has length 1, or is 0 where the other
    columns have the same range, as they do if the rank `r` is less than `N` and the columns are random.

    Cost: `O(n N²)`, as one QR decomposition. Source: Epperly, Tropp, Webber 2024.

    Example:
        >>> Q, S = leave_one_out(torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]]))
        >>> (Q @ S).abs()
        tensor([[1., 0.],
                [0., 1.],
                [0., 0.]])
    """
    Q, R = torch.linalg.qr(Y)
    U, sigma, Vh = torch.linalg.svd(R)  # Vh [N, N], also if there are fewer rows than columns
    rounding = Y.shape[1] * torch.finfo(Y.dtype).eps
    rank = int((sigma > rounding * sigma.amax()).sum())
    S = Vh[:rank] / sigma[:rank, None]
    S = S / torch.linalg.vector_norm(S, dim=0).clamp(min=torch.finfo(Y.dtype).tiny)
    # Leaving out column i takes a dimension from the range exactly if no combination of columns that is 0 contains it.
    needed = torch.linalg.vector_norm(Vh[rank:], dim=0) <= 10 * rounding
    return Q @ U[:, :rank], S * needed
