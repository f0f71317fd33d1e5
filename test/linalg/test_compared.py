"""What is told of tensors and options, so that others can compare them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from curvlinops_plus.linalg import RelativeDamping
from curvlinops_plus.linalg.compared import compared, described

INF, NAN = float("inf"), float("nan")


def told(x: Tensor) -> Any:
    return compared({"x": x})["x"]


@pytest.mark.parametrize("size", [7, 2**12 + 1, 2**18 + 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128])
def test_other_numbers(size: int, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 500).to(dtype)
    assert told(x) == told(x.clone())
    changed = x.clone()
    changed[[0, 3]] = x[[3, 0]]
    one = x.clone()
    one[-1] += 8
    for other in (changed, -x, 2 * x, one, x.flip(0), x[:-1], x[None], x.to(torch.complex64)):
        assert told(x) != told(other)


def test_infinities_and_nan() -> None:
    """They hide nothing else."""
    x = torch.tensor([0.0, -INF, 1.0, NAN])
    assert told(x) == told(x.clone())
    for other in ([0.0, -INF, 2.0, NAN], [0.0, INF, 1.0, NAN], [-INF, 0.0, 1.0, NAN], [0.0, -INF, NAN, 1.0]):
        assert told(x) != told(torch.tensor(other))


def test_other_layouts() -> None:
    x = torch.eye(3)
    assert told(x.to_sparse()) == told(x)
    assert told(x.to_sparse()) != told((2 * x).to_sparse())
    assert compared({}) == {}


class Option:
    def __init__(self, number: Any) -> None:
        self.number = number

    def method(self) -> None: ...


def closing_over(number: Any) -> Any:
    return lambda x: x * number


@pytest.mark.parametrize(
    "make",
    [
        lambda k: k,
        lambda k: 0.5 * k,
        lambda k: str(k),
        lambda k: [1, {"a": (k,)}],
        lambda k: torch.tensor(k),
        lambda k: np.array([k, 2]),
        lambda k: (int, float)[k],
        lambda k: (torch.float32, torch.float64)[k],
        lambda k: RelativeDamping(0.5 * k),
        lambda k: Option(k),
        lambda k: Option(torch.tensor(k)).method,
        closing_over,
        lambda k: partial(max, default=k),
        lambda k: (max, min)[k],
        lambda k: [0] * (100 + k),
    ],
)
def test_options(make: Any) -> None:
    """Made anew they are the same; others differ."""
    assert described(make(0)) == described(make(0))
    assert described(make(0)) != described(make(1))


def test_objects_of_ones_own() -> None:
    value = [Option(1), 2]
    assert described(value, lambda x: "mine" if isinstance(x, Option) else None) == ["mine", 2]
