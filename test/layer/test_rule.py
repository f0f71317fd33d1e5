"""Which rule a module gets, and what is said to whom registers a wrong one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from curvlinops_plus.layer import LayerRule, LinearRule, register_rule, rule_of, why_generic


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


class OwnConvForward(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.abs(), bias)


class OwnCall(nn.Linear):
    def __call__(self, input: Tensor) -> Tensor:
        return 2 * super().__call__(input)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.gain = nn.Parameter(torch.ones(()))


def replaced() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda input: nn.functional.linear(
        input, module.weight
    ).exp()  # as some wrappers do
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            nn.Softplus,
            r"no rule is registered for Softplus: add one with @register_rule\(Softplus\)",
        ),
        (
            lambda: OwnForward(2, 2),
            "this OwnForward has another `forward` than Linear: add a rule with @register_rule",
        ),
        (lambda: OwnCall(2, 2), "this OwnCall has another `forward` than Linear"),
        (replaced, "this Linear has another `forward` than Linear"),
        (
            lambda: OwnConvForward(2, 2, 1),
            "this OwnConvForward has another `_conv_forward` than Conv1d",
        ),
        (
            lambda: nn.EmbeddingBag(5, 3, mode="max"),
            r"EmbeddingBag\(mode='max'\) is not linear in its table",
        ),
        (
            Extra,
            r"this Extra holds the parameters \['weight', 'bias', 'gain'\], expected \['weight', 'bias'\]",
        ),
        (
            lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
            r"computes \['weight'\] from the parameters.*weight normalization",
        ),
    ],
)
def test_everything_else_is_generic(make: type[nn.Module], reason: str) -> None:
    module = make()
    assert type(rule_of(module)) is LayerRule
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(why_generic(module))


def test_registration_is_for_subclasses_and_can_be_replaced() -> None:
    @register_rule(OwnForward, nn.PReLU)
    class First(LayerRule):
        pass

    class Child(OwnForward):
        pass

    assert isinstance(rule_of(OwnForward(2, 2)), First)
    assert isinstance(rule_of(Child(2, 2)), First)
    assert isinstance(rule_of(nn.PReLU()), First)
    assert isinstance(rule_of(nn.Linear(2, 2)), LinearRule)

    @register_rule(OwnForward)
    class Second(LayerRule):
        pass

    assert isinstance(rule_of(Child(2, 2)), Second)
    assert Second.__name__ == "Second"  # the decorator gives the class back
