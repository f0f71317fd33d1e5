"""What a model does with `labels`: whether its own loss compares the output at a position with the label at the next
one, and whether its outputs depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.losses import Losses
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch

# Of the batch, so many examples are enough to tell.
_FEW = 4
_TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}
_IGNORED = -100

Output = Callable[[Any], Any] | None


def are_labels_shifted(
    model: nn.Module, losses: Losses, output: Output, batch: Batch, said: bool | None = None
) -> bool | None:
    """Compare the loss that a model computes from `labels` with ours, with and without a shift.

    A loss with options of its own (class weights, smoothing) is compared by its plain form.

    Args:
        output: Picks what the loss reads, as for `EmpiricalRisk`.
        batch: A batch of keywords with labels.
        said: What the user said. Then losses are not compared.

    Returns:
        Whether labels are shifted; False if the model computes no loss, None if this batch does not tell.

    Raises:
        UnsupportedError: If the model's loss is ours neither way; has the numbers. If the outputs depend on the labels,
            which passes over data don't give to the model.

    Cost: two forward passes over four examples, one with and one without labels; up to two more if the losses are equal
    both ways, or if labels are ignored.
    """
    inner = _unwrapped(model)
    if losses.form != "single" or not _takes_labels(inner):
        return bool(said)
    labels = _Labels(inner, losses, output, _examples_with_most_labels(batch))
    # With gradients: hooks of a sweep may be on the layers, which need them.
    with torch.inference_mode(False), torch.enable_grad():
        out, own = labels.told(labels.batch.y)
        if out is None:  # labels of another form than it expects
            return bool(said)
        labels.require_that_outputs_ignore_them(out)
        if said is not None or own is None:
            return bool(said)
        return labels.shifted(out, own)


def shifted_labels(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the labels at the next positions.

    Raises:
        ValueError: If they don't have as many positions.
    """
    if f.shape[1:2] != y.shape[1:2]:
        raise ValueError(
            f"Labels are shifted (shift_labels) along axis 1 of an output of shape {list(f.shape)} and labels of shape "
            f"{list(y.shape)}, which has to be the positions of both. Classes are last: of an output [N, classes, T] "
            "say output=lambda f: f.mT."
        )
    return f[:, :-1], y[:, 1:]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of what `torch.compile` and data parallelism make of it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _takes_labels(model: nn.Module) -> bool:
    """Whether `labels` may be given; a wrapper with `**kwargs` passes them on."""
    arguments = signature(model.forward).parameters
    return "labels" in arguments or any(a.kind == Parameter.VAR_KEYWORD for a in arguments.values())


def _examples_with_most_labels(batch: Batch) -> Batch:
    """A few examples; prompts of which no label counts say nothing."""
    y, N = batch.y, batch.num_examples
    order = list(range(N))
    if isinstance(y, Tensor) and y.ndim > 1 and len(y) == N:
        numbers = (y != _IGNORED).flatten(1).sum(1).tolist()
        order.sort(key=lambda n: -numbers[n])
    return take_examples(batch, order[:_FEW]) or batch


class _Labels:
    """What a model makes of a few examples, with and without labels."""

    def __init__(self, model: nn.Module, losses: Losses, output: Output, batch: Batch) -> None:
        self.model, self.losses, self.output, self.batch = model, losses, output, batch
        self.ignored = getattr(losses[0].loss, "ignore_index", _IGNORED)  # ours; the model's own may be another one

    def _call(self, labels: Mapping[str, Any]) -> Any:
        """The model's output, always with the same random numbers and with inputs that it may write to."""
        batch = take_examples(self.batch, range(self.batch.num_examples)) or self.batch
        with preserve_state(self.model, ()):
            return self.model(**batch.X, **labels)

    def told(self, y: Any) -> tuple[Any, float | None]:
        """What the model returns with labels, None if it can't take these; and its loss, None if it computes none.

        What our loss ignores may be another number than what the model's loss does.
        """
        for labels in (y, _replaced(y, self.ignored, _IGNORED), _replaced(y, _IGNORED, self.ignored)):
            try:
                return _split(self._call({"labels": labels}))
            except UnsupportedError:  # of our own hooks on layers, which are there in a sweep
                raise
            except Exception:
                if self.ignored == _IGNORED:
                    break
        return None, None

    def _selected(self, out: Any) -> tuple[Tensor, int | None] | None:
        """What the loss reads and its class axis, None if it can't be found."""
        try:
            (f,), (axis,) = self.losses.select(out, self.output)
        except Exception:  # the function is the user's; if it fails without labels too, the pass over the data says so
            return None
        return f, axis

    # ------------------------------------------------------------------------------------------------------- outputs
    def require_that_outputs_ignore_them(self, out: Any) -> None:
        """Compare `out` with the output without labels.

        Raises:
            UnsupportedError: If it is another one, or there is none.
        """
        name = type(self.model).__name__
        try:
            plain = self._call({})
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{name} fails without `labels`, and passes over the data call it without. {_ADVICE} Its own message: "
                f"{type(error).__name__}: {error}"
            ) from error
        without, given = self._selected(plain), self._selected(out)
        if without is None or given is None or _equal(given[0], without[0]):
            return
        again = self._selected(self._call({}))
        if again is not None and _equal(again[0], without[0]):  # else it is random, which is reported elsewhere
            shapes = [list(f.shape) for f, _ in (given, without)]
            how = "other numbers" if shapes[0] == shapes[1] else f"shape {shapes[0]} instead of {shapes[1]}"
            raise UnsupportedError(
                f"The outputs of {name} depend on `labels`: with them they have {how}. Passes over the data call it "
                f"without. {_ADVICE}"
            )

    # -------------------------------------------------------------------------------------------------------- losses
    def shifted(self, out: Any, own: float) -> bool | None:
        """Whether the model's loss is that of shifted labels; None if its outputs or labels don't tell.

        Raises:
            UnsupportedError: If it is neither.
        """
        selected = self._selected(out) or self._selected(self._call({}))
        if selected is None:
            return None
        f, axis = selected
        own, ours, reasons = self._compared(f, axis, own)
        if not math.isfinite(own) and (len(ours) == 1 or not bool(f.isfinite().all())):
            return None  # numbers that are not finite are reported with their layer
        allowed = _TOLERANCE[f.element_size()] * max(abs(own), 1.0)
        equal = [name for name, values in ours.items() if any(abs(value - own) <= allowed for value in values)]
        if len(equal) == 2 or (len(ours) == 2 and f.shape[1] == 1):  # a nearly constant loss, low precision, one token
            told = self._first_label_alone(f)
            equal = told if told == ["shifted"] or equal else []
        if len(equal) == 1:
            return equal == ["shifted"]
        raise UnsupportedError(self._neither(f, own, ours, reasons))

    def _compared(self, f: Tensor, axis: int | None, own: float) -> tuple[float, dict[str, list[float]], list[str]]:
        """The model's loss, ours as in `_ours`, all of them of labels that count if those given leave one without."""
        given = own, *self._ours(f, self.batch.y, axis)
        if math.isfinite(own) and all(any(map(math.isfinite, values)) for values in given[1].values()):
            return given
        counting = self._all_counting(f, self.batch.y)
        told = self.told(counting)[1]
        return given if told is None else (told, *self._ours(f, counting, axis))

    def _ours(self, f: Tensor, y: Any, axis: int | None) -> tuple[dict[str, list[float]], list[str]]:
        """Values of our loss with and, if there is a label per position, without a shift; and why there are none."""
        reasons: list[str] = []
        ours = {"unshifted": self._values(f, y, axis, reasons)}
        if isinstance(y, Tensor) and f.ndim == 3 and f.shape[:2] == y.shape and f.shape[1] > 0:
            ours["shifted"] = self._values(f[:, :-1], y[:, 1:], self.losses[0].beside_positions(f, axis), reasons)
        return ours, reasons

    def _values(self, f: Tensor, y: Any, axis: int | None, reasons: list[str]) -> list[float]:
        """Our loss as a mean, and the plain form of cross-entropy, whose class indices are ignored at -100."""
        values = []
        try:
            totals = self.losses.terms((f,), (y,), self.batch.num_examples, (axis,)).totals
            values.append(float(torch.as_tensor(totals.losses[0]).detach()) / float(totals.counts[0]))
        except ZeroDivisionError:
            values.append(math.inf)
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            reasons.append(str(error))
            values.append(math.inf)
        f = f.movedim(self.losses[0].class_axis(axis), -1)
        if isinstance(y, Tensor) and not y.is_floating_point() and f.shape[:-1] == y.shape:
            classes = _replaced(y, self.ignored, _IGNORED)
            if bool(((classes == _IGNORED) | (classes >= 0) & (classes < f.shape[-1])).all()):
                values.append(float(F.cross_entropy(f.flatten(0, -2).detach().float(), classes.flatten())))
        return values

    def _all_counting(self, f: Tensor, y: Any) -> Any:
        """Class indices with another class where they are ignored."""
        if not isinstance(y, Tensor) or y.is_floating_point() or f.shape[:-1] != y.shape:
            return y
        return y.masked_fill((y == _IGNORED) | (y == self.ignored), int(self.ignored == 0))

    def _first_label_alone(self, f: Tensor) -> list[str]:
        """Ignore all labels but the first of each sequence, which a loss of shifted labels doesn't read."""
        alone = torch.full_like(self.batch.y, _IGNORED)
        alone[:, 0] = f[:, 0].argmin(-1)  # one that is not predicted, so that its loss is not 0
        own = self.told(alone)[1]
        if own is None:  # labels that can't be ignored
            return []
        return ["shifted" if math.isnan(own) or own == 0 else "unshifted"]

    def _neither(self, f: Tensor, own: float, ours: dict[str, list[float]], reasons: list[str]) -> str:
        """The message if the model's loss is ours neither way."""
        name, loss, y = type(self.model).__name__, type(self.losses[0].loss).__name__, self.batch.y
        about = f"{own:.6g} for {self.batch.num_examples} examples"
        begin = f"{name} computes a loss of its own from `labels`: {about}; {loss} "
        if reasons and not any(math.isfinite(value) for values in ours.values() for value in values):
            labels = f"of shape {list(y.shape)}" if isinstance(y, Tensor) else f"that are a {type(y).__name__}"
            return (
                f"{begin}can't be evaluated on an output of shape {list(f.shape)} and labels {labels}. Give labels the "
                "output's shape, or pick the part that the loss reads, for instance output=lambda o: o.logits[:, 0]. "
                f"Its own message: {reasons[0]}"
            )
        numbers = ", ".join(f"{values[0]:.6g} ({name})" for name, values in ours.items())
        return (
            f"{begin}gives {numbers}. {' '.join(reasons)} "
            "If yours is meant to be another one, say so with shift_labels=False (or True: the output at position t is "
            "compared with the label at t + 1). Else choose the loss that the model has, or the output that it reads "
            "with `output=`."
        )


_ADVICE = (
    "A model with a decoder makes the decoder's inputs from `labels`: put them in the batch, "
    'batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"]).'
)


def _split(out: Any) -> tuple[Any, float | None]:
    """An output without its loss, so that positions are those of an output without labels, and the loss."""
    loss, rest = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None), out
    if loss is None and isinstance(out, tuple) and out:  # return_dict=False
        loss, rest = out[0], out[1:]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or (rest is not out and loss.ndim):
        return out, None
    if is_dataclass(out) and not isinstance(out, type):
        rest = replace(out, loss=None)
    elif isinstance(out, Mapping):
        rest = {key: value for key, value in out.items() if key != "loss"}
    return rest, float(loss.detach())


def _equal(f: Tensor, g: Tensor) -> bool:
    """Whether two outputs are the same, up to rounding."""
    if f.shape != g.shape:
        return False
    allowed = _TOLERANCE[f.element_size()] / 10
    size = float(g.detach().abs().nan_to_num(0.0, 0.0).amax()) if g.numel() else 0.0
    return torch.allclose(f.detach(), g.detach(), rtol=allowed, atol=allowed * size, equal_nan=True)


def _replaced(y: Any, old: int, new: int) -> Any:
    """Class indices with a number in place of another one."""
    return y.masked_fill(y == old, new) if isinstance(y, Tensor) and not y.is_floating_point() else y
