"""Spectral densities against the exact spectrum smoothed in the same way; names of curvlinops 3.0.1; the picture."""

from __future__ import annotations

import inspect
import re
import sys
from math import log, pi, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import F64, seeded, with_eigenvalues
from torch import Tensor

from curvlinops_plus.estimate.plot import plot_spectrum
from curvlinops_plus.estimate.spectrum import (
    LanczosApproximateLogSpectrumCached,
    LanczosApproximateSpectrumCached,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
)

BULK_AND_PEAKS = torch.cat([torch.linspace(0.01, 0.5, 150), torch.tensor([2.0, 3.0, 5.0])]).double()
INDEFINITE = torch.cat([torch.linspace(-1, 1, 150), torch.tensor([-2.0, 4.0])]).double()


def smoothed(values: Tensor, ncv: int, kappa: float, margin: float, num_points: int) -> tuple[Tensor, Tensor]:
    """The twin: one bump per eigenvalue."""
    low, high = float(values.min()), float(values.max())
    low, high = low - margin * (high - low), high + margin * (high - low)
    grid = torch.linspace(low, high, num_points, dtype=F64)
    sigma = (high - low) / (ncv - 1) / sqrt(8 * log(kappa))
    return grid, torch.exp(-(((grid[:, None] - values) / sigma) ** 2) / 2).mean(1) / (sigma * sqrt(2 * pi))


@pytest.mark.parametrize("values", [BULK_AND_PEAKS, INDEFINITE], ids=["bulk and peaks", "indefinite"])
@pytest.mark.parametrize(("ncv", "kappa", "margin"), [(30, 3.0, 0.05), (60, 1.5, 0.2)])
def test_density(values: Tensor, ncv: int, kappa: float, margin: float) -> None:
    boundaries = (values.min().item(), values.max().item())
    grid, density = lanczos_approximate_spectrum(
        with_eigenvalues(values), ncv, 500, 200, kappa, boundaries, margin, generator=seeded()
    )
    expected_grid, expected = smoothed(values, ncv, kappa, margin, 500)
    torch.testing.assert_close(grid, expected_grid)
    assert torch.trapezoid((density - expected).abs(), grid) < 0.05  # 200 random vectors
    assert abs(torch.trapezoid(density, grid) - 1) < 0.02


@pytest.mark.parametrize(("values", "distance"), [(BULK_AND_PEAKS, 0.05), (INDEFINITE, 0.2)])
def test_log_density(values: Tensor, distance: float) -> None:
    """The density is that of |λ| + ε, on a grid of constant ratio; zeros in the middle are harder."""
    epsilon, ncv = 1e-2, 60
    boundaries = (values.abs().min().item(), values.abs().max().item())
    grid, density = lanczos_approximate_log_spectrum(
        with_eigenvalues(values), ncv, 500, 200, 1.1, boundaries, epsilon=epsilon, generator=seeded()
    )
    expected_grid, expected = smoothed((values.abs() + epsilon).log(), ncv, 1.1, 0.05, 500)
    torch.testing.assert_close(grid, expected_grid.exp())
    assert torch.trapezoid((density * grid - expected).abs(), grid.log()) < distance
    assert abs(torch.trapezoid(density, grid) - 1) < 0.02


def test_boundaries_are_found() -> None:
    A = with_eigenvalues(INDEFINITE)
    for tolerance in (1e-2, 0.0):
        low, high = LanczosApproximateSpectrumCached(A, 10, None, tolerance, generator=seeded()).boundaries
        assert abs(low + 2) <= 4 * max(tolerance, 1e-9)
        assert abs(high - 4) <= 4 * max(tolerance, 1e-9)
    for given, expected in (((None, 7.0), (-2, 7)), ((-8.0, None), (-8, 4)), ((0.0, 1.0), (0, 1))):
        found = LanczosApproximateSpectrumCached(A, 10, given, 1e-8, generator=seeded()).boundaries
        assert found == pytest.approx(expected)
    B = with_eigenvalues([-0.25, 0.5, 1.0, -6.0] * 5)
    for given, expected in ((None, (0.25, 6)), ((0.1, None), (0.1, 6)), ((None, 9.0), (0.25, 9))):
        found = LanczosApproximateLogSpectrumCached(B, 10, given, 1e-8, generator=seeded()).boundaries
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("A", [torch.eye(5), 3 * torch.eye(1), torch.zeros(4, 4), 1e-9 * torch.eye(3)])
def test_one_eigenvalue_only(A: Tensor) -> None:
    """The bump has room, and mass 1 at the right place."""
    value = A[0, 0].item()
    grid, density = lanczos_approximate_spectrum(A, 10, generator=seeded())
    assert torch.isfinite(density).all()
    assert abs(torch.trapezoid(density.double(), grid.double()) - 1) < 0.01
    assert abs(grid[density.argmax()] - value) < 0.01 * (value or 1.0)
    sigma = float(grid[-1] - grid[0]) / 9 / sqrt(8 * log(3))  # 10 bumps side by side, kappa = 3
    assert density.max().item() == pytest.approx(1 / (sigma * sqrt(2 * pi)), rel=1e-3)
    grid, density = lanczos_approximate_log_spectrum(A, 40, generator=seeded(), kappa=3.0)
    assert abs(torch.trapezoid(density.double(), grid.double()) - 1) < 0.01
    assert abs(grid[density.argmax()] - (value + 1e-5)) < 0.02 * (value + 1e-5)


def test_singular_matrices_on_a_logarithmic_grid() -> None:
    A = with_eigenvalues([0.0] * 30 + [1.0] * 10)
    grid, density = lanczos_approximate_log_spectrum(A, 40, num_repeats=50, kappa=3.0, generator=seeded())
    assert torch.isfinite(density).all()
    assert grid[0] < 1e-5
    small = grid < 1e-2
    assert abs(torch.trapezoid(density[small], grid[small]) - 0.75) < 0.1


def test_repeats_are_averaged_and_cached() -> None:
    class Counted:
        shape, dtype, device = (153, 153), F64, torch.device("cpu")
        matrix, products = with_eigenvalues(BULK_AND_PEAKS), 0

        def __matmul__(self, X: Tensor) -> Tensor:
            self.products += X.shape[1]
            return self.matrix @ X

    for kind, density_of in (
        (LanczosApproximateSpectrumCached, "approximate_spectrum"),
        (LanczosApproximateLogSpectrumCached, "approximate_log_spectrum"),
    ):
        A = Counted()
        cached = kind(A, 12, (0.01, 5.0), generator=seeded())
        assert A.products == 0
        approximate = getattr(cached, density_of)
        grid, three = approximate(3)
        assert A.products == 36
        assert torch.equal(approximate(3)[1], three)
        assert torch.equal(approximate(num_repeats=3, kappa=3.0)[1], three)
        assert not torch.equal(approximate(3, kappa=2.0)[1], three)
        one = approximate(1)[1]
        assert A.products == 36
        four = approximate(4, num_points=10)[1]
        assert A.products == 48
        assert four.shape == (10,)
        alone = getattr(kind(A, 12, (0.01, 5.0), generator=seeded()), density_of)(1)[1]
        torch.testing.assert_close(alone, one, rtol=1e-4, atol=1e-4)  # the first run does not know of the others
        assert grid.shape == three.shape == (1024,)
    A = with_eigenvalues(BULK_AND_PEAKS)
    for function, kind, name in (
        (lanczos_approximate_spectrum, LanczosApproximateSpectrumCached, "approximate_spectrum"),
        (lanczos_approximate_log_spectrum, LanczosApproximateLogSpectrumCached, "approximate_log_spectrum"),
    ):
        direct = function(A, 12, num_repeats=2, kappa=3.0, generator=seeded())
        for left, right in zip(direct, getattr(kind(A, 12, generator=seeded()), name)(2)):
            assert torch.equal(left, right)


A3 = torch.eye(3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lanczos_approximate_spectrum(A3, 1), r"ncv \(1\) must be at least 2"),
        (lambda: lanczos_approximate_spectrum(A3, 5, kappa=1.0), r"kappa \(1.0\) must be more than 1"),
        (lambda: lanczos_approximate_spectrum(A3, 5, num_repeats=0), r"num_repeats \(0\) must be at least 1"),
        (lambda: lanczos_approximate_spectrum(A3, 5, num_points=0), r"num_points \(0\) must be at least 1"),
        (lambda: lanczos_approximate_spectrum(A3, 5, margin=-1.0), r"margin \(-1.0\) must not be negative"),
        (lambda: lanczos_approximate_spectrum(A3, 5, boundaries=(2, 1)), r"boundaries \(2, 1\) must be the smallest"),
        (
            lambda: lanczos_approximate_log_spectrum(A3, 5, boundaries=(-1, 1)),
            r"boundaries \(-1, 1\) must be those of the absolute eigenvalues",
        ),
        (lambda: lanczos_approximate_log_spectrum(A3, 5, epsilon=0.0), r"epsilon \(0.0\) must be positive"),
        (
            lambda: lanczos_approximate_spectrum(torch.randn(20, 20), 5, boundaries=(0, 1)),
            "is not symmetric",
        ),
    ],
)
def test_numbers_out_of_range(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("boundaries", [3.0, (1.0,), (0.0, 1.0, 2.0)])
def test_boundaries_are_a_pair(boundaries: Any) -> None:
    with pytest.raises(TypeError, match=r"boundaries=.* must be a pair, .* None for one that is not known"):
        lanczos_approximate_spectrum(A3, 5, boundaries=boundaries)


SETTINGS = {"num_repeats": 1, "num_points": 1024, "kappa": 3.0, "margin": 0.05}
MATRIX = {"A": ..., "ncv": ...}
ENDS = {"boundaries": None, "boundaries_tol": 1e-2}
NAMES_OF_3_0_1 = {
    lanczos_approximate_spectrum: MATRIX
    | {"num_points": 1024, "num_repeats": 1, "kappa": 3.0, "boundaries": None, "margin": 0.05, "boundaries_tol": 1e-2},
    lanczos_approximate_log_spectrum: MATRIX
    | {"num_points": 1024, "num_repeats": 1, "kappa": 1.04, "boundaries": None, "margin": 0.05, "boundaries_tol": 1e-2}
    | {"epsilon": 1e-5},
    LanczosApproximateSpectrumCached: MATRIX | ENDS,
    LanczosApproximateLogSpectrumCached: MATRIX | ENDS,
    LanczosApproximateSpectrumCached.approximate_spectrum: {"self": ...} | SETTINGS,
    LanczosApproximateLogSpectrumCached.approximate_log_spectrum: {"self": ...} | SETTINGS | {"epsilon": 1e-5},
}


@pytest.mark.parametrize("thing", NAMES_OF_3_0_1, ids=lambda thing: thing.__name__)
def test_names_of_curvlinops_3_0_1(thing: Any) -> None:
    parameters = inspect.signature(thing).parameters.values()
    positional = [p for p in parameters if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    found = {p.name: ... if p.default is inspect.Parameter.empty else p.default for p in positional}
    assert list(found.items()) == list(NAMES_OF_3_0_1[thing].items())


# ----------------------------------------------------------------------------------------------- the picture, the page


def test_picture() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    A = with_eigenvalues(BULK_AND_PEAKS).float()
    ax = figure.Figure().subplots()
    assert plot_spectrum(lanczos_approximate_spectrum(A, 20), ax=ax, label="A", color="red") is ax
    (line,) = ax.lines
    assert (line.get_label(), line.get_color(), len(line.get_xdata())) == ("A", "red", 1024)
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("linear", "log", "eigenvalue")
    low, high = ax.get_ylim()
    assert low < 1e-6 * high
    assert high > line.get_ydata().max()
    ax = figure.Figure().subplots()
    plot_spectrum(lanczos_approximate_log_spectrum(A, 20), log=True, ax=ax)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'not installed: pip install "curvlinops_plus\[examples\]"'):
        plot_spectrum((torch.zeros(2), torch.zeros(2)))


def test_the_page_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", page, flags=re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {"__name__": "estimate"}
    with torch.random.fork_rng():
        for code, expected in blocks:
            exec(compile(code, "estimate.md", "exec"), namespace)
            assert capsys.readouterr().out.split() == expected.split()
