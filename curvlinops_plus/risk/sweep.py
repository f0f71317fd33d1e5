"""One pass over the data that sends vectors back and passes the `LayerBatch` of every layer to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk.backward_pass import BackwardPasses, Consumer, VectorGroup, vector_groups
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.check import look_at
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.losses import LossWeights, Terms, loss_weights
from curvlinops_plus.risk.modules import modules_of
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.record import OutsideReads, Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.totals import Totals
from curvlinops_plus.risk.vectors import Draws, Exact, Vectors


def sweep(
    risk: EmpiricalRisk,
    layers: Sequence[Layer],
    vectors: Vectors,
    consume: Consumer,
    after_batch: Callable[[Totals], None] | None = None,
    desc: str = "sweep",
    weights: LossWeights | None = None,
    repeatable: bool = True,
) -> Totals:
    """Read the data once and pass the batches of every layer to `consume`.

    Args:
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        after_batch: Called with the totals of each batch when all of it was consumed.
        weights: Relative weights of the losses; default: `loss_weights(risk)`.
        repeatable: Whether two evaluations of the model have to agree.

    Returns:
        The totals over all batches.

    Raises:
        ValueError: If the data are not those that `weights` belong to.

    Cost: one forward pass, and one backward pass per vector to the layers' outputs only. Several losses, of which at
    least one has the reduction "mean": see `loss_weights`.
    """
    totals, draws, outside = Totals(), Draws(vectors.seed or 0), None
    if weights is None:
        weights = loss_weights(risk) if vectors.backward else LossWeights(risk.losses)
    passes = RecordedPasses(risk, layers, vectors, weights, repeatable=repeatable)
    with passes.hooked():
        try:
            for batch in risk.batches(desc):
                batch_totals = passes.observe(batch, draws, consume)
                totals.add(batch_totals)
                if after_batch is not None:
                    after_batch(batch_totals)
        except OutsideReads as error:
            outside = error
    totals = totals.over(risk.processes, outside)
    if vectors.backward:
        weights.require(totals)
    return totals


class RecordedPasses:
    """Forward passes of a risk's model under hooks on its layers, and the vectors that are backpropagated through them.

    Use them inside `hooked`.

    Args:
        own_pass: Whether nobody else needs the graph of the forward passes: without vectors there is none then. The
            modes of PyTorch are set by whoever makes the passes otherwise.
        repeatable: Whether two evaluations of the model have to agree; they don't in training mode.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        layers: Sequence[Layer],
        vectors: Vectors,
        weights: LossWeights,
        own_pass: bool = True,
        repeatable: bool = True,
    ) -> None:
        self.risk, self.vectors, self.weights, self.repeatable = risk, vectors, weights, repeatable
        # Fused inference of transformers calls no submodule, so that no hook would fire.
        fused = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
        if risk.checked.fused is None:
            risk.checked.fused = any(isinstance(m, fused) for m in modules_of(risk.model).values())
        options = risk.options
        self.recorder = Recorder(
            layers,
            options.example_axis or {},
            vectors.backward,
            risk.checked.fused,
            own_pass=own_pass,
        )
        self._own_pass = own_pass
        # Between passes of others no mode of ours is on.
        self._watching = nullcontext if own_pass else self.recorder.watching

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the hooks are on the modules."""
        risk, recorder = self.risk, self.recorder
        if not self._own_pass:
            with risk.placed(), recorder:
                yield
            return
        gradients = torch.enable_grad() if self.vectors.backward else torch.no_grad()
        with torch.inference_mode(False), gradients, recorder.watching(), eager(), risk.placed(), recorder:
            yield

    def recording(self, batch: Batch) -> AbstractContextManager[None]:
        """Context for one forward pass of the model on a batch."""
        recording = self.recorder.recording(batch.num_examples)
        return recording if self._own_pass else self._among_others(recording)

    @contextmanager
    def _among_others(self, recording: AbstractContextManager[None]) -> Iterator[None]:
        # Hooks of a compiled model that ran before never fire; running eagerly leaves nothing behind.
        with eager(), self._watching(), recording:
            yield

    def observe(
        self,
        batch: Batch,
        draws: Draws,
        consume: Consumer,
        check: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> Totals:
        """Run the model on one batch, send vectors back, and pass every layer's `LayerBatch` to `consume`.

        Args:
            check: Called with what the losses read.
        """
        with self.recording(batch):
            outputs = self.risk.run(batch)
            if check is not None:
                check(outputs[0])
            terms = self.terms(batch, outputs)
        return self.send_back(batch, outputs, terms, draws, consume)

    def terms(self, batch: Batch, outputs: tuple[Any, Any, Any]) -> Terms:
        """What the losses make of the outputs, as `EmpiricalRisk.run` returns them."""
        fs, ys, class_axes = outputs
        with plain_mode(self.risk.device.type):
            return self.risk.terms([f.detach() for f in fs], ys, batch, class_axes)

    def send_back(
        self,
        batch: Batch,
        outputs: tuple[Any, Any, Any],
        terms: Terms,
        draws: Draws,
        consume: Consumer,
        keep_graph: bool = False,
    ) -> Totals:
        """Send vectors back from what the model returned in the recorded forward pass.

        Args:
            outputs: Outputs, targets and class axes, as `EmpiricalRisk.run` returns them.
            terms: What the losses make of them.
            consume: Called with a `LayerBatch`, once per layer and piece of vectors.
            keep_graph: Keep the graph: somebody else goes back through it afterwards.

        Returns:
            The totals of the batch.
        """
        risk, recorder, vectors, (fs, _, class_axes) = self.risk, self.recorder, self.vectors, outputs
        draws.of_examples(risk.processes.numbers(draws.before + batch.first, batch.num_examples))
        batch_totals = terms.totals
        with self._watching():
            look = look_at(risk, recorder, batch, fs, self.repeatable)
            see = look.see if look is not None else None
            passes = BackwardPasses(recorder, consume, _read_mask(risk, batch), batch.weight, see)
            batch_totals.called = passes.called
            if not vectors.backward:
                passes.inputs_only()
            else:
                batch_totals.weights = self.weights.of(batch_totals)
                groups = vector_groups(risk.losses, vectors, fs, terms, class_axes, draws, batch_totals.weights)
                for group in groups:
                    last = group is groups[-1]
                    _announce(risk, vectors, group)
                    group = group if look is None else look.expect(group)
                    passes.send(group, _vectors_at_once(recorder, group.number), keep_graph or not last)
                    if look is not None:
                        look.compare()
                if look is not None:
                    look.finish()
        batch_totals.reached = passes.reached
        return batch_totals


def _announce(risk: EmpiricalRisk, vectors: Vectors, group: VectorGroup) -> None:
    """Say once what exact vectors cost when there are several loss terms per example."""
    if group.terms == 1 or not isinstance(vectors, Exact) or vectors.signs or "announced" in risk.checked.said:
        return
    risk.checked.said.add("announced")
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
    slots = recorder.slots
    limit = 2**26 if slots and slots[0].device.type == "cuda" else 2**14
    return max(1, min(number, limit // max(sum(slot.shape.numel() for slot in slots), 1)))


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
