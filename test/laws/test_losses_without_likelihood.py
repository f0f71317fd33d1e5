"""Empirical Fisher matrices of losses that no likelihood is registered for, against gradients of
single examples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    BlockwiseLinearOperator,
    DiagonalBlock,
    EFLinearOperator,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    KFACLinearOperator,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from test.cases import close
from test.nets import tanh_net

F64 = torch.float64


class Focal(nn.Module):
    """As people write it, with `reduction` or without."""

    def __init__(self, gamma: float = 2.0, **options: str) -> None:
        super().__init__()
        self.gamma = gamma
        vars(self).update(options)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        entropy = nn.functional.cross_entropy(f, y, reduction="none")
        terms = (1 - torch.exp(-entropy)) ** self.gamma * entropy
        return terms.sum() if getattr(self, "reduction", "mean") == "sum" else terms.mean()


LOSSES = {
    "smooth L1": nn.SmoothL1Loss(),
    "sum": nn.HuberLoss(reduction="sum", delta=0.3),
    "function": nn.functional.smooth_l1_loss,
    "focal": Focal(),
    "focal, sum": Focal(reduction="sum"),
}


def problem(loss: Any) -> tuple[nn.Module, list[Any], Tensor, int]:
    """A network, data in batches, and gradients of each example's loss; and what "mean" divides
    by.
    """
    torch.manual_seed(0)
    model = tanh_net(3, 4, 2).double()
    X = torch.randn(5, 3, dtype=F64)
    Y = torch.randint(2, (5,)) if isinstance(loss, Focal) else 2 * torch.randn(5, 2, dtype=F64)
    values = [loss(model(X[n : n + 1]), Y[n : n + 1]) for n in range(5)]
    grads = [
        torch.cat([g.flatten() for g in torch.autograd.grad(value, [*model.parameters()])])
        for value in values
    ]
    divisor = 1 if getattr(loss, "reduction", "mean") == "sum" else 5
    return model, [(X[:3], Y[:3]), (X[3:], Y[3:])], torch.stack(grads), divisor


@pytest.mark.parametrize("name", LOSSES)
def test_empirical_fisher(name: str) -> None:
    loss = LOSSES[name]
    model, data, grads, divisor = problem(loss)
    expected = grads.T @ grads / divisor
    params, blocks = (
        list(model.parameters()),
        torch.block_diag(torch.ones(16, 16), torch.ones(10, 10)).to(F64),
    )
    close(EFLinearOperator(model, loss, params, data).to_dense(), expected)
    risk = EmpiricalRisk(model, loss, data)
    close(curvature(risk, FullBlock, vectors=Empirical()).to_dense(), expected * blocks)
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), expected.diagonal())
    K = curvature(risk, KFAC, vectors=Empirical())
    classic = KFACLinearOperator(
        model, loss, params, data, fisher_type="empirical", separate_weight_and_bias=False
    )
    close(classic.to_dense(), K.to_dense())
    with pytest.raises(
        UnsupportedError,
        match=r"no likelihood is registered(.|\n)*Empirical\(\)|@register_likelihood",
    ):
        curvature(risk, KFAC)


def test_states_and_training() -> None:
    loss = LOSSES["focal"]
    model, data, _, _ = problem(loss)
    K = curvature(EmpiricalRisk(model, loss, data), KFAC, vectors=Empirical())
    loaded = BlockwiseLinearOperator.from_state_dict(K.state_dict(), model, None, loss=loss)
    assert torch.equal(loaded.to_dense(), K.to_dense())
    optimizer, values = KFACOptimizer(model, loss, lr=0.3, damping=0.1, vectors=Empirical()), []
    for _ in range(5):
        for X, y in data:
            optimizer.zero_grad()
            value = loss(model(X), y)
            value.backward()
            optimizer.step()
            values.append(value.item())
    assert values[-2:] < [0.95 * value for value in values[:2]]
