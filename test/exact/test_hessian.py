"""Hessians and other matrices whose derivatives are zero; blocks; losses that read parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    EmpiricalRisk,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    Jacobian,
)
from curvlinops_plus.errors import UnsupportedError
from test.cases import close, unchanged
from test.helpers import F64, normal
from test.nets import tanh_net


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return tanh_net(3, 4, 3).double()


def data() -> list[Any]:
    return [(normal(n, 3, seed=n), torch.arange(n) % 3) for n in (4, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_derivatives_that_are_zero(dtype: torch.dtype) -> None:
    """A norm takes the bias in front of it away; what rounding leaves is no sign of a wrong
    backward pass.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3), nn.Tanh()).to(dtype)
    batches = [(normal(2, 2, 5, 5).to(dtype), normal(2, 3, 3, 3).to(dtype))]
    risk, v = (
        EmpiricalRisk(model, nn.MSELoss(), batches, [model[0].bias]),
        torch.ones(3, dtype=dtype),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for A in (GGN(risk), Hessian(risk), Jacobian(risk)):
            assert float((A @ v).norm()) < 100 * torch.finfo(dtype).eps
            assert float(A.to_dense().norm()) < 100 * torch.finfo(dtype).eps


def test_parameters_that_nothing_reads() -> None:
    model = nn.Linear(4, 4).double().requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=F64)))
    risk = EmpiricalRisk(
        model, nn.MSELoss(), [(normal(3, 4), normal(3, 4, seed=1))], [model.unused]
    )
    for kind in (GGN, Jacobian, Hessian):
        with pytest.raises(UnsupportedError, match="does not depend on any of the parameters"):
            kind(risk).to_dense()


class SumOfOutputs(nn.Module):
    """A loss that is linear in the output: the bias of the last layer has a constant gradient."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sum() / len(f)


@pytest.mark.parametrize("block_sizes", [None, [2, 2], [1, 1, 1, 1], [3, 1]])
def test_blocks_of_which_one_is_zero(block_sizes: list[int] | None) -> None:
    model, batches = net(), data()
    params = list(model.parameters())
    H = HessianLinearOperator(model, SumOfOutputs(), params, batches, block_sizes=block_sizes)

    def loss(*values: Tensor) -> Tensor:
        call = torch.func.functional_call
        tree = dict(zip(dict(model.named_parameters()), values, strict=True))
        return sum(call(model, tree, X).sum() for X, _ in batches) / sum(len(X) for X, _ in batches)

    rows = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in params))
    sizes, owner = block_sizes or [4], []
    for block, size in enumerate(sizes):
        owner += [block] * size
    whole = [
        [
            (h if owner[i] == owner[j] else torch.zeros_like(h)).reshape(params[i].numel(), -1)
            for j, h in enumerate(row)
        ]
        for i, row in enumerate(rows)
    ]
    expected, V = torch.cat([torch.cat(row, 1) for row in whole]), normal(31, 2)
    close(H.to_dense(), expected)
    close(H @ V, expected @ V)
    for _ in range(2):  # a graph serves all blocks before it is freed
        close(H @ V[:, 0], expected @ V[:, 0])
    assert not expected[-3:, -3:].any()


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_a_loss_that_reads_parameters(kind: Any) -> None:
    """Past the model they are not those that are replaced."""
    model = net()
    params, cross = list(model.parameters()), nn.CrossEntropyLoss()

    def inside(f: Tensor, y: Tensor) -> Tensor:
        return cross(f, y) + sum(p.square().sum() for p in model.parameters()) / 2

    def past(f: Tensor, y: Tensor) -> Tensor:
        return cross(f, y) + sum(p.square().sum() for p in params) / 2

    A = kind(model, past, params, data())
    with (
        unchanged(model),
        pytest.raises(ValueError, match=r"parameters \['0.weight', '0.bias'.*from elsewhere"),
    ):
        A.gradient_and_loss()
    if kind is HessianLinearOperator:
        with unchanged(model), pytest.raises(ValueError, match="from elsewhere"):
            A @ torch.ones(31, dtype=F64)
        H = kind(model, cross, params, data()).to_dense()
        close(kind(model, inside, params, data()).to_dense(), H + torch.eye(31, dtype=F64))
    g, loss = kind(model, inside, params, data()).gradient_and_loss()
    plain, without = kind(model, cross, params, data()).gradient_and_loss()
    close(loss, without + sum(p.detach().square().sum() for p in params) / 2)
    for one, two, p in zip(g, plain, params, strict=True):
        close(one, two + p.detach())
