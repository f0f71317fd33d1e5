"""EKFAC's bases of few rows, loose, on several threads; factors that layers share, and factors in pieces."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from cases import close
from helpers import Written
from torch import Tensor, nn

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, Exact, curvature
from curvlinops_plus.blocks import ekfac
from curvlinops_plus.errors import NumericsError

# ------------------------------------------------------------------------------------------------------------ few rows


def attends() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(m.attention(h, h, h, need_weights=False)[0].mean(1))

    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    return Written(forward, first=nn.Linear(6, 12), attention=attention, last=nn.Linear(12, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def dead() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 230), nn.ReLU(), nn.Linear(230, 3))
    nn.init.constant_(model[0].bias[::2], -50.0)
    return model


FEW_ROWS = {
    "attention": (attends, (2, 6)),
    "convolutions": (convolutions, (4, 3, 3)),
    "dead units": (dead, (6,)),
    "wide": (lambda: nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 3)), (300,)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Flatten(0, 1)), (4, 6)),
}


def few_rows(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    made, shape = FEW_ROWS[name]
    targets = (4, shape[0]) if name == "positions" else (4,)
    return made().double(), [(torch.randn(4, *shape).double(), torch.randint(3, targets).flatten()) for _ in range(4)]


def mixed(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same examples in another order."""
    X, y = batch
    order = torch.tensor([2, 0, 3, 1])
    return X[order], y.unflatten(0, (4, -1))[order].flatten()


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", FEW_ROWS)
def test_batches_of_few_rows_in_another_order(name: str, kfac_approx: str) -> None:
    """With "reduce" the eigenvalues are those of positions, and the factors, whose range may be less, of examples."""
    model, batches = few_rows(name)
    risk, kind = EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), EKFAC.using(kfac_approx=kfac_approx)
    found = []
    for change in (lambda batch: batch, mixed):
        estimator = CurvatureEstimator(risk, kind, vectors=Exact(), decay=0.8)
        v = torch.linspace(-1, 1, estimator._blank.shape[0], dtype=torch.float64)
        for number, batch in enumerate(batches):
            estimator.update(change(batch))
            if number == 2:
                estimator.refresh(0.01)
        of_data = curvature(risk.with_data([change(batches[0])]), kind, vectors=Exact())
        found.append((estimator.operator @ v, estimator.inverse() @ v, of_data @ v))
    for one, two in zip(*found, strict=True):
        close(one, two, 1e-10)


# --------------------------------------------------------------------------------------------------------------- loose


def test_a_looser_basis_is_near_and_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs whose variances decay, as those of trained layers do."""
    torch.manual_seed(0)
    X = torch.randn(500, 240).double() * torch.logspace(0, -8, 240).double()
    X = X @ torch.linalg.qr(torch.randn(240, 240).double())[0]
    model = nn.Sequential(nn.Linear(240, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, torch.randn(500, 2).double())])
    sizes, eigh = list[int](), torch.linalg.eigh
    exact = curvature(risk, EKFAC)
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: sizes.append(len(M)) or eigh(M))
    norms = []
    for rtol in (0.0, 1e-4, 1e-2):
        K = curvature(risk, EKFAC.using(basis_rtol=rtol))
        torch.testing.assert_close(K.trace, exact.trace, rtol=1e-12, atol=0)
        norms.append(float(K.frobenius_norm / exact.frobenius_norm))
    # The squared distance to the block is its square norm minus that of EKFAC, in every orthogonal basis.
    assert norms == [pytest.approx(1, rel=rtol) for rtol in (1e-12, 1e-4, 1e-2)]
    assert norms[2] != norms[0]
    whole, less, least = (max(sizes[k : k + 4]) for k in (0, 4, 8))
    assert whole == 241
    assert least < less < 133


# ------------------------------------------------------------------------------------------------------------- threads


def three_layers() -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(110, 130), nn.ReLU(), nn.Linear(130, 120), nn.ReLU(), nn.Linear(120, 3)).double()
    data = [(torch.randn(40, 110).double(), torch.randint(3, (40,))) for _ in range(2)]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


@pytest.mark.usefixtures("two_threads")
def test_several_threads_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers of threads stay, those of new threads too, which begin with the last that any was given."""
    risk, seen, eigenbasis = three_layers(), set(), ekfac.eigenbasis
    v = torch.linspace(-1, 1, sum(p.numel() for p in risk.params.values()), dtype=torch.float64)

    def found() -> tuple[Tensor, Tensor]:
        K, estimator = curvature(risk, EKFAC), CurvatureEstimator(risk, EKFAC, damping=0.1)
        for batch in risk.data:
            estimator.update(batch)
        estimator.refresh()
        return K @ v, estimator.operator.trace

    torch.set_num_threads(1)
    expected = found()
    torch.set_num_threads(2)
    monkeypatch.setattr(ekfac, "eigenbasis", lambda *a, **o: seen.add(threading.get_ident()) or eigenbasis(*a, **o))
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
