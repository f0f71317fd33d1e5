"""Parameters that nothing reads beside others that are read, such as a mask token of pretraining:
training leaves them alone. And those that only seem so, as their gradients are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus import (
    DiagonalBlock,
    EmpiricalRisk,
    KFACOptimizer,
    KFACPreconditioner,
    curvature,
)
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning")


class Tokens(nn.Module):
    """Positions of rows behind a class token, and a token of pretraining."""

    def __init__(self, dropout: float, sampled: bool) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 4))
        self.mask = nn.Parameter(torch.randn(1, 4))
        self.positions = nn.Parameter(torch.randn(1, 4, 4))
        self.patches = nn.Linear(3, 4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 2)
        self.sampled = sampled

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.cls.expand(len(x), -1, -1), self.patches(x)], 1)
        positions = self.positions
        if self.sampled:
            positions = nn.functional.interpolate(positions.mT, size=4, mode="linear").mT
        return self.head(self.drop(torch.tanh(h + positions))[:, 0])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_what_nothing_reads_does_not_move(sampled: bool, decay: float) -> None:
    torch.manual_seed(0)
    model = Tokens(0.1, sampled).double()
    mask = model.mask.detach().clone()
    cls = model.cls.detach().clone()
    loss = nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=0.1, weight_decay=decay)
    x = normal(8, 3, 3, seed=1)
    y = torch.arange(8) % 2
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model.mask, mask)
    assert not torch.equal(model.cls, cls)
    assert optimizer.last_step.left_alone == ["mask"]
    assert optimizer.curvature.withdrawn == []


def test_what_nothing_reads_has_no_curvature() -> None:
    torch.manual_seed(0)
    model = Tokens(0.0, False).double().eval()
    data = [(normal(5, 3, 3, seed=1), normal(5, 2, seed=2))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), DiagonalBlock)
    rows = []
    for number in model(data[0][0]).flatten():
        back = torch.autograd.grad(
            number, [*model.parameters()], retain_graph=True, materialize_grads=True
        )
        rows.append(torch.cat([g.flatten() for g in back]))
    close(K.diagonal(), torch.stack(rows).square().sum(0) * 2 / 10)


def test_a_preconditioner_leaves_no_gradient_where_there_was_none() -> None:
    torch.manual_seed(0)
    model = Tokens(0.1, False).double()
    loss = nn.CrossEntropyLoss()
    preconditioner = KFACPreconditioner(model, loss)
    loss(model(normal(8, 3, 3, seed=1)), torch.arange(8) % 2).backward()
    before = [p.grad is None for p in model.parameters()]
    preconditioner.step()
    assert [p.grad is None for p in model.parameters()] == before
    assert model.cls.grad is not None


#: Name to a layer that is never called, and the function that reads its parameters.
FUNCTIONS: dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor]]] = {
    "linear": (nn.Linear(3, 4), lambda m, x: functional.linear(x, m.weight, m.bias)),
    "matmul": (nn.Linear(3, 4, bias=False), lambda m, x: x @ m.weight.T),
    "conv": (nn.Conv1d(1, 4, 3), lambda m, x: functional.conv1d(x[:, None], m.weight).flatten(1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_functions_read_before_a_head_that_starts_at_zero(name: str) -> None:
    """Gradients of zero don't tell that something else than the layer reads its parameters."""
    torch.manual_seed(0)
    layer, read = FUNCTIONS[name]
    head = nn.Linear(4, 2)
    nn.init.zeros_(head.weight)
    model = Written(lambda m, x: m.head(read(m.layer, x).tanh()), layer=layer, head=head).double()
    X, Y = normal(5, 3, seed=1), normal(5, 2, seed=2)
    params = [p for key, p in model.named_parameters() if (name, key) != ("conv", "layer.bias")]
    risk = EmpiricalRisk(model, nn.MSELoss(reduction="sum"), [(X, Y)], params)
    K = curvature(risk, DiagonalBlock)
    assert [*K.blocks] == ["layer", "head"]
    assert not K.blocks["layer"].diagonal().any()
    h = read(layer, X).tanh()
    close(K.blocks["head"].trace, 2 * 2 * (h.square().sum() + len(X)))


def test_a_layer_that_nothing_reads_is_still_refused() -> None:
    model = Written(lambda m, x: m.head(x), layer=nn.Linear(3, 4), head=nn.Linear(3, 2)).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), [(normal(5, 3), normal(5, 2))])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'layer' \(Linear\) was never called in any batch"):
            curvature(risk, DiagonalBlock)
