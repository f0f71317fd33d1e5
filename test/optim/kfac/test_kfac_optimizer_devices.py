"""On a device, layers of one shape are multiplied with one product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFACOptimizer
from curvlinops_plus.optim.kfac import flat
from test.laws.test_devices import DEVICE, OtherDevice, moved, other

__all__ = ["other"]


def trained(network: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The parameters after a step for each batch, with refreshes in between."""
    loss = nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(network, loss, lr=1e-1, damping=1e-2, inverse_every=2, momentum=0.5)
    for X, y in data:
        optimizer.zero_grad()
        loss(network(X), y).backward()
        optimizer.step()
    return [p.detach() for p in network.parameters()]


def made() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    network = nn.Sequential(*hidden, nn.Linear(4, 4, bias=False), nn.Linear(4, 3)).double()
    data = [(torch.randn(6, 4).double(), torch.randint(3, (6,))) for _ in range(5)]
    return network, data


def test_steps_on_a_device(other: OtherDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(*made())
    network, data = made()
    stacked: list[int] = []
    plain = flat._Stack

    def counted(block: Any, parts: list[Tensor], products: list[Tensor]) -> Any:
        stacked.append(len(parts))
        return plain(block, parts, products)

    monkeypatch.setattr(flat, "_Stack", counted)
    with other:
        found = trained(network, moved(network, data))
        assert all(p.device.type == DEVICE.type for p in found)
        found = [other.numbers(p) for p in found]
    assert set(stacked) == {3}
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
