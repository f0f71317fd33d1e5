"""Random losses with targets, and what their definitions say: what "mean" divides by, and Fisher
matrices.

A loss is described by its kind and plain options; targets are drawn when the shape of the output is
known.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor, nn

from test.fuzz.pieces import Options

#: Kinds of losses to how often they are drawn.
KINDS = {"ce": 5, "mse": 3, "bce": 2.5, "poisson": 1, "gaussian": 0.8}
KINDS |= {"rates": 0.4, "bce of p": 0.4, "nll": 0.5, "other": 0.6}
_CLASSES = ("ce", "nll")


def draw_loss(r: Random, kinds: dict[str, float] | None = None) -> Options:
    """Kind and options of a random loss."""
    kinds = KINDS if kinds is None else kinds
    kind = r.choices([*kinds], [*kinds.values()])[0]
    loss: Options = {"kind": kind, "reduction": r.choice(["mean", "mean", "sum"])}
    if kind == "ce":
        loss["targets"] = r.choice(["classes", "classes", "probabilities"])
        loss["weight"] = r.random() < 0.3
        loss["smoothing"] = r.choice([0.0, 0.0, 0.2])
        loss["ignore"] = r.choice([None, None, -100, 1]) if loss["targets"] == "classes" else None
    elif kind == "nll":
        loss |= {
            "targets": "classes",
            "weight": r.random() < 0.3,
            "ignore": r.choice([None, None, 1]),
        }
    elif kind == "bce":
        loss |= {
            "weight": r.random() < 0.3,
            "pos_weight": r.random() < 0.3,
            "soft": r.random() < 0.4,
        }
    elif kind == "bce of p":
        loss |= {"weight": r.random() < 0.3}
    elif kind in ("poisson", "gaussian"):
        loss["full"] = r.random() < 0.3
    return loss


class Quartic(nn.Module):
    """A loss that nobody knows: the fourth power of the error."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        error = (f - y) ** 4 + (f - y) ** 2
        return error.sum() if self.reduction == "sum" else error.mean()


def make_loss(
    o: Options, shape: tuple[int, ...], dtype: torch.dtype, reduction: str | None = None
) -> nn.Module:
    """The loss, for outputs of a shape."""
    kind, reduction = o["kind"], reduction or o["reduction"]
    last = shape[-1] if len(shape) > 1 else 1  # a lone axis is that of the examples

    def range_if(key: str, first: float, end: float, number: int) -> Tensor | None:
        return torch.linspace(first, end, number, dtype=dtype) if o.get(key) else None

    weight, more = range_if("weight", 0.5, 1.5, last), {"reduction": reduction}
    if kind in _CLASSES:
        weight = range_if("weight", 0.3, 2.0, shape[term_axis(o, shape)])
        more |= {} if o["ignore"] is None else {"ignore_index": o["ignore"]}
    makers: dict[str, Callable[[], nn.Module]] = {
        "nll": lambda: nn.NLLLoss(weight, **more),
        "ce": lambda: nn.CrossEntropyLoss(weight, label_smoothing=o["smoothing"], **more),
        "bce": lambda: nn.BCEWithLogitsLoss(
            weight, pos_weight=range_if("pos_weight", 3.0, 0.5, last), **more
        ),
        "bce of p": lambda: nn.BCELoss(weight, **more),
        "poisson": lambda: nn.PoissonNLLLoss(full=o["full"], **more),
        "rates": lambda: nn.PoissonNLLLoss(log_input=False, **more),
        "gaussian": lambda: nn.GaussianNLLLoss(full=o["full"], **more),
        "other": lambda: Quartic(reduction),
        "mse": lambda: nn.MSELoss(**more),
    }
    return makers[kind]()


def value(o: Options, loss: nn.Module, f: Tensor, y: Tensor) -> Tensor:
    """PyTorch's own value of a loss."""
    if o["kind"] == "gaussian":
        mean, variance = f.chunk(2, -1)
        return loss(mean, y, variance)
    return loss(f, y)


def make_target(
    o: Options, shape: tuple[int, ...], dtype: torch.dtype, generator: Generator
) -> Tensor:
    """Random targets for outputs of a shape."""
    kind = o["kind"]
    if o.get("targets") == "classes" and kind in _CLASSES:
        axis = term_axis(o, shape)
        y = torch.randint(shape[axis], shape[:axis] + shape[axis + 1 :], generator=generator)
        if o["ignore"] is not None and y.numel() > 1:
            y.view(-1)[1::3] = o["ignore"]
        return y
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    if kind == "gaussian":
        return uniform.chunk(2, -1)[0].to(dtype)
    if kind in ("poisson", "rates"):
        return (5 * uniform).floor().to(dtype)
    if kind in ("bce", "bce of p") and not o.get("soft", False):
        return uniform.round().to(dtype)
    return uniform.to(dtype) if kind in ("ce", "bce") else (4 * uniform - 2).to(dtype)


def term_axis(o: Options, shape: tuple[int, ...]) -> int:
    """The axis of the numbers of one term."""
    return min(1, len(shape) - 1) if o["kind"] in _CLASSES else len(shape) - 1


def links(o: Options) -> str:
    """What makes outputs fit a loss: positive, or probabilities."""
    return {
        "gaussian": "gaussian",
        "rates": "positive",
        "bce of p": "probability",
        "nll": "log-softmax",
    }.get(o["kind"], "none")


def mean_divisor(o: Options, loss: nn.Module, shape: tuple[int, ...], y: Tensor) -> float:
    """What PyTorch divides a sum by if the mean is meant."""
    if o["kind"] in _CLASSES and o["targets"] == "classes":
        kept = y[y != loss.ignore_index]
        return float(len(kept) if loss.weight is None else loss.weight[kept].sum())  # type: ignore[arg-type, index]
    if o["kind"] == "ce":
        return y.numel() / y.shape[term_axis(o, shape)]
    return float(y.numel())


def fisher(o: Options, loss: Any, f: Tensor, y: Tensor) -> Tensor | None:
    """The matrix in the output that replaces the Hessian, of losses where only the Fisher matrix
    makes sense.
    """
    if o["kind"] == "gaussian":
        variance = f.chunk(2, -1)[1].clamp(min=loss.eps)
        return torch.cat([1 / variance, 0.5 / variance.square()], -1).flatten().diag()
    if o["kind"] == "nll":
        axis = term_axis(o, tuple(f.shape))
        weight = f.new_ones(f.shape[axis]) if loss.weight is None else loss.weight
        h = torch.where(y == loss.ignore_index, 0.0, weight[y.clamp(min=0)])
        return (h.unsqueeze(axis) * f.exp()).flatten().diag()
    if o["kind"] == "rates":
        return (1 / (f + loss.eps)).flatten().diag()
    if o["kind"] == "bce of p":
        weight = torch.ones_like(f) if loss.weight is None else loss.weight.expand_as(f)
        return (weight / (f * (1 - f))).flatten().diag()
    return None
