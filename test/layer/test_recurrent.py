"""Recurrent layers: gradients of written-out steps against plain autograd on PyTorch's own layers,
for every option.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import LayerRule, RecurrentRule, rule_of
from curvlinops_plus.layer.replay import Call

V, B, T, i, h = 2, 3, 5, 4, 2

SEQUENCES = [nn.RNN, nn.LSTM, nn.GRU]
CELLS = [nn.RNNCell, nn.LSTMCell, nn.GRUCell]


def axes_of(module: nn.Module, states: int) -> tuple[list[int], list[int]]:
    """Where the module wants the examples, with that many states given, and where it returns
    them.
    """
    returned = 2 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 1
    if not isinstance(module, nn.RNNBase):
        return [0] * (1 + states), [0] * returned
    at = 0 if module.batch_first else 1
    return [at] + [1] * states, [at] + [1] * returned


def problem(
    module: nn.Module, state: bool = False, V: int = V, B: int = B, T: int = T
) -> tuple[Any, Any]:
    """Inputs and output gradients with the examples first."""
    if isinstance(module, nn.RNNBase):
        layers, hidden = (
            module.num_layers * (1 + module.bidirectional),
            module.proj_size or module.hidden_size,
        )
        shapes = [(layers, hidden)] + [(layers, module.hidden_size)] * (module.mode == "LSTM")
        x, out = torch.randn(B, T, module.input_size), (T, (1 + module.bidirectional) * hidden)
        g = [torch.randn(V, B, *shape) for shape in [out, *shapes]]
    else:
        shapes = [(module.hidden_size,)] * (1 + isinstance(module, nn.LSTMCell))
        x, g = torch.randn(B, module.input_size), [torch.randn(V, B, *shape) for shape in shapes]
    states = tuple(torch.randn(B, *shape) for shape in shapes)
    hx = (states if len(states) > 1 else states[0]) if state else None
    return ((x, hx) if state else (x,)), g[0] if len(g) == 1 else g


def compare(module: nn.Module, loop: Any, same: Any, state: bool = False, **sizes: int) -> None:
    args, g = problem(module, state, **sizes)
    rule = rule_of(module)
    assert type(rule) is RecurrentRule
    in_axes, out_axes = axes_of(
        module, 0 if not state else 2 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 1
    )
    ours = rule.per_example_grads(module, args, {}, g)
    same(ours, loop(module, args, {}, g, in_axes, out_axes))
    same(rule.replay(module, args, {}, g, in_axes, out_axes), ours)
    named = dict(zip(("input", "hx"), args))
    same(rule.per_example_grads(module, (), named, g), ours)
    same(rule.per_example_grads(module, (), dict(reversed(named.items())), g), ours)


@pytest.mark.parametrize("kind", [*SEQUENCES, *CELLS])
@pytest.mark.parametrize("state", [False, True])
def test_steps_are_repeated(kind: Any, state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all examples at once: nothing runs the layer for each of them."""
    monkeypatch.setattr(Call, "one_by_one", lambda *_: pytest.fail("one by one"))
    module = kind(i, h)
    args, g = problem(module, state)
    assert rule_of(module).per_example_grads(module, args, {}, g)


@st.composite
def layers(draw: st.DrawFn) -> nn.Module:
    flag = st.booleans()
    if draw(st.integers(0, 3)) == 0:
        kind = draw(st.sampled_from(CELLS))
        options = (
            {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind is nn.RNNCell else {}
        )
        return kind(draw(st.integers(1, 3)), draw(st.integers(1, 3)), bias=draw(flag), **options)
    kind, hidden = draw(st.sampled_from(SEQUENCES)), draw(st.integers(1, 3))
    options = {}
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind is nn.LSTM:
        options["proj_size"] = draw(st.integers(0, hidden - 1))
    return kind(
        draw(st.integers(1, 3)),
        hidden,
        num_layers=draw(st.integers(1, 3)),
        bidirectional=draw(flag),
        batch_first=draw(flag),
        bias=draw(flag),
        **options,
    )


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(layers(), st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_any_layer(
    loop: Any, same: Any, module: nn.Module, state: bool, V: int, B: int, T: int
) -> None:
    torch.manual_seed(0)
    compare(module, loop, same, state, V=V, B=B, T=T)


OPTIONS = {
    "input_size": 3,
    "hidden_size": 4,
    "num_layers": 2,
    "bias": False,
    "batch_first": True,
    "dropout": 0.0,
    "bidirectional": True,
    "device": "cpu",
    "dtype": torch.float32,
}
MORE = {
    nn.RNN: {"nonlinearity": "relu"},
    nn.LSTM: {"proj_size": 1},
    nn.RNNCell: {"nonlinearity": "relu"},
}
IN_CELLS = ["input_size", "hidden_size", "bias", "device", "dtype"]


@pytest.mark.parametrize("kind", SEQUENCES + CELLS, ids=lambda k: k.__name__)
def test_every_constructor_option_is_handled(kind: type[nn.Module], loop: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    options = {k: v for k, v in OPTIONS.items() if k in IN_CELLS or kind in SEQUENCES} | MORE.get(
        kind, {}
    )
    if kind in SEQUENCES:  # the three pass their options on to one base
        known = {*inspect.signature(nn.RNNBase.__init__).parameters} - {"self", "mode", "proj_size"}
        assert known == {*options} - {"proj_size", "nonlinearity"}
    else:
        assert {*inspect.signature(kind).parameters} == {*options}
    for name, value in options.items():
        dtype = value if name == "dtype" else torch.float64
        module = kind(**{"input_size": i, "hidden_size": h, "dtype": dtype, name: value})
        args, g = problem(module)
        args = tuple(t.to(dtype) for t in args)
        g = g.to(dtype) if isinstance(g, Tensor) else [t.to(dtype) for t in g]
        ours = rule_of(module).per_example_grads(module, args, {}, g)
        same(
            ours,
            loop(module, args, {}, g, *axes_of(module, 0)),
            1e-12 if dtype == torch.float64 else 1e-4,
        )


@pytest.mark.parametrize("kind", SEQUENCES + CELLS, ids=lambda k: k.__name__)
class TestLaws:
    def test_pieces_are_the_whole(
        self, kind: Any, same: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = kind(i, h)
        args, g = problem(module, state=True)
        rule = rule_of(module)
        whole = rule.per_example_grads(module, args, {}, g)
        monkeypatch.setattr(rule, "max_bytes", 1)
        same(rule.per_example_grads(module, args, {}, g), whole)

    def test_half_precision_is_computed_in_float32(self, kind: Any, same: Any) -> None:
        module = kind(i, h).bfloat16()
        args, g = problem(module)
        g = [t.bfloat16() for t in ([g] if isinstance(g, Tensor) else g)]
        rule, x = rule_of(module), args[0].bfloat16()
        halves = rule.per_example_grads(module, (x,), {}, g)
        with torch.autocast("cpu"):
            same(rule.per_example_grads(module, (x,), {}, g), halves)
        module, floats = module.float(), [t.float() for t in g]
        same(halves, rule.per_example_grads(module, (x.float(),), {}, floats), 1e-6)

    def test_axes(self, kind: Any) -> None:
        rule, module = rule_of(kind(i, h)), kind(i, h)
        (x, *_), g = problem(module)
        g = [g] if isinstance(g, Tensor) else g
        assert (
            rule.axes(module, 0, [x], inputs=True),
            rule.axes(module, 0, g, inputs=False),
        ) == axes_of(module, 0)
        if kind in SEQUENCES:
            first = kind(i, h, batch_first=True)
            assert rule.axes(first, 1, [x, *g[1:]], inputs=True) == [0] + [1] * len(g[1:])
            assert rule.axes(first, 1, g, inputs=False) == [0] + [1] * len(g[1:])

    def test_inputs_without_an_example_axis(self, kind: Any) -> None:
        module = kind(i, h)
        x = torch.randn(T, i) if kind in SEQUENCES else torch.randn(i)
        out = [t for t in tree_leaves(module(x)) if isinstance(t, Tensor)]
        for inputs, leaves, verb, size in ((True, [x], "got", i), (False, out, "returned", h)):
            shape = rf"\[5, {size}\]" if kind in SEQUENCES else rf"\[{size}\]"
            words = rf"{verb} shape {shape} without an example axis, expected . dimensions"
            with pytest.raises(UnsupportedError, match=f"{kind.__name__} {words}"):
                rule_of(module).axes(module, 0, leaves, inputs=inputs)


def normed(kind: Any, **options: Any) -> nn.Module:
    return weight_norm(weight_norm(kind(i, h, **options), "weight_hh_l0"), "weight_ih_l0")


def pruned(kind: Any, **options: Any) -> nn.Module:
    module = kind(i, h, **options)
    prune.random_unstructured(module, "weight_ih_l0", amount=0.5)
    return module


def parametrized(kind: Any, **options: Any) -> nn.Module:
    """Parametrization makes a new type, and the layer reads the computed weight."""
    return parametrizations.weight_norm(kind(i, h, **options), "weight_hh_l1")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("kind", SEQUENCES, ids=lambda k: k.__name__)
def test_dropout_is_refused(kind: Any) -> None:
    module = kind(i, h, num_layers=2, dropout=0.5)
    words = rf"{kind.__name__}\(dropout=0.5\) in training mode draws random numbers.*model.eval\(\)"
    with pytest.raises(UnsupportedError, match=words):
        rule_of(module).check(module)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("make", [normed, pruned, parametrized])
@pytest.mark.parametrize("kind", SEQUENCES, ids=lambda k: k.__name__)
def test_computed_weights_are_differentiated(
    make: Any, kind: Any, batch_first: bool, loop: Any, same: Any
) -> None:
    """The axes are known all the same: with as many layers as examples a wrong one would not show
    in shapes.
    """
    module = make(kind, batch_first=batch_first, num_layers=B)
    args, g = problem(module)
    rule = rule_of(module)
    assert isinstance(rule, RecurrentRule)
    ours = rule.per_example_grads(module, args, {}, g)
    assert any(name.endswith(("_g", "_orig", "original1")) for name in ours)
    same(ours, loop(module, args, {}, g, *axes_of(module, 0)))
    if make is normed:
        assert ours["weight_hh_l0_v"].any()
        assert ours["weight_ih_l0_g"].any()


def test_subclasses_with_another_forward_are_generic() -> None:
    class Last(nn.GRU):
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            return super().forward(input, hx)[0][:, -1]

    assert type(rule_of(Last(i, h))) is LayerRule
