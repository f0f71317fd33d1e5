"""Whether a language model compares the output at a position with the label at the next one: its own loss tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.losses import Losses
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch

__all__ = ["are_labels_shifted"]

# Of the batch, so many examples are enough to tell.
_FEW = 4
_TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}


def are_labels_shifted(model: nn.Module, losses: Losses, output: Callable[[Any], Any] | None, batch: Batch) -> bool:
    """Compare the loss that a model computes from `labels` with ours, with and without a shift.

    A loss with options of its own (class weights, smoothing) is compared by its plain form.

    Args:
        model: The model.
        losses: The losses.
        output: Picks what the loss reads, as for `EmpiricalRisk`.
        batch: A batch of keywords with labels.

    Returns:
        Whether labels are shifted; False if the model computes no loss.

    Raises:
        UnsupportedError: If the model's loss is ours neither way; has the numbers.

    Cost: a forward pass over four examples, two if both agree with its loss.
    """
    if losses.form != "single" or "labels" not in signature(model.forward).parameters:
        return False
    N = batch.num_examples
    few = take_examples(batch, list(range(min(_FEW, N)))) or batch
    # With gradients: hooks of a sweep may be on the layers, which need them.
    with preserve_state(model, ()), torch.inference_mode(False), torch.enable_grad():
        found = _outputs_and_loss(model, few)
        if found is None:
            return False
        out, own = found
        (f,), (axis,) = losses.select(out, output)
        ours = {"unshifted": _values(losses, f, few.y, few.num_examples, axis)}
        if _one_label_per_position(f, few.y):
            ours["shifted"] = _values(losses, f[:, :-1], few.y[:, 1:], few.num_examples, axis)
        if not math.isfinite(own):  # that is reported with its layer
            return False
        allowed = _TOLERANCE[f.element_size()] * max(abs(own), 1.0)
        equal = [name for name, values in ours.items() if min(abs(value - own) for value in values) <= allowed]
        if len(equal) == 2:  # a nearly constant loss, or low precision
            equal = _first_label_alone(model, few)
    if len(equal) == 1:
        return equal == ["shifted"]
    numbers = ", ".join(f"{values[0]:.6g} ({name})" for name, values in ours.items())
    raise UnsupportedError(
        f"{type(model).__name__} computes a loss of its own from `labels`: {own:.6g} for {few.num_examples} examples; "
        f"{type(losses[0].loss).__name__} gives {numbers}. "
        "If yours is meant to be another one, say so with shift_labels=False (or True: the output at position t is "
        "compared with the label at t + 1). Else choose the loss that the model has, or the output that it reads with "
        "`output=`."
    )


def _one_label_per_position(f: Tensor, y: Any) -> bool:
    """Whether there are labels [N, T] for outputs [N, T, C], which could be shifted."""
    return isinstance(y, Tensor) and f.ndim == 3 and f.shape[:2] == y.shape and f.shape[1] > 1


def _first_label_alone(model: nn.Module, batch: Batch) -> list[str]:
    """Ignore all labels but the first of each sequence, which a loss of shifted labels doesn't read."""
    y = torch.full_like(batch.y, -100)
    y[:, 0] = 0
    found = _outputs_and_loss(model, replace(batch, y=y))
    if found is None:  # labels that can't be ignored
        return []
    return ["unshifted" if math.isfinite(found[1]) and found[1] != 0 else "shifted"]


def _outputs_and_loss(model: nn.Module, batch: Batch) -> tuple[Any, float] | None:
    """What the model returns if it is given the labels, and its loss; None if it computes none from these."""
    try:
        out = model(**batch.X, labels=batch.y)
    except UnsupportedError:  # of our own hooks on layers, which are there in a sweep
        raise
    except Exception:  # labels of another form than it expects: then it has no opinion
        return None
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    return (out, float(loss.detach())) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _values(losses: Losses, f: Tensor, y: Any, N: int, axis: int | None) -> Sequence[float]:
    """Our loss as a mean, and the plain form of cross-entropy, whose class indices are ignored at -100."""
    values = []
    try:
        totals = losses.terms((f,), (y,), N, (axis,)).totals
        values.append(float(torch.as_tensor(totals.losses[0]).detach()) / float(totals.counts[0]))
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
        values.append(math.inf)
    if isinstance(y, Tensor) and not y.is_floating_point() and f.shape[:-1] == y.shape:
        values.append(float(F.cross_entropy(f.flatten(0, -2).detach().float(), y.flatten())))
    return values
