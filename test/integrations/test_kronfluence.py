"""Factors written for kronfluence: beside its own, and against plain sums; run with it where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import close, unchanged
from helpers import normal, seeded
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    RelativeDamping,
    UnsupportedError,
    attribution_scores,
    curvature,
    self_influence,
)
from curvlinops_plus.integrations.kronfluence import save_factors

try:
    import kronfluence
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
except ImportError:
    kronfluence, Task = None, object

needed = pytest.mark.skipif(kronfluence is None, reason="kronfluence is absent: pip install kronfluence")
stored = pytest.importorskip("safetensors.torch")
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


def read(folder: Path, kind: str) -> dict[str, Tensor]:
    return stored.load_file(folder / f"{kind}.safetensors")


class Classification(Task):
    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        assert not sample
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_its_scores_are_those_of_its_own_factors(make: Any, approximation: Any, tmp_path: Path) -> None:
    model, X, risk = problem(make)
    K = curvature(risk, approximation, vectors=Empirical())
    folder = tmp_path / "all" / "factors_ours"
    save_factors(K, folder)
    damping = 1e-3 if make is cnn else None  # None is a tenth of the mean eigenvalue
    P = K.inverse(RelativeDamping(0.1) if damping is None else damping)
    expected = attribution_scores(P, risk.with_data([(X[:Q], LABELS[:Q])]), risk), self_influence(P, risk)
    data, queries = (torch.utils.data.TensorDataset(X[:n], LABELS[:n]) for n in (N, Q))
    task = Classification()
    analyzer = Analyzer("all", prepare_model(model, task), task, cpu=True, output_dir=str(tmp_path), disable_tqdm=True)
    strategy = "kfac" if approximation is KFAC else "ekfac"
    arguments = FactorArguments(strategy, use_empirical_fisher=True)
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
        if approximation is EKFAC or make is mlp:  # where S is 1, or does not matter, the matrix is that of K
            close(ours, here, rtol=1e-4)
    loaded = analyzer.load_all_factors("ours"), analyzer.load_all_factors("theirs")
    assert loaded[0].keys() == loaded[1].keys()
    for kind, ours in loaded[0].items():
        theirs = loaded[1][kind]
        assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {
            name: (t.shape, t.dtype) for name, t in theirs.items()
        }
    if approximation is KFAC:
        own, counted = (analyzer.load_covariance_matrices(name) for name in ("ours", "theirs"))
        for side in ("activation", "gradient"):
            for name, M in own[f"{side}_covariance"].items():
                number = counted[f"num_{side}_covariance_processed"][name]
                close(M, counted[f"{side}_covariance"][name] / number, rtol=1e-5)


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_files_have_the_matrix(make: Any, approximation: Any, tmp_path: Path) -> None:
    """`Q_G, Q_A` and eigenvalues give the blocks; those of KFAC over the number of positions."""
    _, _, risk = problem(make, torch.float64)
    K = 2.5 * curvature(risk, approximation)
    save_factors(K, tmp_path / "new")
    arguments = json.loads((tmp_path / "new" / "factor_arguments.json").read_text())
    strategy = "kfac" if approximation is KFAC else "ekfac"
    assert arguments == {"strategy": strategy, "use_empirical_fisher": False}
    positions = {mlp: {"0": 1, "2": 1}, cnn: {"0": 9, "2": 4, "4": 1}}
    positions[tokens] = {"inner": 3, "head": 1}
    QG, QA = (read(tmp_path / "new", f"{side}_eigenvectors") for side in ("gradient", "activation"))
    assert QG.keys() == positions[make].keys()
    for name, block in K.blocks.items():
        if approximation is KFAC:
            a, g = (read(tmp_path / "new", f"{side}_eigenvalues")[name] for side in ("activation", "gradient"))
            values = positions[make][name] * g[:, None] * a
        else:
            values = read(tmp_path / "new", "lambda_matrix")[name]
            a, g = (read(tmp_path / "new", f"{side}_eigenvalues")[name] for side in ("activation", "gradient"))
            close(g.sum() * a.sum(), values.sum())
        Q = torch.kron(QG[name], QA[name])
        close(Q * values.flatten() @ Q.mT, block.to_dense())


def test_masked_positions_do_not_count(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, X = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).double(), normal(4, 3, 4, seed=1)
    kept = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    y = torch.randint(C, (4, 3), generator=seeded(1)).masked_fill(~kept, -100)
    K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], mask=lambda X, y: kept), KFAC)
    with unchanged(model):
        save_factors(K, tmp_path / "new")
    close(read(tmp_path / "new", "gradient_covariance")["0"], K.unscaled.blocks["0"].G.to_dense() * 4 / 9)


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, nn.Flatten())


CIRCULAR = {"padding": 1, "padding_mode": "circular"}
#: A model, its curvature, and the words.
REFUSED: list[tuple[nn.Module, Any, str]] = [
    (nn.Sequential(nn.Linear(4, 4)), DiagonalBlock, r"layer '0' has a block of type Diagonal"),
    (nn.Sequential(nn.LayerNorm(4)), DiagonalBlock, r"layer '0' is of type LayerNorm"),
    (image(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 2, groups=2)), KFAC, r"layer '2' .*channels of groups"),
    (image(nn.Conv2d(1, 2, 3, **CIRCULAR)), KFAC, r"padding_mode='circular'"),  # type: ignore[arg-type]
    (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": KFAC, "1": EKFAC}, r"layer '1' is EKFAC"),
]


@pytest.mark.parametrize(("model", "approximation", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_it_has_no_factors_for_is_refused(
    model: nn.Module, approximation: Any, words: str, tmp_path: Path
) -> None:
    X = torch.rand(5, 4)
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, torch.zeros_like(model(X)))]), approximation)
    with pytest.raises(UnsupportedError, match=f"{words}.*kronfluence"):
        save_factors(K, tmp_path / "new")
    with pytest.raises(TypeError, match=r"Expected what curvature\(risk, KFAC\)"):
        save_factors(K + K, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "lambda_matrix.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        save_factors(curvature(problem(mlp)[2], KFAC), tmp_path)
