"""Checks that catch a wrong layer rule, a wrong loss or a misread example axis, on a few examples of the user's own
data: (a) gradients by the layers' rules, as the self-check compares them; (c) the Hessian of each loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.plan import table
from curvlinops_plus.errors import VerificationError
from curvlinops_plus.likelihood import GaussianNLL, Likelihood
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, MonteCarlo
from curvlinops_plus.risk.batches import require_rereadable, take_examples
from curvlinops_plus.risk.losses import LossWeights, OutputLoss
from curvlinops_plus.risk.preserve import TOLERANCE, preserve_state, relative_difference, untraced
from curvlinops_plus.risk.record import OutsideReads
from curvlinops_plus.risk.sweep import RecordedPasses

LOSS_CHECK = "(c) loss Hessian"


@dataclass(frozen=True)
class Verification:
    """The result of `verify()`: a row per check with its relative error. Printed, it shows the worst of each check.

    Attributes:
        rows: (layer, check, relative error).
        tolerance: Largest error that passes.
    """

    rows: tuple[tuple[str, str, float], ...]
    tolerance: float

    def __str__(self) -> str:
        by_check: dict[str, list[tuple[float, str]]] = {}
        for layer, check, error in self.rows:
            by_check.setdefault(check, []).append((error, layer))
        worst = [(check, len(found), *max(found)) for check, found in by_check.items()]
        lines = table([(check, f"{error:.1e}", f"worst of {n}, {layer}") for check, n, error, layer in worst])
        return "\n".join([*lines, f"all {len(self.rows)} checks within {self.tolerance:g}; .table() shows each"])

    def table(self) -> str:
        """One line per layer and check."""
        return "\n".join(table([(layer, check, f"{error:.1e}") for layer, check, error in self.rows]))


@untraced
def verify(risk: EmpiricalRisk, layers: Sequence[Layer], num_examples: int = 3) -> Verification:
    """Run all checks on the first examples of the data.

    Args:
        num_examples: How many examples of the first batch are used.

    Returns:
        A row for each layer and check: `print` it for the worst of each check, or its `table()` for all.

    Raises:
        VerificationError: Naming layer and check, if a relative error exceeds the tolerance (1e-6 for float64, 1e-3 for
            float32, 5e-2 if a parameter has half precision).
        UnsupportedError: If the examples of a batch depend on each other.

    Cost: a forward and a backward pass of these examples together, and of three of them one at a time.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        >>> data = [(torch.rand(5, 3).double(), torch.tensor([0, 1, 0, 1, 1]))]
        >>> len(curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)).verify().rows)
        3
    """
    tolerance = TOLERANCE[min(p.dtype.itemsize for p in risk.params.values())]
    risk.renew()
    with preserve_state(risk.model, risk.data), torch.inference_mode(False):
        require_rereadable(risk.data, "`verify()` needs a few examples of its own")
        whole = replace(next(iter(risk.batches("verify"))), weight=None)
        few = take_examples(whole, range(min(num_examples, whole.num_examples))) or whole
        single = risk.with_data([])
        single.options = replace(risk.options, mask=None, weight=None, check="every")
        single.checked.shift = risk.checked.shift
        passes = RecordedPasses(single, layers, MonteCarlo(1, 0), LossWeights(risk, plain=True))
        for batch in (few, whole):
            try:
                with passes.hooked():
                    passes.observe(batch, Draws(0), lambda layer_batch: None)
                break
            except OutsideReads as error:  # a table is as long as a few examples do not explain
                if batch is whole or few is whole:
                    raise VerificationError(f"check (a) gradients: {error}") from error
        rows = [(name or "(model)", "(a) gradients", away) for name, away in single.checked.errors.items()]
        with torch.no_grad():
            outputs = risk.run(few)
        for one, *output in zip(risk.losses, *outputs, strict=True):
            error = _loss_error(one, (output[0], output[1], output[2]), few.num_examples)
            where = one.title if one.key is not None else ""
            if not error <= tolerance:
                raise VerificationError(
                    f"{where or f'loss {type(one.loss).__name__}'}, check {LOSS_CHECK}: products with the loss Hessian "
                    f"differ from plain autodiff by {error:.1e} of their norm, more than {tolerance:g}. Is the "
                    "registered likelihood that of this loss, with all its options?"
                )
            rows.append((where or "(model)", LOSS_CHECK, error))
    return Verification(tuple(rows), tolerance)


def _loss_error(one: OutputLoss, read: tuple[Tensor, Any, int | None], N: int) -> float:
    """(c): `H v` of the likelihood against double backward of the loss that the user gave.

    It is compared at outputs of at most 1: where a loss is saturated, rounding may leave nothing of it.
    """
    (f, y, class_axis), likelihood = read, one.likelihood
    if isinstance(likelihood, GaussianNLL):  # a Fisher matrix stands in for its indefinite Hessian
        return 0.0
    f = f / f.detach().abs().amax().clamp(min=1) if f.numel() else f
    with torch.no_grad():
        F, Y = likelihood.canonical(f, y, N, class_axis)
    direction = torch.linspace(-1, 1, F.numel(), dtype=F.dtype, device=F.device).view_as(F)
    # Where the Fisher matrix stands in for the Hessian of the loss, what is left to check is the loss itself.
    product = partial(Likelihood.hessian_product, likelihood) if likelihood.no_ggn else likelihood.hessian_product
    ours = likelihood.restore(product(F, Y, direction[None])[0], f.shape, N, class_axis)
    with torch.enable_grad():
        free = f.detach().to(F.dtype).requires_grad_()
        value = one.loss(*((free, y) if class_axis is None else (free.flatten(0, -2), y.flatten())))
        value = value * likelihood.count(F, Y) if likelihood.reduction == "mean" else value
        along = likelihood.restore(direction, f.shape, N, class_axis)
        (gradient,) = torch.autograd.grad(value, free, create_graph=True)
        theirs = torch.autograd.grad(gradient, free, along)[0] if gradient.requires_grad else torch.zeros_like(free)
    return relative_difference(ours, theirs) if bool(theirs.isfinite().all()) else float("inf")
