"""Checks that catch a wrong layer rule, approximation or loss, or a misread example axis, on a few
examples of the user's own data.

(a) gradients by the layers' rules, as the self-check compares them; (b) what is exact of each
approximation's blocks, as `Accumulator.exact_parts` says, made of these examples alone; (c) the
Hessian of each loss; (d) the blocks that the operator has, against those that all of its data give
once more.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.plan import LayerPlan, table
from curvlinops_plus.blocks.sweeps import Kept
from curvlinops_plus.errors import VerificationError
from curvlinops_plus.likelihood import GaussianNLL, Likelihood
from curvlinops_plus.linalg import Eigendecomposed, LinearOperator
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, LayerBatch, MonteCarlo, Totals
from curvlinops_plus.risk.batches import Batch, gradients_of, require_rereadable, take_examples
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.check import rounding_of
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.losses import OutputLoss
from curvlinops_plus.risk.parameters import changed_parameters, fingerprint
from curvlinops_plus.risk.preserve import (
    TOLERANCE,
    eager,
    preserve_state,
    relative_difference,
    untraced,
)
from curvlinops_plus.risk.record import Recorder

BLOCK_CHECK, LOSS_CHECK, STORED_CHECK = "(b) blocks", "(c) loss Hessian", "(d) stored blocks"
# Layer, check and relative error.
Row = tuple[str, str, float]
# Of (b): how many vectors are sent, and how many numbers gradients of several examples may have,
# else it is one.
_VECTORS, _GRADIENTS = 3, 2**28


@dataclass(frozen=True)
class Verification:
    """The result of `verify()`: a row per check with its relative error. Printed, it shows the
    worst of each check.

    Attributes:
        rows: (layer, check, relative error). The error is NaN where nothing of a block is known to
            be exact, or where its gradients are all zero.
        tolerance: Largest error that passes; of blocks it is twice as much, or more where a model
            computes in lower precision than its parameters have.
    """

    rows: tuple[tuple[str, str, float], ...]
    tolerance: float

    def __str__(self) -> str:
        by_check: dict[str, list[tuple[float, str]]] = {}
        compared = [row for row in self.rows if not math.isnan(row[2])]
        for layer, check, error in compared:
            by_check.setdefault(check, []).append((error, layer))
        worst = [(check, len(found), *max(found)) for check, found in by_check.items()]
        lines = table(
            [(check, f"{error:.1e}", f"worst of {n}, {layer}") for check, n, error, layer in worst]
        )
        for check in (BLOCK_CHECK, STORED_CHECK):
            if missing := [row[0] for row in self.rows if row[1] == check and math.isnan(row[2])]:
                lines.append(f"{check}: {len(missing)} not compared, {', '.join(missing)}")
        return "\n".join([*lines, f"all {len(compared)} checks passed; .table() shows each"])

    def table(self) -> str:
        """One line per layer and check."""
        numbers = [
            "not compared" if math.isnan(error) else f"{error:.1e}" for *_, error in self.rows
        ]
        return "\n".join(
            table([(*row[:2], number) for row, number in zip(self.rows, numbers, strict=True)])
        )


@untraced
def verify(K: Any, num_examples: int = 3, stored: bool = True) -> Verification:
    """Run all checks on the first examples of the data.

    Args:
        K: The `BlockwiseLinearOperator`.
        num_examples: How many examples of the first batch are used.
        stored: Compute the blocks once more, to compare those that the operator has.

    Returns:
        A row for each layer and check: `print` it for the worst of each check, or its `table()` for
        all.

    Raises:
        VerificationError: Naming layer and check, if a relative error exceeds the tolerance (1e-6
            for float64, 1e-3 for float32, 5e-2 if a parameter has half precision; twice that of
            blocks, which are made of products).
        UnsupportedError: If the examples of a batch depend on each other.

    Cost: a few passes of these examples, three backward passes for each by itself, and memory for
    these gradients; with `stored` as much time and memory as the operator has taken.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        >>> data = [(torch.rand(5, 3).double(), torch.tensor([0, 1, 0, 1, 1]))]
        >>> len(curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)).verify().rows)
        7
    """
    risk: EmpiricalRisk = K.risk
    tolerance = TOLERANCE[min(p.dtype.itemsize for p in risk.params.values())]
    risk.renew()
    with preserve_state(risk.model, risk.data), torch.inference_mode(False):
        require_rereadable(risk.data, "`verify()` needs a few examples of its own")
        whole = replace(next(iter(risk.batches("verify"))), weight=None)
        few = take_examples(whole, range(min(num_examples, whole.num_examples))) or whole
        single = risk.with_data([])
        single.options = replace(risk.options, mask=None, weight=None, check="every")
        single.checked.shift = risk.checked.shift
        layers = [entry.layer for entry in K.plan]
        recorder = Recorder(single, layers, MonteCarlo(1, 0), LossWeights(risk, plain=True))
        for batch in (few, whole):
            try:
                with recorder.hooked():
                    recorder.observe(batch, Draws(0), lambda layer_batch: None)
                break
            except OutsideReads as error:  # a table is as long as a few examples do not explain
                if batch is whole or few is whole:
                    raise VerificationError(f"check (a) gradients: {error}") from error
        rows = [
            (name or "(model)", "(a) gradients", away)
            for name, away in single.checked.errors.items()
        ]
        rows += _block_rows(K, single, batch, num_examples, tolerance)
        with torch.no_grad():
            outputs = risk.run(few)
        for one, *output in zip(risk.losses, *outputs, strict=True):
            error = _loss_error(one, (output[0], output[1], output[2]), few.num_examples)
            where = one.title if one.key is not None else ""
            if not error <= tolerance:
                raise VerificationError(
                    f"{where or f'loss {type(one.loss).__name__}'}, check {LOSS_CHECK}: products "
                    f"with the loss Hessian differ from plain autodiff by {error:.1e} of their "
                    f"norm, more than {tolerance:g}. Is the registered likelihood that of this "
                    "loss, with all its options?"
                )
            rows.append((where or "(model)", LOSS_CHECK, error))
    if stored:
        rows += _stored_rows(K, tolerance)
    return Verification(tuple(rows), tolerance)


# --------------------------------------------------------------------------------------- (b) blocks
def _block_rows(
    K: Any, risk: EmpiricalRisk, few: Batch, number: int, tolerance: float
) -> list[Row]:
    """(b): what is exact of the blocks that the operator's approximations make of these examples.

    Args:
        number: Of how many examples there are gradients; of the others, as in a graph, they are
            zero.
    """
    size = _VECTORS * sum(p.numel() for p in risk.params.values())
    if few.num_examples > 1 and few.num_examples * size > _GRADIENTS:
        few = take_examples(few, [0]) or few
    batches, gradients, roundings = _record(K, risk, few, number)
    sizes = {key: float(g.norm()) for key, g in gradients.items()}
    largest = max(sizes.values(), default=0.0)
    mine = {*K.plan.kept_blocks}
    rows: list[Row] = []
    for entry in K.plan:
        eps, rounding = roundings[entry.layer]
        allowed = 2 * max(rounding, tolerance)  # a block is made of products of two gradients
        least = (
            eps / max(rounding, tolerance) * largest
        )  # below it rounding may be all that is left of a gradient
        shown = [batch for batch in batches if batch.layer is entry.layer]
        errors = _block_errors(K, entry, shown, gradients) if shown else {}
        for group in [group for group in entry.layer.groups if group.name in mine]:
            tells = not gradients or math.hypot(*[sizes[key] for key in group.keys]) > least
            error = errors.get(group.name, math.nan) if tells else math.nan
            if error > allowed:
                raise VerificationError(
                    f"{entry.layer.title}, check {BLOCK_CHECK}: of the block {group.name!r} that "
                    f"{entry.approximation!r} makes of {few.num_examples} examples, what has to be "
                    f"exact differs from plain autodiff by {error:.1e} of its norm, more than "
                    f"{allowed:g}. Look at `update` and `finish` of this approximation; where that "
                    "is meant, override `exact_parts`."
                )
            rows.append((group.name or "(model)", BLOCK_CHECK, error))
    return rows


def _record(
    K: Any, risk: EmpiricalRisk, few: Batch, number: int
) -> tuple[list[LayerBatch], dict[str, Tensor], dict[Layer, tuple[float, float]]]:
    """What layers receive when three vectors are sent, and gradients [V, N, *shape] by key of the
    plain model.

    Also for each layer the rounding of a number, and that of a gradient which the self-check
    allows.

    Approximations don't know which vectors are sent, so random ones are. The gradients know no
    layers: there is a backward pass to the parameters for each vector and example. Without vectors
    there are none.
    """
    free: dict[str, Tensor] = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
    layers, N = [entry.layer for entry in K.plan], few.num_examples
    recorder = Recorder(risk, layers, K.vectors, params=free)
    kept, gradients = Kept(sys.maxsize, {*layers}), dict[str, Tensor]()
    roundings: dict[Layer, tuple[float, float]] = {}

    def run(model: nn.Module) -> None:
        with recorder.recording(N):
            outputs = [f for f in risk.run(few, model)[0] if f.requires_grad]
        for layer in layers:
            dtypes = [*recorder.dtypes, *[p.dtype for p in layer.params.values()]]
            coarsest = max([torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point])
            roundings[layer] = coarsest, rounding_of(layer, recorder)
        recorder.begin(kept.add)
        if not outputs:
            recorder.show_inputs()
            return
        generator = torch.Generator().manual_seed(2)
        vectors = [
            [torch.randn(f.shape, generator=generator).to(f) for f in outputs]
            for _ in range(_VECTORS)
        ]
        for v in tree_leaves(vectors):
            v.view(N, -1)[number:] = 0
        recorder.send(outputs, vectors, _VECTORS, at_once=2)  # two at once, and one by itself
        with recorder.disabled:
            outputs = [f for f in risk.run(few, model)[0] if f.requires_grad]
            for key, rows in _gradients(outputs, vectors, N, free, recorder).items():
                gradients[key] = torch.stack(rows).unflatten(0, (len(vectors), N))

    with recorder, eager, torch.set_grad_enabled(K.vectors.backward):
        risk.at(free, run)
    return kept.batches, gradients, roundings


def _gradients(
    outputs: Sequence[Tensor],
    vectors: Sequence[Sequence[Tensor]],
    N: int,
    params: Mapping[str, Tensor],
    recorder: Recorder,
) -> dict[str, list[Tensor]]:
    """By key the gradient for each vector and each example by itself, in this order."""
    gradients: dict[str, list[Tensor]] = {key: [] for key in params}
    nothing = [None] * len(params)
    for vector in vectors:
        for n in range(N):
            alone = [torch.zeros_like(v) for v in vector]
            for of_one, v in zip(alone, vector, strict=True):
                of_one.view(N, -1)[n] = v.view(N, -1)[n]
            sent, power = recorder.in_range(alone, outputs)
            some = any(bool(v.any()) for v in alone)
            arrived = gradients_of(outputs, [*params.values()], sent, True) if some else nothing
            for (key, p), g in zip(params.items(), arrived, strict=True):
                dense = torch.zeros_like(p) if g is None else g.to_dense()
                gradients[key].append(at_least_float32(dense) / power)
    return gradients


def _block_errors(
    K: Any, entry: LayerPlan, shown: Sequence[LayerBatch], gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """Block name to the error of what is exact: of all examples, and of the largest single
    gradient.
    """
    layer, N = entry.layer, shown[0].num_examples
    J: dict[str, Tensor] = {}  # [V, N, *b, rows, columns]
    for group in layer.groups:
        shape = (N, *group.layout.matrix_shape)
        J[group.name] = torch.zeros(0, *shape, dtype=layer.accumulation_dtype, device=layer.device)
        if gradients:
            rows = group.layout.gather([gradients[key].flatten(0, 1) for key in group.keys])
            J[group.name] = rows.reshape(-1, *shape).to(layer.accumulation_dtype)
    samples = [(shown, J)]
    if gradients:
        squares = torch.stack([rows.square().flatten(2).sum(-1) for rows in J.values()]).sum(
            0
        )  # [V, N]
        n = int(squares[0].argmax())
        alone = shown[0].examples(slice(n, n + 1), slice(0, 1))
        samples.append(([alone], {name: rows[:1, n : n + 1] for name, rows in J.items()}))
    errors: dict[str, float] = {}
    with plain_mode(layer.device.type):
        for batches, of_groups in samples:
            for name, ours, theirs in _exact_parts(K, entry, batches, of_groups):
                lost = bool(theirs.isfinite().all()) and not bool(ours.isfinite().all())
                error = math.inf if lost else relative_difference(ours, theirs)
                errors[name] = max(error, errors.get(name, 0.0))
    return errors


def _exact_parts(
    K: Any, entry: LayerPlan, batches: Sequence[LayerBatch], J: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Block names with what blocks made of these batches have and must have. The loss's factor is 2
    / N.
    """
    N = batches[0].num_examples
    totals = Totals(examples=N, terms=N, loss_count=float(N))
    for name, accumulator in entry.accumulators(lambda totals: 2.0 / totals.loss_count).items():
        if K.plan.owners is not None and K.plan.owners[name] != K.risk.processes.rank:
            continue
        result: Any = accumulator
        while isinstance(result, Accumulator):
            for batch in batches:
                result.update(batch if result.group is None else batch.restrict(result.group))
            result.totals, result.complete = totals, True
            result = result.finish()
        for group in accumulator.groups:
            block = result if isinstance(result, LinearOperator) else result[group.name]
            restricted = [batch.restrict(group) for batch in batches]
            for ours, theirs in accumulator.exact_parts(
                block, J[group.name] * math.sqrt(2 / N), restricted
            ):
                yield group.name, ours, theirs


# -------------------------------------------------------------------------------- (d) stored blocks
def _stored_rows(K: Any, tolerance: float) -> list[Row]:
    """(d): the operator's blocks against those that its data give once more.

    Only where these were computed from these data, at the present parameters: not those of streams
    and states. Random vectors depend on the order of the data, so these have to be a list. In
    several processes that would be collective.
    """
    data, operator = K.risk.data, K._operator
    ordered = not K.vectors.random or isinstance(data, (list, tuple))
    not_compared = [(name or "(model)", STORED_CHECK, math.nan) for name in K.plan.kept_blocks]
    if operator is None or not K.of_data or K.risk.processes.world > 1 or not ordered:
        return not_compared
    if changed_parameters(K.parameters, fingerprint(K.risk), 1e-12):
        return not_compared
    again = copy.copy(K)
    again.check_deterministic = False
    again.compute()
    rows: list[Row] = []
    layers = {group.name: entry.layer for entry in K.plan for group in entry.layer.groups}
    for name, block in again.blocks.items():
        mine = operator.blocks[name]
        v = torch.randn(block.shape[1], generator=torch.Generator().manual_seed(4)).to(
            block.device, block.dtype
        )
        # Eigenvectors of equal eigenvalues may be others.
        pair = (
            (mine.trace, block.trace)
            if isinstance(block, Eigendecomposed)
            else (mine @ v, block @ v)
        )
        error = relative_difference(*pair)
        if not error <= 2 * tolerance:
            raise VerificationError(
                f"{layers[name].title}, check {STORED_CHECK}: the operator's block {name!r} "
                f"differs from what its data give now by {error:.1e} of its norm, more than "
                f"{2 * tolerance:g}. Was it changed, replaced or loaded since it was computed, or "
                "do the data change from pass to pass? compute() makes it anew, and "
                "verify(stored=False) leaves this check out."
            )
        rows.append((name or "(model)", STORED_CHECK, error))
    return rows


# --------------------------------------------------------------------------------- (c) loss Hessian
def _loss_error(one: OutputLoss, read: tuple[Tensor, Any, int | None], N: int) -> float:
    """(c): `H v` of the likelihood against double backward of the loss that the user gave.

    It is compared at outputs of at most 1: where a loss is saturated, rounding may leave nothing of
    it.
    """
    (f, y, class_axis), likelihood = read, one.require_likelihood()
    if isinstance(likelihood, GaussianNLL):  # a Fisher matrix stands in for its indefinite Hessian
        return 0.0
    f = f / f.detach().abs().amax().clamp(min=1) if f.numel() else f
    with torch.no_grad():
        F, Y = likelihood.canonical(f, y, N, class_axis)
    direction = torch.linspace(-1, 1, F.numel(), dtype=F.dtype, device=F.device).view_as(F)
    # Where the Fisher matrix stands in for the Hessian of the loss, what is left to check is the
    # loss itself.
    product = (
        partial(Likelihood.hessian_product, likelihood)
        if likelihood.no_ggn
        else likelihood.hessian_product
    )
    ours = likelihood.restore(product(F, Y, direction[None])[0], f.shape, N, class_axis)
    with torch.enable_grad():
        free = f.detach().to(F.dtype).requires_grad_()
        value = one.loss(*((free, y) if class_axis is None else (free.flatten(0, -2), y.flatten())))
        value = value * likelihood.count(F, Y) if likelihood.reduction == "mean" else value
        along = likelihood.restore(direction, f.shape, N, class_axis)
        (gradient,) = torch.autograd.grad(value, free, create_graph=True)
        theirs = (
            torch.autograd.grad(gradient, free, along)[0]
            if gradient.requires_grad
            else torch.zeros_like(free)
        )
    return relative_difference(ours, theirs) if bool(theirs.isfinite().all()) else float("inf")
