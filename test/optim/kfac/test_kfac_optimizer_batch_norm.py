"""Batch norm in networks that the K-FAC optimizer trains."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, UnsupportedError
from curvlinops_plus.optim import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt
from curvlinops_plus.risk import layer_batch
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


class Scaled(nn.Sequential):
    """A parameter that is read around batch norm, by a function that broadcasts it or another."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.scale, self.function = nn.Parameter(torch.ones(3)), function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x), self.scale)


@pytest.mark.filterwarnings(
    "ignore:.*batch norm in training mode", "ignore:.*get their exact diagonal"
)
def test_parameters_broadcast_around_batch_norm_are_trained() -> None:
    model, loss, (X, y) = Scaled(torch.mul), nn.CrossEntropyLoss(), batch()
    options: Any = {"vectors": "empirical", "norm_constraint": None, "momentum": 0.0, "lr": 0.5}
    with KFACOptimizer(model, loss, damping=0.1, **options) as optimizer:
        f = model(X)
        before = f / model.scale
        p = f.softmax(1) - nn.functional.one_hot(y, 3)
        squares = (p * before).square().mean(0)
        gradient = (p * before).mean(0)
        plain(optimizer, model, loss, X, y)
        assert optimizer.curvature.withdrawn == []
    torch.testing.assert_close(model.scale, 1 - 0.5 * gradient / (squares + 0.1))


@pytest.mark.filterwarnings(
    "ignore:.*batch norm in training mode", "ignore:.*get their exact diagonal"
)
def test_what_can_t_be_told_around_batch_norm_has_no_preconditioner() -> None:
    """One warning names it; a `CurvatureEstimator` refuses it, and so does a model of nothing
    else.
    """
    model, loss, (X, y) = Scaled(torch.maximum), nn.CrossEntropyLoss(), batch()
    options: Any = {"norm_constraint": None, "momentum": 0.0, "lr": 0.5}
    words = r"BatchNorm1d.* in training mode.*gradients of \['scale'\] .*without preconditioner"
    with KFACOptimizer(model, loss, damping=0.25, **options) as optimizer:
        for first in (True, False):
            before = model.scale.detach().clone()
            with optimizer.paused():
                (gradient,) = torch.autograd.grad(loss(model(X), y), model.scale)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                plain(optimizer, model, loss, X, y)
            messages = [str(each.message) for each in told]
            assert len([m for m in messages if re.search(words, m)]) == first
            torch.testing.assert_close(model.scale, before - 0.5 * gradient / 1.25)
    estimator = CurvatureEstimator(EmpiricalRisk(model, loss, ()))
    with pytest.raises(UnsupportedError, match=r"in training mode.*to another"):
        estimator.update((X, y))
    only = KFACOptimizer(model, loss, params=[model.scale])
    with pytest.raises(UnsupportedError, match="BatchNorm1d"):
        plain(only, model, loss, X, y)


class NormAct(nn.BatchNorm2d):
    """A norm with its activation, as of image models."""

    def forward(self, x: Tensor) -> Tensor:
        args = self.running_mean, self.running_var, self.weight, self.bias, self.training
        return nn.functional.batch_norm(x, *args, 0.1, self.eps).relu_()


@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
@pytest.mark.parametrize("separate", [False, True])
def test_norm_and_activation_in_one_module(separate: bool) -> None:
    """Its statistics are those of the whole batch, also where gradients are formed in pieces."""
    torch.manual_seed(0)
    norm: nn.Module = NormAct(3)
    layers = nn.Conv2d(1, 3, 3), norm, nn.Flatten(), nn.Linear(12, 3)
    model, loss = nn.Sequential(*layers).double(), nn.CrossEntropyLoss()
    X = torch.randn(30, 1, 4, 4).double()
    y = X.flatten(1)[:, :3].argmax(1)
    with KFACOptimizer(model, loss, vectors="empirical") as optimizer:
        z = model[0](X).detach()
        mean = z.mean((0, 2, 3), keepdim=True)
        h = (z - mean) / (z.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        out = (h * norm.weight[:, None, None] + norm.bias[:, None, None]).detach()  # type: ignore[index]
        out.requires_grad_()
        (30 * loss(model[3](out.relu().flatten(1)), y)).backward()
        assert out.grad is not None
        if separate:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layer_batch, "_PIECE_BYTES", 1000)
                plain(optimizer, model, loss, X, y)
        else:
            plain(optimizer, model, loss, X, y)
        rows = torch.cat([(out.grad * h).sum((2, 3)), out.grad.sum((2, 3))], 1)
        diagonal = optimizer.curvature.operator.blocks["1"].diagonal()
        torch.testing.assert_close(diagonal, rows.square().mean(0))
        assert optimizer.curvature.withdrawn == []
