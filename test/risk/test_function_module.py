"""Functions of parameters and an input do what modules do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    EmpiricalRisk,
    Hessian,
    Laplace,
    attribution_scores,
    curvature,
    load,
    save,
)
from test.helpers import F64, normal

Params = Mapping[str, Tensor]
LOSS = nn.CrossEntropyLoss()
DATA = [(normal(n, 4, seed=n), torch.arange(n) % 3) for n in (6, 5)]


def two_layers(p: Params, X: Tensor) -> Tensor:
    return torch.tanh(X @ p["W1"].T + p["b1"]) @ p["W2"].T


def values() -> dict[str, Tensor]:
    return {"W1": normal(6, 4, seed=1), "b1": normal(6, seed=2), "W2": normal(3, 6, seed=3)}


def twin(params: Params) -> nn.Module:
    """The same network of modules."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(F64)
    with torch.no_grad():
        for p, value in zip(net.parameters(), params.values(), strict=True):
            p.copy_(value)
    return net


def blocks(risk: EmpiricalRisk, approximation: Any) -> BlockwiseLinearOperator:
    """Of weights and biases apart, since the function adds biases by itself."""
    return curvature(risk, approximation, separate_weight_and_bias=True)


OPERATORS: dict[str, Callable[[EmpiricalRisk], Tensor]] = {
    "GGN": lambda risk: GGN(risk).to_dense(),
    "Hessian": lambda risk: Hessian(risk).to_dense(),
    "KFAC": lambda risk: blocks(risk, KFAC).to_dense(),
    "EKFAC": lambda risk: blocks(risk, EKFAC).to_dense(),
    "Laplace": lambda risk: Laplace(blocks(risk, KFAC), prior_precision=2.0).predict(DATA[0][0]),  # type: ignore[return-value]
    "scores": lambda risk: attribution_scores(blocks(risk, EKFAC).inverse(0.1), risk, risk),
    "gradient": lambda risk: torch.cat([g.flatten() for g in risk.gradient().values()]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_equal_to_modules(name: str) -> None:
    params = values()
    as_function = EmpiricalRisk(two_layers, LOSS, DATA, params)
    as_module = EmpiricalRisk(twin(params), LOSS, DATA)
    assert as_function.space.shapes == {"W1": (6, 4), "b1": (6,), "W2": (3, 6)}
    torch.testing.assert_close(
        OPERATORS[name](as_function), OPERATORS[name](as_module), rtol=1e-11, atol=1e-13
    )


def test_hessian_is_that_of_autograd() -> None:
    params = values()
    X, y = DATA[0]

    def loss(*tensors: Tensor) -> Tensor:
        return LOSS(two_layers(dict(zip(params, tensors, strict=True)), X), y)

    blocks = torch.autograd.functional.hessian(loss, tuple(params.values()))
    rows = [torch.cat([b.reshape(p.numel(), -1) for b in row], 1)
            for p, row in zip(params.values(), blocks, strict=True)]  # fmt: skip
    H = Hessian(EmpiricalRisk(two_layers, LOSS, [(X, y)], params)).to_dense()
    torch.testing.assert_close(H, torch.cat(rows))


def test_functional_call() -> None:
    """Of the parameters of a module, under its names, which have dots; some names are attributes of
    all modules.
    """
    net = twin(values())
    params = dict(net.named_parameters())
    risk = EmpiricalRisk(lambda p, X: torch.func.functional_call(net, p, (X,)), LOSS, DATA, params)
    assert [*risk.space.shapes] == ["0.weight", "0.bias", "2.weight"]
    assert [*dict(risk.model.named_parameters())] == [*params]
    K = curvature(risk, KFAC)
    assert [*K.blocks] == ["0", "2"]
    expected = curvature(EmpiricalRisk(net, LOSS, DATA), KFAC).to_dense()
    torch.testing.assert_close(K.to_dense(), expected)
    odd = {"training": params["0.weight"], "forward.a": params["0.bias"], "T": params["2.weight"]}
    risk = EmpiricalRisk(
        lambda p, X: two_layers({"W1": p["training"], "b1": p["forward.a"], "W2": p["T"]}, X),
        LOSS,
        DATA,
        odd,
    )
    assert [*risk.space.shapes] == [*odd]
    expected = blocks(EmpiricalRisk(net, LOSS, DATA), KFAC).to_dense()
    torch.testing.assert_close(curvature(risk, KFAC).to_dense(), expected)


def test_values_are_read_when_they_are_used() -> None:
    """The given tensors keep what they are, and changes in place count."""
    params = values()
    params["W1"].requires_grad_()
    risk = EmpiricalRisk(two_layers, LOSS, DATA, params)
    before = float(risk.loss())
    risk.gradient()
    assert params["W1"].grad is None
    assert not params["W2"].requires_grad
    with torch.no_grad():
        params["W1"].zero_()
        params["b1"].zero_()
    after = float(risk.loss())
    assert after == pytest.approx(torch.log(torch.tensor(3.0)).item()) != before


def test_inputs_by_keyword() -> None:
    """A batch that is a mapping is unpacked, as for modules."""
    params = values()
    items = [{"shift": 0 * X, "inputs": X, "labels": y} for X, y in DATA]
    risk = EmpiricalRisk(
        lambda p, inputs, shift: two_layers(p, inputs) + shift.sum(), LOSS, items, params
    )
    plain = EmpiricalRisk(two_layers, LOSS, DATA, params)
    torch.testing.assert_close(curvature(risk).to_dense(), curvature(plain).to_dense())


def test_a_life(tmp_path: Path) -> None:
    """Made, saved, loaded with the function, and continued by an estimator."""
    params = values()
    risk = EmpiricalRisk(two_layers, LOSS, DATA, params)
    K = curvature(risk, EKFAC)
    save(K.state_dict(), tmp_path / "K.safetensors")
    loaded = BlockwiseLinearOperator.from_state_dict(
        load(tmp_path / "K.safetensors"), two_layers, params=params
    )
    assert torch.equal(loaded.to_dense(), K.to_dense())
    estimator = CurvatureEstimator(risk.with_data(()), KFAC)
    estimator.update(DATA[0])
    estimator.update(DATA[1])
    torch.testing.assert_close(estimator.operator.to_dense(), curvature(risk, KFAC).to_dense())
