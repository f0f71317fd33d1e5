"""EKFAC's eigendecompositions on several threads: the same operator, and errors that name the layer."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, curvature
from curvlinops_plus.blocks import ekfac
from curvlinops_plus.errors import NumericsError

pytestmark = pytest.mark.usefixtures("two_threads")


def problem() -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(110, 130), nn.ReLU(), nn.Linear(130, 120), nn.ReLU(), nn.Linear(120, 3)).double()
    data = [(torch.randn(40, 110).double(), torch.randint(3, (40,))) for _ in range(2)]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def test_ekfac_on_several_threads_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    risk, seen, eigenbasis = problem(), set(), ekfac.eigenbasis

    def watched(M: torch.Tensor, rtol: float) -> torch.Tensor:
        seen.add(threading.get_ident())
        return eigenbasis(M, rtol=rtol)

    torch.set_num_threads(1)
    expected = curvature(risk, EKFAC)
    v = torch.randn(expected.shape[0]).double()
    _ = expected @ v  # computes it
    torch.set_num_threads(2)
    monkeypatch.setattr(
        ekfac, "eigenbasis", lambda *args, **options: seen.add(threading.get_ident()) or eigenbasis(*args, **options)
    )
    found = curvature(risk, EKFAC)
    torch.testing.assert_close(found @ v, expected @ v)
    torch.testing.assert_close(found.trace, expected.trace)
    assert seen
    assert threading.get_ident() not in seen


def test_a_refresh_on_several_threads_is_the_same() -> None:
    risk = problem()

    def trace() -> torch.Tensor:  # which does not depend on the basis where eigenvalues are equal
        estimator = CurvatureEstimator(risk, EKFAC, damping=0.1)
        for batch in risk.data:
            estimator.update(batch)
        estimator.refresh()
        assert estimator.inverse().trace > 0
        return estimator.operator.trace

    torch.set_num_threads(1)
    expected = trace()
    torch.set_num_threads(2)
    torch.testing.assert_close(trace(), expected)


def test_a_layer_that_cannot_be_decomposed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(M: torch.Tensor) -> None:
        raise RuntimeError("linalg.eigh: failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(
        NumericsError, match=r"layer '0', factor G.*failed in every precision.*The forward pass is finite"
    ):
        _ = curvature(problem(), EKFAC).trace


def test_numbers_of_threads_are_as_before() -> None:
    """Those of new threads too, which begin with the last number that any thread was given."""
    numbers = [torch.get_num_threads()]
    curvature(problem(), EKFAC).compute()
    numbers.append(torch.get_num_threads())
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert numbers == [2, 2, 2]
