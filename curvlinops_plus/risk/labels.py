"""Whether a language model's own loss compares the output at a position with the label at the next
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.batches import Batch, take_examples
from curvlinops_plus.risk.losses import Losses, OutputLoss
from curvlinops_plus.risk.preserve import TOLERANCE, preserve_state


def are_labels_shifted(
    model: nn.Module, losses: Losses, output: Callable[[Any], Any] | None, batch: Batch
) -> bool | None:
    """Compare the loss that a model computes from `labels` with ours, with and without a shift.

    Args:
        output: Picks what the loss reads, as for `EmpiricalRisk`.
        batch: A batch of keywords with labels.

    Returns:
        Whether labels are shifted; False if the model computes no loss, None if no label of this
        batch counts.

    Raises:
        UnsupportedError: Unless the model's loss is ours in exactly one way; or if it needs labels
            for its outputs.

    Cost: two forward passes of four examples.
    """
    model = _unwrapped(model)
    if losses.form != "single" or not _takes_labels(model):
        return False
    few = _with_labels(losses[0], batch)

    def run(**labels: Any) -> Any:
        with preserve_state(model, ()):  # the same random numbers each time
            return model(**few.X, **labels)

    # With gradients: hooks of a sweep may be on the layers, which need them.
    with torch.inference_mode(False):
        try:
            model_loss = _loss_in(run(labels=few.y))
        except Exception:  # labels of another form than it takes
            return False
        if model_loss is None:
            return False
        try:
            (f,), (axis,) = losses.select(run(), output)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UnsupportedError(
                f"{type(model).__name__} fails without `labels`: {error} {_DECODERS}"
            ) from error
    y = few.y
    if not isinstance(y, Tensor) or f.ndim != 3 or f.shape[:2] != y.shape:
        return False
    if not math.isfinite(model_loss):
        # No label counts, or the output is not finite, which is reported elsewhere.
        return None
    f = f.detach()
    rounding = TOLERANCE[f.element_size()] * max(abs(model_loss), 1.0)
    for compared in (losses, _bare(losses)):
        plain = _mean(compared, f, y, axis)
        shifted = _mean(compared, *shifted_labels(losses[0], f, y, axis))
        near, far = sorted([abs(plain - model_loss), abs(shifted - model_loss)])
        if near <= min(rounding, far / 4):
            return abs(shifted - model_loss) == near
    raise UnsupportedError(
        f"{type(model).__name__} computes a loss of its own from `labels`, {model_loss:.6g} "
        f"for {few.num_examples} examples; {losses[0].title} gives {plain:.6g}, and "
        f"{shifted:.6g} with the output at position t compared with the label at t + 1. Say "
        "EmpiricalRisk(..., shift_labels=True) for the latter, or shift_labels=False. "
        f"{_DECODERS}"
    )


def _bare(losses: Losses) -> Losses:
    """The loss without class weights and smoothing, which trainers add to the loss of a model."""
    loss = losses[0].loss
    if type(loss) is nn.CrossEntropyLoss:
        return Losses(nn.CrossEntropyLoss(ignore_index=loss.ignore_index))
    return losses


_DECODERS = (
    "Labels are given to the loss, and not to the model. If its outputs depend on them, give what "
    "it makes of them in the batch: "
    "decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)."
)


def _unwrapped(model: nn.Module) -> nn.Module:
    """A model inside of what `torch.compile` and data parallelism make of it."""
    inner = getattr(model, "_orig_mod", getattr(model, "module", None))
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _takes_labels(model: nn.Module) -> bool:
    arguments = signature(model.forward).parameters
    kinds = [argument.kind for argument in arguments.values()]
    return "labels" in arguments or Parameter.VAR_KEYWORD in kinds


def _with_labels(loss: OutputLoss, batch: Batch) -> Batch:
    """The four examples with most labels that count: prompts without any say nothing."""
    y = batch.y
    order = list(range(batch.num_examples))
    if isinstance(y, Tensor) and y.ndim > 1 and len(y) == len(order):
        ignored = getattr(loss.loss, "ignore_index", -100)
        counting = (y != ignored).flatten(1).sum(1).tolist()
        order.sort(key=lambda n: -counting[n])
    return take_examples(batch, order[:4]) or batch


def _loss_in(out: Any) -> float | None:
    """The loss in what a model returned for labels, None if it computes none."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is None and isinstance(out, tuple) and len(out) > 1:  # return_dict=False
        loss = out[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return float(loss.detach())


def _mean(losses: Losses, f: Tensor, y: Tensor, axis: int | None) -> float:
    """Our loss as a mean over the terms that count; infinite without any, or where it can't read
    such an output.
    """
    try:
        totals = losses.terms(((f,), (y,), (axis,)), Batch(None, y, len(f))).totals
        return float(totals.losses[0]) / float(totals.counts[0])
    except (ZeroDivisionError, IndexError, ValueError, TypeError, RuntimeError):
        return math.inf


def shifted_labels(
    loss: OutputLoss, f: Tensor, y: Tensor, class_axis: int | None
) -> tuple[Tensor, Tensor, int | None]:
    """Outputs, the labels at the next positions, and the class axis of an output whose axis 1 holds
    positions.

    Raises:
        ValueError: If axis 1 isn't that of the positions of both.
    """
    axis = class_axis
    if axis is None:
        axis = -1 if loss.likelihood is None else loss.likelihood.class_axis
    if f.shape[1:2] != y.shape[1:2] or (axis == 1 and f.ndim < 3):
        raise ValueError(
            f"{loss.title}: labels are shifted (shift_labels) along axis 1 of an output of shape "
            f"{list(f.shape)} and labels of shape {list(y.shape)}, which has to be the positions "
            "of both; expected [N, T, classes]. Of an output [N, classes, T] say output=lambda f: "
            "f.mT."
        )
    return f[:, :-1], y[:, 1:], -1 if axis == 1 else class_axis
