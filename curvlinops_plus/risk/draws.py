"""Random numbers of a risk's vectors; of several losses from one stream, so that draws don't depend on batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.counter import counter_key, uniforms


class Draws:
    """Uniform random numbers of our own, for each example.

    A number depends on the seed, the step, the number of the example, and its position among the example's numbers:
    not on the batch sizes, the processes that examples are spread over, the dtype and device of the model, or anybody
    else's random numbers.

    Args:
        seed: Where the numbers start.
        step: Of a training loop.
        before: How many examples of this process came before in the step.

    Example:
        >>> import torch
        >>> whole, halves = Draws(0).uniform(4, 2), Draws(0)
        >>> first = halves.of_examples(range(1)).uniform(1, 2)
        >>> bool((torch.cat([first, halves.of_examples(range(1, 4)).uniform(3, 2)]) == whole).all())
        True
    """

    def __init__(self, seed: int, step: int = 0, before: int = 0) -> None:
        self._key, self.before = counter_key(seed, step), before
        self._examples: Sequence[int] | Tensor | None = None
        self._position = 0

    def of_examples(self, numbers: Sequence[int] | Tensor) -> Draws:
        """Go on with the first random numbers of the examples of these numbers, N of them. Returns the object."""
        self._examples, self._position = numbers, 0
        return self

    def uniform(self, *shape: int) -> Tensor:
        """The next numbers in [0, 1), float64 on the CPU; the first axis is the examples'.

        Raises:
            ValueError: If these are not as many examples as the batch has.
        """
        examples = range(shape[0]) if self._examples is None else self._examples
        if shape[0] != len(examples):
            raise ValueError(
                f"Random numbers of shape {list(shape)} were asked for in a batch of {len(examples)} examples; the "
                "first axis is that of the examples."
            )
        count = math.prod(shape[1:])
        found = uniforms(self._key, examples, self._position, count)
        self._position += count
        return found.view(shape)

    def signs(self, *shape: int) -> Tensor:
        """1 or -1 with equal chance, from as many of the numbers, float64 on the CPU."""
        return self.uniform(*shape).lt_(0.5).mul_(-2).add_(1)


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
