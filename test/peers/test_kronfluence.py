"""Factors that the example writes for kronfluence and bergson."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from curvlinops_plus import EKFAC, EmpiricalRisk, curvature
from test.cases import close
from test.helpers import normal

stored = pytest.importorskip("safetensors.torch")
PATH = Path(__file__).parents[2] / "examples" / "export_factors.py"


def test_the_example_runs_and_its_files_have_the_matrix(tmp_path: Path) -> None:
    runpy.run_path(str(PATH), run_name="__main__")
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 3, 2, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, bias=False),
        nn.Flatten(),
    )
    model, X, y = (
        nn.Sequential(*layers, nn.Linear(8, 3)),
        normal(14, 2, 5, 5, seed=1).float(),
        torch.arange(14) % 3,
    )
    K = curvature(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), list(zip(X.split(5), y.split(5)))), EKFAC
    )
    SimpleNamespace(**runpy.run_path(str(PATH))).for_bergson(K, tmp_path)
    files = [
        stored.load_file(tmp_path / f"{kind}_sharded" / "shard_0.safetensors")
        for kind in ("eigen_gradient", "eigen_activation", "eigenvalue_correction")
    ]
    for name, block in K.blocks.items():
        Q_G, Q_A, values = (tensors[name] for tensors in files)
        Q = torch.kron(Q_G, Q_A)
        close(Q * values.flatten() @ Q.mT, block.to_dense(), rtol=1e-5)
