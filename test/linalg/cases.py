"""Operators that meet every law of `test_laws.py`: a new one is one line in `CASES`.

A maker gets a dtype and returns the operator with the same matrix formed by other means. `without`
lists the closed forms that do not follow from its structure; a law also checks that those of
`FORMS`, and no others, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    LinearOperator,
    Space,
    Structure,
)
from test.helpers import F64, normal

Pair = tuple[LinearOperator, Tensor]
FORMS = (
    "trace",
    "logdet",
    "frobenius_norm",
    "eigenvalues",
    "diagonal",
    "inverse",
    "damped_inverse",
    "power",
    "sample",
)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[torch.dtype], Pair]
    without: tuple[str, ...] = ()


def psd(*shape: int, seed: int = 0) -> Tensor:
    """A well-conditioned positive definite matrix, or a batch of them."""
    M = normal(*shape, seed=seed)
    return M @ M.mT / shape[-1] + 0.5 * torch.eye(shape[-1], dtype=F64)


def symmetric(d: int, seed: int = 0) -> Tensor:
    M = normal(d, d, seed=seed)
    return M + M.T


def orthogonal(d: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=seed))[0]


class OnlyProducts(LinearOperator):
    """An operator as a user writes it, that knows its products and nothing else."""

    def __init__(self, matrix: Tensor, space: Space) -> None:
        super().__init__(space, matrix.dtype, matrix.device, Structure.PSD)
        self.matrix = matrix

    def _matmat(self, X: Tensor) -> Tensor:
        return self.matrix @ X


SHAPES = {
    "conv.weight": (2, 2, 1, 3),
    "conv.bias": (2,),
    "scale": (3,),
    "fc.weight": (3, 2),
    "grouped": (4, 1, 2),
}


def kronecker(factors: tuple[Tensor, Tensor], dtype: torch.dtype) -> Kronecker:
    return Kronecker(factors[0].to(dtype), factors[1].to(dtype))


def block_diagonal(dtype: torch.dtype = F64) -> tuple[BlockDiagonal, Tensor]:
    """Blocks of every kind; parameters of the space are neither in block order nor next to their
    block's others.
    """
    order = ["conv.bias", "grouped", "fc.weight", "scale", "conv.weight"]
    space = Space.from_shapes({name: SHAPES[name] for name in order})
    patterns = {
        "conv": {"conv.weight": "o i h w -> o (i h w)", "conv.bias": "o -> o 1"},
        "scale": {"scale": "d -> 1 d"},
        "fc": {"fc.weight": "i o -> o i"},
        "groups": {"grouped": "(g o) i w -> g o (i w)"},
    }
    layouts = {
        block: Layout(pattern, {name: SHAPES[name] for name in pattern}, {"g": 2})
        for block, pattern in patterns.items()
    }
    Q_G, Q_A, values = orthogonal(2, 1), orthogonal(3, 2), normal(6, seed=3).square() + 0.1
    factors = {
        "conv": (psd(2, 2, seed=4), psd(7, 7, seed=5)),
        "groups": (psd(2, 2, 2, seed=6), psd(2, 2, 2, seed=7)),
    }
    blocks = {
        "conv": kronecker(factors["conv"], dtype),
        "scale": Dense(psd(3, 3, seed=8).to(dtype), Structure.PSD),
        "fc": Eigendecomposed(
            Kronecker(Q_G.to(dtype), Q_A.to(dtype), Structure.GENERAL), values.to(dtype)
        ),
        "groups": kronecker(factors["groups"], dtype),
    }
    Q = torch.kron(Q_G, Q_A)
    dense = {
        "conv": torch.kron(*factors["conv"]),
        "scale": psd(3, 3, seed=8),
        "fc": Q @ torch.diag(values) @ Q.T,
        "groups": torch.block_diag(
            *(torch.kron(G, A) for G, A in zip(*factors["groups"], strict=True))
        ),
    }
    # The parameters of each block, entry by entry, in the order of the block's matrix.
    at = {name: t[..., 0] for name, t in space.unflatten(torch.arange(space.dim)[:, None]).items()}
    rows = {
        "conv": torch.cat(
            [at["conv.weight"].reshape(2, 6), at["conv.bias"][:, None]], dim=1
        ).flatten(),
        "scale": at["scale"],
        "fc": at["fc.weight"].T.flatten(),
        "groups": at["grouped"].flatten(),
    }
    M = torch.zeros(space.dim, space.dim, dtype=F64)
    for name, block in dense.items():
        M[rows[name][:, None], rows[name]] = block
    return BlockDiagonal(blocks, layouts, space), M.to(dtype)


def of(
    build: Callable[..., LinearOperator], dense: Callable[..., Tensor], *tensors: Tensor
) -> Callable[[torch.dtype], Pair]:
    """A maker: `build` makes the operator of tensors in the dtype asked for, `dense` its matrix in
    float64.
    """
    return lambda dtype: (build(*(t.to(dtype) for t in tensors)), dense(*tensors).to(dtype))


def from_case(name: str, operator: Callable, dense: Callable) -> Callable[[torch.dtype], Pair]:
    """A maker that does something with the operator and matrix of an earlier case."""

    def make(dtype: torch.dtype) -> Pair:
        A, M = next(case for case in CASES if case.name == name).make(dtype)
        return operator(A), dense(M.double()).to(dtype)

    return make


def batched_kron(G: Tensor, A: Tensor) -> Tensor:
    G, A = (factor.expand(2, *factor.shape[-2:]) for factor in (G, A))
    return torch.block_diag(*(torch.kron(G_b, A_b) for G_b, A_b in zip(G, A, strict=True)))


def eye_like(M: Tensor) -> Tensor:
    return torch.eye(len(M), dtype=M.dtype)


def identity_on(A: LinearOperator) -> IdentityLinearOperator:
    return IdentityLinearOperator(A.in_space.shapes, A.device, A.dtype)


GENERAL, SYMMETRIC, PSD = Structure.GENERAL, Structure.SYMMETRIC, Structure.PSD
# Some structures need more than products, some have no square root or are not square.
INDEFINITE = ("power", "sample")
NO_EIGENVALUES = ("eigenvalues", *INDEFINITE)
NO_SPECTRUM = tuple(form for form in FORMS if form not in ("trace", "diagonal"))
#: Of an inverse that is solved for.
SOLVED = (
    "logdet_of_inverse",
    "sample",
    "logdet_of_damped_inverse",
    "gradient_of_damped_inverse",
)

CASES = [
    Case("dense", of(lambda M: Dense(M), lambda M: M, normal(4, 4)), NO_EIGENVALUES),
    Case(
        "dense rectangular",
        of(lambda M: Dense(M), lambda M: M, normal(3, 5)),
        tuple(f for f in FORMS if f != "frobenius_norm"),
    ),
    Case(
        "dense symmetric", of(lambda M: Dense(M, SYMMETRIC), lambda M: M, symmetric(4)), INDEFINITE
    ),
    Case("dense psd", of(lambda M: Dense(M, PSD), lambda M: M, psd(5, 5))),
    Case(
        "dense batched", of(lambda M: Dense(M, PSD), lambda M: torch.block_diag(*M), psd(3, 2, 2))
    ),
    Case("diagonal", of(Diagonal, torch.diag, normal(5).abs() + 0.1)),
    Case("diagonal indefinite", of(Diagonal, torch.diag, normal(4)), INDEFINITE),
    Case(
        "diagonal batched",
        of(Diagonal, lambda d: torch.diag(d.flatten()), normal(2, 3).abs() + 0.1),
    ),
    Case(
        "identity",
        lambda dtype: (
            IdentityLinearOperator([(2, 2), (1,)], dtype=dtype),
            torch.eye(5, dtype=dtype),
        ),
    ),
    Case("kronecker", of(Kronecker, torch.kron, psd(3, 3), psd(4, 4, seed=1))),
    Case("kronecker batched", of(Kronecker, batched_kron, psd(2, 3, 3), psd(2, 2, 2, seed=1))),
    Case("kronecker, one batched", of(Kronecker, batched_kron, psd(2, 3, 3), psd(2, 2, seed=1))),
    Case("kronecker, other batched", of(Kronecker, batched_kron, psd(3, 3), psd(2, 2, 2, seed=1))),
    Case(
        "kronecker diagonal",
        of(
            lambda G, a: Kronecker(G, Diagonal(a)),
            lambda G, a: torch.kron(G, torch.diag(a)),
            psd(3, 3),
            normal(4).abs() + 0.1,
        ),
    ),
    Case(
        "kronecker diagonal batched",
        of(
            lambda g, A: Kronecker(Diagonal(g), A),
            lambda g, A: batched_kron(torch.diag_embed(g), A),
            normal(2, 3).abs() + 0.1,
            psd(2, 2),
        ),
    ),
    Case(
        "kronecker identity",
        of(
            lambda A: Kronecker(IdentityLinearOperator([(3,)], dtype=A.dtype), A),
            lambda A: torch.kron(torch.eye(3, dtype=A.dtype), A),
            psd(4, 4),
        ),
    ),
    Case(
        "kronecker indefinite",
        of(lambda G, A: Kronecker(G, A, SYMMETRIC), torch.kron, symmetric(3), symmetric(2, seed=1)),
        INDEFINITE,
    ),
    Case(
        "kronecker general",
        of(lambda G, A: Kronecker(G, A, GENERAL), torch.kron, normal(3, 3), normal(2, 2, seed=1)),
        (*NO_EIGENVALUES, "damped_inverse"),
    ),
    Case(
        "kronecker rectangular",
        of(lambda G, A: Kronecker(G, A, GENERAL), torch.kron, normal(2, 3), normal(4, 2, seed=1)),
        tuple(f for f in FORMS if f != "frobenius_norm"),
    ),
    Case(
        "eigendecomposed",
        of(
            lambda Q_G, Q_A, d: Eigendecomposed(Kronecker(Q_G, Q_A, GENERAL), d),
            lambda Q_G, Q_A, d: torch.kron(Q_G, Q_A) @ torch.diag(d) @ torch.kron(Q_G, Q_A).T,
            orthogonal(2),
            orthogonal(3),
            normal(6).abs() + 0.1,
        ),
    ),
    Case(
        "eigendecomposed indefinite",
        of(
            lambda Q, d: Eigendecomposed(Dense(Q), d, SYMMETRIC),
            lambda Q, d: Q @ torch.diag(d) @ Q.T,
            orthogonal(4),
            normal(4),
        ),
        INDEFINITE,
    ),
    Case("block diagonal", block_diagonal),
    Case(
        "only products",
        lambda dtype: (
            OnlyProducts(psd(6, 6).to(dtype), Space.from_shapes([(2, 2), (2,)])),
            psd(6, 6).to(dtype),
        ),
        FORMS,
    ),
    Case("adjoint", from_case("product", lambda A: A.T, lambda M: M.T), FORMS),
    Case(
        "sum",
        from_case(
            "kronecker",
            lambda A: A + Dense(psd(12, 12, seed=2).to(A.dtype), PSD),
            lambda M: M + psd(12, 12, seed=2),
        ),
        NO_SPECTRUM,
    ),
    Case(
        "sum of dense",
        of(
            lambda M, N: Dense(M, PSD) + 2 * Dense(N, PSD),
            lambda M, N: M + 2 * N,
            psd(5, 5),
            psd(5, 5, seed=3),
        ),
    ),
    Case(
        "sum of diagonal and dense",
        from_case(
            "diagonal", lambda A: A - Dense(psd(5, 5).to(A.dtype), PSD), lambda M: M - psd(5, 5)
        ),
        INDEFINITE,
    ),
    Case(
        "sum of products",
        from_case(
            "kronecker", lambda A: 2 * A + (another(A) + A), lambda M: 3 * M + another_dense()
        ),
        ("eigenvalues", "power", *SOLVED),
    ),
    Case(
        "sum of three products",
        from_case(
            "kronecker",
            lambda A: A + another(A) + kronecker((psd(3, 3, seed=5), psd(4, 4, seed=6)), A.dtype),
            lambda M: M + another_dense() + torch.kron(psd(3, 3, seed=5), psd(4, 4, seed=6)),
        ),
        ("eigenvalues", "power", "logdet", *SOLVED),
    ),
    Case(
        "sum of products, shifted",
        from_case(
            "kronecker",
            lambda A: (A + with_identity(A)).shift(0.3),
            lambda M: M + torch.kron(torch.eye(3), 2 * psd(4, 4, seed=8)) + 0.3 * eye_like(M),
        ),
        ("eigenvalues", "power", *SOLVED),
    ),
    Case(
        "sum of products, batched",
        of(
            lambda G, A, H, B: Kronecker(G, Diagonal(A)) + Kronecker(H, Diagonal(B)),
            lambda G, A, H, B: batched_kron(G, A.diag()) + batched_kron(H, B.diag()),
            *(
                psd(2, 3, 3, seed=k) if k % 2 == 0 else normal(4, seed=k).abs() + 0.1
                for k in range(4)
            ),
        ),
        ("eigenvalues", "power", *SOLVED),
    ),
    Case(
        "sum of products with one factor",
        from_case(
            "kronecker",
            lambda A: A + Kronecker(another(A).G, A.A),
            lambda M: M + one_factor_dense(),
        ),
    ),
    Case(
        "product",
        from_case(
            "kronecker",
            lambda A: A @ Dense(psd(12, 12, seed=2).to(A.dtype), PSD),
            lambda M: M @ psd(12, 12, seed=2),
        ),
        FORMS,
    ),
    Case("scaled", from_case("kronecker", lambda A: 0.5 * A, lambda M: 0.5 * M)),
    Case("negative", from_case("dense psd", lambda A: -A, lambda M: -M), INDEFINITE),
    Case("zero", from_case("dense psd", lambda A: 0 * A, lambda M: 0 * M), ("inverse",)),
    Case(
        "shifted",
        from_case("kronecker", lambda A: A + 0.3 * identity_on(A), lambda M: M + 0.3 * eye_like(M)),
    ),
    Case(
        "shifted dense",
        from_case("dense", lambda A: A.shift(5.0), lambda M: M + 5 * eye_like(M)),
        NO_EIGENVALUES,
    ),
    Case(
        "shifted products",
        from_case("only products", lambda A: A.shift(0.3), lambda M: M + 0.3 * eye_like(M)),
        FORMS,
    ),
    Case(
        "scaled and shifted",
        from_case(
            "block diagonal",
            lambda A: (2 * A).shift(0.1) / 3,
            lambda M: (2 * M + 0.1 * eye_like(M)) / 3,
        ),
    ),
    Case(
        "inverse by factors",
        from_case("kronecker", lambda A: A.inverse(), lambda M: torch.linalg.inv(M)),
    ),
    Case(
        "inverse with damping",
        from_case(
            "kronecker batched",
            lambda A: A.inverse(0.1),
            lambda M: torch.linalg.inv(M + 0.1 * eye_like(M)),
        ),
    ),
    Case(
        "inverse of blocks",
        from_case(
            "block diagonal",
            lambda A: A.inverse(0.2),
            lambda M: torch.linalg.inv(M + 0.2 * eye_like(M)),
        ),
    ),
    Case("square of blocks", from_case("block diagonal", lambda A: A.power(2), lambda M: M @ M)),
    Case(
        "general blocks",
        from_case("block diagonal", lambda A: general_blocks(A), lambda M: general_blocks_dense(M)),
        (*NO_EIGENVALUES, "damped_inverse"),
    ),
]


def another(A: LinearOperator) -> Kronecker:
    return kronecker((psd(3, 3, seed=7), psd(4, 4, seed=8)), A.dtype)


def with_identity(A: LinearOperator) -> Kronecker:
    identity = IdentityLinearOperator([(3,)], dtype=A.dtype)
    return Kronecker(2 * identity, Dense(psd(4, 4, seed=8).to(A.dtype), PSD))


def another_dense() -> Tensor:
    return torch.kron(psd(3, 3, seed=7), psd(4, 4, seed=8))


def one_factor_dense() -> Tensor:
    return torch.kron(psd(3, 3, seed=7), psd(4, 4, seed=1))


def general_blocks(A: LinearOperator) -> BlockDiagonal:
    """One block that is not symmetric and knows only how to be undone."""
    assert isinstance(A, BlockDiagonal)
    general = Kronecker(normal(2, 2).to(A.dtype), normal(7, 7).to(A.dtype), GENERAL)
    return BlockDiagonal(A.blocks | {"conv": general}, A.layouts, A.space)


def general_blocks_dense(M: Tensor) -> Tensor:
    K, _ = block_diagonal()
    M = M.clone()
    rows = K.positions()["conv"]
    M[rows[:, None], rows] = torch.kron(normal(2, 2), normal(7, 7))
    return M
