"""Layers that are called in unusual ways: not in every batch, under checkpointing, keeping what they return."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import close, unchanged
from helpers import normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureWarning,
    EmpiricalRisk,
    Exact,
    FullBlock,
    curvature,
)
from curvlinops_plus.linalg import nearest_kronecker
from curvlinops_plus.risk import LayerBatch, find_layers
from curvlinops_plus.risk import sweep as sweep_file
from curvlinops_plus.risk.sweep import sweep


def set_numbers(model: nn.Module) -> nn.Module:
    model.double()
    for seed, p in enumerate(model.parameters()):
        p.data = 0.7 * normal(*p.shape, seed=seed + 20)
    return model


def ggn(model: nn.Module, data: list[Any], params: list[Tensor]) -> Tensor:
    """Of the mean squared error, from one autograd call per output number."""
    total, count = torch.zeros(()), 0
    for X, y in data:
        rows = [torch.autograd.grad(f, params, materialize_grads=True, retain_graph=True) for f in model(X).flatten()]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        total, count = total + 2 * J.T @ J, count + y.numel()
    return total / count


# ------------------------------------------------------------------------------------- tied modules that are not called


class Autoencoder(nn.Module):
    """A weight in two roles, of which a batch may use one alone."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        set_numbers(self)
        if tied:
            self.head.weight = self.table.weight
        else:
            self.head.weight.data = self.table.weight.data.clone()

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) if not x.is_floating_point() else x
        return self.head(h)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_role_that_is_not_called_in_a_batch(order: tuple[int, int]) -> None:
    both = [(torch.tensor([0, 4, 2, 2]), normal(4, 5)), (normal(3, 3, seed=1), normal(3, 5, seed=2))]
    data, tied, apart = [both[k] for k in order], Autoencoder(True), Autoencoder(False)
    exact = ggn(tied, data, list(tied.parameters()))
    close(curvature(EmpiricalRisk(tied, nn.MSELoss(), data), FullBlock).to_dense(), exact)
    two: Any = curvature(EmpiricalRisk(apart, nn.MSELoss(), data), KFAC).blocks
    block: Any = curvature(EmpiricalRisk(tied, nn.MSELoss(), data), KFAC).blocks["table"]
    head = (two["head"].G.to_dense(), two["head"].A.to_dense())
    # The table's matrix is the transpose of its parameter.
    table = (two["table"].A.to_dense(), two["table"].G.to_dense())
    for pair in ([head, table], [table, head]):
        G, A = nearest_kronecker(pair)
        close(torch.kron(block.G.to_dense(), block.A.to_dense()), torch.kron(G, A), 1e-6)


# ------------------------------------------------------------------------------------------------- rows of a bias alone
@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_a_bias_alone(masked: bool) -> None:
    """Its matrix is a column, the rows that it multiplies are ones; where a position does not count they are zero."""
    model = set_numbers(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    data, keep = [(normal(5, 6, 3), normal(5, 6, 2))], normal(5, 6, seed=4) > 0
    options: dict[str, Any] = {"mask": lambda X, y: keep} if masked else {}
    biases = [m.bias for m in model if isinstance(m, nn.Linear)]
    expected = keep.double() if masked else torch.ones(5, 6, dtype=torch.float64)
    seen = []

    def consume(batch: LayerBatch) -> None:
        seen.append(batch.layer.name)
        assert torch.equal(batch.inputs[..., 0], expected)  # type: ignore[index]
        total, count = batch.input_gram()
        close(total, expected.sum().reshape(1, 1))
        assert float(count) == float(expected.sum())
        close(batch.mean_inputs(), expected.amax(1)[:, None])
        close(batch.per_example_grads[..., 0], (batch.grads * expected[..., None]).sum(2))

    risk = EmpiricalRisk(model, nn.MSELoss(), data, biases, **options)
    sweep(risk, find_layers(risk.model, risk.params), Exact(), consume)
    assert set(seen) == {"0", "2"}


# ------------------------------------------------------------------------------------- attention under checkpointing
class Attending(nn.Module):
    def __init__(self, checkpointed: bool, batch_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.last = nn.Linear(4, 2)
        self.checkpointed, self.batch_first = checkpointed, batch_first
        set_numbers(self)

    def segment(self, x: Tensor) -> Tensor:
        h = self.first(x) if self.batch_first else self.first(x).transpose(0, 1)
        h = self.attention(h, h, h, need_weights=False)[0]
        return (h if self.batch_first else h.transpose(0, 1)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.segment, x, use_reentrant=False) if self.checkpointed else self.segment(x)
        return self.last(h)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("at_once", [1, 100])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, FullBlock])
def test_attention_inside_activation_checkpointing(
    approximation: Any, at_once: int, frozen: bool, batch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_file, "_vectors_at_once", lambda recorder, number: min(number, at_once))
    data, found = [(normal(3, 5, 4), normal(3, 5, 2)), (normal(2, 5, 4, seed=1), normal(2, 5, 2, seed=2))], []
    for checkpointed in (True, False):
        model = Attending(checkpointed, batch_first).requires_grad_(not frozen)
        params = list(model.parameters())
        with unchanged(model), warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvatureWarning)
            risk = EmpiricalRisk(model, nn.MSELoss(), data, params, example_axis={"last": 0, "first": 0})
            found.append(curvature(risk, approximation).to_dense())
    close(found[0], found[1], 1e-12)
    if approximation is FullBlock and not frozen:
        exact, start = ggn(model, data, params), 0
        for p in params[:2]:  # the weight and the bias of the first layer are one block, in this order
            start += p.numel()
        close(found[0][:start, :start], exact[:start, :start])
