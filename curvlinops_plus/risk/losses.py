"""The losses of a risk, one for each output: `Σ_h w_h c_h Σ_n Σ_r ℓ_h(f_h(x_n)_r, y_{h,n,r})`.

Most models have one output and one loss, a list of one with weight 1. With several, the model
returns a dict or a tuple, the losses are the same of `loss` or `(loss, weight)`, and so are the
targets. Each loss has a reduction of its own, read literally over the whole data set: `c_h` is 1
for "sum", and one over what PyTorch divides by for "mean".

Statistics have one factor `c` in front, that of the reference loss: the first one under "mean".
What else multiplies a loss is its relative weight `w_h c_h / c`, see `LossWeights`. `Totals` are
what a pass over the data counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import CurvatureWarning, NumericsError, UnsupportedError, level_of_user
from curvlinops_plus.likelihood import Likelihood, has_likelihood, likelihood_of, rebuild_loss
from curvlinops_plus.likelihood.likelihood import OfExamples
from curvlinops_plus.random_state import kept_random_state
from curvlinops_plus.risk.batches import (
    Batch,
    mapped,
    raise_unreached,
    refuse_outside_reads,
    require_rereadable,
)
from curvlinops_plus.risk.preserve import kept_modules, training_modules

Key = str | int
Number = Tensor | float


@dataclass
class Totals:
    """What one batch, or all batches of a pass, contained.

    Attributes:
        examples: N.
        terms: Loss terms of the reference loss, N·R.
        loss_count: What PyTorch's mean reduction of the reference loss divides by; of all losses if
            all are sums.
        called: Indices of the layers that ran.
        reached: Indices of the layers that a gradient reached.
        counts: For each loss, what its mean divides by.
        losses: For each loss, its un-reduced sum; of one batch it may have a graph.
        weights: For each loss, its relative weight in the vectors (see `LossWeights`); empty if
            there were none.
        steps: Of a stream, the sum of the weights of its steps: what totals that are added are
            parts of, too.
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
        if (
            not mine
            or not theirs
            or all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(mine, theirs))
        ):
            return None
        here, there = (
            " : ".join(f"{weight:.4g}" for weight in weights) for weights in (mine, theirs)
        )
        return (
            f"Statistics of several losses can't be added: their relative weights are {here} here and {there} there, "
            "since their means are over other proportions of terms. Compute them on the union of the data, or use "
            'reduction="sum" for all losses, with the divisors in their weights.'
        )

    def add(self, other: Totals) -> None:
        """Add another batch's totals, without the graph of its losses and in double precision.

        Raises:
            ValueError: If several losses had other weights there.
        """
        if self.weights != other.weights and (problem := self.mismatch(other)):
            raise ValueError(problem)
        self.examples += other.examples
        self.terms += other.terms
        self.loss_count = _sum(self.loss_count, other.loss_count)
        self.called |= other.called
        self.reached |= other.reached
        self.weights = self.weights or other.weights
        self.steps = max(self.steps, other.steps)
        if other.counts:
            self.counts = tuple(map(_sum, self.counts or (0.0,) * len(other.counts), other.counts))
            self.losses = tuple(map(_sum, self.losses or (0.0,) * len(other.losses), other.losses))

    def decay(self, factor: float) -> None:
        """Multiply what statistics are divided by."""
        self.loss_count = self.loss_count * factor  # others may have the same tensor
        self.steps *= factor

    def over(self, processes: Alone, error: Exception | None = None) -> Totals:
        """The totals of all processes; an `error` of this one is raised in all. Collective.

        Raises:
            ValueError: If there are no examples, or several losses have other weights in other
                processes.
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

    def of_stream(self) -> Totals:
        """What a stream of batches adds up, in double precision, as a state has it that is
        resumed.
        """
        return replace(self, loss_count=_sum(0.0, self.loss_count), counts=(), losses=())


def _sum(total: Number, new: Number) -> Number:
    new = new.detach().double() if isinstance(new, Tensor) else new
    # A zero added to a tensor takes as long as a small layer does.
    return new if type(total) is float and total == 0 else total + new


@dataclass(eq=False)
class Terms:
    """Outputs and targets of one batch in canonical form, one for each loss, and the totals of the
    batch.

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
        warning: Of a loss without a likelihood, what is to be said if there are several batches;
            None before it was compared.
    """

    key: Key | None
    loss: Any
    weight: float = 1.0
    default_reduction: str | None = None
    warning: str | None = None

    @property
    def title(self) -> str:
        """Its name in messages."""
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return name if self.key is None else f"loss {self.key!r} ({name})"

    @cached_property
    def known(self) -> bool:
        """Whether it has a likelihood."""
        return has_likelihood(self.loss)

    @cached_property
    def likelihood(self) -> Likelihood:
        """It as a negative log-likelihood.

        Raises:
            UnsupportedError: If it, or one of its options, has none.
        """
        try:
            return likelihood_of(self.loss)
        except UnsupportedError as error:
            raise (
                error if self.key is None else UnsupportedError(f"{self.title}: {error}")
            ) from error

    @property
    def reduction(self) -> str:
        """ "mean" or "sum".

        Raises:
            UnsupportedError: For "none" and others: what is no scalar loss has no curvature.
        """
        if self.known:
            return self.likelihood.reduction
        reduction = getattr(self.loss, "reduction", None) or self.default_reduction or "mean"
        if reduction not in ("mean", "sum", "batchmean"):
            raise UnsupportedError(
                f"{self.title} (reduction={reduction!r}) is no scalar loss, so it has no curvature; use "
                '"mean" or "sum".'
            )
        # nn.KLDivLoss: the sum over the batch, divided by the number of its examples.
        return "mean" if reduction == "batchmean" else reduction

    def terms(
        self, f: Tensor, y: Any, class_axis: int | None, batch: Batch, values: bool
    ) -> tuple[Tensor, Any, Number, Number]:
        """Output [N, R, C] and target of a batch, what "mean" divides by, and the sum of all terms.

        Of a loss without a likelihood output and target are as they are, and it counts as N terms.
        Of others the sum is 0 unless `values` are asked for.
        """
        N, weight = batch.num_examples, batch.weight
        if not self.known:
            self._compare(f, y, batch)
            value = self._scalar(self.loss(f, y), f)
            return f, y, float(N), value * N if self.reduction == "mean" else value
        likelihood = self.likelihood
        try:
            F, Y = likelihood.canonical(f, y, N, class_axis)
        except (UnsupportedError, ValueError, TypeError) as error:
            raise (
                error if self.key is None else type(error)(f"output {self.key!r}: {error}")
            ) from error
        count = likelihood.count(F, Y) if weight is None else likelihood.counts(F, Y) @ weight
        if not values:
            return F, Y, count, 0.0
        terms = likelihood.nll(F, Y)
        return F, Y, count, (terms if weight is None else terms * weight.to(F)[:, None]).sum()

    def _compare(self, f: Tensor, y: Any, batch: Batch) -> None:
        """Warn, once and in a pass of several batches, of a loss that is no mean (or sum) over
        examples.
        """
        if self.warning is None and batch.num_examples > 1:
            self.warning = _no_mean(self, f, y, batch.num_examples)
        if self.warning and batch.first:
            message, self.warning = self.warning, ""
            warn(message, CurvatureWarning, stacklevel=level_of_user())

    def _scalar(self, value: Any, f: Tensor) -> Tensor:
        """What the loss returned for output `f`, if that can be differentiated.

        Raises:
            TypeError: If it is no tensor.
            ValueError: If it is no single number, or does not depend on the output.
        """
        if not isinstance(value, Tensor) or value.numel() != 1:
            came = (
                f"tensor of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise (ValueError if isinstance(value, Tensor) else TypeError)(
                f"The loss {self.title} returned a {came}; expected a 0-d tensor, a single number for the batch that "
                'is differentiable in the output: without .item(), with its entries averaged (reduction="mean") or '
                'added up (EmpiricalRisk(..., reduction="sum")).'
            )
        if torch.is_grad_enabled() and f.requires_grad and not value.requires_grad:
            raise ValueError(
                f"The loss {self.title} does not depend on the model's output in a differentiable "
                "way, so it has no curvature. Does it detach the output, convert it (.item(), "
                ".numpy()), round it, or compute under torch.no_grad()?"
            )
        return value


#: Largest relative difference of two values of a loss that passes as rounding, by bytes of an
#: output's number.
_ROUNDING = {2: 5e-2, 4: 1e-4, 8: 1e-6}


# How many examples are compared: enough for differing weights, masks and classes among them.
_FEW = 8


def _no_mean(one: OutputLoss, f: Tensor, y: Any, N: int) -> str:
    """What is to be said of a loss whose value for a few examples is not the mean, or sum, of
    theirs by themselves.

    Nothing if it is; if output or target can't be cut into examples, as lists of one target for
    each; or if the loss can't be computed for a single example, or is random.

    Cost: ten calls of the loss.
    """
    several = (
        y.values()
        if isinstance(y, Mapping)
        else y
        if isinstance(y, (tuple, list)) and len(y) != N
        else [y]
    )
    if not all(part is None or isinstance(part, Tensor) for part in several):
        return ""
    chosen = torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist()[:_FEW]

    def rows(t: Tensor, examples: list[int]) -> Tensor:
        t = t.detach()
        return (
            t.clone()
            if t.ndim == 0 or len(t) == 1
            else t.unflatten(0, (N, -1))[examples].flatten(0, 1)
        )

    def value(examples: list[int]) -> float:
        return float(one.loss(rows(f, examples), mapped(rows, y, examples)))

    modules = [*one.loss.modules()] if isinstance(one.loss, nn.Module) else []
    try:
        with torch.no_grad(), kept_random_state(), kept_modules(modules):
            together, again = value(chosen), value(chosen)
            alone = [value([n]) for n in chosen]
    except Exception:
        return ""
    size = max(
        [abs(number) for number in (together, *alone) if math.isfinite(number)], default=math.nan
    )
    room = _ROUNDING[f.element_size()] * size
    theirs = {"mean": sum(alone) / len(alone), "sum": sum(alone)}
    fitting = [kind for kind, number in theirs.items() if abs(together - number) <= room]
    if (
        one.reduction in fitting or not abs(together - again) <= room
    ):  # the latter of random and of infinite ones
        return ""
    advice = "Give all data in one batch, or a loss that averages what single examples have"
    if fitting:
        advice = f"It is their {fitting[0]}: say EmpiricalRisk(..., reduction={fitting[0]!r})"
    return (
        f"{one.title} is not the {one.reduction} of the losses of single examples: for "
        f"{len(alone)} of them it is {together:.4g}, and their {one.reduction} is "
        f"{theirs[one.reduction]:.4g}. So loss, gradient and curvature depend on how the data are "
        f"split into batches. {advice}."
    )


class Losses(list[OutputLoss]):
    """The losses of a risk.

    Args:
        given: A loss; or a dict or a tuple (or list) whose entries are a loss, or a pair of a loss
            and its weight.
        reduction: For losses without an attribute `reduction`.
        check: Whether losses without a likelihood are compared with those of single examples.

    Raises:
        TypeError: If the loss is a class or not callable.
        ValueError: If there is none, or one of several is none; if a weight is no positive finite
            number, or `reduction` contradicts the losses.

    Example:
        >>> from torch import nn
        >>> losses = Losses({"class": (nn.CrossEntropyLoss(), 1.0), "box": (nn.MSELoss(), 0.5)})
        >>> [(loss.key, loss.weight) for loss in losses], losses.reduction, len(Losses(nn.MSELoss()))
        ([('class', 1.0), ('box', 0.5)], 'mean', 1)
    """

    def __init__(self, given: Any, reduction: str | None = None, check: bool = True) -> None:
        form = (
            "dict"
            if isinstance(given, Mapping)
            else "tuple"
            if isinstance(given, (tuple, list))
            else "single"
        )
        several = (
            dict(enumerate(given))
            if form == "tuple"
            else given
            if isinstance(given, Mapping)
            else {None: given}
        )
        super().__init__([_read_loss(key, entry, reduction) for key, entry in several.items()])
        for one in () if check else self:
            one.warning = ""
        #: "single", "dict" or "tuple".
        self.form = form
        own = {getattr(one.loss, "reduction", None) for one in self}
        if not own:
            raise ValueError("There are no losses: give at least one.")
        if reduction is not None and None not in own and own != {reduction}:
            raise ValueError(
                f"reduction={reduction!r} contradicts the loss, which has reduction={own.pop()!r}. "
                "The argument is for losses without that attribute; leave it out, or make the loss "
                "with the other reduction."
            )

    @property
    def keys(self) -> list[Any]:
        """Keys or positions of the outputs."""
        return [one.key for one in self]

    @property
    def given(self) -> Any:
        """The losses as they were given: one, or a dict or tuple of pairs of a loss and its
        weight.
        """
        return (
            self[0].loss
            if self.form == "single"
            else self.joined([(one.loss, one.weight) for one in self])
        )

    @property
    def known(self) -> bool:
        """Whether all losses have a likelihood."""
        return all(one.known for one in self)

    @property
    def reference(self) -> OutputLoss:
        """The loss whose factor `c` is that of all statistics: the first one under "mean".

        Raises:
            UnsupportedError: If a loss has another reduction than "mean" and "sum".
        """
        return next((one for one in self if one.reduction == "mean"), self[0])

    @property
    def reduction(self) -> str:
        """That of the reference loss: "mean" if any loss has it."""
        return self.reference.reduction

    def of_examples(self) -> Losses:
        """The same, of which those without a likelihood have the loss of each example by itself."""
        losses = copy(self)
        losses[:] = [replace(one) for one in self]
        for one in losses:
            if not one.known:
                one.known, one.likelihood = True, OfExamples(one.loss, one.reduction)
        return losses

    def options(self) -> dict[str, Any]:
        """Everything that determines the losses and their weights; see `rebuild_losses`."""
        if self.form == "single":
            return self[0].likelihood.options()
        parts = {
            one.key: {"weight": one.weight, "options": one.likelihood.options()} for one in self
        }
        return {"loss": self.form, "parts": parts}

    # -------------------------------------------------------------------------- outputs and targets
    def select(
        self, out: Any, selector: Callable[[Any], Any] | None
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The outputs that the losses read, and their class axes where they are not the losses'
        own.

        Classes of Hugging Face's logits are on the last axis.

        Raises:
            ValueError: If outputs and losses don't match, an output is no tensor and nothing says
                which part of it is meant, or it holds no real numbers.
        """
        logits = getattr(out, "logits", None)
        subject = "The model returned" if selector is None else "`output` selected"
        chosen = out if selector is None else selector(out)
        if self.form == "single":
            parts = [logits if selector is None and isinstance(logits, Tensor) else chosen]
        else:
            parts = self.matched(chosen, "output", subject)
        for f in parts:
            if not isinstance(f, Tensor):
                named = (
                    [*f]
                    if isinstance(f, Mapping)
                    else [own.name for own in fields(f)]
                    if is_dataclass(f)
                    else ""
                )
                raise ValueError(
                    f"{subject} a {type(f).__name__}{f' with fields {named}' if named else ''}; "
                    "expected the tensor that the loss reads. Say which it is, as `output=lambda "
                    "o: o[0]` or `output=lambda o: o.logits`."
                )
            if f.is_complex() or not f.numel():
                came = f"{subject} a tensor of shape {list(f.shape)}, {f.dtype}"
                if not f.numel():
                    raise UnsupportedError(
                        f"{came}, without numbers. If the batch is empty, leave it out."
                    )
                raise UnsupportedError(
                    f"{came}; expected real numbers. Of complex ones give the loss both parts, "
                    "output=lambda o: torch.view_as_real(o)."
                )
        return tuple(parts), tuple([-1 if f is logits and f.ndim > 2 else None for f in parts])

    def joined(self, targets: Sequence[Any]) -> Any:
        """The target of a batch, from those of each loss."""
        if self.form == "single":
            return targets[0]
        return dict(zip(self.keys, targets, strict=True)) if self.form == "dict" else tuple(targets)

    def matched(self, given: Any, what: str, subject: str) -> Sequence[Any]:
        """The part of targets or outputs that belongs to each of several losses; undoes `joined`.

        Raises:
            ValueError: If they and the losses don't match.
        """
        kind = (
            "dict"
            if isinstance(given, Mapping)
            else "tuple"
            if isinstance(given, (tuple, list))
            else None
        )
        parts = dict(given if kind == "dict" else enumerate(given)) if kind else {}
        if kind == self.form and parts.keys() == set(self.keys):
            return [parts[key] for key in self.keys]
        came = f"a {kind} with {what}s {list(parts)}" if kind else f"a {type(given).__name__}"
        raise ValueError(
            f"{subject} {came}, but the losses are a {self.form} for the {what}s {self.keys}. "
            "Outputs can be brought into the form of the losses by EmpiricalRisk(..., "
            "output=lambda o: ...)."
        )

    def terms(self, read: tuple[Any, Any, Any], batch: Batch, values: bool = True) -> Terms:
        """Outputs and targets of one batch in canonical form, and its totals.

        Args:
            read: Outputs, targets and class axes, as `EmpiricalRisk.run` returns them.
            values: Whether the values of losses that have a likelihood are asked for.
        """
        given = zip(self, *read, strict=True)
        Fs, Ys, counts, losses = zip(
            *[one.terms(f, y, axis, batch, values) for one, f, y, axis in given]
        )
        means = [k for k, one in enumerate(self) if one.reduction == "mean"]
        first, N = means[0] if means else 0, batch.num_examples
        terms = N * Fs[first].shape[1] if self[first].known else N
        # Sums are divided by nothing; whether any term of any loss counts is asked all the same.
        count = counts[first] if means else sum(counts[1:], counts[0])
        return Terms(Fs, Ys, Totals(N, terms, count, counts=counts, losses=losses), batch.weight)


def _read_loss(key: Key | None, entry: Any, reduction: str | None) -> OutputLoss:
    """A loss, or, of several, a pair of a loss and its weight."""
    pair = key is not None and isinstance(entry, (tuple, list)) and len(entry) == 2
    (loss, weight), where = (
        entry if pair else (entry, 1.0),
        "" if key is None else f" for the output {key!r}",
    )
    if isinstance(loss, type):
        raise TypeError(
            f"The loss{where} is the class {loss.__name__}; expected an instance. Call it."
        )
    if not callable(loss) and not isinstance(loss, Likelihood):
        came = repr(entry) if isinstance(entry, (str, int, float)) else f"a {type(entry).__name__}"
        raise (TypeError if key is None else ValueError)(
            f"The loss{where} is {came}; expected one as nn.MSELoss() or nn.CrossEntropyLoss(), or "
            "a function of output and target that returns a 0-d tensor. For several outputs give a "
            "dict or a tuple, with a loss or a pair (loss, weight) for each."
        )
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
        raise ValueError(
            f"The weight of the loss{where} is {weight!r}; expected a positive finite number."
        )
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
    if "parts" not in options:
        return rebuild_loss(options)
    found = {
        key: (rebuild_loss(part["options"]), part["weight"])
        for key, part in options["parts"].items()
    }
    return found if options["loss"] == "dict" else tuple(found.values())


# ----------------------------------------------------------------------------- passes over all data
class LossWeights:
    """The relative weights of losses during a pass over the data of a risk.

    Args:
        risk: An `EmpiricalRisk`.
        totals: Of the whole data set, if they are known; else each batch has the weights of its own
            counts, which have to be the same in all of them.
        plain: Each loss has the weight that it was given, whatever its reduction.
    """

    def __init__(self, risk: Any, totals: Totals | None = None, plain: bool = False) -> None:
        self.risk, self.losses, self.counted = risk, risk.losses, False
        self.fixed: tuple[float, ...] | None = None
        if plain or len(self.losses) == 1 or self.losses.reduction == "sum":
            self.fixed = tuple([one.weight for one in self.losses])
        elif totals is not None:
            self.fixed, self.counted = self._relative(totals), True

    def _relative(self, totals: Totals) -> tuple[float, ...]:
        first, scale = self.losses.index(self.losses.reference), self.risk.scale
        return tuple(
            [
                one.weight * scale(totals, k) / scale(totals, first)
                for k, one in enumerate(self.losses)
            ]
        )

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
        """Refuse a pass over the data to which other weights belong than those that were used: the
        data change.
        """
        known = self.fixed if self.counted else None
        if known and not all(
            math.isclose(a, b, rel_tol=1e-9) for a, b in zip(self._relative(totals), known)
        ):
            raise ValueError(
                f"The numbers of terms that count for the losses of {self.losses.keys} differ from "
                "pass to pass, so the data change: is there random masking or augmentation? Give "
                "data that are the same each time."
            )

    def factors(self, batch: Totals, linear: bool) -> list[float]:
        """What vectors of each loss are multiplied by in this batch, which gets its weights.

        Args:
            linear: Whether a vector is linear in its loss, like a gradient. The empirical Fisher is
                that of the weighted loss: with `c*` the largest `c_h` it is `c* Σ_n g_n g_nᵀ`, with
                `g_n = Σ_h (w_h c_h / c*) Σ_r ∇ℓ_{h,n,r}`. Else the square of a vector is linear in
                its loss, and the factor is the root of the weight.
        """
        weights = batch.weights = self.fixed or self.of(batch)
        if not linear:
            return [math.sqrt(weight) for weight in weights]
        largest = max(weight / one.weight for weight, one in zip(weights, self.losses))
        return [weight / math.sqrt(largest) for weight in weights]

    def objective(self, batch: Totals) -> Tensor:
        """What the loss of a data set is the sum of over batches, up to the factor `c`; it has a
        graph.
        """
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
        ValueError: If they depend on the data, and these are spread over processes and can be read
            only once.

    Cost: one forward pass over the data if they depend on it, which is never so for one loss. For
    an iterator each batch has to determine them.
    """
    weights = LossWeights(risk, known)
    if weights.fixed is None:
        if risk.processes.world > 1:
            require_rereadable(risk.data, "the loss terms of all processes are counted first")
        if not isinstance(risk.data, Iterator):
            weights = LossWeights(risk, loss_pass(risk, "counting loss terms"))
    return weights


def loss_pass(risk: Any, desc: str = "loss") -> Totals:
    """Totals of all data. Cost: one forward pass. Inside of `preserve_state`."""
    totals = Totals()
    with torch.inference_mode(False), torch.no_grad():
        for batch in risk.batches(desc):
            totals.add(risk.losses.terms(risk.run(batch), batch).totals)
    return totals.over(risk.processes)


def gradient_pass(risk: Any) -> tuple[dict[str, Tensor], Totals]:
    """Gradient of the sum of all loss terms, each loss times its relative weight, and totals.

    Inside of `preserve_state`.
    """

    def add_batches(model: nn.Module) -> None:
        reached, looked_at = (
            False,
            risk.losses.known,
        )  # a loss that we know reads nothing but output and target
        for batch in risk.batches("gradient"):
            own = risk.losses.terms(risk.run(batch, model), batch).totals
            objective = weights.objective(own)
            totals.add(own)
            if not objective.requires_grad:
                continue
            if not looked_at:
                refuse_outside_reads("loss", [objective], risk.params)
            reached = looked_at = True
            found = torch.autograd.grad(objective, list(free.values()), allow_unused=True)
            for total, g in zip(grads.values(), found):
                if g is not None:
                    total += g
        if not reached and totals.examples:
            raise_unreached()

    with torch.inference_mode(False):  # with gradients
        free = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
        totals, grads, weights = (
            Totals(),
            {key: torch.zeros_like(p) for key, p in free.items()},
            loss_weights(risk),
        )
        risk.at(free, add_batches)
    risk.processes.sum_(list(grads.values()))
    totals = totals.over(risk.processes)
    weights.require(totals)
    return grads, totals


def require_same(risk: Any, first: Totals, second: Totals) -> None:
    """Compare the totals of two passes: the order of the examples does not matter, everything else
    does.

    Raises:
        NumericsError: If a loss is not finite.
        RuntimeError: If the passes disagree; names modules in training mode.
    """
    one, two = (
        float(sum(a.weight * float(x) for a, x in zip(risk.losses, totals.losses)))
        for totals in (first, second)
    )
    if not math.isfinite(one + two):
        raise NumericsError(
            f"The total loss is {one}: an output or a target has NaN or infinite entries."
        )
    tolerance = 1e-8 if coarsest_dtype(risk) == torch.float64 else 5e-5
    if first.examples == second.examples and math.isclose(
        one, two, rel_tol=tolerance, abs_tol=1e-6
    ):
        return
    cause = (
        "Does the data change from pass to pass (random augmentation, drop_last with shuffling), "
        "or the model?"
    )
    if random := training_modules(risk.model):
        cause = f"These modules are in training mode: {random}; call model.eval()."
    raise RuntimeError(
        f"Two passes over the data disagree: total loss {one:.8g} over {first.examples} examples "
        f"and {two:.8g} over {second.examples}. {cause} check_deterministic=False turns this check "
        "off."
    )


def coarsest_dtype(risk: Any) -> torch.dtype:
    """The dtype of the parameters that rounds most: what the digits of results are limited by."""
    return max((p.dtype for p in risk.params.values()), key=lambda dtype: torch.finfo(dtype).eps)
