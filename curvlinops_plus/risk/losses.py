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
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from numbers import Real
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.likelihood import Likelihood, has_likelihood, likelihood_of, rebuild_loss
from curvlinops_plus.likelihood.likelihood import OfExamples, any_is
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.loss_values import (
    no_mean,
    require_no_broadcast,
    require_own_gradient,
)

Key = str | int
Number = Tensor | float


class Losses(list["OutputLoss"]):
    """The losses of a risk.

    Args:
        given: A loss; or a dict or a tuple (or list) whose entries are a loss, or a pair of a loss
            and its weight.
        reduction: For losses without an attribute `reduction`.
        check: Whether losses without a likelihood are compared with those of single examples.

    Attributes:
        form: "single", "dict" or "tuple".
        output_keys: Keys or positions of the outputs.

    Raises:
        TypeError: If the loss is a class or not callable.
        ValueError: If there is none, or one of several is none; if a weight is no positive finite
            number, or `reduction` contradicts the losses.
        UnsupportedError: If a loss has another reduction than "mean" and "sum", or an option with
            which it is no likelihood.

    Example:
        >>> from torch import nn
        >>> losses = Losses({"class": (nn.CrossEntropyLoss(), 1.0), "box": (nn.MSELoss(), 0.5)})
        >>> [(loss.key, loss.weight) for loss in losses], losses.reduction
        ([('class', 1.0), ('box', 0.5)], 'mean')
    """

    def __init__(self, given: Any, reduction: str | None = None, check: bool = True) -> None:
        self.form = _form(given) or "single"
        entries = {None: given} if self.form == "single" else _parts_by_key(given)
        super().__init__()
        for key, entry in entries.items():
            is_pair = key is not None and isinstance(entry, (tuple, list)) and len(entry) == 2
            loss, weight = entry if is_pair else (entry, 1.0)
            self.append(OutputLoss(key, loss, weight, reduction, check))
        if not self:
            raise ValueError("There are no losses: give at least one.")
        declared = {getattr(loss.loss, "reduction", None) for loss in self}
        if reduction is not None and None not in declared and declared != {reduction}:
            raise ValueError(
                f"reduction={reduction!r} contradicts the loss, which has "
                f"reduction={declared.pop()!r}. The argument is for losses without that attribute; "
                "leave it out, or make the loss with the other reduction."
            )
        self.output_keys = [loss.key for loss in self]

    @property
    def reference(self) -> int:
        """The number of the loss whose factor `c` is that of all statistics: the first one under
        "mean".
        """
        for k, loss in enumerate(self):
            if loss.reduction == "mean":
                return k
        return 0

    @property
    def reduction(self) -> str:
        """That of the reference loss: "mean" if any loss has it."""
        return self[self.reference].reduction

    @property
    def have_likelihoods(self) -> bool:
        """Whether all losses have a likelihood."""
        return all(loss.likelihood is not None for loss in self)

    @property
    def given(self) -> Any:
        """The losses as they were given: one, or a dict or tuple of pairs of a loss and its
        weight.
        """
        if self.form == "single":
            return self[0].loss
        return self.joined([(loss.loss, loss.weight) for loss in self])

    def of_examples(self) -> Losses:
        """The same, of which those without a likelihood have the loss of each example by itself."""
        losses = copy(self)
        losses[:] = [loss.of_examples() for loss in self]
        return losses

    def options(self) -> dict[str, Any]:
        """Everything that determines the losses and their weights; see `rebuild_losses`."""
        if self.form == "single":
            return self[0].require_likelihood().options()
        parts = {
            loss.key: {"weight": loss.weight, "options": loss.require_likelihood().options()}
            for loss in self
        }
        return {"loss": self.form, "parts": parts}

    # -------------------------------------------------------------------------- outputs and targets
    def select(
        self, out: Any, selector: Callable[[Any], Any] | None, num_examples: int | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The outputs that the losses read, and their class axes where they are not the losses'
        own.

        Classes of Hugging Face's logits are on the last axis. Outputs for no examples may be empty.

        Raises:
            ValueError: If outputs and losses don't match, an output is no tensor and nothing says
                which part of it is meant, or it holds no real numbers.
        """
        logits = getattr(out, "logits", None)
        subject = "The model returned"
        if selector is not None:
            out = selector(out)
            subject = "`output` selected"
        elif self.form == "single" and isinstance(logits, Tensor):
            out = logits
        outputs = self.matched(out, "output", subject)
        for f in outputs:
            has_numbers = isinstance(f, Tensor) and (f.numel() or num_examples == 0)
            if not has_numbers or f.is_complex():
                raise _no_output(f, subject)
        class_axes = [-1 if f is logits and f.ndim > 2 else None for f in outputs]
        return tuple(outputs), tuple(class_axes)

    def joined(self, targets: Sequence[Any]) -> Any:
        """The target of a batch, from those of each loss."""
        if self.form == "single":
            return targets[0]
        if self.form == "dict":
            return dict(zip(self.output_keys, targets, strict=True))
        return tuple(targets)

    def matched(self, tree: Any, kind: str, subject: str) -> Sequence[Any]:
        """The part of targets or outputs that belongs to each of the losses; undoes `joined`.

        Args:
            kind: "target" or "output".
            subject: How a sentence about them begins.

        Raises:
            ValueError: If they and the losses don't match.
        """
        if self.form == "single":
            return [tree]
        form = _form(tree)
        parts = _parts_by_key(tree)
        if form == self.form and parts.keys() == set(self.output_keys):
            return [parts[key] for key in self.output_keys]
        came = f"a {form} with {kind}s {list(parts)}" if form else f"a {type(tree).__name__}"
        raise ValueError(
            f"{subject} {came}, but the losses are a {self.form} for the {kind}s "
            f"{self.output_keys}. Outputs can be brought into the form of the losses by "
            "EmpiricalRisk(..., output=lambda o: ...)."
        )

    def terms(self, read: tuple[Any, Any, Any], batch: Batch, values: bool = True) -> Terms:
        """Outputs and targets of one batch in canonical form, and its totals.

        Args:
            read: Outputs, targets and class axes, as `EmpiricalRisk.run` returns them.
            values: Whether the values of losses that have a likelihood are asked for.
        """
        N = batch.num_examples
        parts = [
            loss.terms(f, y, class_axis, batch, values)
            for loss, f, y, class_axis in zip(self, *read, strict=True)
        ]
        outputs, targets, counts, sums = zip(*parts)
        reference = self.reference
        reference_loss = self[reference]
        # A loss without a likelihood has one term for each example.
        has_terms = reference_loss.likelihood is not None
        terms = N * outputs[reference].shape[1] if has_terms else N
        count = counts[reference]
        if reference_loss.reduction == "sum":
            # Nothing is divided by it. Whether any term of any loss counts is asked all the same.
            count = sum(counts[1:], counts[0])
        totals = Totals(N, terms, count, counts=counts, losses=sums)
        return Terms(outputs, targets, totals, batch.weight)

    def require_targets(self, terms: Terms) -> None:
        """Refuse targets that are missing: most Fisher matrices don't depend on them, and would
        count these examples as any others.

        Raises:
            ValueError: If numbers in a target are NaN or infinite, or the value of a loss without a
                likelihood is NaN.
        """
        for loss, Y, value in zip(self, terms.targets, terms.totals.losses, strict=True):
            if loss.likelihood is None:
                if isinstance(value, Tensor) and any_is(value.isnan(), loss.title):
                    raise ValueError(
                        f"The loss {loss.title} is NaN on a batch. Are targets missing? Leave "
                        "these examples out, or in the function the missing numbers, before "
                        "anything is computed from them."
                    )
            elif not isinstance(loss.likelihood, OfExamples):
                numbers = [t for t in tree_leaves(Y) if t.is_floating_point()]
                if any(any_is(~t.isfinite(), loss.title) for t in numbers):
                    raise ValueError(
                        f"{loss.title}: the target has NaN or infinite numbers. Leave out examples "
                        "without a target; if single numbers are missing, write a function that "
                        "adds up the losses of the others, and use GGN, Hessian or Empirical()."
                    )


def _form(tree: Any) -> str | None:
    """ "dict" or "tuple" for what has parts for several losses, else None."""
    if isinstance(tree, Mapping):
        return "dict"
    return "tuple" if isinstance(tree, (tuple, list)) else None


def _parts_by_key(tree: Any) -> dict[Any, Any]:
    """The parts of a dict or a tuple by key or position; none of anything else."""
    form = _form(tree)
    if form is None:
        return {}
    return dict(tree if form == "dict" else enumerate(tree))


def _no_output(f: Any, subject: str) -> ValueError:
    """The error about an output that is no tensor, or holds no real numbers."""
    if not isinstance(f, Tensor):
        names: list[Any] = []
        if isinstance(f, Mapping):
            names = [*f]
        elif is_dataclass(f):
            names = [part.name for part in fields(f)]
        named = f" with fields {names}" if names else ""
        return ValueError(
            f"{subject} a {type(f).__name__}{named}; expected the tensor that the loss reads. Say "
            "which it is, as `output=lambda o: o[0]` or `output=lambda o: o.logits`."
        )
    came = f"{subject} a tensor of shape {list(f.shape)}, {f.dtype}"
    if not f.numel():
        return UnsupportedError(f"{came}, without numbers. If the batch is empty, leave it out.")
    return UnsupportedError(
        f"{came}; expected real numbers. Of complex ones give the loss both parts, "
        "output=lambda o: torch.view_as_real(o)."
    )


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
    losses = {
        key: (rebuild_loss(part["options"]), part["weight"])
        for key, part in options["parts"].items()
    }
    return losses if options["loss"] == "dict" else tuple(losses.values())


# ----------------------------------------------------------------------------------------- one loss
class OutputLoss:
    """A loss and the output that it reads.

    Args:
        key: Key or position of output and target; None if there is one output.
        default_reduction: For a loss without an attribute `reduction`.
        check: Whether a loss without a likelihood is compared with those of single examples, and
            one with a likelihood that a user registered with that.

    Attributes:
        title: Its name in messages.
        likelihood: It as a negative log-likelihood; None if nothing is registered for it.
        warning: Of a loss without a likelihood, what is to be said if there are several batches;
            None before the loss was compared.

    Raises:
        TypeError: If it is a class, or, without a key, not callable.
        ValueError: If it is no loss otherwise, or the weight is no positive finite number.
        UnsupportedError: If it is no scalar, as with the reduction "none", or a likelihood with
            other options only.
    """

    def __init__(
        self,
        key: Key | None,
        loss: Any,
        weight: Any = 1.0,
        default_reduction: str | None = None,
        check: bool = True,
    ) -> None:
        where = "" if key is None else f" for the output {key!r}"
        if isinstance(loss, type):
            raise TypeError(
                f"The loss{where} is the class {loss.__name__}; expected an instance. Call it."
            )
        if not callable(loss) and not isinstance(loss, Likelihood):
            came = repr(loss) if isinstance(loss, (str, int, float)) else f"a {type(loss).__name__}"
            raise (TypeError if key is None else ValueError)(
                f"The loss{where} is {came}; expected one as nn.MSELoss() or "
                "nn.CrossEntropyLoss(), or a function of output and target that returns a 0-d "
                "tensor. For several outputs give a dict or a tuple, with a loss or a pair (loss, "
                "weight) for each. Arguments are model, loss, and then parameters or data."
            )
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not is_number or not 0 < float(weight) < math.inf:
            raise ValueError(
                f"The weight of the loss{where} is {weight!r}; expected a positive finite number."
            )
        self.key = key
        self.loss: Any = loss
        self.weight = float(weight)
        self.default_reduction = default_reduction
        self.warning = None if check else ""
        name = getattr(loss, "__name__", type(loss).__name__)
        self.title = name if key is None else f"loss {key!r} ({name})"
        self.likelihood: Likelihood | None = None
        if has_likelihood(loss):
            self.likelihood = self.require_likelihood()
        # Others than "mean" and "sum" are refused now, not at first use.
        _ = self.reduction

    @property
    def reduction(self) -> str:
        """ "mean" or "sum", as the loss says now: its attribute may be changed.

        Raises:
            UnsupportedError: For "none" and others: what is no scalar loss has no curvature.
        """
        if self.likelihood is not None:
            return self.likelihood.reduction
        reduction = getattr(self.loss, "reduction", None) or self.default_reduction or "mean"
        if reduction not in ("mean", "sum", "batchmean"):
            raise UnsupportedError(
                f"{self.title} (reduction={reduction!r}) is no scalar loss, so it has no "
                'curvature; use "mean" or "sum".'
            )
        # nn.KLDivLoss: the sum over the batch, divided by the number of its examples.
        return "mean" if reduction == "batchmean" else reduction

    @property
    def fewest_axes(self) -> int:
        """How many axes an output has at least: that of the examples, and that of the classes."""
        return 1 if self.likelihood is None else max(1, self.likelihood.class_axis + 1)

    def require_likelihood(self) -> Likelihood:
        """It as a negative log-likelihood.

        Raises:
            UnsupportedError: If it has none.
        """
        if self.likelihood is not None:
            return self.likelihood
        try:
            return likelihood_of(self.loss)
        except UnsupportedError as error:
            if self.key is None:
                raise
            raise UnsupportedError(f"{self.title}: {error}") from error

    def of_examples(self) -> OutputLoss:
        """The same, as a sum over examples if it has no likelihood."""
        if self.likelihood is not None:
            return self
        loss = copy(self)
        loss.likelihood = OfExamples(self.loss, self.reduction)
        return loss

    def terms(
        self, f: Tensor, y: Any, class_axis: int | None, batch: Batch, values: bool
    ) -> tuple[Tensor, Any, Number, Number]:
        """Output [N, R, C] and target of a batch, what "mean" divides by, and the sum of all terms.

        Without a likelihood, output and target are as they are, and there are N terms. With one,
        the sum is 0 unless `values` are asked for.

        Raises:
            UnsupportedError: If a likelihood that a user registered is not that of the loss.
        """
        if self.likelihood is None:
            return f, y, float(batch.num_examples), self._value(f, y, batch)
        try:
            F, Y = self.likelihood.canonical(f, y, batch.num_examples, class_axis)
        except (UnsupportedError, ValueError, TypeError) as error:
            if self.key is None:
                raise
            raise type(error)(f"output {self.key!r}: {error}") from error
        if isinstance(self.likelihood, OfExamples):
            self._look_at_examples(f, y, batch)
        elif self.warning is None:
            if callable(self.loss) and not isinstance(self.loss, self.likelihood.loss_type or ()):
                N = batch.num_examples
                require_own_gradient(self, self.likelihood, f, y, class_axis, N)
            self.warning = ""
        weight = batch.weight
        if weight is None:
            count = self.likelihood.count(F, Y)
        else:
            count = self.likelihood.counts(F, Y) @ weight
        if (
            count.device.type == "cpu" and not torch.compiler.is_compiling()
        ):  # sums of numbers take a fraction of the time
            count = float(count)
        if not values:
            return F, Y, count, 0.0
        terms = self.likelihood.nll(F, Y)
        if weight is not None:
            terms = terms * weight.to(F)[:, None]
        return F, Y, count, terms.sum()

    def _value(self, f: Tensor, y: Any, batch: Batch) -> Tensor:
        """The sum over a batch of a loss without a likelihood.

        Raises:
            TypeError: If it returns no tensor.
            ValueError: If that is no single number, does not depend on the output, or if output and
                target are broadcast.

        Warns:
            CurvatureWarning: Once, in a pass of several batches, if it is no mean (or sum) over
                examples.
        """
        N = batch.num_examples
        self._look_at_examples(f, y, batch)
        value = self.loss(f, y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, Tensor)
            came = f"tensor of shape {list(value.shape)}" if is_tensor else type(value).__name__
            raise (ValueError if is_tensor else TypeError)(
                f"The loss {self.title} returned a {came}; expected a 0-d tensor, a single number "
                "for the batch that is differentiable in the output: without .item(), with its "
                'entries averaged (reduction="mean") or added up (EmpiricalRisk(..., '
                'reduction="sum")).'
            )
        if torch.is_grad_enabled() and f.requires_grad and not value.requires_grad:
            raise ValueError(
                f"The loss {self.title} does not depend on the model's output in a differentiable "
                "way, so it has no curvature. Does it detach the output, convert it (.item(), "
                ".numpy()), round it, or compute under torch.no_grad()?"
            )
        return value * N if self.reduction == "mean" else value

    def _look_at_examples(self, f: Tensor, y: Any, batch: Batch) -> None:
        """Look once whether a loss of which nothing is known is a mean, or sum, over examples.

        Raises:
            ValueError: If output and target are broadcast.

        Warns:
            CurvatureWarning: Once, in a pass of several batches, if it is none.
        """
        N = batch.num_examples
        if self.warning is None and N > 1:
            require_no_broadcast(self, f, y, N)
            self.warning = no_mean(self, f, y, N)
        if self.warning and batch.first:
            message = self.warning
            self.warning = ""
            warn(message, CurvatureWarning, stacklevel=level_of_user())


# ------------------------------------------------------------------------------- what a batch gives
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

    def mismatch(self, totals: Totals) -> str | None:
        """Why statistics of these and other totals must not be added, None if they may."""
        if not self.weights or not totals.weights or self.weights == totals.weights:
            return None
        if all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(self.weights, totals.weights)):
            return None
        ratio = " : ".join(f"{weight:.4g}" for weight in self.weights)
        added_ratio = " : ".join(f"{weight:.4g}" for weight in totals.weights)
        return (
            f"Statistics of several losses can't be added: their relative weights are {ratio} here "
            f"and {added_ratio} there, since their means are over other proportions of terms. "
            'Compute them on the union of the data, or use reduction="sum" for all losses, with '
            "the divisors in their weights."
        )

    def add(self, totals: Totals) -> None:
        """Add another batch's totals, without the graph of its losses and in double precision.

        Raises:
            ValueError: If several losses had other weights there.
        """
        if problem := self.mismatch(totals):
            raise ValueError(problem)
        self.examples += totals.examples
        self.terms += totals.terms
        self.loss_count = _sum(self.loss_count, totals.loss_count)
        self.called |= totals.called
        self.reached |= totals.reached
        self.weights = self.weights or totals.weights
        self.steps = max(self.steps, totals.steps)
        self.counts = _sums(self.counts, totals.counts)
        self.losses = _sums(self.losses, totals.losses)

    def over(self, processes: Alone, error: Exception | None = None) -> Totals:
        """The totals of all processes; an `error` of this one is raised in all. Collective.

        Raises:
            ValueError: If there are no examples, or several losses have other weights in other
                processes.
        """
        if processes.world == 1:
            if error is not None:
                raise error
            return self
        reports = processes.gather((self.plain(), error))
        errors = [error for _, error in reports if error is not None]
        if errors:
            raise error or errors[0]
        union = Totals.union(totals for totals, _ in reports)
        if not union.examples:
            raise ValueError(f"`data` has no examples in any of the {processes.world} processes.")
        return union

    @classmethod
    def union(cls, parts: Iterable[Totals]) -> Totals:
        """The totals of all parts together."""
        union = cls()
        for totals in parts:
            union.add(totals)
        return union

    def read_count(self, loss: int | None = None) -> float:
        """`loss_count`, or the count of a loss, as a number. A GPU is asked once: it is waited
        for.
        """
        if loss is not None:
            return float(self.counts[loss])
        self.loss_count = float(self.loss_count)
        return self.loss_count

    def plain(self) -> Totals:
        """The same without tensors, which are read together: a GPU is waited for."""
        numbers: list[Number] = [self.loss_count, *self.counts, *self.losses]
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if tensors:
            read = iter(torch.stack(tensors).tolist())
            numbers = [next(read) if isinstance(number, Tensor) else number for number in numbers]
        loss_count, *others = map(float, numbers)
        counts = tuple(others[: len(self.counts)])
        losses = tuple(others[len(self.counts) :])
        return replace(self, loss_count=loss_count, counts=counts, losses=losses)


def _sums(totals: tuple[Number, ...], numbers: tuple[Number, ...]) -> tuple[Number, ...]:
    """The sum for each of several losses; none are zeros."""
    pairs = zip_longest(totals, numbers, fillvalue=0.0)
    return tuple([_sum(*pair) for pair in pairs]) if numbers else totals


def _sum(total: Number, number: Number) -> Number:
    """The sum of two numbers without a graph, in double precision."""
    if isinstance(number, Tensor):
        number = number.detach().double()
    # A zero added to a tensor takes as long as a small layer does.
    return number if type(total) is float and total == 0 else total + number
