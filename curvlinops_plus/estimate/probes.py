"""Random vectors, means with standard errors, and the checks of arguments that stochastic estimators share."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, Literal, Protocol, cast, overload

import torch
from torch import Generator, Tensor

from curvlinops_plus.estimate.matrix import MatrixLike, check_at_least
from curvlinops_plus.linalg.numerics import standard_normal


class Estimator(Protocol):
    """Signature of a stochastic estimator; `return_error` decides whether it returns a pair."""

    @overload
    def __call__(
        self,
        A: MatrixLike,
        num_matvecs: int,
        distribution: str = "rademacher",
        *,
        generator: Generator | None = None,
        return_error: Literal[False] = False,
        progressbar: bool = False,
        chunk_size: int | None = None,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        A: MatrixLike,
        num_matvecs: int,
        distribution: str = "rademacher",
        *,
        generator: Generator | None = None,
        return_error: Literal[True],
        progressbar: bool = False,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def estimator(function: Callable[..., Any]) -> Estimator:
    """Tell type checkers that the function has this signature; it stays as it is."""
    return cast(Estimator, function)


def random_vector(
    dim: int,
    distribution: str = "rademacher",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: Generator | None = None,
) -> Tensor:
    """A vector [dim] with independent entries of mean 0 and variance 1, as the estimators draw them, one per product.

    Args:
        dim: Number of entries.
        distribution: "rademacher" (random signs), "normal", or "sphere" (length √dim).
        device: Where the vector is put.
        dtype: Of the vector.
        generator: With a generator, the draw depends on nothing else, also not on `device` and `dtype`. By default the
            numbers are those of `Tensor.bernoulli_` and `torch.randn` from the global generator of the device.

    Raises:
        ValueError: If the distribution is unknown or `dim` is negative.
        TypeError: If `dim` is no integer, or the generator is none of PyTorch's.

    Example:
        >>> random_vector(3, generator=torch.Generator().manual_seed(0)).square()
        tensor([1., 1., 1.])
    """
    check_at_least(0, dim=dim)
    return random_vectors(1, dim, distribution, generator, torch.zeros((), device=device, dtype=dtype))[:, 0]


def random_vectors(num: int, dim: int, distribution: str, generator: Generator | None, like: Tensor) -> Tensor:
    """Columns drawn one after another as by `random_vector`, `[dim, num]`: two draws of one are one draw of two.

    Raises:
        ValueError: If the distribution is unknown.
        TypeError: If the generator is none of PyTorch's.
    """
    check_distribution(distribution)
    if generator is not None and not isinstance(generator, Generator):
        raise TypeError(
            f"Expected generator to be a torch.Generator or None, got {generator!r} of type "
            f"{type(generator).__name__}; for a seed take torch.Generator().manual_seed(seed)."
        )
    signs = distribution == "rademacher"
    columns = like.new_empty(num, dim)
    for column in columns:  # each by a call of its own: what one call gives first depends on how much it gives
        if generator is None:
            column.bernoulli_(0.5).mul_(2).sub_(1) if signs else column.normal_()
        elif signs:
            column.copy_(2 * torch.randint(0, 2, (dim,), generator=generator, device=generator.device) - 1)
        else:
            column.copy_(standard_normal(1, dim, generator, like)[:, 0])
    if distribution == "sphere":
        columns *= sqrt(dim) / torch.linalg.vector_norm(columns, dim=1, keepdim=True)
    return columns.T


class Mean:
    """Mean and standard error of samples that come in blocks `[..., k]` (Chan, Golub, LeVeque 1983).

    Example:
        >>> mean = Mean()
        >>> mean.update(torch.tensor([1.0, 2.0]))
        >>> mean.update(torch.tensor([3.0]))
        >>> mean.value, mean.error
        (tensor(2.), tensor(0.5774))
    """

    def __init__(self) -> None:
        self.count = 0
        self.value: Any = 0.0
        self.squares: Any = 0.0  # sum of squared deviations from the mean

    def update(self, samples: Tensor) -> None:
        """Add a block."""
        new = samples.shape[-1]
        total, mean = self.count + new, samples.mean(-1)
        delta = mean - self.value
        inside = (samples - mean[..., None]).square().sum(-1)
        self.squares = self.squares + inside + delta.square() * (self.count * new / total)
        self.value = self.value + delta * (new / total)
        self.count = total

    @property
    def error(self) -> Tensor:
        """The standard error of the mean."""
        return (self.squares / (self.count - 1)).sqrt() / sqrt(self.count)


def check_distribution(distribution: str) -> None:
    """Refuse an unknown distribution."""
    if distribution not in ("rademacher", "normal", "sphere"):
        raise ValueError(f"Unknown distribution {distribution!r}. Expected 'rademacher', 'normal' or 'sphere'.")


def check_num_matvecs(num_matvecs: int, limit: int, divisor: int = 1) -> int:
    """The number of draws, `num_matvecs / divisor`.

    Raises:
        TypeError: If it is no integer.
        ValueError: If there are none, if they don't divide, or if the exact answer would cost no more.
    """
    check_at_least(1, num_matvecs=num_matvecs)
    if num_matvecs >= limit:
        raise ValueError(
            f"num_matvecs ({num_matvecs}) must be less than A's size ({limit}): with that many products you have the "
            "whole matrix, as `A.to_dense()` or `A @ identity`, and the exact answer."
        )
    if num_matvecs % divisor != 0:
        lower = num_matvecs - num_matvecs % divisor
        options = f"{lower} or {lower + divisor}" if lower else f"{divisor}"
        raise ValueError(f"num_matvecs ({num_matvecs}) must be divisible by {divisor}; take {options}.")
    return num_matvecs // divisor


def check_draws(draws: int, return_error: bool, smallest: str) -> None:
    """Refuse a standard error that would rest on a single draw."""
    if return_error and draws < 2:
        raise ValueError(f"A standard error needs at least two draws, got {draws}; take {smallest} or more.")
