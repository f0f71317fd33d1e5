"""What is sent back through the network: the vectors whose layer-wise images build every curvature statistic.

A curvature matrix of a loss is `Σ_n J_nᵀ (Σ_k v_k v_kᵀ) J_n` with vectors `v` that live where the network's output
lives.
Which vectors are sent decides which matrix comes out:

| object | vectors per batch | matrix |
| --- | --- | --- |
| `Exact()` | R·C, the columns of the loss Hessian's root, one loss term at a time | GGN |
| `Exact(signs=True)` | C, all terms at once with an independent sign each | unbiased for the GGN |
| `MonteCarlo(samples)` | `samples`, would-be gradients at labels drawn from the model | unbiased for the Fisher |
| `Empirical()` | 1, the gradient of the loss at the data's own labels | empirical Fisher, one gradient per example |
| `Empirical(per_term=True)` | R, the same for each loss term by itself | empirical Fisher over terms |
| `ForwardOnly()` | none | `G = I`: input statistics alone |

N examples, R loss terms per example (tokens, pixels), C numbers per term.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops_plus.likelihood import Likelihood

__all__ = ["Draws", "Empirical", "Exact", "ForwardOnly", "MonteCarlo", "Vectors"]


class Draws:
    """Uniform random numbers of our own, in the order of the examples.

    The numbers depend on the seed and on how many examples came before, never on the batch sizes, the dtype of the
    model or anybody else's random numbers. They are made on the CPU, whose generator fills memory one number after the
    other.

    Args:
        seed: Where the stream starts.

    Example:
        >>> import torch
        >>> whole = Draws(0).uniform(4, 2)
        >>> halves = Draws(0)
        >>> bool((torch.cat([halves.uniform(1, 2), halves.uniform(3, 2)]) == whole).all())
        True
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1), float64 on the CPU; the first axis is the examples'."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)


class Vectors(ABC):
    """One way of choosing the vectors. Subclass it to send vectors of your own."""

    #: Whether a backward pass is needed at all.
    backward: bool = True
    #: Where the random numbers start; None if there are none.
    seed: int | None = None
    #: Name of the vectors in the vocabulary of `FisherType`.
    fisher_type: str = "custom"

    @abstractmethod
    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        """How many vectors `send` yields for outputs `F` of shape [N, R, C]."""

    @abstractmethod
    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        """Yield the vectors, each of shape [N, R, C], for outputs `F` and targets `Y` in canonical form."""


@dataclass(frozen=True)
class Exact(Vectors):
    """The columns of a root of the loss Hessian: the generalized Gauss-Newton matrix, without noise.

    Args:
        signs: Send all loss terms of an example at once, each with a random sign (R times fewer passes). Unbiased;
            exact for KFAC-expand as long as positions do not mix, noisy elsewhere.
        seed: Where the signs start.

    Cost: R·C backward passes per batch, or C with signs.

    Example:
        >>> Exact().fisher_type
        'type-2'
    """

    signs: bool = False
    seed: int = 0
    fisher_type = "type-2"

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        columns = likelihood.num_columns(F)
        return columns if self.signs else columns * F.shape[1]

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        terms, columns = F.shape[1], likelihood.num_columns(F)
        alone = terms == 1
        if self.signs and not alone:
            signs = draws.uniform(F.shape[0], terms, columns).lt_(0.5).mul_(-2).add_(1).to(F)
        for k, column in enumerate(likelihood.hessian_root_columns(F, Y)):
            if alone:
                yield column
            elif self.signs:
                yield column * signs[:, :, k, None]
            else:
                # Two terms sent together would leave cross terms wherever they share a weight.
                for r in range(terms):
                    single = torch.zeros_like(column)
                    single[:, r] = column[:, r]
                    yield single


@dataclass(frozen=True)
class MonteCarlo(Vectors):
    """Would-be gradients at labels drawn from the model's own predictive distribution: the Fisher, unbiased.

    Args:
        samples: How many draws per example and batch; each is one backward pass.
        seed: Where the draws start. They depend on the order of the examples, not on how they are batched.

    Raises:
        ValueError: If `samples` is less than one.

    Example:
        >>> MonteCarlo(samples=4, seed=1)
        MonteCarlo(samples=4, seed=1)
    """

    samples: int = 1
    seed: int = 0
    fisher_type = "mc"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"MonteCarlo needs at least one sample, got samples={self.samples}.")

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return self.samples

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        drawn = likelihood.draw(F, Y, self.samples, draws.uniform)
        if self.samples > 1:
            drawn = drawn / math.sqrt(self.samples)
        yield from drawn


@dataclass(frozen=True)
class Empirical(Vectors):
    """The gradient of the loss at the labels in the data: the empirical Fisher.

    Args:
        per_term: Take each loss term's gradient by itself instead of the sum over an example's terms (R passes).

    Example:
        >>> Empirical().fisher_type
        'empirical'
    """

    per_term: bool = False
    fisher_type = "empirical"

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return F.shape[1] if self.per_term else 1

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        gradient = likelihood.grad(F, Y)
        if not self.per_term or F.shape[1] == 1:
            yield gradient
            return
        for r in range(F.shape[1]):
            single = torch.zeros_like(gradient)
            single[:, r] = gradient[:, r]
            yield single


@dataclass(frozen=True)
class ForwardOnly(Vectors):
    """Nothing: the gradient factor is the identity and no backward pass is run.

    Known as FOOF (Benzing 2022, "Gradient descent on neurons and its link to approximate second-order optimization")
    and ISAAC (Petersen et al. 2023). Only layers with an affine rule have such a matrix.

    Example:
        >>> ForwardOnly().backward
        False
    """

    backward = False
    fisher_type = "forward-only"

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 0

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        return iter(())
