"""Numbers that are measured of each example in place of its loss, such as margins."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.likelihood import OfExamples
from curvlinops_plus.options import function
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import mapped
from curvlinops_plus.risk.losses import Losses

#: `measurement(outputs, targets)`: a number for each example, [N].
Measurement = Callable[[Tensor, Any], Tensor]


def measured(risk: EmpiricalRisk, measurement: Measurement) -> EmpiricalRisk:
    """The risk with a measurement in place of its loss.

    Raises:
        TypeError: If it is no function.
        UnsupportedError: If the model has several outputs.
    """
    function("measurement", measurement, "measurement(outputs, targets) -> tensor [N]")
    if risk.losses.form != "single":
        raise UnsupportedError(
            "measurement= is about one output, and the losses read the outputs "
            f"{risk.losses.output_keys}. Select one: a risk with output=lambda o: o[...]."
        )
    other = copy(risk)
    other.losses = Losses(_Measured(measurement))
    return other


class _Measured(OfExamples):
    """A measurement, as a loss of which there is one term for each example."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(None, "sum")
        self.measurement = measurement
        self.is_checked = False

    def nll(self, F: Tensor, Y: Any) -> Tensor:
        """The numbers, [N, 1].

        Raises:
            ValueError: If there is not one number for each example, or it depends on others.
        """
        y, f_shape = Y
        f = F.reshape(f_shape)
        N = len(F)
        values = self.measurement(f, y)
        if not isinstance(values, Tensor) or values.shape != (N,):
            came = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"`measurement` returned {came} for a batch of {N} examples; expected a tensor "
                f"[{N}], a number for each: don't reduce over examples."
            )
        if not self.is_checked and N > 1:
            self.is_checked = True
            self._compare(f, y, values.detach(), N)
        return values[:, None]

    def _compare(self, f: Tensor, y: Any, values: Tensor, N: int) -> None:
        """Compare the first number with that of the first example alone."""

        def first(t: Tensor) -> Tensor:
            return t[: len(t) // N] if t.ndim and not len(t) % N else t

        alone = self.measurement(first(f.detach()), mapped(first, y))
        if not torch.allclose(alone, values[:1], rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"`measurement` gives {float(values[0]):.6g} for the first example of a batch and "
                f"{float(alone[0]):.6g} for it alone; expected numbers that depend on one example "
                "each."
            )
