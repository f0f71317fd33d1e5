"""A convolution whose weight is scaled by a norm beside it, as in quantization-aware training: the
weight is a table, and the norm's scale is read in two ways.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import DiagonalBlock, EmpiricalRisk, KFACOptimizer, curvature
from test.cases import close
from test.helpers import normal

pytestmark = pytest.mark.filterwarnings("default:.*(exact diagonal|preconditioner):UserWarning")


class Folded(nn.Module):
    """`norm(conv(x, w s) / s + b)` with the scale `s` of the norm; rounding passes gradients on."""

    def __init__(self, bias: bool, rounded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 3))
        self.bias = nn.Parameter(torch.randn(3)) if bias else None
        self.norm = nn.BatchNorm1d(3)
        self.rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        scale = self.norm.weight / (self.norm.running_var + 0.1).sqrt()  # type: ignore[operator]
        w = self.weight * scale[:, None, None]
        if self.rounded:
            w = w + (w.round(decimals=1) - w).detach()
        y = F.conv1d(x, w) / scale[:, None]
        if self.bias is not None:
            y = y + self.bias[:, None]
        return torch.tanh(self.norm(y))


def model_of(bias: bool, rounded: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Folded(bias, rounded), nn.Flatten(), nn.Linear(9, 2)).double()


every = pytest.mark.parametrize(
    ("bias", "rounded"), [(True, True), (False, True), (True, False)], ids=str
)


@every
def test_diagonals(bias: bool, rounded: bool) -> None:
    model = model_of(bias, rounded).eval()
    data = [(normal(5, 2, 5, seed=1), normal(5, 2, seed=2))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), DiagonalBlock)
    rows = []
    for number in model(data[0][0]).flatten():
        back = torch.autograd.grad(number, [*model.parameters()], retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in back]))
    close(K.diagonal(), torch.stack(rows).square().sum(0) * 2 / 10)


@every
def test_only_the_scale_of_the_norm_is_trained_without_preconditioner(
    bias: bool, rounded: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = model_of(bias, rounded)
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(model, loss)
    x = normal(8, 2, 5, seed=1)
    y = normal(8, 2, seed=2)
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]
    assert optimizer.curvature.withdrawn == ["0"]
    told = [str(warning.message) for warning in recwarn]
    assert any("gradients of ['0.norm.weight'] are taken as they are" in text for text in told)
