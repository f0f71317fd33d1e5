"""Random numbers of a risk's vectors, which don't depend on batch sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

from torch import Tensor

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
        self._seeds, self._key, self.before = (seed, step), counter_key(seed, step), before
        self._examples: Sequence[int] | Tensor | None = None
        self._position = 0

    def of_examples(self, numbers: Sequence[int] | Tensor) -> Draws:
        """Go on with the first random numbers of the examples of these numbers, N of them. Returns the object."""
        self._examples, self._position = numbers, 0
        return self

    def of_loss(self, index: int) -> Draws:
        """Those of one of several losses, which are others for each; the first one's are these."""
        if index == 0:
            return self
        own = copy(self)
        own._key = counter_key(*self._seeds, index)
        return own

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
