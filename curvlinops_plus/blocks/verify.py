"""Checks that catch a wrong layer rule, a wrong loss or a misread example axis, on a few examples of the user's own
data.

Per layer: (a) gradients of each example by the layer's rule against autograd on one example at a time, entry by entry.
Once for each loss: (c) its Hessian against double backward of the user's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.plan import table
from curvlinops_plus.errors import NumericsError, VerificationError
from curvlinops_plus.likelihood import GaussianNLL, Likelihood
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, LayerBatch, MonteCarlo
from curvlinops_plus.risk.batches import Batch, require_rereadable, take_examples
from curvlinops_plus.risk.layers import title
from curvlinops_plus.risk.losses import LossWeights, OutputLoss, coarsest_dtype
from curvlinops_plus.risk.preserve import eager, preserve_state, untraced
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
        VerificationError: Naming layer and check, if a relative error exceeds the tolerance (1e-8 for float64, 1e-3 for
            float32, 5e-2 if a parameter has half precision).

    Cost: a few forward and backward passes over `num_examples` examples, one at a time.

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
    half = any(p.dtype.itemsize < 4 for p in risk.params.values())
    tolerance = 5e-2 if half else 1e-8 if coarsest_dtype(risk) == torch.float64 else 1e-3
    rows: list[tuple[str, str, float]] = []

    def check(layer: str, name: str, got: Tensor, expected: Tensor, what: str) -> None:
        smallest = torch.finfo(got.dtype).tiny  # below it there are no digits
        got, expected = got.double(), expected.double()
        size = max(float(expected.norm()), smallest / tolerance)
        error = float((got - expected).norm()) / size
        if not error <= tolerance:
            loss = name == LOSS_CHECK
            where = (layer or f"loss {type(risk.losses.given).__name__}") if loss else title(layer)
            hint = (
                "Is the registered likelihood that of this loss, with all its options?"
                if loss
                else "Is its rule right, does the axis taken carry the examples, and is each treated by itself?"
            )
            raise VerificationError(
                f"{where}, check {name}: {what} differ from plain autodiff by {error:.1e} of their norm, more than "
                f"{tolerance:g}. {hint}"
            )
        rows.append((layer or "(model)", name, error))

    risk.whole.renew()
    with (
        preserve_state(risk.model, risk.data),
        torch.inference_mode(False),
    ):
        require_rereadable(risk.data, "`verify()` needs a few examples of its own")
        whole = next(iter(risk.batches("verify")))
        batch = _some(whole, list(range(min(num_examples, whole.num_examples))))
        try:
            recorded, vector = _recorded(risk, layers, batch)
        except OutsideReads:  # a table is as long as this many examples do not explain
            batch = replace(whole, weight=None)
            recorded, vector = _recorded(risk, layers, batch)
        singles = [_some(batch, [n]) for n in range(batch.num_examples)]
        reference = [_one_example(risk, example, [v[n : n + 1] for v in vector]) for n, example in enumerate(singles)]
        for one, outputs in _outputs(risk, batch):
            _check_loss(one, outputs, batch, tolerance, check)
        for layer, grads in recorded.items():
            found, expected = (
                torch.cat([of[key].reshape(batch.num_examples, -1) for key in layer.params], 1)
                for of in (grads, {key: torch.stack([single[key] for single in reference]) for key in layer.params})
            )
            check(layer.name, "(a) gradients", found, expected, "per-example gradients")
    return Verification(tuple(rows), tolerance)


def _some(batch: Batch, examples: list[int]) -> Batch:
    """Some examples of a batch."""
    return replace(take_examples(batch, examples) or batch, weight=None)


def _recorded(
    risk: EmpiricalRisk, layers: Sequence[Layer], batch: Batch
) -> tuple[dict[Layer, dict[str, Tensor]], list[Tensor]]:
    """Gradients of each example by the layers' rules, for a drawn vector, and that vector [N, R, C] of each loss."""
    found: dict[Layer, dict[str, Tensor]] = {}
    sent: dict[int, Tensor] = {}

    class Once(MonteCarlo):
        def send(self, likelihood: Any, F: Tensor, Y: Tensor, draws: Any) -> Any:
            for v in super().send(likelihood, F, Y, draws):
                sent[id(likelihood)] = v  # several losses are first asked how many random numbers they need
                yield v

    def consume(layer_batch: LayerBatch) -> None:
        grads: dict[str, Tensor] = {}
        for group in layer_batch.layer.groups:
            J = layer_batch.restrict(group).per_example_grads[0].flatten(1)  # [N, rows * columns]
            split = group.layout.split(J.T.contiguous())
            grads.update({key: value.movedim(-1, 0) for key, value in split.items()})
        found[layer_batch.layer] = grads

    single, vectors = risk.with_data([]), Once(1, 0)
    single.options = replace(risk.options, mask=None, check=False)  # verify() itself compares, number by number
    single.checked.shift = risk.checked.shift
    # Any weights will do, and a few examples may have no term of some loss.
    weights = LossWeights.plain(risk.losses)
    passes = RecordedPasses(single, layers, vectors, weights)
    with passes.hooked():
        totals = passes.observe(batch, Draws(0), consume)
    factors = risk.losses.vector_factors(totals.weights, linear=False)
    vector = [a * sent[id(one.likelihood)] for one, a in zip(risk.losses, factors, strict=True)]
    return {layer: found[layer] for layer in layers if layer in found}, vector


def _one_example(risk: EmpiricalRisk, single: Batch, vector: list[Tensor]) -> dict[str, Tensor]:
    """Gradient of one example by plain autograd."""
    free = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}

    def backward(model: nn.Module) -> tuple[Tensor | None, ...]:
        f, _, class_axis = risk.run(single, model)
        parts = [(one.likelihood, *part) for one, *part in zip(risk.losses, f, class_axis, strict=True)]
        sent = [
            (f, likelihood.restore(v, f.shape, 1, axis).to(f.dtype))
            for (likelihood, f, axis), v in zip(parts, vector, strict=True)
            if f.requires_grad
        ]
        return torch.autograd.grad([f for f, _ in sent], list(free.values()), [v for _, v in sent], allow_unused=True)

    with torch.enable_grad(), eager():
        found = risk.at(free, backward)
    return {key: torch.zeros_like(p) if g is None else g for (key, p), g in zip(free.items(), found)}


def _outputs(risk: EmpiricalRisk, batch: Batch) -> list[tuple[OutputLoss, tuple[Tensor, Any, int | None]]]:
    """Each loss with what it reads in this batch."""
    with torch.no_grad():
        outputs = risk.run(batch)
    return list(zip(risk.losses, zip(*outputs, strict=True), strict=True))


def _check_loss(
    one: OutputLoss, outputs: tuple[Tensor, Any, int | None], batch: Batch, tolerance: float, check: Any
) -> None:
    """(c): `H v` of the likelihood against double backward of the loss that the user gave.

    Where the loss is saturated, `H v` is a small difference of large numbers, of which rounding may leave nothing:
    there both are compared at outputs that are scaled down.
    """
    f, likelihood = outputs[0], one.likelihood
    if isinstance(likelihood, GaussianNLL):  # a Fisher matrix stands in for its indefinite Hessian
        return
    found = _loss_products(one, outputs, batch)
    if not bool(found[1].isfinite().all()):
        raise NumericsError("The Hessian of the loss with respect to the model's output is not finite.")
    scale = 1 / f.detach().abs().amax().clamp(min=1) if f.numel() else 1.0
    smaller = _loss_products(one, (f * scale, *outputs[1:]), batch)
    rounding = 100 * torch.finfo(found[1].dtype).eps * float(smaller[1].norm())  # of the numbers that are subtracted
    if float(found[1].norm()) * tolerance < rounding < float("inf"):
        found = smaller
    check(one.title if one.key is not None else "", LOSS_CHECK, *found, "products with the loss Hessian")


def _loss_products(one: OutputLoss, outputs: tuple[Tensor, Any, int | None], batch: Batch) -> tuple[Tensor, Tensor]:
    """A product with the Hessian of a loss, by the likelihood and by two backward passes."""
    (f, y, class_axis), likelihood = outputs, one.likelihood
    with torch.no_grad():
        F, Y = one.canonical(f, y, batch.num_examples, class_axis)
    direction = torch.linspace(-1, 1, F.numel(), dtype=F.dtype, device=F.device).view_as(F)
    # Where the Fisher matrix stands in for the Hessian of the loss, what is left to check is the loss itself.
    of_loss = likelihood.hessian_product
    if likelihood.no_ggn is not None:
        of_loss = partial(Likelihood.hessian_product, likelihood)
    ours = of_loss(F, Y, direction[None])[0]
    with torch.enable_grad():
        free = f.detach().to(F.dtype).requires_grad_()
        value = one.loss(*((free, y) if class_axis is None else (free.flatten(0, -2), y.flatten())))
        if likelihood.reduction == "mean":
            value = value * likelihood.count(F, Y)
        along = likelihood.restore(direction, f.shape, batch.num_examples, class_axis)
        (gradient,) = torch.autograd.grad(value, free, create_graph=True)
        theirs = torch.autograd.grad(gradient, free, along)[0] if gradient.requires_grad else torch.zeros_like(free)
    return likelihood.restore(ours, f.shape, batch.num_examples, class_axis), theirs
