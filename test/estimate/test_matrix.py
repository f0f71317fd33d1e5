"""Bars that count products, whatever the estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus import (
    LanczosApproximateSpectrumCached,
    approximate_boundaries,
    approximate_boundaries_abs,
    condition_number,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    spectral_norm,
    top_eigenpairs,
    xdiag,
    xtrace,
)
from curvlinops_plus.estimate import logdet
from curvlinops_plus.linalg import LinearOperator, Space, Structure
from test.helpers import seeded

ENTRIES = torch.linspace(1, 3, 40, dtype=torch.float64)


class Counting(LinearOperator):
    """A diagonal matrix that counts the vectors it is multiplied with."""

    structure = Structure.PSD
    dtype = torch.float64
    device = torch.device("cpu")
    in_space = Space.flat(40)

    def __init__(self) -> None:
        self.vectors = 0

    def _matmat(self, X: Tensor) -> Tensor:
        self.vectors += X.shape[1]
        return ENTRIES[:, None] * X


#: Estimator to how many products it says that there will be; None if it can't know.
ESTIMATORS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "hutchinson_trace": (lambda A, **o: hutchinson_trace(A, 6, **o), 6),
    "hutchpp_trace": (lambda A, **o: hutchpp_trace(A, 6, **o), 6),
    "xtrace": (lambda A, **o: xtrace(A, 6, **o), 6),
    "hutchinson_diag": (lambda A, **o: hutchinson_diag(A, 7, **o), 7),
    "xdiag": (lambda A, **o: xdiag(A, 8, **o), 8),
    "hutchinson_squared_fro": (lambda A, **o: hutchinson_squared_fro(A, 3, **o), 3),
    "logdet": (lambda A, **o: logdet(A, num_probes=4, num_steps=12, **o), 48),
    "top_eigenpairs": (lambda A, **o: top_eigenpairs(A, 2, tol=1e-3, **o), None),
    "spectral_norm": (lambda A, **o: spectral_norm(A, **o), None),
    "condition_number": (lambda A, **o: condition_number(A, **o), None),
    "approximate_boundaries": (lambda A, **o: approximate_boundaries(A, **o), None),
    "approximate_boundaries_abs": (lambda A, **o: approximate_boundaries_abs(A, **o), None),
    "spectrum": (
        lambda A, **o: lanczos_approximate_spectrum(
            A, 9, num_repeats=3, boundaries=(1.0, 3.0), **o
        ),
        27,
    ),
    "log spectrum": (
        lambda A, **o: lanczos_approximate_log_spectrum(
            A, 9, num_repeats=3, boundaries=(1.0, 3.0), **o
        ),
        27,
    ),
}


def tensors(result: Any) -> list[Tensor]:
    return [torch.as_tensor(t) for t in (result if isinstance(result, tuple) else [result])]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_bars_count_all_products(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, total = ESTIMATORS[name]
    A = Counting()
    silent = function(A, generator=seeded())
    assert capfd.readouterr().err == ""
    shown = function(A, generator=seeded(), progressbar=True)
    for one, other in zip(tensors(silent), tensors(shown), strict=True):
        assert torch.equal(one, other)
    last = capfd.readouterr().err.replace("\n", "\r").rstrip("\r").split("\r")[-1]
    assert last.startswith("products: ")
    counted = A.vectors // 2
    assert f"| {counted}/{total} [" in last if total else f" {counted}it [" in last, last
    with pytest.raises(TypeError, match="progressbar is the str 'yes'; expected True or False"):
        function(A, progressbar="yes")


def test_a_cached_spectrum_shows_what_is_new(capfd: pytest.CaptureFixture[str]) -> None:
    cached = LanczosApproximateSpectrumCached(
        Counting(), 5, boundaries=(1.0, 3.0), generator=seeded(), progressbar=True
    )
    cached.approximate_spectrum(num_repeats=2)
    capfd.readouterr()
    cached.approximate_spectrum(num_repeats=2, kappa=4.0)
    assert capfd.readouterr().err == ""
    cached.approximate_spectrum(num_repeats=3)
    assert "| 5/5 [" in capfd.readouterr().err
