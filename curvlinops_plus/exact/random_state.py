"""The global random state, which a forward pass may draw from."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["random_state", "set_random_state"]


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """State of the global generators that a forward pass may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Go on from a state of the global generators."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
