"""One pass over the data that sends vectors back and passes the `LayerBatch` of every layer to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.risk.backward_pass import BackwardPasses, Consumer, VectorGroup, vector_groups
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.loss_weights import LossWeights, loss_weights
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.self_check import check_example_rows, check_expanded_rows
from curvlinops_plus.risk.totals import Totals
from curvlinops_plus.risk.vectors import Draws, Exact, Vectors

__all__ = ["observe", "record_layers", "send_back", "sweep"]


def sweep(
    risk: EmpiricalRisk,
    layers: Sequence[Layer],
    vectors: Vectors,
    consume: Consumer,
    after_batch: Callable[[Totals], None] | None = None,
    desc: str = "sweep",
    weights: LossWeights | None = None,
) -> Totals:
    """Read the data once and pass the batches of every layer to `consume`.

    Args:
        risk: Model, losses and data.
        layers: The layers to record.
        vectors: What is sent back.
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        after_batch: Called with the totals of each batch when all of it was consumed.
        desc: Text of the progress bar.
        weights: Relative weights of the losses; default: `loss_weights(risk)`.

    Returns:
        The totals over all batches.

    Raises:
        ValueError: If the data are not those that `weights` belong to.

    Cost: one forward pass, and one backward pass per vector to the layers' outputs only. Several losses, of which at
    least one has the reduction "mean": see `loss_weights`.
    """
    totals, draws = Totals(), Draws(vectors.seed or 0)
    if weights is None:
        weights = loss_weights(risk) if vectors.backward else LossWeights(risk.losses)
    with record_layers(risk, layers, vectors) as recorder:
        for batch in risk.batches(desc):
            batch_totals = observe(risk, recorder, batch, vectors, draws, consume, weights)
            totals.add(batch_totals)
            if after_batch is not None:
                after_batch(batch_totals)
    if vectors.backward and not weights.agree(totals):
        raise ValueError(weights.changing())
    return totals


@contextmanager
def record_layers(
    risk: EmpiricalRisk, layers: Sequence[Layer], vectors: Vectors, own_pass: bool = True
) -> Iterator[Recorder]:
    """Hooks on the modules of `layers`, for as long as the context lasts.

    Args:
        risk: The risk.
        layers: The layers.
        vectors: What will be sent back.
        own_pass: Whether nobody else needs the graph of the forward pass: without vectors there is none then.
    """
    grad_mode = torch.enable_grad if vectors.backward or not own_pass else torch.no_grad
    # Fused inference of transformers calls no submodule, so that no hook would fire.
    fused = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    intercept = any(isinstance(module, fused) for module in risk.model.modules())
    axes = risk.options.example_axis or {}
    with torch.inference_mode(False), grad_mode(), Recorder(layers, axes, vectors.backward, intercept) as recorder:
        yield recorder


def observe(
    risk: EmpiricalRisk,
    recorder: Recorder,
    batch: Batch,
    vectors: Vectors,
    draws: Draws,
    consume: Consumer,
    weights: LossWeights,
) -> Totals:
    """Run the model on one batch, send vectors back, and pass every layer's `LayerBatch` to `consume`."""
    random = torch.get_rng_state()
    # Hooks of a compiled model that ran before never fire; running eagerly leaves nothing behind.
    with torch.compiler.set_stance("force_eager"), recorder.recording(batch.num_examples):
        outputs = risk.run(batch)
    return send_back(risk, recorder, batch, outputs, random, vectors, draws, consume, weights)


def send_back(
    risk: EmpiricalRisk,
    recorder: Recorder,
    batch: Batch,
    outputs: tuple[Any, Any, Any],
    random: Tensor,
    vectors: Vectors,
    draws: Draws,
    consume: Consumer,
    weights: LossWeights,
    keep_graph: bool = False,
) -> Totals:
    """Send vectors back from what `risk.run` returned in a recorded forward pass.

    Args:
        risk: The risk.
        recorder: Which recorded the pass.
        batch: The batch.
        outputs: Outputs, targets and class axes, as `risk.run` returns them.
        random: State of the global generator before the pass.
        vectors: What is sent back.
        draws: Random numbers for them.
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        weights: Relative weights of the losses.
        keep_graph: Keep the graph: somebody else goes back through it afterwards.

    Returns:
        The totals of the batch.
    """
    fs, ys, class_axes = outputs
    _check_expanded(risk, recorder, batch, fs, random)
    with torch.no_grad(), torch.autocast(risk.device.type, enabled=False):
        terms = risk.terms([f.detach() for f in fs], ys, batch, class_axes)
    batch_totals = terms.totals
    passes = BackwardPasses(recorder, consume, _read_mask(risk, batch))
    batch_totals.called = passes.called
    if not vectors.backward:
        passes.inputs_only()
    else:
        batch_totals.weights = weights.of(batch_totals)
        groups = vector_groups(risk.losses, vectors, fs, terms, class_axes, draws, batch_totals.weights)
        if groups:
            _check_examples(risk, recorder, fs)
        for group in groups:
            _announce(risk, vectors, group)
            passes.send(group, _vectors_at_once(recorder, group.number), keep_graph or group is not groups[-1])
    batch_totals.reached = passes.reached
    return batch_totals


def _check_expanded(
    risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], random: Tensor
) -> None:
    """Check once each layer that returns one row for all examples."""
    names = {f"expanded {recorded.call.use.name}" for recorded in recorder.calls if recorded.expanded}
    if names - risk.checked:
        with preserve_state(risk.model, risk.data):
            check_expanded_rows(recorder, outputs, lambda: risk.run(batch)[0], random)
        risk.checked |= names


def _check_examples(risk: EmpiricalRisk, recorder: Recorder, outputs: Sequence[Tensor]) -> None:
    """Check once whether rows belong to examples."""
    if recorder.num_examples > 1 and "examples" not in risk.checked:
        check_example_rows(recorder, risk.model, [f for f in outputs if f.requires_grad])
        risk.checked.add("examples")


def _announce(risk: EmpiricalRisk, vectors: Vectors, group: VectorGroup) -> None:
    """Say once what exact vectors cost when there are several loss terms per example."""
    if group.terms == 1 or not isinstance(vectors, Exact) or vectors.signs or "announced" in risk.checked:
        return
    risk.checked.add("announced")
    warn(
        f"Exact() sends {group.number} vectors per batch{group.where}: {group.terms} loss terms per example, "
        f"each by itself, times {group.number // group.terms} columns. Exact(signs=True) or MonteCarlo() "
        "take fewer passes.",
        CurvatureWarning,
        stacklevel=2,
    )


def _vectors_at_once(recorder: Recorder, number: int) -> int:
    """How many vectors to send in one vectorised pass: 1 streams, which is faster for large batches on the CPU."""
    if number == 1:
        return 1
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    limit = 2**26 if slots and slots[0].out.is_cuda else 2**14
    return max(1, min(number, limit // max(sum(slot.out.numel() for slot in slots), 1)))


def _read_mask(risk: EmpiricalRisk, batch: Batch) -> Tensor | None:
    """The user's mask of one batch.

    Raises:
        ValueError: If it is no bool tensor [N, T].
    """
    if risk.options.mask is None:
        return None
    mask, N = risk.options.mask(batch.X, batch.y), batch.num_examples
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2 or mask.shape[0] != N:
        what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"`mask` returned {what}; expected a bool tensor [{N}, T], True where a position counts.")
    return mask.to(risk.device)
