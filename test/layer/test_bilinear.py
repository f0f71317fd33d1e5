"""Bilinear layers, and Hugging Face's `Conv1D`: rows, fast paths and per-example gradients against autodiff."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers import check_fast_paths
from torch import Tensor, nn

from curvlinops_plus.layer import AffineRule, LayerRule, rule_of
from curvlinops_plus.layer.bilinear import BilinearRule
from curvlinops_plus.layer.huggingface import Conv1DRule

V, B = 2, 4
BILINEAR, CONV1D = BilinearRule(), Conv1DRule()


def check_rows(rule: AffineRule, module: Any, args: tuple[Tensor, ...], W: Tensor) -> None:
    out, a = module(*args), rule.inputs(module, rule.input_of(module, args, {}))
    bias = 0 if module.bias is None else module.bias
    torch.testing.assert_close(a @ W.T + bias, rule.grads(module, out[None])[0], rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- bilinear
@pytest.mark.parametrize("positions", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(positions: tuple[int, ...], bias: bool, loop: Any, same: Any) -> None:
    module: Any = nn.Bilinear(3, 4, 2, bias=bias)
    x1, x2 = torch.randn(B, *positions, 3), torch.randn(B, *positions, 4)
    g = torch.randn(V, B, *positions, 2)
    assert type(rule_of(module)) is BilinearRule
    check_rows(BILINEAR, module, (x1, x2), module.weight.flatten(1))
    x = BILINEAR.input_of(module, (x1, x2), {})
    assert BILINEAR.input_of(module, (x,), {}) is x  # as a recorder asks
    check_fast_paths(BILINEAR, module, x, g, tolerance=1e-12)
    twin = loop(module, (x1, x2), {}, g)
    same(LayerRule().per_example_grads(module, (x1, x2), {}, g), twin)
    same(BILINEAR.per_example_grads(module, (x1, x2), {}, g), twin)
    same(BILINEAR.per_example_grads(module, (x,), {}, g), twin)
    same(BILINEAR.per_example_grads(module, (x1,), {"input2": x2}, g), twin)
    same(BILINEAR.per_example_grads(module, (), {"input2": x2, "input1": x1}, g), twin)
    same(BILINEAR.per_example_grads(module.requires_grad_(False), (x1, x2), {}, g), twin)


def test_bilinear_in_half_precision_is_summed_in_float32() -> None:
    module: Any = nn.Bilinear(3, 4, 2)
    x, g = torch.randn(B, 5, 7).bfloat16(), torch.randn(V, B, 5, 2).bfloat16()
    check_fast_paths(BILINEAR, module, x, g, dtype=torch.float32, tolerance=1e-5)
    halves = BILINEAR.per_example_grads(module.bfloat16(), (x,), {}, g)
    for key, J in BILINEAR.per_example_grads(module, (x.float(),), {}, g.float()).items():
        assert halves[key].dtype == torch.float32
        torch.testing.assert_close(halves[key], J)


def test_every_option_of_bilinear_is_handled(loop: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    options = {"in1_features": 3, "in2_features": 4, "out_features": 2, "bias": False, "device": "cpu"}
    options["dtype"] = torch.float32  # type: ignore[assignment]
    assert set(inspect.signature(nn.Bilinear).parameters) == set(options)
    module: Any = nn.Bilinear(**options)
    args, g = (torch.randn(B, 3).float(), torch.randn(B, 4).float()), torch.randn(V, B, 2).float()
    same(BILINEAR.per_example_grads(module, args, {}, g), loop(module, args, {}, g), 1e-5)


def test_messages_of_bilinear() -> None:
    module = nn.Bilinear(3, 4, 2)
    for shape in ((7,), (5, 3)):
        message = r"Bilinear\(.*shape \(.*\), expected both inputs side by side, \[examples, ..., 7\].*x\[None\]"
        with pytest.raises(ValueError, match=message):
            BILINEAR.inputs(module, torch.rand(shape))
    with pytest.raises(ValueError, match="BilinearRule expects a tensor as first input of the layer, got float"):
        BILINEAR.input_of(module, (torch.rand(5, 3), 1.0), {})


# --------------------------------------------------------------------------------------------------- Conv1D
@pytest.mark.parametrize("positions", [(), (5,), (2, 3)])
def test_conv1d_of_transformers(positions: tuple[int, ...], loop: Any, same: Any) -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    module, x = utils.Conv1D(2, 3), torch.randn(B, *positions, 3)
    with torch.no_grad():
        module.bias.normal_()
    g = torch.randn(V, B, *positions, 2)
    assert type(rule_of(module)) is Conv1DRule
    check_rows(CONV1D, module, (x,), module.weight.T)
    check_fast_paths(CONV1D, module, x, g, tolerance=1e-12)
    twin = loop(module, (x,), {}, g)
    same(CONV1D.per_example_grads(module, (x,), {}, g), twin)
    same(CONV1D.per_example_grads(module, (), {"x": x}, g), twin)
    same(CONV1D.per_example_grads(module.requires_grad_(False), (x,), {}, g), twin)
    assert CONV1D.per_example_grads(module.bfloat16(), (x.bfloat16(),), {}, g)["weight"].dtype == torch.float64
    halves = CONV1D.per_example_grads(module, (x.bfloat16(),), {}, g.bfloat16())
    assert {J.dtype for J in halves.values()} == {torch.float32}


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x1, x2 = nn.Bilinear(3, 3, 2), torch.randn(B, 3), torch.randn(B, 3)
    right = BilinearRule.inputs
    monkeypatch.setattr(BilinearRule, "inputs", lambda *args: right(*args).flip(2))
    with pytest.raises(AssertionError):
        check_rows(BILINEAR, module, (x1, x2), module.weight.flatten(1))
    with pytest.raises(AssertionError):
        check_fast_paths(BILINEAR, module, torch.cat([x1, x2], 1), torch.randn(V, B, 2), tolerance=1e-12)
