"""Parameters as one matrix: against einops, round trips, views, and what is refused."""

from __future__ import annotations

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.linalg import Layout

from .cases import normal

size = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_random_patterns_against_einops(shape: list[int], random, K: int, with_bias: bool, batched: bool) -> None:
    """Any split of any permutation of a parameter's axes into (batch,) rows and columns, with a bias beside it."""
    axes = [f"a{k}" for k in range(len(shape))]
    order = random.sample(axes, len(axes))
    cut = random.randint(0, len(axes))
    groups = [f"({' '.join(order[:cut])})", f"({' '.join(order[cut:])})"]
    if batched and cut:
        groups = [order[0], f"({' '.join(order[1:cut])})", groups[1]]
    pattern = f"{' '.join(axes)} -> {' '.join(groups)}"
    patterns, shapes = {"w": pattern}, {"w": tuple(shape)}
    weight = normal(*shape, K)
    expected = einops.rearrange(weight, f"{' '.join(axes)} K -> {' '.join(groups)} K")
    tree = {"w": weight}
    if with_bias:
        rows = expected.shape[:-2]
        names = ["r0", "r1"][: len(rows)]
        patterns["b"], shapes["b"] = f"{' '.join(names)} -> {' '.join(names)} 1", tuple(rows)
        tree["b"] = normal(*rows, K, seed=1)
        expected = torch.cat([expected, tree["b"].unsqueeze(-2)], dim=-2)
    layout = Layout(patterns, shapes)
    assert layout.matrix_shape == tuple(expected.shape[:-1])
    v = layout.join(tree)
    assert v.shape == (layout.dim, K)
    for k in range(K):
        columns = [layout.columns(name, t[..., k]) for name, t in tree.items()]
        assert [c.shape[-1] for c in columns] == [layout.width(name) for name in tree]
        assert torch.equal(torch.cat(columns, -1), expected[..., k])
        vector = expected[..., k].flatten()
        views = layout.views(vector)
        assert all(torch.equal(views[name].reshape(t.shape[:-1]), t[..., k]) for name, t in tree.items())
        assert all(t.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr() for t in views.values())
    assert torch.equal(v, expected.reshape(layout.dim, K))
    for memory in (v, v.contiguous(), v.T.contiguous().T):
        back = layout.split(memory)
        assert list(back) == list(patterns)
        assert all(torch.equal(back[name], tree[name]) for name in tree)


def test_axes_that_sizes_tell() -> None:
    layout = Layout({"w": "(g o) i k -> g o (i k)"}, {"w": (6, 2, 5)}, {"g": 3})
    w = normal(6, 2, 5, 4)
    assert layout.matrix_shape == (3, 2, 10)
    assert torch.equal(layout.join({"w": w}), w.reshape(60, 4))
    assert torch.equal(layout.split(w.reshape(60, 4))["w"], w)


@pytest.mark.parametrize(
    ("pattern", "shape"), [("d0 d1 -> 1 (d0 d1)", (2, 3)), ("-> 1 1", ()), ("-> 1 ()", ()), ("1 d -> d 1", (1, 3))]
)
def test_axes_of_size_one(pattern: str, shape: tuple[int, ...]) -> None:
    layout = Layout({"p": pattern}, {"p": shape})
    p = normal(*shape, 2)
    assert torch.equal(layout.split(layout.join({"p": p}))["p"], p)


def test_plain_reshapes_are_views() -> None:
    layout = Layout({"w": "o i h w -> o (i h w)"}, {"w": (4, 3, 2, 2)})
    w = normal(4, 3, 2, 2, 5)
    v = layout.join({"w": w, "something else": w})
    assert v.data_ptr() == w.data_ptr()
    assert layout.split(v)["w"].data_ptr() == w.data_ptr()
    joint = Layout({"w": "o i -> o i", "b": "o -> o 1"}, {"w": (4, 3), "b": (4,)})
    v = normal(16, 2)
    storage = v.untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() == storage for part in joint.split(v).values())


def test_parts_of_any_strides_are_joined() -> None:
    """Of axes of size one strides say nothing, and `torch.cat` may return what looks channels-last."""
    patterns = {"w": "(g i) o k -> g o (i k)", "b": "(g o) -> g o 1"}
    layout = Layout(patterns, {"w": (2, 1, 1), "b": (2,)}, {"g": 2})
    w, b = (normal(2, seed=seed) for seed in (0, 1))
    tree = {"w": w.as_strided((2, 1, 1, 1), (1, 1, 1, 2)), "b": b.as_strided((2, 1), (1, 2))}
    assert torch.equal(layout.join(tree), torch.stack([w, b], 1).reshape(4, 1))


def test_autograd_flows_through() -> None:
    layout = Layout({"w": "o i -> i o", "b": "i -> i 1"}, {"w": (2, 3), "b": (3,)})
    tree = {"w": normal(2, 3, 2).requires_grad_(), "b": normal(3, 2).requires_grad_()}
    v = layout.join(tree)
    grads = torch.autograd.grad((v * v).sum(), list(tree.values()))
    assert all(torch.allclose(grad, 2 * t) for grad, t in zip(grads, tree.values(), strict=True))


REFUSED = [
    ("o i", (2, 3), 'expected one "->"'),
    ("o i -> o i -> o", (2, 3), 'expected one "->"'),
    ("o i k -> o (i k)", (2, 3), r'parameter "w" with shape \[2, 3\]: expected 3 axes'),
    ("o i -> (o i)", (2, 3), '"rows cols" or "batch rows cols" on the right, got 1'),
    ("a b c d -> a b c d", (1, 1, 1, 1), "got 4 axes"),
    ("o i -> o j", (2, 3), r"every axis once on each side, got \['o', 'i'\] and \['o', 'j'\]"),
    ("o o -> o o", (2, 2), "every axis once"),
    ("o ... -> o (...)", (2, 3), r'cannot read "o \.\.\."'),
    ("(a b) -> a b", (6,), r"axes \['a', 'b'\] must multiply to 6, given sizes \{\}; pass sizes="),
    ("(g b) -> g b", (6,), r"must multiply to 6, given sizes \{'g': 4\}"),
    ("g o -> g o", (6, 2), r"must multiply to 6, given sizes \{'g': 4\}"),
]


@pytest.mark.parametrize(("pattern", "shape", "message"), REFUSED)
def test_refused_patterns(pattern: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout({"w": pattern}, {"w": shape}, {"g": 4} if "g" in pattern else None)


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"one pattern and one shape per parameter, got patterns of \['w'\]"):
        Layout({"w": "o i -> o i"}, {"b": (2,)})
    with pytest.raises(ValueError, match=r"same rows, got matrices \{'w': \(2, 3\), 'b': \(3, 1\)\}"):
        Layout({"w": "o i -> o i", "b": "o -> o 1"}, {"w": (2, 3), "b": (3,)})
