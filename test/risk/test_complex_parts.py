"""Complex parameters as pairs of real ones, against derivatives with respect to both parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from curvlinops_plus import (
    GGN,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    Hessian,
    KFACOptimizer,
    curvature,
    load,
    save,
    split_complex,
)
from curvlinops_plus.blocks import BlockwiseLinearOperator
from test.helpers import normal

LOSS = nn.MSELoss()
X = normal(6, 1, 8)
Y = normal(6, 1, 8, seed=1)


class Spectral(nn.Module):
    """Multiplies Fourier coefficients of channels, as neural operators do."""

    def __init__(self, inputs: int, outputs: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        weight = torch.complex(
            normal(inputs, outputs, modes), normal(inputs, outputs, modes, seed=1)
        )
        self.weight = nn.Parameter(0.3 * weight)

    def forward(self, x: Tensor) -> Tensor:
        coefficients = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("nik,iok->nok", coefficients, self.weight)
        return torch.fft.irfft(mixed, n=x.shape[-1])


def neural_operator() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 2, 1), Spectral(2, 2, 3), nn.Tanh(), nn.Conv1d(2, 1, 1)
    return nn.Sequential(*layers).double()


def of_parts(model: nn.Module) -> Any:
    """The loss as a function of one real vector, in the order of the parameters, by `view_as_real`;
    real and imaginary part of a parameter one after the other.
    """
    params = dict(model.named_parameters())

    def loss(v: Tensor) -> Tensor:
        values, at = {}, 0
        for name, p in params.items():
            sizes = [p.numel()] * (2 if p.is_complex() else 1)
            parts = [part.view(p.shape) for part in v[at : at + sum(sizes)].split(sizes)]
            values[name] = torch.view_as_complex(torch.stack(parts, -1)) if parts[1:] else parts[0]
            at += sum(sizes)
        return LOSS(torch.func.functional_call(model, values, (X,)), Y)

    tensors = [
        torch.view_as_real(p).unbind(-1) if p.is_complex() else (p,) for p in params.values()
    ]
    return loss, torch.cat([t.detach().flatten() for parts in tensors for t in parts])


def test_equal_to_derivatives_in_both_parts() -> None:
    loss, v = of_parts(neural_operator())
    expected = torch.autograd.functional.hessian(loss, v)
    gradient = torch.autograd.functional.jacobian(loss, v)
    model = neural_operator()
    before = model(X)
    assert split_complex(model) == ["1.weight"]
    assert torch.equal(model(X), before)
    risk = EmpiricalRisk(model, LOSS, [(X, Y)])
    torch.testing.assert_close(Hessian(risk).to_dense(), expected)
    ours = torch.cat([g.flatten() for g in risk.gradient().values()])
    torch.testing.assert_close(ours, gradient)
    G = GGN(risk).to_dense()
    torch.testing.assert_close(curvature(risk, DiagonalBlock).diagonal(), G.diagonal())
    full = curvature(risk, FullBlock)
    positions = full.operator.positions()["1"]
    torch.testing.assert_close(full.blocks["1"].to_dense(), G[positions][:, positions])


def test_frozen_and_real_parameters_stay() -> None:
    model = neural_operator()
    model[1].weight.requires_grad_(False)
    split_complex(model)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]
    assert split_complex(model) == []
    model = neural_operator()
    split_complex(model)
    parametrize.remove_parametrizations(model[1], "weight")
    for p, before in zip(model.parameters(), neural_operator().parameters(), strict=True):
        assert torch.equal(p, before)


def test_shared_parameters_are_not_divided() -> None:
    """Two copies would be trained apart."""
    model = nn.Sequential(Spectral(2, 2, 3), Spectral(2, 2, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' are one complex"):
        split_complex(model)
    assert [name for name, _ in model.named_parameters()] == ["0.weight"]
    assert model[0].weight is model[1].weight


@pytest.mark.filterwarnings("ignore:1 of 3 layers get their exact diagonal")
def test_a_life(tmp_path: Path) -> None:
    """Trained, saved, loaded with the model of another process."""
    model = neural_operator()
    split_complex(model)
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, lr=0.1, damping=1e-2)
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        optimizer.step()
        values.append(float(value))
    assert values[-1] < 0.96 * values[0]
    K = curvature(EmpiricalRisk(model, loss, [(X, Y)]), FullBlock)
    save(K.state_dict(), tmp_path / "K.safetensors")
    other = neural_operator()
    split_complex(other)
    other.load_state_dict(model.state_dict())
    loaded = BlockwiseLinearOperator.from_state_dict(load(tmp_path / "K.safetensors"), other)
    assert torch.equal(loaded.to_dense(), K.to_dense())


def test_the_message_says_it() -> None:
    with pytest.raises(ValueError, match=r"split_complex\(model\)"):
        EmpiricalRisk(neural_operator(), LOSS, [(X, Y)])
