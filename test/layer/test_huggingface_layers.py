"""Hugging Face's `Conv1D`: rows, fast paths and per-example gradients against autodiff."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_fast_paths

from curvlinops_plus.layer import rule_of
from curvlinops_plus.layer.linear import Conv1DRule

CONV1D = Conv1DRule()
B, V = 3, 2


@pytest.mark.parametrize("positions", [(), (5,), (2, 3)])
def test_conv1d_of_transformers(positions: tuple[int, ...], loop: Any, same: Any) -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    module, x = utils.Conv1D(2, 3), torch.randn(B, *positions, 3)
    with torch.no_grad():
        module.bias.normal_()
    g = torch.randn(V, B, *positions, 2)
    assert type(rule_of(module)) is Conv1DRule
    rows = CONV1D.inputs(module, x) @ module.weight + module.bias
    torch.testing.assert_close(rows, CONV1D.grads(module, module(x)[None])[0], rtol=1e-12, atol=1e-12)
    check_fast_paths(CONV1D, module, x, g, tolerance=1e-12)
    twin = loop(module, (x,), {}, g)
    same(CONV1D.per_example_grads(module, (x,), {}, g), twin)
    same(CONV1D.per_example_grads(module, (), {"x": x}, g), twin)
    same(CONV1D.per_example_grads(module.requires_grad_(False), (x,), {}, g), twin)
    assert CONV1D.per_example_grads(module.bfloat16(), (x.bfloat16(),), {}, g)["weight"].dtype == torch.float64
    halves = CONV1D.per_example_grads(module, (x.bfloat16(),), {}, g.bfloat16())
    assert {J.dtype for J in halves.values()} == {torch.float32}
