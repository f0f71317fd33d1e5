"""Transposed convolutions: rows, fast paths and per-example gradients against autodiff, for every option."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers import check_fast_paths
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.layer import LayerRule, rule_of
from curvlinops_plus.layer.conv import TransposedConvRule

V, B = 2, 3
RULE = TransposedConvRule()


def matrix(module: Any) -> Tensor:
    """The weight as one matrix per group, [g, o, i·kernel], written without the rule's pattern."""
    i, o = module.in_channels // module.groups, module.out_channels // module.groups
    return torch.stack([W.transpose(0, 1).reshape(o, -1) for W in module.weight.detach().split(i)])


def check_rows(module: Any, x: Tensor, *call: Any) -> None:
    """`W a + b` is the output, so that the rows are the right ones."""
    out = module(x, *call)
    read = RULE.input_of(module, (x, *call), {})
    a, W = RULE.inputs(module, read), matrix(module)
    expected = RULE.grads(module, out[None])[0]
    if module.groups == 1:
        a, expected = a[:, :, None], expected[:, :, None]
    assert a.shape == (len(x), out[0, 0].numel(), module.groups, W.shape[2])
    bias = 0 if module.bias is None else module.bias.view(module.groups, -1)
    torch.testing.assert_close(torch.einsum("bsgi,goi->bsgo", a, W) + bias, expected, rtol=1e-11, atol=1e-11)


CASES = {
    "1d": (lambda: nn.ConvTranspose1d(2, 3, 3), (2, 5)),
    "no-bias": (lambda: nn.ConvTranspose2d(2, 3, 3, bias=False), (2, 4, 5)),
    "stride": (lambda: nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1), (2, 4, 5)),
    "output-padding": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=(2, 3), output_padding=(1, 2)), (2, 4, 3)),
    "dilation": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), dilation=(2, 3), padding=(1, 2)), (2, 4, 5)),
    "stride-and-dilation": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=4, dilation=6), (2, 5)),
    "holes": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=5), (2, 4)),
    "cropped": (lambda: nn.ConvTranspose2d(2, 3, 2, padding=(2, 3)), (2, 7, 8)),
    "cropped-one-side": (lambda: nn.ConvTranspose1d(2, 3, 1, stride=4, padding=1, output_padding=3), (2, 3)),
    "nothing-but-bias": (lambda: nn.ConvTranspose1d(1, 2, 1, stride=20, padding=5, output_padding=12), (1, 1)),
    "pointwise": (lambda: nn.ConvTranspose2d(2, 3, 1), (2, 4, 5)),
    "groups": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 3, 4)),
    "depthwise": (lambda: nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, groups=3), (3, 3, 4)),
    "3d": (lambda: nn.ConvTranspose3d(2, 3, (2, 3, 1), stride=(1, 2, 3), padding=(0, 1, 0)), (2, 2, 3, 2)),
}


@pytest.mark.parametrize("name", CASES)
class TestLaws:
    def build(self, name: str) -> tuple[nn.Module, Tensor, Tensor]:
        make, shape = CASES[name]
        module, x = make(), torch.randn(B, *shape)
        return module, x, torch.randn(V, *module(x).shape)

    def test_rows_times_weight_are_the_output(self, name: str) -> None:
        module, x, _ = self.build(name)
        check_rows(module, x)

    def test_fast_paths(self, name: str) -> None:
        check_fast_paths(RULE, *self.build(name))

    def test_per_example_grads(self, name: str, loop: Any, same: Any) -> None:
        module, x, g = self.build(name)
        same(RULE.per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g))
        same(RULE.per_example_grads(module, (), {"input": x}, g), loop(module, (x,), {}, g))

    def test_frozen(self, name: str, loop: Any, same: Any) -> None:
        module, x, g = self.build(name)
        twin = loop(module, (x,), {}, g)
        module.requires_grad_(False)
        same(RULE.per_example_grads(module, (x,), {}, g), twin)
        assert not any(p.requires_grad or p.grad is not None for p in module.parameters())

    def test_half_precision_is_summed_in_float32(self, name: str) -> None:
        module, x, g = self.build(name)
        x, g = x.bfloat16(), g.bfloat16()
        check_fast_paths(RULE, module, x, g, dtype=torch.float32, tolerance=1e-5)
        halves = RULE.per_example_grads(module.bfloat16(), (x,), {}, g)
        for key, J in RULE.per_example_grads(module, (x.float(),), {}, g.float()).items():
            assert halves[key].dtype == torch.float32
            torch.testing.assert_close(halves[key], J)


# ------------------------------------------------------------------------------------------ every option at once
@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...], tuple[int, ...]]:
    n = draw(st.integers(1, 3))

    def per_dimension(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    groups = draw(st.integers(1, 3))
    stride, dilation = per_dimension(1, 4), per_dimension(1, 4)
    module = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        per_dimension(1, 4 if n < 3 else 2),
        stride=stride,
        padding=per_dimension(0, 4),
        output_padding=tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    shape = (module.in_channels, *per_dimension(1, 5 if n < 3 else 3))
    return module, shape, tuple(draw(st.integers(0, s - 1)) for s in stride)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(layers())
def test_any_transposed_convolution(drawn: tuple[Any, tuple[int, ...], tuple[int, ...]]) -> None:
    module, shape, extra = drawn
    torch.manual_seed(0)
    x = torch.randn(B, *shape)
    smallest = [
        (size - 1) * s - 2 * p + d * (k - 1) + 1
        for size, s, p, d, k in zip(
            shape[1:], module.stride, module.padding, module.dilation, module.kernel_size, strict=True
        )
    ]
    asked = [size + e for size, e in zip(smallest, extra, strict=True)]
    assume(min(smallest) > 0)
    for call in ((), (asked,)):
        g = torch.randn(V, *module(x, *call).shape)
        check_rows(module, x, *call)
        check_fast_paths(RULE, module, RULE.input_of(module, (x, *call), {}), g)
        J = RULE.per_example_grads(module, (x, *call), {}, g)
        twin = LayerRule().per_example_grads(module, (x, *call), {}, g)
        for name in twin:
            torch.testing.assert_close(J[name], twin[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("size", [[9, 15], [10, 17], (3, 3, 9, 16)])
def test_output_size_of_a_call(size: Any, positional: bool, loop: Any, same: Any) -> None:
    module, x = nn.ConvTranspose2d(2, 3, 3, stride=(2, 3), output_padding=(1, 0)), torch.randn(B, 2, 4, 5)
    args, kwargs = ((x, size), {}) if positional else ((x,), {"output_size": size})
    out = module(*args, **kwargs)
    assert out.shape[2:] == torch.Size(list(size)[-2:])
    read = RULE.input_of(module, args, kwargs)
    assert (read.shape[0], read.untyped_storage().data_ptr()) == (B, x.untyped_storage().data_ptr())  # no memory
    assert RULE.input_of(module, (read,), {}) is read
    assert RULE.inputs(module, read).shape[1] == out[0, 0].numel()
    g = torch.randn(V, *out.shape)
    twin = loop(module, args, kwargs, g)
    same(RULE.per_example_grads(module, args, kwargs, g), twin)
    same(RULE.per_example_grads(module, (read.detach(),), {}, g), twin)  # as a recorder hands it on
    same(RULE.per_example_grads(module, (read.float().double(),), {}, g), twin, 1e-6)


def test_output_size_that_is_the_usual_one_changes_nothing() -> None:
    module, x = nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), torch.randn(B, 2, 4)
    assert RULE.input_of(module, (x, [10]), {}) is x
    assert RULE.input_of(module, (x, None), {}) is x


OPTIONS = {
    "in_channels": 4,
    "out_channels": 6,
    "kernel_size": 2,
    "stride": 2,
    "padding": 1,
    "output_padding": 1,
    "groups": 2,
    "bias": False,
    "dilation": 2,
    "padding_mode": "zeros",
    "device": "cpu",
    "dtype": torch.float32,
}


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_every_constructor_option_is_handled(kind: type[Any], loop: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    assert set(inspect.signature(kind).parameters) == set(OPTIONS)
    required = {"in_channels": 4, "out_channels": 6, "kernel_size": 2}
    for name, value in OPTIONS.items():
        module = kind(**{**required, "stride": 2, name: value})
        assert type(rule_of(module)) is TransposedConvRule
        x = torch.randn(B, 4, *[3] * (module.weight.ndim - 2), dtype=module.weight.dtype)
        g = torch.randn(V, *module(x).shape, dtype=x.dtype)
        tolerance = 1e-12 if x.dtype == torch.float64 else 1e-4
        same(rule_of(module).per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g), tolerance)


def test_messages() -> None:
    message = r"ConvTranspose2d got an input of shape \(2, 5, 5\), expected 4 dimensions, examples first.*x\[None\]"
    for call in (RULE.inputs, RULE.input_gram, RULE.mean_inputs):
        with pytest.raises(ValueError, match=message):
            call(nn.ConvTranspose2d(2, 3, 3), torch.rand(2, 5, 5))
