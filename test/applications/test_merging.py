"""Merged networks against the dense formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import unchanged
from helpers import F64, normal
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    NoClosedForm,
    RelativeDamping,
    curvature,
    merge,
)
from curvlinops_plus.linalg import Dense, Structure


def experts(number: int = 2, make: Any = None) -> list[nn.Module]:
    torch.manual_seed(0)
    base = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) if make is None else make()).double()
    models = [copy.deepcopy(base) for _ in range(number)]
    for model in models:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return models


def risks_of(models: list[nn.Module], shape: tuple[int, ...] = (12, 3), **options: Any) -> list[EmpiricalRisk]:
    return [
        EmpiricalRisk(model, nn.MSELoss(), [(normal(*shape, seed=k), normal(shape[0], 2, seed=9 + k))], **options)
        for k, model in enumerate(models)
    ]


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expected(models: list[nn.Module], matrices: list[Tensor], damping: Tensor | float) -> Tensor:
    """`θ̄ + (Σ K + δ)⁻¹ Σ K (θ_k - θ̄)`."""
    vectors = [vector(model) for model in models]
    average = torch.stack(vectors).mean(0)
    right = torch.stack([M @ (v - average) for M, v in zip(matrices, vectors)]).sum(0)
    delta = torch.as_tensor(damping, dtype=F64) * torch.ones(len(average), dtype=F64)
    return average + torch.linalg.solve(torch.stack(matrices).sum(0) + torch.diag(delta), right)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock, KFAC.using(kfac_approx="reduce")])
def test_the_formula(approximation, number) -> None:
    models = experts(number)
    curvatures = [curvature(risk, approximation) for risk in risks_of(models)]
    with unchanged(*models):
        merged = merge(models, curvatures, damping=1e-2)
    assert type(merged) is type(models[0])
    assert all(merged is not model for model in models)
    found = expected(models, [K.to_dense() for K in curvatures], 1e-2)
    torch.testing.assert_close(vector(merged), found, rtol=1e-6, atol=1e-7)


def test_matrix_free() -> None:
    models = experts()
    curvatures = [GGN(risk) for risk in risks_of(models)]
    merged = merge(models, curvatures, damping=1e-2)
    found = expected(models, [K.to_dense() for K in curvatures], 1e-2)
    torch.testing.assert_close(vector(merged), found, rtol=1e-5, atol=1e-6)
    with pytest.raises(NoClosedForm, match="trace"):  # what the default damping is relative to
        merge(models, curvatures)


def test_default_damping_is_relative_to_each_block() -> None:
    models = experts()
    curvatures = [curvature(risk, FullBlock) for risk in risks_of(models)]
    total = sum(K.to_dense() for K in curvatures)
    assert isinstance(total, Tensor)
    delta, start = torch.zeros(len(total), dtype=F64), 0
    for module in (models[0][0], models[0][2]):
        stop = start + sum(p.numel() for p in module.parameters())
        delta[start:stop] = 0.1 * total.diagonal()[start:stop].mean()
        start = stop
    found = expected(models, [K.to_dense() for K in curvatures], delta)
    torch.testing.assert_close(vector(merge(models, curvatures)), found, rtol=1e-8, atol=1e-9)


def test_large_damping_is_the_average_and_equal_networks_stay() -> None:
    models = experts()
    curvatures = [curvature(risk, KFAC) for risk in risks_of(models)]
    average = (vector(models[0]) + vector(models[1])) / 2
    torch.testing.assert_close(vector(merge(models, curvatures, damping=1e12)), average)
    same = [models[0], copy.deepcopy(models[0])]
    curvatures = [curvature(risk, KFAC) for risk in risks_of(same)]
    torch.testing.assert_close(vector(merge(same, curvatures)), vector(models[0]))
    single = merge(models[:1], curvatures[:1])
    assert torch.equal(vector(single), vector(models[0]))


def test_multiples_weigh() -> None:
    models = experts()
    K, L = (curvature(risk, DiagonalBlock) for risk in risks_of(models))
    merged = merge(models, [1e9 * K, L], damping=RelativeDamping(1e-12))
    torch.testing.assert_close(vector(merged), vector(models[0]), rtol=1e-6, atol=1e-6)


def test_convolutions_norms_and_some_parameters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2))

    models = experts(2, make)
    approximations = {nn.LayerNorm: FullBlock}
    risks = risks_of(models, (5, 1, 4, 4))
    curvatures = [curvature(risk, approximations, default=KFAC) for risk in risks]
    found = expected(models, [K.to_dense() for K in curvatures], 1e-2)
    torch.testing.assert_close(vector(merge(models, curvatures, damping=1e-2)), found, rtol=1e-6, atol=1e-7)
    heads = [EmpiricalRisk(r.model, nn.MSELoss(), r.data, list(r.model[3].parameters())) for r in risks]
    of_heads = [curvature(risk, KFAC) for risk in heads]
    with pytest.raises(ValueError, match=r"The networks differ in \['0.weight', '0.bias'"):
        merge(models, of_heads)
    models[1].load_state_dict({**models[0].state_dict(), "3.weight": models[1][3].weight.detach()})
    order = [EmpiricalRisk(m, nn.MSELoss(), risks[0].data, [m[3].bias, m[3].weight]) for m in models]
    curvatures = [curvature(risk, KFAC) for risk in order]
    merged = merge(models, curvatures, damping=1e-2)
    assert torch.equal(merged[0].weight, models[0][0].weight)
    total = sum(K.to_dense() for K in curvatures) + 1e-2 * torch.eye(18, dtype=F64)
    vectors = [risk.vector() for risk in order]
    average = (vectors[0] + vectors[1]) / 2
    right = sum(K.to_dense() @ (v - average) for K, v in zip(curvatures, vectors))
    solved = average + torch.linalg.solve(total, right)
    torch.testing.assert_close(merged[3].bias.detach(), solved[:2], rtol=1e-6, atol=1e-7)


def test_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight, self.last = self.first.weight, nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

    models = experts(2, Tied)
    curvatures = [curvature(risk, FullBlock) for risk in risks_of(models)]
    merged = merge(models, curvatures, damping=1e-2)
    assert merged.second.weight is merged.first.weight
    found = expected(models, [K.to_dense() for K in curvatures], 1e-2)
    torch.testing.assert_close(vector(merged), found, rtol=1e-6, atol=1e-7)


def test_what_is_refused() -> None:
    models = experts()
    curvatures = [curvature(risk, KFAC) for risk in risks_of(models)]
    with pytest.raises(ValueError, match="Expected a curvature for each model, got 2 models, 1 curvatures"):
        merge(models, curvatures[:1])
    with pytest.raises(ValueError, match="got 0 models"):
        merge([], [])
    with pytest.raises(ValueError, match=r"curvatures\[0\] was computed from another network than models\[0\]"):
        merge(models, curvatures[::-1])
    with pytest.raises(TypeError, match=r"curvatures\[1\]: expected an operator.* got Tensor"):
        merge(models, [curvatures[0], torch.eye(26)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"curvatures\[0\]: expected a symmetric matrix"):
        merge(models, [Dense(normal(26, 26))] * 2)
    with pytest.raises(ValueError, match=r"curvatures\[0\] is over .* the network has no parameters of these names"):
        merge(models, [Dense(torch.eye(26, dtype=F64), Structure.PSD)] * 2)
    norms = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval() for _ in range(2)]
    norms[1][1].running_mean.add_(1.0)
    with pytest.raises(ValueError, match=r"differ in \['1.running_mean'\], of which there is no curvature"):
        merge(norms, [curvature(risk, DiagonalBlock) for risk in risks_of(norms)])


@pytest.mark.parametrize("make", [GGN, lambda risk: curvature(risk, KFAC)], ids=["GGN", "KFAC"])
def test_curvatures_at_other_values_are_refused(make: Any) -> None:
    """A curvature at averaged parameters is not that of the network's own."""
    models = experts()
    risks = risks_of(models)
    other = {key: p.detach() + 0.1 for key, p in risks[1].params.items()}
    same = {key: p.detach().clone() for key, p in risks[1].params.items()}
    at = [EmpiricalRisk(models[1], nn.MSELoss(), risks[1].data, values) for values in (other, same)]
    with pytest.raises(ValueError, match=r"curvatures\[1\] was computed at other values of \['0.weight', .* Load them"):
        merge(models, [make(risks[0]), make(at[0])], damping=0.1)
    merge(models, [make(risks[0]), make(at[1])], damping=0.1)


def test_curvatures_of_before_more_training_are_refused() -> None:
    models = experts()
    curvatures = [curvature(risk, KFAC) for risk in risks_of(models)]
    with torch.no_grad():
        next(models[1].parameters()).add_(0.1)
    with pytest.raises(ValueError, match=r"\['0.weight'\] have changed since curvatures\[1\] was computed"):
        merge(models, curvatures, damping=0.1)
