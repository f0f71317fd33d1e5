"""Block-diagonal matrices: what is special about them beyond the laws."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, SingularMatrixError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    IdentityLinearOperator,
    Kronecker,
    KroneckerSum,
    Layout,
    Space,
    Structure,
    Sum,
)
from curvlinops_plus.linalg.block_diagonal import multiply_parts

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


def test_some_parts_are_multiplied_by_themselves() -> None:
    K, dense = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    v = normal(K.shape[1])
    parts, expected = K.split(v), K.split(dense @ v)
    left_out = next(iter(parts))
    found = multiply_parts(K, {name: part for name, part in parts.items() if name != left_out})
    assert found.keys() == parts.keys() - {left_out}
    for name, product in found.items():
        close(product, expected[name])


def test_merge_refuses_what_is_not_split() -> None:
    K, _ = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    parts = K.split(normal(K.shape[1]))
    name = next(iter(parts))
    with pytest.raises(ValueError, match="Expected a part for each of the blocks"):
        K.merge({name: parts[name]})
    with pytest.raises(ValueError, match=rf'block "{name}": expected \[{len(parts[name])}\] or'):
        K.merge(parts | {name: parts[name][:-1]})


# Sums and states -----------------------------------------------------------------------------------------------------


def test_states_of_block_diagonal_matrices() -> None:
    K, _ = blocks()
    other = K._with({**K.blocks, "conv": Kronecker(psd(2, 2, seed=8), psd(7, 7, seed=9))})
    total = K + other
    for A in (K, 2 * K, K.shift(0.1), total, total.shift(0.1), total.nearest_kronecker(), K.inverse(), K.inverse(0.1)):
        state = A.state_dict()
        torch.save(state, file := BytesIO())
        file.seek(0)
        B = BlockDiagonal.from_state_dict(torch.load(file, weights_only=True))
        close(B.to_dense(), A.to_dense())
        assert B.structure == A.structure
        close(B.trace, A.trace)
        assert list(B.blocks) == list(A.blocks)
        assert B.space == A.space
    with pytest.raises(ValueError, match="not the state of a BlockDiagonal"):
        BlockDiagonal.from_state_dict({"blocks": {}})
    with pytest.raises(ValueError, match=r"lacks \['layouts'\]; is the file cut off"):
        BlockDiagonal.from_state_dict({key: value for key, value in state.items() if key != "layouts"})


def test_nearest_kronecker_of_blocks() -> None:
    K, _ = blocks()
    conv = K.blocks["conv"]
    assert isinstance(conv, Kronecker)
    twice = K + K._with({**K.blocks, "conv": Kronecker(2 * conv.G.to_dense(), 2 * conv.A.to_dense())})
    assert isinstance(twice.blocks["conv"], KroneckerSum)
    near = twice.nearest_kronecker()
    close(near.to_dense(), twice.to_dense())  # all terms are multiples of one
    assert isinstance(near.blocks["conv"], Kronecker)
    assert isinstance(near.blocks["groups"], Kronecker)


@pytest.mark.parametrize("shape", [((3, 3), (4, 4)), ((2, 3, 3), (2, 2, 2)), ((3,), (4, 4)), ((3,), (4,))])
def test_singular_sums_of_two_products(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Each term is singular, and their sum may be: then there is no inverse, and the determinant is zero."""

    def factor(size: tuple[int, ...], seed: int, keep: slice) -> Tensor:
        if len(size) == 1 or (len(size) == 2 and size[0] != size[1]):
            d = torch.zeros(size, dtype=F64)
            d[..., keep] = 1.0
            return d
        Q = normal(*size, seed=seed)[..., keep]
        return Q @ Q.mT

    def product(keep_G: slice, keep_A: slice, seed: int) -> Kronecker:
        G, A = factor(shape[0], seed, keep_G), factor(shape[1], seed + 1, keep_A)
        return Kronecker(*(Diagonal(F) if F.ndim == 1 else F for F in (G, A)))

    head, tail, every = slice(0, 1), slice(1, None), slice(None)
    regular = product(every, head, 1) + product(every, tail, 5)
    M = regular.to_dense()
    close(regular.inverse().to_dense() @ M, eye_like(M))
    close(regular.logdet, torch.logdet(M))
    singular = product(head, head, 1) + product(tail, tail, 5)
    assert singular.logdet == -torch.inf
    with pytest.raises(SingularMatrixError, match=r"KroneckerSum.*singular: its terms share a null space of dim"):
        singular.inverse()
    M = singular.to_dense()
    close(singular.inverse(0.1).to_dense() @ (M + 0.1 * eye_like(M)), eye_like(M))
    root = singular._root_matmat(eye_like(M))
    close(root @ root.T, M)


def test_messages_of_sums_of_products() -> None:
    with pytest.raises(ValueError, match=r"factors \[\[2, 2\], \[3, 3\]\] and \[\[3, 3\], \[2, 2\]\]"):
        KroneckerSum([Kronecker(psd(2, 2), psd(3, 3)), Kronecker(psd(3, 3), psd(2, 2))])
    with pytest.raises(ValueError, match="Expected one dtype and device, got Kronecker"):
        KroneckerSum([Kronecker(psd(2, 2), psd(3, 3)), Kronecker(psd(2, 2).float(), psd(3, 3).float())])
    indefinite = Kronecker(psd(2, 2), psd(3, 3)) - Kronecker(psd(2, 2, seed=1), psd(3, 3, seed=2))
    assert indefinite.structure == Structure.SYMMETRIC
    with pytest.raises(NoClosedForm, match=r"KroneckerSum.*no `nearest_kronecker`, because a term is not"):
        indefinite.nearest_kronecker()
    assert isinstance(Kronecker(psd(2, 2), psd(3, 3)) + Kronecker(psd(3, 3), psd(2, 2)), Sum)
