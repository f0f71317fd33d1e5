"""Linear layers and convolutions: rows, fast paths and per-example gradients, for every constructor option."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import check_fast_paths
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.layer import AffineRule, ConvRule, LayerRule, LinearRule, rule_of

V, B = 2, 3


@dataclass
class Case:
    """A layer and its input; `name` is the test's id."""

    name: str
    make: Any
    shape: tuple[int, ...]

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        module, x = self.make(), torch.randn(B, *self.shape)
        return module, x, torch.randn(V, *module(x).shape)


CASES = [
    Case("linear", lambda: nn.Linear(3, 2), (3,)),
    Case("linear-no-bias", lambda: nn.Linear(3, 2, bias=False), (3,)),
    Case("linear-3d", lambda: nn.Linear(3, 2), (4, 3)),
    Case("linear-4d", lambda: nn.Linear(3, 2), (2, 4, 3)),
    Case("linear-4d-no-bias", lambda: nn.Linear(3, 2, bias=False), (2, 4, 3)),
    Case("linear-one-position", lambda: nn.Linear(3, 2), (1, 3)),
    Case("conv1d", lambda: nn.Conv1d(2, 3, 3), (2, 6)),
    Case("conv1d-stride", lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 6)),
    Case("conv1d-same-even", lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=3), (2, 10)),
    Case("conv2d", lambda: nn.Conv2d(2, 3, 3), (2, 5, 4)),
    Case("conv2d-no-bias", lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 5, 4)),
    Case("conv2d-pad", lambda: nn.Conv2d(2, 3, (3, 2), padding=(2, 1)), (2, 5, 4)),
    Case("conv2d-stride", lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=1), (2, 5, 6)),
    Case("conv2d-dilation", lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3), padding=1), (2, 5, 6)),
    Case("conv2d-same", lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 4)),
    Case("conv2d-same-even", lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 6)),
    Case("conv2d-valid", lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 5, 4)),
    Case("conv2d-reflect", lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 5, 4)),
    Case("conv2d-replicate", lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 5, 4)),
    Case("conv2d-circular", lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="circular"), (2, 5, 4)),
    Case("conv2d-circular-same", lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), (2, 5, 6)),
    Case("conv2d-1x1", lambda: nn.Conv2d(2, 3, 1), (2, 5, 4)),
    Case("conv2d-1x1-stride", lambda: nn.Conv2d(2, 3, 1, stride=2), (2, 5, 4)),
    Case("conv2d-1x1-pad", lambda: nn.Conv2d(2, 3, 1, padding=1, dilation=2), (2, 5, 4)),
    Case("conv2d-whole-image", lambda: nn.Conv2d(2, 3, (5, 4)), (2, 5, 4)),
    Case(
        "conv2d-channels-last", lambda: nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last), (2, 5, 4)
    ),
    Case("conv3d", lambda: nn.Conv3d(2, 3, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1)), (2, 3, 4, 3)),
    Case("conv3d-same-even", lambda: nn.Conv3d(2, 2, 2, padding="same", padding_mode="replicate"), (2, 3, 4, 3)),
]


def affine(module: nn.Module) -> AffineRule:
    rule = rule_of(module)
    assert isinstance(rule, AffineRule)
    return rule


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
class TestLaws:
    def test_rows_times_weight_are_the_output(self, case: Case) -> None:
        check_rows(*case.build())

    def test_per_example_grads(self, case: Case, loop: Any, same: Any) -> None:
        module, x, g = case.build()
        same(rule_of(module).per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g))
        same(LayerRule().per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g))

    def test_input_as_keyword(self, case: Case, same: Any) -> None:
        module, x, g = case.build()
        rule = rule_of(module)
        same(rule.per_example_grads(module, (), {"input": x}, g), rule.per_example_grads(module, (x,), {}, g))

    def test_fast_paths(self, case: Case) -> None:
        module, x, g = case.build()
        check_fast_paths(affine(module), module, x, g)

    def test_half_precision_is_summed_in_float32(self, case: Case) -> None:
        module, x, g = case.build()
        rule, x, g = affine(module), x.bfloat16(), g.bfloat16()
        check_fast_paths(rule, module, x, g, dtype=torch.float32, tolerance=1e-5)
        halves = rule.per_example_grads(module.bfloat16(), (x,), {}, g)
        for name, J in rule.per_example_grads(module, (x.float(),), {}, g.float()).items():
            assert halves[name].dtype == torch.float32
            torch.testing.assert_close(halves[name], J)


def check_rows(module: nn.Module, x: Tensor, g: Tensor) -> None:
    rule, out = affine(module), module(x)
    a, weight = rule.inputs(module, x), module.weight.flatten(1)
    expected = rule.grads(module, out[None])[0]  # the rows of an output are those of its gradient
    bias = 0 if module.bias is None else module.bias
    assert a.shape == (B, expected.shape[1], weight.shape[1])
    torch.testing.assert_close(a @ weight.T + bias, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------- every option at once
@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    n = draw(st.integers(1, 3))

    def per_dimension(low: int, high: int) -> Any:
        one = st.integers(low, high)
        return draw(st.one_of(one, st.tuples(*[one] * n)))

    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    stride = per_dimension(1, 3)
    paddings = [st.just(per_dimension(0, 3)), st.just("valid")] + [st.just("same")] * (stride in (1, (1,) * n))
    module = kind(
        draw(st.integers(1, 2)),
        2,
        per_dimension(1, 4 if n < 3 else 2),
        stride=stride,
        padding=draw(st.one_of(paddings)),
        dilation=per_dimension(1, 2),
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )
    return module, (module.in_channels, *(draw(st.integers(1, 7 if n < 3 else 4)) for _ in range(n)))


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions())
def test_any_convolution(drawn: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = drawn
    torch.manual_seed(0)
    x = torch.randn(B, *shape)
    try:
        out = module(x)
    except RuntimeError:  # the kernel does not fit, or the padding is wider than its mode allows
        assume(False)
        return
    g = torch.randn(V, *out.shape)
    check_rows(module, x, g)
    check_fast_paths(affine(module), module, x, g)
    J, twin = (r.per_example_grads(module, (x,), {}, g) for r in (rule_of(module), LayerRule()))
    for name in twin:
        torch.testing.assert_close(J[name], twin[name], rtol=1e-11, atol=1e-11)


HANDLED = {  # constructor option: a value that is not the default
    nn.Linear: {"in_features": 4, "out_features": 3, "bias": False, "device": "cpu", "dtype": torch.float32},
    nn.Conv2d: {
        "in_channels": 4,
        "out_channels": 6,
        "kernel_size": 2,
        "stride": 2,
        "padding": 1,
        "dilation": 2,
        "groups": 2,
        "bias": False,
        "padding_mode": "circular",
        "device": "cpu",
        "dtype": torch.float32,
    },
}
HANDLED[nn.Conv1d] = HANDLED[nn.Conv3d] = HANDLED[nn.Conv2d]


@pytest.mark.parametrize("kind", HANDLED, ids=lambda k: k.__name__)
def test_every_constructor_option_is_handled(kind: type[nn.Module], loop: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    options = HANDLED[kind]
    assert set(inspect.signature(kind).parameters) == set(options)
    required = dict(list(options.items())[: 2 if kind is nn.Linear else 3])
    for name, value in options.items():
        module = kind(**{**required, name: value})
        dims = 0 if kind is nn.Linear else module.weight.ndim - 2
        x = torch.randn(B, 4, *[5] * dims, dtype=module.weight.dtype)
        g = torch.randn(V, *module(x).shape, dtype=x.dtype)
        tolerance = 1e-12 if x.dtype == torch.float64 else 1e-4
        same(rule_of(module).per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g), tolerance)


# ------------------------------------------------------------------------------------------------------ edges
def test_missing_example_dimension_is_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \[examples, ..., 3\].*x\[None\]"):
        LinearRule().inputs(nn.Linear(3, 2), torch.rand(3))
    with pytest.raises(ValueError, match=r"Conv2d got an input of shape \(2, 5, 5\), expected 4 dimensions.*x\[None\]"):
        ConvRule().inputs(nn.Conv2d(2, 3, 3), torch.rand(2, 5, 5))


# --------------------------------------------------------------------------------------------- rules of users
class MyLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


class MyLinearRule(AffineRule):
    def patterns(self, m: nn.Module) -> dict[str, str]:
        return {"kernel": "i o -> o i"}

    def inputs(self, m: nn.Module, x: Tensor) -> Tensor:
        return x[:, None]

    def grads(self, m: nn.Module, g: Tensor) -> Tensor:
        return g[:, :, None]


def test_the_comparison_can_fail(loop: Any, same: Any) -> None:
    class Wrong(MyLinearRule):
        def grads(self, m: nn.Module, g: Tensor) -> Tensor:
            return g[:, :, None] * (1 + 1e-10)

    module, x, g = MyLinear(), torch.randn(B, 3), torch.randn(V, B, 2)
    with pytest.raises(AssertionError):
        same(Wrong().per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g))


class TestMistakesInRules:
    module, x, g = MyLinear(), torch.ones(B, 3), torch.ones(V, B, 2)

    def check(self, rule: AffineRule, message: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=message):
            rule.per_example_grads(self.module, (self.x,), {}, self.g)

    def test_facts_must_be_stated(self) -> None:
        class Empty(AffineRule):
            pass

        self.check(Empty(), r"Empty must define inputs\(module, x\), \[B, \*in\] -> \[B, S, i\]", NotImplementedError)
        with pytest.raises(NotImplementedError, match=r"Empty must define patterns\(module\)"):
            Empty().patterns(self.module)
        with pytest.raises(NotImplementedError, match=r"Empty must define grads\(module, g\)"):
            Empty().grads(self.module, self.g)

    def test_shape_of_inputs(self) -> None:
        class NoPositions(MyLinearRule):
            def inputs(self, m: nn.Module, x: Tensor) -> Tensor:
                return x

        self.check(NoPositions(), r"NoPositions.inputs returned shape \(3, 3\), expected \[B, S, i\] with B = 3")

    def test_shape_of_grads(self) -> None:
        class NoPositions(MyLinearRule):
            def grads(self, m: nn.Module, g: Tensor) -> Tensor:
                return g

        self.check(NoPositions(), r"NoPositions.grads returned shape \(2, 3, 2\), expected \[V, B, S, o\]")

    def test_number_of_columns(self) -> None:
        class WithOnes(MyLinearRule):
            def inputs(self, m: nn.Module, x: Tensor) -> Tensor:
                return torch.cat([x, torch.ones(B, 1)], 1)[:, None]

        self.check(WithOnes(), r"inputs\(...\) has 4 columns, but the parameters of patterns\(...\).*have 3")

    def test_input_must_be_a_tensor(self) -> None:
        with pytest.raises(ValueError, match=r"expects a tensor as first input of the layer, got float.*input_of"):
            MyLinearRule().per_example_grads(self.module, (1.0, self.x), {}, self.g)
