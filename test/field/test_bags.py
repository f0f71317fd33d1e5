"""Exact operators of bags of embeddings, as recommenders have them: PyTorch differentiates them once.

The truth is a product with a matrix of counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import GGN, EmpiricalRisk, Hessian, Jacobian
from test.cases import close
from test.helpers import normal

ROWS = 6
TOKENS = torch.tensor([1, 4, 4, 0, 2, 5, 2, 3])
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty
BAG = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3])
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum with padding": {"mode": "sum", "padding_idx": 2},
    "mean with padding": {"mode": "mean", "padding_idx": -4},
    "max with padding": {"mode": "max", "padding_idx": 4},
    "with the last offset": {"mode": "mean", "include_last_offset": True},
}


class Recommender(nn.Module):
    """Dot products of a dense part and a bag."""

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        self.dense, self.top = nn.Linear(2, 3), nn.Linear(4, 2)

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        d = torch.tanh(self.dense(X["dense"]))
        b = self.bag(X["tokens"], X["offsets"])
        return self.top(torch.cat([(d * b).sum(1, keepdim=True), torch.tanh(b)], 1))


class Counted(nn.Module):
    """The same bags by a matrix of counts, or of the places of the largest."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.weight = bag.weight
        kept = torch.ones(len(TOKENS), dtype=torch.bool)
        if bag.padding_idx is not None:
            kept = bag.padding_idx % ROWS != TOKENS
        counts = torch.zeros(4, ROWS).double()
        for token, place in zip(TOKENS[kept], BAG[kept], strict=True):
            counts[place, token] += 1
        self.counts = counts
        if bag.mode == "mean":
            self.counts = counts / counts.sum(1, keepdim=True).clamp(min=1)
        self.largest = bag.mode == "max"

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        if not self.largest:
            return self.counts @ self.weight
        rows = torch.where(self.counts[:, :, None] > 0, self.weight, -torch.inf).amax(1)
        return torch.where(rows.isfinite(), rows, 0.0)


def problem(options: dict[str, Any]) -> tuple[nn.Module, nn.Module, list[Any]]:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(ROWS, 3, **options).double()
    model = Recommender(bag).double()
    twin = Recommender(Counted(bag))
    twin.dense, twin.top = model.dense, model.top
    offsets = OFFSETS
    if options.get("include_last_offset"):
        offsets = torch.cat([OFFSETS, torch.tensor([len(TOKENS)])])
    X = {"tokens": TOKENS, "offsets": offsets, "dense": normal(4, 2, seed=1)}
    return model, twin, [(X, torch.tensor([0, 1, 1, 0]))]


@pytest.mark.parametrize("name", OPTIONS)
def test_exact_operators_of_bags(name: str) -> None:
    model, twin, data = problem(OPTIONS[name])
    (X, y) = data[0]
    f = twin(X)
    names = [*dict(model.named_parameters())]
    params = [dict(twin.named_parameters())[n] for n in names]

    def rows(numbers: Tensor) -> Tensor:
        found = []
        for number in numbers.flatten():
            back = torch.autograd.grad(
                number, params, create_graph=True, materialize_grads=True, retain_graph=True
            )
            found.append(torch.cat([g.flatten() for g in back]))
        return torch.stack(found)

    J = rows(f)
    p = f.softmax(1).detach()
    H = torch.block_diag(*[torch.diag(q) - torch.outer(q, q) for q in p]) / 4
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, batch_size_fn=lambda X: 4)
    close(Jacobian(risk).to_dense(), J.detach())
    close(GGN(risk).to_dense(), (J.T @ H @ J).detach())
    close(Hessian(risk).to_dense(), rows(rows(nn.functional.cross_entropy(f, y)[None])[0]).detach())


def test_weights_of_samples_and_rows_of_one_length() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(ROWS, 2, mode="sum")
            self.gate = nn.Linear(3, 3)

        def forward(self, X: dict[str, Tensor]) -> Tensor:
            weights = self.gate(X["x"]).sigmoid()
            return self.bag(X["tokens"], per_sample_weights=weights).tanh()

    torch.manual_seed(0)
    model = Weighted().double()
    X = {"x": normal(4, 3, seed=1), "tokens": TOKENS[:4, None] + torch.arange(3)}
    X["tokens"] = X["tokens"] % ROWS
    y = normal(4, 2, seed=2)

    def loss(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weights = (X["x"] @ weight.T + bias).sigmoid()
        return ((weights[..., None] * table[X["tokens"]]).sum(1).tanh() - y).square().mean()

    params = (model.bag.weight, model.gate.weight, model.gate.bias)
    blocks = torch.autograd.functional.hessian(loss, params)
    expected = torch.cat(
        [
            torch.cat([b.reshape(p.numel(), -1) for b in row], 1)
            for p, row in zip(params, blocks, strict=True)
        ]
    )
    close(Hessian(EmpiricalRisk(model, nn.MSELoss(), [(X, y)])).to_dense(), expected)
