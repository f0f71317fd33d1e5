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
