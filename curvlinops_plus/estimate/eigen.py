"""Extreme eigenvalues of a matrix from its products, by SciPy: largest ones, ends, spectral norm,
condition number.
"""

from __future__ import annotations

import warnings
from math import inf
from typing import Any, Literal, NamedTuple

import scipy  # its modules are imported where they are first used
import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import CurvatureWarning, NumericsError, level_of_user
from curvlinops_plus.estimate.lanczos import ends, lanczos, stretches
from curvlinops_plus.estimate.matrix import (
    ColumnMap,
    Matrix,
    MatrixLike,
    estimator,
    multiplying,
    random_vectors,
)
from curvlinops_plus.options import flag, instance, integer, number

Which = Literal["largest", "smallest", "largest magnitude"]
Boundaries = tuple[float | None, float | None] | None


class Eigenpairs(NamedTuple):
    """Approximate eigenvalues and eigenvectors of a symmetric matrix `[n, n]`, and how good they
    are.
    """

    eigenvalues: Tensor
    """`[k]`, best first."""
    eigenvectors: Tensor
    """`[n, k]`, orthonormal columns."""
    residuals: Tensor
    """`[k]`, lengths of `A x - λ x`: an eigenvalue of `A` is within that distance of `λ`."""

    def __repr__(self) -> str:
        shape = list(self.eigenvectors.shape)
        numbers = f"eigenvalues={self.eigenvalues}, eigenvectors {shape}"
        return f"Eigenpairs({numbers}, residuals={self.residuals})"


def top_eigenpairs(
    A: MatrixLike,
    k: int = 1,
    largest: bool = True,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    generator: Generator | None = None,
    progressbar: bool = False,
) -> Eigenpairs:
    """The `k` largest eigenvalues of a symmetric matrix, in descending order, and their
    eigenvectors.

    By ARPACK (SciPy's `eigsh`), on the CPU in float64; products are computed where `A` is. Matrices
    with at most 20 rows, and those of which half of the eigenvalues are wanted, are formed.

    Args:
        A: Symmetric `[n, n]`, of any kind that `hutchinson_trace` takes.
        k: How many, at most `n`.
        largest: Whether to take the largest or the smallest (most negative) ones; the latter in
            ascending order.
        tol: Largest residual `|A x - λ x|`, relative to the largest absolute eigenvalue. By default
            the root of machine precision, 1.5e-8 in float64 and 3.5e-4 in float32: the error of an
            eigenvalue is about the residual's square divided by the distance to the next
            eigenvalue.
        max_iter: Largest number of products, roughly.
        generator: As for `hutchinson_trace`; for the starting vectors.
        progressbar: Show a bar that counts products.

    Returns:
        A named tuple `(eigenvalues [k], eigenvectors [n, k], residuals [k])`.

    Raises:
        ValueError: If `A` is not square or not symmetric, or `k` is not between 1 and `n`.
        NumericsError: If products are NaN or infinite, or the tolerance was not met.
        TypeError: If `A` is no matrix of real floating-point numbers.

    Cost: products as needed, and some ten for the scale of `A`; memory of `max(20, 2 k + 1)`
    vectors in float64, for the smallest ones `max(40, 2 k + 1)`.

    Example:
        >>> values, vectors, residuals = top_eigenpairs(torch.diag(torch.arange(50.0)), k=2)
        >>> values.round(decimals=3)
        tensor([49., 48.])
    """
    with multiplying(A, "symmetric", progressbar) as M:
        k = integer("k", k)
        if not 1 <= k <= M.shape[0]:
            raise ValueError(f"k ({k}) must be at least 1 and at most A's size ({M.shape[0]}).")
        end: Which = "largest" if flag("largest", largest) else "smallest"
        return extreme_eigenpairs(M, M.matmat, k, end, tol, max_iter, generator)


@estimator
def spectral_norm(
    A: MatrixLike,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest singular value of a matrix `[m, n]`, 0-d; of a symmetric one, the largest
    absolute eigenvalue.

    Through products with `A` if they are symmetric, with `AᵀA` or `AAᵀ` otherwise. Arguments as for
    `top_eigenpairs`, except:

    Args:
        A: Any shape.
        return_error: Return `(norm, error)`, with the error that the residual allows: the norm is
            at least what is returned, and at most the sum, unless the iteration missed the largest
            singular value altogether.

    Raises:
        ValueError: If `A` has not two axes.
        NotImplementedError: If `A` is not symmetric and can't multiply with its transpose.
        NumericsError: If the tolerance was not met.

    Cost: products as needed, some tens; memory of 20 vectors.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]])).round(decimals=3)
        tensor(4.)
    """
    with multiplying(A, "a matrix", progressbar) as M:
        flag("return_error", return_error)
        product, power = M.for_singular_values()
        pair = extreme_eigenpairs(M, product, 1, "largest magnitude", tol, max_iter, generator)
        size = pair.eigenvalues[0].abs()
        norm = size**power
        error = (size + pair.residuals[0]) ** power - norm
    return (norm, error) if return_error else norm


@estimator
def condition_number(
    A: MatrixLike,
    *,
    tol: float = 1e-3,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest singular value over the smallest, 0-d; inf for a singular matrix.

    By Lanczos iterations: the longest `A x` over the shortest in the Krylov space. The smallest
    singular value is the hard one: without solving with `A` it takes a number of products that
    grows with the condition number, and what is returned is a lower bound. Add a damping,
    `A.shift(delta)`, if you know one.

    A matrix whose products are symmetric is multiplied as it is; any other through `AᵀA` or `AAᵀ`,
    which can tell condition numbers only up to the inverse root of machine precision (about 1e7 in
    float64, 1e3 in float32) and returns inf beyond. Arguments as for `top_eigenpairs`, except:

    Args:
        A: Any shape; of a rectangular one, min(m, n) singular values count.
        tol: Largest residual of both ends, each relative to its own eigenvalue (of `A`, or of
            `AᵀA`).
        max_iter: Largest number of Lanczos steps.
        return_error: Return `(condition number, error)`, with the error that the residuals allow.

    Raises:
        ValueError: If `A` has not two axes.
        NotImplementedError: If `A` is not symmetric and can't multiply with its transpose.

    Warns:
        CurvatureWarning: If the tolerance was not met.

    Cost: up to `2 max_iter` products (twice as many through `AᵀA`); memory of 4 vectors.

    Example:
        >>> condition_number(torch.diag(torch.tensor([1.0, -2.0, 10.0]))).round(decimals=3)
        tensor(10.)
    """
    with multiplying(A, "a matrix", progressbar) as M:
        flag("return_error", return_error)
        number("tol", tol, low=0)
        max_iter = integer("max_iter", max_iter, low=1)
        product, power = M.for_singular_values()
        start = random_vectors(1, min(M.shape), "normal", generator, M.zero)
        steps = min(50, max_iter)
        while True:
            largest, smallest = stretches(product, start, steps)
            singular = smallest.length <= M.rounding(20) * largest.length
            # A residual is no smaller than what rounding leaves of a product.
            rounding = M.rounding(1) * largest.length
            ends = (largest, smallest)
            if singular or all(end.residual <= max(tol * end.length, rounding) for end in ends):
                break
            if steps >= max_iter:
                warnings.warn(
                    f"The condition number did not converge in {steps} steps; it is at least what "
                    "is returned.",
                    CurvatureWarning,
                    stacklevel=level_of_user(),
                )
                break
            steps = min(2 * steps, max_iter)
        value = M.zero + inf
        error = 0.0
        if not singular:
            value = M.zero + (largest.length / smallest.length) ** power
            lowest = max(smallest.length - smallest.residual, 1e-300)
            error = ((largest.length + largest.residual) / lowest) ** power - float(value)
    return (value, M.zero + error) if return_error else value


# Lanczos steps in which ends are looked for, unless there are not so many rows; they find no end
# more accurately than this.
_FEW_STEPS = 20
_FINE = 1e-4


def approximate_boundaries(
    A: MatrixLike,
    tol: float = 1e-2,
    boundaries: Boundaries = None,
    *,
    generator: Generator | None = None,
    progressbar: bool = False,
) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric matrix, approximately.

    Args:
        A: Symmetric `[n, n]`: an operator of this package, a tensor, a NumPy array, a SciPy
            operator or sparse matrix.
        tol: Accuracy, relative to the largest absolute eigenvalue; 0 means machine precision.
        boundaries: What is known: `(a, None)`, `(None, b)`; it is returned as it is.
        generator: As for `hutchinson_trace`; for the starting vectors.
        progressbar: Show a bar that counts products.

    Raises:
        ValueError: If `A` is not square or not symmetric, or known boundaries are in the wrong
            order.
        NumericsError: If products are NaN or infinite.

    Cost: 20 products for both ends, and some tens for each that these don't find within the
    tolerance.

    Example:
        >>> low, high = approximate_boundaries(torch.diag(torch.tensor([-1.0, 2.0, 3.0, 5.0])))
        >>> round(low, 2), round(high, 2)
        (-1.0, 5.0)
    """
    known = known_boundaries(boundaries)
    number("tol", tol, low=0)
    with multiplying(A, "symmetric", progressbar) as M:
        run = boundary_run(M, tol, generator) if None in known else None
        return ends_of_run(M, run, tol, known, generator)


def boundary_run(
    M: Matrix, tol: float, generator: Generator | None
) -> tuple[Tensor, Tensor] | None:
    """A short Lanczos run that both ends of the spectrum are looked for in; None where it would not
    help.
    """
    if M.shape[0] <= _FEW_STEPS or tol < _FINE:
        return None
    start = random_vectors(1, M.shape[0], "normal", generator, M.zero)
    return lanczos(M.matmat, start, _FEW_STEPS, reorthogonalize=False)


def ends_of_run(
    M: Matrix,
    run: tuple[Tensor, Tensor] | None,
    tol: float,
    known: tuple[float | None, float | None],
    generator: Generator | None,
) -> tuple[float, float]:
    """The smallest and the largest eigenvalue: known, found in a Lanczos run, or computed.

    Args:
        run: Of one vector; None if there was none.
        known: Those that are known.
    """
    boundaries = []
    found = None if run is None else ends(run[0][0], run[1][0])
    scale = 0.0 if found is None else max(abs(end.value) for end in found)
    which: tuple[Which, Which] = ("smallest", "largest")
    for k, boundary in enumerate(known):
        if boundary is not None:
            boundaries.append(float(boundary))
        elif found is not None and found[k].residual <= tol * scale:
            boundaries.append(found[k].value)
        else:
            boundaries.append(_end(M, which[k], tol, generator))
    return boundaries[0], boundaries[1]


def approximate_boundaries_abs(
    A: MatrixLike,
    tol: float = 1e-2,
    boundaries: Boundaries = None,
    *,
    generator: Generator | None = None,
    progressbar: bool = False,
) -> tuple[float, float]:
    """The smallest and the largest absolute eigenvalue of a symmetric matrix, as
    `approximate_boundaries`.

    The smallest one is bounded from above by 100 more Lanczos steps: of an ill-conditioned matrix
    it can be smaller still. `A`, `tol`, `boundaries`, `generator`, `progressbar`, and errors as
    there.

    Example:
        >>> low, high = approximate_boundaries_abs(torch.diag(torch.tensor([-2.0, -1.0, 3.0, 5.0])))
        >>> round(low, 2), round(high, 2)
        (1.0, 5.0)
    """
    known = known_boundaries(boundaries)
    number("tol", tol, low=0)
    with multiplying(A, "symmetric", progressbar) as M:
        run = None if known[1] is not None else boundary_run(M, tol, generator)
        return absolute_ends_of_run(M, run, tol, known, generator)


def absolute_ends_of_run(
    M: Matrix,
    run: tuple[Tensor, Tensor] | None,
    tol: float,
    known: tuple[float | None, float | None],
    generator: Generator | None,
) -> tuple[float, float]:
    """The smallest and the largest absolute eigenvalue; arguments as for `ends_of_run`."""
    low, high = known
    if high is None:
        found = () if run is None else ends(run[0][0], run[1][0])
        largest = max(found, key=lambda end: abs(end.value), default=None)
        if largest is not None and largest.residual <= tol * abs(largest.value):
            high = largest.value
        else:
            high = _end(M, "largest magnitude", tol, generator)
    high = abs(high)
    if low is None:
        start = random_vectors(1, M.shape[0], "normal", generator, M.zero)
        _, smallest = stretches(M.matmat, start, 100)
        low = min(smallest.length, high)
    return float(low), float(high)


def known_boundaries(boundaries: Boundaries) -> tuple[float | None, float | None]:
    """What is known of the two boundaries.

    Raises:
        ValueError: If they are in the wrong order, or no pair.
    """
    known = (None, None) if boundaries is None else boundaries
    pair = "(smallest, largest) eigenvalue, of which one may be None"
    if len(instance("boundaries", known, (tuple, list), pair)) != 2:
        raise ValueError(f"boundaries={known!r}; expected {pair}.")
    low, high = (number("boundaries", boundary, optional=True) for boundary in known)
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"boundaries ({low:g}, {high:g}) must be the smallest and the largest eigenvalue, in "
            "this order."
        )
    return low, high


def _end(M: Matrix, which: Which, tol: float, generator: Generator | None) -> float:
    pair = extreme_eigenpairs(M, M.matmat, 1, which, tol, 1000, generator)
    return pair.eigenvalues.item()


# Of the eigenvalues at an end of the spectrum these numbers are largest.
_RANK = {"largest": torch.positive, "smallest": torch.neg, "largest magnitude": torch.abs}


@torch.no_grad()
def extreme_eigenpairs(
    M: Matrix,
    product: ColumnMap,
    k: int,
    which: Which,
    tol: float | None,
    max_iter: int,
    generator: Generator | None,
) -> Eigenpairs:
    """The `k` eigenpairs at one end of the spectrum of `M`, or of its Gram matrix, which `product`
    multiplies with.
    """
    number("tol", tol, low=0, optional=True)
    max_iter = integer("max_iter", max_iter, low=1)
    n = min(M.shape)
    rank = _RANK[which]
    if n <= max(_FEW_STEPS, 2 * k):
        T = product(torch.eye(n, dtype=M.dtype, device=M.device)).double()
        eigenvalues, X = torch.linalg.eigh((T + T.T) / 2)
        X = X[:, rank(eigenvalues).argsort(descending=True)[:k]].to(M.zero)
    else:
        start = random_vectors(1, n, "normal", generator, M.zero)
        limit = M.eps**0.5 if tol is None else max(tol, M.eps)
        X = _arpack(product, start, k, which, limit, max_iter)
    AX = product(X)
    eigenvalues = (X * AX).sum(0)
    order = rank(eigenvalues).argsort(descending=True)
    X = X[:, order]
    eigenvalues = eigenvalues[order]
    residuals = torch.linalg.vector_norm(AX[:, order] - X * eigenvalues, dim=0)
    return Eigenpairs(eigenvalues, X, residuals)


def _arpack(
    product: ColumnMap, start: Tensor, k: int, which: Which, limit: float, max_iter: int
) -> Tensor:
    """Eigenvectors `[n, k]` as in `extreme_eigenpairs`, by SciPy from a vector `[n, 1]`, in any
    order.
    """
    # ARPACK's tolerance is relative to each eigenvalue: shifted, those that are wanted are not near
    # zero.
    length = stretches(product, start, 10)[0].length
    shift = length or 1.0
    sign = 1
    num_kept = 20
    end = "LA"
    if which == "smallest":
        sign = -1
        num_kept = 40
    elif which == "largest magnitude":
        end = "LM"
        if length > 0:
            shift = 0.0

    def shifted(x: Any) -> Any:
        x = torch.from_numpy(x).view(-1, 1)
        return (sign * product(x.to(start)).to(x) + shift * x).numpy()

    v0 = start[:, 0].to("cpu", torch.float64).numpy()
    n = len(v0)
    ncv = min(n, max(2 * k + 1, num_kept))
    operator: Any = scipy.sparse.linalg.LinearOperator
    S = operator((n, n), matvec=shifted, dtype=v0.dtype)
    rounds = max(1, max_iter // (ncv - k))
    try:
        X = scipy.sparse.linalg.eigsh(S, k, which=end, v0=v0, ncv=ncv, tol=limit, maxiter=rounds)[1]
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        raise NumericsError(
            f"The {k} {which} eigenvalues did not converge to {limit:.1e}: {error}."
        ) from error
    return torch.from_numpy(X.copy()).to(start)
