"""Powers of Kronecker products by their factors."""

from __future__ import annotations

import pytest
import torch

from curvlinops_plus.linalg import Dense, Diagonal, Kronecker, Structure
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
