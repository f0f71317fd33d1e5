"""What is told of tensors and options, so that others can compare them."""

from __future__ import annotations

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


@pytest.mark.parametrize(("size", "dtype"), [(7, torch.bfloat16), (2**12 + 1, torch.int64), (2**18 + 3, torch.float32)])
def test_other_numbers(size: int, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 500).to(dtype)
    changed, one = x.clone(), x.clone()
    changed[[0, 3]] = x[[3, 0]] + 8
    one[-1] += 8
    assert told(x) == told(x.clone())
    for other in (changed, -x, 2 * x, one, x[:-1], x[None], x.to(torch.complex64)):
        assert told(x) != told(other)
    for a, b in (([0.0, -INF, 1.0, NAN], [0.0, -INF, 2.0, NAN]), ([0.0, INF], [0.0, -INF]), ([-INF, NAN], [NAN, INF])):
        assert told(torch.tensor(a)) == told(torch.tensor(a)) != told(torch.tensor(b))


@pytest.mark.parametrize(
    "make",
    [
        lambda k: [1, {"a": (k,)}],
        lambda k: torch.tensor(k),
        lambda k: np.array([k, 2]),
        lambda k: (torch.float32, torch.float64)[k],
        lambda k: RelativeDamping(0.5 * k),
        lambda k: [0] * (100 + k),
    ],
)
def test_options(make: Any) -> None:
    """Made anew they are the same; others differ."""
    assert described(make(0)) == described(make(0)) != described(make(1))
