"""Sending vectors back through a recorded forward pass; a consumer gets the gradients that arrive at each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk.graph import gradients_of
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.losses import Losses, OutputLoss, Terms
from curvlinops_plus.risk.process_state import quiet
from curvlinops_plus.risk.record import OutputSlot, RecordedCall, Recorder
from curvlinops_plus.risk.vectors import Draws, Vectors

Consumer = Callable[[LayerBatch], None]


@dataclass(eq=False)
class VectorGroup:
    """Vectors that are backpropagated one after the other, through the same outputs.

    Attributes:
        number: Of vectors.
        vectors: The vectors, each with a part for every output, of the outputs' shapes.
        terms: Loss terms per example, R, where vectors are those of one loss.
        where: Which loss, in words.
    """

    outputs: Sequence[Tensor]
    number: int
    vectors: Iterator[tuple[Tensor, ...]]
    terms: int = 1
    where: str = ""


def vector_groups(
    losses: Losses,
    vectors: Vectors,
    outputs: Sequence[Tensor],
    terms: Terms,
    class_axes: Sequence[int | None],
    draws: Draws,
    weights: Sequence[float],
) -> list[VectorGroup]:
    """What is backpropagated together in one batch; outputs without a graph are left out.

    Args:
        outputs: What the losses read, attached to the graph.
        terms: The same in canonical form, and targets.
        class_axes: Of the outputs.
    """
    factors = losses.vector_factors(weights, vectors.of_loss)
    parts = [
        _LossVectors(one, vectors, *of_loss, weight=terms.weight)
        for one, *of_loss in zip(losses, outputs, terms.outputs, terms.targets, class_axes, factors, strict=True)
    ]
    # An output that no tracked layer reaches has no graph.
    reached = [(k, part) for k, part in enumerate(parts) if part.f.requires_grad and part.number]
    live = [(part, part.send(draws.of_loss(k))) for k, part in reached]
    if live and vectors.together and len({part.number for part in parts}) == 1:
        together = zip(*[sent for _, sent in live], strict=True)
        return [VectorGroup([part.f for part, _ in live], parts[0].number, together)]
    return [VectorGroup([part.f], part.number, zip(sent), part.F.shape[1], part.where) for part, sent in live]


@dataclass(eq=False)
class _LossVectors:
    """The vectors of one loss in one batch."""

    loss: OutputLoss
    vectors: Vectors
    f: Tensor
    F: Tensor
    Y: Any
    class_axis: int | None
    factor: float
    weight: Tensor | None
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.vectors.count(self.loss.likelihood, self.F)

    @property
    def where(self) -> str:
        """Which loss, in words."""
        return "" if self.loss.key is None else f" for output {self.loss.key!r}"

    def send(self, draws: Draws) -> Iterator[Tensor]:
        """The vectors times their factor, of the output's shape.

        Raises:
            ValueError: If there are more than `count` says: the graph is freed with the last one.
        """
        f, likelihood = self.f, self.loss.likelihood
        for sent, v in enumerate(self.vectors.send(likelihood, self.F, self.Y, draws), 1):
            if sent > self.number:
                name = type(self.vectors).__name__
                raise ValueError(f"{name} sends more vectors than its `count` says, {self.number}.")
            scaled = v if self.factor == 1 else v * self.factor
            if self.weight is not None:  # of the examples: squares of vectors are weighted
                scaled = scaled * self.weight.sqrt().to(v)[:, None, None]
            restored = likelihood.restore(scaled, f.shape, self.F.shape[0], self.class_axis)
            yield restored.to(torch.float32 if f.dtype == torch.float16 else f.dtype)


class BackwardPasses:
    """Sends vectors back through one recorded forward pass, and passes the `LayerBatch` of each layer to a consumer.

    Args:
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        mask: Positions that count, [N, T] bool; None for all.
        weight: Weights of the examples [N]; None for ones.
        see: Called with every `LayerBatch` first.

    Attributes:
        called: Indices of the layers that were called.
        reached: Indices of the layers that a gradient reached.
    """

    def __init__(
        self,
        recorder: Recorder,
        consume: Consumer,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        see: Callable[[LayerBatch], None] | None = None,
    ) -> None:
        self.recorder, self.consume, self.mask, self.weight, self.see = recorder, consume, mask, weight, see
        self.reached: set[int] = set()
        self._calls = recorder.by_layer()
        self.called = set(self._calls)
        self._first = True  # whether no vector was sent yet
        self._power = 1.0  # what vectors in float16 are multiplied with

    def send(self, group: VectorGroup, at_once: int, keep_graph: bool) -> None:
        """Send vectors back.

        Args:
            at_once: How many to send in one vectorised pass; 1 streams them.
            keep_graph: Keep the graph: somebody goes back through it afterwards.
        """
        if at_once == 1:
            return self._stream(group, keep_graph)
        while chunk := list(islice(group.vectors, at_once)):
            vectors = [torch.stack(parts) for parts in zip(*chunk, strict=True)]
            if len(chunk) == 1 or not self._send_at_once(group.outputs, vectors):
                self._stream(VectorGroup(group.outputs, len(chunk), iter(chunk)), keep_graph=True)

    def _in_range(self, vectors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Vectors from outputs on: in float16, times a power of two that leaves room on both sides."""
        if torch.float16 not in {place.dtype for place in (*outputs, *self.recorder.slots)}:
            return vectors
        largest = max(float(v.detach().abs().amax()) for v in vectors)
        self._power = 2.0 ** (8 - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        return [(v * self._power).to(f.dtype) for v, f in zip(vectors, outputs, strict=True)]

    def inputs_only(self) -> None:
        """Pass on batches with the layers' inputs alone; there are no gradients."""
        self.recorder.require_unchanged()
        for index in self._calls:
            self._show(index)
            self.reached.add(index)

    def _stream(self, group: VectorGroup, keep_graph: bool) -> None:
        """One vector at a time; each layer is consumed, and its gradient freed, as soon as it is complete."""
        sources, left = self.recorder.sources(group.outputs), group.number
        for vector in group.vectors:
            left -= 1
            if self._first:
                self.recorder.require_unchanged()
            self._waiting = dict.fromkeys(self._calls, 0)
            for recorded in self.recorder.calls:
                self._waiting[recorded.layer] += len(recorded.slots)
            self._received: dict[int, Tensor] = {}
            self.recorder.receive = self._receive
            try:
                if sources:
                    gradients_of(group.outputs, sources, self._in_range(vector, group.outputs), keep_graph or left > 0)
            finally:
                self.recorder.receive = None
            for index, waiting in self._waiting.items():
                if waiting:  # some call, or all of them, does not reach the output: its gradient is zero
                    self._show(index, self._received)
            self._first = False

    def _receive(self, recorded: RecordedCall, slot: OutputSlot, g: Tensor) -> None:
        """Called by autograd with the gradient of one output of one call."""
        self._received[id(slot)] = g.detach()
        self.reached.add(recorded.layer)
        self._waiting[recorded.layer] -= 1
        if self._waiting[recorded.layer] == 0:
            self._show(recorded.layer, self._received)

    def _send_at_once(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> bool:
        """Several vectors [V, *output] in one vectorised backward pass: fast for small batches and on GPUs, memory
        times V. Returns False where an operation can't be vectorised.
        """
        recorder, places = self.recorder, [slot for slot in self.recorder.slots if slot.edge is not None]
        if self._first:
            recorder.require_unchanged()
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        edges, sent = [slot.edge for slot in places], self._in_range(vectors, outputs)
        try:
            with quiet():
                arrived = torch.autograd.grad(outputs, edges, sent, **options) if places else ()
        except RuntimeError:  # custom functions without a vmap rule, and more; what else is wrong is raised again
            return False
        grads = {id(slot): g for slot, g in zip(places, arrived, strict=True) if g is not None}
        self.reached |= {call.layer for call in recorder.calls if not grads.keys().isdisjoint(map(id, call.slots))}
        for index in self._calls if places else ():
            self._show(index, grads, len(vectors[0]))
        self._first = False
        return True

    def _show(self, index: int, grads: dict[int, Tensor] | None = None, V: int = 1) -> None:
        """Pass one layer's batch to the consumer, which may run modules again: those calls are not recorded."""
        recorder, calls = self.recorder, self._calls[index]
        if grads is not None:
            for recorded in calls:
                recorded.set_gradients(grads, V)
                if self._power != 1:
                    call, power = recorded.call, self._power
                    call.grads = tree_map_only(Tensor, lambda g, power=power: g.float() / power, call.grads)
        layer = recorder.layers[index]
        batch = LayerBatch(
            layer,
            [recorded.call for recorded in calls],
            recorder.num_examples,
            self._first,
            self.mask,
            self.weight,
            group=layer.groups[0] if len(layer.groups) == 1 else None,
        )
        with recorder.disabled, plain_mode(layer.device.type):
            if self.see is not None:
                self.see(batch)
            self.consume(batch)
        for recorded in calls:
            recorded.call.grads = None
