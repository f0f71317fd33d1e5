"""EKFAC's bases: loose ones, and on several threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, curvature
from curvlinops_plus.blocks import ekfac
from curvlinops_plus.errors import NumericsError
from test.nets import tanh_net

# -------------------------------------------------------------------------------------------- loose


def test_a_looser_basis_is_near_and_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs whose variances decay, as those of trained layers do."""
    torch.manual_seed(0)
    X = torch.randn(500, 240).double() * torch.logspace(0, -8, 240).double()
    X = X @ torch.linalg.qr(torch.randn(240, 240).double())[0]
    model = tanh_net(240, 4, 2).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, torch.randn(500, 2).double())])
    sizes, eigh = list[int](), torch.linalg.eigh
    exact = curvature(risk, EKFAC)
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: sizes.append(len(M)) or eigh(M))
    norms = []
    for rtol in (0.0, 1e-4, 1e-2):
        K = curvature(risk, EKFAC.using(basis_rtol=rtol))
        torch.testing.assert_close(K.trace, exact.trace, rtol=1e-12, atol=0)
        norms.append(float(K.frobenius_norm / exact.frobenius_norm))
    # The squared distance to the block is its square norm minus that of EKFAC, in every orthogonal
    # basis.
    assert norms == [pytest.approx(1, rel=rtol) for rtol in (1e-12, 1e-4, 1e-2)]
    assert norms[2] != norms[0]
    whole, less, least = (max(sizes[k : k + 4]) for k in (0, 4, 8))
    assert whole == 241
    assert least < less < 133


# ------------------------------------------------------------------------------------------ threads


def three_layers() -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(110, 130), nn.ReLU(), nn.Linear(130, 120), nn.ReLU(), nn.Linear(120, 3)
    ).double()
    data = [(torch.randn(40, 110).double(), torch.randint(3, (40,))) for _ in range(2)]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


@pytest.mark.usefixtures("two_threads")
def test_several_threads_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers of threads stay, those of new threads too, which begin with the last that any
    was given.
    """
    risk, seen, eigh = three_layers(), set(), ekfac.eigh
    v = torch.linspace(-1, 1, sum(p.numel() for p in risk.params.values()), dtype=torch.float64)

    def found() -> tuple[Tensor, ...]:
        K, stream, estimator = (
            curvature(risk, EKFAC),
            CurvatureEstimator(risk),
            CurvatureEstimator(risk, EKFAC),
        )
        for batch in risk.data:
            stream.update(batch)
            estimator.update(batch)
        estimator.refresh(0.1)
        return K @ v, stream.operator @ v, estimator.operator.trace

    torch.set_num_threads(1)
    expected = found()
    torch.set_num_threads(2)
    monkeypatch.setattr(
        ekfac, "eigh", lambda *a, **o: seen.add(threading.get_ident()) or eigh(*a, **o)
    )
    curvature(risk, EKFAC)
    assert seen
    assert threading.get_ident() not in seen
    torch.testing.assert_close(found(), expected)
    numbers = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert numbers == [2, 2]


@pytest.mark.usefixtures("two_threads")
def test_a_layer_that_cannot_be_decomposed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(M: Tensor) -> None:
        raise RuntimeError("linalg.eigh: failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(NumericsError, match=r"layer '0', factor G.*failed in every precision"):
        curvature(three_layers(), EKFAC)
