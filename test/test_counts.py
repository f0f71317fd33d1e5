"""Counts may be 0-d tensors of integers, as tensors of sizes give them; not floats, not
booleans.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus import (
    GGN,
    CGInverseLinearOperator,
    EmpiricalRisk,
    KFACLinearOperator,
    MonteCarlo,
    hutchinson_trace,
    random_vector,
)
from curvlinops_plus.estimate import logdet
from curvlinops_plus.linalg import Dense, Structure
from test.helpers import normal, seeded

M = normal(8, 8) @ normal(8, 8).T + torch.eye(8, dtype=torch.float64)
A = Dense(M, Structure.PSD)
MODEL, DATA = nn.Linear(3, 2).double(), [(normal(5, 3), normal(5, 2, seed=1))]
PARAMS = list(MODEL.parameters())

COUNTS: dict[str, Any] = {
    "hutchinson_trace": lambda k: hutchinson_trace(A, k, generator=seeded()),
    "random_vector": lambda k: random_vector(k, generator=seeded()),
    "logdet": lambda k: logdet(A, num_probes=k, num_steps=k, generator=seeded()),
    "cg": lambda k: (
        CGInverseLinearOperator(A, max_iter=k, tolerance=1.0) @ torch.ones(8, dtype=torch.float64)
    ),
    "chunk_size": lambda k: GGN(EmpiricalRisk(MODEL, nn.MSELoss(), DATA), chunk_size=k).to_dense(),
    "MonteCarlo": lambda k: GGN(
        EmpiricalRisk(MODEL, nn.MSELoss(), DATA), MonteCarlo(k, k)
    ).to_dense(),
    "KFAC": lambda k: KFACLinearOperator(
        MODEL, nn.MSELoss(), PARAMS, DATA, mc_samples=k
    ).to_dense(),
    "num_data": lambda k: GGN(EmpiricalRisk(MODEL, nn.MSELoss(), DATA, num_data=k)).to_dense(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_tensors_and_numbers(name) -> None:
    expected = COUNTS[name](6)
    for given in (torch.tensor(6), torch.tensor(6, dtype=torch.int32), np.int64(6)):
        found = COUNTS[name](given)
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "given", [torch.tensor(6.0), torch.tensor([6]), torch.tensor(True), True, 6.5]
)
@pytest.mark.parametrize("name", ["chunk_size", "MonteCarlo"])
def test_what_is_no_count(name, given) -> None:
    with pytest.raises((TypeError, ValueError), match="integer"):
        COUNTS[name](given)
