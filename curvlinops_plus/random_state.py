"""The state of the global random numbers of PyTorch, Python and NumPy, which a model or data may
draw from.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState"]


@dataclass(frozen=True, eq=False)
class RandomState:
    """A state of the global generators.

    Attributes:
        cpu: PyTorch's, of the CPU.
        cuda: Those of GPUs, by their number.
        python: That of the module `random`; None where it is not asked for.
        numpy: NumPy's; None where it is not asked for, or nobody has imported `numpy.random`.

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
    python: tuple[Any, ...] | None = None
    numpy: Any = None

    @classmethod
    def now(cls, device: torch.device | None = None) -> RandomState:
        """The state of now: PyTorch's, of the CPU and one device, or that of all generators that
        are in use.
        """
        cpu = torch.get_rng_state()
        if device is None:
            numbers = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            # Imported at first use, by whoever draws from it: reading its state takes a tenth of a
            # millisecond.
            numpy = sys.modules.get("numpy.random")
            cuda = {k: torch.cuda.get_rng_state(k) for k in numbers}
            return cls(cpu, cuda, random.getstate(), numpy and numpy.get_state(legacy=False))
        if device.type != "cuda":
            return cls(cpu, {})
        number = torch.cuda.current_device() if device.index is None else device.index
        return cls(cpu, {number: torch.cuda.get_rng_state(number)})

    def restore(self) -> None:
        """Go on from this state."""
        torch.set_rng_state(self.cpu)
        for number, state in self.cuda.items():
            torch.cuda.set_rng_state(state, number)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def __eq__(self, other: object) -> bool:
        """Whether PyTorch's generators are in the same state."""
        return (
            isinstance(other, RandomState)
            and torch.equal(self.cpu, other.cpu)
            and self.cuda.keys() == other.cuda.keys()
            and all(torch.equal(state, other.cuda[number]) for number, state in self.cuda.items())
        )

    __hash__ = None  # type: ignore[assignment]
