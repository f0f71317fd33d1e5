"""Tables that are computed inside of activation checkpointing, from parameters that are tracked and
frozen: their graph runs parts of the model again, which have to be what was recorded.

Expected are squares of the gradients of single examples, by autograd of the model with parameters
that require one, without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import DiagonalBlock, Empirical, EmpiricalRisk, curvature
from test.cases import close
from test.helpers import normal

#: From a parameter and an input [N, T, d] to what a layer reads.
TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mean of squares": lambda w, x: w.square().mean() * x,
    "a gate": lambda w, x: w.sigmoid() * x,
    "twice": lambda w, x: (x * w).sin() + w.exp() * x,
}


class Checkpointed(nn.Module):
    def __init__(self, table: str, is_checkpointed: bool) -> None:
        super().__init__()
        self.table = TABLES[table]
        self.is_checkpointed = is_checkpointed
        self.w = nn.Parameter(normal(3, seed=1))
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 2)
        self.double()

    def block(self, x: Tensor) -> Tensor:
        return self.inner(self.table(self.w, x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed and torch.is_grad_enabled():
            h = checkpoint(self.block, x, use_reentrant=False)
        else:
            h = self.block(x)
        return self.outer(h).mean(1)


@pytest.mark.parametrize("frozen", [["w"], ["w", "inner.weight"], []])
@pytest.mark.parametrize("table", TABLES)
def test_tables_of_frozen_parameters(table: str, frozen: list[str]) -> None:
    X, y = normal(4, 2, 3), torch.tensor([0, 1, 1, 0])
    torch.manual_seed(0)
    model = Checkpointed(table, True)
    plain = Checkpointed(table, False)
    plain.load_state_dict(model.state_dict())
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    params: Any = dict(model.named_parameters())
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], params)
    K = curvature(risk, DiagonalBlock, vectors=Empirical())
    rows = []
    for x, target in zip(X, y):
        loss = nn.CrossEntropyLoss()(plain(x[None]), target[None])
        gradient = torch.autograd.grad(loss, [*plain.parameters()])
        rows.append(torch.cat([g.flatten() for g in gradient]))
    close(K.diagonal(), torch.stack(rows).square().mean(0))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == frozen
