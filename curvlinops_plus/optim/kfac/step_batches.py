"""The batches whose losses make up the gradient of a step, and with which numbers these are multiplied."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from curvlinops_plus.blocks.batch_pass import PassStart
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.risk import EmpiricalRisk, Vectors
from curvlinops_plus.risk.batches import Batch, copied
from curvlinops_plus.risk.check import batch_norms

_LIMIT = 1024
_AWAY = 0.03  # more than rounding under autocast


class Factor:
    """The number that a loss is multiplied with in what is differentiated.

    Args:
        owner: What wants to know.
        value: The loss; or, where nobody sees it, what it reads.
        by_itself: The gradient that the loss by itself has there, if it is no loss.

    Attributes:
        number: 0-d; None before it is differentiated, NaN if what arrives is no multiple of the loss's gradient.
        task: The backward pass that came through here to the parameters, of several the last one; None before.
        paused: Whether what arrives is not the user's.
        differs: Whether what has arrived is that of another loss, 0-d; None before.
    """

    def __init__(self, owner: StepBatches, value: Tensor, by_itself: Callable[[], Tensor] | None = None) -> None:
        self._owner = weakref.ref(owner)
        self.number: Tensor | None = None
        self.task: int | None = None
        self.paused = False
        self.differs: Tensor | None = None
        self.watch(value, by_itself)

    def watch(self, value: Tensor, by_itself: Callable[[], Tensor] | None = None) -> None:
        """The loss was computed once more: both are part of what is differentiated, or the one that is."""
        if value.requires_grad:
            value.register_hook(partial(self._arrive, by_itself or value.detach()))  # which goes with the graph

    def _arrive(self, of: Callable[[], Tensor] | Tensor, g: Tensor) -> None:
        owner, task = self._owner(), torch._C._current_graph_task_id()
        if owner is None or self.paused or not owner.accumulates():
            return
        owner.begin(task)
        self.task = task
        if isinstance(of, Tensor):  # a mean over no terms is NaN, and no part of the gradient
            number = g.detach().masked_fill(of.isnan(), 0.0).sum()
        else:
            number, differs = _multiple(g.detach(), of())
            self.differs = differs if self.differs is None else self.differs | differs
        self.number = number if self.number is None else self.number + number


def _multiple(g: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
    """`c` with `g = c * one`, NaN if it is not known; and whether there is none."""
    tolerance = _AWAY if torch.finfo(g.dtype).bits < 32 else 1e-3
    g, one = g.to(one.dtype).flatten(), one.flatten()
    c = g.dot(one) / one.dot(one)
    away, near = torch.dist(g, c.nan_to_num() * one), tolerance * g.norm()
    return torch.where(away <= near, c, torch.nan), away > near  # not so if one of them is not finite


def listening_factors(owner: StepBatches, risk: EmpiricalRisk, batch: Batch, output: Any) -> list[Factor]:
    """What losses that nobody sees are multiplied with, from what arrives at the outputs that they read."""
    outputs, axes = risk.losses.select(output, risk.options.output)
    targets = risk.losses.targets(batch.y)
    # What `output=` computes is computed again by the caller: gradients arrive at what the model returned.
    select = risk.options.output if isinstance(output, Tensor) and len(outputs) == 1 else None
    watched = outputs if select is None else (output,)
    again, _ = risk.losses.select(output, risk.options.output)
    if select is None and any(f is not other for f, other in zip(outputs, again, strict=True)):
        warn(
            "`output=` computes what the loss reads from what the model returned, so after `listen` it isn't seen what "
            "the loss is multiplied with: 1 is taken. Let `output=` pick tensors that the model returned, or give the "
            "loss as a module and call it.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )

    shared = [sum(f is other for other in watched) > 1 for f in watched]

    def by_itself(index: int, f: Tensor, version: int) -> Tensor:
        if f._version != version or shared[index]:  # it was written to, or gradients of several losses arrive
            return torch.full_like(f, torch.nan)
        with torch.enable_grad():
            leaf, one = f.float() if torch.finfo(f.dtype).bits < 32 else f.clone(), risk.losses[index]
            leaf.requires_grad_()
            read, y, axis = risk.aligned(one, leaf if select is None else select(leaf), targets[index], axes[index])
            count, total = one.sums(*one.canonical(read, y, batch.num_examples, axis), batch.num_examples)
            (found,) = torch.autograd.grad(total, leaf)
        return found / count if one.reduction == "mean" else found

    return [Factor(owner, f, partial(by_itself, i, f.detach(), f._version)) for i, f in enumerate(watched)]


@dataclass(frozen=True, eq=False)
class _Call:
    """Losses that were called on the outputs of one call of the model."""

    batch: Batch
    start: PassStart | None  # if the model may be run on it once more
    factors: Sequence[Factor | None]  # one per loss, None if it was not called
    of: object  # the call of the model, which losses may be applied to several times

    @property
    def differentiated(self) -> bool:
        return any(factor is not None and factor.task is not None for factor in self.factors)


class StepBatches:
    """What the losses were called on since the last step. Iterating reads the batches that the gradient comes from,
    each from the random state and buffers in which it was first seen.

    A backward pass that finds no gradients, or zeros, begins anew: losses that were differentiated before count no
    more, as after a step that a gradient scaler has skipped, or where somebody else was trained through the model.
    """

    def __init__(self, risk: EmpiricalRisk) -> None:
        self._risk, self._calls, self._looks, self._said, self._asked = risk, list[_Call](), 0, False, False
        self._said_other = False
        #: A number that a loss is hardly multiplied with but by a gradient scaler.
        self.large = 1024.0
        #: What `numbers` has said in each process, whose gradients are averaged.
        self.told: Sequence[list[tuple[float, float]] | None] = ()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def note(
        self, batch: Batch, start: PassStart | None, factors: Sequence[Factor | None] = (), of: object = None
    ) -> None:
        """Losses were called.

        Args:
            start: What the call of the model began with, if the step looks at it once more.
            of: The call of the model; default: one that no other losses are applied to.

        Raises:
            RuntimeError: If too many batches are kept, and no step comes that looks at them.
        """
        if start is None:  # nobody looks at it
            batch = replace(batch, X=None, y=None)
            del self._calls[: -_LIMIT + 1]
        elif len(self._calls) >= _LIMIT:
            self.clear()
            raise RuntimeError(
                f"{_LIMIT} batches were seen since the last step, and kept, since the step looks at them once more "
                "(LevenbergMarquardt, reject=, adaptive coefficients). Call optimizer.step(); to train the model "
                "without this optimizer, call optimizer.close() before."
            )
        else:  # a loader may fill the same memory anew for the next batch of the step
            batch = replace(batch, X=copied(batch.X), y=copied(batch.y))
        self._calls.append(_Call(batch, start, factors, object() if of is None else of))

    @property
    def differentiated(self) -> bool:
        """Whether a backward pass has brought gradients since the last step."""
        return any(call.differentiated for call in self._calls)

    def clear(self) -> None:
        """A step was taken."""
        self._calls.clear()

    def forget_differentiated(self) -> None:
        """The gradients are zero: losses that were differentiated count no more."""
        self._calls = [call for call in self._calls if not call.differentiated]

    # ------------------------------------------------------------------------------------------- the backward passes
    def accumulates(self) -> bool:
        """Whether the backward pass that is going on brings a gradient to the parameters."""
        for p in self._risk.params.values():
            if p.requires_grad:
                try:
                    if torch._C._will_engine_execute_node(get_gradient_edge(p).node):
                        return True
                except RuntimeError:  # `torch.autograd.grad` with respect to this one
                    return True
        return False

    def begin(self, task: int) -> None:
        """A backward pass begins; those before it count no more if it finds no gradients, or zeros."""
        new = [call for call in self._calls if all(f is None or f.task in (None, task) for f in call.factors)]
        if len(new) < len(self._calls) and not any(
            g.layout != torch.strided or bool(g.any()) for p in self._risk.params.values() if (g := p.grad) is not None
        ):
            self._calls = new

    # --------------------------------------------------------------------------------------------------- their losses
    @property
    def _counted(self) -> list[_Call]:
        """The calls that the gradient comes from: all of them if nobody saw a backward pass."""
        return [call for call in self._calls if call.differentiated] or self._calls

    def __iter__(self) -> Iterator[Batch]:
        for call in _one_of_each(self._counted):
            if call.start is not None:
                call.start.restore()
                yield call.batch

    def _ask_for_scale(self) -> None:
        """Warn of what may be a gradient scaler that nobody has told of."""
        if self._asked:
            return
        largest = max((abs(_number(call, i)) for call in self._counted for i in range(len(call.factors))), default=0.0)
        if largest >= self.large:
            self._asked = True
            warn(
                f"The loss was multiplied by {largest:g} before its backward pass, which is taken for a part of what "
                "is minimised. If it is the scale of a gradient scaler, that has divided the gradients by it, say so: "
                "step(scaler=scaler).",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )

    def factor(self, scale: float | None) -> float | None:
        """How many times the loss, a mean or sum over these batches, makes up the gradient; None if nobody saw it.

        Args:
            scale: What a gradient scaler has multiplied the losses with, and divided the gradient by; 1 if there is
                none, None if there is one whose scale is not known, but for that it is a power of two.

        Raises:
            ValueError: If several losses were multiplied with other numbers than their weights.
        """
        raw = self._raw()
        if scale == 1:
            self._ask_for_scale()
        return None if raw is None else self._without_scale(raw, scale)

    def numbers(self) -> list[tuple[float, float]] | None:
        """For each loss, the sum of what it was multiplied with in this process, and the number of examples.

        Without any loss nothing; None if nobody saw it.
        """
        calls = [call for call in self._counted if call.differentiated]
        if len(calls) < bool(self) or any(_unknown(call) for call in calls):
            return None
        if not calls:
            return []
        return [_of_loss(calls, index, one.reduction) for index, one in enumerate(self._risk.losses)]

    def parts(self, scale: float | None, otherwise: float, merged: bool = False) -> list[tuple[Iterable[Batch], float]]:
        """The sum that the gradient is that of: batches, and what their losses are multiplied with.

        Args:
            scale: As for `factor`.
            otherwise: The number, if nobody saw it.
            merged: Make one part of several losses of the same outputs, whose curvature is the same.
        """
        if not self:
            return []
        raw = self._raw()
        if raw is None:
            return [(self, otherwise)]
        unit = self._without_scale(raw, scale) / raw / self._risk.losses[0].weight
        if not merged:
            return [(_Once(call), unit * _number(call, 0)) for call in self._counted]
        numbers: dict[int, float] = {}
        for call in self._counted:
            numbers[id(call.of)] = numbers.get(id(call.of), 0.0) + unit * _number(call, 0)
        return [(_Once(call), numbers[id(call.of)]) for call in _one_of_each(self._counted)]

    def compare(self, gradient: Mapping[str, Tensor], scale: float | None, otherwise: float) -> None:
        """Warn if a gradient is not that of the losses: what is predicted from one is then compared with the other.

        Looks in the 1st, 2nd, 4th, ... call, for the price of a forward and a backward pass. Batch norm in training
        mode has other gradients when it is looked at.

        Args:
            gradient: Key of a parameter to what is in its `.grad`.
            scale: As for `factor`.
            otherwise: As for `parts`.
        """
        self._looks += 1
        if self._said or self._looks & (self._looks - 1) or batch_norms(self._risk.model):
            return
        theirs, alone = torch.cat([g.flatten() for g in gradient.values()]), self._risk.alone()
        ours = torch.zeros_like(theirs)
        for data, c in self.parts(scale, otherwise):
            found = alone.with_data(data).gradient()
            ours = ours + c * torch.cat([found[key].flatten() for key in gradient])
        ours = mean_over(self._risk.processes, ours)
        away = float(torch.dist(ours, theirs) / theirs.norm().clamp(min=1e-30))
        if away > _AWAY:
            self._said = True
            warn(
                f"The gradient in .grad differs from that of the losses that were seen, by {away:.0%} of its norm: it "
                "was clipped, or there are further terms (penalties, smoothing outside of the loss). The ratio rho, "
                "`reject` and adaptive coefficients compare a model with this gradient to the losses alone.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )

    def warn_of_other_losses(self) -> None:
        """Warn if what has arrived at outputs is not the gradient of the losses that were given."""
        factors = [f for call in self._calls for f in call.factors if f is not None and f.differs is not None]
        if self._said_other or not factors or not any(bool(f.differs) for f in factors):
            return
        self._said_other = True
        names = ", ".join(one.title for one in self._risk.losses)
        warn(
            f"What arrived at the model's output is no multiple of the gradient of {names}: another loss is minimised "
            "than that of the statistics (another one, or other targets, weights or axis of classes), or there are "
            "further terms that read the output. The curvature is that of the loss that the optimizer was given, times "
            "1. Give it the loss that is minimised.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )

    def _raw(self) -> float | None:
        """The factor as it came, with the scale of a gradient scaler."""
        told = [numbers for numbers in self.told if numbers]
        if not told or None in self.told:
            return None
        losses, found = self._risk.losses, []
        for one, each in zip(losses, zip(*told, strict=True), strict=True):
            number, examples = map(sum, zip(*each, strict=True))
            # Each batch is a part of a sum; gradients are averaged over all processes.
            found.append(number / (examples if one.reduction == "sum" else 1.0) / len(self.told) / one.weight)
        for one, value in zip(losses, found, strict=True):
            if math.isfinite(value) and not abs(value - found[0]) <= 1e-2 * abs(found[0]):
                raise ValueError(
                    f"{one.title} was multiplied by {value * one.weight:.4g} before its backward pass, and "
                    f"{losses[0].title} by {found[0] * losses[0].weight:.4g}; their weights are {one.weight:g} and "
                    f"{losses[0].weight:g}. Say what each is multiplied by: pairs (loss, weight)."
                )
        size = abs(found[0])
        return size if 0 < size < math.inf else 1.0

    def _without_scale(self, raw: float, scale: float | None) -> float:
        """The factor without a gradient scaler's; exactly 1 if it is that but for rounding."""
        nearest = 2.0 ** round(math.log2(raw)) if scale is None else scale
        if abs(raw - nearest) <= 1e-3 * nearest:
            return 1.0
        if scale is not None:
            return raw / scale
        if not self._said:
            self._said = True
            warn(
                f"The loss was multiplied by {raw:g} before its backward pass: by a gradient scaler, and by what else, "
                "can't be told. Steps are those of the loss by itself. Say what the scale is: "
                "scaler.step(optimizer, scaler=scaler).",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
        return 1.0


@dataclass(frozen=True)
class _Once:
    """The batch of one call."""

    call: _Call

    def __iter__(self) -> Iterator[Batch]:
        assert self.call.start is not None
        self.call.start.restore()
        yield self.call.batch


def _number(call: _Call, index: int) -> float:
    factor = call.factors[index] if call.factors else None
    return 0.0 if factor is None or factor.number is None else float(factor.number)


def _unknown(call: _Call) -> bool:
    """Whether it is not known what the losses of a call were multiplied with."""
    found = [factor.number for factor in call.factors if factor is not None and factor.number is not None]
    return not found or any(bool(number.isnan()) for number in found)


def _one_of_each(calls: Iterable[_Call]) -> list[_Call]:
    """One of those that losses were applied to several times: its examples count once."""
    return list({id(call.of): call for call in reversed(list(calls))}.values())[::-1]


def _of_loss(calls: Sequence[_Call], index: int, reduction: str) -> tuple[float, float]:
    """What one loss of some calls was multiplied with, together; of a sum, weighed by examples. And these."""
    examples = sum(call.batch.num_examples for call in _one_of_each(calls))
    if reduction != "sum":
        return sum(_number(call, index) for call in calls), examples
    return sum(_number(call, index) * call.batch.num_examples for call in calls), examples


def mean_over(processes: Alone, own: Tensor) -> Tensor:
    """The mean of what each process has, as of gradients. Collective."""
    processes.sum_("a mean over processes", [own])
    return own / processes.world


def require_same_curvature(
    risk: EmpiricalRisk,
    vectors: Vectors,
    f: Tensor,
    class_axis: int | None,
    one: Batch,
    two: Batch,
) -> None:
    """Refuse losses that are called twice on the same outputs, as `a * loss(out, y) + b * loss(out, z)`, if their
    curvature depends on the targets: then it is not `a + b` times that of the first.
    """
    same = not vectors.of_loss and len(risk.losses) == 1
    if same:
        (loss,), f = risk.losses, f.detach().to(risk.dtype)
        read = [risk.aligned(loss, f, batch.y, class_axis) for batch in (one, two)]
        terms = [loss.canonical(g, y, one.num_examples, axis) for g, y, axis in read]
        V = torch.cos(torch.arange(terms[0][0].numel(), device=f.device)).to(f.dtype).view_as(terms[0][0])
        products = [loss.likelihood.hessian_product(F, Y, V) / float(loss.likelihood.count(F, Y)) for F, Y in terms]
        same = torch.allclose(*products, rtol=1e-3, atol=1e-5 * float(products[0].abs().max()))
    if not same:
        raise other_targets()


def same_targets(one: Any, two: Any) -> bool:
    """Whether two targets of a loss are the same."""
    tensors = isinstance(one, Tensor) and isinstance(two, Tensor)
    return one is two or (tensors and one.device == two.device and torch.equal(one, two))


def other_targets() -> UnsupportedError:
    """The error about a loss that was called once more with targets that the statistics don't have."""
    return UnsupportedError(
        "The loss was called twice on one output of the model, with different targets, and its curvature depends "
        "on them (class weights, ignored targets, vectors that are gradients of the loss), or there are several "
        "losses. Mix the targets instead, as class probabilities; or call the model inside "
        "`with optimizer.listen((X, y)):`, with the targets that the statistics should have."
    )
