"""The losses of a risk, one for each output: `Σ_h w_h c_h Σ_n Σ_r ℓ_h(f_h(x_n)_r, y_{h,n,r})`.

Most models have one output and one loss, a list of one with weight 1. With several, the model returns a dict or a
tuple, the losses are the same of `loss` or `(loss, weight)`, and so are the targets. Each loss has a reduction of its
own, read literally over the whole data set: `c_h` is 1 for "sum", and one over what PyTorch divides by for "mean".

Statistics have one factor `c` in front, that of the reference loss: the first one under "mean". What else multiplies a
loss is its relative weight `w_h c_h / c`, see `LossWeights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood, has_likelihood, likelihood_of, rebuild_loss
from curvlinops_plus.likelihood.of_examples import OfExamples
from curvlinops_plus.risk.batches import (
    Batch,
    is_iterator,
    require_rereadable,
    scalar_loss,
    select_output,
)
from curvlinops_plus.risk.graph import raise_unreached
from curvlinops_plus.risk.modules import refuse_outside_reads
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.totals import Number, Totals

Key = str | int


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
        return self._name if self.key is None else f"loss {self.key!r} ({self._name})"

    @property
    def _name(self) -> str:
        return getattr(self.loss, "__name__", type(self.loss).__name__)

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
            prefix = "" if self.key is None else f"{self.title}: "
            raise UnsupportedError(
                f"{prefix}{self._name}(reduction={reduction!r}) is no scalar loss, so it has no curvature; use "
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
        if isinstance(y, Tensor) and y.dtype != f.dtype and y.is_floating_point():
            y = y.to(f.dtype)
        try:
            return self.likelihood.canonical(f, y, N, class_axis)
        except (UnsupportedError, ValueError, TypeError) as error:
            if self.key is None:
                raise
            raise type(error)(f"output {self.key!r}: {error}") from error

    def class_axis(self, class_axis: int | None) -> int:
        """The axis of outputs that holds the numbers of a term: the one that is given, or the loss's own."""
        return class_axis if class_axis is not None else self.likelihood.class_axis if self.known else -1

    def beside_positions(self, f: Tensor, class_axis: int | None) -> int | None:
        """The class axis of an output `[N, T, ...]` whose axis 1 holds positions, which labels are shifted along.

        Raises:
            ValueError: If there is none.
        """
        if self.class_axis(class_axis) != 1:
            return class_axis
        if f.ndim < 3:
            raise ValueError(
                f"{self.title}: labels are shifted (shift_labels) along axis 1, and an output of shape {list(f.shape)} "
                "has its classes there; expected [N, T, classes]."
            )
        return -1

    def count(self, F: Tensor, Y: Any, weight: Tensor | None) -> Tensor:
        """What "mean" divides by, of a loss with a likelihood."""
        return self.likelihood.count(F, Y) if weight is None else self.likelihood.counts(F, Y) @ weight

    def sums(self, F: Tensor, Y: Any, N: int, weight: Tensor | None = None) -> tuple[Number, Tensor]:
        """What "mean" divides by, and the sum of all terms; a loss without a likelihood counts as N terms."""
        if weight is not None:
            return self.count(F, Y, weight), (self.likelihood.nll(F, Y) * weight.to(F)[:, None]).sum()
        if self.known:
            return self.likelihood.count(F, Y), self.likelihood.nll(F, Y).sum()
        value = scalar_loss(self.loss(F, Y), F, self.loss)
        return float(N), value * N if self.reduction == "mean" else value


class Losses(tuple[OutputLoss, ...]):
    """The losses of a risk.

    Args:
        given: A loss, or `Losses`; or a dict or a tuple (or list) whose entries are a loss, or a pair of a loss and its
            weight.
        reduction: For losses without an attribute `reduction`.

    Raises:
        TypeError: If a loss is a class or not callable.
        ValueError: If an entry is neither loss nor pair, a weight is no positive finite number, or `reduction`
            contradicts the losses.

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
        if form == "single":
            self = super().__new__(cls, [OutputLoss(None, _checked_loss(given), 1.0, reduction)])
        else:
            self = super().__new__(cls, _read_losses(given, form, reduction))
        self.form, self.default_reduction = form, reduction
        own = [getattr(one.loss, "reduction", None) for one in self]
        if reduction is not None and None not in own and set(own) != {reduction}:
            raise ValueError(
                f"reduction={reduction!r} contradicts the loss, which has reduction={own[0]!r}. The argument is for "
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
        if self.form == "single":
            return self[0].loss
        pairs = [(one.loss, one.weight) for one in self]
        return dict(zip(self.keys, pairs)) if self.form == "dict" else tuple(pairs)

    @cached_property
    def known(self) -> bool:
        """Whether all losses have a likelihood."""
        return all(one.known for one in self)

    @property
    def reduction(self) -> str:
        """That of the reference loss: "mean" if any loss has it.

        Raises:
            UnsupportedError: If one has another reduction than "mean" and "sum".
        """
        return "mean" if "mean" in [one.reduction for one in self] else "sum"

    @property
    def reference(self) -> int:
        """Index of the loss whose factor `c` is that of all statistics: the first one under "mean"."""
        return 0 if len(self) == 1 else next((i for i, one in enumerate(self) if one.reduction == "mean"), 0)

    @property
    def constant_weights(self) -> bool:
        """Whether relative weights don't depend on the data."""
        return len(self) == 1 or all(one.reduction == "sum" for one in self)

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
        for key, part in zip(self.keys, parts):
            if not isinstance(part, Tensor):
                raise ValueError(f"output {key!r} is a {type(part).__name__}; expected the tensor that its loss reads.")
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
        if isinstance(given, Mapping):
            parts, kind = dict(given), "dict"
        elif isinstance(given, (tuple, list)):
            parts, kind = dict(enumerate(given)), "tuple"
        else:
            parts, kind = {}, type(given).__name__
        if kind == self.form and parts.keys() == set(self.keys):
            return [parts[key] for key in self.keys]
        came = f"a {kind} with {what}s {list(parts)}" if parts else f"a {kind}"
        advice = " Say which are meant, in the form of the losses, with EmpiricalRisk(..., output=lambda o: ...)."
        raise ValueError(
            f"{subject} {came}, but the losses are a {self.form} for the {what}s {self.keys}."
            f"{advice if what == 'output' else ''}"
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
        given = 1.0 if num_data is None else totals.examples / num_data
        if num_per_example_loss_terms is not None:
            given *= totals.terms / totals.examples / num_per_example_loss_terms
        return self._divided(self[self.reference], given, totals.loss_count)

    def scales(self, totals: Totals, num_data: int | None = None) -> tuple[Number, ...]:
        """`c_h` of each loss over a whole data set; arguments as for `scale`."""
        given = 1.0 if num_data is None else totals.examples / num_data
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


def _checked_loss(loss: Any) -> Any:
    if isinstance(loss, type):
        raise TypeError(f"The loss is the class {loss.__name__}; expected an instance. Call it: {loss.__name__}(...).")
    if not callable(loss) and not isinstance(loss, Likelihood):
        came = repr(loss) if isinstance(loss, (str, int, float)) else f"a {type(loss).__name__}"
        raise TypeError(
            f"The loss is {came}; expected one as nn.MSELoss() or nn.CrossEntropyLoss(), a function of output and "
            "target that returns a 0-d tensor, or a dict or tuple of losses for a model with several outputs."
        )
    return loss


def _read_losses(given: Any, form: str, reduction: str | None) -> list[OutputLoss]:
    """The losses of a dict or a tuple."""
    items = list(given.items() if form == "dict" else enumerate(given))
    if not items:
        raise ValueError("There are no losses: give at least one.")
    found = []
    for key, entry in items:
        loss, weight = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else (entry, 1.0)
        if isinstance(loss, (tuple, list, Mapping)) or not (callable(loss) or isinstance(loss, Likelihood)):
            came = f"a {type(entry).__name__}" if isinstance(entry, Tensor) else repr(entry)
            raise ValueError(
                f"The loss for the output {key!r}: expected a loss or a pair (loss, weight), got {came}. For one "
                "output give the loss alone; for several write the weight beside its loss: ((loss, weight), (loss, "
                "weight))."
            )
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
            raise ValueError(
                f"The weight of the loss for the output {key!r} is {weight!r}; expected a positive finite number."
            )
        found.append(OutputLoss(key, _checked_loss(loss), float(weight), reduction))
    return found


T = TypeVar("T")


class LossWeights:
    """The relative weights of losses during a pass over data.

    Args:
        num_data: As in `EmpiricalRisk`.
        totals: Of the whole data set, if they are known; else each batch must have the weights of the first one.
    """

    def __init__(self, losses: Losses, num_data: int | None = None, totals: Totals | None = None) -> None:
        self.losses, self.num_data, self.totals = losses, num_data, totals
        self._known = self._relative(totals) if totals is not None or losses.constant_weights else None
        self._first: list[float] | None = None  # terms of each loss in the first batch

    @classmethod
    def plain(cls, losses: Losses) -> LossWeights:
        """Each loss has the weight that it was given, whatever its reduction."""
        weights = cls(losses)
        weights._known = tuple(one.weight for one in losses)
        return weights

    def _relative(self, totals: Totals | None) -> tuple[float, ...]:
        losses = self.losses
        if losses.constant_weights or totals is None:
            return tuple([one.weight for one in losses])
        scales = losses.scales(totals, self.num_data)
        return tuple(float(one.weight * c / scales[losses.reference]) for one, c in zip(losses, scales))

    def of(self, batch: Totals) -> tuple[float, ...]:
        """The weights for a batch with these totals.

        Raises:
            ValueError: If they depend on the whole data set, and it is not known.
        """
        if self._known is not None:
            return self._known
        counts = [float(count) for count in batch.counts]
        self._first = self._first or counts
        alike = all(math.isclose(a * self._first[0], b * counts[0], rel_tol=1e-9) for a, b in zip(counts, self._first))
        if len({one.reduction for one in self.losses}) == 1 and all(count > 0 for count in counts) and alike:
            return self._relative(batch)
        raise ValueError(
            f"The losses for {self.losses.keys} weigh by their numbers of terms in the whole data set, which can't be "
            f"known from batches that are seen once: here {_ratio(counts)}, and {_ratio(self._first)} in the first "
            f"one, with the reductions {[one.reduction for one in self.losses]}. Use curvature(risk, ...) over data "
            'that can be read twice, batches with the same proportion, or reduction="sum" for all losses with the '
            "divisors in their weights. (For another stream make a new EmpiricalRisk.)"
        )

    def objective(self, batch: Totals) -> Tensor:
        """What the loss of a data set is the sum of over batches, up to the factor `c`; it has a graph."""
        weighted = [s * loss if s != 1 else loss for s, loss in zip(self.of(batch), batch.losses)]
        total = weighted[0] if len(weighted) == 1 else sum(weighted)
        assert isinstance(total, Tensor)
        return total

    def require(self, totals: Totals) -> None:
        """Refuse a whole pass over the data to which other weights belong than those that were used.

        Raises:
            ValueError: If the data have changed meanwhile.
        """
        if self.totals is None or self._known is None:
            return
        if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(self._relative(totals), self._known)):
            raise ValueError(
                f"The numbers of terms that count for the losses of {self.losses.keys} differ from pass to pass, so "
                "the data change: is there random masking or augmentation? Give data that are the same each time."
            )


def _ratio(counts: Sequence[float]) -> str:
    return " : ".join(f"{count:g}" for count in counts)


# ------------------------------------------------------------------------------------------------ passes over all data
class Evaluated(Protocol):
    """What a pass over the data needs of a risk."""

    losses: Losses
    data: Any
    device: torch.device
    processes: Alone
    params: dict[str, Tensor]

    @property
    def options(self) -> Any: ...
    def batches(self, desc: str) -> Iterator[Batch]: ...
    def run(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Any, Any, Any]: ...
    def terms(self, outputs: Any, targets: Any, batch: Batch, class_axes: Any) -> Terms: ...
    def at(self, values: Mapping[str, Tensor], function: Callable[[nn.Module], T]) -> T: ...


def loss_pass(risk: Evaluated, desc: str = "loss") -> Totals:
    """Totals of all data. Cost: one forward pass. Random state is not restored."""
    totals = Totals()
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(risk.device.type, enabled=False):
        for batch in risk.batches(desc):
            with eager():
                outputs, targets, class_axes = risk.run(batch)
                totals.add(risk.terms(outputs, targets, batch, class_axes).totals)
    return totals.over(risk.processes)


def loss_weights(risk: Evaluated, known: Totals | None = None) -> LossWeights:
    """The weights for passes over the data of a risk.

    Args:
        known: Totals of a pass before, if there was one.

    Raises:
        ValueError: If they depend on the data, and these are spread over processes and can be read only once.

    Cost: one forward pass over the data if they depend on it, which is never so for one loss. For an iterator each
    batch has to determine them.
    """
    if not risk.losses.constant_weights and risk.processes.world > 1:
        require_rereadable(risk.data, "the loss terms of all processes are counted first")
    if not risk.losses.constant_weights and not is_iterator(risk.data):
        known = loss_pass(risk, "counting loss terms") if known is None else known
    return LossWeights(risk.losses, risk.options.num_data, known)


def with_consistent_weights(
    risk: Evaluated, attempt: Callable[[LossWeights], tuple[T, Totals]], before: Totals | None = None
) -> tuple[T, Totals]:
    """Result and totals of a pass over the data, with the weights of several losses that belong to all of it.

    Args:
        attempt: The pass, with the weights that it is to use.
        before: Totals of a pass over the same data, if there was one; else one counts, see `loss_weights`.

    Raises:
        ValueError: If passes don't agree.
    """
    weights = loss_weights(risk, before)
    result, totals = attempt(weights)
    weights.require(totals.detached())
    return result, totals


def gradient_pass(risk: Evaluated, weights: LossWeights) -> tuple[dict[str, Tensor], Totals]:
    """Gradient of the sum of all loss terms, each loss times its relative weight, and totals.

    Random state is not restored.
    """
    with torch.inference_mode(False):
        free = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
        totals, grads = Totals(), {key: torch.zeros_like(p) for key, p in free.items()}

    def add_batches(model: nn.Module) -> None:
        looked_at = risk.losses.known  # a loss that we know reads nothing but output and target
        reached = False
        for batch in risk.batches("gradient"):
            with eager():
                outputs, targets, class_axes = risk.run(batch, model)
                batch_totals = risk.terms(outputs, targets, batch, class_axes).totals
            objective = weights.objective(batch_totals)
            totals.add(batch_totals.detached())
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

    with torch.inference_mode(False), torch.enable_grad():
        risk.at(free, add_batches)
    risk.processes.sum_(list(grads.values()))
    return grads, totals.over(risk.processes)
