"""Log-determinant and densities of the eigenvalues of a symmetric matrix, from Lanczos iterations.

Densities are those of Papyan 2020, "Traces of class/cross-class structure pervade deep learning
spectra" (JMLR 21). Lanczos iterations from random vectors give nodes and weights; each node becomes
a Gaussian bump, and the bumps make a density on a grid. Their width goes with the number of steps:
`ncv` steps can tell `ncv` bumps apart on the width of the spectrum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import inf, log, sqrt

import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.estimate.eigen import (
    Boundaries,
    absolute_ends_of_run,
    ends_of_run,
    known_boundaries,
)
from curvlinops_plus.estimate.lanczos import lanczos, quadrature
from curvlinops_plus.estimate.matrix import (
    Matrix,
    MatrixLike,
    estimator,
    mean_of_draws,
    multiplying,
)
from curvlinops_plus.options import flag, integer, number


@estimator
def logdet(
    A: MatrixLike,
    num_probes: int = 30,
    num_steps: int = 30,
    distribution: str = "rademacher",
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """An estimate of `log det A`, 0-d, for a positive definite `A`; KFAC has an exact one,
    `K.shift(δ).logdet`.

    It is the trace of `log A`, estimated as the mean of `vᵀ (log A) v` over random vectors, each by
    Lanczos quadrature (Ubaru, Chen, Saad 2017). The random vectors make an error of mean zero,
    which the standard error tells. The quadrature makes one that falls as `((√κ - 1) / (√κ + 1)) **
    (2 num_steps)` with the condition number `κ`; it is 0 if `num_steps` reaches `n` or the number
    of distinct eigenvalues.

    A matrix with an eigenvalue 0, or below rounding, has the log-determinant -inf. That is returned
    if a quadrature meets such an eigenvalue; if none does, the quadrature has not converged, and a
    warning says so. Take `A.shift(delta)` for a finite one. The result carries no gradient.

    Args:
        A: Positive definite `[n, n]`, of any kind that `hutchinson_trace` takes.
        num_probes: Number of random vectors.
        num_steps: Products per vector; more than `n` count as `n`.
        distribution: "rademacher" (random signs), "normal", or "sphere"; see `hutchinson_trace`.
        generator: As for `hutchinson_trace`.
        return_error: Return `(estimate, standard error)` instead of the estimate; NaN of -inf, and
            of one vector.
        progressbar: Show a bar that counts products.

    Raises:
        ValueError: If `A` is not square or not symmetric, or has a negative eigenvalue.
        TypeError: If `A` is no matrix of real floating-point numbers.

    Warns:
        CurvatureWarning: If the quadrature has not converged: the last quarter of the steps changed
            the estimate by more than its standard error.

    Cost: `num_probes * num_steps` products, and two to look for symmetry; memory of `num_steps + 4`
    vectors for each random vector treated at once.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        >>> logdet(A, num_probes=1)  # 6 log 2; signs are exact for a diagonal matrix
        tensor(4.1589)
    """
    with multiplying(A, "symmetric", progressbar) as M:
        n = M.shape[0]
        steps = min(integer("num_steps", num_steps, low=1), n)
        num_probes = integer("num_probes", num_probes, low=1)
        M.bar.reset(num_probes * steps)
        flag("return_error", return_error)
        fewer = steps if steps == n else max(1, steps - steps // 4)

        def sample(V: Tensor) -> Tensor:  # -> [2, k], with all and with fewer steps
            alpha, beta = lanczos(M.matmat, V, steps, reorthogonalize=True)
            logs = torch.stack([_log_form(M, alpha[:, :t], beta[:, :t]) for t in (steps, fewer)])
            return V.square().sum(0).to(logs) * logs

        (estimate, rough), (error, _) = mean_of_draws(
            M, num_probes, distribution, generator, sample, steps + 4
        )
        estimate = estimate.nan_to_num(nan=-inf, neginf=-inf)  # NaN: -inf in several blocks
        change = float((estimate - rough).abs())
        if change > max(float(error.nan_to_num()), n * M.eps**0.5):
            warnings.warn(
                f"The log-determinant has not converged: the last of {steps} steps changed it by "
                f"{change:.1e}. Take more num_steps; if the change stays, A is singular or nearly "
                "so: A.shift(delta).",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
    estimate = estimate.to(M.zero)
    return (estimate, error.to(M.zero)) if return_error else estimate


def _log_form(M: Matrix, alpha: Tensor, beta: Tensor) -> Tensor:
    """`vᵀ (log A) v` of the vectors `v` of length 1 that a Lanczos run began with, `[K]`."""
    nodes, weights = quadrature(alpha, beta)
    rounding = M.rounding(nodes.shape[1]) * nodes.abs().amax(1, keepdim=True)
    if bool((nodes < -rounding).any()):
        raise ValueError(
            f"A has a negative eigenvalue, at most {float(nodes.min()):.1e}; expected a positive "
            "definite matrix, such as A.shift(delta)."
        )
    logs = nodes.where(nodes > rounding, 0.0).log()
    return (weights.clamp(min=1e-300) * logs).sum(1)


def lanczos_approximate_spectrum(
    A: MatrixLike,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 3.0,
    boundaries: Boundaries = None,
    margin: float = 0.05,
    boundaries_tol: float = 1e-2,
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> tuple[Tensor, ...]:
    """The density of the eigenvalues of a symmetric matrix, smoothed (Papyan 2020, algorithm 2).

    Args:
        A: Symmetric `[n, n]`: an operator of this package, a tensor, a NumPy array, a SciPy
            operator or sparse matrix.
        ncv: Number of Lanczos steps, at least 2; more than `n` give the smoothing of `ncv` and the
            products of `n`.
        num_points: Number of grid points.
        num_repeats: Number of random vectors to average over.
        kappa: Width of the bumps, more than 1; larger is sharper. Of `ncv` evenly spread bumps,
            neighbours meet at `1 / kappa` of their height.
        boundaries: Smallest and largest eigenvalue, as far as known: `(a, b)`, `(a, None)`, `(None,
            b)`, or None.
        margin: How far the grid goes beyond the boundaries, relative to their distance.
        boundaries_tol: Accuracy to which boundaries that are not given are computed, relative to
            the largest absolute eigenvalue; 0 means machine precision.
        generator: Where the random vectors come from, by default PyTorch's global generator. See
            `hutchinson_trace`.
        return_error: Return the standard error of the density too, by the spread over the random
            vectors; NaN of one.
        progressbar: Show bars that count products: those that find boundaries, then the others.

    Returns:
        The grid and the density on it (and its error), `[num_points]` each, on the device and in
        the dtype of `A`. The density has integral 1 (what the margin cuts off aside).

    Raises:
        ValueError: If `A` is not square or not symmetric, or known boundaries are in the wrong
            order.
        NumericsError: If products are NaN or infinite.
        TypeError: If `A` is no matrix of real floating-point numbers.

    Cost: `ncv * num_repeats` products, and some tens for each boundary that the first `ncv` don't
    find within `boundaries_tol`; memory of 20 vectors.

    Example:
        >>> A = torch.diag(torch.cat([torch.zeros(90), torch.ones(10)]))
        >>> seeded = torch.Generator().manual_seed(0)
        >>> spectrum = lanczos_approximate_spectrum(A, ncv=20, num_repeats=50, generator=seeded)
        >>> grid, density = spectrum
        >>> mass = torch.trapezoid(density, grid)
        >>> above = torch.trapezoid(density[grid > 0.5], grid[grid > 0.5])
        >>> round(mass.item(), 1), round(above.item(), 1)
        (1.0, 0.1)
    """
    cached = LanczosApproximateSpectrumCached(
        A, ncv, boundaries, boundaries_tol, generator=generator, progressbar=progressbar
    )
    return cached.approximate_spectrum(
        num_repeats, num_points, kappa, margin, return_error=return_error
    )


def lanczos_approximate_log_spectrum(
    A: MatrixLike,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 1.04,
    boundaries: Boundaries = None,
    margin: float = 0.05,
    boundaries_tol: float = 1e-2,
    epsilon: float = 1e-5,
    *,
    generator: Generator | None = None,
    return_error: bool = False,
    progressbar: bool = False,
) -> tuple[Tensor, ...]:
    """The density of `|λ| + epsilon` on a logarithmic grid, smoothed there (Papyan 2020, section
    C.7).

    Arguments as for `lanczos_approximate_spectrum`, except:

    Args:
        kappa: As there, with another default.
        boundaries: Smallest and largest absolute eigenvalue, as far as known. The smallest is hard
            to compute: of a matrix with many small ones it is what 100 products reach, which may be
            above the true one.
        boundaries_tol: Relative accuracy of each boundary.
        epsilon: Added to `|λ|`, in units of the eigenvalues; the grid begins near it if the matrix
            is singular.

    Returns:
        The grid, of constant ratio, and the density with respect to the grid's values (not to their
        logarithm), with integral 1.

    Raises:
        ValueError: As there; also if a boundary is negative.

    Cost: as there, and up to 100 products for the smallest boundary; memory of 82 vectors.

    Example:
        >>> A = torch.diag(torch.logspace(-3, 0, 100))
        >>> grid, density = lanczos_approximate_log_spectrum(A, ncv=50, boundaries=(1e-3, 1.0))
        >>> bool(grid[0] < 1.1e-3 and grid[-1] > 1), round(torch.trapezoid(density, grid).item(), 1)
        (True, 1.0)
    """
    cached = LanczosApproximateLogSpectrumCached(
        A, ncv, boundaries, boundaries_tol, generator=generator, progressbar=progressbar
    )
    return cached.approximate_log_spectrum(
        num_repeats, num_points, kappa, margin, epsilon, return_error=return_error
    )


class _LanczosRuns:
    """Boundaries and Lanczos runs of a matrix, computed once."""

    _find: Callable[..., tuple[float, float]]

    def __init__(
        self,
        A: MatrixLike,
        ncv: int,
        boundaries: Boundaries = None,
        boundaries_tol: float = 1e-2,
        *,
        generator: Generator | None = None,
        progressbar: bool = False,
    ) -> None:
        self.A = A
        self.ncv = integer("ncv", ncv, low=2)
        number("boundaries_tol", boundaries_tol, low=0)
        known = known_boundaries(boundaries)
        self._generator = generator
        self._progressbar = progressbar
        self._runs: list[tuple[Tensor, Tensor]] = []  # nodes and weights, [steps] each
        with multiplying(A, "symmetric", progressbar) as M:
            run = None
            if None in known:  # the first run may know the ends, too
                (V,) = M.draws(1, "normal", generator, copies=5)
                run = self._run(M, V)
            self.boundaries = self._find(M, run, boundaries_tol, known, generator)

    def _run(self, M: Matrix, V: Tensor) -> tuple[Tensor, Tensor]:
        """Lanczos runs from the columns of `V`, of which nodes and weights are kept."""
        T = lanczos(M.matmat, V, min(self.ncv, M.shape[0]), reorthogonalize=False)
        self._runs += zip(*quadrature(*T), strict=True)
        return T

    def _approximate(
        self,
        num_repeats: int,
        num_points: int,
        kappa: float,
        margin: float,
        return_error: bool,
        epsilon: float | None = None,
    ) -> tuple[Tensor, ...]:
        """The grid with margins, and the mean over runs of the density of bumps at nodes, or at
        their logarithms; with its standard error if that is asked for.
        """
        flag("return_error", return_error)
        num_repeats = integer("num_repeats", num_repeats, low=1)
        num_points = integer("num_points", num_points, low=1)
        number("kappa", kappa, above=1)
        number("margin", margin, low=0)
        number("epsilon", epsilon, low=0, optional=True)
        missing = max(num_repeats - len(self._runs), 0)
        shows = self._progressbar and missing > 0
        with multiplying(self.A, "square", shows) as M:
            M.bar.reset(missing * min(self.ncv, M.shape[0]))
            for V in M.draws(missing, "normal", self._generator, copies=5):
                self._run(M, V)
        low, high = self.boundaries
        if epsilon is None:
            unit = max(abs(low), abs(high)) or 1.0
        else:
            low = log(low + epsilon)
            high = log(high + epsilon)
            unit = 1.0
        if high - low <= 100 * M.eps * unit:  # a single eigenvalue: its bump needs some room
            low -= unit / 2
            high += unit / 2
        room = margin * (high - low)
        low -= room
        high += room
        grid = torch.linspace(low, high, num_points, dtype=torch.float64, device="cpu")
        sigma = (high - low) / (self.ncv - 1) / sqrt(8 * log(kappa))
        of_runs = torch.zeros(num_repeats, num_points, dtype=torch.float64, device="cpu")
        density = torch.zeros_like(grid)
        for run, (nodes, weights) in zip(of_runs, self._runs):
            if epsilon is not None:
                nodes = (nodes.abs() + epsilon).log()
            run += weights @ torch.exp(-(((grid - nodes[:, None]) / sigma) ** 2) / 2)
            density += run
        curves = [density]
        if return_error:
            # n times the standard error of a mean of n; of one there is none
            deviation = of_runs.std(0) if num_repeats > 1 else grid * torch.nan
            curves.append(deviation * sqrt(num_repeats))
        for curve in curves:
            curve /= sigma * sqrt(2 * torch.pi) * num_repeats
            if epsilon is not None:
                # With respect to λ, not to log λ: dλ = λ d(log λ).
                curve /= grid.exp()
        if epsilon is not None:
            grid = grid.exp()
        return tuple(values.to(M.zero) for values in (grid, *curves))


class LanczosApproximateSpectrumCached(_LanczosRuns):
    """The density of the eigenvalues of a symmetric matrix, for several settings at the cost of
    one.

    The boundaries are computed at construction, with the first Lanczos run, other runs when they
    are first needed; another resolution or width costs no product. Attribute `boundaries` has the
    two that are used. Arguments as for `lanczos_approximate_spectrum`.

    Example:
        >>> cached = LanczosApproximateSpectrumCached(torch.diag(torch.arange(50.0)), ncv=20)
        >>> sharp = cached.approximate_spectrum(num_repeats=2, kappa=10.0)
        >>> smooth = cached.approximate_spectrum(num_repeats=2, kappa=1.5)  # no more products
        >>> bool(sharp[1].max() > smooth[1].max())
        True
    """

    _find = staticmethod(ends_of_run)

    def approximate_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 3.0,
        margin: float = 0.05,
        *,
        return_error: bool = False,
    ) -> tuple[Tensor, ...]:
        """The grid and the density; arguments as for `lanczos_approximate_spectrum`.

        Of `num_repeats` runs the first ones stay the same when more are asked for.
        """
        return self._approximate(num_repeats, num_points, kappa, margin, return_error)


class LanczosApproximateLogSpectrumCached(_LanczosRuns):
    """The density of `|λ| + epsilon` on a logarithmic grid, for several settings at the cost of
    one.

    As `LanczosApproximateSpectrumCached`; `boundaries` are those of `|λ|`. Arguments as for
    `lanczos_approximate_log_spectrum`.

    Example:
        >>> A = torch.diag(torch.logspace(-3, 0, 50))
        >>> cached = LanczosApproximateLogSpectrumCached(A, ncv=20)
        >>> grid, density = cached.approximate_log_spectrum(num_repeats=2, num_points=100)
        >>> grid.shape, density.shape
        (torch.Size([100]), torch.Size([100]))
    """

    _find = staticmethod(absolute_ends_of_run)

    def approximate_log_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 3.0,
        margin: float = 0.05,
        epsilon: float = 1e-5,
        *,
        return_error: bool = False,
    ) -> tuple[Tensor, ...]:
        """The grid and the density; arguments as for `lanczos_approximate_log_spectrum`, with
        another default `kappa`.

        Of `num_repeats` runs the first ones stay the same when more are asked for.
        """
        return self._approximate(num_repeats, num_points, kappa, margin, return_error, epsilon)
