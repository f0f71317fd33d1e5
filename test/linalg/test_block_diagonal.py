"""What is special about block-diagonal matrices beyond the laws."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch

from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    RelativeDamping,
    Space,
    Structure,
    Sum,
)
from test.linalg.cases import F64, block_diagonal, eye_like, normal, psd
from test.linalg.test_laws import close


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
    K, M = block_diagonal()
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
    K, _ = block_diagonal()
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
