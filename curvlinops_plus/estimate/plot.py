"""Plots of spectral densities, which need Matplotlib."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
        >>> import torch
        >>> from matplotlib.figure import Figure  # doctest: +SKIP
        >>> density = (torch.linspace(0, 1, 5), torch.tensor([0.0, 1.0, 4.0, 1.0, 0.0]))
        >>> plot_spectrum(density, ax=Figure().subplots(), label="a peak")  # doctest: +SKIP
        <Axes: xlabel='eigenvalue', ylabel='density'>
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'plot_spectrum draws with Matplotlib, which is not installed: pip install "curvlinops_plus[examples]".'
        ) from error
    grid, density = (values.detach().cpu().double().numpy() for values in spectrum)
    ax = plt.gca() if ax is None else ax
    ax.plot(grid, density, **line)
    if log:
        ax.set_xscale("log")
    ax.set_yscale("log")
    top = max(drawn.get_ydata().max() for drawn in ax.lines)
    ax.set_ylim(1e-8 * top, 2 * top)
    ax.set_xlabel("eigenvalue")
    ax.set_ylabel("density")
    return ax
