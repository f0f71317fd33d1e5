"""Grouped and depthwise convolutions: one matrix per group, against autodiff and against plain convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_fast_paths
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.layer import LayerRule, rule_of, why_generic
from curvlinops_plus.layer import convolution_gram as grams
from curvlinops_plus.layer.conv import ConvRule

V, B = 2, 3
RULE = ConvRule()


def check_rows(module: Any, x: Tensor) -> None:
    """`W a + b` of each group is the output, so that the rows are the right ones."""
    out = module(x)
    a, W = RULE.inputs(module, x), module.weight.detach().unflatten(0, (module.groups, -1)).flatten(2)
    assert a.shape == (B, out[0, 0].numel(), module.groups, W.shape[2])
    expected = RULE.grads(module, out[None])[0]
    bias = 0 if module.bias is None else module.bias.view(module.groups, -1)
    torch.testing.assert_close(torch.einsum("bsgi,goi->bsgo", a, W) + bias, expected, rtol=1e-11, atol=1e-11)


CASES = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 6)),
    "depthwise": (lambda: nn.Conv2d(3, 3, 3, padding=1, groups=3), (3, 5, 4)),
    "depthwise-multiplier": (lambda: nn.Conv2d(3, 9, 3, stride=2, groups=3), (3, 5, 6)),
    "no-bias": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 5, 4)),
    "dilation": (lambda: nn.Conv2d(4, 6, 2, dilation=(2, 3), groups=2), (4, 5, 6)),
    "same-even-reflect": (lambda: nn.Conv2d(4, 2, 4, padding="same", padding_mode="reflect", groups=2), (4, 5, 6)),
    "circular": (lambda: nn.Conv2d(4, 2, 3, padding=(2, 1), padding_mode="circular", groups=2), (4, 5, 4)),
    "pointwise": (lambda: nn.Conv2d(6, 4, 1, stride=2, groups=2), (6, 5, 4)),
    "depthwise-pointwise": (lambda: nn.Conv2d(4, 4, 1, groups=4), (4, 5, 4)),
    "channels-last": (
        lambda: nn.Conv2d(4, 6, 3, groups=2).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        (4, 5, 4),
    ),
    "3d": (lambda: nn.Conv3d(4, 2, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1), groups=2), (4, 3, 4, 3)),
}


@pytest.mark.parametrize("name", CASES)
class TestLaws:
    def build(self, name: str) -> tuple[nn.Module, Tensor, Tensor]:
        make, shape = CASES[name]
        module, x = make(), torch.randn(B, *shape)
        return module, x, torch.randn(V, *module(x).shape)

    def test_the_rule(self, name: str) -> None:
        module, _, _ = self.build(name)
        assert type(rule_of(module)) is ConvRule
        assert why_generic(module) == ""
        assert RULE.sizes(module) == {"g": module.groups}

    def test_rows_times_weight_are_the_output(self, name: str) -> None:
        module, x, _ = self.build(name)
        check_rows(module, x)

    def test_fast_paths(self, name: str) -> None:
        check_fast_paths(RULE, *self.build(name))

    def test_per_example_grads(self, name: str, loop: Any, same: Any) -> None:
        module, x, g = self.build(name)
        twin = loop(module, (x,), {}, g)
        same(RULE.per_example_grads(module, (x,), {}, g), twin)
        same(RULE.per_example_grads(module, (), {"input": x}, g), twin)
        same(RULE.per_example_grads(module.requires_grad_(False), (x,), {}, g), twin)

    def test_half_precision_is_summed_in_float32(self, name: str) -> None:
        module, x, g = self.build(name)
        x, g = x.bfloat16(), g.bfloat16()
        check_fast_paths(RULE, module, x, g, dtype=torch.float32, tolerance=1e-5)
        halves = RULE.per_example_grads(module.bfloat16(), (x,), {}, g)
        for key, J in RULE.per_example_grads(module, (x.float(),), {}, g.float()).items():
            assert halves[key].dtype == torch.float32
            torch.testing.assert_close(halves[key], J)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    n = draw(st.integers(1, 3))

    def per_dimension(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    groups, stride = draw(st.integers(2, 4)), per_dimension(1, 3)
    module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        per_dimension(1, 4 if n < 3 else 2),
        stride=stride,
        padding=draw(st.sampled_from([per_dimension(0, 3), "valid"] + ["same"] * (set(stride) == {1}))),
        dilation=per_dimension(1, 2),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )
    return module, (module.in_channels, *per_dimension(1, 7 if n < 3 else 4))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions(), st.sampled_from([2**20, 1]), st.sampled_from([128, 1]))
def test_any_grouped_convolution(drawn: tuple[nn.Module, tuple[int, ...]], work: int, large: int) -> None:
    """Also with work memory for a single group of a single example, and with each group by itself."""
    module, shape = drawn
    torch.manual_seed(0)
    x = torch.randn(B, *shape)
    try:
        out = module(x)
    except RuntimeError:  # the kernel does not fit, or the padding is wider than its mode allows
        assume(False)
        return
    g = torch.randn(V, *out.shape)
    check_rows(module, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grams, "_GROUP_BYTES", work)
        patch.setattr(grams, "_LARGE_GROUP", large)
        check_fast_paths(RULE, module, x, g)
    J, twin = (r.per_example_grads(module, (x,), {}, g) for r in (RULE, LayerRule()))
    for name in twin:
        torch.testing.assert_close(J[name], twin[name], rtol=1e-11, atol=1e-11)


def test_each_group_is_a_convolution_of_its_own() -> None:
    module, x = nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), torch.randn(B, 6, 7, 7)
    A, total, count = RULE.input_gram(module, x)
    single = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    for k, channels in enumerate(x.chunk(3, 1)):
        expected = RULE.input_gram(single, channels)
        torch.testing.assert_close((A[k], total[k], count), expected)


def test_messages() -> None:
    for call in (RULE.inputs, RULE.input_gram, RULE.mean_inputs):
        with pytest.raises(ValueError, match=r"Conv2d got an input of shape \(4, 5, 5\), expected 4 dim.*x\[None\]"):
            call(nn.Conv2d(4, 4, 3, groups=2), torch.rand(4, 5, 5))


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Conv1d(4, 4, 3, groups=2), torch.randn(B, 4, 6)
    right = ConvRule.inputs
    monkeypatch.setattr(ConvRule, "inputs", lambda *args: right(*args).flip(2))  # the other group
    with pytest.raises(AssertionError):
        check_rows(module, x)
    with pytest.raises(AssertionError):
        check_fast_paths(RULE, module, x, torch.randn(V, B, 4, 4))
