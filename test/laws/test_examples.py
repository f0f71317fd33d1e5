"""Rows that are not examples: right where they can be, refused by name where they can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import close
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    UnsupportedError,
    curvature,
)


class Positions(nn.Module):
    """A token and a position embedding; the latter sees [T] or [1, T] and knows no examples."""

    def __init__(self, leading: bool) -> None:
        super().__init__()
        self.token, self.position, self.leading = nn.Embedding(7, 3), nn.Embedding(8, 3), leading
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1])
        return self.head(torch.tanh(self.token(x) + self.position(t[None] if self.leading else t)))


class Buffered(nn.Module):
    """A linear layer that is applied to something fixed, of [T, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(5, 3), nn.Linear(3, 2)
        self.register_buffer("fixed", torch.linspace(-1, 1, 20).view(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x[:, :, None] + self.code(self.fixed)))


class TimeMajor(nn.Module):
    """Flattens positions before examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        N, T, d = x.shape
        h = self.first(x.transpose(0, 1).reshape(T * N, d))
        return self.last(torch.tanh(h)).view(T, N, 2).transpose(0, 1)


class Pick(nn.Module):
    """A row of a table that all examples read."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(1, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(x * self.e(torch.zeros(1, dtype=torch.long))[0]))


def risk(model: nn.Module, X: Tensor) -> EmpiricalRisk:
    shape = model.double()(X).shape
    return EmpiricalRisk(model, nn.MSELoss(), [(X, torch.zeros(shape).double())])


@pytest.mark.parametrize("approximation", [DiagonalBlock, EKFAC])
@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")
def test_rows_that_are_positions(N: int, approximation: Any) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(7, (N, 4))
    for model, X in (
        (Positions(leading=False), tokens),
        (Buffered(), torch.randn(N, 4).double()),
        (TimeMajor(), torch.randn(N, 3, 3).double()),
        (Positions(leading=True), tokens),
        (Pick(), torch.randn(N, 3).double()),
    ):
        r = risk(model, X)
        # With four examples an axis has as many numbers as there are examples, and could be theirs.
        try:
            K = curvature(r, approximation)
        except UnsupportedError:
            assert (N, type(model)) == (4, TimeMajor)
        else:
            close(K.trace, GGN(r).to_dense().trace())


@pytest.mark.parametrize("affine", [False, True])
def test_untracked_batch_norm_in_training_mode_is_refused_and_said_in_training(affine: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2)).double()
    data = [(torch.randn(5, 3).double(), torch.zeros(5, 2).double())]
    with pytest.raises(UnsupportedError, match=r"\['1'\] are batch norm in training mode.*model.eval"):
        _ = curvature(EmpiricalRisk(model, nn.MSELoss(), data, [model[0].weight]), KFAC).trace
    _ = curvature(EmpiricalRisk(model, nn.MSELoss(), data, [model[0].weight], check=False), KFAC).trace
    with pytest.warns(CurvatureWarning, match=r"\['1'\] are batch norm in training mode.*not compared"):
        CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), (), [model[0].weight])).update(data[0])
