"""Merged networks against the dense formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    curvature,
    merge,
)
from test.cases import unchanged
from test.helpers import F64, normal
from test.nets import tanh_net


def mlp() -> nn.Module:
    return tanh_net(3, 4, 2)


def experts(number: int = 2, make: Callable[[], nn.Module] = mlp) -> list[Any]:
    torch.manual_seed(0)
    base = make().double()
    models = [copy.deepcopy(base) for _ in range(number)]
    for model in models:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return models


def risks_of(models: list[Any], *shape: int, **options: Any) -> list[EmpiricalRisk]:
    shape = shape or (12, 3)
    data = [[(normal(*shape, seed=k), normal(shape[0], 2, seed=9 + k))] for k in range(len(models))]
    return [
        EmpiricalRisk(model, nn.MSELoss(), own, **options)
        for model, own in zip(models, data, strict=True)
    ]


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expected(vectors: list[Tensor], matrices: list[Tensor], damping: Tensor | float) -> Tensor:
    """`θ̄ + (Σ K + δ)⁻¹ Σ K (θ_k - θ̄)`."""
    average = torch.stack(vectors).mean(0)
    right = torch.stack([M @ (v - average) for M, v in zip(matrices, vectors, strict=True)]).sum(0)
    delta = torch.as_tensor(damping, dtype=F64) * torch.ones(len(average), dtype=F64)
    return average + torch.linalg.solve(torch.stack(matrices).sum(0) + torch.diag(delta), right)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight, self.last = self.first.weight, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2))


Curvature = Callable[[EmpiricalRisk], Any]
#: Curvatures, of how many networks of which kind.
CURVATURES: dict[str, tuple[Curvature, int, Callable[[], nn.Module], tuple[int, ...]]] = {
    "KFAC": (lambda risk: curvature(risk, KFAC), 2, mlp, ()),
    "EKFAC": (lambda risk: curvature(risk, EKFAC), 3, mlp, ()),
    "diagonal": (lambda risk: curvature(risk, DiagonalBlock), 2, mlp, ()),
    "full blocks": (lambda risk: curvature(risk, FullBlock), 3, mlp, ()),
    "matrix-free": (GGN, 2, mlp, ()),
    "mixed": (
        lambda risk: curvature(risk, {nn.LayerNorm: FullBlock}, default=KFAC),
        2,
        cnn,
        (5, 1, 4, 4),
    ),
    "tied": (lambda risk: curvature(risk, FullBlock), 2, Tied, ()),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_the_formula(name: str) -> None:
    make_curvature, number, make, shape = CURVATURES[name]
    models = experts(number, make)
    curvatures = [make_curvature(risk) for risk in risks_of(models, *shape)]
    with unchanged(*models):
        merged = merge(models, curvatures, damping=1e-2)
    assert type(merged) is type(models[0])
    assert all(merged is not model for model in models)
    found = expected([vector(model) for model in models], [K.to_dense() for K in curvatures], 1e-2)
    torch.testing.assert_close(vector(merged), found, rtol=1e-5, atol=1e-6)
    if name == "tied":
        assert merged.second.weight is merged.first.weight


def test_default_damping_is_relative_to_each_block() -> None:
    models = experts()
    curvatures = [curvature(risk, FullBlock) for risk in risks_of(models)]
    total = torch.stack([K.to_dense() for K in curvatures]).sum(0)
    means = [
        0.1 * block.mean() * torch.ones_like(block) for block in total.diagonal().split([16, 10])
    ]
    found = expected(
        [vector(model) for model in models], [K.to_dense() for K in curvatures], torch.cat(means)
    )
    torch.testing.assert_close(vector(merge(models, curvatures)), found, rtol=1e-8, atol=1e-9)


def test_some_parameters_in_another_order() -> None:
    models = experts(2, cnn)
    models[1].load_state_dict({**models[0].state_dict(), "3.weight": models[1][3].weight.detach()})
    data = risks_of(models, 5, 1, 4, 4)[0].data
    risks = [EmpiricalRisk(m, nn.MSELoss(), data, [m[3].bias, m[3].weight]) for m in models]
    curvatures = [curvature(risk, KFAC) for risk in risks]
    merged = merge(models, curvatures, damping=1e-2)
    assert torch.equal(merged[0].weight, models[0][0].weight)
    found = expected([risk.vector() for risk in risks], [K.to_dense() for K in curvatures], 1e-2)
    torch.testing.assert_close(merged[3].bias.detach(), found[:2], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(merged[3].weight.detach().flatten(), found[2:], rtol=1e-6, atol=1e-7)
