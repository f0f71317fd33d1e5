"""Extreme eigenvalues of a matrix from its products: the largest ones, the spectral norm, the condition number.

The method is thick-restart Lanczos with full reorthogonalization (Wu and Simon 2000). As in Davidson's method, the
basis and its products are kept, so that residuals are those of the vectors returned and not estimates from a
recurrence.
"""

from __future__ import annotations

import warnings
from math import inf
from typing import Literal, NamedTuple, overload

import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.estimate.columns import inner, length, orthonormal
from curvlinops_plus.estimate.lanczos import check_symmetric, warn_of_rounding
from curvlinops_plus.estimate.matrix import Matrix, MatrixLike, check_at_least, check_whole, multiplying
from curvlinops_plus.estimate.probes import random_vectors
from curvlinops_plus.linalg.eigendecomposition import eigh

Which = Literal["largest", "smallest", "ends", "largest magnitude", "smallest magnitude"]


class Eigenpairs(NamedTuple):
    """Approximate eigenvalues and eigenvectors of a symmetric matrix `[n, n]`, and how good they are."""

    eigenvalues: Tensor
    """`[k]`, best first."""
    eigenvectors: Tensor
    """`[n, k]`, orthonormal columns."""
    residuals: Tensor
    """`[k]`, lengths of `A x - λ x`: an eigenvalue of `A` is within that distance of `λ`."""
    converged: bool
    """Whether every residual met the tolerance."""


def top_eigenpairs(
    A: MatrixLike,
    k: int = 1,
    largest: bool = True,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    generator: Generator | None = None,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Eigenpairs:
    """The `k` largest eigenvalues of a symmetric matrix, in descending order, and their eigenvectors.

    Restarted Lanczos with full reorthogonalization, on the device of `A`, from `k` random vectors at once, so that
    eigenvalues of multiplicity up to `k` are found.

    Args:
        A: Symmetric `[n, n]`, of any kind that `hutchinson_trace` takes.
        k: How many, at most `n`.
        largest: Whether to take the largest or the smallest (most negative) ones; the latter in ascending order.
        tol: Largest residual `|A x - λ x|`, relative to the largest absolute eigenvalue. By default the root of
            machine precision, 1.5e-8 in float64 and 3.5e-4 in float32: the error of an eigenvalue is about the
            residual's square divided by the distance to the next eigenvalue.
        max_iter: Largest number of products with a block of at most `k` columns.
        generator: As for `hutchinson_trace`; for the starting vectors.
        progressbar: Show a bar that counts products.
        chunk_size: Columns to multiply at once; by default as many as fit into 128 MiB.

    Returns:
        A named tuple `(eigenvalues [k], eigenvectors [n, k], residuals [k], converged)`.

    Raises:
        ValueError: If `A` is not square or not symmetric, its products differ for the same vector, or `k` is not
            between 1 and `n`.
        NumericsError: If products are NaN or infinite.
        TypeError: If `A` is no matrix of real floating-point numbers, or `k` no integer.

    Warns:
        CurvatureWarning: If the tolerance was not met; says what was reached. Or if rounding makes products less
            symmetric than their dtype leads to expect; says how much. Then the iteration stops at that accuracy.

    Cost: products as needed; for one eigenvalue as many as SciPy's `eigsh`, for several up to twice as many, but `k`
    at once; memory of 42 vectors for `k = 1`, else of `2 (k + max(40, 2 k))`.

    Example:
        >>> values, vectors, residuals, converged = top_eigenpairs(torch.diag(torch.arange(50.0)), k=2)
        >>> values.round(decimals=3), converged
        (tensor([49., 48.]), True)
    """
    with multiplying(A, "eigenvalues", None, chunk_size=chunk_size, progressbar=progressbar) as M:
        check_whole(k=k)
        if not 1 <= k <= M.shape[0]:
            raise ValueError(f"k ({k}) must be between 1 and A's size ({M.shape[0]}).")
        which = "largest" if largest else "smallest"
        pairs = extreme_eigenpairs(M, k, which, tol, max_iter, generator)
        _warn_unless(pairs, f"The {k} {which} eigenvalues of {M.label}", max_iter)
    return pairs


@overload
def spectral_norm(
    A: MatrixLike,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: Literal[False] = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor: ...
@overload
def spectral_norm(
    A: MatrixLike,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: Literal[True],
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def spectral_norm(
    A: MatrixLike,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest singular value of a matrix `[m, n]`, 0-d; of a symmetric one, the largest absolute eigenvalue.

    By Lanczos iterations on `A` if it is known to be symmetric, and on `AᵀA` or `AAᵀ` otherwise. Arguments as for
    `top_eigenpairs`, except:

    Args:
        A: Any shape.
        return_error: Return `(norm, error)`, with the error that the residual allows: the norm is at least what is
            returned, and at most the sum, unless the iteration missed the largest singular value altogether.

    Raises:
        ValueError: If `A` has not two axes or no entries.
        NotImplementedError: If `A` is not known to be symmetric and can't multiply with its transpose.

    Warns:
        CurvatureWarning: If the tolerance was not met; says what was reached.

    Cost: products as needed, some tens; memory of 42 vectors.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]])).round(decimals=3)
        tensor(4.)
    """
    with multiplying(A, "spectral norm", None, chunk_size=chunk_size, progressbar=progressbar, square=False) as M:
        symmetric = M.looks_symmetric()
        which = "largest magnitude" if symmetric else "largest"
        G = M if symmetric else M.gram()
        pairs = extreme_eigenpairs(G, 1, which, tol, max_iter, generator)
        _warn_unless(pairs, f"The spectral norm of {M.label}", max_iter, _unit(M, symmetric))
        value, residual = pairs.eigenvalues[0].abs(), pairs.residuals[0]
        if not symmetric:
            value, residual = M.undo(value.sqrt()), M.undo((value + residual).sqrt() - value.sqrt())
    return (value, residual) if return_error else value


@overload
def condition_number(
    A: MatrixLike,
    *,
    tol: float = 1e-3,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: Literal[False] = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor: ...
@overload
def condition_number(
    A: MatrixLike,
    *,
    tol: float = 1e-3,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: Literal[True],
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def condition_number(
    A: MatrixLike,
    *,
    tol: float = 1e-3,
    max_iter: int = 1000,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest singular value over the smallest, 0-d; inf for a singular matrix.

    The smallest one is the hard one: without solving with `A` it takes a number of products that grows with the
    condition number, and what is returned is a lower bound. Add a damping, `A.shift(delta)`, if you know one.

    A matrix that is known to be symmetric is multiplied as it is; any other through `AᵀA` or `AAᵀ`, which can tell
    condition numbers only up to the inverse root of machine precision (about 1e7 in float64, 1e3 in float32) and
    returns inf beyond. A tensor is known to be symmetric if it looks so, an operator if it says so; declare it by
    `Dense(A, Structure.SYMMETRIC)` or a `structure`. Arguments as for `top_eigenpairs`, except:

    Args:
        A: Any shape; of a rectangular one, min(m, n) singular values count.
        tol: Largest residual of both ends, each relative to its own eigenvalue (of `A`, or of `AᵀA`).
        return_error: Return `(condition number, error)`, with the error that the residuals allow.

    Raises:
        ValueError: If `A` has not two axes or no entries.
        NotImplementedError: If `A` is not known to be symmetric and can't multiply with its transpose.

    Warns:
        CurvatureWarning: If the tolerance was not met; says what was reached.

    Cost: up to `2 max_iter` products (twice as many through `AᵀA`); memory of 82 vectors.

    Example:
        >>> condition_number(torch.diag(torch.tensor([1.0, -2.0, 10.0]))).round(decimals=3)
        tensor(10.)
    """
    with multiplying(A, "condition number", None, chunk_size=chunk_size, progressbar=progressbar, square=False) as M:
        symmetric = M.looks_symmetric()
        G = M if symmetric else M.gram()
        top = extreme_eigenpairs(G, 1, "largest magnitude", tol, max_iter, generator)
        end = extreme_eigenpairs(G, 1, "smallest magnitude", tol, max_iter, generator)
        unit = _unit(M, symmetric)
        _warn_unless(top, f"The largest eigenvalue for the condition number of {G.label}", max_iter, unit)
        _warn_unless(end, f"The smallest eigenvalue for the condition number of {G.label}", max_iter, unit)
        large, large_by = top.eigenvalues[0].abs(), top.residuals[0]
        nearest, small_by = end.eigenvalues[0].abs(), end.residuals[0]
        small = torch.hypot(nearest, small_by)  # |A x|, never below the smallest singular value
        rounding = G.rounding(20) * large
        value = large / small if small > rounding else torch.full_like(large, inf)
        bound = (large + large_by) / (nearest - small_by).clamp(min=0)
        if not symmetric:
            value, bound = value.sqrt(), bound.sqrt()
        error = bound - value if torch.isfinite(value) else torch.zeros_like(value)
    return (value, error) if return_error else value


# With fewer columns in its basis a loose tolerance is met by eigenvalues from inside of the spectrum, too.
_LEAST_BASIS = 10


@torch.no_grad()
def extreme_eigenpairs(
    A: Matrix, k: int, which: Which, tol: float | None, max_iter: int, generator: Generator | None
) -> Eigenpairs:
    """The `k` eigenpairs of a symmetric matrix at one end or both ends of its spectrum, or nearest to zero.

    Args:
        A: Symmetric `[n, n]`.
        which: Which ones; "ends" is half of them from each.
        tol: As for `top_eigenpairs`; for the "smallest magnitude" relative to each eigenvalue itself.
        max_iter: Largest number of block products.

    Returns:
        The best that was reached, converged or not.
    """
    check_at_least(1, max_iter=max_iter)
    n = A.shape[0]
    limit = A.eps**0.5 if tol is None else tol
    room = 20 if k == 1 and which != "smallest magnitude" else max(40, 2 * k)  # halves the products of hard cases
    size = min(n, k + room)  # of the basis
    V = orthonormal(random_vectors(k, n, "normal", generator, A.zero))[0]
    AV = A.matmat(V)
    scale = A.zero
    for iteration in range(1, max_iter + 1):
        scale = torch.maximum(scale, length(AV).amax())
        S, H = _small_problem(V, AV, which, A)
        values = H.diagonal()[:k]
        X, AX = V @ S[:, :k], AV @ S[:, :k]
        R = AX - X * values
        residuals = length(R)
        target = limit * (values.abs() if which == "smallest magnitude" else scale)
        missing = residuals > torch.maximum(target, A.rounding(size) * scale)
        met = not bool(missing.any())
        if (met and V.shape[1] >= k + _LEAST_BASIS) or V.shape[1] == n or iteration == max_iter:
            break
        missing |= met
        if V.shape[1] + int(missing.sum()) > size < n:
            keep = k + room // 2  # leaves room for k
            V, AV = V @ S[:, :keep], AV @ S[:, :keep]
        new = _orthonormal_to(V, R[:, missing][:, : size - V.shape[1]])
        if new.shape[1] == 0:  # the residuals are rounding errors
            break
        V, AV = torch.cat([V, new], 1), torch.cat([AV, A.matmat(new)], 1)
    warn_of_rounding(A)
    return Eigenpairs(A.undo(values), X, A.undo(residuals), V.shape[1] == n or met)


def _small_problem(V: Tensor, AV: Tensor, which: Which, A: Matrix) -> tuple[Tensor, Tensor]:
    """Approximations from the span of `V`, best first, as columns `S`; and `(V S)ᵀ A (V S)`."""
    H = inner(V, AV)
    check_symmetric(H, H.T, AV, V, A)
    H = (H + H.T) / 2
    if which == "smallest magnitude":
        # Of all x = V s of length 1 the one with the shortest A x: Rayleigh quotients near 0 may be mixtures instead.
        S = torch.linalg.svd(orthonormal(AV)[1])[2].T.flip(1)
        return S, S.T @ H @ S
    values, S = eigh(H, f"the projection of {A.label} on a Krylov space")
    order = (values.abs() if which == "largest magnitude" else values).argsort(descending=which != "smallest")
    if which == "ends":
        order = torch.stack([order, order.flip(0)], 1).flatten()[: len(order)]
    return S[:, order], torch.diag(values[order])


def _orthonormal_to(V: Tensor, R: Tensor) -> Tensor:
    """Orthonormal columns that span the part of `R` orthogonal to `V`; fewer where that is only rounding."""
    eps = torch.finfo(R.dtype).eps
    Q = R
    for _ in range(3):
        Q = Q / length(Q).clamp(min=torch.finfo(R.dtype).tiny)
        Q = Q - V @ inner(V, Q)
        Q = Q[:, length(Q) > 100 * eps]
        if Q.shape[1] == 0:
            return Q
        Q, T = orthonormal(Q)
        Q = Q[:, T.diagonal().abs() > 100 * eps]
    return Q


def _unit(A: Matrix, symmetric: bool) -> float:
    """Of the eigenvalues that were found: those of a Gram matrix are in the square of the products' unit."""
    return 1.0 if symmetric or A.unit is None else A.unit * A.unit


def _warn_unless(pairs: Eigenpairs, what: str, max_iter: int, unit: float = 1.0) -> None:
    if not pairs.converged:
        residuals = ", ".join(f"{r * unit:.1e}" for r in pairs.residuals.tolist())
        values = ", ".join(f"{v * unit:.3e}" for v in pairs.eigenvalues.tolist())
        warnings.warn(
            f"{what} did not converge: residuals {residuals} for eigenvalues {values}. Take more than "
            f"max_iter={max_iter} products or a larger tolerance.",
            CurvatureWarning,
            stacklevel=3,
        )
