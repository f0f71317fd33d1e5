"""Powers of Kronecker products by their factors, and determinants of their sums."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus import IdentityLinearOperator
from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg import Dense, Diagonal, Kronecker, Structure
from test.helpers import normal
from test.linalg.cases import eye_like, psd
from test.linalg.test_laws import close

PSD = Structure.PSD


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


def low_rank(n: int, rank: int, seed: int) -> Tensor:
    """Of size n; some directions have no eigenvalue but 0."""
    M = normal(n, rank, seed=seed)
    return M @ M.T


# Ranks of G, A, H, B in G ⊗ A + H ⊗ B, of sizes 3 and 4.
REGULAR = [(3, 4, 3, 4), (3, 4, 1, 1), (3, 4, 3, 2), (3, 1, 3, 4), (2, 4, 3, 4)]
SINGULAR = [(2, 4, 3, 1), (3, 1, 2, 4), (2, 4, 1, 3), (1, 4, 1, 4), (1, 4, 3, 3), (3, 1, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("ranks", REGULAR + SINGULAR, ids=str)
def test_the_determinant_of_a_sum(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against all eigenvalues; it is 0 where a vector is in the null spaces of both products."""
    G, A, H, B = (low_rank(3 + k % 2, rank, k) for k, rank in enumerate(ranks))
    M = torch.kron(G, A) + 1e-3 * torch.kron(H, B)
    values = torch.linalg.eigvalsh(M)
    is_singular = bool((values < 1e-13 * values.max()).any())
    G, A, H, B = (F.to(dtype) for F in (G, A, H, B))
    K = Kronecker(G, A) + 1e-3 * Kronecker(H, B)
    assert K.logdet.dtype == dtype
    if is_singular:
        assert ranks in SINGULAR
        assert K.logdet == -inf
        assert K.det == 0
        return
    assert ranks in REGULAR
    torch.testing.assert_close(K.logdet, values.log().sum().to(dtype), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(K.det, values.prod().to(dtype), rtol=1e-2, atol=0)


def test_determinants_of_batches_are_products() -> None:
    G, A, H, B = psd(2, 3, 3), psd(4, 4, seed=1), psd(2, 3, 3, seed=2), psd(2, 4, 4, seed=3)
    K = Kronecker(G, A) + Kronecker(H, B)
    each = [torch.kron(G[b], A) + torch.kron(H[b], B[b]) for b in range(2)]
    close(K.logdet, torch.logdet(each[0]) + torch.logdet(each[1]))


@pytest.mark.parametrize("side", ["G", "A"])
@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
def test_a_shift_beside_a_multiple_of_the_identity(side: str, diagonal: bool) -> None:
    """As noise of equal variance beside two kernels; differentiable in the shift."""
    G, A, B = psd(3, 3), low_rank(3, 1, 1), psd(3, 3, seed=2)
    B = torch.diag(B.diagonal()) if diagonal else B
    identity = 0.5 * IdentityLinearOperator([(3,)], dtype=G.dtype)
    factor = Diagonal(B.diagonal().clone()) if diagonal else Dense(B, PSD)
    pair: Any = (identity, factor) if side == "G" else (factor, identity)
    K = Kronecker(G, A) + Kronecker(*pair)
    δ = torch.tensor(0.3, dtype=G.dtype, requires_grad=True)
    M = (
        torch.kron(G, A)
        + torch.kron(*[F.to_dense() for F in pair])
        + δ * torch.eye(9, dtype=G.dtype)
    )
    shifted = K.shift(δ)
    close(shifted.logdet, torch.logdet(M))
    close(shifted.trace, M.trace())
    close(shifted.frobenius_norm, M.norm())
    close(shifted.to_dense(), M)
    # d log det(M) / dδ = tr M⁻¹
    expected = torch.linalg.inv(M).trace()
    close(torch.autograd.grad(shifted.logdet, δ)[0], expected.detach())
    assert K.shift(-0.01).structure == Structure.SYMMETRIC


def test_copies_of_a_factor_count_as_one() -> None:
    """Also after a conversion, which copies each."""
    G, A, H = psd(3, 3), psd(4, 4, seed=1), psd(3, 3, seed=2)
    other = Kronecker(psd(3, 3, seed=3), psd(4, 4, seed=4))
    K = (Kronecker(G, A) + other + Kronecker(H, A.clone())).to(torch.float32).to(torch.float64)
    torch.testing.assert_close(K.logdet, torch.logdet(K.to_dense()), rtol=1e-6, atol=0)
    shared = Dense(G, PSD)
    assert isinstance(Kronecker(shared, A) + Kronecker(shared, psd(4, 4, seed=5)), Kronecker)


def test_without_a_determinant_an_error_says_what_has_one() -> None:
    K = Kronecker(psd(3, 3), psd(4, 4)) + Kronecker(psd(3, 3, seed=1), psd(4, 4, seed=1))
    with pytest.raises(
        NoClosedForm, match=r"closed form of `logdet`.*materialize.*estimate.logdet"
    ):
        _ = K.shift(0.1).logdet
