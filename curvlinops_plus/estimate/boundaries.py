"""The ends of the spectrum of a symmetric matrix."""

from __future__ import annotations

import torch
from torch import Generator

from curvlinops_plus.estimate.eigen import extreme_eigenpairs
from curvlinops_plus.estimate.matrix import Matrix, MatrixLike, multiplying

Boundaries = tuple[float | None, float | None] | None


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
        A: Symmetric `[n, n]`: an operator of this package, a tensor, a NumPy array, a SciPy operator or sparse matrix.
        tol: Accuracy, relative to the largest absolute eigenvalue; 0 means machine precision.
        boundaries: What is known: `(a, None)`, `(None, b)`; it is returned as it is and costs nothing.
        generator: As for `hutchinson_trace`; for the starting vectors.
        progressbar: Show a bar that counts products.

    Raises:
        ValueError: If `A` is not square or not symmetric, its products differ for the same vector, or known
            boundaries are in the wrong order.
        NumericsError: If products are NaN or infinite.

    Warns:
        CurvatureWarning: If rounding makes products less symmetric than their dtype leads to expect; says how much.

    Cost: a Lanczos run of some ten products for a tolerance of 1e-2, more for clustered ends.

    Example:
        >>> low, high = approximate_boundaries(torch.diag(torch.tensor([-1.0, 2.0, 3.0, 5.0])))
        >>> round(low, 2), round(high, 2)
        (-1.0, 5.0)
    """
    return _approximate(A, tol, boundaries, False, generator, progressbar)


def approximate_boundaries_abs(
    A: MatrixLike,
    tol: float = 1e-2,
    boundaries: Boundaries = None,
    *,
    generator: Generator | None = None,
    progressbar: bool = False,
) -> tuple[float, float]:
    """The smallest and the largest absolute eigenvalue of a symmetric matrix, as `approximate_boundaries`.

    The smallest one is bounded from above by at most 100 more Lanczos steps: of an ill-conditioned matrix it can be
    smaller still. `A`, `tol`, `boundaries` (none negative), `generator`, `progressbar`, and errors as there.

    Example:
        >>> low, high = approximate_boundaries_abs(torch.diag(torch.tensor([-2.0, -1.0, 3.0, 5.0])))
        >>> round(low, 2), round(high, 2)
        (1.0, 5.0)
    """
    return _approximate(A, tol, boundaries, True, generator, progressbar)


def _approximate(
    A: MatrixLike, tol: float, boundaries: Boundaries, absolute: bool, generator: Generator | None, progressbar: bool
) -> tuple[float, float]:
    given = check_boundaries(boundaries, absolute)
    with multiplying(A, "boundaries", None, chunk_size=None, progressbar=progressbar) as M:
        return ends(M, given, tol, absolute, generator)


def check_boundaries(boundaries: Boundaries, absolute: bool) -> tuple[float | None, float | None]:
    """The boundaries that the user gave, in order.

    Raises:
        TypeError: If they are no pair.
        ValueError: If they are in the wrong order, or absolute and negative.
    """
    try:
        low, high = (None, None) if boundaries is None else boundaries
    except (TypeError, ValueError):
        raise TypeError(
            f"boundaries={boundaries!r} must be a pair, the smallest and the largest eigenvalue, with None for one "
            "that is not known: (0.0, None)."
        ) from None
    if low is not None and high is not None and low > high:
        raise ValueError(f"boundaries ({low}, {high}) must be the smallest and the largest eigenvalue, in this order.")
    if absolute and any(b is not None and b < 0 for b in (low, high)):
        raise ValueError(f"boundaries ({low}, {high}) must be those of the absolute eigenvalues, so not negative.")
    return low, high


def ends(
    M: Matrix, given: tuple[float | None, float | None], tol: float, absolute: bool, generator: Generator | None
) -> tuple[float, float]:
    """The smallest and the largest (absolute) eigenvalue, where they are not given."""
    low, high = given
    if low is not None and high is not None:
        return float(low), float(high)
    if absolute:
        if high is None:
            high = extreme_eigenpairs(M, 1, "largest magnitude", tol, 1000, generator).eigenvalues.abs().item()
        if low is None:
            nearest = extreme_eigenpairs(M, 1, "smallest magnitude", tol, 100, generator)
            low = min(torch.hypot(nearest.eigenvalues, nearest.residuals).item(), high)  # |A x|
        return float(low), float(high)
    which = "ends" if low is None and high is None else "smallest" if low is None else "largest"
    found = extreme_eigenpairs(M, min(2, M.shape[0]) if which == "ends" else 1, which, tol, 1000, generator)
    values = found.eigenvalues.tolist()
    return float(values[-1] if low is None else low), float(values[0] if high is None else high)
