"""Factors above `max_bytes`, of which only the diagonals are kept; `test/laws` compares them with their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FEW, close, problem
from torch import nn

from curvlinops_plus import EKFAC, KFAC, CurvatureEstimator, EmpiricalRisk, MonteCarlo, curvature
from curvlinops_plus.linalg import Diagonal, Eigendecomposed, IdentityLinearOperator, Kronecker

KINDS = [KFAC.using(max_bytes=0), EKFAC.using(max_bytes=0), KFAC.using(max_bytes=150), EKFAC.using(max_bytes=150)]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", [name for name in FEW if name != "generic layers"])
def test_states_inverses_and_streams(name: str, kind: Any, separate: bool) -> None:
    p = problem(name)
    K = p.curvature(kind, separate_weight_and_bias=separate)
    other = p.curvature(kind, vectors=None, separate_weight_and_bias=separate)
    other.replace_blocks({block: 2 * operator for block, operator in other.unscaled.blocks.items()})
    other.load_state_dict(K.state_dict())
    assert torch.equal(other.to_dense(), K.to_dense())
    v = torch.ones(K.shape[0], dtype=torch.float64)
    close(K.inverse(0.1) @ (K @ v + 0.1 * v), v)
    assert (K.inverse(0.1, use_heuristic_damping=True) @ v).isfinite().all()
    estimator = CurvatureEstimator(p.risk(), kind, separate_weight_and_bias=separate)
    for batch in p.data:
        estimator.update(batch)
    close(estimator.operator.trace, K.trace)
    estimator.refresh(0.1)
    close(estimator.operator.trace, K.trace, what="in new bases")
    K.verify()


def head(tied: bool) -> nn.Module:
    """A language model of one embedding and one head."""
    embedding, output = nn.Embedding(50257, 4), nn.Linear(4, 50257, bias=not tied)
    if tied:
        output.weight = embedding.weight
    return nn.Sequential(embedding, output, nn.Flatten(0, -2))


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_heads_of_large_vocabularies_need_no_options(tied: bool) -> None:
    tokens = torch.tensor([[1, 50256, 7]])
    risk = EmpiricalRisk(head(tied), nn.CrossEntropyLoss(), [(tokens, tokens.roll(-1, 1).flatten())])
    for kind in (KFAC, EKFAC):
        K = curvature(risk, kind, vectors=MonteCarlo(samples=1, seed=0))
        assert f"{kind.__name__}, diagonal G (9.4 GiB as a matrix)" in repr(K)
        block = K.blocks["0" if tied else "1"]
        if isinstance(block, Kronecker):
            assert isinstance(block.G, Diagonal)
        else:
            assert isinstance(block, Eigendecomposed)
            assert isinstance(block.basis, Kronecker)
            assert isinstance(block.basis.G, IdentityLinearOperator)
        v = torch.ones(K.shape[0])
        close(K.inverse(0.1) @ (K @ v + 0.1 * v), v, rtol=1e-4)
        assert K.inverse(0.1).logdet.isfinite()
