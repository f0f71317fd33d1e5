"""Trace, diagonal and squared Frobenius norm of a matrix from its products with random vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from curvlinops_plus.estimate.matrix import (
    Matrix,
    MatrixLike,
    estimator,
    mean_of_draws,
    multiplying,
)
from curvlinops_plus.options import flag, integer


@estimator
def hutchinson_trace(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The trace, 0-d, as the mean of `vᵀ A v` over random vectors (Girard 1989; Hutchinson 1989).

    Unbiased for every square matrix. With signs the variance of one draw of a symmetric matrix is
    twice the sum of the squared off-diagonal entries; with normal vectors, twice the sum of all
    squared entries; on the sphere a little less (none for a multiple of the identity). The error
    falls as `num_matvecs ** -0.5`.

    Args:
        A: Square `[n, n]`: an operator of this package, a tensor, a NumPy array, a SciPy operator
            or sparse matrix.
        num_matvecs: Number of products, less than `n`.
        distribution: "rademacher" (random signs), "normal", or "sphere": directions of normal
            vectors with length √n.
        generator: Where the random numbers come from. By default PyTorch's global generator, as in
            `torch.randn`; with a generator the global one stays untouched, and draws depend on
            neither dtype nor device.
        return_error: Return `(estimate, standard error)` instead of the estimate; the error of one
            draw is NaN.
        progressbar: Show a bar that counts products.

    Raises:
        ValueError: If `A` is not square, `num_matvecs` is below 1 or not below `n`, or the
            distribution is unknown.
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
    return _estimate(
        A,
        num_matvecs,
        distribution,
        generator,
        return_error,
        progressbar,
        lambda M, V: (V * M.matmat(V)).sum(0),
    )


@estimator
def hutchpp_trace(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The trace, 0-d, by Hutch++: exact on a subspace, by random vectors on the rest.

    A third of the products finds the range of `A`, a third gives the trace on it, a third estimates
    what is left (Meyer, Musco, Musco, Woodruff 2021). Unbiased for every square matrix, and exact
    if the rank is at most `num_matvecs / 3`. The error of a positive semi-definite matrix falls as
    `1 / num_matvecs`. Arguments as for `hutchinson_trace`, except:

    Args:
        num_matvecs: Number of products, a multiple of 3 and less than `n`.
        return_error: The standard error is that of the last third, given the subspace; NaN of 3
            products.

    Raises:
        ValueError: As for `hutchinson_trace`; also if `num_matvecs` is no multiple of 3.

    Cost: `num_matvecs` products and `O(n num_matvecs²)`; memory of `2 num_matvecs` vectors.

    Example:
        >>> u = torch.arange(1.0, 101.0).sqrt()
        >>> hutchpp_trace(torch.outer(u, u), num_matvecs=3).round()  # rank 1: exact
        tensor(5050.)
    """

    def sample(M: Matrix, V: Tensor) -> Tensor:
        sketch, probes = V.chunk(2, dim=1)
        Q = torch.linalg.qr(M.matmat(sketch))[0]
        probes = probes - Q @ (Q.T @ probes)
        return (Q * M.matmat(Q)).sum() + (probes * M.matmat(probes)).sum(0)

    return _estimate(
        A, num_matvecs, distribution, generator, return_error, progressbar, sample, products=3
    )


@estimator
def xtrace(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The trace, 0-d, by XTrace: Hutch++ in which every vector serves both purposes.

    Each random vector estimates what the range of the products of all others leaves over (Epperly,
    Tropp, Webber 2024). The mean of these estimates is unbiased, does not depend on the order of
    the vectors, and is exact if the rank is below `num_matvecs / 2`. Mostly the most accurate of
    the three. With "sphere", what is left of a vector outside the range is set to its mean length,
    which "normal" leaves to chance. Arguments as for `hutchinson_trace`, except:

    Args:
        num_matvecs: Number of products, even and less than `n`.
        return_error: The standard error treats the estimates of the vectors as independent, which
            they nearly are if the eigenvalues decay; it is too small, by up to a half, if they
            don't. NaN of 2 products.

    Raises:
        ValueError: As for `hutchinson_trace`; also if `num_matvecs` is odd.

    Cost: `num_matvecs` products and `O(n num_matvecs²)`; memory of `3 num_matvecs` vectors.

    Example:
        >>> u = torch.arange(1.0, 101.0).sqrt()
        >>> xtrace(torch.outer(u, u), num_matvecs=4).round()  # rank 1: exact
        tensor(5050.)
    """

    def sample(M: Matrix, V: Tensor) -> Tensor:
        AV = M.matmat(V)
        Q, S = leave_one_out(AV)
        AQ = M.matmat(Q)
        # With Qᵢ Qᵢᵀ = Q (I - sᵢ sᵢᵀ) Qᵀ, for all i at once: trace(Qᵢᵀ A Qᵢ), then vᵢ and A vᵢ
        # without Qᵢ.
        H = Q.T @ AQ
        inside = H.trace() - (S * (H @ S)).sum(0)
        C = Q.T @ V
        C = C - S * (S * C).sum(0)
        V = V - Q @ C
        outside = (V * (AV - AQ @ C)).sum(0)
        if distribution == "sphere":
            # The length of what is left of vᵢ says nothing about A: set it to its mean.
            outside = outside * (M.shape[0] - Q.shape[1] + S.square().sum(0)) / V.square().sum(0)
        return inside + outside

    return _estimate(
        A, num_matvecs, distribution, generator, return_error, progressbar, sample, products=2
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
) -> Tensor | tuple[Tensor, Tensor]:
    """The sum of the squared entries of `A [m, n]`, 0-d, as the mean of `|A v|²` over random
    vectors.

    This is Hutchinson's estimate of the trace of `AᵀA`, or of `AAᵀ` if the matrix is wide (`m <
    n`): then the products are with `Aᵀ`. Unbiased for every matrix. Arguments as for
    `hutchinson_trace`, except:

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

    def sample(M: Matrix, V: Tensor) -> Tensor:
        m, n = M.shape
        product = M.rmatmat(V) if m < n else M.matmat(V)
        return product.square().sum(0)

    return _estimate(
        A, num_matvecs, distribution, generator, return_error, progressbar, sample, square=False
    )


@estimator
def hutchinson_diag(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The diagonal, `[n]`, as the mean of `v * (A v)` over random vectors (Bekas, Kokiopoulou, Saad
    2007).

    Unbiased for every square matrix. With signs the variance of entry `i` in one draw is the sum of
    the squared off-diagonal entries of row `i`. Arguments as for `hutchinson_trace`; the standard
    error has one value per entry.

    Raises:
        ValueError: As for `hutchinson_trace`.

    Cost: `num_matvecs` products; memory of the columns multiplied at once.

    Example:
        >>> D = torch.diag(torch.arange(4.0))
        >>> hutchinson_diag(D, num_matvecs=1)  # signs are exact for a diagonal matrix
        tensor([0., 1., 2., 3.])
    """
    return _estimate(
        A,
        num_matvecs,
        distribution,
        generator,
        return_error,
        progressbar,
        lambda M, V: V * M.matmat(V),
    )


@estimator
def xdiag(
    A: MatrixLike,
    num_matvecs: int,
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The diagonal, `[n]`, by XDiag: exact on a subspace, by random signs on the rest.

    As in XTrace, each vector has both purposes (Epperly, Tropp, Webber 2024). Unbiased for square
    matrices, and exact if the rank is below `num_matvecs / 2`; needs products with the transposed
    matrix. Arguments as for `hutchinson_trace`, except:

    Args:
        num_matvecs: Number of products, even and less than `n`; half of them are with `Aᵀ`.
        return_error: The standard error of each entry treats the estimates of the vectors as
            independent, which they nearly are; NaN of 2 products.

    Raises:
        ValueError: As for `hutchinson_trace`; also if `num_matvecs` is odd.
        NotImplementedError: If `A` can't multiply with its transpose.

    Cost: `num_matvecs` products and `O(n num_matvecs²)`; memory of `3 num_matvecs` vectors.

    Example:
        >>> u = torch.arange(16.0, 64.0).sqrt()
        >>> xdiag(torch.outer(u, u), num_matvecs=4)[:5].round()  # rank 1: exact
        tensor([16., 17., 18., 19., 20.])
    """

    def sample(M: Matrix, V: Tensor) -> Tensor:
        AV = M.matmat(V)
        Q, S = leave_one_out(AV)
        B = M.rmatmat(Q)  # Qᵀ A = Bᵀ
        # With Qᵢ Qᵢᵀ = Q (I - sᵢ sᵢᵀ) Qᵀ, for all i at once: the diagonal of Qᵢ Qᵢᵀ A, then what A
        # vᵢ has besides.
        inside = (Q * B).sum(1, keepdim=True) - (Q @ S) * (B @ S)
        C = Q.T @ AV
        C = C - S * (S * C).sum(0)
        return inside + V * (AV - Q @ C)

    return _estimate(
        A, num_matvecs, "rademacher", generator, return_error, progressbar, sample, products=2
    )


def _estimate(
    A: MatrixLike,
    num_matvecs: int,
    distribution: str,
    generator: Generator | None,
    return_error: bool,
    progressbar: bool,
    sample: Callable[[Matrix, Tensor], Tensor],
    square: bool = True,
    products: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The mean of what `sample` makes of random vectors: one fewer than products, or one if there
    is one product.

    With one product they come in blocks; with more, all together.
    """
    with multiplying(A, "square" if square else "a matrix", progressbar) as M:
        num = integer("num_matvecs", num_matvecs)
        flag("return_error", return_error)
        if not 0 < num < min(M.shape):
            raise ValueError(
                f"num_matvecs ({num}) must be at least 1 and less than A's size {M.shape}."
            )
        if num % products:
            raise ValueError(f"num_matvecs ({num}) must be divisible by {products}.")
        M.bar.reset(num)
        vectors = num // products * max(1, products - 1)
        value, error = mean_of_draws(
            M, vectors, distribution, generator, partial(sample, M), int(products == 1)
        )
    return (value, error) if return_error else value


def leave_one_out(Y: Tensor) -> tuple[Tensor, Tensor]:  # [n, N] -> [n, r], [r, N]
    """A basis `Q` of the range of `Y`, and for every column `i` the direction `sᵢ` that only this
    column adds.

    `Q (I - sᵢ sᵢᵀ) Qᵀ` is the projection on the range of all other columns. `sᵢ` has length 1, or
    is 0 where the other columns have the same range, as they do if the rank `r` is less than `N`
    and the columns are random.

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
    # Leaving out column i takes a dimension from the range exactly if no combination of columns
    # that is 0 contains it.
    needed = torch.linalg.vector_norm(Vh[rank:], dim=0) <= 10 * rounding
    return Q @ U[:, :rank], S * needed
