"""Options of a risk: their names and types, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from curvlinops_plus.distributed import Processes
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.options import flag, function, number
from curvlinops_plus.risk.batches import on_device
from curvlinops_plus.risk.losses import Losses

Loss = nn.Module | Callable[..., Any] | Mapping[Any, Any] | Sequence[Any]
"""A loss, or several: a dict or sequence like the model's output, of losses or of pairs of a loss
and its weight.
"""


class RiskKeywords(TypedDict, total=False):
    """Options of `EmpiricalRisk` that other classes take, too."""

    output: Callable[[Any], Any] | None
    mask: Callable[[Any, Any], Tensor] | None
    example_axis: Mapping[str, int] | None
    shift_labels: bool | None
    reduction: str | None
    check: bool | str
    weight: Callable[..., Any] | None
    processes: Processes | None


class AllRiskKeywords(RiskKeywords, total=False):
    """All options of `EmpiricalRisk`."""

    batch_size_fn: Callable[[Any], int] | None
    example_of_rows: Callable[[Any], Any] | None
    num_data: int | None
    num_per_example_loss_terms: int | None
    progressbar: bool


@dataclass(frozen=True)
class RiskOptions:
    """Options of an `EmpiricalRisk`, under the names of its arguments."""

    output: Callable[[Any], Any] | None = None
    mask: Callable[[Any, Any], Tensor] | None = None
    example_axis: Mapping[str, int] | None = None
    batch_size_fn: Callable[[Any], int] | None = None
    example_of_rows: Callable[[Any], Any] | None = None
    num_data: int | None = None
    num_per_example_loss_terms: int | None = None
    shift_labels: bool | None = None
    progressbar: bool = False
    reduction: str | None = None
    check: bool | str = True
    weight: Callable[..., Any] | None = None

    def require_valid(self, losses: Losses) -> None:
        """Refuse options that are out of range, or don't go with the losses.

        Raises:
            TypeError: If an option is of another type.
            ValueError: If one is out of range.
            UnsupportedError: If it needs a likelihood, or one loss alone.
        """
        function("output", self.output, "output(o) -> tensor, called with what the model returns")
        function("mask", self.mask, "mask(X, y) -> bool tensor [N, T], called with each batch")
        function("weight", self.weight, "weight(X, y, ...) -> tensor [N], called with each batch")
        function(
            "batch_size_fn", self.batch_size_fn, "batch_size_fn(X) -> N, called with each input"
        )
        function(
            "example_of_rows",
            self.example_of_rows,
            "example_of_rows(X) -> integers [M], called with each input",
        )
        flag("progressbar", self.progressbar)
        flag("shift_labels", self.shift_labels, optional=True)
        is_every = isinstance(self.check, str) and self.check == "every"
        if not isinstance(self.check, bool) and not is_every:
            raise ValueError(
                f"check={self.check!r}; expected True (the first batches, and some later), "
                '"every" (all batches), or False.'
            )
        counts = {"num_data": "examples", "num_per_example_loss_terms": "loss terms per example"}
        for name, counted in counts.items():
            count = getattr(self, name)
            if count is not None and not 0 < number(name, count, infinite=True) < math.inf:
                raise ValueError(
                    f"{name}={count} must be positive: it is the number of {counted}. None counts "
                    "them."
                )
            if count is not None and self.weight is not None:
                raise UnsupportedError(
                    f"{name} replaces a count of examples or terms, and with weight= the mean is "
                    'over the sum of their weights. Use reduction="sum", with what shall be '
                    "divided by in the weights."
                )
        unknown = [loss for loss in losses if loss.likelihood is None]
        if self.weight is not None and unknown:
            raise UnsupportedError(
                f"weight=: {unknown[0].title} has no likelihood, so that only its value for a "
                "whole batch is known, not that of each example. Register one, see "
                "register_likelihood."
            )
        for name in ("shift_labels", "num_per_example_loss_terms"):
            if losses.form != "single" and getattr(self, name):
                raise UnsupportedError(
                    f"{name} is about one loss, and there are losses for the outputs "
                    f"{losses.output_keys}. Leave it out; shift outputs and targets yourself, in "
                    "`output=` and in the data."
                )


def checked_weight(weight: Any, N: int, index: int, device: torch.device) -> Tensor:
    """The weights of the examples in double precision, as `EmpiricalRisk(weight=...)` gave them.

    Raises:
        ValueError: If they are no N finite numbers of at least 0.
    """
    is_vector = isinstance(weight, Tensor) and weight.shape == (N,)
    if not is_vector or not (weight.isfinite() & (weight >= 0)).all():
        came = type(weight).__name__
        if isinstance(weight, Tensor):
            came = f"{weight.dtype} {list(weight.shape)}"
        raise ValueError(
            f"`weight` returned {came} for batch {index}; expected a tensor [{N}], a finite number "
            "of at least 0 for each example."
        )
    return on_device(weight.detach().double(), device)
