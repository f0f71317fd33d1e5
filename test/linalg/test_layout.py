"""Parameters as one matrix, against einops."""

from __future__ import annotations

from typing import Any

import einops
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.linalg import Layout
from curvlinops_plus.linalg.layout import Pattern
from test.linalg.cases import normal


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_random_patterns_against_einops(
    shape: list[int], random: Any, K: int, with_bias: bool, batched: bool
) -> None:
    """Any split of any permutation of a parameter's axes into (batch,) rows and columns, with a
    bias beside it.
    """
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
    assert torch.equal(v, expected.reshape(layout.dim, K))
    for k in range(K):
        vector = expected[..., k].flatten()
        views = layout.views(vector)
        assert all(
            torch.equal(views[name].reshape(t.shape[:-1]), t[..., k]) for name, t in tree.items()
        )
        assert all(
            t.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
            for t in views.values()
        )
    for memory in (v, v.contiguous(), v.T.contiguous().T):
        back = layout.split(memory)
        assert list(back) == list(patterns)
        assert all(torch.equal(back[name], tree[name]) for name in tree)


def test_special_layouts() -> None:
    """Sizes that tell axes apart, axes of size one, plain reshapes, which are views, and parts of
    any strides.
    """
    layout, w = (
        Layout({"w": "(g o) i k -> g o (i k)"}, {"w": (6, 2, 5)}, {"g": 3}),
        normal(6, 2, 5, 4),
    )
    assert layout.matrix_shape == (3, 2, 10)
    assert torch.equal(layout.join({"w": w}), w.reshape(60, 4))
    for pattern, shape in (
        ("d0 d1 -> 1 (d0 d1)", (2, 3)),
        ("-> 1 1", ()),
        ("-> 1 ()", ()),
        ("1 d -> d 1", (1, 3)),
    ):
        p = normal(*shape, 2)
        layout = Layout({"p": pattern}, {"p": shape})
        assert torch.equal(layout.split(layout.join({"p": p}))["p"], p)
    layout, w = Layout({"w": "o i h w -> o (i h w)"}, {"w": (4, 3, 2, 2)}), normal(4, 3, 2, 2, 5)
    v = layout.join({"w": w, "something else": w})
    assert v.data_ptr() == w.data_ptr() == layout.split(v)["w"].data_ptr()
    patterns = {"w": "(g i) o k -> g o (i k)", "b": "(g o) -> g o 1"}
    layout, (w, b) = Layout(patterns, {"w": (2, 1, 1), "b": (2,)}, {"g": 2}), normal(2, 2)
    tree = {"w": w.as_strided((2, 1, 1, 1), (1, 1, 1, 2)), "b": b.as_strided((2, 1), (1, 2), 2)}
    assert torch.equal(layout.join(tree), torch.stack([w, b], 1).reshape(4, 1))


def test_pattern() -> None:
    """What is read from a pattern, for those that see a parameter as a matrix."""
    pattern = Pattern("(g o) i h w -> g o (i h w)")
    assert (pattern.parameter, pattern.matrix) == ("(g o) i h w", "g o (i h w)")
    assert pattern.axes == ["(g o)", "i", "h", "w"]
    assert pattern.names == ["g", "o", "i", "h", "w"]
    assert pattern.sizes((6, 2, 3, 5), {"g": 3, "k": 7}) == {"g": 3, "i": 2, "h": 3, "w": 5}
    assert pattern.keeps_order
    assert pattern.transposed == "(i h w) o g"
    assert not Pattern("o i h -> o (h i)").keeps_order
    assert Pattern("o -> o 1").transposed == "1 o"
    assert Pattern("-> 1 1").axes == []
