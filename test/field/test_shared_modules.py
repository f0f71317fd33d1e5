"""A module that a model has in two places, where it is run again with other tensors in place of its
parameters: it keeps its own ones, and gradients are those of both places.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    KFACOptimizer,
    Laplace,
    StochasticReconfiguration,
    curvature,
)
from test.cases import close
from test.helpers import normal


class Gated(nn.Module):
    """A layer in two places, and a gate that reads columns: it takes a rerun of all of it."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.again = nn.Sequential(self.layer)
        self.norm = nn.BatchNorm1d(3, affine=False) if norm else nn.Identity()
        self.norm_again = self.norm
        self.gate = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.layer(x)))
        mixed = torch.einsum("ni,i,ki->nk", h, self.layer.weight[:, 0], self.gate)
        return mixed + self.norm_again(self.again(h))[:, :2]


def gated(norm: bool = False) -> Gated:
    torch.manual_seed(0)
    model = Gated(norm).double()
    with torch.no_grad():
        model(normal(9, 3, seed=1))
    return model.eval()


def held(model: nn.Module) -> list[Tensor]:
    return [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())]  # type: ignore[misc]


def gradients(model: nn.Module, numbers: Tensor) -> Tensor:
    """[numbers, P], by plain autograd."""
    rows = []
    for number in numbers.flatten():
        back = torch.autograd.grad(number, [*model.parameters()], retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in back]))
    return torch.stack(rows)


@pytest.mark.parametrize("norm", [False, True], ids=["parameters", "buffers"])
def test_reruns_leave_a_shared_module_as_it_is(norm: bool) -> None:
    model = gated(norm)
    before = held(model)
    data = [(normal(4, 3, seed=2), normal(4, 2, seed=3))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), DiagonalBlock)
    assert all(t is b for t, b in zip(held(model), before, strict=True))
    J = gradients(model, model(data[0][0]))
    close(K.diagonal(), 2 * J.square().sum(0) / 8)


def test_training_moves_the_parameters_of_a_shared_module() -> None:
    model = gated()
    before = held(model)
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, approximation=DiagonalBlock)
    x = normal(4, 3, seed=2)
    y = normal(4, 2, seed=3)
    values = []
    model.train()
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        values.append(float(value))
    assert values == sorted(values, reverse=True)
    assert all(t is b for t, b in zip(held(model), before, strict=True))


def test_derivatives_of_predictions_leave_a_shared_module_as_it_is() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer).double()
    before = held(model)
    data = [(normal(4, 3, seed=2), normal(4, 3, seed=3))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), KFAC)
    x = normal(2, 3, seed=4).requires_grad_()
    _, covariance = Laplace(K, 1.0, noise=1.0).outputs(x)
    assert covariance.requires_grad
    assert all(t is b for t, b in zip(held(model), before, strict=True))
    J = gradients(model, model(x)).view(2, 3, -1)
    S = Laplace(K, 1.0, noise=1.0).posterior.to_dense()
    close(covariance, J @ S @ J.mT)


def test_reconfiguration_leaves_a_shared_module_as_it_is() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 1)).double()
    before = held(model)
    samples = normal(6, 3, seed=2)
    energies = normal(6, seed=3)
    StochasticReconfiguration(model, lr=0.1, damping=1e-2).step(samples, energies)
    assert all(t is b for t, b in zip(held(model), before, strict=True))
