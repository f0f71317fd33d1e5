"""How much is worked on at once: the device decides, in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlinops_plus.layer import SparseRows, convolution_gram, rows, squares
from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.likelihood import draws
from curvlinops_plus.linalg.pieces import rows_at_once


@pytest.mark.parametrize("kind", ["cuda", "meta", "mps"])
def test_only_processors_have_a_cache_to_fit(kind: str) -> None:
    cpu = torch.device("cpu")
    device = torch.device(kind)
    assert rows_at_once(cpu, 2**10, 2**8) == 4
    assert rows_at_once(device, 2**10, 2**8) == 2**20
    assert rows_at_once(device, 2**30, 2**8) == 2**22
    for where in (cpu, device):
        assert rows_at_once(where, 2**10, 2**40) == rows_at_once(where, 2**10, 2**29) == 1
        assert rows_at_once(where, 2**10, 0) >= 2**10


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def patches() -> Tensor:
    x = torch.linspace(-1, 2, 6 * 2 * 5 * 5, dtype=torch.float64).view(6, 2, 5, 5).sin()
    return convolution_gram.patch_gram(Geometry.of(nn.Conv2d(2, 3, 3)), x)


def squared() -> Tensor:
    g = torch.linspace(-1, 2, 6 * 3 * 2, dtype=torch.float64).view(6, 3, 2).cos()
    a = torch.linspace(0, 3, 6 * 3 * 4, dtype=torch.float64).view(6, 3, 4).sin()
    return squares.squared_gradients(g, a, bias=True)


def of_rows() -> Tensor:
    index = torch.arange(12).view(6, 2, 1) % 5
    g = torch.linspace(-1, 2, 12, dtype=torch.float64).view(1, 6, 2, 1)
    C = torch.linspace(0, 3, 20, dtype=torch.float64).view(4, 1, 5)
    return SparseRows(index, None, 5).inner_products(g, C)


def labels() -> Tensor:
    u = torch.linspace(0, 0.99, 12, dtype=torch.float64).view(6, 2)
    return draws.categories(torch.linspace(0, 1, 42).view(6, 7), u)


LOOPS = [(convolution_gram, patches), (squares, squared), (rows, of_rows), (draws, labels)]


@pytest.mark.parametrize(("module", "work"), LOOPS)
def test_every_loop_asks_the_device(
    module: object, work: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes all examples at once where a CPU's cache is small, with the same results."""
    devices = []

    def of_one(device: torch.device, cpu_bytes: int, row_bytes: int) -> int:
        devices.append(device.type)
        assert row_bytes > 0
        return 1

    with Calls() as together:
        expected = work()
    monkeypatch.setattr(module, "rows_at_once", of_one)
    with Calls() as one_by_one:
        found = work()
    assert devices == ["cpu"]
    assert together.count < one_by_one.count / 2
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
