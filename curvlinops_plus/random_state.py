"""The state of PyTorch's global random numbers, which a model may draw from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RandomState"]


@dataclass(frozen=True, eq=False)
class RandomState:
    """A state of the global generators, of the CPU and of GPUs.

    Attributes:
        cpu: That of the CPU.
        cuda: Those of GPUs, by their number.

    Example:
        >>> import torch
        >>> state = RandomState.now()
        >>> x = torch.rand(3)
        >>> state == RandomState.now()
        False
        >>> state.restore()
        >>> torch.equal(torch.rand(3), x)
        True
    """

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def now(cls, device: torch.device | None = None) -> RandomState:
        """The state of now: of the CPU and one device, or of all GPUs that are in use."""
        numbers = []
        if device is None:
            numbers = [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
        elif device.type == "cuda":
            numbers = [torch.cuda.current_device() if device.index is None else device.index]
        return cls(torch.get_rng_state(), {k: torch.cuda.get_rng_state(k) for k in numbers})

    def restore(self) -> None:
        """Go on from this state."""
        torch.set_rng_state(self.cpu)
        for number, state in self.cuda.items():
            torch.cuda.set_rng_state(state, number)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and torch.equal(self.cpu, other.cpu)
            and self.cuda.keys() == other.cuda.keys()
            and all(torch.equal(state, other.cuda[number]) for number, state in self.cuda.items())
        )

    __hash__ = None  # type: ignore[assignment]
