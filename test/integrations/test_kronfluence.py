"""Factors that the example writes for kronfluence and bergson: scores with kronfluence where it is installed."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import close
from helpers import normal, seeded
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    Empirical,
    EmpiricalRisk,
    RelativeDamping,
    attribution_scores,
    curvature,
    self_influence,
)

try:
    import kronfluence
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
except ImportError:
    kronfluence, Task = None, object

needed = pytest.mark.skipif(kronfluence is None, reason="kronfluence is absent: pip install kronfluence")
stored = pytest.importorskip("safetensors.torch")
PATH = Path(__file__).parents[2] / "examples" / "export_factors.py"
EXAMPLE = SimpleNamespace(**runpy.run_path(str(PATH)))
N, C, Q = 14, 3, 4
LABELS = torch.randint(C, (N,), generator=seeded(2))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5, bias=False), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh().mean(1))


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)), normal(N, 4, seed=1)


def cnn() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(2, 3, 2, padding=1, stride=2), nn.Tanh(), nn.Conv2d(3, 2, 2, bias=False), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, C)), normal(N, 2, 5, 5, seed=1)


def tokens() -> tuple[nn.Module, Tensor]:
    return Tokens(), normal(N, 3, 4, seed=1)


NETS = [mlp, cnn, tokens]


def problem(make: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, EmpiricalRisk]:
    torch.manual_seed(0)
    model, X = make()
    model, X = model.to(dtype), X.to(dtype)
    return model, X, EmpiricalRisk(model, nn.CrossEntropyLoss(), list(zip(X.split(5), LABELS.split(5))))


class Classification(Task):
    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        assert not sample
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", NETS)
def test_its_scores_are_those_of_its_own_factors(make: Any, tmp_path: Path) -> None:
    model, X, risk = problem(make)
    K = curvature(risk, EKFAC, vectors=Empirical())
    folder = tmp_path / "all" / "factors_ours"
    EXAMPLE.for_kronfluence(K, folder, empirical=True)
    damping = 1e-3 if make is cnn else None  # None is a tenth of the mean eigenvalue
    P = K.inverse(RelativeDamping(0.1) if damping is None else damping)
    expected = attribution_scores(P, risk.with_data([(X[:Q], LABELS[:Q])]), risk), self_influence(P, risk)
    data, queries = (torch.utils.data.TensorDataset(X[:n], LABELS[:n]) for n in (N, Q))
    task = Classification()
    analyzer = Analyzer("all", prepare_model(model, task), task, cpu=True, output_dir=str(tmp_path), disable_tqdm=True)
    arguments = FactorArguments("ekfac", use_empirical_fisher=True)
    analyzer.fit_all_factors("theirs", data, per_device_batch_size=5, factor_args=arguments)
    scores = []
    for name in ("ours", "theirs"):
        options: Any = {"factors_name": name, "score_args": ScoreArguments(damping_factor=damping)}
        options["per_device_train_batch_size"] = 7
        analyzer.compute_pairwise_scores(
            name, query_dataset=queries, train_dataset=data, per_device_query_batch_size=2, **options
        )
        analyzer.compute_self_scores(name, train_dataset=data, **options)
        scores.append(
            [load(name)["all_modules"] for load in (analyzer.load_pairwise_scores, analyzer.load_self_scores)]
        )
    for ours, theirs, here in zip(*scores, expected):
        close(ours, theirs, rtol=2e-5)
        close(ours, here, rtol=1e-4)
    loaded = analyzer.load_all_factors("ours"), analyzer.load_all_factors("theirs")
    assert loaded[0].keys() == loaded[1].keys()
    for kind, ours in loaded[0].items():
        theirs = loaded[1][kind]
        assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {
            name: (t.shape, t.dtype) for name, t in theirs.items()
        }


def test_the_example_runs_and_its_files_have_the_matrix(tmp_path: Path) -> None:
    runpy.run_path(str(PATH), run_name="__main__")
    K = curvature(problem(cnn)[2], EKFAC)
    EXAMPLE.for_bergson(K, tmp_path)
    layers = [
        stored.load_file(tmp_path / f"{kind}_sharded" / "shard_0.safetensors")
        for kind in ("eigen_gradient", "eigen_activation", "eigenvalue_correction")
    ]
    for name, block in K.blocks.items():
        Q_G, Q_A, values = (tensors[name] for tensors in layers)
        Q = torch.kron(Q_G, Q_A)
        close(Q * values.flatten() @ Q.mT, block.to_dense(), rtol=1e-5)
