"""Statistics of networks in float16, whose gradients leave its range."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    KFAC,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    GGNFactor,
    Hessian,
    Jacobian,
    MonteCarlo,
    NumericsError,
    curvature,
)
from curvlinops_plus.risk import Vectors

X, Y = torch.linspace(-1, 1, 32 * 6).view(32, 6).sin(), torch.arange(32) % 3
VECTORS = [Exact(), MonteCarlo(samples=2), Empirical()]


def net(before: float, after: float) -> nn.Module:
    """A network in float16; gradients are about `before * after` times as large below as at the
    output.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for layer, factor in ((model[2], before), (model[4], after)):
            assert isinstance(layer, nn.Linear)
            layer.weight *= factor
    return model.half()


def risk_of(
    model: nn.Module, X: Tensor = X, y: Tensor = Y, loss: nn.Module | None = None
) -> EmpiricalRisk:
    dtype = next(model.parameters()).dtype
    return EmpiricalRisk(model, loss or nn.CrossEntropyLoss(), [(X.to(dtype), y)])


def blocks(
    model: nn.Module, approximation: Any, vectors: Vectors, **options: Any
) -> dict[str, Tensor]:
    K = curvature(risk_of(model, **options), approximation, vectors=vectors)
    return {name: block.to_dense() for name, block in K.blocks.items()}


def require_like_twin(
    model: nn.Module, approximation: Any, vectors: Vectors, rtol: float, **options: Any
) -> None:
    ours = blocks(model, approximation, vectors, **options)
    theirs = blocks(copy.deepcopy(model).double(), approximation, vectors, **options)
    for name, block in ours.items():
        assert theirs[name].any()
        assert torch.dist(block.double(), theirs[name]) <= rtol * theirs[name].norm(), name


@pytest.mark.parametrize("vectors", VECTORS, ids=repr)
@pytest.mark.parametrize("approximation", [KFAC, DiagonalBlock])
@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_gradients_that_are_small(vectors: Vectors, approximation: Any, factor: float) -> None:
    """Without a power of two the self-check refuses 1e-3."""
    require_like_twin(net(factor, factor), approximation, vectors, 5e-3)


@pytest.mark.parametrize("vectors", [Exact(), MonteCarlo(samples=2)], ids=repr)
def test_gradients_that_overflow(vectors: Vectors) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for p in model[0].parameters():
            p *= 1e-6  # inputs of what multiplies
        for layer in model[1:]:
            layer.weight *= 1000
    with pytest.raises(NumericsError, match=r"layer '0'.*NaN or infinite"):
        blocks(model.half(), KFAC, vectors, loss=nn.MSELoss(), y=torch.ones(32, 3))


def test_autocast_to_float16() -> None:
    """The gradients of layers are float16, and parameters, statistics and outputs are not."""

    class Inside(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.net = model.float()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return self.net(x).float()

    model = net(1e-3, 1e-3).float()
    ours, theirs = (
        blocks(m, KFAC, Exact()) for m in (Inside(model), copy.deepcopy(model).double())
    )
    for mine, twin in zip(ours.values(), theirs.values(), strict=True):
        assert torch.dist(mine.double(), twin) <= 2e-2 * twin.norm()


EXACT: dict[str, Any] = {
    "GGN": lambda risk, v: GGN(risk) @ v,
    "GGN, columns": lambda risk, v: GGN(risk) @ torch.stack([v, 1e-3 * v.flip(0)], 1),
    "Hessian": lambda risk, v: Hessian(risk) @ v,
    "Jacobian": lambda risk, v: Jacobian(risk) @ v,
    "factor": lambda risk, v: GGNFactor(risk).T @ v,
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("length", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_exact_operators_are_finite_where_they_are(name: str, length: float, factor: float) -> None:
    """Vectors, and what is backpropagated, are multiplied by powers of two; a Hessian of large
    gradients is refused.
    """
    model, loss = net(factor, factor), nn.MSELoss(reduction="sum")
    twin, y = copy.deepcopy(model).double(), torch.ones(32, 3)
    v = length * torch.cos(torch.arange(sum(p.numel() for p in model.parameters())))
    expected = EXACT[name](EmpiricalRisk(twin, loss, [(X.half().double(), y.double())]), v.double())
    risk = risk_of(model, y=y.half(), loss=loss)
    if name == "Hessian" and factor > 1:
        with pytest.raises(NumericsError, match="leaves the range of float16"):
            EXACT[name](risk, v)
    else:
        found = EXACT[name](risk, v)
        assert torch.dist(found.double(), expected) <= 3e-2 * expected.norm()
