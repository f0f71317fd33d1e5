"""Gradients of each example and scores made of them, against autodiff of one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import FEW, NETS, PROBLEMS, Problem, close, problem, unchanged
from helpers import normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CGInverseLinearOperator,
    DiagonalBlock,
    EmpiricalRisk,
    IdentityLinearOperator,
    UnsupportedError,
    attribution_scores,
    curvature,
    per_example_gradients,
    self_influence,
)
from curvlinops_plus.linalg import Dense, Structure
from curvlinops_plus.risk.find_functions import layers_of
from test.fuzz.limits import small_buffers


def rows_of(p: Problem, per_term: bool = False) -> list[Tensor]:
    """Gradients [N, R, P] of each batch, from the slow twin."""
    return [p.exact.gradients(b, v).transpose(0, 1) for b, v in p.exact.empirical(per_term)]


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(3)
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
def test_low_rank_of_queries(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix is put together again, unless functions turn out to read parameters."""
    monkeypatch.delattr("curvlinops_plus.applications.attribution._Columns.tree")
    monkeypatch.delattr("curvlinops_plus.applications.attribution._LowRankColumns.tree")
    p = problem(name)
    G = torch.cat(rows_of(p))[:, 0]
    A = normal(G.shape[1], G.shape[1])
    A = A @ A.T
    P = Dense(A, Structure.PSD)
    with small_buffers() if small else nullcontext():
        close(attribution_scores(P, p.risk(), p.risk(), rank=1), low_rank(p, G @ A, 1) @ G.T)
        close(attribution_scores(P, p.risk(), p.risk(), rank=100), G @ A @ G.T)
    assert (low_rank(p, G @ A, 1) - G @ A).norm() > 0.05 * (G @ A).norm()  # something is left out


def small_net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, normal(12, 4), torch.arange(12) % 3


def plain_gradients(model: nn.Module, X: Tensor, y: Tensor, loss: Any = None) -> Tensor:
    """One example at a time."""
    rows = []
    for x, t in zip(X.split(1), y.split(1), strict=True):
        value = (loss or nn.functional.cross_entropy)(model(x), t)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, [*model.parameters()])]))
    return torch.stack(rows)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock])
def test_through_inverses_of_curvature(approximation: Any) -> None:
    model, X, y = small_net()
    train = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:8], y[:8]), (X[8:], y[8:])])
    P = curvature(train, approximation).inverse(damping=0.1)
    G = plain_gradients(model, X, y)
    expected = G @ P.to_dense() @ G.T
    close(attribution_scores(P, train.with_data([(X[:3], y[:3]), (X[3:5], y[3:5])]), train), expected[:5])
    close(self_influence(P, train), expected.diagonal())


def test_through_conjugate_gradients() -> None:
    model, X, y = small_net()
    train = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:8], y[:8]), (X[8:], y[8:])])
    H = GGN(train).shift(0.1)
    P = CGInverseLinearOperator(H, tolerance=1e-12)
    G = plain_gradients(model, X, y)
    expected = G @ torch.linalg.inv(H.to_dense()) @ G.T
    close(attribution_scores(P, train, train), expected, rtol=1e-8)
    close(self_influence(P, train), expected.diagonal(), rtol=1e-8)


def test_matrix_on_parameters_in_another_order() -> None:
    """Names say which parameter is meant; a matrix without names has the order of the queries' risk."""
    model, X, y = small_net()
    own = dict(model.named_parameters())
    data, turned = [(X, y)], dict(reversed(own.items()))
    risk, other = (EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params) for params in (own, turned))
    G = plain_gradients(model, X, y)
    A = normal(len(G.T), len(G.T))
    expected = G @ A @ G.T
    named = Dense(A, in_space=risk.space, out_space=risk.space)
    close(attribution_scores(named, other, other), expected)
    close(attribution_scores(named, risk, other), expected)
    close(self_influence(named, other), expected.diagonal())
    close(attribution_scores(Dense(A), risk, other), expected)


def test_losses_are_not_reduced() -> None:
    """Class weights and ignored targets count, divisors and the number of examples don't."""
    model, X, y = small_net()
    y[5] = -100
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    G = plain_gradients(model, X, y, lambda f, t: nn.functional.cross_entropy(f, t, weight, reduction="sum"))
    for reduction in ("mean", "sum"):
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(weight, reduction=reduction), [(X, y)], num_data=1000)
        (gradients,) = per_example_gradients(risk)
        close(risk.space.flatten_rows(gradients), G)
        close(attribution_scores(IdentityLinearOperator(risk.space, dtype=X.dtype), risk, risk), G @ G.T)


class TwoHeads(nn.Module):
    """Classes and numbers, of which only the second batch has a target of each."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.numbers = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"c": self.classes(x), "n": self.numbers(x)}


@pytest.mark.parametrize("weights", [(1.0, 0.5), (0.25, 3.0)])
def test_several_losses_add_up_to_the_gradient(weights: tuple[float, float]) -> None:
    torch.manual_seed(0)
    model, X, y = TwoHeads().double(), normal(6, 4), torch.tensor([0, 1, 2, 0, -100, 1])
    numbers = normal(6, 2, seed=1)
    losses = {"c": (nn.CrossEntropyLoss(), weights[0]), "n": (nn.MSELoss(), weights[1])}
    data = [(X[at], {"c": y[at], "n": numbers[at]}) for at in (slice(0, 2), slice(2, 6))]
    risk = EmpiricalRisk(model, losses, data)
    rows = torch.cat([risk.space.flatten_rows(g) for g in per_example_gradients(risk)])
    c = 1 / 5  # the first mean is over five targets that are not ignored
    close(c * rows.sum(0), risk.space.flatten(risk.gradient()))
    close(attribution_scores(IdentityLinearOperator(risk.space, dtype=X.dtype), risk, risk), rows @ rows.T)
    with pytest.raises(UnsupportedError, match=r"per_term=True is about the terms of one loss.*Make an EmpiricalRisk"):
        next(per_example_gradients(risk, per_term=True))


def test_a_mask_of_statistics_does_not_matter() -> None:
    p = problem("language model")
    masked = p.risk(mask=lambda X, y: torch.zeros_like(X["input_ids"] if isinstance(X, dict) else X, dtype=torch.bool))
    for found, rows in zip(per_example_gradients(masked), rows_of(p), strict=True):
        close(masked.space.flatten_rows(found), rows[:, 0])


class Drawing(Dataset[Any]):
    """Data with random numbers of a generator of their own and of the global one."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(4, dtype=torch.float64), index % 3


@pytest.mark.parametrize("replacement", [False, True])
def test_nothing_is_changed_between_batches(replacement: bool) -> None:
    """What the caller draws between batches is what it would draw without them, and the batches are those of a loop."""
    model, _, _ = small_net()
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(Drawing(), replacement=replacement, num_samples=40, generator=generator)  # type: ignore[arg-type]
    loader = DataLoader(Drawing(), batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    state, torch_state = generator.get_state(), torch.get_rng_state()
    batches = [*loader]
    generator.set_state(state)
    torch.set_rng_state(torch_state)
    draws = [torch.rand(1) for _ in batches]
    torch.set_rng_state(torch_state)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), loader, check=False)
    for batch, draw, gradients in zip(batches, draws, per_example_gradients(risk), strict=True):
        assert torch.equal(torch.rand(1), draw)
        assert torch.equal(generator.get_state(), state)
        assert torch.is_grad_enabled()
        assert not any(m._forward_hooks for m in model.modules())
        close(risk.space.flatten_rows(gradients), plain_gradients(model, *batch))


class ByFunction(nn.Module):
    """Later batches read the first layer's weight by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(h * (self.first.bias + self.head.weight.sum() if x.shape[1] and x[0, 0] > 50 else 1.0))


def test_parameters_that_functions_read_in_a_later_batch() -> None:
    torch.manual_seed(0)
    model, X, y = ByFunction().double(), normal(9, 4), torch.arange(9) % 3
    X[6:, 0] = 100.0
    data = [(X[:3], y[:3]), (X[3:6], y[3:6]), (X[6:], y[6:])]
    G = plain_gradients(model, X, y)
    A = normal(len(G.T), len(G.T))
    for rank in (None, 100):
        train = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
        queries = EmpiricalRisk(model, nn.CrossEntropyLoss(), data[:1])
        close(attribution_scores(Dense(A), queries, train, rank=rank), G[:3] @ A @ G.T)
    found = torch.cat([train.space.flatten_rows(g) for g in per_example_gradients(queries.with_data(data))])
    close(found, G)


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
    close(attribution_scores(P, risk, risk.with_data(iter([(X[:3], y[:3]), (X[3:], y[3:])]))), rows @ rows.T)


def test_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    model, X, y = small_net()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], progressbar=True)
    attribution_scores(IdentityLinearOperator(risk.space, dtype=X.dtype), risk, risk)
    shown = capfd.readouterr().err
    assert "gradients of examples" in shown
    assert "scores of training examples" in shown


def test_gpt2_per_sequence_and_token_are_autograd_s() -> None:
    """Tied embedding, positions and head, attention, norms and Conv1D of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=19, n_positions=6, n_embd=8, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(19, (5, 6), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids[:3], "labels": ids[:3]}, {"input_ids": ids[3:], "labels": ids[3:]}]
    train = EmpiricalRisk(model, nn.CrossEntropyLoss(), batches)
    params = [*model.parameters()]

    def rows(tokens: bool) -> Iterator[Tensor]:
        for one in ids:
            logits = model(input_ids=one[None]).logits[0, :-1]
            losses = nn.functional.cross_entropy(logits.double(), one[1:], reduction="none")
            for value in losses if tokens else [losses.sum()]:
                yield torch.cat([g.flatten() for g in torch.autograd.grad(value, params, retain_graph=True)])

    G, T = torch.stack([*rows(False)]), torch.stack([*rows(True)])
    P = IdentityLinearOperator(train.space, dtype=torch.float64)
    queries = train.with_data(batches[:1])
    close(attribution_scores(P, queries, train), G[:3] @ G.T, rtol=1e-6)
    close(attribution_scores(P, queries, train, per_term=True), (G[:3] @ T.T).view(3, 5, 5), rtol=1e-6)
    close(self_influence(P, train), G.square().sum(1), rtol=1e-6)


def test_refusals() -> None:
    model, X, y = small_net()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
    P = IdentityLinearOperator(risk.space, dtype=X.dtype)
    with pytest.raises(TypeError, match=r"P is a Tensor; expected a LinearOperator such as K.inverse.*Dense"):
        self_influence(X, risk)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`queries` is a list; expected an EmpiricalRisk.*with_data"):
        attribution_scores(P, [(X, y)], risk)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"per_example_gradients takes an EmpiricalRisk"):
        per_example_gradients(model)  # type: ignore[arg-type]
    other = EmpiricalRisk(copy.deepcopy(model), nn.CrossEntropyLoss(), [(X, y)])
    with pytest.raises(ValueError, match=r"different models or parameters.*with_data"):
        attribution_scores(P, other, risk)
    moved = {key: p.detach() + 1 for key, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"at different values of the parameters"):
        attribution_scores(P, EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], moved), risk)
    with pytest.raises(ValueError, match=r"5 x 5.* is no matrix on the 43 parameters"):
        self_influence(Dense(torch.eye(5, dtype=X.dtype)), risk)
    with pytest.raises(ValueError, match=r"rank=0 must be at least 1"):
        attribution_scores(P, risk, risk, rank=0)
    with pytest.raises(UnsupportedError, match=r"likelihood"):
        next(per_example_gradients(EmpiricalRisk(model, lambda f, t: f.sum() ** 2, [(X, y)])))
    shared = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
    shared.processes = SimpleNamespace(world=2)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"this risk is shared by 2 processes.*without `processes`"):
        next(per_example_gradients(shared))


def test_terms_of_different_numbers_are_refused() -> None:
    head = nn.Linear(2, 3).double()
    model = nn.Sequential(head, MoveClasses())
    data = [(normal(2, T, 2), torch.zeros(2, T, dtype=torch.long)) for T in (4, 3)]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    P = IdentityLinearOperator(risk.space, dtype=torch.float64)
    assert [g["0.bias"].shape for g in per_example_gradients(risk, per_term=True)] == [(2, 4, 3), (2, 3, 3)]
    with pytest.raises(ValueError, match=r"there are batches with 4 and 3. Pad"):
        attribution_scores(P, risk, risk, per_term=True)
    with pytest.raises(ValueError, match=r"there are batches with 4 and 3. Pad"):
        self_influence(P, risk, per_term=True)
    assert attribution_scores(P, risk, risk).shape == (4, 4)


class MoveClasses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)
