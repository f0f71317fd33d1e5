"""States of operators: a kind of fault in each function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    FullBlock,
    GGNDiagonalLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    curvature,
    load,
    save,
)
from test.helpers import seeded
from test.nets import deep_tanh_net as net

LOSS = nn.MSELoss()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = seeded(5)
    return [
        (
            torch.randn(6, 3, generator=generator).double(),
            torch.randn(6, 2, generator=generator).double(),
        )
    ]


def truth(model: nn.Module, keys: list[str]) -> Tensor:
    """The GGN of the mean square over all outputs, by rows of the Jacobian, for these parameters in
    this order.
    """
    params, ((X, _),) = dict(model.named_parameters()), data()
    rows = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(f, [params[key] for key in keys], retain_graph=True)
            ]
        )
        for f in model(X).flatten()
    ]
    J = torch.stack(rows)
    return 2 * J.T @ J / len(J)


# ------------------------------------------------------------ the parameters that an operator is of
LAST = ["4.weight", "4.bias"]
SUBSETS = {
    "last layer": LAST,
    "another order": ["4.bias", "2.weight", "4.weight", "0.weight"],
    "no biases": ["0.weight", "2.weight", "4.weight"],
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("keys", SUBSETS.values(), ids=SUBSETS)
def test_a_state_knows_its_parameters(keys: list[str], frozen: bool, tmp_path: Path) -> None:
    """Which they are, and in which order vectors have them; whatever the model's own would be when
    it is loaded.
    """
    model = net()
    params = dict(model.named_parameters())
    K = curvature(EmpiricalRisk(model, LOSS, data(), [params[key] for key in keys]), FullBlock)
    save(K, tmp_path / "K.safetensors")
    other = net()
    other.requires_grad_(not frozen)
    loaded = BlockwiseLinearOperator.from_state_dict(
        load(tmp_path / "K.safetensors"), other, data()
    )
    assert list(loaded.risk.params) == keys
    assert all(loaded.risk.params[key] is dict(other.named_parameters())[key] for key in keys)
    # Of a layer a full block has what the whole matrix has.
    layers = torch.cat([torch.full((params[key].numel(),), int(key[0])) for key in keys])
    expected = truth(model, keys) * (layers[:, None] == layers)
    for M in (loaded, loaded.compute()):
        torch.testing.assert_close(M.to_dense(), expected, rtol=1e-10, atol=1e-12)


def classic(kind: Any) -> Callable[..., Any]:
    return lambda model, params: kind(model, LOSS, params, data())


def loaded_classic(kind: Any) -> Callable[..., Any]:
    return lambda state, model: kind.from_state_dict(state, model, None, data())


CLASSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "KFACLinearOperator": (classic(KFACLinearOperator), loaded_classic(KFACLinearOperator)),
    "EKFACLinearOperator": (classic(EKFACLinearOperator), loaded_classic(EKFACLinearOperator)),
    "GGNDiagonalLinearOperator": (
        classic(GGNDiagonalLinearOperator),
        GGNDiagonalLinearOperator.from_state_dict,
    ),
    "curvature, EKFAC": (
        lambda model, params: curvature(EmpiricalRisk(model, LOSS, data(), params), EKFAC),
        BlockwiseLinearOperator.from_state_dict,
    ),
}


@pytest.mark.parametrize(("make", "again"), CLASSES.values(), ids=CLASSES)
def test_every_class_takes_them_from_the_state(
    make: Callable[..., Any], again: Callable[..., Any]
) -> None:
    model = net()
    K = make(model, list(model[4].parameters()))
    loaded = again(K.state_dict(), net())
    assert list(loaded.risk.params) == LAST
    assert loaded.shape == (10, 10)
    torch.testing.assert_close(loaded.to_dense(), K.to_dense(), rtol=0, atol=0)


def own_names(model: nn.Module) -> dict[str, Tensor]:
    params = dict(model.named_parameters())
    return {"W": params["4.weight"], "b": params["4.bias"]}


def test_names_of_ones_own_have_to_be_given() -> None:
    model = net()
    state = curvature(EmpiricalRisk(model, LOSS, data(), own_names(model)), FullBlock).state_dict()
    with pytest.raises(
        ValueError,
        match=r"in the parameters: only the state has \['W', 'b'\], only this .*params=, .* a dict if the names",
    ):
        BlockwiseLinearOperator.from_state_dict(state, model)
    loaded = BlockwiseLinearOperator.from_state_dict(state, model, params=own_names(model))
    torch.testing.assert_close(loaded.to_dense(), truth(model, LAST))


def test_other_parameters_are_named() -> None:
    """Also by `load_state_dict` of operators, inverses and estimators, which take no parameters."""
    model = net()
    last = EmpiricalRisk(model, LOSS, data(), list(model[4].parameters()))
    words = r"only the state has \[\], only this operator \['0\.bias', '0\.weight', '2\.bias', '2\.weight'\]"
    state, whole = (
        curvature(last, KFAC).state_dict(),
        curvature(EmpiricalRisk(model, LOSS, data()), KFAC),
    )
    before = whole.to_dense()
    with pytest.raises(ValueError, match=words):
        whole.load_state_dict(state)
    assert torch.equal(whole.to_dense(), before)
    estimators = [CurvatureEstimator(risk) for risk in (last, whole.risk)]
    estimators[0].update(data()[0])
    with pytest.raises(ValueError, match=words):
        estimators[1].load_state_dict(estimators[0].state_dict())
    A = KFACLinearOperator(model, LOSS, list(model[4].parameters()), data())
    B = KFACLinearOperator(model, LOSS, list(model.parameters()), data())
    with pytest.raises(ValueError, match=words):
        KFACInverseLinearOperator.from_state_dict(KFACInverseLinearOperator(A, 0.1).state_dict(), B)


def test_other_networks_and_other_values_are_noticed_as_before() -> None:
    model = net()
    state = curvature(
        EmpiricalRisk(model, LOSS, data(), list(model[4].parameters())), DiagonalBlock
    ).state_dict()
    with pytest.warns(
        CurvatureWarning, match="parameters differ from those that this state was computed at"
    ):
        BlockwiseLinearOperator.from_state_dict(state, net(1))
    wider = nn.Sequential(*net()[:4], nn.Linear(4, 3)).double()
    with pytest.raises(
        ValueError,
        match=r"State mismatch in layers, '4'.*\[2, 4\].*\[3, 4\]|State mismatch in layers",
    ):
        BlockwiseLinearOperator.from_state_dict(state, wider)
    with pytest.raises(ValueError, match=r"only the state has \['4\.bias', '4\.weight'\]"):
        BlockwiseLinearOperator.from_state_dict(state, net()[:4])


def test_values_given_for_the_parameters() -> None:
    """Values that a risk was given are not the model's, which the state notices."""
    model = net()
    values: Mapping[str, Tensor] = {
        "4.weight": torch.ones(2, 4).double(),
        "4.bias": torch.ones(2).double(),
    }
    state = curvature(EmpiricalRisk(model, LOSS, data(), dict(values)), DiagonalBlock).state_dict()
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        BlockwiseLinearOperator.from_state_dict(state, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BlockwiseLinearOperator.from_state_dict(state, model, params=dict(values))
