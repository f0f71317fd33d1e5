"""Pictures of results: spectra, numbers of layers, predictions, and who helps or harms.

They draw with Matplotlib, on axes that are given or on the current ones, and return the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.options import integer, number, one_of


def plot_spectrum(
    spectrum: Sequence[Tensor], *, log: bool = False, ax: Any = None, **line: Any
) -> Any:
    """Draw a spectral density: `plot_spectrum(lanczos_approximate_spectrum(A, ncv=100),
    label="Hessian")`.

    The density has a logarithmic axis, down to 1e-8 of the highest peak, since the peak at zero
    hides all others.

    Args:
        spectrum: Grid and density, as `lanczos_approximate_spectrum` and its relatives return them;
            with `return_error=True` a band shows two standard errors to each side.
        log: Give the eigenvalues a logarithmic axis too, as suits
            `lanczos_approximate_log_spectrum`.
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
    grid, density, *error = map(_array, spectrum)
    ax = _axes(ax)
    (curve,) = ax.plot(grid, density, **line)
    if error:
        spread = 2 * error[0]
        _band(ax, grid, density - spread, density + spread, curve)
    if log:
        ax.set_xscale("log")
    peak = max(curve.get_ydata().max() for curve in ax.lines)
    ax.set(yscale="log", ylim=(1e-8 * peak, 2 * peak), xlabel="eigenvalue", ylabel="density")
    return ax


def plot_summary(
    summary: Sequence[Mapping[str, Any]], key: str = "trace", *, ax: Any = None, **bars: Any
) -> Any:
    """Draw a number of each block as a bar, the first block on top: `plot_summary(K.summary())`.

    Args:
        summary: What `K.summary()` returns.
        key: Which number: "trace", "largest", "rank", "condition" or "count".
        ax: Matplotlib axes to draw on; by default the current ones.
        bars: Passed on to `ax.barh`: `label`, `color`, and so on.

    Returns:
        The axes.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If there is no such number.

    Example:
        >>> from matplotlib.figure import Figure  # doctest: +SKIP
        >>> plot_summary(K.summary(), "rank", ax=Figure().subplots())  # doctest: +SKIP
        <Axes: xlabel='rank'>
    """
    one_of("key", key, "trace", "largest", "rank", "condition", "count")
    ax = _axes(ax)
    ax.barh([row["block"] for row in summary], [row[key] for row in summary], **bars)
    if not ax.yaxis_inverted():
        ax.invert_yaxis()
    ax.set(xlabel=key)
    return ax


def plot_predictions(
    X: Tensor,
    prediction: tuple[Tensor, Tensor],
    *,
    data: tuple[Tensor, Tensor] | None = None,
    deviations: float = 1.96,
    ax: Any = None,
    **line: Any,
) -> Any:
    """Draw a regression over one input, with a band: `plot_predictions(X, la.predict(X))`.

    Args:
        X: Inputs `[n]` or `[n, 1]`, in any order.
        prediction: Mean and variance, `[n]` or `[n, 1]`, as `Laplace.predict` returns them.
        data: Inputs and targets that are drawn as dots.
        deviations: The band is so many standard deviations wide to each side; 1.96 holds 95 %.
        ax: Matplotlib axes to draw on; by default the current ones.
        line: Passed on to `ax.plot`: `label`, `color`, and so on.

    Returns:
        The axes.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If inputs or outputs have more than one number.

    Example:
        >>> from matplotlib.figure import Figure  # doctest: +SKIP
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> ax = plot_predictions(X, la.predict(X), ax=Figure().subplots())  # doctest: +SKIP
    """
    number("deviations", deviations, low=0)
    x = _single("X", X)
    mean, variance = (_single("prediction", part) for part in prediction)
    order = x.argsort()
    deviation = deviations * variance[order] ** 0.5
    ax = _axes(ax)
    (curve,) = ax.plot(x[order], mean[order], **line)
    _band(ax, x[order], mean[order] - deviation, mean[order] + deviation, curve)
    if data is not None:
        ax.plot(*(_single("data", part) for part in data), ".", color="black", label="data")
    ax.set(xlabel="input", ylabel="output")
    return ax


def plot_influence(scores: Tensor, images: Any, num: int = 5, *, ax: Any = None) -> Any:
    """Draw the images of the examples that help a query most, and below those that harm it most.

    Each image has its own range of grey or colours, and its score below it.

    Args:
        scores: Of the training examples `[N]`, a row of what `attribution_scores` returns.
        images: `images[n]` is the image of example n, `[H, W]` or `[channels, H, W]` with 1 or 3
            channels, or a pair of it and a label, as in a data set.
        num: How many of each.
        ax: Matplotlib axes to draw on; by default the current ones, or those of a new figure if
            something is drawn on them.

    Returns:
        The axes, whose only image holds all.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If the scores are those of several queries, or there are fewer examples.

    Example:
        >>> from matplotlib.figure import Figure  # doctest: +SKIP
        >>> scores = attribution_scores(P, queries, train)  # doctest: +SKIP
        >>> ax = plot_influence(scores[0], dataset, ax=Figure().subplots())  # doctest: +SKIP
    """
    num = integer("num", num, low=1)
    if scores.ndim != 1 or len(scores) < num:
        raise ValueError(
            f"Expected scores [N] of at least {num} examples for one query, such as scores[0]; got "
            f"{list(scores.shape)}."
        )
    ranked = scores.detach().cpu().argsort(descending=True)
    best = ranked[:num].tolist()
    worst = ranked.flip(0)[:num].tolist()
    tiles = [[_tile(images[n]) for n in chosen] for chosen in (best, worst)]
    H, W, _ = tiles[0][0].shape
    gap = max(1, H // 4)  # below and beside each, for its score
    canvas = torch.ones(2 * (H + gap), num * (W + gap), 3)
    ax = _axes(ax, are_empty=True)  # an image hides images that are there, and not their numbers
    for row, chosen in enumerate((best, worst)):
        for column, n in enumerate(chosen):
            top = row * (H + gap)
            left = column * (W + gap)
            canvas[top : top + H, left : left + W] = tiles[row][column]
            place = (left + W / 2, top + H + gap / 2)
            ax.text(*place, f"{float(scores[n]):+.2g}", ha="center", va="center")
    ax.imshow(canvas.numpy())
    ax.set(xticks=[], yticks=[H / 2, H + gap + H / 2], yticklabels=["help", "harm"])
    return ax


def _axes(ax: Any, are_empty: bool = False) -> Any:
    """These axes, or the current ones; of a new figure if they are to be empty and are not."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Pictures are drawn with Matplotlib, which is not installed: pip install matplotlib."
        ) from error
    current = plt.gca()
    if are_empty and current.has_data():
        return plt.figure().add_subplot()
    return current


def _array(values: Any) -> Any:
    return torch.as_tensor(values).detach().cpu().double().numpy()


def _single(name: str, values: Any) -> Any:
    """Numbers `[n]` of `[n]` or `[n, 1]`."""
    array = _array(values)
    if array.ndim == 0 or array.size != len(array):
        raise ValueError(
            f"{name}: expected one number for each example, [n] or [n, 1], got "
            f"{list(array.shape)}. Choose one input and one output, such as X[:, :1]."
        )
    return array.reshape(-1)


def _band(ax: Any, x: Any, low: Any, high: Any, curve: Any) -> None:
    """Fill what is between two curves, in the colour of a line between them."""
    ax.fill_between(x, low, high, color=curve.get_color(), alpha=0.25, linewidth=0)


def _tile(image: Any) -> Tensor:  # -> [H, W, 3]
    """An image in colours between 0 and 1, from what a data set has for an example."""
    if isinstance(image, (tuple, list)):
        image = image[0]
    image = torch.as_tensor(image).detach().cpu().float()
    if image.ndim == 2:
        image = image[None]
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(
            "Expected images [H, W], [1, H, W] or [3, H, W]; got one of the shape "
            f"{list(image.shape)}."
        )
    low, high = image.aminmax()
    image = (image - low) / (high - low).clamp(min=1e-12)
    return image.expand(3, -1, -1).permute(1, 2, 0)
