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
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.plan import LayerPlan, table
from curvlinops_plus.blocks.sweeps import Kept
from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import VerificationError
from curvlinops_plus.likelihood import GaussianNLL, Likelihood
from curvlinops_plus.linalg import Eigendecomposed, LinearOperator
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.options import flag, integer
from curvlinops_plus.risk import Draws, EmpiricalRisk, LayerBatch, MonteCarlo, Totals
from curvlinops_plus.risk.backward_pass import in_range
from curvlinops_plus.risk.batches import Batch, gradients_of, require_rereadable, take_examples
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.check import rounding_of
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.losses import OutputLoss
from curvlinops_plus.risk.parameters import changed_parameters, fingerprint
from curvlinops_plus.risk.preserve import (
    TOLERANCE,
    preserve_state,
    relative_difference,
    untraced,
)
from curvlinops_plus.risk.record import Recorder

BLOCK_CHECK = "(b) blocks"
LOSS_CHECK = "(c) loss Hessian"
STORED_CHECK = "(d) stored blocks"
# Layer, check and relative error.
Row = tuple[str, str, float]
# Of (b): how many vectors are sent.
_VECTORS = 3
# How many numbers the gradients of several examples may have, else one example is used.
_GRADIENTS = 2**28


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
        errors: dict[str, list[tuple[float, str]]] = {}
        compared = [row for row in self.rows if not math.isnan(row[2])]
        for layer, check, error in compared:
            errors.setdefault(check, []).append((error, layer))
        cells: list[tuple[str, ...]] = []
        for check, of_layers in errors.items():
            error, layer = max(of_layers)
            cells.append((check, f"{error:.1e}", f"worst of {len(of_layers)}, {layer}"))
        lines = table(cells)
        for check in (BLOCK_CHECK, STORED_CHECK):
            if missing := [row[0] for row in self.rows if row[1] == check and math.isnan(row[2])]:
                lines.append(f"{check}: {len(missing)} not compared, {', '.join(missing)}")
        return "\n".join([*lines, f"all {len(compared)} checks passed; .table() shows each"])

    def table(self) -> str:
        """One line per layer and check."""
        cells: list[tuple[str, ...]] = []
        for layer, check, error in self.rows:
            number = "not compared" if math.isnan(error) else f"{error:.1e}"
            cells.append((layer, check, number))
        return "\n".join(table(cells))


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
    num_examples = integer("num_examples", num_examples, low=1)
    flag("stored", stored)
    risk: EmpiricalRisk = K.risk
    tolerance = TOLERANCE[min(p.dtype.itemsize for p in risk.params.values())]
    risk.renew()
    with preserve_state(risk.model, risk.data), torch.inference_mode(False):
        require_rereadable(risk.data, "`verify()` needs a few examples of its own")
        complete = replace(next(iter(risk.batches("verify"))), weight=None)
        few = take_examples(complete, range(min(num_examples, complete.num_examples))) or complete
        single = risk.with_data([])
        single.options = replace(risk.options, mask=None, weight=None, check="every")
        single.checked.shift = risk.checked.shift
        layers = [entry.layer for entry in K.plan]
        recorder = Recorder(single, layers, MonteCarlo(1, 0), LossWeights(risk, plain=True))
        for batch in (few, complete):
            try:
                with recorder.hooked():
                    recorder.observe(batch, Draws(0), lambda layer_batch: None)
                break
            except OutsideReads as error:
                # A table may be as long as a few examples do not explain.
                if batch is complete or few is complete:
                    raise VerificationError(f"check (a) gradients: {error}") from error
        rows = [
            (name or "(model)", "(a) gradients", error)
            for name, error in single.checked.errors.items()
        ]
        rows += _block_rows(K, single, batch, num_examples, tolerance)
        with GradMode(False):
            outputs = risk.run(few)
        for loss, f, y, class_axis in zip(risk.losses, *outputs, strict=True):
            error = _loss_error(loss, f, y, class_axis, few.num_examples)
            title = loss.title if loss.key is not None else ""
            if not error <= tolerance:
                raise VerificationError(
                    f"{title or f'loss {type(loss.loss).__name__}'}, check {LOSS_CHECK}: products "
                    f"with the loss Hessian differ from plain autodiff by {error:.1e} of their "
                    f"norm, more than {tolerance:g}. Is the registered likelihood that of this "
                    "loss, with all its options?"
                )
            rows.append((title or "(model)", LOSS_CHECK, error))
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
    record = _record(K, risk, few, number)
    rounding = max(record.rounding, tolerance)
    # A block is made of products of two gradients.
    allowed = 2 * rounding
    norms = {key: float(g.norm()) for key, g in record.gradients.items()}
    # Of a smaller gradient there may be nothing but rounding.
    least_norm = record.epsilon / rounding * max(norms.values(), default=0.0)
    kept_blocks = {*K.plan.kept_blocks}
    rows: list[Row] = []
    for entry in K.plan:
        batches = [batch for batch in record.batches if batch.layer is entry.layer]
        errors = _block_errors(K, entry, batches, record.gradients) if batches else {}
        for group in entry.layer.groups:
            if group.name not in kept_blocks:
                continue
            error = errors.get(group.name, math.nan)
            if norms and not math.hypot(*[norms[key] for key in group.keys]) > least_norm:
                error = math.nan
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


class _Record(NamedTuple):
    """What layers receive when three vectors are sent, and the gradients of the plain model.

    Attributes:
        batches: What layers receive.
        gradients: [V, N, *shape] by key; empty if nothing is sent back.
        epsilon: The rounding of a number in the model's coarsest precision.
        rounding: That of a gradient which the self-check allows.
    """

    batches: list[LayerBatch]
    gradients: dict[str, Tensor]
    epsilon: float
    rounding: float


def _record(K: Any, risk: EmpiricalRisk, few: Batch, number: int) -> _Record:
    """Run the model once for the layers, and once without hooks.

    Approximations don't know which vectors are sent, so random ones are. The gradients know no
    layers: there is a backward pass to the parameters for each vector and example.
    """
    params: dict[str, Tensor] = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
    N = few.num_examples
    layers = [entry.layer for entry in K.plan]
    recorder = Recorder(risk, layers, K.vectors, params=params)
    kept = Kept(sys.maxsize, {*layers})
    gradients: dict[str, Tensor] = {}
    with GradMode(K.vectors.backward), risk.placed(params), recorder.attached():
        with recorder.recording(few):
            outputs = [f for f in risk.run(few, risk.model)[0] if f.requires_grad]
        back = recorder.backward_pass(kept.add)
        if outputs:
            generator = torch.Generator().manual_seed(2)
            vectors = [
                [torch.randn(f.shape, generator=generator, device="cpu").to(f) for f in outputs]
                for _ in range(_VECTORS)
            ]
            for v in tree_leaves(vectors):
                v.view(N, -1)[number:] = 0
            # Two vectors at once, and one by itself.
            back.send(outputs, vectors, _VECTORS, at_once=2)
            gradients = _gradients_of_examples(recorder, few, params, vectors, min(number, N))
        else:
            back.show_inputs()
        # The recorder forgets them at its end.
        dtypes = [*recorder.last.dtypes, *[p.dtype for p in params.values()]]
        epsilon = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        rounding = max(rounding_of(layer, recorder) for layer in layers)
    return _Record(kept.batches, gradients, epsilon, rounding)


def _gradients_of_examples(
    recorder: Recorder,
    few: Batch,
    params: dict[str, Tensor],
    vectors: Sequence[Sequence[Tensor]],
    number: int,
) -> dict[str, Tensor]:
    """Gradients [V, N, *shape] of the plain model for so many examples; zero for the others."""
    N = few.num_examples
    gradients: dict[str, Tensor] = {}
    for key, p in params.items():
        gradients[key] = at_least_float32(p.new_zeros(_VECTORS, N, *p.shape))
    with recorder.disabled:
        outputs = [f for f in recorder.risk.run(few, recorder.risk.model)[0] if f.requires_grad]
        for k, n in product(range(_VECTORS), range(number)):
            # What of a vector is sent to the outputs of one example; zero elsewhere.
            vector = [torch.zeros_like(v) for v in vectors[k]]
            for part, v in zip(vector, vectors[k], strict=True):
                part.view(N, -1)[n] = v.view(N, -1)[n]
            sent, power = in_range(vector, outputs, recorder.last.dtypes)
            arrived = gradients_of(outputs, [*params.values()], sent, True)
            for stored, g in zip(gradients.values(), arrived, strict=True):
                if g is not None:
                    stored[k, n] = at_least_float32(g.to_dense()) / power
    return gradients


def _block_errors(
    K: Any, entry: LayerPlan, batches: Sequence[LayerBatch], gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """Block name to the error of what is exact: of all examples, and of the largest single
    gradient.
    """
    layer = entry.layer
    N = batches[0].num_examples
    J: dict[str, Tensor] = {}  # [V, N, *b, rows, columns]
    for group in layer.groups:
        shape = (N, *group.layout.matrix_shape)
        number = 0
        matrices = torch.zeros(0, *shape, device=layer.device)
        if gradients:
            number = len(gradients[group.keys[0]])
            matrices = group.layout.gather([gradients[key].flatten(0, 1) for key in group.keys])
        J[group.name] = matrices.reshape(number, *shape).to(layer.accumulation_dtype)
    samples = [(batches, J)]
    if gradients:
        # Σ J² [V, N] over all parameters of the layer
        squares = torch.stack([matrices.square().flatten(2).sum(-1) for matrices in J.values()])
        n = int(squares.sum(0)[0].argmax())
        single = batches[0].examples(slice(n, n + 1), slice(0, 1))
        samples.append(([single], {name: g[:1, n : n + 1] for name, g in J.items()}))
    errors: dict[str, float] = {}
    with plain_mode(layer.device.type):
        for sample in samples:
            for name, ours, theirs in _exact_parts(K, entry, *sample):
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
            result.totals = totals
            result.complete = True
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
    data = K.risk.data
    operator = K._operator
    ordered = not K.vectors.random or isinstance(data, (list, tuple))
    not_compared = [(name or "(model)", STORED_CHECK, math.nan) for name in K.plan.kept_blocks]
    if operator is None or not K._of_data or K.risk.processes.world > 1 or not ordered:
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
        if isinstance(block, Eigendecomposed):
            # Eigenvectors of equal eigenvalues may be others.
            error = relative_difference(mine.trace, block.trace)
        else:
            v = torch.randn(
                block.shape[1], generator=torch.Generator().manual_seed(4), device="cpu"
            )
            v = v.to(block.device, block.dtype)
            error = relative_difference(mine @ v, block @ v)
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
def _loss_error(loss: OutputLoss, f: Tensor, y: Any, class_axis: int | None, N: int) -> float:
    """(c): `H v` of the likelihood against double backward of the loss that the user gave.

    It is compared at outputs of at most 1: where a loss is saturated, rounding may leave nothing of
    it.
    """
    likelihood = loss.require_likelihood()
    if isinstance(likelihood, GaussianNLL):  # a Fisher matrix stands in for its indefinite Hessian
        return 0.0
    if f.numel():
        f = f / f.detach().abs().amax().clamp(min=1)
    with GradMode(False):
        F, Y = likelihood.canonical(f, y, N, class_axis)
    direction = torch.linspace(-1, 1, F.numel(), dtype=F.dtype, device=F.device).view_as(F)
    # Where the Fisher matrix stands in for the Hessian of the loss, what is left to check is the
    # loss itself.
    kind = Likelihood if likelihood.no_ggn else type(likelihood)
    ours = kind.hessian_product(likelihood, F, Y, direction[None])[0]
    ours = likelihood.restore(ours, f.shape, N, class_axis)
    with GradMode(True):
        free = f.detach().to(F.dtype).requires_grad_()
        if class_axis is None:
            value = loss.loss(free, y)
        else:
            value = loss.loss(free.flatten(0, -2), y.flatten())
        if likelihood.reduction == "mean":
            value = value * likelihood.count(F, Y)
        direction = likelihood.restore(direction, f.shape, N, class_axis)
        (gradient,) = torch.autograd.grad(value, free, create_graph=True)
        theirs = torch.zeros_like(free)
        if gradient.requires_grad:
            (theirs,) = torch.autograd.grad(gradient, free, direction)
    return relative_difference(ours, theirs) if bool(theirs.isfinite().all()) else math.inf
