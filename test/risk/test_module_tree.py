"""Modules and parameters of a model in one walk: those of `named_modules` and `named_parameters`, in their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from curvlinops_plus.risk.modules import modules_of, parameters_of


def shared_modules() -> nn.Module:
    relu, inner = nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    return nn.Sequential(relu, nn.Sequential(inner, relu), inner, nn.Linear(3, 2))


def tied_weights() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second, nn.PReLU())
    model.register_parameter("own", first.bias)
    return model


def empty_places() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model.register_module("nothing", None)
    return model


@pytest.mark.parametrize(
    "make",
    [
        shared_modules,
        tied_weights,
        empty_places,
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
        lambda: nn.Linear(3, 2),
        nn.ReLU,
    ],
)
def test_the_walk_is_that_of_pytorch(make: Callable[[], nn.Module]) -> None:
    model = make()
    modules = modules_of(model)
    assert [*modules.items()] == [*model.named_modules()]
    found, expected = parameters_of(modules), dict(model.named_parameters())
    assert [*found] == [*expected]
    assert all(found[name] is p for name, p in expected.items())
