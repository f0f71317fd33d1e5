"""Dampings: numbers, pairs, rules, one per block; and how a heuristic splits them."""

from __future__ import annotations

from math import sqrt
from typing import Any, cast

import pytest
import torch

from curvlinops_plus.errors import CurvatureWarning, NoClosedForm, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    HeuristicDamping,
    IdentityLinearOperator,
    Kronecker,
    LinearOperator,
    RelativeDamping,
    Structure,
    heuristic_damping,
)

from .cases import F64, batched_kron, block_diagonal, eye_like, normal, psd
from .test_laws import close

PSD = Structure.PSD


def blocks() -> BlockDiagonal:
    K, _ = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    return K


@pytest.mark.parametrize("kind", [Dense, Diagonal])
def test_a_batch_takes_one_damping_for_each_matrix(kind: Any) -> None:
    M = torch.stack([psd(3, 3, seed=k) for k in range(2)])
    A = Dense(M, PSD) if kind is Dense else Diagonal(M.diagonal(dim1=1, dim2=2))
    dampings = torch.tensor([0.1, 2.0], dtype=F64)
    wholes = [
        torch.linalg.inv(A.to_dense()[at, at] + d * torch.eye(3, dtype=F64))
        for at, d in zip((slice(0, 3), slice(3, 6)), dampings)
    ]
    inverse, expected = A.inverse(dampings), torch.block_diag(*wholes)
    close(inverse.to_dense(), expected)
    close(inverse.logdet, torch.logdet(expected))
    close(A.inverse(dampings.float()).to_dense(), A.inverse(dampings.float().double()).to_dense())
    with pytest.raises(ValueError, match="to be at least 0, got -1"):
        A.inverse(torch.tensor([0.1, -1.0]))
    with pytest.raises(ValueError, match="to be a number, got nan"):
        A.inverse(torch.tensor([0.1, torch.nan]))
    with pytest.raises(TypeError, match=r"got a tensor of shape \[3\]"):
        A.inverse(torch.ones(3))


def test_heuristic_split() -> None:
    """Martens and Grosse, section 6.3, by hand."""
    G, A = psd(2, 2), 7 * psd(3, 3, seed=1)
    pi = sqrt((A.trace() / 3) / (G.trace() / 2))
    split = heuristic_damping(A, G, 1e-2)
    close(split[0], torch.tensor(pi * 0.1, dtype=F64))
    close(split[1], torch.tensor(0.1 / pi, dtype=F64))
    K = Kronecker(G, A)
    close(K.inverse(HeuristicDamping(1e-2)).to_dense(), K.inverse(split).to_dense())
    differentiable = torch.tensor(1e-2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: K.inverse(HeuristicDamping(d)).trace, differentiable)


def test_heuristic_split_has_a_floor() -> None:
    A, G = torch.eye(2), 1e-12 * torch.eye(2)
    split = heuristic_damping(A, G, 1e-12, min_damping=1e-4)
    assert split[0].item() == pytest.approx(1.0)
    assert split[1].item() == pytest.approx(1e-4)
    inverse = Kronecker(G, A).inverse(HeuristicDamping(1e-12, min=1e-4))
    assert isinstance(inverse, Kronecker)
    assert inverse.G.diagonal()[0].item() == pytest.approx(1e4, rel=1e-4)


@pytest.mark.parametrize("dead", ["G", "A"])
def test_heuristic_split_of_a_dead_factor(dead: str) -> None:
    factors = {"G": psd(2, 2), "A": psd(3, 3)}
    factors[dead] = 0 * factors[dead]
    split = heuristic_damping(factors["A"], factors["G"], 0.3)
    assert [d.item() for d in split] == [0.3, 0.3]


def test_heuristic_split_of_each_group() -> None:
    G, A = psd(2, 2, 2), psd(2, 3, 3, seed=1)
    G[1] *= 0
    split = heuristic_damping(A, G, 0.04)
    for k in range(2):
        for part, alone in zip(split, heuristic_damping(A[k], G[k], 0.04), strict=True):
            close(part[k], alone)
    inverse = Kronecker(G, A).inverse(HeuristicDamping(0.04))
    one = [torch.linalg.inv(F + d[:, None, None] * torch.eye(F.shape[-1])) for F, d in zip((A, G), split, strict=True)]
    close(inverse.to_dense(), batched_kron(one[1], one[0]))
    shared = Kronecker(psd(2, 2), A).inverse(HeuristicDamping(0.04))
    assert shared.shape == (12, 12)
    token_counts = Kronecker(psd(2, 2), Diagonal(normal(2, 3).abs()))
    assert token_counts.inverse(HeuristicDamping(0.04)).shape == (12, 12)
    with_identity = Kronecker(IdentityLinearOperator([(2,)], dtype=F64), A)
    assert torch.isfinite(with_identity.inverse(HeuristicDamping(0.04)).logdet)


EIGENDECOMPOSED = Eigendecomposed(Dense(torch.eye(3, dtype=F64)), torch.ones(3, dtype=F64))
WITHOUT_FACTORS = {
    "dense": Dense(psd(3, 3), PSD),
    "diagonal": Diagonal(torch.ones(3, dtype=F64)),
    "eigendecomposed": EIGENDECOMPOSED,
    "shifted": Kronecker(psd(2, 2), psd(3, 3)).shift(1.0),
}


@pytest.mark.parametrize("A", WITHOUT_FACTORS.values(), ids=WITHOUT_FACTORS)
def test_a_matrix_without_factors_takes_the_damping_whole(A: LinearOperator) -> None:
    close(A.inverse(HeuristicDamping(0.1)).to_dense(), A.inverse(0.1).to_dense())


def each_kind_of_damping(K: BlockDiagonal) -> list[tuple[Any, list[float]]]:
    means = [float(block.trace / block.shape[0]) for block in K.blocks.values()]
    return [
        (0.3, [0.3] * 4),
        (torch.tensor(0.3), [0.3] * 4),
        (torch.tensor([0.1, 0.2, 0.3, 0.4]), [0.1, 0.2, 0.3, 0.4]),
        ({"fc": 0.3, "conv": 0.1, "scale": 0.2, "groups": torch.tensor(0.4)}, [0.1, 0.2, 0.3, 0.4]),
        (RelativeDamping(0.1), [0.1 * mean for mean in means]),
        (dict(zip(K.blocks, [RelativeDamping(0.1), 0.2, 0.3, 0.4], strict=True)), [0.1 * means[0], 0.2, 0.3, 0.4]),
        (lambda block: 1 / block.shape[0], [1 / block.shape[0] for block in K.blocks.values()]),
    ]


@pytest.mark.parametrize("kind", range(7))
def test_one_damping_per_block(kind: int) -> None:
    K = blocks()
    damping, numbers = each_kind_of_damping(K)[kind]
    alone = dict(zip(K.blocks, numbers, strict=True))
    results = {
        "inverse": (K.inverse(damping), lambda block, d: block.inverse(d)),
        "power": (K.power(-0.5, damping), lambda block, d: block.power(-0.5, d)),
        "shift": (K.shift(damping), lambda block, d: block.shift(d)),
        "scaled": ((2 * K).inverse(damping) if kind < 4 else None, lambda block, d: (2 * block).inverse(d)),
    }
    for result, function in results.values():
        if result is not None:
            assert isinstance(result, BlockDiagonal)
            for name, block in K.blocks.items():
                torch.testing.assert_close(result.blocks[name].to_dense(), function(block, alone[name]).to_dense())


def test_gradient_with_respect_to_one_prior_precision_per_block() -> None:
    K = blocks()
    delta = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64, requires_grad=True)
    x = normal(K.shape[0])
    for function in (lambda d: K.shift(d).logdet, lambda d: K.shift(d).trace, lambda d: x @ (K.inverse(d) @ x)):
        assert torch.autograd.gradcheck(function, delta)


def test_differentiable_at_zero() -> None:
    delta = torch.tensor(0.0, dtype=F64, requires_grad=True)
    A = Kronecker(psd(2, 2), psd(3, 3))
    (grad,) = torch.autograd.grad(A.inverse(delta).trace, delta)
    close(grad, -A.power(-2).trace)


def test_float32_cholesky_that_fails_is_repeated_in_float64() -> None:
    A = torch.tensor([[1.0, 1.0], [1.0, 1.0]]) + 1e-9 * torch.eye(2)
    with pytest.warns(CurvatureWarning, match="with damping 1.0e-09 failed in float32; retrying in float64"):
        inverse = Dense(A, PSD).inverse(1e-9)
    assert inverse.dtype == torch.float32
    assert inverse.to_dense()[0, 0].item() == pytest.approx(5e8, rel=1e-3)
    with pytest.raises(
        SingularMatrixError, match=r"not positive definite in torch.float32; a damping of .* would do, or pass retry"
    ):
        Dense(A, PSD).inverse(1e-9, retry_double_precision=False)


K12 = Kronecker(torch.eye(3), torch.eye(4))
REFUSED = [
    (lambda: K12.inverse(HeuristicDamping(cast(Any, (0.1, 0.1)))), TypeError, "to be one number.* got a pair"),
    (lambda: K12.inverse(HeuristicDamping(-0.1)), ValueError, "at least 0, got -0.1"),
    (lambda: K12.power(0.5, HeuristicDamping(0.1)), TypeError, "to be one number.* got a pair"),
    (
        lambda: K12.inverse(-0.1),
        ValueError,
        "the damping of a positive semi-definite matrix to be at least 0, got -0.1",
    ),
    (lambda: K12.inverse((0.1, -0.1)), ValueError, "factor G: .*at least 0"),
    (lambda: K12.power(0.5, -0.1), ValueError, "at least 0"),
    (lambda: K12.inverse(cast(Any, "large")), TypeError, "one number, a 0-d tensor or a rule; got str 'large'"),
    (lambda: K12.inverse(torch.ones(2)), TypeError, r"got a tensor of shape \[2\]"),
    (lambda: K12.shift(cast(Any, [1.0])), TypeError, "the shift of a Kronecker to be one number"),
    (
        lambda: Dense(torch.eye(2), PSD).inverse((0.1, 0.2)),
        ValueError,
        "pair of dampings .* belongs to the two factors",
    ),
    (
        lambda: Kronecker(torch.eye(2), torch.eye(2), Structure.GENERAL).inverse(0.1),
        NoClosedForm,
        "Kronecker.*no closed form of `inverse`",
    ),
    (lambda: RelativeDamping(-1.0), ValueError, "factor that is not negative, got -1.0"),
    (lambda: blocks().inverse(torch.ones(3)), ValueError, r"one per block, \[4\], got a damping of shape \[3\]"),
    (
        lambda: blocks().inverse({"fc": 1.0, "f": 2.0}),
        ValueError,
        r"missing \['conv', 'scale', 'groups'\], unexpected \['f'\]",
    ),
    (lambda: blocks().inverse((0.1, 0.1)), ValueError, 'block "scale": A pair of dampings'),
    (lambda: (0 * Dense(torch.eye(2), PSD)).inverse(), SingularMatrixError, "is zero; add a damping"),
]


@pytest.mark.parametrize(("function", "error", "message"), REFUSED)
def test_refused(function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function()


def test_errors_name_the_block() -> None:
    K = blocks()
    singular = BlockDiagonal(K.blocks | {"scale": Dense(torch.zeros(3, 3, dtype=F64), PSD)}, K.layouts, K.space)
    assert singular.logdet == -torch.inf
    assert singular.det == 0
    with pytest.raises(SingularMatrixError, match=r'block "scale": Dense.* is singular: 3 of its 3'):
        singular.inverse()
    with pytest.raises(SingularMatrixError, match=r'block "scale": .*any positive damping'):
        singular.power(-0.5)
    broken = BlockDiagonal(
        K.blocks | {"scale": Dense(torch.full((3, 3), torch.nan, dtype=F64), PSD)}, K.layouts, K.space
    )
    with pytest.raises(NumericsError, match=r'block "scale": the matrix .* 9 entries that are NaN or infinite'):
        _ = broken.logdet


# ------------------------------------------------------------------------------------------- powers, factor by factor
@pytest.mark.parametrize("p", [-1.0, -0.5, 0.5, 1.0])
def test_power_of_factors(p: float) -> None:
    """kfac_jax's factored damping: normalised factors, each with an equal share."""
    G, A = psd(2, 2), 7 * psd(3, 3, seed=1)
    damping = 0.3
    c = ((A.trace() / 3) * (G.trace() / 2)).sqrt()
    parts = [c * (F / (F.trace() / len(F)) + damping**0.5 / c * eye_like(F)) for F in (G, A)]
    values, Q = torch.linalg.eigh(torch.kron(*parts))
    power = Kronecker(G, A).power(p, damping, exact=False)
    assert isinstance(power, Kronecker)
    close(power.to_dense(), (Q * values**p) @ Q.T)
    exact = Kronecker(G, A).power(1.0, damping)
    gap = torch.linalg.eigvalsh(Kronecker(G, A).power(1.0, damping, exact=False).to_dense() - exact.to_dense())
    assert float(gap.min()) > 0  # strictly larger than the damped matrix


@pytest.mark.parametrize("case", ["scalar G", "scalar A", "both", "zero", "no damping"])
def test_power_of_factors_is_exact(case: str) -> None:
    """Where one factor is a number or zero, and without damping."""
    G = psd(1, 1) if case in ("scalar G", "both") else psd(2, 2)
    A = psd(1, 1, seed=1) if case in ("scalar A", "both") else psd(3, 3, seed=1)
    damping = 0.0 if case == "no damping" else 0.3
    K = Kronecker(0 * G if case == "zero" else G, A)
    close(K.power(-0.5, damping, exact=False).to_dense(), K.power(-0.5, damping).to_dense())


def test_power_of_factors_of_a_batch() -> None:
    G, A = psd(2, 4, 4), psd(2, 3, 3, seed=1)
    power = Kronecker(G, A).power(-1.0, 0.3, exact=False).to_dense()
    each = [Kronecker(g, a).power(-1.0, 0.3, exact=False).to_dense() for g, a in zip(G, A, strict=True)]
    close(power, torch.block_diag(*each))


def test_power_of_others_takes_no_notice() -> None:
    D, S = Diagonal(psd(3, 3).diagonal().clone()), Dense(psd(3, 3), PSD)
    for K in (D, S, blocks()):
        assert K.power(-1.0, 0.1, exact=False).shape == K.shape
    close(D.power(-1.0, 0.1, exact=False).to_dense(), D.power(-1.0, 0.1).to_dense())
    close(S.power(-1.0, 0.1, exact=False).to_dense(), S.power(-1.0, 0.1).to_dense())
