"""An example of weight 2 counts as two, one of weight 0 as none: in the loss, its derivatives and
every statistic.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    KFAC,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    GGNFactor,
    Hessian,
    KFACOptimizer,
    MonteCarlo,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.risk.batches import Batch, take_examples
from test.cases import APPROXIMATIONS, FEW, LOSSES, Problem, close, problem, unchanged
from test.helpers import F64, normal


def weighted(p: Problem, weights: list[list[float]]) -> list[Any]:
    """The data with weights: a third entry of a batch, or one more of a mapping."""
    data = []
    for item, w in zip(p.data, weights, strict=True):
        t = torch.tensor(w, dtype=F64)
        data.append({**item, "weight": t} if isinstance(item, Mapping) else (*item, t))
    return data


def get_weight(X: Any, y: Any, w: Tensor | None = None) -> Tensor:
    return X.pop("weight") if w is None else w


def repeated(p: Problem, weights: list[list[int]]) -> list[Any]:
    """The data with each example as often as its weight says."""
    data = []
    for item, w in zip(p.data, weights, strict=True):
        X, y = (
            ({k: t for k, t in item.items() if k != "labels"}, item["labels"])
            if isinstance(item, Mapping)
            else item
        )
        batch = take_examples(
            Batch(X, y, len(w)), [n for n, times in enumerate(w) for _ in range(times)]
        )
        assert batch is not None
        data.append(
            {**batch.X, "labels": batch.y} if isinstance(item, Mapping) else (batch.X, batch.y)
        )
    return data


WEIGHTS = [[2, 0, 1], [3], [1, 2]]


def risks(p: Problem, weights: Any = WEIGHTS) -> tuple[EmpiricalRisk, EmpiricalRisk]:
    """The risk with weights, and that of the repeated examples."""
    return p.risk(weighted(p, weights), weight=get_weight), p.risk(repeated(p, weights))


def quiet_curvature(risk: EmpiricalRisk, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Exact\(\) sends", CurvatureWarning)
        warnings.filterwarnings("ignore", ".*get their exact diagonal", CurvatureWarning)
        return curvature(risk, *args, **options)


NETS = [
    *FEW,
    *(f"mlp, {loss}" for loss in LOSSES if "-" not in loss or "all" in loss or loss == "mse-sum"),
]


@pytest.mark.parametrize("name", NETS)
def test_loss_gradient_and_exact_operators(name) -> None:
    p = problem(name)
    mine, theirs = risks(p)
    with unchanged(p.model, p.loss):
        close(mine.loss(), theirs.loss())
        close(*(risk.space.flatten(risk.gradient()) for risk in (mine, theirs)))
        v = normal(mine.space.dim, 2)
        for kind, *vectors in (
            (GGN,),
            (GGN, Empirical()),
            (GGN, Empirical(per_term=True)),
            (Hessian,),
        ):
            close(kind(mine, *vectors) @ v, kind(theirs, *vectors) @ v)
        close(GGN(mine).quadratic_form(v.T), GGN(theirs).quadratic_form(v.T))
        F = GGNFactor(mine)
        close(F @ (F.T @ v), GGN(theirs) @ v)


STATISTICS = [
    *(
        (net, approximation)
        for net in ("strided cnn", "language model")
        for approximation in APPROXIMATIONS
    ),
    *((net, approximation) for net in FEW for approximation in ("KFAC", "KFAC reduce")),
]


@pytest.mark.parametrize(("name", "approximation"), dict.fromkeys(STATISTICS))
def test_statistics_of_layers(name, approximation) -> None:
    p = problem(name)
    for vectors in (Exact(), Empirical()) if name == "strided cnn" else (Empirical(),):
        mine, theirs = (
            quiet_curvature(risk, APPROXIMATIONS[approximation], vectors=vectors)
            for risk in risks(p)
        )
        for block, operator in mine.blocks.items():
            if (
                "EKFAC reduce" in approximation
            ):  # of which the basis of few means is arbitrary where these have none
                close(operator.trace, theirs.blocks[block].trace, what=block)
            else:
                close(operator.to_dense(), theirs.blocks[block].to_dense(), what=block)


@pytest.mark.parametrize(
    "vectors", [Exact(), Empirical(), MonteCarlo(2, seed=1), Exact(signs=True)]
)
def test_linear_in_the_weights(vectors) -> None:
    """Also random vectors: each example has its own, whatever the weights are."""
    p = problem("attention, ce-sum")
    parts = [[[0.3, 0.0, 1.7], [0.5], [0.0, 2.0]], [[1.0, 0.4, 0.0], [0.25], [3.0, 0.1]]]
    both = [[a + b for a, b in zip(*batches)] for batches in zip(*parts)]

    def of(weights: list[list[float]]) -> EmpiricalRisk:
        return p.risk(weighted(p, weights), weight=get_weight)

    for make in (
        lambda r: quiet_curvature(r, DiagonalBlock, vectors=vectors),
        lambda r: GGN(r, vectors),
    ):
        one, two, sum_ = (make(of(w)).to_dense() for w in (*parts, both))
        close(one + two, sum_)


@pytest.mark.parametrize("vectors", [Exact(), Empirical()])
def test_in_the_users_own_pass(vectors) -> None:
    p = problem("mlp")
    mine, theirs = risks(p)
    estimator = CurvatureEstimator(mine.with_data([]), KFAC, vectors=vectors)
    for X, y, w in mine.data:
        with estimator.listen((X, y, w)):
            out = p.model(X)
        # What a weighted loss sends back here has the weights, not their roots.
        (torch.nn.functional.cross_entropy(out, y, reduction="none") @ w).backward()
    close(estimator.operator.to_dense(), curvature(theirs, KFAC, vectors=vectors).to_dense())
    p.model.zero_grad()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"a": self.a(h), "b": self.b(h)}


def test_several_losses() -> None:
    model, loss = Two().double(), {"a": nn.MSELoss(), "b": (nn.CrossEntropyLoss(), 0.5)}
    X, y, w = (
        normal(4, 3),
        {"a": normal(4, 2, seed=1), "b": torch.tensor([0, 1, 1, 0])},
        torch.tensor([2, 0, 1, 3]),
    )
    index = torch.repeat_interleave(torch.arange(4), w)
    mine = EmpiricalRisk(model, loss, [(X, y, w)], weight=get_weight)
    theirs = EmpiricalRisk(model, loss, [(X[index], {key: t[index] for key, t in y.items()})])
    close(mine.loss(), theirs.loss())
    for make in (GGN, Hessian, lambda r: curvature(r, KFAC), lambda r: GGN(r, Empirical())):
        close(make(mine).to_dense(), make(theirs).to_dense())


X, Y = normal(3, 2), normal(3, 1)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (
            torch.ones(3, 1),
            r"`weight` returned torch.float32 \[3, 1\] for batch 0; expected a tensor \[3\]",
        ),
        (torch.ones(2), r"\[2\] for batch 0"),
        ([1.0, 1.0, 1.0], "`weight` returned list for batch 0"),
        (
            torch.tensor([1.0, -1.0, 1.0]),
            "for batch 0; .* a finite number of at least 0",
        ),
        (torch.tensor([1.0, float("nan"), 1.0]), "returned torch.float32"),
        (torch.zeros(3), "No term of MSELoss counts"),
    ],
)
def test_weights_that_are_none(weight, words) -> None:
    risk = EmpiricalRisk(
        nn.Linear(2, 1).double(), nn.MSELoss(), [(X, Y, weight)], weight=lambda X, y, w: w
    )
    with pytest.raises(ValueError, match=words):
        risk.loss()


def test_what_is_refused() -> None:
    model, data = nn.Linear(2, 1).double(), [(X, Y, torch.ones(3))]
    with pytest.raises(
        ValueError, match=r"expected a pair .* weights of examples take EmpiricalRisk\(..., weight="
    ):
        EmpiricalRisk(model, nn.MSELoss(), data).loss()
    with pytest.raises(
        UnsupportedError, match=r"num_data replaces a count .* is over the sum of their weights"
    ):
        EmpiricalRisk(model, nn.MSELoss(), data, weight=get_weight, num_data=7)
    with pytest.raises(UnsupportedError, match="weight=: HuberLoss has no likelihood"):
        EmpiricalRisk(model, nn.HuberLoss(), data, weight=get_weight)
    with pytest.raises(UnsupportedError, match=r"weight=: an optimizer can't see"):
        KFACOptimizer(model, nn.MSELoss(), weight=get_weight)
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), [], weight=get_weight), KFAC)
    with pytest.raises(UnsupportedError, match="weight= comes with the targets"):
        estimator.risk.read_input(X, False)
