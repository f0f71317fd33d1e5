"""Networks, batches and training loops of the tests of K-FAC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from test.helpers import seeded
from test.nets import tanh_net

EXACT: dict[str, Any] = {"vectors": "ggn_exact"}
Loss = Callable[..., Tensor]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return tanh_net(4, 5, 3).double()


def batch(n: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    X = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return X, torch.randint(3, (n,), generator=generator)


class Twisted(nn.Module):
    """Layers whose matrices take axes of their parameters apart, one of which is called by
    turns.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ConvTranspose1d(1, 6, 2, groups=1)
        self.second = nn.Conv1d(6, 4, 2, groups=2, bias=False)
        self.third = nn.ConvTranspose1d(4, 6, 2, groups=2)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.head = 0

    def forward(self, X: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(X[:, None]))))
        return self.heads[self.head](torch.tanh(self.third(h)).mean(-1))


class TwoHeads(nn.Module):
    """A network with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(X), self.two(X)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def plain(optimizer: Any, model: nn.Module, loss: Loss, X: Any, y: Any) -> Tensor:
    """A step as everybody writes it."""
    optimizer.zero_grad()
    value = loss(model(X), y)
    value.backward()
    optimizer.step()
    return value.detach()


def listening(optimizer: Any, model: nn.Module, loss: Loss, X: Any, y: Any) -> None:
    """A step with the optimizer's own door."""
    optimizer.zero_grad()
    with optimizer.listen((X, y)):
        output = model(X)
    nn.functional.cross_entropy(output, y).backward()
    optimizer.step()
