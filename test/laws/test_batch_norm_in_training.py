"""Batch norm in training mode, in training loops: it mixes examples and is known for it; what else
does is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from curvlinops_plus import EKFAC, KFAC, CurvatureEstimator, DiagonalBlock, EmpiricalRisk
from test.cases import unchanged
from test.helpers import seeded

X, Y = torch.randn(7, 4, generator=seeded(1)).double(), torch.arange(7) % 3

pytestmark = pytest.mark.filterwarnings("ignore:.*are batch norm in training mode")


def normed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6, **options).requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(inplace=True), nn.Linear(6, 3)).double()


def estimate(model: nn.Module, approximation: Any, listening: bool, data: Any = (X, Y)) -> None:
    """Two steps of a training loop."""
    params = [p for p in model.parameters() if p.requires_grad]
    estimator = CurvatureEstimator(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), (), params), approximation
    )
    for _ in range(2):
        if not listening:
            with unchanged(model):
                estimator.update(data)
            continue
        with estimator.listen(data):
            loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("approximation", [KFAC, DiagonalBlock])
@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_no_false_alarm(
    options: dict[str, Any], approximation: Any, listening: bool, dtype: torch.dtype
) -> None:
    estimate(normed(**options).to(dtype), approximation, listening, (X.to(dtype), Y))


@pytest.mark.parametrize("listening", [False, True])
def test_no_false_alarm_with_images(listening: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.ReLU(inplace=True), nn.Dropout2d(), nn.Conv2d(3, 4, 3),
        nn.GELU(), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3, affine=False),
    )  # fmt: skip
    estimate(model, EKFAC, listening, (torch.randn(7, 2, 6, 6), Y))


def test_statistics_stay_those_of_the_pass_of_the_user() -> None:
    model, twin = normed(), normed()
    estimate(model, KFAC, True)
    for _ in range(2):
        twin(X)
    for ours, theirs in zip(model.buffers(), twin.buffers()):
        assert torch.equal(ours, theirs)
