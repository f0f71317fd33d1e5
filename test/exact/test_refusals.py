"""What the exact operators refuse, and in which words: a line for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    GGN,
    ActivationHessianLinearOperator,
    EFLinearOperator,
    EmpiricalRisk,
    FisherMCLinearOperator,
    ForwardOnly,
    GGNFactor,
    GGNFactorLinearOperator,
    GGNLinearOperator,
    Hessian,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.errors import NumericsError, UnsupportedError
from test.cases import unchanged
from test.helpers import F64, Refusal, normal, refusals, seeded
from test.middles import without_tangents

HEAD = ("0", "output", 0)
KINDS = (
    GGNLinearOperator,
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNFactorLinearOperator,
)
ROWS = (JacobianLinearOperator, TransposedJacobianLinearOperator)


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *(layers or (nn.Tanh(),)), nn.Linear(4, 2)).double()


def data(y: Any = None) -> list[Any]:
    return [
        (normal(n, 3, seed=n), torch.arange(n) % 2 if y is None else normal(n, 2)) for n in (4, 2)
    ]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(normal(6, 3), torch.arange(6) % 2), 2, **options)


def shuffled() -> DataLoader[Any]:
    return loader(shuffle=True, generator=seeded())


class Changing:
    """Random augmentation."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.rand(2, 3, dtype=F64), torch.zeros(2, 2))])


def classic(
    kind: Any, batches: Any = None, model: Any = None, loss: Any = None, **options: Any
) -> Any:
    model, batches = net() if model is None else model, data() if batches is None else batches
    params = list(model.parameters())
    if kind in ROWS:
        return kind(model, params, batches, **options)
    return kind(model, loss or nn.CrossEntropyLoss(), params, batches, **options)


def activation(which: Any, batches: Any = None, model: Any = None, loss: Any = None) -> Any:
    batches = data() if batches is None else batches
    return ActivationHessianLinearOperator(
        model or net(), loss or nn.CrossEntropyLoss(), which, batches
    )


def risk(loss: nn.Module | None = None) -> EmpiricalRisk:
    return EmpiricalRisk(net(), loss or nn.CrossEntropyLoss(), data(loss))


def called_twice() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 2)).double()


class Square(nn.Module):
    """Has no forward mode."""

    def forward(self, x: Tensor) -> Tensor:
        return without_tangents(self, x)


REFUSED: list[Refusal] = [
    # arguments
    (lambda: Hessian(risk(), block_sizes=[1]), ValueError, "must be positive and add up to 4"),
    (lambda: classic(GGNLinearOperator, block_sizes=[4]),
     ValueError, "GGNLinearOperator does not support block_sizes; HessianLinearOperator"),
    (lambda: GGN(risk(), "ggn"), ValueError, "Unknown vectors"),
    (lambda: GGN(risk(), ForwardOnly()),
     ValueError, r"GGN needs vectors .*; ForwardOnly\(\) sends none"),
    # losses
    (lambda: GGNFactor(risk(nn.HuberLoss())), UnsupportedError, "no likelihood is registered"),
    (lambda: GGN(risk(nn.GaussianNLLLoss()), "ggn_exact"),
     UnsupportedError, "GaussianNLLLoss has a Hessian in mean and variance"),
    (lambda: GGN(risk(nn.MultiMarginLoss()).with_data(data())).to_dense(),
     UnsupportedError, "loss uses multi_margin_loss, which PyTorch can't differentiate"),
    (lambda: activation(HEAD, loss=nn.CrossEntropyLoss(reduction="none")),
     UnsupportedError, "none"),
    # data
    (lambda: classic(ROWS[0], iter(loader())),
     ValueError, "JacobianLinearOperator reads the data once per product"),
    (lambda: GGN(EmpiricalRisk(net(Square()), nn.CrossEntropyLoss(), iter(data()))).to_dense(),
     RuntimeError, "jvp"),
    (lambda: classic(ROWS[0], Changing()), RuntimeError, "random augmentation"),
    (lambda: GGN(EmpiricalRisk(net(), nn.MSELoss(), Changing(), check=False),
                check_deterministic=True),
     RuntimeError, "total loss"),
    (lambda: classic(ROWS[0], [(torch.full((2, 3), torch.nan, dtype=F64), torch.zeros(2, 2))]),
     NumericsError, r"NaN or infinite entries"),
    (lambda: activation(HEAD, iter(data())), ValueError, "is an iterator"),
    (lambda: activation(HEAD, shuffled()), RuntimeError, r"same order each time \(shuffle=False\)"),
    # activations
    (lambda: activation(("9", "output", 0)),
     ValueError, "must be .module name.* one of the modules"),
    (lambda: activation(("0", "outputs", 0)), ValueError, "must be .module name"),
    (lambda: activation(("0", "output", "0")), ValueError, "must be .module name"),
    (lambda: activation(("0", "output")), ValueError, "must be .module name"),
    (lambda: activation(("1", "output", 0), model=called_twice()),
     ValueError, '"1" was called 2 times'),
    (lambda: GGN(risk()).to(torch.float32),
     NotImplementedError, r"GGN owns no tensors .*model.to\(...\)"),
    # of several classes
    *[(lambda kind=kind: classic(kind, chunk_size=0),
       ValueError, "chunk_size=0 must be an integer of at least 1") for kind in (*KINDS, *ROWS)],
    *[(lambda kind=kind: classic(kind, shuffled()),
       RuntimeError, r"another order each time \(shuffle=True\?\)")
      for kind in (*ROWS, GGNFactorLinearOperator)],
]  # fmt: skip
test_refusals = refusals(REFUSED)


def test_nothing_of_a_model_changes_when_an_operator_is_refused() -> None:
    model = called_twice()
    with unchanged(model), pytest.raises(ValueError, match="called 2 times"):
        activation(("1", "output", 0), model=model)
    assert not model[1]._forward_hooks
