"""Bars read what they are given once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from curvlinops_plus import EmpiricalRisk, KFACOptimizer, Laplace, curvature
from curvlinops_plus.progress import shown
from test.helpers import normal


class Begun:
    """Batches that count how often somebody begins to read them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return iter(self.items)


class Stream(IterableDataset):
    """Numbers without a length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_items_are_those_that_were_given(capfd: pytest.CaptureFixture[str]) -> None:
    for progressbar in (False, True):
        items = Begun([1, 2, 3])
        assert list(shown(items, "numbers", progressbar)) == [1, 2, 3]
        assert items.times == 1
        assert ("numbers: 3it [" in capfd.readouterr().err) == progressbar
    assert list(shown(DataLoader(Stream(), batch_size=None), "stream")) == [0, 1, 2]
    assert "stream: 3it [" in capfd.readouterr().err
    assert list(shown([4, 5], "known")) == [4, 5]
    assert "known: 100%|" in capfd.readouterr().err


def test_users_data_are_begun_once_per_pass() -> None:
    model = nn.Linear(3, 2).double()
    batch = (normal(5, 3), normal(5, 2))
    data = Begun([batch])
    EmpiricalRisk(model, nn.MSELoss(), data, progressbar=True).loss()
    assert data.times == 1
    data = Begun([batch])
    with KFACOptimizer(model, nn.MSELoss(), lr=0.1) as optimizer:
        optimizer.warmup(data, progressbar=True)
        assert data.times == 1
        with pytest.raises(TypeError, match="progressbar is the str 'x'; expected True or False"):
            optimizer.warmup(data, progressbar="x")  # type: ignore[arg-type]


def test_predictions_draw_as_many_random_numbers_as_one_pass() -> None:
    X = normal(6, 3)
    model = nn.Linear(3, 2).double()
    la = Laplace(curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, normal(6, 2))])))
    loader = DataLoader(TensorDataset(X), batch_size=2)
    states = []
    for read in (lambda: list(loader), lambda: la.predict(loader, progressbar=True)):
        torch.manual_seed(0)
        read()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
