"""Densities of the eigenvalues of a symmetric matrix from its products.

After Papyan 2020, "Traces of class/cross-class structure pervade deep learning spectra" (JMLR 21). Lanczos iterations
from random vectors give nodes and weights; each node becomes a Gaussian bump, and the bumps make a density on a grid.
Their width goes with the number of steps: `ncv` steps can tell `ncv` bumps apart on the width of the spectrum.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import Any

import torch
from torch import Generator, Tensor

from curvlinops_plus.estimate.eigen import Boundaries, approximate_boundaries, approximate_boundaries_abs
from curvlinops_plus.estimate.lanczos import lanczos
from curvlinops_plus.estimate.matrix import MatrixLike, check_at_least, multiplying, random_vectors


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
) -> tuple[Tensor, Tensor]:
    """The density of the eigenvalues of a symmetric matrix, smoothed (Papyan 2020, algorithm 2).

    Args:
        A: Symmetric `[n, n]`: an operator of this package, a tensor, a NumPy array, a SciPy operator or sparse matrix.
        ncv: Number of Lanczos steps, at least 2; more than `n` give the smoothing of `ncv` and the products of `n`.
        num_points: Number of grid points.
        num_repeats: Number of random vectors to average over.
        kappa: Width of the bumps, more than 1; larger is sharper. Of `ncv` evenly spread bumps, neighbours meet at
            `1 / kappa` of their height.
        boundaries: Smallest and largest eigenvalue, as far as known: `(a, b)`, `(a, None)`, `(None, b)`, or None.
        margin: How far the grid goes beyond the boundaries, relative to their distance.
        boundaries_tol: Accuracy to which boundaries that are not given are computed, relative to the largest absolute
            eigenvalue; 0 means machine precision.
        generator: Where the random vectors come from, by default PyTorch's global generator. See `hutchinson_trace`.

    Returns:
        The grid and the density on it, `[num_points]` each, on the device and in the dtype of `A`. The density has
        integral 1 (what the margin cuts off aside).

    Raises:
        ValueError: If `A` is not square or not symmetric, or an argument is out of its range.
        NumericsError: If products are NaN or infinite.
        TypeError: If `A` is no matrix of real floating-point numbers, or a count no integer.

    Cost: `ncv * num_repeats` products, and some tens for the boundaries; memory of 20 vectors.

    Example:
        >>> A = torch.diag(torch.cat([torch.zeros(90), torch.ones(10)]))
        >>> seeded = torch.Generator().manual_seed(0)
        >>> grid, density = lanczos_approximate_spectrum(A, ncv=20, num_repeats=50, generator=seeded)
        >>> mass = torch.trapezoid(density, grid)
        >>> above = torch.trapezoid(density[grid > 0.5], grid[grid > 0.5])
        >>> round(mass.item(), 1), round(above.item(), 1)
        (1.0, 0.1)
    """
    cached = LanczosApproximateSpectrumCached(A, ncv, boundaries, boundaries_tol, generator=generator)
    return cached.approximate_spectrum(num_repeats, num_points, kappa, margin)


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
) -> tuple[Tensor, Tensor]:
    """The density of `|λ| + epsilon` on a logarithmic grid, smoothed there (Papyan 2020, section C.7).

    Arguments as for `lanczos_approximate_spectrum`, except:

    Args:
        kappa: As there, with another default.
        boundaries: Smallest and largest absolute eigenvalue, as far as known. The smallest is hard to compute: of
            a matrix with many small ones it is what 100 products reach, which may be above the true one.
        boundaries_tol: Relative accuracy of each boundary.
        epsilon: Added to `|λ|`, in units of the eigenvalues; the grid begins near it if the matrix is singular.

    Returns:
        The grid, of constant ratio, and the density with respect to the grid's values (not to their logarithm), with
        integral 1.

    Raises:
        ValueError: As there; also if a boundary is negative or `epsilon` is not positive.

    Cost: as there, and up to 100 products for the smallest boundary; memory of 82 vectors.

    Example:
        >>> A = torch.diag(torch.logspace(-3, 0, 100))
        >>> grid, density = lanczos_approximate_log_spectrum(A, ncv=50, boundaries=(1e-3, 1.0))
        >>> bool(grid[0] < 1.1e-3), bool(grid[-1] > 1), round(torch.trapezoid(density, grid).item(), 1)
        (True, True, 1.0)
    """
    cached = LanczosApproximateLogSpectrumCached(A, ncv, boundaries, boundaries_tol, generator=generator)
    return cached.approximate_log_spectrum(num_repeats, num_points, kappa, margin, epsilon)


class _Cached:
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
    ) -> None:
        check_at_least(2, ncv=ncv)
        self.A, self.ncv, self._generator = A, ncv, generator
        self.boundaries = self._find(A, boundaries_tol, boundaries, generator=generator)
        with multiplying(A) as M:
            self._like, self._eps, n = M.zero, M.eps, M.shape[0]
        self._nodes = self._weights = torch.empty((0, min(ncv, n)), dtype=torch.float64)

    def _runs(self, num_repeats: int) -> tuple[Tensor, Tensor]:
        """Nodes and weights of the first runs, `[num_repeats, steps]`; those that are missing are computed."""
        check_at_least(1, num_repeats=num_repeats)
        missing = num_repeats - len(self._nodes)
        if missing > 0:
            with multiplying(self.A) as M:
                if not len(self._nodes):
                    M.require_symmetric()
                for size in M.blocks(missing, copies=5):
                    V = random_vectors(size, M.shape[0], "normal", self._generator, M.zero)
                    T = lanczos(M.matmat, V, self._nodes.shape[1], reorthogonalize=False)
                    nodes, weights = T.quadrature()
                    self._nodes = torch.cat([self._nodes, nodes])
                    self._weights = torch.cat([self._weights, weights])
        return self._nodes[:num_repeats], self._weights[:num_repeats]

    def _approximate(
        self, num_repeats: int, num_points: int, kappa: float, margin: float, epsilon: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The grid with margins, and the mean over runs of the density of bumps at nodes, or at their logarithms."""
        check_at_least(1, num_points=num_points)
        if not kappa > 1:
            raise ValueError(f"kappa ({kappa}) must be more than 1; larger makes the bumps sharper.")
        nodes, weights = self._runs(num_repeats)
        low, high = self.boundaries
        unit = max(abs(low), abs(high)) or 1.0  # the size of the ends, and the width to take if they are one
        if epsilon is not None:
            if not epsilon > 0:
                raise ValueError(f"epsilon ({epsilon}) must be positive: zero eigenvalues have no logarithm.")
            nodes, low, high, unit = (nodes.abs() + epsilon).log(), log(low + epsilon), log(high + epsilon), 1.0
        if high - low <= 100 * self._eps * unit:  # a single eigenvalue: its bump needs some room
            low, high = low - unit / 2, high + unit / 2
        low, high = low - margin * (high - low), high + margin * (high - low)
        grid = torch.linspace(low, high, num_points, dtype=torch.float64)
        sigma = (high - low) / (self.ncv - 1) / sqrt(8 * log(kappa))
        density = torch.zeros_like(grid)
        for node, weight in zip(nodes, weights):
            density += weight @ torch.exp(-(((grid - node[:, None]) / sigma) ** 2) / 2)
        density /= sigma * sqrt(2 * torch.pi) * len(nodes)
        if epsilon is not None:
            grid = grid.exp()
            density /= grid
        return grid.to(self._like), density.to(self._like)


class LanczosApproximateSpectrumCached(_Cached):
    """The density of the eigenvalues of a symmetric matrix, for several settings at the cost of one.

    The boundaries are computed at construction, Lanczos runs when they are first needed; another resolution or width
    costs no product. Attribute `boundaries` has the two that are used. Arguments as for
    `lanczos_approximate_spectrum`.

    Example:
        >>> cached = LanczosApproximateSpectrumCached(torch.diag(torch.arange(50.0)), ncv=20)
        >>> sharp = cached.approximate_spectrum(num_repeats=2, kappa=10.0)
        >>> smooth = cached.approximate_spectrum(num_repeats=2, kappa=1.5)  # no more products
        >>> bool(sharp[1].max() > smooth[1].max())
        True
    """

    _find = staticmethod(approximate_boundaries)

    def approximate_spectrum(
        self, num_repeats: int = 1, num_points: int = 1024, kappa: float = 3.0, margin: float = 0.05
    ) -> tuple[Tensor, Tensor]:
        """The grid and the density; arguments as for `lanczos_approximate_spectrum`.

        Of `num_repeats` runs the first ones stay the same when more are asked for.
        """
        return self._approximate(num_repeats, num_points, kappa, margin)


class LanczosApproximateLogSpectrumCached(_Cached):
    """The density of `|λ| + epsilon` on a logarithmic grid, for several settings at the cost of one.

    As `LanczosApproximateSpectrumCached`; `boundaries` are those of `|λ|`. Arguments as for
    `lanczos_approximate_log_spectrum`.

    Example:
        >>> cached = LanczosApproximateLogSpectrumCached(torch.diag(torch.logspace(-3, 0, 50)), ncv=20)
        >>> grid, density = cached.approximate_log_spectrum(num_repeats=2, num_points=100)
        >>> grid.shape, density.shape
        (torch.Size([100]), torch.Size([100]))
    """

    _find = staticmethod(approximate_boundaries_abs)

    def approximate_log_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 3.0,
        margin: float = 0.05,
        epsilon: float = 1e-5,
    ) -> tuple[Tensor, Tensor]:
        """The grid and the density; arguments as for `lanczos_approximate_log_spectrum`, with another default `kappa`.

        Of `num_repeats` runs the first ones stay the same when more are asked for.
        """
        return self._approximate(num_repeats, num_points, kappa, margin, epsilon)


def plot_spectrum(spectrum: tuple[Tensor, Tensor], *, log: bool = False, ax: Any = None, **line: Any) -> Any:
    """Draw a spectral density: `plot_spectrum(lanczos_approximate_spectrum(A, ncv=100), label="Hessian")`.

    The density has a logarithmic axis, down to 1e-8 of the highest peak, since the peak at zero hides all others.

    Args:
        spectrum: Grid and density, as `lanczos_approximate_spectrum` and its relatives return them.
        log: Give the eigenvalues a logarithmic axis too, as suits `lanczos_approximate_log_spectrum`.
        ax: Matplotlib axes to draw on; by default the current ones, `matplotlib.pyplot.gca()`.
        line: Passed on to `ax.plot`: `label`, `color`, and so on.

    Returns:
        The axes.

    Raises:
        ImportError: If Matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure  # doctest: +SKIP
        >>> density = (torch.linspace(0, 1, 5), torch.tensor([0.0, 1.0, 4.0, 1.0, 0.0]))
        >>> plot_spectrum(density, ax=Figure().subplots(), label="a peak")  # doctest: +SKIP
        <Axes: xlabel='eigenvalue', ylabel='density'>
    """
    import matplotlib.pyplot as plt

    grid, density = (values.detach().cpu().double().numpy() for values in spectrum)
    ax = plt.gca() if ax is None else ax
    ax.plot(grid, density, **line)
    if log:
        ax.set_xscale("log")
    top = max(drawn.get_ydata().max() for drawn in ax.lines)
    ax.set(yscale="log", ylim=(1e-8 * top, 2 * top), xlabel="eigenvalue", ylabel="density")
    return ax
