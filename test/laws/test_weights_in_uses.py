"""Weights of examples in uses of curvature: 2 is two examples, 0 is none; gradients of examples
have no weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvlinops_plus import (
    EKFAC,
    EmpiricalRisk,
    Laplace,
    attribution_scores,
    curvature,
    per_example_gradients,
    self_influence,
)
from test.cases import close
from test.helpers import normal
from test.nets import tanh_net

WEIGHTS = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 1.0]).double()
X = normal(6, 3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return tanh_net(3, 4, 3).double()


def risks(
    loss: nn.Module, model: nn.Module | None = None
) -> tuple[EmpiricalRisk, EmpiricalRisk, EmpiricalRisk]:
    """With weights, with repetitions, and without either."""
    y, model = (
        normal(6, 3, seed=1) if isinstance(loss, nn.MSELoss) else torch.arange(6) % 3,
        model or network(),
    )
    data, times = [(X[i : i + 4], y[i : i + 4], WEIGHTS[i : i + 4]) for i in (0, 4)], WEIGHTS.long()
    weighted = EmpiricalRisk(model, loss, data, weight=lambda X, y, w: w)
    repeated = X.repeat_interleave(times, 0), y.repeat_interleave(times, 0)
    return weighted, EmpiricalRisk(model, loss, [repeated]), EmpiricalRisk(model, loss, [(X, y)])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.MSELoss(reduction="sum")])
def test_laplace(loss: nn.Module) -> None:
    one, other = (Laplace(curvature(risk, EKFAC), prior_precision=0.3) for risk in risks(loss)[:2])
    close(one.posterior.to_dense(), other.posterior.to_dense(), 1e-8, "posterior")
    close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), 1e-9, "evidence")
    close(
        one.fit_prior().log_marginal_likelihood(),
        other.fit_prior().log_marginal_likelihood(),
        1e-6,
        "fitted",
    )


@pytest.mark.parametrize("per_term", [False, True])
def test_gradients_of_examples_have_no_weights(per_term: bool) -> None:
    weighted, _, plain = risks(nn.MSELoss())
    (expected,) = per_example_gradients(plain, per_term=per_term)
    found = [*per_example_gradients(weighted, per_term=per_term)]
    for key, value in expected.items():
        close(torch.cat([batch[key] for batch in found]), value, 1e-10, key)
    P = curvature(weighted).inverse(0.1)
    close(
        attribution_scores(P, weighted, weighted),
        attribution_scores(P, plain, plain),
        1e-10,
        "scores",
    )
    close(self_influence(P, weighted), self_influence(P, plain), 1e-10, "self-influence")
