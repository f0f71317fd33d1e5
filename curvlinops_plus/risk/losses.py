"""The losses of a risk, one for each output: `Σ_h w_h c_h Σ_n Σ_r ℓ_h(f_h(x_n)_r, y_{h,n,r})`.

Most models have one output and one loss, a list of one with weight 1. With several, the model returns a dict or a
tuple, the losses are the same of `loss` or `(loss, weight)`, and so are the targets. Each loss has a reduction of its
own, read literally over the whole data set: `c_h` is 1 for "sum", and one over what PyTorch divides by for "mean".

Statistics have one factor `c` in front, that of the reference loss: the first one under "mean". What else multiplies a
loss is its relative weight `w_h c_h / c`, see `LossWeights`. `Totals` are what a pass over the data counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.likelihood import Likelihood, has_likelihood, likelihood_of, rebuild_loss
from curvlinops_plus.likelihood.likelihood import has_own_hooks
from curvlinops_plus.likelihood.of_examples import OfExamples
from curvlinops_plus.likelihood.sampling import wide_dtype
from curvlinops_plus.risk.batches import is_iterator, require_rereadable, scalar_loss, select_output
from curvlinops_plus.risk.graph import raise_unreached, refuse_outside_reads
from curvlinops_plus.risk.preserve import eager, training_modules

Key = str | int
Number = Tensor | float


@dataclass
class Totals:
    """What one batch, or all batches of a pass, contained.

    Attributes:
        examples: N.
        terms: Loss terms of the reference loss, N·R.
        loss_count: What PyTorch's mean reduction of the reference loss divides by; of all losses if all are sums.
        called: Indices of the layers that ran.
        reached: Indices of the layers that a gradient reached.
        counts: For each loss, what its mean divides by.
        losses: For each loss, its un-reduced sum.
        weights: For each loss, its relative weight in the vectors (see `LossWeights`); empty if there were none.
        steps: Of a stream, the sum of the weights of its steps: what totals that are added are parts of, too.
    """

    examples: int = 0
    terms: int = 0
    loss_count: Number = 0.0
    called: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    counts: tuple[Number, ...] = ()
    losses: tuple[Number, ...] = ()
    weights: tuple[float, ...] = ()
    steps: float = 0.0

    def mismatch(self, other: Totals) -> str | None:
        """Why statistics of these and other totals must not be added, None if they may."""
        mine, theirs = self.weights, other.weights
        if not mine or not theirs or all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(mine, theirs)):
            return None
        here, there = (" : ".join(f"{weight:.4g}" for weight in weights) for weights in (mine, theirs))
        return (
            f"Statistics of several losses can't be added: their relative weights are {here} here and {there} there, "
            "since their means are over other proportions of terms. Compute them on the union of the data, or use "
            'reduction="sum" for all losses, with the divisors in their weights.'
        )

    def add(self, other: Totals) -> None:
        """Add another batch's totals.

        Raises:
            ValueError: If several losses had other weights there.
        """
        if problem := self.mismatch(other):
            raise ValueError(problem)
        self.examples += other.examples
        self.terms += other.terms
        self.loss_count = _sum(self.loss_count, other.loss_count)
        self.called |= other.called
        self.reached |= other.reached
        self.weights = self.weights or other.weights
        self.steps = max(self.steps, other.steps)
        if other.counts:
            self.counts = tuple(map(_sum, self.counts, other.counts)) if self.counts else other.counts
            self.losses = tuple(map(_sum, self.losses, other.losses)) if self.losses else other.losses

    def decay(self, factor: float) -> None:
        """Multiply what statistics are divided by."""
        self.loss_count = self.loss_count * factor  # others may have the same tensor
        self.steps *= factor

    def over(self, processes: Alone, error: Exception | None = None) -> Totals:
        """The totals of all processes; an `error` of this one is raised in all. Collective.

        Raises:
            ValueError: If there are no examples, or several losses have other weights in other processes.
        """
        told = processes.gather((self.plain(), error)) if processes.world > 1 else [(self, error)]
        if noticed := [each for _, each in told if each is not None]:
            raise error or noticed[0]
        if processes.world == 1:
            return self
        whole = Totals.union(totals for totals, _ in told)
        if not whole.examples:
            raise ValueError(f"`data` has no examples in any of the {processes.world} processes.")
        return whole

    @classmethod
    def union(cls, parts: Iterable[Totals]) -> Totals:
        """The totals of all parts together."""
        whole = cls()
        for totals in parts:
            whole.add(totals)
        return whole

    def plain(self) -> Totals:
        """The same without tensors."""
        counts, losses = tuple(map(float, self.counts)), tuple(map(float, self.losses))
        return replace(self, loss_count=float(self.loss_count), counts=counts, losses=losses)

    def detached(self) -> Totals:
        """The same without a graph behind the losses, in double precision."""
        counts, losses = tuple(map(_wide, self.counts)), tuple(map(_wide, self.losses))
        return replace(self, loss_count=_wide(self.loss_count), counts=counts, losses=losses)

    def of_stream(self) -> Totals:
        """What a stream of batches adds up, in double precision, as a state has it that is resumed."""
        return replace(self, loss_count=_wide(self.loss_count), counts=(), losses=())


def _wide(x: Number) -> Number:
    return x.detach().to(wide_dtype(x.device)) if isinstance(x, Tensor) else x


def _sum(one: Number, other: Number) -> Number:
    # A zero added to a tensor takes as long as a small layer does.
    if type(one) is float and one == 0:
        return other
    return one if type(other) is float and other == 0 else one + other


@dataclass(eq=False)
class Terms:
    """Outputs and targets of one batch in canonical form, one for each loss, and the totals of the batch.

    Attributes:
        outputs: For each loss [N, R, C]; as the model returned it for a loss without a likelihood.
        targets: For each loss.
        totals: What the batch contained; the losses have a graph where the outputs have one.
        weight: Weights of the examples [N], None for ones.
    """

    outputs: tuple[Tensor, ...]
    targets: tuple[Any, ...]
    totals: Totals
    weight: Tensor | None = None


@dataclass(eq=False)
class OutputLoss:
    """A loss and the output that it reads.

    Attributes:
        key: Key or position of output and target; None if there is one output.
        default_reduction: For a loss without an attribute `reduction`.
    """

    key: Key | None
    loss: Any
    weight: float = 1.0
    default_reduction: str | None = None

    @property
    def title(self) -> str:
        """Its name in messages."""
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return name if self.key is None else f"loss {self.key!r} ({name})"

    @cached_property
    def known(self) -> bool:
        """Whether it has a likelihood."""
        return "likelihood" in vars(self) or has_likelihood(self.loss)

    @cached_property
    def likelihood(self) -> Likelihood:
        """It as a negative log-likelihood.

        Raises:
            UnsupportedError: If it, or one of its options, has none.
        """
        try:
            return likelihood_of(self.loss)
        except UnsupportedError as error:
            raise error if self.key is None else UnsupportedError(f"{self.title}: {error}") from error

    @property
    def reduction(self) -> str:
        """ "mean" or "sum".

        Raises:
            UnsupportedError: For "none" and others: what is no scalar loss has no curvature.
        """
        if self.known:
            return self.likelihood.reduction
        reduction = getattr(self.loss, "reduction", None) or self.default_reduction or "mean"
        if reduction == "batchmean":  # nn.KLDivLoss: the sum over the batch, divided by the number of its examples
            return "mean"
        if reduction not in ("mean", "sum"):
            raise UnsupportedError(
                f"{self.title} (reduction={reduction!r}) is no scalar loss, so it has no curvature; use "
                '"mean" or "sum".'
            )
        return reduction

    def canonical(self, f: Tensor, y: Any, N: int, class_axis: int | None) -> tuple[Tensor, Any]:
        """Output [N, R, C] and target of one batch; both as they are for a loss without a likelihood.

        Raises:
            UnsupportedError: If somebody has changed what the loss computes since its likelihood was taken.
        """
        if not self.known:
            return f, y
        if isinstance(self.loss, nn.Module) and ("forward" in vars(self.loss) or has_own_hooks(self.loss)):
            raise UnsupportedError(
                f"{self.title} has hooks, or a `forward` of its own, that it did not have when this risk was made: "
                "make it anew."
            )
        if isinstance(y, Tensor) and y.dtype != f.dtype and y.is_floating_point():
            y = y.to(f.dtype)
        try:
            return self.likelihood.canonical(f, y, N, class_axis)
        except (UnsupportedError, ValueError, TypeError) as error:
            if self.key is None:
                raise
            raise type(error)(f"output {self.key!r}: {error}") from error

    def count(self, F: Tensor, Y: Any, weight: Tensor | None) -> Tensor:
        """What "mean" divides by, of a loss with a likelihood."""
        return self.likelihood.count(F, Y) if weight is None else self.likelihood.counts(F, Y) @ weight

    def sums(self, F: Tensor, Y: Any, N: int, weight: Tensor | None = None) -> tuple[Number, Tensor]:
        """What "mean" divides by, and the sum of all terms; a loss without a likelihood counts as N terms."""
        if self.known:
            terms = self.likelihood.nll(F, Y)
            return self.count(F, Y, weight), (terms if weight is None else terms * weight.to(F)[:, None]).sum()
        value = scalar_loss(self.loss(F, Y), F, self.loss)
        return float(N), value * N if self.reduction == "mean" else value


class Losses(tuple[OutputLoss, ...]):
    """The losses of a risk.

    Args:
        given: A loss, or `Losses`; or a dict or a tuple (or list) whose entries are a loss, or a pair of a loss and its
            weight.
        reduction: For losses without an attribute `reduction`.

    Raises:
        TypeError: If the loss is a class or not callable.
        ValueError: If there is none, or one of several is none; if a weight is no positive finite number, or
            `reduction` contradicts the losses.

    Example:
        >>> from torch import nn
        >>> losses = Losses({"class": (nn.CrossEntropyLoss(), 1.0), "box": (nn.MSELoss(), 0.5)})
        >>> [(loss.key, loss.weight) for loss in losses], losses.reduction, len(Losses(nn.MSELoss()))
        ([('class', 1.0), ('box', 0.5)], 'mean', 1)
    """

    form: str
    default_reduction: str | None

    def __new__(cls, given: Any, reduction: str | None = None) -> Losses:
        if isinstance(given, Losses):
            given, reduction = given.given, reduction or given.default_reduction
        form = "dict" if isinstance(given, Mapping) else "tuple" if isinstance(given, (tuple, list)) else "single"
        several = dict(enumerate(given)) if form == "tuple" else given if isinstance(given, Mapping) else {None: given}
        self = super().__new__(cls, [_read_loss(key, entry, reduction) for key, entry in several.items()])
        self.form, self.default_reduction = form, reduction
        own = {getattr(one.loss, "reduction", None) for one in self}
        if not own:
            raise ValueError("There are no losses: give at least one.")
        if reduction is not None and None not in own and own != {reduction}:
            raise ValueError(
                f"reduction={reduction!r} contradicts the loss, which has reduction={own.pop()!r}. The argument is for "
                f"losses without that attribute; leave it out, or make the loss with the other reduction."
            )
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copy and pickle
        return self.given, self.default_reduction

    @property
    def keys(self) -> list[Any]:
        """Keys or positions of the outputs."""
        return [one.key for one in self]

    @property
    def given(self) -> Any:
        """The losses as they were given: one, or a dict or tuple of pairs of a loss and its weight."""
        return self[0].loss if self.form == "single" else self.joined([(one.loss, one.weight) for one in self])

    @cached_property
    def known(self) -> bool:
        """Whether all losses have a likelihood."""
        return all(one.known for one in self)

    @cached_property
    def reference(self) -> int:
        """Index of the loss whose factor `c` is that of all statistics: the first one under "mean".

        Raises:
            UnsupportedError: If a loss has another reduction than "mean" and "sum".
        """
        reductions = [one.reduction for one in self]
        return reductions.index("mean") if "mean" in reductions else 0

    @property
    def reduction(self) -> str:
        """That of the reference loss: "mean" if any loss has it."""
        return self[self.reference].reduction

    @property
    def constant_weights(self) -> bool:
        """Whether relative weights don't depend on the data."""
        return len(self) == 1 or self.reduction == "sum"

    def of_examples(self) -> Losses:
        """The same, of which those without a likelihood have the loss of each example by itself."""
        losses = Losses(self)
        for one in losses:
            if not one.known:
                one.likelihood = OfExamples(one.loss, one.reduction)
                one.known = True
        return losses

    def require_likelihoods(self) -> None:
        """Refuse losses that have none."""
        for one in self:
            _ = one.likelihood

    def options(self) -> dict[str, Any]:
        """Everything that determines the losses and their weights, in one flat dict; see `rebuild_losses`."""
        if self.form == "single":
            return self[0].likelihood.options()
        found: dict[str, Any] = {"loss": self.form, "number": len(self)}
        for index, one in enumerate(self):
            found |= {f"{index}.output": one.key, f"{index}.weight": one.weight}
            found |= {f"{index}.options.{name}": option for name, option in one.likelihood.options().items()}
        return found

    # -------------------------------------------------------------------------------------------- outputs and targets
    def select(
        self, out: Any, selector: Callable[[Any], Any] | None
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The outputs that the losses read, and their class axes where they are not the losses' own.

        Raises:
            ValueError: If outputs and losses don't match.
        """
        if self.form == "single":
            f, last = select_output(out, selector)
            return (f,), (-1 if last and f.ndim > 2 else None,)
        chosen = out if selector is None else selector(out)
        parts = self._match(chosen, "output", "The model returned" if selector is None else "`output` selected")
        if other := [key for key, part in zip(self.keys, parts) if not isinstance(part, Tensor)]:
            raise ValueError(f"output {other[0]!r} is no tensor; expected the one that its loss reads.")
        logits = getattr(out, "logits", None)
        return tuple(parts), tuple(-1 if f is logits and f.ndim > 2 else None for f in parts)

    def targets(self, y: Any) -> tuple[Any, ...]:
        """The target of each loss.

        Raises:
            ValueError: If targets and losses don't match.
        """
        return (y,) if self.form == "single" else tuple(self._match(y, "target", "The batch has"))

    def joined(self, targets: Sequence[Any]) -> Any:
        """The target of a batch, from those of each loss; undoes `targets`."""
        if self.form == "single":
            return targets[0]
        return dict(zip(self.keys, targets, strict=True)) if self.form == "dict" else tuple(targets)

    def _match(self, given: Any, what: str, subject: str) -> list[Any]:
        """The entries of a dict or tuple in the order of the losses."""
        kind = "dict" if isinstance(given, Mapping) else "tuple" if isinstance(given, (tuple, list)) else None
        parts = dict(given if kind == "dict" else enumerate(given)) if kind else {}
        if kind == self.form and parts.keys() == set(self.keys):
            return [parts[key] for key in self.keys]
        came = f"a {kind} with {what}s {list(parts)}" if kind else f"a {type(given).__name__}"
        raise ValueError(
            f"{subject} {came}, but the losses are a {self.form} for the {what}s {self.keys}. Outputs can be brought "
            "into the form of the losses by EmpiricalRisk(..., output=lambda o: ...)."
        )

    def terms(
        self,
        outputs: Sequence[Tensor],
        targets: Sequence[Any],
        N: int,
        class_axes: Sequence[int | None],
        weight: Tensor | None = None,
    ) -> Terms:
        """Outputs and targets of one batch in canonical form, and its totals."""
        given = zip(self, outputs, targets, class_axes, strict=True)
        Fs, Ys = zip(*[one.canonical(f, y, N, axis) for one, f, y, axis in given])
        counts, losses = zip(*[one.sums(F, Y, N, weight) for one, F, Y in zip(self, Fs, Ys)])
        first = self.reference
        terms = N * Fs[first].shape[1] if self[first].known else N
        # Sums are divided by nothing; whether any term of any loss counts is asked all the same.
        count = sum(counts[1:], counts[0]) if self[first].reduction == "sum" else counts[first]
        return Terms(Fs, Ys, Totals(N, terms, count, counts=counts, losses=losses), weight)

    # --------------------------------------------------------------------------------------------------------- factors
    def scale(
        self, totals: Totals, num_data: int | None = None, num_per_example_loss_terms: int | None = None
    ) -> Number:
        """`c`: what multiplies the sum of all terms of the reference loss over a whole data set.

        Args:
            totals: Of the data set.
            num_data: Replaces the number of examples that was counted.
            num_per_example_loss_terms: Replaces the number of loss terms per example that was counted.

        Raises:
            ValueError: If no loss term counts.
        """
        given = 1.0 if num_data is None else totals.examples / float(num_data)
        if num_per_example_loss_terms is not None:
            given *= totals.terms / totals.examples / float(num_per_example_loss_terms)
        return self._divided(self[self.reference], given, totals.loss_count)

    def scales(self, totals: Totals, num_data: int | None = None) -> tuple[Number, ...]:
        """`c_h` of each loss over a whole data set; arguments as for `scale`."""
        given = 1.0 if num_data is None else totals.examples / float(num_data)
        return tuple(self._divided(one, given, count) for one, count in zip(self, totals.counts, strict=True))

    def _divided(self, one: OutputLoss, given: float, count: Number) -> Number:
        if one.reduction == "sum":
            return 1.0
        count = float(count)
        if not count > 0:
            raise ValueError(
                f"No term of {one.title} counts: every target is ignored or has weight 0, so the mean over them "
                f"does not exist. {'Leave this loss out.' if len(self) > 1 else 'Skip such batches until one counts.'}"
            )
        return given / count

    def vector_factors(self, weights: Sequence[float], linear: bool) -> list[float]:
        """What vectors of each loss are multiplied by so that the matrix has these relative weights.

        Args:
            weights: Relative weights `s_h`.
            linear: Whether a vector is linear in its loss, like a gradient. The empirical Fisher is that of the
                weighted loss: with `c*` the largest `c_h` it is `c* Σ_n g_n g_nᵀ`, with
                `g_n = Σ_h (w_h c_h / c*) Σ_r ∇ℓ_{h,n,r}`. Else the square of a vector is linear in its loss, and the
                factor is the root of the weight.
        """
        if not linear:
            return [math.sqrt(weight) for weight in weights]
        largest = max(weight / one.weight for weight, one in zip(weights, self))
        return [weight / math.sqrt(largest) for weight in weights]


def _read_loss(key: Key | None, entry: Any, reduction: str | None) -> OutputLoss:
    """A loss, or, of several, a pair of a loss and its weight."""
    pair = key is not None and isinstance(entry, (tuple, list)) and len(entry) == 2
    (loss, weight), where = entry if pair else (entry, 1.0), "" if key is None else f" for the output {key!r}"
    if isinstance(loss, type):
        raise TypeError(f"The loss{where} is the class {loss.__name__}; expected an instance. Call it.")
    if not callable(loss) and not isinstance(loss, Likelihood):
        came = repr(entry) if isinstance(entry, (str, int, float)) else f"a {type(entry).__name__}"
        raise (TypeError if key is None else ValueError)(
            f"The loss{where} is {came}; expected one as nn.MSELoss() or nn.CrossEntropyLoss(), or a function of "
            "output and target that returns a 0-d tensor. For several outputs give a dict or a tuple, with a loss or "
            "a pair (loss, weight) for each."
        )
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
        raise ValueError(f"The weight of the loss{where} is {weight!r}; expected a positive finite number.")
    return OutputLoss(key, loss, float(weight), reduction)


def rebuild_losses(options: Mapping[str, Any]) -> Any:
    """A loss, or several with their weights, from `options()`.

    Raises:
        UnsupportedError: If one of them is none of PyTorch's that this package knows.

    Example:
        >>> from torch import nn
        >>> rebuild_losses(Losses({"a": nn.MSELoss(), "b": (nn.CrossEntropyLoss(), 0.5)}).options())
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


# ------------------------------------------------------------------------------------------------ passes over all data
# `risk` is an `EmpiricalRisk`.
class LossWeights:
    """The relative weights of losses during a pass over data.

    Args:
        num_data: As in `EmpiricalRisk`.
        totals: Of the whole data set, if they are known; else each batch has the weights of its own counts, which have
            to be the same in all of them.
    """

    def __init__(self, losses: Losses, num_data: int | None = None, totals: Totals | None = None) -> None:
        self.losses, self.num_data, self.counted = losses, num_data, False
        self.fixed: tuple[float, ...] | None = None
        if losses.constant_weights:
            self.fixed = tuple([one.weight for one in losses])
        elif totals is not None:
            self.fixed, self.counted = self._relative(totals), True

    @classmethod
    def plain(cls, losses: Losses) -> LossWeights:
        """Each loss has the weight that it was given, whatever its reduction."""
        weights = cls(losses)
        weights.fixed = tuple([one.weight for one in losses])
        return weights

    def _relative(self, totals: Totals) -> tuple[float, ...]:
        scales = self.losses.scales(totals, self.num_data)
        return tuple(float(one.weight * c / scales[self.losses.reference]) for one, c in zip(self.losses, scales))

    def of(self, batch: Totals) -> tuple[float, ...]:
        """The weights for a batch with these totals.

        Raises:
            ValueError: If they depend on the whole data set, and it is not known.
        """
        if self.fixed is not None:
            return self.fixed
        if len(reductions := {one.reduction for one in self.losses}) > 1:
            raise ValueError(
                f"The losses for {self.losses.keys} weigh by their numbers of terms in the whole data set, which can't "
                f"be known from batches that are seen once, as their reductions are {sorted(reductions)}. Give data "
                'that can be read twice, or use reduction="sum" for all losses, with the divisors in their weights.'
            )
        return self._relative(batch)

    def require(self, totals: Totals) -> None:
        """Refuse a pass over the data to which other weights belong than those that were used: the data change."""
        known = self.fixed if self.counted else None
        if known and not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(self._relative(totals), known)):
            raise ValueError(
                f"The numbers of terms that count for the losses of {self.losses.keys} differ from pass to pass, so "
                "the data change: is there random masking or augmentation? Give data that are the same each time."
            )

    def objective(self, batch: Totals) -> Tensor:
        """What the loss of a data set is the sum of over batches, up to the factor `c`; it has a graph."""
        batch.weights = self.of(batch)
        weighted = [s * loss if s != 1 else loss for s, loss in zip(batch.weights, batch.losses)]
        total = weighted[0] if len(weighted) == 1 else sum(weighted)
        assert isinstance(total, Tensor)
        return total


def loss_weights(risk: Any, known: Totals | None = None) -> LossWeights:
    """The weights for passes over the data of a risk.

    Args:
        known: Totals of a pass before, if there was one.

    Raises:
        ValueError: If they depend on the data, and these are spread over processes and can be read only once.

    Cost: one forward pass over the data if they depend on it, which is never so for one loss. For an iterator each
    batch has to determine them.
    """
    if not risk.losses.constant_weights:
        if risk.processes.world > 1:
            require_rereadable(risk.data, "the loss terms of all processes are counted first")
        if known is None and not is_iterator(risk.data):
            known = loss_pass(risk, "counting loss terms")
    return LossWeights(risk.losses, risk.options.num_data, known)


def loss_pass(risk: Any, desc: str = "loss") -> Totals:
    """Totals of all data. Cost: one forward pass. Random state is not restored."""
    totals = Totals()
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(risk.device.type, enabled=False), eager():
        for batch in risk.batches(desc):
            outputs, targets, class_axes = risk.run(batch)
            totals.add(risk.losses.terms(outputs, targets, batch.num_examples, class_axes, batch.weight).totals)
    return totals.over(risk.processes)


def gradient_pass(risk: Any) -> tuple[dict[str, Tensor], Totals]:
    """Gradient of the sum of all loss terms, each loss times its relative weight, and totals.

    Random state is not restored.
    """
    with torch.inference_mode(False):
        free = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
        totals, grads = Totals(), {key: torch.zeros_like(p) for key, p in free.items()}
    weights = loss_weights(risk)

    def add_batches(model: nn.Module) -> None:
        looked_at = risk.losses.known  # a loss that we know reads nothing but output and target
        reached = False
        for batch in risk.batches("gradient"):
            outputs, targets, class_axes = risk.run(batch, model)
            own = risk.losses.terms(outputs, targets, batch.num_examples, class_axes, batch.weight).totals
            objective = weights.objective(own)
            totals.add(own.detached())
            if not objective.requires_grad:
                continue
            reached = True
            if not looked_at:
                refuse_outside_reads("loss", [objective], risk.params)
                looked_at = True
            found = torch.autograd.grad(objective, list(free.values()), allow_unused=True)
            for total, g in zip(grads.values(), found):
                if g is not None:
                    total += g
        if not reached and totals.examples:
            raise_unreached()

    with torch.inference_mode(False), torch.enable_grad(), eager():
        risk.at(free, add_batches)
    risk.processes.sum_(list(grads.values()))
    totals = totals.over(risk.processes)
    weights.require(totals)
    return grads, totals


def require_same(risk: Any, first: Totals, second: Totals) -> None:
    """Compare the totals of two passes: the order of the examples does not matter, everything else does.

    Raises:
        NumericsError: If a loss is not finite.
        RuntimeError: If the passes disagree; names modules in training mode.
    """
    one, two = (
        float(sum(a.weight * float(x) for a, x in zip(risk.losses, totals.losses))) for totals in (first, second)
    )
    if not math.isfinite(one + two):
        raise NumericsError(f"The total loss is {one}: an output or a target has NaN or infinite entries.")
    tolerance = 1e-8 if coarsest_dtype(risk) == torch.float64 else 5e-5
    if first.examples == second.examples and math.isclose(one, two, rel_tol=tolerance, abs_tol=1e-6):
        return
    cause = "Does the data change from pass to pass (random augmentation, drop_last with shuffling), or the model?"
    if random := training_modules(risk.model):
        cause = f"These modules are in training mode: {random}; call model.eval()."
    raise RuntimeError(
        f"Two passes over the data disagree: total loss {one:.8g} over {first.examples} examples and {two:.8g} over "
        f"{second.examples}. {cause} check_deterministic=False turns this check off."
    )


def coarsest_dtype(risk: Any) -> torch.dtype:
    """The dtype of the parameters that rounds most: what the digits of results are limited by."""
    return max((p.dtype for p in risk.params.values()), key=lambda dtype: torch.finfo(dtype).eps)
