"""Networks that several rooms train and differentiate, in PyTorch's own initialisation."""

from __future__ import annotations

from torch import nn


def tanh_net(i: int, hidden: int, o: int) -> nn.Sequential:
    """Two linear layers, "0" and "2", with a tanh between them."""
    return nn.Sequential(nn.Linear(i, hidden), nn.Tanh(), nn.Linear(hidden, o))
