"""Whether a language model's own loss compares the output at a position with the label at the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.batches import Batch, take_examples
from curvlinops_plus.risk.determinism import TOLERANCE, relative_difference
from curvlinops_plus.risk.losses import Losses
from curvlinops_plus.risk.modules import preserve_state

# Of the batch, so many examples are enough to tell.
_FEW = 4


def are_labels_shifted(
    model: nn.Module, losses: Losses, output: Callable[[Any], Any] | None, batch: Batch
) -> bool | None:
    """Compare the loss that a model computes from `labels` with ours, with and without a shift.

    Args:
        output: Picks what the loss reads, as for `EmpiricalRisk`.
        batch: A batch of keywords with labels.

    Returns:
        Whether labels are shifted; False if the model computes no loss, None if no label of this batch counts.

    Raises:
        UnsupportedError: Unless the model's loss is ours in exactly one way; or if its outputs depend on labels.

    Cost: two forward passes of four examples.
    """
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner  # inside of what `torch.compile` and data parallelism make of it
    arguments = signature(model.forward).parameters
    if losses.form != "single" or not any(
        name == "labels" or a.kind == Parameter.VAR_KEYWORD for name, a in arguments.items()
    ):
        return False
    y, order = batch.y, list(range(batch.num_examples))
    if isinstance(y, Tensor) and y.ndim > 1 and len(y) == len(order):  # prompts of which no label counts say nothing
        counting = (y != getattr(losses[0].loss, "ignore_index", -100)).flatten(1).sum(1).tolist()
        order.sort(key=lambda n: -counting[n])
    few = take_examples(batch, order[:_FEW]) or batch
    # With gradients: hooks of a sweep may be on the layers, which need them.
    with torch.inference_mode(False), torch.enable_grad():
        try:
            with preserve_state(model, ()):
                (f,), (axis,), own = _told(model(**few.X, labels=few.y), losses, output)
        except UnsupportedError:
            raise
        except Exception:  # labels of another form than it takes
            return False
        y = few.y
        if own is None or not (isinstance(y, Tensor) and f.ndim == 3 and f.shape[:2] == y.shape):
            return False
        try:
            with preserve_state(model, ()):
                (without,), _ = losses.select(model(**few.X), output)
        except (ValueError, TypeError, RuntimeError) as error:
            raise _needs_labels(model, f"fails without `labels`: {error}") from error
        if without.shape != f.shape or relative_difference(without.detach(), f.detach()) > TOLERANCE[f.element_size()]:
            raise _needs_labels(model, "has outputs that depend on `labels`")
    if not math.isfinite(own):
        return None  # none counts, or the output is not finite, which is reported elsewhere
    pairs = {False: (f, y, axis), True: (f[:, :-1], y[:, 1:], losses[0].beside_positions(f, axis))}
    errors: list[Exception] = []
    values = {shifted: _mean(losses, *pair, errors=errors) for shifted, pair in pairs.items()}
    away = {shifted: abs(value - own) for shifted, value in values.items()}
    nearest = min(away, key=away.__getitem__)
    if not away[nearest] <= min(TOLERANCE[f.element_size()] * max(abs(own), 1.0), away[not nearest] / 4):
        if errors:  # the loss can't read such an output
            raise errors[0]
        raise UnsupportedError(
            f"{type(model).__name__} computes a loss of its own from `labels`, {own:.6g} for {len(order[:_FEW])} "
            f"examples; {type(losses[0].loss).__name__} gives {values[False]:.6g}, and {values[True]:.6g} with the "
            "output at position t compared with the label at t + 1. Say EmpiricalRisk(..., shift_labels=True) for the "
            "latter, or shift_labels=False."
        )
    return nearest


def _needs_labels(model: nn.Module, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} {why}. Labels are given to the loss, and not to the model: give the inputs that it "
        "makes of them in the batch, too, as decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)."
    )


def _told(out: Any, losses: Losses, output: Callable[[Any], Any] | None) -> tuple[Any, Any, float | None]:
    """What the loss reads of an output, its class axis, and the loss that the model has computed, if it has."""
    loss, rest = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None), out
    if loss is None and isinstance(out, tuple) and len(out) > 1:  # return_dict=False
        loss, rest = out[0], out[1:]
    elif is_dataclass(out) and not isinstance(out, type):
        rest = replace(out, loss=None)
    elif isinstance(out, Mapping):
        rest = {key: value for key, value in out.items() if key != "loss"}
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return (torch.empty(0),), (None,), None
    fs, axes = losses.select(rest, output)
    return fs, axes, float(loss.detach())


def _mean(losses: Losses, f: Tensor, y: Tensor, axis: int | None, errors: list[Exception]) -> float:
    """Our loss as a mean over the terms that count; infinite without any."""
    try:
        totals = losses.terms((f,), (y,), len(f), (axis,)).totals
        return float(torch.as_tensor(totals.losses[0]).detach()) / float(totals.counts[0])
    except ZeroDivisionError:
        return math.inf
    except (IndexError, ValueError, TypeError, RuntimeError) as error:
        errors.append(error)
        return math.inf


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
