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
    while isinstance(
        inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module
    ):
        model = inner  # inside of what `torch.compile` and data parallelism make of it
    arguments = signature(model.forward).parameters
    takes_labels = "labels" in arguments or any(
        a.kind == Parameter.VAR_KEYWORD for a in arguments.values()
    )
    if losses.form != "single" or not takes_labels:
        return False
    y, order = batch.y, list(range(batch.num_examples))
    if (
        isinstance(y, Tensor) and y.ndim > 1 and len(y) == len(order)
    ):  # prompts of which no label counts say nothing
        counting = (y != getattr(losses[0].loss, "ignore_index", -100)).flatten(1).sum(1).tolist()
        order.sort(key=lambda n: -counting[n])
    few = take_examples(batch, order[:4]) or batch

    def run(**labels: Any) -> Any:
        with preserve_state(model, ()):  # the same random numbers each time
            return model(**few.X, **labels)

    # With gradients: hooks of a sweep may be on the layers, which need them.
    with torch.inference_mode(False):
        try:
            out = run(labels=few.y)
        except Exception:  # labels of another form than it takes
            return False
        own = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        own = (
            out[0] if isinstance(out, tuple) and len(out) > 1 and own is None else own
        )  # return_dict=False
        if not isinstance(own, Tensor) or own.numel() != 1:
            return False
        try:
            (f,), (axis,) = losses.select(run(), output)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UnsupportedError(
                f"{type(model).__name__} fails without `labels`: {error} {_DECODERS}"
            ) from error
    f, own, y, N = f.detach(), float(own.detach()), few.y, few.num_examples
    if not (isinstance(y, Tensor) and f.ndim == 3 and f.shape[:2] == y.shape):
        return False
    if not math.isfinite(own):
        return None  # none counts, or the output is not finite, which is reported elsewhere
    plain, shifted = (
        _mean(losses, f, y, axis),
        _mean(losses, *shifted_labels(losses[0], f, y, axis)),
    )
    near, far = sorted([abs(plain - own), abs(shifted - own)])
    if not near <= min(TOLERANCE[f.element_size()] * max(abs(own), 1.0), far / 4):
        raise UnsupportedError(
            f"{type(model).__name__} computes a loss of its own from `labels`, {own:.6g} for {N} "
            f"examples; {losses[0].title} gives {plain:.6g}, and {shifted:.6g} with the output at "
            "position t compared with the label at t + 1. Say EmpiricalRisk(..., "
            f"shift_labels=True) for the latter, or shift_labels=False. {_DECODERS}"
        )
    return abs(shifted - own) == near


_DECODERS = (
    "Labels are given to the loss, and not to the model. If its outputs depend on them, give what "
    "it makes of them in the batch: "
    "decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)."
)


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
    one: OutputLoss, f: Tensor, y: Tensor, class_axis: int | None
) -> tuple[Tensor, Tensor, int | None]:
    """Outputs, the labels at the next positions, and the class axis of an output whose axis 1 holds
    positions.

    Raises:
        ValueError: If axis 1 isn't that of the positions of both.
    """
    given = class_axis if class_axis is not None else one.likelihood.class_axis if one.known else -1
    if f.shape[1:2] != y.shape[1:2] or (given == 1 and f.ndim < 3):
        raise ValueError(
            f"{one.title}: labels are shifted (shift_labels) along axis 1 of an output of shape "
            f"{list(f.shape)} and labels of shape {list(y.shape)}, which has to be the positions "
            "of both; expected [N, T, classes]. Of an output [N, classes, T] say output=lambda f: "
            "f.mT."
        )
    return f[:, :-1], y[:, 1:], -1 if given == 1 else class_axis
