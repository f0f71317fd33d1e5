"""Parameters as one matrix, against einops, and what is special about block-diagonal matrices
beyond the laws.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    OwnedBlockDiagonal,
    RelativeDamping,
    Space,
    Structure,
    Sum,
)
from curvlinops_plus.linalg.layout import Pattern
from curvlinops_plus.linalg.nearest import nearest_kronecker
from test.linalg.cases import F64, block_diagonal, eye_like, normal, psd
from test.linalg.test_laws import close

# Layouts
# --------------------------------------------------------------------------------------------------


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


# Blocks
# --------------------------------------------------------------------------------------------------


def blocks() -> tuple[BlockDiagonal, torch.Tensor]:
    K, M = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    return K, M


def renamed(K: BlockDiagonal) -> BlockDiagonal:
    """The same matrix of another network, whose blocks and parameters have other names and another
    order.
    """
    new = {name: f"model.{name}" for name in K.space.names}
    layouts = {
        f"other {block}": Layout(
            {new[name]: pattern for name, pattern in layout.patterns.items()},
            {new[name]: shape for name, shape in layout.shapes.items()},
            layout.sizes,
        )
        for block, layout in reversed(K.layouts.items())
    }
    blocks = {f"other {block}": operator for block, operator in reversed(K.blocks.items())}
    return BlockDiagonal(
        blocks, layouts, Space({new[name]: shape for name, shape in K.space.shapes.items()})
    )


def test_arithmetic_keeps_the_blocks() -> None:
    """Also between networks with other names; not if parameters are grouped otherwise."""
    K, M = blocks()
    eye, n = IdentityLinearOperator(K.in_space.shapes, dtype=F64), len(M)
    for A, D in (
        (K / 4, M / 4),
        (-K, -M),
        (eye + K, M + eye_like(M)),
        (sum([K, K.shift(0.1), 2 * K]), 4 * M + 0.1 * eye_like(M)),
        (K - Diagonal(K.diagonal()), M - torch.diag(M.diagonal())),
        (K + 0.5 * renamed(K), 1.5 * M),
    ):
        assert isinstance(A, BlockDiagonal)
        close(A.to_dense(), D)
        assert list(A.blocks) == list(K.blocks)
        assert A.in_space.names == K.space.names
        answer = A @ K.space.unflatten(normal(n))
        assert list(answer) == K.space.names
    close(K.eigenvalues(), torch.cat([block.eigenvalues() for block in K.blocks.values()]))
    parts = K.split(x := normal(n, 9)[:, ::2])
    assert list(parts) == list(K.blocks)
    assert torch.equal(K.merge(parts), x)
    close(K.merge({name: block @ parts[name] for name, block in K.blocks.items()}), M @ x)
    layouts = {name: Layout({name: "o i -> o i"}, {name: (2, 2)}) for name in "ab"}
    P = {name: Dense(psd(4, 4, seed=k), Structure.PSD) for k, name in enumerate("ab")}
    alike, reverse = (
        BlockDiagonal(dict(p), layouts, Space({"a": (2, 2), "b": (2, 2)}))
        for p in (P.items(), [*P.items()][::-1])
    )
    close((alike + reverse).to_dense(), 2 * torch.block_diag(P["a"].matrix, P["b"].matrix))
    shapes = K.space.shapes
    pattern = {
        name: f"{(axes := ' '.join(f'a{k}' for k in range(len(s))))} -> 1 ({axes})"
        for name, s in shapes.items()
    }
    total = K + BlockDiagonal(
        {"all": Diagonal(torch.ones(n, dtype=F64))}, {"all": Layout(pattern, shapes)}, K.space
    )
    assert isinstance(total, Sum)
    close(total.to_dense(), M + eye_like(M))


def test_results_own_their_memory() -> None:
    space = Space.from_shapes({"w": (2, 2)})
    one = {"b": Layout({"w": "o i -> o i"}, space.shapes)}
    (
        BlockDiagonal({"b": IdentityLinearOperator([(4,)], dtype=F64)}, one, space)
        @ (x := normal(4))
    ).zero_()
    assert x.abs().sum() > 0


def test_states_of_block_diagonal_matrices() -> None:
    K, _ = blocks()
    total = K + K._with({**K.blocks, "conv": Kronecker(psd(2, 2, seed=8), psd(7, 7, seed=9))})
    exact = K._with(
        {
            **K.blocks,
            "scale": Dense(torch.diag(torch.tensor([1.0, 1e-30, 1]).double()), Structure.PSD, 0.0),
        }
    )
    general = K._with({**K.blocks, "scale": Dense(normal(3, 3))})
    for A in (
        K,
        2 * K,
        K.shift(0.1),
        total,
        total.nearest_kronecker(),
        K.inverse(0.1),
        exact,
        general,
    ):
        torch.save(A.state_dict(), file := BytesIO())
        file.seek(0)
        B = BlockDiagonal.from_state_dict(torch.load(file, weights_only=True))
        close(B.to_dense(), A.to_dense())
        close(B.trace, A.trace)
        assert (B.structure, list(B.blocks), B.space) == (A.structure, list(A.blocks), A.space)
        if A is not total:
            torch.testing.assert_close(B.det, A.det)
    for path in (
        ("layouts",),
        ("layouts", "fc", "patterns"),
        ("space", "scale"),
        ("blocks", "fc"),
        ("class",),
    ):
        state = inner = total.state_dict()
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        with pytest.raises((KeyError, ValueError)):
            BlockDiagonal.from_state_dict(state)


def test_nearest_kronecker() -> None:
    """The best approximation of rank one to the rearranged sum; blocks that are no sums stay."""
    pairs = [(psd(3, 3, seed=k), psd(4, 4, seed=k + 9)) for k in range(3)]
    G, A = nearest_kronecker(pairs)
    rearranged = sum(torch.outer(H.flatten(), B.flatten()) for H, B in pairs)
    assert isinstance(rearranged, torch.Tensor)
    U, sigma, Vh = torch.linalg.svd(rearranged)
    close(torch.outer(G.flatten(), A.flatten()), sigma[0] * torch.outer(U[:, 0], Vh[0]))
    K, _ = blocks()
    conv = K.blocks["conv"]
    assert isinstance(conv, Kronecker)
    near = (
        K + K._with({**K.blocks, "conv": Kronecker(2 * conv.G.to_dense(), 2 * conv.A.to_dense())})
    ).nearest_kronecker()
    assert isinstance(near.blocks["conv"], Kronecker)
    close(near.blocks["conv"].to_dense(), 5 * conv.to_dense())


SPACE = Space.from_shapes({"w": (2, 2), "b": (2,)})
LAYOUTS = {
    "w": Layout({"w": "o i -> o i"}, {"w": (2, 2)}),
    "b": Layout({"b": "o -> o 1"}, {"b": (2,)}),
}
BLOCKS = {"w": Dense(torch.eye(4), Structure.PSD), "b": Diagonal(torch.ones(2))}
K2 = BlockDiagonal(BLOCKS, LAYOUTS, SPACE)


def layout(pattern: str, *shape: int) -> Layout:
    return Layout({"w": pattern}, {"w": shape}, {"g": 4} if "g" in pattern else None)


def test_negative_multiples_of_owned_blocks_are_indefinite() -> None:
    K, _ = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    owned = OwnedBlockDiagonal(K.blocks, K.layouts, K.space, Alone(), F64, torch.device("cpu"))
    for matrix in (-owned, owned.shift(-1.0), owned.shift(dict.fromkeys(K.blocks, -1.0))):
        assert matrix.structure == Structure.SYMMETRIC
    assert (2 * owned).shift(1.0).structure == Structure.PSD


def flat_blocks(blocks: dict[str, Any]) -> BlockDiagonal:
    shapes = {name: (block.shape[0],) for name, block in blocks.items()}
    layouts = {name: Layout({name: "d -> 1 d"}, {name: shapes[name]}) for name in blocks}
    return BlockDiagonal(blocks, layouts, Space(shapes))


def test_a_block_of_trace_zero_takes_the_mean_eigenvalue_of_the_matrix() -> None:
    K = flat_blocks({"a": Diagonal(2 * torch.ones(3)), "b": Diagonal(torch.zeros(2))})
    inverse = K.inverse(RelativeDamping(0.1)).diagonal()
    close(1 / inverse, torch.tensor([2.2, 2.2, 2.2, 0.12, 0.12]))


def test_states_keep_what_counts_as_zero() -> None:
    K = flat_blocks({"a": Dense(psd(2, 2), Structure.PSD, rtol=0.0), "b": Dense(psd(2, 2))})
    loaded = BlockDiagonal.from_state_dict(K.state_dict())
    assert [block.rtol for block in loaded.blocks.values()] == [0.0, None]


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


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: layout("o i -> o i -> o", 2, 3), 'Pattern "o i -> o i -> o" of parameter "w" with shape'),
    (lambda: layout("o i k -> o (i k)", 2, 3), r"shape \[2, 3\]: (?s:.*)expected 4 dims"),
    (lambda: layout("o i -> (o i)", 2, 3), '"rows cols" or "batch rows cols" on the right'),
    (lambda: layout("o i -> o j", 2, 3), "Identifiers only on one side"),
    (lambda: layout("(a b) -> a b", 6), "Could not infer sizes"),
    (lambda: layout("(g b) -> g b", 6), "can't divide axis of length 6 in chunks of 4"),
    (lambda: Layout({"w": "o i -> o i"}, {"b": (2,)}), r"one pattern and one shape per parameter, got pat"),
    (lambda: Layout({"w": "o i -> o i", "b": "o -> o 1"}, {"w": (2, 3), "b": (3,)}), "same rows, got matrices"),
    (lambda: BlockDiagonal(BLOCKS, {"w": LAYOUTS["w"]}, SPACE), r"one layout per block .* blocks \['w', 'b'\] and lay"),
    (lambda: BlockDiagonal({}, {}, SPACE), "at least one block"),
    (lambda: BlockDiagonal(BLOCKS, LAYOUTS, Space({"w": (2, 2)})), r"parameters Space\(w: .*\) in one layout, got "),
    (lambda: BlockDiagonal(BLOCKS, LAYOUTS, Space({"w": (4, 1), "b": (2,)})), r"parameters Space\(w: \[4, 1\]"),
    (lambda: BlockDiagonal(BLOCKS | {"b": Diagonal(torch.ones(3))}, LAYOUTS, SPACE), r'"b": expected a 2 x 2 matrix f'),
    (lambda: BlockDiagonal(BLOCKS | {"b": Diagonal(normal(2))}, LAYOUTS, SPACE), '"b": .* in torch.float32 on cpu'),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
