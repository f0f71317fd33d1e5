"""Unusual arguments that work and are right, and refusals about files, dtypes and weights that move.

All other refusals are in `test_messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import normal
from torch import nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    BlockwiseLinearOperator,
    EmpiricalRisk,
    Hessian,
    Jacobian,
    curvature,
    load,
    save,
)

X, Y = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
DATA, LOSS = [(X, Y)], nn.CrossEntropyLoss()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    for p in model.parameters():
        p.data = normal(*p.shape, seed=p.numel())
    return model


def risk(model: nn.Module | None = None, data: Any = DATA, params: Any = None, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(net() if model is None else model, LOSS, data, params, **options)


# ----------------------------------------------------------------------------------------------------- what works


# ------------------------------------------------------------------------------------------------------------- files
def test_saving_and_loading(tmp_path: Path) -> None:
    r = risk()
    K, path, make = curvature(r), tmp_path / "K.st", BlockwiseLinearOperator
    save(K, path)
    assert torch.equal(make.from_state_dict(load(path), r.model, None).to_dense(), K.to_dense())
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: save(path, K), TypeError, "save takes a state_dict, or what has one.* and then a path"),
        (lambda: save(GGN(r), path), TypeError, "a GGN has none"),
        (lambda: make.from_state_dict(path, r.model, DATA), ValueError, r"not a state .*, as load\(path\) reads it"),
        (lambda: K.load_state_dict(str(path)), ValueError, r"not a state .*, as load\(path\) reads it"),
        (lambda: make.from_state_dict(r.model, load(path), DATA), ValueError, r"state_dict\(\) returns.* got a Seq"),
    ]
    for call, error, words in refused:
        with pytest.raises(error, match=words):
            call()


# --------------------------------------------------------------------------------------------------- dtypes and sizes
def test_conversion_of_operators() -> None:
    r = risk()
    for K in (curvature(r), curvature(r).inverse(0.1), 2 * curvature(r, EKFAC)):
        for there in (K.to(torch.float32), K.to(dtype=torch.float32), K.to("cpu", torch.float32)):
            assert there.dtype == torch.float32
            torch.testing.assert_close(there.to_dense(), K.to_dense().float(), rtol=1e-4, atol=1e-5)
    for A in (GGN(r), Hessian(r), Jacobian(r)):
        assert A.to("cpu") is A.to(torch.float64) is A.to() is A
        words = rf"{type(A).__name__} owns no tensors that could be moved: .*model.to\(...\)"
        with pytest.raises(NotImplementedError, match=words):
            A.to(torch.float32)
