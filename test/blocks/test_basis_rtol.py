"""EKFAC in a looser basis: exact in its trace, near in the Frobenius norm, and from smaller eigenproblems."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvlinops_plus import EKFAC, EmpiricalRisk, Exact, curvature


def problem() -> EmpiricalRisk:
    """Inputs whose variances decay, as those of trained layers do."""
    torch.manual_seed(0)
    X = torch.randn(500, 240).double() * torch.logspace(0, -8, 240).double()
    X = X @ torch.linalg.qr(torch.randn(240, 240).double())[0]
    model = nn.Sequential(nn.Linear(240, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return EmpiricalRisk(model, nn.MSELoss(), [(X, torch.randn(500, 2).double())])


def test_a_looser_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    risk, sizes, eigh = problem(), [], torch.linalg.eigh
    exact = curvature(risk, EKFAC, vectors=Exact())
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: sizes.append(len(M)) or eigh(M))
    norms = []
    for rtol in (0.0, 1e-4, 1e-2):
        K = curvature(risk, EKFAC.using(basis_rtol=rtol), vectors=Exact())
        torch.testing.assert_close(K.trace, exact.trace, rtol=1e-12, atol=0)
        norms.append(float(K.frobenius_norm / exact.frobenius_norm))
    # The squared distance to the block is its square norm minus that of EKFAC, in every orthogonal basis.
    assert norms[0] == pytest.approx(1, rel=1e-12)
    assert norms[1] == pytest.approx(1, rel=1e-4)
    assert norms[2] == pytest.approx(1, rel=1e-2)
    assert norms[2] != norms[0]
    whole, less, least = (max(sizes[k : k + 4]) for k in (0, 4, 8))
    assert whole == 241
    assert least < less < 133


def test_what_is_no_tolerance_is_refused() -> None:
    for rtol in (-1e-3, 1.0):
        with pytest.raises(ValueError, match=r"Expected basis_rtol to be at least 0 and below 1, got"):
            curvature(problem(), EKFAC.using(basis_rtol=rtol))
