"""Gradients of each example and scores made of them, against autodiff of one example at a time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from cases import FEW, NETS, PROBLEMS, Problem, close, problem, unchanged
from helpers import normal
from torch import Tensor

from curvlinops_plus import (
    attribution_scores,
    per_example_gradients,
    self_influence,
)
from curvlinops_plus.linalg import Dense, Structure
from curvlinops_plus.risk.find_functions import layers_of
from test.fuzz.limits import small_buffers


def rows_of(p: Problem, per_term: bool = False) -> list[Tensor]:
    """Gradients [N, R, P] of each batch, from the slow twin."""
    return [p.exact.gradients(b, v).transpose(0, 1) for b, v in p.exact.empirical(per_term)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_autograd_s(name: str) -> None:
    p = problem(name)
    risk = p.risk()
    for per_term in (False, True):
        expected = rows_of(p, per_term)
        found = [risk.space.flatten_rows(g) for g in per_example_gradients(risk, per_term=per_term)]
        assert len(found) == len(expected)
        for batch, rows in enumerate(expected):
            close(found[batch], rows if per_term else rows[:, 0], what=f"batch {batch}, per_term={per_term}")


@pytest.mark.parametrize(("name", "small"), [*((name, False) for name in NETS), *((name, True) for name in FEW)])
def test_scores_are_products_of_gradients(name: str, small: bool) -> None:
    """Also of a matrix that is not symmetric, of queries in other batches, of terms, and in the smallest pieces."""
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
            close(self_influence(Dense(A), train, per_term=True), ((T @ A) * T).sum(-1), what="self-influence of terms")


def low_rank(p: Problem, q: Tensor, rank: int) -> Tensor:
    """Rows of gradients with the largest singular values of each matrix of parameters, as the layers see it."""
    columns = p.risk().space.unflatten(q.T.clone())
    for layer in layers_of(p.risk()):
        (group,) = layer.groups
        if len(group.layout.matrix_shape) == 2:
            V = group.layout.join(columns).T.unflatten(1, group.layout.matrix_shape)
            U, S, Wh = torch.linalg.svd(V, full_matrices=False)
            S[:, rank:] = 0
            columns |= group.layout.split((U * S[:, None] @ Wh).flatten(1).T)
    return p.risk().space.flatten(columns).T


@pytest.mark.parametrize("small", [False, True], ids=["", "in pieces"])
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "grouped cnn", "attention", "tied", "language model"])
def test_low_rank_of_queries(name: str, small: bool) -> None:
    p = problem(name)
    G = torch.cat(rows_of(p))[:, 0]
    A = normal(G.shape[1], G.shape[1])
    A = A @ A.T
    P = Dense(A, Structure.PSD)
    with small_buffers() if small else nullcontext():
        close(attribution_scores(P, p.risk(), p.risk(), rank=1), low_rank(p, G @ A, 1) @ G.T)
        close(attribution_scores(P, p.risk(), p.risk(), rank=100), G @ A @ G.T)
    assert (low_rank(p, G @ A, 1) - G @ A).norm() > 0.05 * (G @ A).norm()  # something is left out
