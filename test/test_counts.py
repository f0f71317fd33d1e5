"""Counts may be 0-d tensors of integers, as tensors of sizes give them; not floats, not booleans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import normal, seeded
from torch import nn

from curvlinops_plus import (
    GGN,
    CGInverseLinearOperator,
    CurvatureWarning,
    EmpiricalRisk,
    FisherMCLinearOperator,
    KFACLinearOperator,
    MonteCarlo,
    curvature,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    random_vector,
    top_eigenpairs,
    xdiag,
    xtrace,
)
from curvlinops_plus.estimate import logdet
from curvlinops_plus.linalg import Dense, Diagonal, Structure, cg

M = normal(8, 8) @ normal(8, 8).T + torch.eye(8, dtype=torch.float64)
A = Dense(M, Structure.PSD)
MODEL, DATA = nn.Linear(3, 2).double(), [(normal(5, 3), normal(5, 2, seed=1))]
PARAMS = list(MODEL.parameters())

COUNTS: dict[str, Any] = {
    "hutchinson_trace": lambda k: hutchinson_trace(A, k, generator=seeded()),
    "hutchpp_trace": lambda k: hutchpp_trace(A, k, generator=seeded()),
    "xtrace": lambda k: xtrace(A, k, generator=seeded()),
    "hutchinson_diag": lambda k: hutchinson_diag(A, k, generator=seeded()),
    "xdiag": lambda k: xdiag(A, k, generator=seeded()),
    "hutchinson_squared_fro": lambda k: hutchinson_squared_fro(A, k, generator=seeded()),
    "random_vector": lambda k: random_vector(k, generator=seeded()),
    "logdet": lambda k: logdet(A, num_probes=k, num_steps=k, generator=seeded()),
    "top_eigenpairs": lambda k: top_eigenpairs(A, k)[0],
    "sample": lambda k: A.sample(seeded(), k),
    "cg": lambda k: CGInverseLinearOperator(A, max_iter=k, tolerance=1.0) @ torch.ones(8, dtype=torch.float64),
    "chunk_size": lambda k: GGN(EmpiricalRisk(MODEL, nn.MSELoss(), DATA), chunk_size=k).to_dense(),
    "MonteCarlo": lambda k: GGN(EmpiricalRisk(MODEL, nn.MSELoss(), DATA), MonteCarlo(k, k)).to_dense(),
    "FisherMC": lambda k: FisherMCLinearOperator(MODEL, nn.MSELoss(), PARAMS, DATA, mc_samples=k).to_dense(),
    "KFAC": lambda k: KFACLinearOperator(MODEL, nn.MSELoss(), PARAMS, DATA, mc_samples=k).to_dense(),
    "num_data": lambda k: GGN(EmpiricalRisk(MODEL, nn.MSELoss(), DATA, num_data=k)).to_dense(),
    "terms": lambda k: curvature(EmpiricalRisk(MODEL, nn.MSELoss(), DATA, num_per_example_loss_terms=k)).to_dense(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_tensors_and_numbers(name) -> None:
    expected = COUNTS[name](6)
    for given in (torch.tensor(6), torch.tensor(6, dtype=torch.int32), np.int64(6)):
        found = COUNTS[name](given)
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("given", [torch.tensor(6.0), torch.tensor([6]), torch.tensor(True), True, 6.5])
@pytest.mark.parametrize("name", ["hutchinson_trace", "sample", "chunk_size", "MonteCarlo", "FisherMC"])
def test_what_is_no_count(name, given) -> None:
    with pytest.raises((TypeError, ValueError), match="integer"):
        COUNTS[name](given)


def test_an_iteration_limit_alone() -> None:
    """So many iterations are made; a warning says if the residual is not below 1e-5 then."""
    ones = torch.ones(8, dtype=torch.float64)
    for limit in (8, 100):
        inverse = CGInverseLinearOperator(A, max_iter=limit)
        assert float((M @ (inverse @ ones) - ones).norm()) < 1e-8
    D, b = Diagonal(torch.linspace(1, 10, 60, dtype=torch.float64)), torch.ones(60, dtype=torch.float64)
    alone, given = cg(D, b)[1], cg(D, b, tol=None, max_iter=100)[1]
    assert float(given.relative_residual) <= 1e-10 < float(alone.relative_residual) <= 1e-5
    between = cg(D, b, tol=None, max_iter=alone.iterations + 1)[1]  # enough, so there is no warning
    assert bool(between.converged)
    assert float(between.relative_residual) > 1e-10
    with pytest.warns(CurvatureWarning, match="missed tol=1e-05"):
        CGInverseLinearOperator(A, max_iter=2) @ ones


def test_names_of_the_coming_release() -> None:
    K = KFACLinearOperator(MODEL, nn.MSELoss(), PARAMS, DATA)
    exact = K.inverse(0.1, use_exact_damping=True)
    assert torch.equal(exact.to_dense(), K.inverse(0.1).to_dense())
    heuristic = K.inverse(0.1, use_exact_damping=False, use_heuristic_damping=True)
    assert not torch.allclose(heuristic.to_dense(), exact.to_dense())
    for options in ({"damping": 0.1, "use_heuristic_damping": True}, {"damping": (0.1, 0.1)}):
        with pytest.raises(ValueError, match=r"Either damp the factors .* or use exact damping, not both"):
            K.inverse(**options, use_exact_damping=True)
