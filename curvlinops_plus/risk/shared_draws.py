"""One stream of random numbers for several losses, so that draws don't depend on the batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.draws import Draws


class _Requests(Draws):
    """Counts the random numbers that are requested, and returns 1/2 for all."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def uniform(self, *shape: int) -> Tensor:
        self.shapes.append(shape)
        return torch.full(shape, 0.5, dtype=torch.float64)


def requested_size(consumer: Callable[[Draws], object]) -> int:
    """How many random numbers per example a consumer asks for; it is called with placeholders."""
    requests = _Requests()
    consumer(requests)
    return sum(math.prod(shape[1:]) for shape in requests.shapes)


class _Table(Draws):
    """Gives random numbers that were drawn before: a table [N, ...], from left to right."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def uniform(self, *shape: int) -> Tensor:
        size = math.prod(shape[1:])
        if size > self.table.shape[1] or shape[0] != len(self.table):
            raise UnsupportedError(
                f"Vectors asked for random numbers {list(shape)} that they had not asked for with other numbers in "
                "their place. How many they ask for may depend on the shapes of output and target alone."
            )
        mine, self.table = self.table[:, :size], self.table[:, size:]
        return mine.reshape(shape)


def share_draws(draws: Draws, N: int, sizes: Sequence[int]) -> list[Draws]:
    """Random numbers for several consumers from one stream, example by example, so that batch sizes don't matter.

    Args:
        sizes: How many numbers per example each consumer needs.

    Example:
        >>> one, two = share_draws(Draws(0), 4, [2, 1])
        >>> numbers = torch.cat([one.uniform(4, 2), two.uniform(4, 1)], 1)
        >>> bool((numbers == Draws(0).uniform(4, 3)).all())
        True
    """
    return [_Table(part) for part in draws.uniform(N, sum(sizes)).split([*sizes], 1)]
