"""Matrices that hold their entries, and products of them: live tensors, zero eigenvalues, dampings,
messages.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import (
    CurvatureWarning,
    NoClosedForm,
    NumericsError,
    SingularMatrixError,
)
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    HeuristicDamping,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    LinearOperator,
    RelativeDamping,
    Space,
    Structure,
    heuristic_damping,
)
from test.linalg.cases import F64, batched_kron, block_diagonal, eye_like, normal, orthogonal, psd
from test.linalg.test_laws import close

PSD, GENERAL = Structure.PSD, Structure.GENERAL


# Remembered decompositions
# ---------------------------------------------------------------------------------------


def test_decompositions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until entries change, and never with a graph."""
    M, calls, eigh = psd(4, 4), [], torch.linalg.eigh
    A = Dense(M, PSD)
    monkeypatch.setattr(torch.linalg, "eigh", lambda X: calls.append(1) or eigh(X))
    for _ in range(3):
        _ = A.logdet, A.eigenvalues(), A.shift(0.1).logdet, A.power(-0.5), A.sample()
    close((2 * A).eigenvalues(), 2 * A.eigenvalues())
    assert len(calls) == 1
    M.add_(torch.eye(4, dtype=F64))
    A.eigenvalues()
    assert len(calls) == 2
    A = Dense(M.requires_grad_(), PSD)
    for _ in range(2):  # a remembered graph could not be used twice
        (grad,) = torch.autograd.grad(A.logdet, M)
        close((grad + grad.T) / 2, torch.linalg.inv(M).detach())


# Zero eigenvalues
# --------------------------------------------------------------------------------------------------


def low_rank(d: int, rank: int, dtype: torch.dtype = F64) -> Tensor:
    rows = normal(rank, d).to(dtype)
    return rows.T @ rows


def singular_operators(dtype: torch.dtype) -> dict[str, LinearOperator]:
    M = low_rank(5, 2, dtype)
    Q = Kronecker(orthogonal(2).to(dtype), orthogonal(2, 1).to(dtype), GENERAL)
    return {
        "dense": Dense(M, PSD),
        "diagonal": Diagonal(torch.tensor([1.0, 0.0], dtype=dtype)),
        "kronecker G": Kronecker(M, psd(2, 2).to(dtype)),
        "kronecker both": Kronecker(M, M),
        "eigendecomposed": Eigendecomposed(Q, torch.tensor([1.0, 1e-20, -1e-20, 2.0], dtype=dtype)),
        "eigendecomposed, positive": Eigendecomposed(
            Q, torch.tensor([1.0, 1e-20, 1e-20, 2.0], dtype=dtype)
        ),
        "zero": Dense(0 * M, PSD),
        "scaled": 3 * Dense(M, PSD),
    }


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", singular_operators(F64))
def test_singular_matrices(name: str, dtype: torch.dtype) -> None:
    A = singular_operators(dtype)[name]
    M = A.to_dense()
    assert (A.logdet.item(), A.det.item()) == (-inf, 0)
    assert bool((A.eigenvalues() >= 0).all())
    message = r"singular: \d+ of its \d+ eigenvalues count as zero.*RelativeDamping"
    for function in (
        lambda: A.inverse(),
        lambda: A.inverse(torch.tensor(0.0)),
        lambda: A.power(-0.5),
    ):
        with pytest.raises(SingularMatrixError, match=message):
            function()
    root = A.power(0.5).to_dense()
    torch.testing.assert_close(
        root @ root, M, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-9
    )
    inverse = A.inverse(0.1)
    assert torch.isfinite(inverse.logdet)
    torch.testing.assert_close(inverse.logdet, -A.shift(0.1).logdet, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(A.sample(torch.Generator().manual_seed(0), 3)).all()


def test_which_eigenvalues_are_zero() -> None:
    """A tolerance decides; small exact values are no zeros."""
    M = torch.diag(torch.tensor([1.0, 1e-9]))
    assert Dense(M, PSD).logdet == -inf
    assert torch.isfinite(Dense(M, PSD, rtol=0.0).logdet)
    values, of_twelve = torch.tensor([1.0, 1e-3]), torch.tensor([1.0] * 11 + [1e-6])
    assert torch.isfinite(Eigendecomposed(Dense(torch.eye(2)), values).logdet)
    assert Eigendecomposed(Dense(torch.eye(2)), values, rtol=1e-2).logdet == -inf
    # Of a Kronecker basis the size of its largest factor counts: 4 eps is below 1e-6, and 12 eps
    # above it.
    assert torch.isfinite(Eigendecomposed(Kronecker(torch.eye(3), torch.eye(4)), of_twelve).logdet)
    for A in (
        Dense(torch.diag(values.floor()), PSD),
        Kronecker(torch.diag(values.floor()), torch.eye(1)),
    ):
        inverse = A.inverse(1e-10)  # whose eigenvalues are 1 and 1e10
        torch.testing.assert_close(inverse.logdet, torch.tensor(1e10).log(), rtol=1e-4, atol=0)
        assert bool((inverse.inverse(1e-3).eigenvalues() > 0).all())


def test_other_determinants() -> None:
    """A batch with one singular matrix; negative ones; multiples of an inverse."""
    M = torch.stack([torch.eye(40), torch.zeros(40, 40)])
    assert Dense(M, PSD).slogdets()[1].tolist() == [0.0, -inf]
    inverse = Dense(torch.diag(torch.tensor([1.0, 0.0])), PSD).inverse(1e-10)
    torch.testing.assert_close((inverse / 2).logdet, inverse.logdet - 2 * torch.tensor(2.0).log())
    D = Diagonal(torch.tensor([2.0, -1.0]))
    assert D.det == -2
    assert D.logdet.isnan()
    assert Kronecker(D, Diagonal(torch.tensor([1.0, 3.0]))).det.item() == pytest.approx(36.0)


# Dampings
# --------------------------------------------------------------------------------------------------


def blocks() -> BlockDiagonal:
    K, _ = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    return K


def test_pair_belongs_to_the_factors() -> None:
    """Also of a multiple: `c G ⊗ A` is the product of `c G` and `A`."""
    G, A = psd(2, 2), psd(3, 3, seed=1)
    inverse = Kronecker(G, A).inverse((0.1, torch.tensor(0.2, dtype=F64)))
    expected = torch.kron(
        torch.linalg.inv(G + 0.2 * eye_like(G)), torch.linalg.inv(A + 0.1 * eye_like(A))
    )
    assert isinstance(inverse, Kronecker)
    close(inverse.to_dense(), expected)
    close(inverse.logdet, torch.logdet(expected))
    rule = Kronecker(G, A).inverse((RelativeDamping(0.5), 0.0))
    close(rule.to_dense(), torch.linalg.inv(torch.kron(G, A + 0.5 * A.trace() / 3 * eye_like(A))))
    for damping in ((0.1, 0.3), HeuristicDamping(0.1)):
        expected = Kronecker(2.5 * G, A).inverse(damping).to_dense()
        close((2.5 * Kronecker(G, A)).inverse(damping).to_dense(), expected)


@pytest.mark.parametrize("kind", [Dense, Diagonal, Kronecker])
def test_a_batch_takes_one_damping_for_each_matrix(kind: Any) -> None:
    M = torch.stack([psd(3, 3, seed=k) for k in range(2)])
    A = {
        Dense: Dense(M, PSD),
        Diagonal: Diagonal(M.diagonal(dim1=1, dim2=2)),
        Kronecker: Kronecker(EYE.to(F64), M),
    }[kind]
    dampings = torch.tensor([0.1, 2.0], dtype=F64)
    expected = torch.linalg.inv(
        A.to_dense() + torch.diag(dampings.repeat_interleave(A.shape[0] // 2))
    )
    close(A.inverse(dampings).to_dense(), expected)
    close(A.inverse(dampings).logdet, torch.logdet(expected))
    with pytest.raises(ValueError, match="to be at least 0, got -1"):
        A.inverse(torch.tensor([0.1, -1.0]))
    with pytest.raises(ValueError, match="to be at least 0, got nan"):
        A.inverse(torch.tensor([0.1, torch.nan]))


def test_heuristic_split() -> None:
    """Martens and Grosse, section 6.3, by hand; of a dead factor there is nothing to split."""
    G, A = psd(2, 2), 7 * psd(3, 3, seed=1)
    pi = sqrt((A.trace() / 3) / (G.trace() / 2))
    split = heuristic_damping(A, G, 1e-2)
    close(torch.stack(split), torch.tensor([pi * 0.1, 0.1 / pi], dtype=F64))
    K = Kronecker(G, A)
    close(K.inverse(HeuristicDamping(1e-2)).to_dense(), K.inverse(split).to_dense())
    differentiable = torch.tensor(1e-2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: K.inverse(HeuristicDamping(d)).trace, differentiable)
    floor = heuristic_damping(torch.eye(2), 1e-12 * torch.eye(2), 1e-12, min_damping=1e-4)
    assert [d.item() for d in floor] == pytest.approx([1.0, 1e-4])
    for dead in ((0 * A, G), (A, 0 * G)):
        assert [d.item() for d in heuristic_damping(*dead, 0.3)] == [0.3, 0.3]


def test_heuristic_split_of_each_group() -> None:
    G, A = psd(2, 2, 2), psd(2, 3, 3, seed=1)
    G[1] *= 0
    split = heuristic_damping(A, G, 0.04)
    for k in range(2):
        close(torch.stack(split)[:, k], torch.stack(heuristic_damping(A[k], G[k], 0.04)))
    inverse = Kronecker(G, A).inverse(HeuristicDamping(0.04))
    one = [
        torch.linalg.inv(F + d[:, None, None] * torch.eye(F.shape[-1]))
        for F, d in zip((A, G), split, strict=True)
    ]
    close(inverse.to_dense(), batched_kron(one[1], one[0]))
    for other in (psd(2, 2), IdentityLinearOperator([(2,)], dtype=F64)):
        assert torch.isfinite(Kronecker(other, A).inverse(HeuristicDamping(0.04)).logdet)


@pytest.mark.parametrize("number", [0.1, np.float64(0.1), torch.tensor(0.1), RelativeDamping(0.1)])
def test_kinds_of_numbers(number: Any) -> None:
    """A matrix without factors takes what would be split whole."""
    A = Dense(psd(3, 3), PSD)
    size = 0.1 * A.trace / 3 if isinstance(number, RelativeDamping) else 0.1
    D = A.matrix + size * eye_like(A.matrix)
    torch.testing.assert_close(A.inverse(number).to_dense(), torch.linalg.inv(D))
    torch.testing.assert_close(A.inverse(HeuristicDamping(number)).to_dense(), torch.linalg.inv(D))
    torch.testing.assert_close(A.power(2, number).to_dense(), D @ D)
    torch.testing.assert_close(A.shift(number).to_dense(), D)


MEANS = [float(block.trace / block.shape[0]) for block in blocks().blocks.values()]
PER_BLOCK: list[tuple[Any, list[float]]] = [
    (0.3, [0.3] * 4),
    (torch.tensor([0.1, 0.2, 0.3, 0.4]), [0.1, 0.2, 0.3, 0.4]),
    ({"fc": 0.3, "conv": 0.1, "scale": 0.2, "groups": torch.tensor(0.4)}, [0.1, 0.2, 0.3, 0.4]),
    (RelativeDamping(0.1), [0.1 * mean for mean in MEANS]),
    (lambda block: 1 / block.shape[0], [1 / block.shape[0] for block in blocks().blocks.values()]),
]


@pytest.mark.parametrize(("damping", "numbers"), PER_BLOCK)
def test_one_damping_per_block(damping: Any, numbers: list[float]) -> None:
    K = blocks()
    for result, function in (
        (K.inverse(damping), lambda block, d: block.inverse(d)),
        (K.power(-0.5, damping), lambda block, d: block.power(-0.5, d)),
        (K.shift(damping), lambda block, d: block.shift(d)),
    ):
        for (name, block), d in zip(K.blocks.items(), numbers, strict=True):
            torch.testing.assert_close(
                result.blocks[name].to_dense(), function(block, d).to_dense()
            )


def test_derivatives_in_dampings() -> None:
    """One prior precision per block; a damping of zero; through an inverse."""
    K = blocks()
    delta, x = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64, requires_grad=True), normal(K.shape[0])
    for function in (
        lambda d: K.shift(d).logdet,
        lambda d: K.shift(d).trace,
        lambda d: x @ (K.inverse(d) @ x),
    ):
        assert torch.autograd.gradcheck(function, delta)
    zero, A = torch.tensor(0.0, dtype=F64, requires_grad=True), Kronecker(psd(2, 2), psd(3, 3))
    close(torch.autograd.grad(A.inverse(zero).trace, zero)[0], -A.power(-2).trace)


def test_float32_cholesky_that_fails_is_repeated_in_float64() -> None:
    A = Dense(torch.tensor([[1.0, 1.0], [1.0, 1.0]]) + 1e-9 * torch.eye(2), PSD)
    K = BlockDiagonal({"b": A}, {"b": Layout({"w": "d -> 1 d"}, {"w": (2,)})}, Space({"w": (2,)}))
    for B in (A, K):
        with pytest.warns(
            CurvatureWarning, match="with damping 1.0e-09 failed in float32; retrying in float64"
        ):
            inverse = B.inverse(1e-9)
        assert inverse.dtype == torch.float32
        assert inverse.to_dense()[0, 0].item() == pytest.approx(5e8, rel=1e-3)
        with pytest.raises(
            SingularMatrixError,
            match=r"definite in torch.float32; a damping of .* would do, or pass re",
        ):
            B.inverse(1e-9, retry_double_precision=False)


@pytest.mark.parametrize("p", [-1.0, -0.5, 0.5])
def test_power_of_factors(p: float) -> None:
    """kfac_jax's factored damping: normalised factors, each with an equal share."""
    G, A, damping = psd(2, 2), 7 * psd(3, 3, seed=1), 0.3
    c = ((A.trace() / 3) * (G.trace() / 2)).sqrt()
    parts = [c * (F / (F.trace() / len(F)) + damping**0.5 / c * eye_like(F)) for F in (G, A)]
    values, Q = torch.linalg.eigh(torch.kron(*parts))
    power = Kronecker(G, A).power(p, damping, exact=False)
    assert isinstance(power, Kronecker)
    close(power.to_dense(), (Q * values**p) @ Q.T)
    batch = Kronecker(torch.stack([G, 2 * G]), A).power(p, damping, exact=False)
    each = [Kronecker(g, A).power(p, damping, exact=False).to_dense() for g in (G, 2 * G)]
    close(batch.to_dense(), torch.block_diag(*each))


def test_power_of_factors_is_exact() -> None:
    """Where one factor is a number or zero, without damping, and of other matrices."""
    G, A, one = psd(2, 2), psd(3, 3, seed=1), psd(1, 1)
    for K, damping in (
        (Kronecker(one, A), 0.3),
        (Kronecker(G, one), 0.3),
        (Kronecker(0 * G, A), 0.3),
        (Kronecker(G, A), 0.0),
        (Diagonal(A.diagonal().clone()), 0.3),
        (Dense(A, PSD), 0.3),
    ):
        close(K.power(-0.5, damping, exact=False).to_dense(), K.power(-0.5, damping).to_dense())


# Spaces
# --------------------------------------------------------------------------------------------------

NAMED = Space.from_shapes({"w": (2, 1), "b": (2,)})


def test_a_dense_matrix_keeps_its_spaces() -> None:
    M = psd(4, 4)
    A, tree = Dense(M, PSD, in_space=NAMED), {"w": normal(2, 1), "b": normal(2)}
    for B, expected in (
        (A, M),
        (A.inverse(0.3), torch.linalg.inv(M + 0.3 * eye_like(M))),
        (A.power(2), M @ M),
        (A.shift(0.3), M + 0.3 * eye_like(M)),
        (2 * A, 2 * M),
        (A.to(dtype=torch.float32).to(dtype=F64), M.float().double()),
        (Dense(M + torch.triu(M), in_space=NAMED).shift(1.0), M + torch.triu(M) + eye_like(M)),
    ):
        assert B.in_space == B.out_space == NAMED
        answer = B @ tree
        assert list(answer) == ["w", "b"]
        close(NAMED.flatten(answer), expected @ NAMED.flatten(tree))
    A = Dense(normal(3, 4), in_space=NAMED, out_space=Space.from_shapes({"y": (3, 1)}))
    assert (A @ tree)["y"].shape == (3, 1)
    assert (A.T.in_space.names, A.T.out_space) == (["y"], NAMED)
    inverse = Dense(
        M + torch.triu(M), in_space=NAMED, out_space=Space.from_shapes({"y": (4,)})
    ).inverse()
    assert (inverse.in_space.names, inverse.out_space.names) == (["y"], ["w", "b"])
    batched = Dense(psd(2, 2, 2), PSD, rtol=0.0).materialize()
    assert (batched.batch, batched.rtol) == ((), 0.0)


# Messages
# --------------------------------------------------------------------------------------------------

EYE, K12, NAN3 = (
    Dense(torch.eye(2), PSD),
    Kronecker(torch.eye(3), torch.eye(4)),
    torch.full((3, 3), torch.nan),
)


def with_scale(M: Tensor) -> BlockDiagonal:
    return BlockDiagonal(
        blocks().blocks | {"scale": Dense(M.to(F64), PSD)}, blocks().layouts, blocks().space
    )


MESSAGES: list[tuple[Any, type[Exception], str]] = [
    (lambda: Dense(torch.zeros(2, 3), PSD), ValueError, r"expected a PSD matrix to be square, got \[2, 3\]"),
    (lambda: Dense(torch.zeros(3)), ValueError, r"expected a real tensor with 2 axes, or 3 for a batch; got .*\[3\]"),
    (lambda: Dense(normal(3, 5), in_space=NAMED), ValueError, r"spaces of 3 rows and 5 columns, got .*w: \[2, 1\]"),
    (lambda: Diagonal(torch.zeros(2, dtype=torch.int64)), ValueError, "Diagonal: expected a real .* torch.int64"),
    (lambda: Dense(torch.zeros(2, 3)).trace, ValueError, "Only a square matrix has a trace"),
    (lambda: Dense(torch.eye(2)).eigenvalues(), NoClosedForm, "closed form of `eigenvalues`: .* A.to_dense.*eigsh"),
    (lambda: Dense(torch.eye(2)).power(0.5), ValueError, "Expected a positive semi-definite matrix, got .*real powers"),
    (lambda: Dense(torch.eye(2)).sample(), ValueError, "only those are covariances"),
    (lambda: Kronecker(torch.zeros(2, 2, 2), torch.zeros(3, 2, 2)), ValueError, "batches, got G with 2 and A with 3"),
    (lambda: Kronecker(NAN3, torch.eye(2)).logdet, NumericsError, "NaN or infinite"),
    (lambda: Kronecker(torch.eye(2), torch.eye(2), GENERAL).inverse(0.1), NoClosedForm, "Kronecker.*form of `inverse`"),
    (lambda: Eigendecomposed(EYE, torch.ones(3)), ValueError, r"values \[n\], got \[2, 2\] and \[3\]"),
    (lambda: Dense(torch.zeros(2, 2), Structure.SYMMETRIC).inverse(), SingularMatrixError, "singular or not finite"),
    (lambda: (0 * IdentityLinearOperator([(2,)])).inverse(), SingularMatrixError, "is singular: 1 of its 1"),
    (lambda: K12.inverse(HeuristicDamping((0.1, 0.1))), TypeError, "to be one number.* got tuple"),
    (lambda: K12.power(0.5, HeuristicDamping(0.1)), TypeError, r"to be one number.* Pairs of dampings"),
    (lambda: K12.inverse(-0.1), ValueError, "semi-definite matrix to be at least 0, got -0.1"),
    (lambda: K12.inverse((0.1, -0.1)), ValueError, "damping .* to be at least 0, got -0.1"),
    (lambda: K12.inverse("large"), TypeError, "one number, a 0-d tensor or a rule; got str 'large'"),
    (lambda: K12.shift([1.0]), TypeError, "the shift of a Kronecker to be one number"),
    (lambda: EYE.shift(-0.5).inverse(), ValueError, "semi-definite matrix to be at least 0, got -0.5"),
    (lambda: blocks().inverse(torch.ones(3)), ValueError, r"one per block, \[4\], got a damping of shape \[3\]"),
    (lambda: blocks().inverse({"fc": 1.0, "f": 2.0}), ValueError, r"each of the blocks .* got some for \['fc', 'f'\]"),
    (lambda: blocks().inverse((0.1, 0.1)), TypeError, 'block "scale": .* got tuple'),
    (lambda: with_scale(torch.zeros(3, 3)).inverse(), SingularMatrixError, r'block "scale": Dense.* singular: 3 of'),
    (lambda: with_scale(NAN3).logdet, NumericsError, r'block "scale": the matrix .* 9 entries that are NaN'),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "message"), MESSAGES)
def test_messages(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function()
