"""Layers that are called in unusual ways: not in every batch, under checkpointing, keeping what
they return.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFAC, EmpiricalRisk, Exact, FullBlock, curvature
from curvlinops_plus.linalg import nearest_kronecker
from curvlinops_plus.risk import LayerBatch, find_layers
from curvlinops_plus.risk.record import sweep
from test.cases import close
from test.helpers import normal
from test.nets import tanh_net


def set_numbers(model: nn.Module) -> nn.Module:
    model.double()
    for seed, p in enumerate(model.parameters()):
        p.data = 0.7 * normal(*p.shape, seed=seed + 20)
    return model


def ggn(model: nn.Module, data: list[Any], params: list[Tensor]) -> Tensor:
    """Of the mean squared error, from one autograd call per output number."""
    total, count = torch.zeros(()), 0
    for X, y in data:
        rows = [
            torch.autograd.grad(f, params, materialize_grads=True, retain_graph=True)
            for f in model(X).flatten()
        ]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        total, count = total + 2 * J.T @ J, count + y.numel()
    return total / count


# ----------------------------------------------------------------- tied modules that are not called


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
    both = [
        (torch.tensor([0, 4, 2, 2]), normal(4, 5)),
        (normal(3, 3, seed=1), normal(3, 5, seed=2)),
    ]
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


# ----------------------------------------------------------------------------- rows of a bias alone
@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_a_bias_alone(masked: bool) -> None:
    """Its matrix is a column, the rows that it multiplies are ones; where a position does not count
    they are zero.
    """
    model = set_numbers(tanh_net(3, 4, 2))
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


# ----------------------------------------------------------- examples on a named axis, several times


class Halves(nn.Module):
    """A layer that sees both halves of each example side by side, on its second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 2)
        set_numbers(self)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 6]
        halves = torch.cat(x.chunk(2, -1)).transpose(0, 1)  # [T, 2·N, 3]
        one, two = self.body(halves).tanh().chunk(2, 1)
        return self.head((one * two).sum(0))


def test_an_axis_with_twice_as_many_rows_as_examples() -> None:
    """It is not moved to the front; with as many rows as positions they could be mixed up."""
    model, X = Halves(), normal(3, 6, 6)
    data = [(X, normal(3, 2))]
    params = [*model.body.parameters()]
    options = {"example_axis": {"body": 1}, "check": False}
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data, params, **options), FullBlock)
    close(K.to_dense(), ggn(model, data, params))
