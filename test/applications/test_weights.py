"""Weights of examples in uses of curvature: 2 is two examples, 0 is none; gradients of examples have no weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import close
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    EmpiricalRisk,
    Laplace,
    attribution_scores,
    curvature,
    per_example_gradients,
    prune,
    self_influence,
)

WEIGHTS = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 1.0]).double()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data(loss: nn.Module) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    X = torch.randn(6, 3).double()
    return X, torch.randn(6, 3).double() if isinstance(loss, nn.MSELoss) else torch.randint(3, (6,))


def pair(loss: nn.Module, model: nn.Module) -> tuple[EmpiricalRisk, EmpiricalRisk]:
    """With weights, and with repetitions."""
    X, y = data(loss)
    repeated = WEIGHTS.long()
    given = [(X[i : i + 4], y[i : i + 4], WEIGHTS[i : i + 4]) for i in (0, 4)]
    weighted = EmpiricalRisk(model, loss, given, weight=lambda X, y, w: w)
    return weighted, EmpiricalRisk(model, loss, [(X.repeat_interleave(repeated, 0), y.repeat_interleave(repeated, 0))])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss])
def test_laplace(kind: Any, reduction: str) -> None:
    loss = kind(reduction=reduction)
    one, other = (Laplace(curvature(risk, EKFAC), prior_precision=0.3) for risk in pair(loss, network()))
    close(one.posterior.to_dense(), other.posterior.to_dense(), 1e-8, "posterior")
    close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), 1e-9, "evidence")
    close(one.fit_prior().log_marginal_likelihood(), other.fit_prior().log_marginal_likelihood(), 1e-6, "fitted")


@pytest.mark.parametrize("per_term", [False, True])
def test_gradients_of_examples_have_no_weights(per_term: bool) -> None:
    loss, model = nn.MSELoss(), network()
    weighted, _ = pair(loss, model)
    plain = EmpiricalRisk(model, loss, [data(loss)])
    (expected,) = per_example_gradients(plain, per_term=per_term)
    found = [*per_example_gradients(weighted, per_term=per_term)]
    for key, value in expected.items():
        close(torch.cat([batch[key] for batch in found]), value, 1e-10, key)
    P = curvature(weighted).inverse(0.1)
    close(attribution_scores(P, weighted, weighted), attribution_scores(P, plain, plain), 1e-10, "scores")
    close(self_influence(P, weighted), self_influence(P, plain), 1e-10, "self-influence")


def test_pruning() -> None:
    loss, models = nn.CrossEntropyLoss(), [network(), network()]
    for index, model in enumerate(models):
        prune(model, curvature(pair(loss, model)[index]), 0.5, rounds=3)
    for mine, theirs in zip(models[0].modules(), models[1].modules(), strict=True):
        if isinstance(mine, nn.Linear):
            close(mine.weight, theirs.weight, 1e-7, "weight")
