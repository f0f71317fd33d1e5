"""Estimation modes: which vectors are backpropagated through the network, and the matrix that they
stand for.

A curvature matrix of a loss is `Σ_n J_nᵀ (Σ_k v_k v_kᵀ) J_n` with vectors `v` of the shape of the
network's output. Layer-wise approximations send the vectors back one after the other; matrix-free
operators multiply with `M = Σ_k v_k v_kᵀ`, or with its root, whose columns are the vectors. The
mode decides which matrix it is:

| object | vectors per batch | matrix |
| --- | --- | --- |
| `Exact()` | R·K, columns of the loss Hessian's root, one loss term at a time | GGN |
| `Exact(signs=True)` | K, all terms at once, an independent sign each | unbiased for the GGN |
| `CurvaturePropagation(samples)` | `samples`, all columns of all terms, random signs | the same |
| `MonteCarlo(samples)` | `samples`, gradients at labels from the model | unbiased for the Fisher |
| `Empirical()` | 1, the gradient of the loss at the data's own labels | empirical Fisher |
| `Empirical(per_term=True)` | R, the same for each loss term | empirical Fisher over terms |
| `ForwardOnly()` | none | `G = I`: input statistics alone |

N examples, R loss terms per example (tokens, pixels), C numbers per term, K columns of its root: C,
of cross-entropy C - 1.

GGN and Fisher are one matrix for the usual losses. Where they differ (a Gaussian with predicted
variance, probabilities instead of logits) the Fisher is meant by both, and vectors that were asked
for the GGN by name are refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.likelihood.draws import batch_uniforms, counter_key, uniforms
from curvlinops_plus.options import flag, whole


class Vectors(ABC):
    """Which vectors are backpropagated from the outputs.

    Subclass it to send vectors of your own: write `count` and `send`. `curvature`, `GGN` and
    `GGNFactor` all take it; `root` is the place for a formula that is cheaper than stacking the
    vectors.
    """

    #: Whether a backward pass is needed at all.
    backward: bool = True
    #: Whether a loss must have a likelihood. The exact Hessian of the loss exists for any other,
    #: too.
    needs_likelihood: bool = True
    #: Where the random numbers start; None if there are none.
    seed: int | None = None
    #: Name of the vectors in the vocabulary of `FisherType`.
    fisher_type: str = "custom"
    #: "ggn" or "fisher" where that matrix and no other is meant, else None.
    matrix: str | None = None
    #: Several losses: whether vectors of all are sent at once, because cross terms vanish in the
    #: mean, or are intended.
    together: bool = False
    #: Several losses: whether a vector is linear in its loss, like a gradient; else its square is.
    of_loss: bool = False

    def __post_init__(self) -> None:
        """Check the options of those that have some, as dataclasses do."""
        kind = type(self).__name__
        options = vars(self)
        for name in {"samples", "seed"} & options.keys():
            number = whole(options[name])
            if number is None:
                raise TypeError(f"{kind} needs an integer, got {name}={options[name]!r}.")
            object.__setattr__(self, name, number)  # as a frozen dataclass sets its fields
        if options.get("samples", 1) < 1:
            raise ValueError(f"{kind} needs at least one sample, got samples={options['samples']}.")
        for name in {"signs", "per_term"} & options.keys():
            flag(name, options[name])
        is_word = self.matrix is None or isinstance(self.matrix, str)
        if not is_word or self.matrix not in (None, "fisher", "ggn"):
            raise ValueError(f'{kind}(matrix={self.matrix!r}) must be None, "fisher" or "ggn".')

    @property
    def random(self) -> bool:
        """Whether random numbers are drawn."""
        return self.seed is not None

    def check(self, likelihood: Likelihood) -> None:
        """Refuse a loss whose GGN is asked for by name, if all we have is its Fisher matrix.

        Raises:
            UnsupportedError: Naming the loss and the reason.
        """
        if self.matrix == "ggn" and likelihood.no_ggn is not None:
            raise UnsupportedError(
                f'{type(self).__name__}(matrix="ggn"): {likelihood.name} {likelihood.no_ggn}. Its '
                'Fisher matrix is there: take matrix="fisher", or a mode that begins with '
                '"fisher_".'
            )

    @abstractmethod
    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        """How many vectors `send` yields for outputs `F` of shape [N, R, C]."""

    @abstractmethod
    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        """Yield the vectors, each of shape [N, R, C], for outputs `F` and targets `Y` in canonical
        form.
        """

    def root(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Root:
        """The root `B` of `M = Σ_k v_k v_kᵀ`, the matrix of the vectors, for matrix-free operators.

        This default has the vectors of `send` as columns, so that loss terms of an example that are
        sent together have cross terms. Cost: memory for all of them.
        """
        sent = [*self.send(likelihood, F, Y, draws)]
        return ColumnsRoot(torch.stack(sent) if sent else torch.zeros_like(F)[None], per_term=False)


def _each_term(v: Tensor) -> Iterator[Tensor]:  # [N, R, C] -> R of them
    """The part of a vector for each loss term, zero elsewhere."""
    for r in range(v.shape[1]):
        single = torch.zeros_like(v)
        single[:, r] = v[:, r]
        yield single


@dataclass(frozen=True)
class Exact(Vectors):
    """Sends the columns of a root of the loss Hessian: the generalized Gauss-Newton matrix, without
    noise.

    Args:
        signs: Backpropagate all loss terms of an example together, each with a random sign (R times
            fewer passes). Unbiased; exact for KFAC-expand if positions do not mix, noisy otherwise.
        seed: Where the signs start.
        matrix: "ggn" or "fisher" to be refused where the loss can't give that matrix; the numbers
            are the same.

    Raises:
        ValueError: If `matrix` is something else.

    Cost: R·K backward passes per batch with K columns per loss term (classes less one, of
    cross-entropy), or K with signs.

    Example:
        >>> Exact().fisher_type
        'type-2'
    """

    signs: bool = False
    seed: int = 0
    # Not shown: it says what is refused, and states saved with another value hold the same numbers.
    matrix: str | None = field(default=None, repr=False)
    fisher_type = "type-2"

    @property
    def needs_likelihood(self) -> bool:
        return self.signs or self.matrix == "fisher"

    @property
    def random(self) -> bool:
        return self.signs

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        self.check(likelihood)
        columns = likelihood.num_columns(F)
        return columns if self.signs else columns * F.shape[1]

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        N, R, _ = F.shape
        columns = likelihood.hessian_root_columns(F, Y)
        if R == 1:
            yield from columns
        elif self.signs:
            signs = draws.signs(N, R, likelihood.num_columns(F)).to(F)
            for k, column in enumerate(columns):
                yield column * signs[:, :, k, None]
        else:
            # Two terms sent together would leave cross terms wherever they share a weight.
            for column in columns:
                yield from _each_term(column)

    def root(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Root:
        if self.signs:
            return super().root(likelihood, F, Y, draws)
        return HessianRoot(likelihood, F, Y)


@dataclass(frozen=True)
class CurvaturePropagation(Vectors):
    """Sends columns of a root of the loss Hessian, each with a random sign, all added up into one.

    Unbiased for the generalized Gauss-Newton matrix, with one backward pass per sample whatever the
    number of classes and loss terms. Exact where there is one column in all: one loss term per
    example of one number, where `MonteCarlo` is not.

    Args:
        samples: How many vectors per batch; each is one backward pass.
        seed: Where the signs start. They depend on the order of the examples, not on how they are
            batched.
        matrix: "ggn" or "fisher" to be refused where the loss can't give that matrix; the numbers
            are the same.

    Raises:
        ValueError: If `samples` is less than one, or `matrix` is something else.

    Cost: `samples` backward passes per batch, and `samples` vectors of the output's size.

    Source: Martens, Sutskever & Swersky 2012, "Estimating the Hessian by back-propagating
    curvature".

    Example:
        >>> CurvaturePropagation(samples=4, seed=1)
        CurvaturePropagation(samples=4, seed=1)
    """

    samples: int = 1
    seed: int = 0
    matrix: str | None = field(default=None, repr=False)
    fisher_type = "curvature-propagation"
    together = True

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        self.check(likelihood)
        return self.samples

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        signs = draws.signs(*F.shape[:2], self.samples, likelihood.num_columns(F)).to(F)
        sent = likelihood.hessian_root_product(F, Y, signs.permute(2, 0, 1, 3))
        yield from sent / math.sqrt(self.samples)


@dataclass(frozen=True)
class MonteCarlo(Vectors):
    """Sends gradients at labels sampled from the model's own predictive distribution: the Fisher
    matrix, unbiased.

    Args:
        samples: Number of samples; each is one backward pass.
        seed: Of the samples. They depend on the order of the examples, not on how they are batched.

    Raises:
        ValueError: If `samples` is less than one.

    Example:
        >>> MonteCarlo(samples=4, seed=1)
        MonteCarlo(samples=4, seed=1)
    """

    samples: int = 1
    seed: int = 0
    fisher_type = "mc"
    together = True

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return self.samples

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        drawn = likelihood.draw(F, Y, self.samples, draws.uniform)
        yield from drawn if self.samples == 1 else drawn / math.sqrt(self.samples)

    def root(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Root:
        # Draws of different loss terms and losses are independent: their cross terms are 0 in the
        # mean.
        return ColumnsRoot(torch.stack([*self.send(likelihood, F, Y, draws)]), per_term=True)


@dataclass(frozen=True)
class Empirical(Vectors):
    """Sends the gradient of the loss at the labels in the data: the empirical Fisher.

    Args:
        per_term: Take each loss term's gradient by itself instead of the sum over an example's
            terms (R passes).

    Example:
        >>> Empirical().fisher_type
        'empirical'
    """

    per_term: bool = False
    fisher_type = "empirical"
    of_loss = True

    @property
    def together(self) -> bool:
        return not self.per_term

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return F.shape[1] if self.per_term else 1

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        gradient = likelihood.grad(F, Y)
        if self.per_term:
            yield from _each_term(gradient)
        else:
            yield gradient

    def root(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Root:
        return ColumnsRoot(likelihood.grad(F, Y)[None], self.per_term)


@dataclass(frozen=True)
class ForwardOnly(Vectors):
    """Sends nothing back: the gradient factor is the identity and no backward pass is run.

    Known as FOOF (Benzing 2022, "Gradient descent on neurons and its link to approximate
    second-order optimization") and ISAAC (Petersen et al. 2023). Only layers with an affine rule
    have such a matrix.

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


#: Vectors by the words of `FisherType` and by the modes of kfac_jax.
_MODES: dict[str, Vectors] = {
    **{
        v.fisher_type: v
        for v in (Exact(), CurvaturePropagation(), MonteCarlo(), Empirical(), ForwardOnly())
    },
    "fisher_gradients": MonteCarlo(),
    "fisher_curvature_prop": CurvaturePropagation(matrix="fisher"),
    "fisher_exact": Exact(matrix="fisher"),
    "fisher_empirical": Empirical(),
    "ggn_curvature_prop": CurvaturePropagation(matrix="ggn"),
    "ggn_exact": Exact(matrix="ggn"),
}


def as_vectors(given: Vectors | str | None) -> Vectors:
    """Vectors as an object, from an object or a name.

    Args:
        given: Vectors, which are returned as they are; None for `Exact()`; "type-2", "mc",
            "empirical", "forward-only" or "curvature-propagation"; or a mode of kfac_jax,
            "fisher_gradients", "fisher_curvature_prop", "fisher_exact", "fisher_empirical",
            "ggn_curvature_prop" or "ggn_exact". Words stand for one sample and seed 0.

    Raises:
        ValueError: If the word is another one; lists all.
        TypeError: If it is neither.

    Example:
        >>> as_vectors("fisher_gradients"), as_vectors(None)
        (MonteCarlo(samples=1, seed=0), Exact(signs=False, seed=0))
    """
    if given is None:
        return Exact()
    if isinstance(given, Vectors):
        return given
    if isinstance(given, str) and given in _MODES:
        return _MODES[given]
    raise (ValueError if isinstance(given, str) else TypeError)(
        f"Unknown vectors: {given!r}. Expected an object such as Exact() or MonteCarlo(samples=4, "
        f"seed=1), or a word: {', '.join(map(repr, _MODES))}."
    )


class Draws:
    """Uniform random numbers of our own, for each example.

    A number depends on the seed, the step, the number of the example, and its position among the
    example's numbers: not on the batch sizes, the processes that examples are spread over, the
    dtype and device of the model, or anybody else's random numbers.

    Args:
        seed: Where the numbers start.
        step: Of a training loop.
        before: How many examples of this process came before in the step.
        by_batch: Numbers belong to a batch as a whole, in a third of the time: they depend on how
            examples are divided into batches, and have 24 bits.

    Example:
        >>> import torch
        >>> whole, halves = Draws(0).uniform(4, 2), Draws(0)
        >>> first = halves.of_examples(range(1)).uniform(1, 2)
        >>> bool((torch.cat([first, halves.of_examples(range(1, 4)).uniform(3, 2)]) == whole).all())
        True
    """

    def __init__(self, seed: int, step: int = 0, before: int = 0, by_batch: bool = False) -> None:
        self.before = before
        self._by_batch = by_batch
        self._seeds: tuple[int, ...] = (seed, step)
        self._examples: Sequence[int] | Tensor | None = None
        self._position = 0
        self._device = torch.device("cpu")

    def of_examples(
        self, numbers: Sequence[int] | Tensor, device: torch.device | None = None
    ) -> Draws:
        """Go on with the first random numbers of the examples of these numbers, N of them. Returns
        the object.
        """
        self._examples = numbers
        self._position = 0
        self._device = device or self._device
        return self

    def again(self) -> Draws:
        """Go back to the first numbers of the present examples. Returns the object."""
        self._position = 0
        return self

    def of_loss(self, index: int) -> Draws:
        """Those of one of several losses, which are others for each; the first one's are these."""
        if index == 0:
            return self
        draws = copy(self)
        draws._seeds = (*self._seeds, index)
        return draws

    def uniform(self, *shape: int) -> Tensor:
        """The next numbers in [0, 1), float64, or float32 by batch; the first axis is the
        examples'.
        """
        examples = range(shape[0]) if self._examples is None else self._examples
        count = math.prod(shape[1:])
        if self._by_batch:
            key = counter_key(*self._seeds, int(examples[0]), self._position)
            numbers = batch_uniforms(key, shape[0], count)
        else:
            numbers = uniforms(counter_key(*self._seeds), examples, self._position, count)
        self._position += count
        if self._device.type == "cuda":  # a copy from pinned memory stops nobody
            numbers = numbers.pin_memory().to(self._device, non_blocking=True)
        return numbers.view(shape)

    def signs(self, *shape: int) -> Tensor:
        """1 or -1 with equal chance, from as many of the numbers."""
        return self.uniform(*shape).lt_(0.5).mul_(-2).add_(1)


class Root(ABC):
    """A root of a matrix over the outputs `[N, R, C]` of one loss on one batch.

    Attributes:
        per_term: Whether the matrix has no entries between the loss terms of an example, or between
            losses.
    """

    per_term: bool

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """What it multiplies, `[N, R', K]`."""

    @abstractmethod
    def product(self, U: Tensor) -> Tensor:  # [*lead, N, R', K] -> [*lead, N, R, C]
        """`B u`."""

    @abstractmethod
    def transpose_product(self, V: Tensor) -> Tensor:  # [*lead, N, R, C] -> [*lead, N, R', K]
        """`Bᵀ v`."""

    def outer_product(self, V: Tensor) -> Tensor:  # [*lead, N, R, C] -> [*lead, N, R, C]
        """`B Bᵀ v`."""
        return self.product(self.transpose_product(V))


class ColumnsRoot(Root):
    """A root given by its columns.

    Args:
        columns: The columns, `[K, N, R, C]`.
        per_term: Whether each loss term has columns of its own, which are the parts of these.

    Example:
        >>> column = torch.tensor([[[1.0], [2.0]]])  # N = 1, R = 2, C = 1
        >>> root = ColumnsRoot(column[None], per_term=False)
        >>> root.outer_product(torch.tensor([[[1.0], [1.0]]]))  # [1, 2] ([1, 2] · [1, 1])
        tensor([[[3.],
                 [6.]]])
    """

    def __init__(self, columns: Tensor, per_term: bool) -> None:
        self.columns = columns
        self.per_term = per_term
        self._axes = (-1,) if per_term else (-2, -1)

    @property
    def shape(self) -> torch.Size:
        K, N, R, _ = self.columns.shape
        return torch.Size((N, R if self.per_term else 1, K))

    def product(self, U: Tensor) -> Tensor:
        total = self.columns.new_zeros(*U.shape[:-3], *self.columns.shape[1:])
        for k, column in enumerate(self.columns):
            total += U[..., k : k + 1] * column
        return total

    def transpose_product(self, V: Tensor) -> Tensor:
        return torch.cat(
            [(column * V).sum(self._axes, keepdim=True) for column in self.columns], -1
        )


class HessianRoot(Root):
    """The root of the loss Hessian that a likelihood knows; nothing is computed before it
    multiplies.
    """

    per_term = True

    def __init__(self, likelihood: Likelihood, F: Tensor, Y: Any) -> None:
        self.likelihood = likelihood
        self.F = F
        self.Y = Y

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.F.shape[:2], self.likelihood.num_columns(self.F)))

    def product(self, U: Tensor) -> Tensor:
        return self.likelihood.hessian_root_product(self.F, self.Y, U)

    def transpose_product(self, V: Tensor) -> Tensor:
        return self.likelihood.hessian_root_transpose_product(self.F, self.Y, V)

    def outer_product(self, V: Tensor) -> Tensor:
        return self.likelihood.hessian_product(self.F, self.Y, V)


class WeightedRoot(Root):
    """The root of a matrix whose part for each example is multiplied by a weight.

    Args:
        root: That of the matrix without weights.
    """

    def __init__(self, root: Root, weight: Tensor) -> None:
        self.root = root
        self.factors = weight.sqrt()[:, None, None]
        self.per_term = root.per_term

    @property
    def shape(self) -> torch.Size:
        return self.root.shape

    def product(self, U: Tensor) -> Tensor:
        return self.factors * self.root.product(U)

    def transpose_product(self, V: Tensor) -> Tensor:
        return self.root.transpose_product(self.factors * V)

    def outer_product(self, V: Tensor) -> Tensor:
        return self.factors * self.root.outer_product(self.factors * V)
