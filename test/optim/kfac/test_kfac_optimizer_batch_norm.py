"""Batch norm in networks that the K-FAC optimizer trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, UnsupportedError
from curvlinops_plus.optim import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt
from test.optim.kfac.training import batch, plain

LM = LevenbergMarquardt


@pytest.mark.filterwarnings(
    "ignore:.*batch norm in training mode", "ignore:.*get their exact diagonal"
)
@pytest.mark.parametrize(
    "options", [{}, {"default": EKFAC}, {"damping": LM(0.1, interval=1), "reject": 2.0}], ids=str
)
def test_batch_norm_is_trained_by_default(options: dict[str, Any]) -> None:
    """With the diagonal of the gradients of each example as the pass has them."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    model, loss, X = (
        nn.Sequential(*layers).double(),
        nn.CrossEntropyLoss(),
        torch.randn(30, 1, 4, 4).double(),
    )
    y = X.flatten(1)[:, :3].argmax(1)
    before = loss(model(X), y).item()
    with KFACOptimizer(
        model, loss, lr=0.3, norm_constraint=1e-1, vectors="empirical", **options
    ) as optimizer:
        h, z = model[0](X).detach(), model[0](X).detach().requires_grad_()
        h = nn.functional.batch_norm(h, None, None, training=True)
        out = nn.functional.batch_norm(z, None, None, model[1].weight, model[1].bias, training=True)
        out.retain_grad()
        (30 * loss(model[2:](out), y)).backward()
        plain(optimizer, model, loss, X, y)
        rows = torch.cat([(out.grad * h).sum((2, 3)), out.grad.sum((2, 3))], 1)
        K = optimizer.curvature.refreshed.operator
        found = K.layouts["1"].split(K.blocks["1"].diagonal()[:, None])
        torch.testing.assert_close(
            torch.cat([t.flatten() for t in found.values()]), rows.square().mean(0)
        )
        for _ in range(20):
            plain(optimizer, model, loss, X, y)
        assert optimizer.last_step.left_alone == []
        assert loss(model(X), y).item() < 0.5 * before


def test_batch_norm_between_layers() -> None:
    model, loss = (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double(),
        nn.CrossEntropyLoss(),
    )
    optimizer = KFACPreconditioner(
        model, loss, params=[*model[0].parameters(), *model[2].parameters()]
    )
    plain(optimizer, model, loss, *batch())


@pytest.mark.filterwarnings(
    "ignore:.*batch norm in training mode", "ignore:.*get their exact diagonal"
)
def test_parameters_read_around_batch_norm_belong_to_another_optimizer() -> None:
    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    model, loss = Scaled().double(), nn.CrossEntropyLoss()
    with (
        KFACOptimizer(model, loss) as optimizer,
        pytest.raises(UnsupportedError, match="read around it to another"),
    ):
        plain(optimizer, model, loss, *batch())
    scale = model.scale.detach().clone()
    with KFACOptimizer(
        model, loss, params=[p for p in model.parameters() if p is not model.scale]
    ) as optimizer:
        plain(optimizer, model, loss, *batch())
    assert model.scale.equal(scale)
