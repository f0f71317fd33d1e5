"""Linear layers, convolutions and transposed ones: rows, fast paths and gradients, for every
constructor option.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.layer import (
    AffineRule,
    ConvRule,
    LayerRule,
    TransposedConvRule,
    rule_of,
    why_generic,
)
from curvlinops_plus.layer import convolution_gram as grams
from test.helpers import check_fast_paths

V, B = 2, 3
CONVOLUTIONS, TRANSPOSED = (
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

Last = {"memory_format": torch.channels_last}
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "linear-4d": (lambda: nn.Linear(3, 2, bias=False), (2, 4, 3)),
    "linear-one-position": (lambda: nn.Linear(3, 2), (1, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 6)),
    "conv1d-same-even": (lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=3), (2, 10)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(2, 1), bias=False), (2, 5, 4)),
    "conv2d-stride": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=1), (2, 5, 6)),
    "conv2d-dilation": (lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3), padding=1), (2, 5, 6)),
    "conv2d-same-even": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 6)),
    "conv2d-valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 5, 4)),
    "conv2d-reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"),
        (2, 5, 4),
    ),
    "conv2d-circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="circular"),
        (2, 5, 4),
    ),
    "conv2d-1x1": (lambda: nn.Conv2d(2, 3, 1, stride=2), (2, 5, 4)),
    "conv2d-1x1-pad": (lambda: nn.Conv2d(2, 3, 1, padding=1, dilation=2), (2, 5, 4)),
    "conv2d-whole-image": (lambda: nn.Conv2d(2, 3, (5, 4)), (2, 5, 4)),
    "conv2d-channels-last": (lambda: nn.Conv2d(2, 3, 3, padding=1).to(**Last), (2, 5, 4)),
    "conv3d": (
        lambda: nn.Conv3d(2, 3, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1)),
        (2, 3, 4, 3),
    ),
    "groups-1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 6)),
    "depthwise": (lambda: nn.Conv2d(3, 9, 3, stride=2, groups=3, bias=False), (3, 5, 6)),
    "groups-same": (
        lambda: nn.Conv2d(4, 2, 4, padding="same", padding_mode="reflect", groups=2),
        (4, 5, 6),
    ),
    "groups-pointwise": (lambda: nn.Conv2d(6, 4, 1, stride=2, groups=2), (6, 5, 4)),
    "groups-channels-last": (lambda: nn.Conv2d(4, 6, 3, groups=2).to(**Last), (4, 5, 4)),
    "groups-3d": (
        lambda: nn.Conv3d(4, 2, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1), groups=2),
        (4, 3, 4, 3),
    ),
    "transposed-stride": (lambda: nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1), (2, 4, 5)),
    "transposed-output-padding": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=(2, 3), output_padding=(1, 2)),
        (2, 4, 3),
    ),
    "transposed-dilation": (
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), dilation=(2, 3), padding=(1, 2)),
        (2, 4, 5),
    ),
    "transposed-holes": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=5, bias=False), (2, 4)),
    "transposed-cropped": (lambda: nn.ConvTranspose2d(2, 3, 2, padding=(2, 3)), (2, 7, 8)),
    "transposed-one-side": (
        lambda: nn.ConvTranspose1d(2, 3, 1, stride=4, padding=1, output_padding=3),
        (2, 3),
    ),
    "transposed-only-bias": (
        lambda: nn.ConvTranspose1d(1, 2, 1, stride=20, padding=5, output_padding=12),
        (1, 1),
    ),
    "transposed-groups": (
        lambda: nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, groups=3),
        (3, 3, 4),
    ),
    "transposed-3d": (
        lambda: nn.ConvTranspose3d(2, 3, (2, 3, 1), stride=(1, 2, 3), padding=(0, 1, 0)),
        (2, 2, 3, 2),
    ),
}


def affine(module: nn.Module) -> Any:
    rule = rule_of(module)
    assert isinstance(rule, AffineRule)
    return rule


def matrix(module: Any) -> Tensor:
    """The weight as one matrix per group, [g, o, i·kernel], written without the rule's pattern."""
    W, groups = module.weight.detach(), getattr(module, "groups", 1)
    if not isinstance(module, TRANSPOSED):
        return W.unflatten(0, (groups, -1)).flatten(2)
    o = module.out_channels // groups
    return torch.stack([part.transpose(0, 1).reshape(o, -1) for part in W.chunk(groups)])


def check_rows(module: Any, x: Tensor, *call: Any) -> None:
    """`W a + b` of each group is the output, so that the rows are the right ones."""
    rule, out, groups = affine(module), module(x, *call), getattr(module, "groups", 1)
    a, W = rule.inputs(module, rule.input_of(module, (x, *call), {})), matrix(module)
    expected = rule.grads(module, out[None])[0]  # the rows of an output are those of its gradient
    if groups == 1:
        a, expected = a[:, :, None], expected[:, :, None]
    assert a.shape == (B, expected.shape[1], groups, W.shape[2])
    bias = 0 if module.bias is None else module.bias.view(groups, -1)
    torch.testing.assert_close(
        torch.einsum("bsgi,goi->bsgo", a, W) + bias, expected, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("name", CASES)
class TestLaws:
    def build(self, name: str) -> tuple[nn.Module, Tensor, Tensor]:
        make, shape = CASES[name]
        module, x = make(), torch.randn(B, *shape)
        return module, x, torch.randn(V, *module(x).shape)

    def test_rows_and_fast_paths(self, name: str) -> None:
        module, x, g = self.build(name)
        assert why_generic(module) == ""
        check_rows(module, x)
        check_fast_paths(affine(module), module, x, g)

    def test_per_example_grads(self, name: str, loop: Any, same: Any) -> None:
        module, x, g = self.build(name)
        rule, twin = rule_of(module), loop(module, (x,), {}, g)
        for found in (
            rule.per_example_grads(module, (x,), {}, g),
            LayerRule().per_example_grads(module, (x,), {}, g),
        ):
            same(found, twin)
        same(rule.per_example_grads(module.requires_grad_(False), (), {"input": x}, g), twin)

    def test_half_precision_is_summed_in_float32(self, name: str) -> None:
        module, x, g = self.build(name)
        rule, x, g = affine(module), x.bfloat16(), g.bfloat16()
        check_fast_paths(rule, module, x, g, dtype=torch.float32, tolerance=1e-5)
        halves = rule.per_example_grads(module.bfloat16(), (x,), {}, g)
        for key, J in rule.per_example_grads(module, (x.float(),), {}, g.float()).items():
            assert halves[key].dtype == torch.float32
            torch.testing.assert_close(halves[key], J)


# ----------------------------------------------------------------------------- every option at once
@st.composite
def layers(draw: st.DrawFn) -> tuple[Any, tuple[int, ...], list[int] | None]:
    """A layer, the shape of an example, and of a transposed one an `output_size`."""
    n, transposed, groups = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    kernel, stride, dilation = each(1, 4 if n < 3 else 2), each(1, 3), each(1, 3)
    options: dict[str, Any] = {
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    sizes, extra = each(1, 7 if n < 3 else 4), None
    if transposed:
        room = [max(s, d) - 1 for s, d in zip(stride, dilation)]
        options |= {
            "padding": each(0, 4),
            "output_padding": tuple(draw(st.integers(0, r)) for r in room),
        }
        dims = zip(sizes, stride, options["padding"], dilation, kernel)
        smallest = [(size - 1) * s - 2 * p + d * (k - 1) + 1 for size, s, p, d, k in dims]
        assume(min(smallest) > 0)
        extra = [size + draw(st.integers(0, s - 1)) for size, s in zip(smallest, stride)]
    else:
        options["padding"] = draw(
            st.sampled_from([each(0, 3), "valid", *["same"] * (set(stride) == {1})])
        )
        options["padding_mode"] = draw(
            st.sampled_from(["zeros", "reflect", "replicate", "circular"])
        )
    return (
        (TRANSPOSED if transposed else CONVOLUTIONS)[n - 1](*channels, kernel, **options),
        sizes,
        extra,
    )


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(layers(), st.sampled_from([2**20, 1]), st.sampled_from([128, 1]))
def test_any_convolution(drawn: tuple[Any, tuple[int, ...], Any], work: int, large: int) -> None:
    """Also with work memory for a single example, and with each group by itself."""
    module, sizes, extra = drawn
    torch.manual_seed(0)
    x, rule = torch.randn(B, module.in_channels, *sizes), affine(module)
    for call in ((),) if extra is None else ((), (extra,)):
        try:
            g = torch.randn(V, *module(x, *call).shape)
        except (
            RuntimeError
        ):  # the kernel does not fit, or the padding is wider than its mode allows
            assume(False)
            return
        check_rows(module, x, *call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grams, "_PATCH_BYTES", work)
            patch.setattr(grams, "_LARGE_GROUP", large)
            check_fast_paths(rule, module, rule.input_of(module, (x, *call), {}), g)
        J, twin = (r.per_example_grads(module, (x, *call), {}, g) for r in (rule, LayerRule()))
        for name in twin:
            torch.testing.assert_close(J[name], twin[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [[9, 15], [10, 17], (3, 3, 9, 16)])
def test_output_size_of_a_call(size: Any, loop: Any, same: Any) -> None:
    module, x = (
        nn.ConvTranspose2d(2, 3, 3, stride=(2, 3), output_padding=(1, 0)),
        torch.randn(B, 2, 4, 5),
    )
    rule, kwargs = TransposedConvRule(), {"output_size": size}
    read = rule.input_of(module, (x,), kwargs)
    assert (read.shape[0], read.untyped_storage().data_ptr()) == (
        B,
        x.untyped_storage().data_ptr(),
    )  # no memory
    g = torch.randn(V, *module(x, **kwargs).shape)
    twin = loop(module, (x,), kwargs, g)
    same(rule.per_example_grads(module, (x,), kwargs, g), twin)
    same(rule.per_example_grads(module, (read.detach(),), {}, g), twin)  # as a recorder hands it on
    assert rule.input_of(module, (x, [10, 15]), {}) is x is rule.input_of(module, (x, None), {})


CHANNELS = {"in_channels": 4, "out_channels": 6, "kernel_size": 2}
COMMON = {
    "stride": 2,
    "padding": 1,
    "dilation": 2,
    "groups": 2,
    "bias": False,
    "device": "cpu",
    "dtype": torch.float32,
}
HANDLED: dict[
    Any, tuple[dict[str, Any], dict[str, Any]]
] = {  # what is required; options with other than default values
    nn.Linear: (
        {"in_features": 4, "out_features": 3},
        {"bias": False, "device": "cpu", "dtype": torch.float32},
    ),
    **dict.fromkeys(CONVOLUTIONS, (CHANNELS, {**COMMON, "padding_mode": "circular"})),
    **dict.fromkeys(
        TRANSPOSED, (CHANNELS, {**COMMON, "padding_mode": "zeros", "output_padding": 1})
    ),
}


@pytest.mark.parametrize("kind", HANDLED, ids=lambda k: k.__name__)
def test_every_constructor_option_is_handled(kind: type[nn.Module], loop: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    required, options = HANDLED[kind]
    assert set(inspect.signature(kind).parameters) == {*required, *options}
    for name, value in options.items():
        module = kind(**{**required, **({"stride": 2} if kind in TRANSPOSED else {}), name: value})
        dims = 0 if kind is nn.Linear else module.weight.ndim - 2
        x = torch.randn(B, 4, *[5] * dims, dtype=module.weight.dtype)
        g = torch.randn(V, *module(x).shape, dtype=x.dtype)
        tolerance = 1e-12 if x.dtype == torch.float64 else 1e-4
        same(
            rule_of(module).per_example_grads(module, (x,), {}, g),
            loop(module, (x,), {}, g),
            tolerance,
        )


def test_each_group_is_a_convolution_of_its_own() -> None:
    module, x = nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), torch.randn(B, 6, 7, 7)
    A, total, count = ConvRule().input_gram(module, x)
    single = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    for k, channels in enumerate(x.chunk(3, 1)):
        torch.testing.assert_close((A[k], total[k], count), ConvRule().input_gram(single, channels))


# ----------------------------------------------------------------------------------- rules of users
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
    module, x, g = MyLinear(), torch.randn(B, 3), torch.randn(V, B, 2)
    wrong = type(
        "Wrong", (MyLinearRule,), {"grads": lambda self, m, g: g[:, :, None] * (1 + 1e-10)}
    )()
    with pytest.raises(AssertionError):
        same(wrong.per_example_grads(module, (x,), {}, g), loop(module, (x,), {}, g))
