"""Several losses on several outputs: `Σ_h w_h c_h Σ_n Σ_r ℓ_h(f_h(x_n)_r, y_{h,n,r})`.

The model returns a dict or a tuple, the losses are the same of `loss` or `(loss, weight)`, and so are the targets. Each
loss has a reduction of its own, read literally over the whole data set: `c_h` is 1 for "sum", and one over what PyTorch
divides by for "mean".

Statistics have one factor `c` in front, that of the first loss under "mean". What the other losses differ by, their
*share* `s_h = w_h c_h / c`, is multiplied into what is sent back: by its root where the vectors are columns of a root
of the Hessian, or draws, so that the matrix is `Σ_h w_h c_h Σ_n J_hᵀ H_h J_h`. The empirical Fisher is that of the
weighted loss: with `c*` the largest `c_h` it is `c* Σ_n g_n g_nᵀ`, `g_n = Σ_h (w_h c_h / c*) Σ_r ∇ℓ_{h,n,r}`.

If the numbers of terms that count are in the same proportion in every batch, so are shares, and one batch tells them.
Otherwise they belong to the data set, and are counted before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood, has_likelihood, likelihood_of, rebuild_loss
from curvlinops_plus.risk.reading import Batch, scalar_loss
from curvlinops_plus.risk.totals import Totals
from curvlinops_plus.risk.vectors import Draws, Vectors

__all__ = ["Head", "Heads", "Outputs", "Round", "rebuild_losses", "share_draws"]

Key = str | int


class Outputs(tuple[Tensor, ...]):
    """The outputs that several losses read, one each.

    Example:
        >>> Outputs([torch.zeros(2), torch.zeros(3, requires_grad=True)]).requires_grad
        True
    """

    @property
    def requires_grad(self) -> bool:
        """Whether one of them has a graph."""
        return any(f.requires_grad for f in self)

    def detach(self) -> Outputs:
        """The same without graphs."""
        return Outputs(f.detach() for f in self)


@dataclass(eq=False)
class Round:
    """Vectors that are sent back one after the other, through the same outputs.

    Attributes:
        outputs: The outputs.
        number: Of vectors.
        sent: The vectors, each with a part for every output.
        terms: Loss terms per example, R, where vectors are those of one loss.
        where: Which loss, in words.
    """

    outputs: Sequence[Tensor]
    number: int
    sent: Iterator[list[Tensor]]
    terms: int = 1
    where: str = ""


@dataclass(eq=False)
class Head:
    """One of several losses.

    Attributes:
        key: Which output and target it reads: a key of a dict, or a position.
        loss: The loss.
        weight: What it is multiplied with.
        default_reduction: For a loss without an attribute `reduction`.
    """

    key: Key
    loss: Any
    weight: float = 1.0
    default_reduction: str | None = None

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"loss {self.key!r} ({type(self.loss).__name__})"

    @cached_property
    def known(self) -> bool:
        """Whether it has a likelihood."""
        return has_likelihood(self.loss)

    @cached_property
    def likelihood(self) -> Likelihood:
        """It as a negative log-likelihood."""
        try:
            return likelihood_of(self.loss)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.title}: {error}") from error

    @property
    def reduction(self) -> str:
        """ "mean" or "sum"."""
        if self.known:
            return self.likelihood.reduction
        reduction = getattr(self.loss, "reduction", self.default_reduction or "mean")
        reduction = "mean" if reduction == "batchmean" else reduction
        if reduction not in ("mean", "sum"):
            raise UnsupportedError(
                f'{self.title}: reduction={reduction!r} is no scalar loss, so it has no curvature; use "mean" or "sum".'
            )
        return reduction

    def terms(self, f: Tensor, y: Any, N: int, class_axis: int | None) -> tuple[Tensor, Any, Tensor | float, Tensor]:
        """Output and target as the loss's rules want them, what "mean" divides by, and the sum of all terms."""
        if not self.known:
            return f, y, float(N), scalar_loss(self.loss(f, y), f, self.loss) * (N if self.reduction == "mean" else 1)
        if isinstance(y, Tensor) and y.dtype != f.dtype and y.is_floating_point():
            y = y.to(f.dtype)
        try:
            F, Y = self.likelihood.canonical(f, y, N, class_axis)
        except (UnsupportedError, ValueError, TypeError) as error:
            raise type(error)(f"output {self.key!r}: {error}") from error
        return F, Y, self.likelihood.count(F, Y), self.likelihood.nll(F, Y).sum()


class Heads(Likelihood):
    """Several losses, each with its output, its target and its weight.

    Args:
        losses: A dict or a tuple (or list) whose entries are a loss, or a pair of a loss and its weight.
        reduction: For losses without an attribute `reduction`.

    Raises:
        ValueError: If an entry is neither, or a weight is no positive finite number.

    Example:
        >>> from torch import nn
        >>> heads = Heads({"class": (nn.CrossEntropyLoss(), 1.0), "box": (nn.MSELoss(), 0.5)})
        >>> [(head.key, head.weight) for head in heads], heads.reduction
        ([('class', 1.0), ('box', 0.5)], 'mean')
    """

    def __init__(self, losses: Mapping[Key, Any] | Sequence[Any], reduction: str | None = None) -> None:
        super().__init__()
        self.form = "dict" if isinstance(losses, Mapping) else "tuple"
        items = list(losses.items() if isinstance(losses, Mapping) else enumerate(losses))
        if not items:
            raise ValueError("There are no losses: give at least one.")
        if self.form == "tuple" and _is_number(losses[-1]):  # type: ignore[index]
            raise ValueError(
                f"{losses!r} is read as one loss for each output, and a number is no loss. For one output give the "
                "loss alone; for several outputs write the weight beside its loss: ((loss, weight), (loss, weight))."
            )
        self.heads = tuple(Head(key, *_read_loss(key, given), reduction) for key, given in items)
        self._sizes: dict[Hashable, list[int]] = {}
        #: The losses as they are compared and called, always with their weights.
        pairs = [(head.loss, head.weight) for head in self.heads]
        self.losses = dict(zip(self.keys, pairs)) if self.form == "dict" else tuple(pairs)

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def keys(self) -> list[Key]:
        """Keys or positions of the outputs."""
        return [head.key for head in self.heads]

    @property
    def known(self) -> bool:
        """Whether all losses have a likelihood."""
        return all(head.known for head in self.heads)

    @property
    def name(self) -> str:
        return " + ".join(f"{head.weight:g}·{type(head.loss).__name__}" for head in self.heads)

    @property
    def reduction(self) -> str:
        """ "mean" if any loss has it."""
        return "mean" if "mean" in [head.reduction for head in self.heads] else "sum"

    @cached_property
    def reference(self) -> int:
        """The loss whose factor is that of all statistics: the first one under "mean"."""
        return next((i for i, head in enumerate(self.heads) if head.reduction == "mean"), 0)

    @cached_property
    def constant(self) -> bool:
        """Whether shares don't depend on the data."""
        return len(self.heads) == 1 or all(head.reduction == "sum" for head in self.heads)

    @cached_property
    def mixed(self) -> bool:
        """Whether some losses have "mean" and some "sum"."""
        return len({head.reduction for head in self.heads}) > 1

    def options(self) -> dict[str, Any]:
        """Everything that determines the losses and their weights, in one flat dict; see `rebuild_losses`."""
        found: dict[str, Any] = {"loss": self.form, "number": len(self.heads)}
        for index, head in enumerate(self.heads):
            found |= {f"{index}.output": head.key, f"{index}.weight": head.weight}
            found |= {f"{index}.options.{name}": option for name, option in head.likelihood.options().items()}
        return found

    @property
    def no_ggn(self) -> str | None:
        reasons = {head.title: head.likelihood.no_ggn for head in self.heads}
        return next((f"has the {title}, which {reason}" for title, reason in reasons.items() if reason), None)

    def canonical(self, f: Any, y: Any, num_examples: int, class_axis: Any = None) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(
            f"There are several losses, for the outputs {self.keys}, and one output [N, R, C] is wanted here. Take one "
            "loss, with its output by `output=`."
        )

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        raise UnsupportedError(
            f"The losses of {self.keys} have no likelihood in common; each has its own, in `risk.heads`."
        )

    # -------------------------------------------------------------------------------------------- outputs and targets
    def select(self, out: Any, selector: Callable[[Any], Any] | None) -> tuple[Outputs, tuple[int | None, ...]]:
        """The outputs that the losses read, and their class axes where they are not the losses' own.

        Raises:
            ValueError: If outputs and losses don't match.
        """
        chosen = out if selector is None else selector(out)
        parts = self._match(chosen, "output", "The model returned" if selector is None else "`output` selected")
        for key, part in zip(self.keys, parts):
            if not isinstance(part, Tensor):
                raise ValueError(f"output {key!r} is a {type(part).__name__}; expected the tensor that its loss reads.")
        logits = getattr(out, "logits", None)
        return Outputs(parts), tuple(-1 if f is logits and f.ndim > 2 else None for f in parts)

    def targets(self, y: Any) -> tuple[Any, ...]:
        """The target of each loss.

        Raises:
            ValueError: If targets and losses don't match.
        """
        return tuple(self._match(y, "target", "The batch has"))

    def _match(self, given: Any, what: str, subject: str) -> list[Any]:
        keys, count = self.keys, len(self.heads)
        if isinstance(given, Mapping):
            parts: dict[Any, Any] = dict(given)
            kind = "dict"
        elif isinstance(given, (tuple, list)):
            parts, kind = dict(enumerate(given)), "tuple"
        else:
            parts, kind = {}, type(given).__name__
        found = list(parts)
        if kind == self.form and parts.keys() == set(keys):
            return [parts[key] for key in keys]
        advice = (
            f"Say which are meant, in the form of the losses: EmpiricalRisk(..., output=lambda o: {self._form()})."
            if what == "output"
            else f"Batches must be (X, y) with y = {self._form()}."
        )
        if kind != self.form:
            came = f"a {kind} with {what}s {found}" if found else f"a {kind}"
            raise ValueError(f"{subject} {came}, but the losses are a {self.form} for the {what}s {keys}. {advice}")
        missing, unused = [k for k in keys if k not in found], [k for k in found if k not in keys]
        reasons = [f"no {what} for the losses {missing}"] if missing else []
        reasons += [f"no loss for the {what}s {unused}"] if unused else []
        names = f"{what}s {found}" if kind == "dict" else f"{len(found)} {what}s"
        losses = f"{keys}" if kind == "dict" else f"{count} losses"
        raise ValueError(f"{subject} {names}, but there are losses for {losses}: {' and '.join(reasons)}. {advice}")

    def _form(self) -> str:
        if self.form == "dict":
            return "{" + ", ".join(f"{key!r}: ..." for key in self.keys) + "}"
        return "(" + ", ".join("..." for _ in self.heads) + ("," if len(self.heads) == 1 else "") + ")"

    def terms(
        self, fs: Sequence[Tensor], ys: Sequence[Any], batch: Batch, class_axes: Sequence[int | None]
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...], Totals]:
        """Outputs and targets as the losses' rules want them, and the totals of the batch."""
        N = batch.num_examples
        found = [head.terms(f, y, N, axis) for head, f, y, axis in zip(self.heads, fs, ys, class_axes, strict=True)]
        Fs, Ys, counts, losses = (tuple(part) for part in zip(*found))
        loss = sum(head.weight * value for head, value in zip(self.heads, losses))
        first = self.reference
        terms = N * Fs[first].shape[1] if self.heads[first].known else N
        return Fs, Ys, Totals(N, terms, counts[first], loss, counts=counts, losses=losses)

    # --------------------------------------------------------------------------------------------------------- shares
    def scales(self, totals: Totals, num_data: int | None) -> tuple[float, ...]:
        """`c_h` of each loss over a whole data set.

        Raises:
            ValueError: If no term of a loss counts.
        """
        given = 1.0 if num_data is None else totals.examples / num_data
        found = []
        for head, count in zip(self.heads, totals.counts, strict=True):
            if head.reduction == "mean" and not float(count) > 0:
                raise ValueError(
                    f"No term of {head.title} counts: every target is ignored or has weight 0, so the mean over them "
                    "does not exist. Leave this loss out."
                )
            found.append(given / float(count) if head.reduction == "mean" else 1.0)
        return tuple(found)

    def shares(self, totals: Totals, num_data: int | None) -> tuple[float, ...]:
        """`s_h = w_h c_h / c` over a whole data set."""
        if self.constant:
            return tuple(head.weight for head in self.heads)
        scales = self.scales(totals, num_data)
        return tuple(head.weight * c / scales[self.reference] for head, c in zip(self.heads, scales))

    def coefficients(self, shares: Sequence[float], of_loss: bool) -> list[float]:
        """What vectors of each loss are multiplied with, see the top of this file."""
        if not of_loss:
            return [math.sqrt(share) for share in shares]
        largest = max(share / head.weight for share, head in zip(shares, self.heads))
        return [share / math.sqrt(largest) for share in shares]

    # -------------------------------------------------------------------------------------------------------- vectors
    def rounds(
        self,
        vectors: Vectors,
        outputs: Sequence[Tensor],
        terms: Sequence[tuple[Tensor, Any, int | None]],
        draws: Draws,
        shares: Sequence[float],
    ) -> list[Round]:
        """What is sent back together.

        Args:
            vectors: The vectors of each loss by itself.
            outputs: What the losses read, attached to the graph.
            terms: For each loss outputs [N, R, C], targets and class axis.
            draws: Random numbers for all.
            shares: As `shares` returns them.
        """
        everyone, N = range(len(self.heads)), len(terms[0][0])
        numbers = [vectors.count(head.likelihood, F) for head, (F, *_) in zip(self.heads, terms, strict=True)]
        factors = self.coefficients(shares, vectors.of_loss)

        def send(i: int, own: Draws) -> Iterator[Tensor]:
            F, Y, _ = terms[i]
            return vectors.send(self.heads[i].likelihood, F, Y, own)

        streams: Sequence[Draws] = [draws] * len(numbers)
        if vectors.seed is not None:
            about = (repr(vectors), *(tuple(F.shape[1:]) for F, *_ in terms))
            streams = self.streams(about, draws, N, [lambda own, i=i: [*send(i, own)] for i in everyone])

        def restored(i: int) -> Iterator[Tensor]:
            f, (_, _, axis), likelihood = outputs[i], terms[i], self.heads[i].likelihood
            return (likelihood.restore(v * factors[i], f.shape, N, axis).to(f.dtype) for v in send(i, streams[i]))

        # An output that no tracked layer reaches has no graph.
        live = [i for i in everyone if outputs[i].requires_grad and numbers[i]]
        if vectors.together and len(set(numbers)) == 1:
            sent = ([*parts] for parts in zip(*map(restored, live), strict=True))
            return [Round([outputs[i] for i in live], numbers[0], sent)]
        return [
            Round([outputs[i]], numbers[i], ([v] for v in restored(i)), terms[i][0].shape[1], f" for output {key!r}")
            for i, key in enumerate(self.keys)
            if i in live
        ]

    def streams(
        self, about: Hashable, draws: Draws, N: int, consumers: Sequence[Callable[[Draws], object]]
    ) -> list[Draws]:
        """`share_draws`, asking how many numbers are needed only once for each `about`."""
        if about not in self._sizes:
            if len(self._sizes) > 64:
                self._sizes.clear()
            self._sizes[about] = [_asked_size(consumer) for consumer in consumers]
        return share_draws(draws, N, self._sizes[about])


class _Asked(Draws):
    """Notes which random numbers are asked for, and gives 1/2 for all."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def uniform(self, *shape: int) -> Tensor:
        self.shapes.append(shape)
        return torch.full(shape, 0.5, dtype=torch.float64)


def _asked_size(consumer: Callable[[Draws], object]) -> int:
    """How many random numbers per example a consumer asks for; it is called with numbers of no meaning."""
    asked = _Asked()
    consumer(asked)
    return sum(math.prod(shape[1:]) for shape in asked.shapes)


class _Given(Draws):
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
    """Random numbers for several consumers from one stream, example by example, so that batches don't matter.

    Args:
        draws: The stream.
        N: Number of examples.
        sizes: How many numbers per example each consumer needs.

    Example:
        >>> one, two = share_draws(Draws(0), 4, [2, 1])
        >>> numbers = torch.cat([one.uniform(4, 2), two.uniform(4, 1)], 1)
        >>> bool((numbers == Draws(0).uniform(4, 3)).all())
        True
    """
    return [_Given(part) for part in draws.uniform(N, sum(sizes)).split([*sizes], 1)]


def rebuild_losses(options: Mapping[str, Any]) -> Any:
    """A loss, or several with their weights, from `options()`.

    Raises:
        UnsupportedError: If one of them is none of PyTorch's that this package knows.

    Example:
        >>> from torch import nn
        >>> rebuild_losses(Heads({"a": nn.MSELoss(), "b": (nn.CrossEntropyLoss(), 0.5)}).options())
        {'a': (MSELoss(), 1.0), 'b': (CrossEntropyLoss(), 0.5)}
    """
    if options["loss"] not in ("dict", "tuple"):
        return rebuild_loss(options)
    found: dict[Key, Any] = {}
    for index in range(options["number"]):
        prefix = f"{index}.options."
        own = {name.removeprefix(prefix): option for name, option in options.items() if name.startswith(prefix)}
        found[options[f"{index}.output"]] = (rebuild_loss(own), options[f"{index}.weight"])
    return found if options["loss"] == "dict" else tuple(found.values())


def _is_number(given: Any) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool)


def _read_loss(key: Any, given: Any) -> tuple[Any, float]:
    """Loss and weight of one entry."""
    if not isinstance(key, (str, int)):
        raise ValueError(f"The loss for the output {key!r}: expected a name or a number, got a {type(key).__name__}.")
    loss, weight = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, 1.0)
    if isinstance(loss, (tuple, list, Mapping)) or not (callable(loss) or isinstance(loss, Likelihood)):
        raise ValueError(
            f"The loss for the output {key!r}: expected a loss or a pair (loss, weight), got {given!r}. Outputs inside "
            "of outputs are picked with `output=`."
        )
    if not _is_number(weight) or not (math.isfinite(weight) and weight > 0):
        none = " A loss with weight 0 has no curvature: leave it out." if _is_number(weight) and weight == 0 else ""
        raise ValueError(
            f"The weight of the loss for the output {key!r} is {weight!r}; expected a positive finite number.{none}"
        )
    return loss, float(weight)
