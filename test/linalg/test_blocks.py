"""Block-diagonal matrices: what is special about them beyond the laws."""

from __future__ import annotations

import pytest
import torch

from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    Space,
    Structure,
)

from .cases import F64, block_diagonal, eye_like, normal, psd
from .test_laws import close


def blocks() -> tuple[BlockDiagonal, torch.Tensor]:
    K, M = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    return K, M


def test_arithmetic_keeps_the_blocks() -> None:
    K, M = blocks()
    eye = IdentityLinearOperator(K.in_space.shapes, dtype=F64)
    for A, D in (
        (2 * K, 2 * M),
        (K / 4, M / 4),
        (-K, -M),
        (K + 0.5 * eye, M + 0.5 * eye_like(M)),
        (eye + K, M + eye_like(M)),
        (K + K / 2, 1.5 * M),
        (sum([K, K.shift(0.1), 2 * K]), 4 * M + 0.1 * eye_like(M)),
        (K - Diagonal(K.diagonal()), M - torch.diag(M.diagonal())),
    ):
        assert isinstance(A, BlockDiagonal)
        close(A.to_dense(), D)
        assert list(A.blocks) == list(K.blocks)
        assert A.in_space.names == K.space.names


def test_order_of_numbers() -> None:
    K, M = blocks()
    close(K.eigenvalues(), torch.cat([block.eigenvalues() for block in K.blocks.values()]))
    close(K.diagonal(), M.diagonal())


def test_answers_have_the_names_of_the_space() -> None:
    K, _ = blocks()
    answer = K @ K.space.unflatten(normal(K.shape[0]))
    assert list(answer) == K.space.names


def test_autograd_through_an_inverse() -> None:
    K, _ = blocks()
    delta = torch.tensor(0.3, dtype=F64, requires_grad=True)
    x = normal(K.shape[0], 2).requires_grad_()
    y = K.inverse(delta) @ x
    y.square().sum().backward()
    inverse = K.inverse(0.3).to_dense()
    assert x.grad is not None
    assert delta.grad is not None
    close(x.grad, 2 * inverse @ inverse @ x.detach())
    close(delta.grad, -2 * torch.trace(x.detach().T @ inverse @ inverse @ inverse @ x.detach()))


def test_result_owns_its_memory() -> None:
    space = Space.from_shapes({"w": (2, 2)})
    K = BlockDiagonal(
        {"b": IdentityLinearOperator([(4,)], dtype=F64)}, {"b": Layout({"w": "o i -> o i"}, space.shapes)}, space
    )
    x = normal(4)
    y = K @ x
    y.zero_()
    assert x.abs().sum() > 0


W, B = {"w": "o i -> o i"}, {"b": "o -> o 1"}
SPACE = Space.from_shapes({"w": (2, 2), "b": (2,)})
LAYOUTS = {"w": Layout(W, {"w": (2, 2)}), "b": Layout(B, {"b": (2,)})}
BLOCKS = {"w": Dense(torch.eye(4), Structure.PSD), "b": Diagonal(torch.ones(2))}
REFUSED = [
    (BLOCKS, {"w": LAYOUTS["w"]}, SPACE, r"one layout per block .* blocks \['w', 'b'\] and layouts \['w'\]"),
    ({}, {}, SPACE, "at least one block"),
    (
        BLOCKS,
        LAYOUTS,
        Space.from_shapes({"w": (2, 2)}),
        r"each of the parameters \['w'\] in one layout, got \['w', 'b'\]",
    ),
    (
        BLOCKS,
        LAYOUTS,
        Space.from_shapes({"w": (4, 1), "b": (2,)}),
        r'block "w": expected parameter "w" of shape \[4, 1\], got \[2, 2\]',
    ),
    (
        BLOCKS | {"b": Diagonal(torch.ones(3))},
        LAYOUTS,
        SPACE,
        r'block "b": expected a 2 x 2 matrix for Layout.*got Diagonal\(3 x 3',
    ),
    (BLOCKS | {"b": Diagonal(torch.ones(2, dtype=F64))}, LAYOUTS, SPACE, 'block "b": expected torch.float32 on cpu'),
]


@pytest.mark.parametrize(("blocks", "layouts", "space", "message"), REFUSED)
def test_refused(blocks: dict, layouts: dict, space: Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockDiagonal(blocks, layouts, space)


def test_columns_may_lie_in_memory_either_way() -> None:
    K, M = blocks()
    X = normal(K.shape[0], 5)
    close(K @ X, M @ X)
    close(K @ X.T.contiguous().T, M @ X)
    close(K @ X[:, ::2], M @ X[:, ::2])
    close(K @ (K @ X), M @ M @ X)


def test_a_wide_layer() -> None:
    """Big enough for every fast path of the BLAS underneath."""
    space = Space.from_shapes({"w": (40, 70), "b": (40,)})
    layout = Layout({"w": "o i -> o i", "b": "o -> o 1"}, space.shapes)
    G, A = psd(40, 40), psd(71, 71)
    K = BlockDiagonal({"l": Kronecker(G, A)}, {"l": layout}, space)
    X = normal(space.dim, 3)
    joint = torch.cat([X[:2800].view(40, 70, 3), X[2800:].view(40, 1, 3)], 1)
    Y = torch.stack([G @ joint[:, :, k] @ A for k in range(3)], -1)
    close(K @ X, torch.cat([Y[:, :-1].reshape(-1, 3), Y[:, -1]]))


# -------------------------------------------------------------------------------------------------------- split, merge
@pytest.mark.parametrize("columns", [None, 3])
def test_split_gives_what_blocks_multiply(columns: int | None) -> None:
    K, dense = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    v = normal(K.shape[1]) if columns is None else normal(K.shape[1], columns)
    parts = K.split(v)
    assert list(parts) == list(K.blocks)
    assert torch.equal(K.merge(parts), v)
    close(K.merge({name: block @ parts[name] for name, block in K.blocks.items()}), dense @ v)


def test_merge_refuses_what_is_not_split() -> None:
    K, _ = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    parts = K.split(normal(K.shape[1]))
    name = next(iter(parts))
    with pytest.raises(ValueError, match="Expected a part for each of the blocks"):
        K.merge({name: parts[name]})
    with pytest.raises(ValueError, match=rf'block "{name}": expected \[{len(parts[name])}\] or'):
        K.merge(parts | {name: parts[name][:-1]})
