"""Which rule a module gets, and what is said to whom registers a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_fast_paths
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from curvlinops_plus import layer
from curvlinops_plus.layer import (
    AffineRule,
    BilinearRule,
    ConvRule,
    LayerRule,
    LinearRule,
    RecurrentRule,
    TransposedConvRule,
    at_least_float32,
    register_rule,
    rule_of,
    why_generic,
)


class Plain(nn.Linear):
    """Computes what its parent does."""

    def extra_repr(self) -> str:
        return "plain"


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
    module.forward = lambda input: nn.functional.linear(input, module.weight).exp()  # as some wrappers do
    return module


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (nn.Linear(2, 2), LinearRule),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2), LinearRule),
        (Plain(2, 2), LinearRule),
        (nn.Conv1d(2, 2, 1), ConvRule),
        (nn.Conv2d(2, 2, 1), ConvRule),
        (nn.Conv3d(2, 2, 1), ConvRule),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_known_layers(module: nn.Module, rule: type[LayerRule]) -> None:
    assert type(rule_of(module)) is rule
    assert why_generic(module) == ""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nn.Softplus, r"no rule is registered for Softplus: add one with @register_rule\(Softplus\)"),
        (lambda: OwnForward(2, 2), "this OwnForward has another `forward` than Linear: add a rule with @register_rule"),
        (lambda: OwnCall(2, 2), "this OwnCall has another `forward` than Linear"),
        (replaced, "this Linear has another `forward` than Linear"),
        (lambda: OwnConvForward(2, 2, 1), "this OwnConvForward has another `_conv_forward` than Conv2d"),
        (Extra, r"this Extra holds the parameters \['weight', 'bias', 'gain'\], expected \['weight', 'bias'\]"),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "holds the parameters.*weight normalization"),
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


def test_mistakes_in_registrations() -> None:
    with pytest.raises(
        TypeError, match=r"expects module types or their full names, got nothing. Write `@register_rule\(MyLayer\)`"
    ):
        register_rule()
    with pytest.raises(TypeError, match=r"expects module types or their full names, got .*PReLU"):
        register_rule(nn.PReLU())
    with pytest.raises(TypeError, match=r"expects module types or their full names, got .*LayerRule"):
        register_rule(LayerRule)  # the decorator without its argument
    with pytest.raises(TypeError, match=r"decorates a subclass of LayerRule or AffineRule, got .*Identity"):
        register_rule(nn.PReLU)(nn.Identity)


def test_misspelled_parameter() -> None:
    @register_rule(OwnForward)
    class Misspelled(AffineRule):
        def patterns(self, module: nn.Module) -> dict[str, str]:
            return {"wieght": "o i -> o i"}

    with pytest.raises(ValueError, match=r"Misspelled.patterns names \['wieght'\], but OwnForward has.*'weight'"):
        rule_of(OwnForward(2, 2))


def test_upcast() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert at_least_float32(torch.ones(2, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool):
        tensor = torch.ones(2, dtype=dtype)
        assert at_least_float32(tensor) is tensor


def test_public_names() -> None:
    assert all(hasattr(layer, name) for name in layer.__all__)


class Scaling:
    """Inputs and gradients that have one more factor each, and nothing else."""

    def inputs(self, module: nn.Module, x: Tensor) -> Any:
        return 3 * super().inputs(module, x)  # type: ignore[misc]

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:
        return 2 * super().grads(module, g)  # type: ignore[misc]


def test_checked_rows_of_their_own() -> None:
    class Doubled(ConvRule):
        def rows(self, module: nn.Module, x: Tensor) -> Any:
            return super().rows(module, 2 * x)

    module, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.rand(40, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(Doubled().input_gram(module, x)[0], 4 * ConvRule().input_gram(module, x)[0])
    assert Doubled().packed_gram(module, x, True) is None


@pytest.mark.parametrize("mixin", [False, True])
@pytest.mark.parametrize(
    ("kind", "module", "size"),
    [
        (ConvRule, nn.Conv2d(3, 4, 3, padding=1), (3, 8, 8)),
        (ConvRule, nn.Conv2d(4, 4, 3, groups=2), (4, 8, 8)),
        (TransposedConvRule, nn.ConvTranspose2d(3, 4, 3), (3, 8, 8)),
        (BilinearRule, nn.Bilinear(3, 2, 4), (5,)),
        (LinearRule, nn.Linear(3, 4), (6, 3)),
    ],
    ids=["convolution", "groups", "transposed", "bilinear", "linear"],
)
def test_rules_with_other_rows_do_not_inherit_shorter_ways(
    kind: type[AffineRule], module: nn.Module, size: Any, mixin: bool
) -> None:
    plain, body = kind(), {}
    if not mixin:
        body = {"inputs": lambda _, m, x: 3 * plain.inputs(m, x), "grads": lambda _, m, g: 2 * plain.grads(m, g)}
    rule = type("Scaled", (Scaling, kind) if mixin else (kind,), body)()
    module, x = module.double(), torch.rand(40, *size, dtype=torch.float64)
    out = module(*x.split([3, 2], 1)) if isinstance(module, nn.Bilinear) else module(x)
    g = torch.rand(2, *out.shape, dtype=torch.float64)
    check_fast_paths(rule, module, x, g)
    assert rule.packed_gram(module, x, True) is None
    assert not rule.direct_input_gram
    assert not rule.direct_grad_gram
    scaled, once = (r.per_example_grads(module, (x,), {}, g) for r in (rule, plain))
    torch.testing.assert_close(scaled["weight"], 6 * once["weight"])
    torch.testing.assert_close(scaled["bias"], 2 * once["bias"])


def test_rules_say_which_methods_are_their_own() -> None:
    """Facts are set when a class defines the method, also by way of a mixin, unless its body says otherwise."""

    class Grads:
        def per_example_grads(self, module: nn.Module, args: Any, kwargs: Any, g: Any) -> dict[str, Tensor]:
            return {}

    class Mixed(Grads, LinearRule):
        pass

    class Grams(LinearRule):
        def grad_gram(self, module: nn.Module, g: Tensor) -> Tensor:
            return super().grad_gram(module, g)

    class Rows(Grams):
        direct_grad_gram = False

        def grad_gram(self, module: nn.Module, g: Tensor) -> Tensor:
            return super().grad_gram(module, g)

    class Direct(Grads, LayerRule):
        pass

    facts = ("direct_grads", "direct_input_gram", "direct_grad_gram")
    expected = {
        AffineRule: (False, False, False),
        LinearRule: (False, False, False),
        ConvRule: (False, True, True),
        TransposedConvRule: (True, True, True),
        Mixed: (True, False, False),
        Grams: (False, False, True),
        Rows: (False, False, False),
    }
    for rule, values in expected.items():
        assert tuple(getattr(rule, fact) for fact in facts) == values, rule
    assert not LayerRule.direct_grads
    assert not RecurrentRule.direct_grads  # `replay` is its own, and takes the axes of a call
    assert Direct.direct_grads
    assert Direct().example_grads(nn.Linear(2, 1), (), {}, torch.ones(1, 1, 1), [1], [1]) == {}
