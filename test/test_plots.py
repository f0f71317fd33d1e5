"""Pictures: what is drawn, by the data of lines, bars and images."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    DiagonalBlock,
    EmpiricalRisk,
    Laplace,
    curvature,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    plot_influence,
    plot_predictions,
    plot_spectrum,
    plot_summary,
)
from test.helpers import normal, seeded

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
Figure = pytest.importorskip("matplotlib.figure").Figure
A = torch.cat([torch.zeros(80), torch.linspace(1, 2, 20)]).diag()
MODEL = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
X = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
RISK = EmpiricalRisk(MODEL, nn.MSELoss(), [(X, X.sin())])


def axes() -> Any:
    return Figure().subplots()


def equal(drawn: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(drawn), np.asarray(expected), rtol=1e-12)


def band(ax: Any) -> tuple[Any, Any, Any]:
    """Places, lower and upper ends of the only band."""
    (area,) = ax.collections
    points = area.get_paths()[0].vertices
    places = np.unique(points[:, 0])
    ends = [points[points[:, 0] == x, 1] for x in places]
    return places, [e.min() for e in ends], [e.max() for e in ends]


def test_a_spectrum_with_and_without_its_error() -> None:
    ax = axes()
    spectrum = lanczos_approximate_spectrum(A, 20, generator=seeded())
    assert plot_spectrum(spectrum, ax=ax, label="A", color="red") is ax
    (line,) = ax.lines
    assert (line.get_label(), line.get_color(), len(ax.collections)) == ("A", "red", 0)
    equal(line.get_xdata(), spectrum[0])
    equal(line.get_ydata(), spectrum[1])
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("linear", "log", "eigenvalue")
    low, high = ax.get_ylim()
    assert low < 1e-6 * high < 1e-6 * 100 * line.get_ydata().max()

    ax = axes()
    spectrum = lanczos_approximate_log_spectrum(
        A, 20, 64, num_repeats=3, return_error=True, generator=seeded()
    )
    plot_spectrum(spectrum, log=True, ax=ax)
    grid, density, error = (t.double() for t in spectrum)
    places, low, high = band(ax)
    equal(places, grid)
    equal(low, density - 2 * error)
    equal(high, density + 2 * error)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_numbers_of_blocks_are_bars_from_the_top() -> None:
    summary = curvature(RISK, DiagonalBlock).summary()
    for key in ("trace", "rank"):
        ax = plot_summary(summary, key, ax=axes(), label="here")
        assert [bar.get_width() for bar in ax.patches] == [row[key] for row in summary]
        assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "2"]
        assert ax.yaxis_inverted()
        assert (ax.get_xlabel(), ax.containers[0].get_label()) == (key, "here")
        plot_summary(summary, key, ax=ax)  # the same once more, still from the top
        assert ax.yaxis_inverted()
    with pytest.raises(ValueError, match="key='norm'; expected one of 'trace', 'largest', 'rank'"):
        plot_summary(summary, "norm", ax=axes())


def test_predictions_have_a_band_of_their_deviations() -> None:
    la = Laplace(GGN(RISK))
    order = torch.randperm(9, generator=seeded())
    ax = plot_predictions(
        X[order], la.predict(X[order]), data=(X, X.sin()), deviations=3.0, ax=axes(), label="mean"
    )
    mean, variance = (t[:, 0].detach() for t in la.predict(X))
    line, dots = ax.lines
    equal(line.get_xdata(), X[:, 0])
    equal(line.get_ydata(), mean)
    equal(dots.get_xydata(), torch.cat([X, X.sin()], 1))
    places, low, high = band(ax)
    equal(places, X[:, 0])
    equal(low, mean - 3 * variance.sqrt())
    equal(high, mean + 3 * variance.sqrt())
    assert line.get_label() == "mean"
    with pytest.raises(ValueError, match=r"X: expected one number for each example.*got \[4, 2\]"):
        plot_predictions(normal(4, 2), (normal(4), normal(4).exp()), ax=axes())
    with pytest.raises(ValueError, match=r"prediction: expected one number .*got \[9, 2\]"):
        plot_predictions(X, (normal(9, 2), normal(9, 2).exp()), ax=axes())


IMAGES = {
    "grey": normal(6, 4, 5),
    "one channel": normal(6, 1, 4, 5),
    "colours": normal(6, 3, 4, 5),
    "a data set": [(image, 1) for image in normal(6, 3, 4, 5)],
}


@pytest.mark.parametrize("kind", IMAGES)
def test_the_most_helpful_are_above_the_most_harmful(kind: str) -> None:
    scores = torch.tensor([0.1, -3.0, 5.0, 0.0, -1.0, 2.0])
    images: Any = IMAGES[kind]
    ax = plot_influence(scores, images, 2, ax=axes())
    (image,) = ax.images
    drawn = torch.as_tensor(np.asarray(image.get_array()))
    assert drawn.shape == (10, 12, 3)  # a gap of one pixel below and beside each
    for n, (top, left) in {2: (0, 0), 5: (0, 6), 1: (5, 0), 4: (5, 6)}.items():
        tile = images[n][0] if kind == "a data set" else images[n]
        tile = ((tile - tile.min()) / (tile.max() - tile.min())).expand(3, 4, 5)
        torch.testing.assert_close(
            drawn[top : top + 4, left : left + 5], tile.permute(1, 2, 0).float()
        )
        assert bool((drawn[top + 4] == 1).all())
    assert [text.get_text() for text in ax.texts] == ["+5", "+2", "-3", "-1"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["help", "harm"]


def test_images_are_not_drawn_upon_others() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.close("all")
    plt.figure()
    here = plt.gca()
    scores = torch.arange(6.0)
    first = plot_influence(scores, IMAGES["grey"], 2)
    second = plot_influence(-scores, IMAGES["grey"], 2)
    third = plot_influence(scores, IMAGES["grey"], 2, ax=first)
    assert (first is here, second is here, third is here) == (True, False, True)
    assert second.figure is not here.figure
    assert [text.get_text() for text in second.texts] == ["-0", "-1", "-5", "-4"]
    plt.close("all")


def test_what_can_not_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scores \[N\] of at least 5 examples.* got \[2, 6\]"):
        plot_influence(normal(2, 6), IMAGES["grey"], ax=axes())
    with pytest.raises(ValueError, match=r"of at least 7 examples.* got \[6\]"):
        plot_influence(normal(6), IMAGES["grey"], 7, ax=axes())
    with pytest.raises(ValueError, match=r"Expected images .* got one of the shape \[2, 4, 5\]"):
        plot_influence(normal(6), normal(6, 2, 4, 5), ax=axes())


def test_without_axes_the_current_ones_are_taken() -> None:
    import matplotlib.pyplot as plt

    _, current = plt.subplots()
    try:
        assert plot_influence(torch.arange(6.0), IMAGES["grey"], 1) is current
        assert plot_spectrum((torch.arange(3.0), torch.ones(3))) is current
    finally:
        plt.close("all")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    pair: tuple[Tensor, Tensor] = (torch.arange(3.0), torch.ones(3))
    for draw in (
        lambda: plot_spectrum(pair),
        lambda: plot_summary(curvature(RISK, DiagonalBlock).summary()),
        lambda: plot_predictions(pair[0], pair),
        lambda: plot_influence(torch.arange(6.0), IMAGES["grey"]),
    ):
        with pytest.raises(ImportError, match=r"drawn with Matplotlib.*pip install matplotlib"):
            draw()
