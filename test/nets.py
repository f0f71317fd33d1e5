"""Networks that several rooms train and differentiate, in PyTorch's own initialisation."""

from __future__ import annotations

import torch
from torch import nn


def tanh_net(i: int, hidden: int, o: int) -> nn.Sequential:
    """Two linear layers, "0" and "2", with a tanh between them."""
    return nn.Sequential(nn.Linear(i, hidden), nn.Tanh(), nn.Linear(hidden, o))


def deep_tanh_net(seed: int = 0) -> nn.Sequential:
    """Three linear layers of 3, 4, 4 and 2 units, in float64."""
    torch.manual_seed(seed)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()
