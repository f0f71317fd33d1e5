"""Gradients of each example and scores made of them, against autodiff of one example at a time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EmpiricalRisk,
    IdentityLinearOperator,
    attribution_scores,
    per_example_gradients,
    self_influence,
)
from curvlinops_plus.linalg import Dense
from test.cases import FEW, NETS, PROBLEMS, Problem, close, problem, unchanged
from test.fuzz.limits import small_buffers
from test.helpers import normal
from test.nets import tanh_net


def rows_of(p: Problem, per_term: bool = False) -> list[Tensor]:
    """Gradients [N, R, P] of each batch, from the slow twin."""
    return [p.exact.gradients(b, v).transpose(0, 1) for b, v in p.exact.empirical(per_term)]


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "," in name or name in FEW])
def test_gradients_are_autograd_s(name: str) -> None:
    p = problem(name)
    risk = p.risk()
    for per_term in (False, True):
        expected = rows_of(p, per_term)
        found = [risk.space.flatten_rows(g) for g in per_example_gradients(risk, per_term=per_term)]
        assert len(found) == len(expected)
        for batch, rows in enumerate(expected):
            close(
                found[batch],
                rows if per_term else rows[:, 0],
                what=f"batch {batch}, per_term={per_term}",
            )


@pytest.mark.one_in(2, all_of=FEW)
@pytest.mark.parametrize("name", NETS)
def test_scores_are_products_of_gradients(name: str) -> None:
    """Also of a matrix that is not symmetric, of queries in other batches, of terms, and in the
    smallest pieces.
    """
    small = name in FEW or [*NETS].index(name) % 2
    p = problem(name)
    train, batches = p.risk(), rows_of(p)
    G, dim = torch.cat(batches)[:, 0], p.risk().space.dim
    A = normal(dim, dim)
    queries = p.risk(p.data[:2])
    q = torch.cat(batches[:2])[:, 0]
    with small_buffers() if small else nullcontext(), unchanged(p.model, p.data):
        close(attribution_scores(Dense(A), queries, train), q @ A @ G.T, what="scores")
        close(self_influence(Dense(A), train), ((G @ A) * G).sum(1), what="self-influence")
        terms = rows_of(p, per_term=True)
        if len({len(rows[0]) for rows in terms}) == 1:
            T = torch.cat(terms)  # [N, R, P]
            found = attribution_scores(Dense(A), queries, train, per_term=True)
            close(found, torch.einsum("qp,pd,nrd->qnr", q, A, T), what="of terms")
            close(found.sum(-1), q @ A @ G.T, what="sums")
            close(
                self_influence(Dense(A), train, per_term=True),
                ((T @ A) * T).sum(-1),
                what="self-influence of terms",
            )


def small_net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = tanh_net(4, 5, 3).double()
    return model, normal(12, 4), torch.arange(12) % 3


def test_matrix_on_parameters_in_another_order() -> None:
    """Names say which parameter is meant."""
    model, X, y = small_net()
    own = dict(model.named_parameters())
    turned = dict(reversed(own.items()))
    risk, other = (
        EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], params) for params in (own, turned)
    )
    (gradients,) = per_example_gradients(other)
    G = risk.space.flatten_rows(gradients)
    A = normal(len(G.T), len(G.T))
    named = Dense(A, in_space=risk.space, out_space=risk.space)
    close(attribution_scores(named, other, other), G @ A @ G.T)
    close(self_influence(named, other), (G @ A @ G.T).diagonal())


class TwoHeads(nn.Module):
    """Classes and numbers, of which only the second batch has a target of each."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.numbers = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"c": self.classes(x), "n": self.numbers(x)}


@pytest.mark.parametrize(
    "weights", [{"c": 1.0, "n": 0.5}, {"c": 0.25, "n": 3.0}, {"n": 3.0, "c": 0.25}], ids=str
)
def test_several_losses_add_up_to_the_gradient(weights: dict[str, float]) -> None:
    torch.manual_seed(0)
    model, X, y = TwoHeads().double(), normal(6, 4), torch.tensor([0, 1, 2, 0, -100, 1])
    numbers, losses = normal(6, 2, seed=1), {"c": nn.CrossEntropyLoss(), "n": nn.MSELoss()}
    data = [(X[at], {"c": y[at], "n": numbers[at]}) for at in (slice(0, 2), slice(2, 6))]
    risk = EmpiricalRisk(
        model, {key: (losses[key], weight) for key, weight in weights.items()}, data
    )
    rows = torch.cat([risk.space.flatten_rows(g) for g in per_example_gradients(risk)])
    c = (
        1 / {"c": 5, "n": 12}[next(iter(weights))]
    )  # the first mean is over five targets, or all numbers
    close(c * rows.sum(0), risk.space.flatten(risk.gradient()))
    close(
        attribution_scores(IdentityLinearOperator(risk.space, dtype=X.dtype), risk, risk),
        rows @ rows.T,
    )


def test_a_mask_of_statistics_does_not_matter() -> None:
    p = problem("language model")
    masked = p.risk(
        mask=lambda X, y: torch.zeros_like(
            X["input_ids"] if isinstance(X, dict) else X, dtype=torch.bool
        )
    )
    for found, rows in zip(per_example_gradients(masked), rows_of(p), strict=True):
        close(masked.space.flatten_rows(found), rows[:, 0])


def test_empty_and_uncalled() -> None:
    """A layer that no batch calls has gradients of zero; the data may be read once."""
    model, X, y = small_net()
    unused = nn.Linear(2, 2).double()
    model.register_module("unused", unused)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign,operator,index]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
    (gradients,) = per_example_gradients(risk)
    assert gradients["unused.weight"].shape == (12, 2, 2)
    assert not gradients["unused.weight"].any()
    P = IdentityLinearOperator(risk.space, dtype=X.dtype)
    rows = risk.space.flatten_rows(gradients)
    close(
        attribution_scores(P, risk, risk.with_data(iter([(X[:3], y[:3]), (X[3:], y[3:])]))),
        rows @ rows.T,
    )
