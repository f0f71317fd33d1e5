"""Normalizations and PReLU: their own rules against plain autograd and the generic rule, for every
option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import LayerRule, PReLURule, rule_of, why_generic
from curvlinops_plus.layer.normalization import (
    BatchNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)

V, B = 2, 3

BATCH = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
INSTANCE = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]


def awake(module: nn.Module) -> nn.Module:
    """No parameter and no statistic has the value that it starts with."""
    for t in [*module.parameters(), *module.buffers()]:
        if t.is_floating_point():
            t.data.uniform_(0.5, 1.5)
    return module


def compare(module: nn.Module, x: Tensor, loop: Any, same: Any) -> dict[str, Tensor]:
    g = torch.randn(V, *x.shape)
    rule = rule_of(module)
    assert type(rule) is not LayerRule
    ours = rule.per_example_grads(module, (x,), {}, g)
    same(ours, loop(module, (x,), {}, g))
    same(rule.per_example_grads(module, (), {"input": x}, g), ours)
    same(LayerRule().per_example_grads(module, (x,), {}, g), ours)
    assert rule.patterns(module) == LayerRule().patterns(module)
    return ours


# ------------------------------------------------------------------------------- shapes and options
@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Any normalization, or PReLU, with an input that fits."""
    dims = st.lists(st.integers(1, 4), max_size=3).map(tuple)
    affine, eps = draw(st.booleans()), draw(st.sampled_from([1e-5, 0.1]))
    kind = draw(st.sampled_from(["layer", "rms", "group", "batch", "instance", "prelu"]))
    if kind in ("layer", "rms"):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
        if kind == "rms":
            module: nn.Module = nn.RMSNorm(
                shape, eps=draw(st.sampled_from([None, eps])), elementwise_affine=affine
            )
        else:
            module = nn.LayerNorm(
                shape, eps=eps, elementwise_affine=affine, bias=draw(st.booleans())
            )
        return module, (*draw(dims), *shape)
    if kind == "prelu":
        features = draw(st.integers(1, 4))
        return nn.PReLU(draw(st.sampled_from([1, features]))), (features, *draw(dims))
    if kind == "group":
        groups, each = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        return nn.GroupNorm(groups, groups * each, eps=eps, affine=affine), (
            groups * each,
            2,
            *draw(dims),
        )
    n, C = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = tuple(draw(st.integers(2, 3)) for _ in range(n))
    if kind == "instance":
        track = draw(st.booleans())
        module = INSTANCE[n - 1](C, eps=eps, affine=affine, track_running_stats=track).train(
            draw(st.booleans())
        )
        return module, (C, *size)
    module = draw(st.sampled_from([BATCH[n - 1], nn.SyncBatchNorm]))(C, eps=eps, affine=affine)
    vector = n == 1 and draw(st.booleans())
    return module.eval(), (C,) if vector else (C, *size)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(layers(), st.integers(1, 4))
def test_any_layer(loop: Any, same: Any, drawn: tuple[nn.Module, tuple[int, ...]], B: int) -> None:
    module, shape = drawn
    torch.manual_seed(0)
    compare(awake(module), torch.randn(B, *shape), loop, same)


OPTIONS: dict[type[nn.Module], dict[str, Any]] = {
    nn.LayerNorm: {"normalized_shape": 4, "eps": 0.3, "elementwise_affine": False, "bias": False},
    nn.RMSNorm: {"normalized_shape": 4, "eps": 0.3, "elementwise_affine": False},
    nn.GroupNorm: {"num_groups": 2, "num_channels": 4, "eps": 0.3, "affine": False},
    nn.PReLU: {"num_parameters": 4, "init": -0.5},
    **{
        kind: {
            "num_features": 4,
            "eps": 0.3,
            "momentum": None,
            "affine": kind in INSTANCE,
            "track_running_stats": True,
        }
        for kind in BATCH + INSTANCE
    },
}
for options in OPTIONS.values():
    options |= {"device": "cpu", "dtype": torch.float32}
OPTIONS[nn.SyncBatchNorm]["process_group"] = None
NEWER = {"bias"}  # some options are in newer versions of PyTorch only
REQUIRED = {"normalized_shape", "num_groups", "num_channels", "num_features"}


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda k: k.__name__)
def test_every_constructor_option_is_handled(kind: type[nn.Module], loop: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    options = OPTIONS[kind]
    known = set(inspect.signature(kind).parameters)
    assert known - set(options) <= NEWER
    assert set(options) <= known
    required = {name: value for name, value in options.items() if name in REQUIRED}
    for name, value in [*options.items(), *[(name, False) for name in known - set(options)]]:
        dtype = value if name == "dtype" else torch.float64
        module = awake(kind(**{**required, "dtype": dtype, name: value})).eval()
        dims = {"1": 1, "2": 2, "3": 3}.get(kind.__name__[-2], 1)
        x = torch.randn(B, 4, *[5] * dims, dtype=dtype)
        if kind in (nn.LayerNorm, nn.RMSNorm):
            x = x.mT
        g = torch.randn(V, *x.shape, dtype=dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        same(
            rule_of(module).per_example_grads(module, (x,), {}, g),
            loop(module, (x,), {}, g),
            tolerance,
        )


MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type[LayerRule]]] = {
    "layer": (lambda: nn.LayerNorm(4), (5, 4), LayerNormRule),
    "layer 2d": (lambda: nn.LayerNorm((5, 4)), (2, 5, 4), LayerNormRule),
    "rms": (lambda: nn.RMSNorm(4), (5, 4), RMSNormRule),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 5), GroupNormRule),
    "batch": (lambda: nn.BatchNorm2d(4).eval(), (4, 5, 2), BatchNormRule),
    "instance": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        (4, 5),
        InstanceNormRule,
    ),
    "prelu": (lambda: nn.PReLU(4), (4, 5), PReLURule),
}


@pytest.mark.parametrize("name", MADE)
class TestLaws:
    def build(self, name: str) -> tuple[nn.Module, Tensor]:
        make, shape, rule = MADE[name]
        module = awake(make())
        assert type(rule_of(module)) is rule
        assert why_generic(module) == ""
        return module, torch.randn(B, *shape)

    def test_half_precision_is_computed_in_float32(self, name: str, same: Any) -> None:
        module, x = self.build(name)
        x, g = x.bfloat16(), torch.randn(V, *x.shape).bfloat16()
        rule = rule_of(module.bfloat16())
        halves = rule.per_example_grads(module, (x,), {}, g)
        with torch.autocast("cpu"):
            same(rule.per_example_grads(module, (x,), {}, g), halves)
        same(halves, rule.per_example_grads(module.float(), (x.float(),), {}, g.float()), 1e-6)
        same(halves, LayerRule().per_example_grads(module.bfloat16(), (x,), {}, g), 1e-4)


def test_prelu_of_single_numbers(loop: Any, same: Any) -> None:
    compare(nn.PReLU(), torch.randn(B), loop, same)


def test_running_statistics_in_training_mode_are_left_alone(loop: Any, same: Any) -> None:
    module = awake(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).train()
    x = torch.randn(B, 4, 3, 3)
    before, g = {k: t.clone() for k, t in module.named_buffers()}, torch.randn(V, B, 4, 3, 3)
    in_training = rule_of(module).per_example_grads(module, (x,), {}, g)
    assert all(t.equal(before[k]) for k, t in module.named_buffers())
    same(in_training, loop(module, (x,), {}, g))
    module.eval()
    assert (
        rule_of(module).per_example_grads(module, (x,), {}, g)["weight"] - in_training["weight"]
    ).abs().max() > 0.1


@pytest.mark.parametrize("kind", BATCH, ids=lambda k: k.__name__)
def test_batch_norm_with_the_statistics_of_the_batch(kind: type[nn.Module]) -> None:
    x = torch.randn(B, 4, *[3] * {"2": 2, "3": 3}.get(kind.__name__[-2], 1))
    """In training mode `x̂` is that of the pass; without statistics of training, evaluation is
    refused.
    """
    module, g = kind(4), torch.randn(V, *x.shape)
    rule = rule_of(module)
    assert isinstance(rule, BatchNormRule)
    normalized = (x - x.mean([0, *range(2, x.ndim)], keepdim=True)) / x.var(
        [0, *range(2, x.ndim)], correction=0, keepdim=True
    ).add(1e-5).sqrt()
    positions = [*range(3, g.ndim)] or [g.ndim]
    expected = [(t.unsqueeze(-1) if g.ndim < 4 else t).sum(positions) for t in (g * normalized, g)]
    found = rule.per_example_grads(module, (x,), {}, g)
    torch.testing.assert_close([found["weight"], found["bias"]], expected, rtol=1e-4, atol=1e-4)
    words = "with track_running_stats=False normalizes with the statistics of the batch"
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} {words}"):
        rule.check(kind(4, track_running_stats=False).eval())


# -------------------------------------------------------------------------------------------- masks
def test_masked_positions() -> None:
    """Positions are behind the channels, or before the features."""
    mask = torch.rand(B, 4) > 0.5
    g = torch.randn(V, B, 4, 4)  # as many features as positions
    for rule, expected in (
        (LayerNormRule(), g * mask[:, :, None]),
        (GroupNormRule(), g * mask[:, None, :]),
        (BatchNormRule(), g * mask[:, None, :]),
        (InstanceNormRule(), g * mask[:, None, :]),
    ):
        assert rule.masked(g, mask).equal(expected)
    g, rule = torch.randn(V, B, 3, 4), PReLURule()
    assert rule.masked(g, mask).equal(g * mask[:, None, :])
    assert rule.masked(g.mT, mask).equal(g.mT * mask[:, :, None])
    assert rule.masked(g, None) is g
