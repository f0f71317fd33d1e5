"""One pass over the data that sends vectors back and passes the `LayerBatch` of every layer to a
consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.check import check_batch
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.loss_passes import LossWeights, loss_weights
from curvlinops_plus.risk.losses import Terms, Totals
from curvlinops_plus.risk.record import Consumer, OutsideReads, Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.vectors import Draws, Vectors


def sweep(
    risk: EmpiricalRisk,
    layers: Sequence[Layer],
    vectors: Vectors,
    consume: Consumer,
    desc: str = "sweep",
    weights: LossWeights | None = None,
    repeatable: bool = True,
) -> Totals:
    """Read the data once and pass the batches of every layer to `consume`.

    Args:
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        weights: Relative weights of the losses; default: `loss_weights(risk)`.
        repeatable: Whether two evaluations of the model have to agree.

    Returns:
        The totals over all batches.

    Cost: one forward pass, and one backward pass per vector to the layers' outputs only. Several
    losses, of which at least one has the reduction "mean": see `loss_weights`.
    """
    totals, draws, outside = Totals(), Draws(vectors.seed or 0), None
    if weights is None:
        weights = loss_weights(risk) if vectors.backward else LossWeights(risk)
    passes = RecordedPasses(risk, layers, vectors, weights, repeatable=repeatable)
    with passes.hooked():
        try:
            for batch in risk.batches(desc):
                totals.add(passes.observe(batch, draws, consume))
        except OutsideReads as error:
            outside = error
    totals = totals.over(risk.processes, outside)
    weights.require(totals)
    return totals


class RecordedPasses:
    """Forward passes of a risk's model under hooks on its layers, and the vectors that are
    backpropagated through them.

    Use them inside `hooked`.

    Args:
        own_pass: Whether nobody else needs the graph of the forward passes: without vectors there
            is none then. The modes of PyTorch are set by whoever makes the passes otherwise.
        repeatable: Whether two evaluations of the model have to agree; they don't in training mode.
        ignored: Layers whose calls are not recorded.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        layers: Sequence[Layer],
        vectors: Vectors,
        weights: LossWeights,
        own_pass: bool = True,
        repeatable: bool = True,
        ignored: Collection[Layer] = (),
    ) -> None:
        self.risk, self.vectors, self.weights, self.repeatable = risk, vectors, weights, repeatable
        axes = risk.options.example_axis or {}
        self.recorder = Recorder(layers, axes, vectors.backward, own_pass, ignored=ignored)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the hooks are on the modules."""
        with ExitStack() as modes:
            if self.recorder.own_pass:
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.set_grad_enabled(self.vectors.backward))
            with self.risk.placed(), self.recorder:
                yield

    def observe(self, batch: Batch, draws: Draws, consume: Consumer) -> Totals:
        """Run the model on one batch, send vectors back, and pass every layer's `LayerBatch` to
        `consume`.
        """
        with self.recorder.recording(batch.num_examples):
            outputs = self.risk.run(batch)
        return self.send_back(batch, outputs, draws, consume)

    def send_back(
        self,
        batch: Batch,
        outputs: tuple[Any, Any, Any],
        draws: Draws,
        consume: Consumer,
        keep_graph: bool = False,
    ) -> Totals:
        """Send vectors back from what the model returned in the recorded forward pass.

        Args:
            outputs: Outputs, targets and class axes, as `EmpiricalRisk.run` returns them.
            consume: Called with a `LayerBatch`, once per layer and piece of vectors.
            keep_graph: Keep the graph: somebody else goes back through it afterwards.

        Returns:
            The totals of the batch.
        """
        risk, recorder, vectors, (fs, ys, class_axes) = (
            self.risk,
            self.recorder,
            self.vectors,
            outputs,
        )
        with plain_mode(risk.device.type):
            values = recorder.own_pass  # streams don't add them up
            terms = risk.losses.terms(([f.detach() for f in fs], ys, class_axes), batch, values)
        draws.of_examples(
            risk.processes.numbers(draws.before + batch.first, batch.num_examples), risk.device
        )
        totals = terms.totals
        check_batch(risk, recorder, batch, fs, self.repeatable)
        recorder.begin(
            consume, None if risk.options.mask is None else _read_mask(risk, batch), batch.weight
        )
        totals.called = {*recorder.by_layer}
        if vectors.backward:
            factors = self.weights.factors(totals, vectors.of_loss)
            groups = vector_groups(risk, vectors, fs, terms, class_axes, draws, factors)
            for left, (read, number, sent) in enumerate(groups, 1 - len(groups)):
                heads = [fs[k] for k in read]
                at_once = 1 if number == 1 else _vectors_at_once(recorder, number)
                recorder.send(heads, sent, number, at_once, keep_graph or left < 0)
        else:
            recorder.show_inputs()
        totals.reached = recorder.reached
        return totals


def vector_groups(
    risk: EmpiricalRisk,
    vectors: Vectors,
    outputs: Sequence[Tensor],
    terms: Terms,
    class_axes: Sequence[int | None],
    draws: Draws,
    factors: Sequence[float],
) -> list[tuple[Sequence[int], int, Iterator[tuple[Tensor, ...]]]]:
    """What is sent together in one batch: numbers of outputs, a number of vectors, and these, with
    a part for each.

    Outputs without a graph are left out.

    Args:
        outputs: What the losses read, attached to the graph.
        terms: The same in canonical form, and targets.
        class_axes: Of the outputs.
        factors: What the vectors of each loss are multiplied by.
    """
    losses = risk.losses
    streams = [draws.of_loss(k) for k in range(len(losses))]  # before any of them draws

    def restored(k: int) -> Iterator[tuple[Tensor]]:
        """The vectors of one loss times their factor, of the output's shape."""
        f, F, factor = outputs[k], terms.outputs[k], factors[k]
        likelihood = losses[k].require_likelihood()
        for v in vectors.send(likelihood, F, terms.targets[k], streams[k]):
            v = v if factor == 1 else v * factor
            if terms.weight is not None:  # of the examples: squares of vectors are weighted
                v = v * terms.weight.sqrt().to(v)[:, None, None]
            v = likelihood.restore(v, f.shape, F.shape[0], class_axes[k])
            yield (v.to(torch.float32 if f.dtype == torch.float16 else f.dtype),)

    groups, numbers = list[Any](), set[int]()
    for k, (one, f, F) in enumerate(zip(losses, outputs, terms.outputs, strict=True)):
        numbers.add(number := vectors.count(one.require_likelihood(), F))
        if f.requires_grad and number:  # an output that no tracked layer reaches has no graph
            groups.append(([k], number, restored(k)))
    if len(groups) > 1 and vectors.together and len(numbers) == 1:
        together = (
            tuple(part for (part,) in parts)
            for parts in zip(*[sent for *_, sent in groups], strict=True)
        )
        return [([k for (k,), *_ in groups], number, together)]
    return groups


def _vectors_at_once(recorder: Recorder, number: int) -> int:
    """How many vectors to send in one vectorised pass: 1 streams, which is faster for large batches
    on the CPU.
    """
    limit = 2**26 if recorder.layers and recorder.layers[0].device.type == "cuda" else 2**14
    return max(1, min(number, limit // max(recorder.numbers, 1)))


def _read_mask(risk: EmpiricalRisk, batch: Batch) -> Tensor:
    """The user's mask of one batch.

    Raises:
        ValueError: If it is no bool tensor [N, T].
    """
    assert risk.options.mask is not None
    mask, N = risk.options.mask(batch.X, batch.y), batch.num_examples
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or mask.ndim != 2
        or mask.shape[0] != N
    ):
        what = (
            f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise ValueError(
            f"`mask` returned {what}; expected a bool tensor [{N}, T], True where a position "
            "counts."
        )
    return mask.to(risk.device)
