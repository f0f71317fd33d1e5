"""EKFAC of batches of few rows is that of the examples, in whatever order they come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, Exact, curvature


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(6, 12), nn.MultiheadAttention(12, 3, batch_first=True)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.attention(h, h, h, need_weights=False)[0].mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def dead() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 230), nn.ReLU(), nn.Linear(230, 3))
    nn.init.constant_(model[0].bias[::2], -50.0)
    return model


PROBLEMS = {
    "attention": (Attends, (2, 6)),
    "convolutions": (convolutions, (4, 3, 3)),
    "dead units": (dead, (6,)),
    "wide": (lambda: nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 3)), (300,)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Flatten(0, 1)), (4, 6)),
}


def problem(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    made, shape = PROBLEMS[name]
    targets = (4, shape[0]) if name == "positions" else (4,)
    return made().double(), [(torch.randn(4, *shape).double(), torch.randint(3, targets).flatten()) for _ in range(4)]


def mixed(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same examples in another order."""
    X, y = batch
    order = torch.tensor([2, 0, 3, 1])
    return X[order], y.unflatten(0, (4, -1))[order].flatten()


def away(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_stream_in_another_order(name: str, kfac_approx: str) -> None:
    model, batches = problem(name)
    risk, kind = EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), EKFAC.using(kfac_approx=kfac_approx)
    found = []
    for change in (lambda batch: batch, mixed):
        estimator = CurvatureEstimator(risk, kind, default=EKFAC, vectors=Exact(), decay=0.8)
        v = torch.linspace(-1, 1, estimator._blank.shape[0], dtype=torch.float64)
        for number, batch in enumerate(batches):
            estimator.update(change(batch))
            if number == 2:
                estimator.refresh(0.01)
        found.append((estimator.operator @ v, estimator.inverse() @ v))
    assert all(away(*pair) < 1e-10 for pair in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["attention", "convolutions", "positions"])
def test_positions_outside_of_the_range_of_their_means(name: str) -> None:
    """With "reduce" the eigenvalues are those of positions, and the factors those of examples."""
    model, batches = problem(name)
    risk, kind = EmpiricalRisk(model, nn.CrossEntropyLoss(), batches[:1]), EKFAC.using(kfac_approx="reduce")
    one, two = (
        curvature(each, kind, default=EKFAC, vectors=Exact()) for each in (risk, risk.with_data([mixed(batches[0])]))
    )
    assert away(one.to_dense(), two.to_dense()) < 1e-10
