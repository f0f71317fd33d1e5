"""Sending vectors back through a recorded forward pass; a consumer gets the gradients that arrive at each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.risk.determinism import TOLERANCE
from curvlinops_plus.risk.graph import below_range, gradients_of, is_narrow, narrowest, postorder, send_in_range
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import title
from curvlinops_plus.risk.losses import Losses, OutputLoss, Terms
from curvlinops_plus.risk.process_state import quiet
from curvlinops_plus.risk.record import OutputSlot, RecordedCall, Recorder
from curvlinops_plus.risk.vectors import Draws, Vectors

Consumer = Callable[[LayerBatch], None]


@dataclass(eq=False)
class VectorGroup:
    """Vectors that are sent back one after the other, through the same outputs.

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
    """What is sent back together in one batch; outputs without a graph are left out.

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
            restored, dtype = likelihood.restore(scaled, f.shape, self.F.shape[0], self.class_axis), narrowest(f.dtype)
            yield restored if restored.dtype == dtype else restored.to(dtype)


class BackwardPasses:
    """Sends vectors back through one recorded forward pass, and passes the `LayerBatch` of each layer to a consumer.

    Args:
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        mask: Positions that count, [N, T] bool; None for all.
        weight: Weights of the examples [N]; None for ones.
        see: Called with every `LayerBatch` first; a mask is not applied there.

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
        self._of_batch = {recorder.layers[i]: [c.call for c in calls] for i, calls in self._calls.items()}
        self._first = True  # whether no vector was sent yet

    def send(self, group: VectorGroup, at_once: int, keep_graph: bool) -> None:
        """Send vectors back.

        Args:
            at_once: How many to send in one vectorised pass; 1 streams them.
            keep_graph: Keep the graph: somebody goes back through it afterwards.
        """
        if at_once == 1 and not self._narrow(group.outputs):
            return self._stream(group, keep_graph)
        while chunk := list(islice(group.vectors, at_once)):
            self._send_at_once(group.outputs, [torch.stack(parts) for parts in zip(*chunk, strict=True)])

    def _narrow(self, outputs: Sequence[Tensor]) -> bool:
        """Whether vectors go through float16."""
        return is_narrow((*outputs, *self.recorder.slots))

    def take(self, group: VectorGroup, user: UserBackward) -> None:
        """Take the gradients of a single vector from the user's backward pass."""
        (vector,) = group.vectors
        self.recorder.require_unchanged()
        grads = user.gradients(group.outputs, vector)
        for index, calls in self._calls.items():
            if any(id(slot) in grads for recorded in calls for slot in recorded.slots):
                self.reached.add(index)
            self._show(index, grads)
        self._first = False

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
                    gradients_of(group.outputs, sources, vector, keep_graph or left > 0)
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

    def _send_at_once(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
        """Several vectors [V, *output] in one vectorised backward pass: fast for small batches and on GPUs, memory
        times V. Where an operation can't be vectorised, they are sent one at a time.
        """
        recorder, batched, narrow = self.recorder, len(vectors[0]) > 1, self._narrow(outputs)
        if self._first:
            recorder.require_unchanged()
        places = self._places()
        if not places:
            return
        edges = [slot.edge for _, slot in places]
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
        send = partial(torch.autograd.grad, outputs, edges, **options)
        try:
            with quiet():
                arrived = send_in_range(send, outputs, vectors if batched else [v[0] for v in vectors], narrow)
        except RuntimeError:  # custom functions without a vmap rule, and more; what else is wrong is raised again below
            if not batched:
                raise
            return self._send_each(outputs, vectors)
        _warn_of_rough(places[at][0] for at in arrived.rough)
        grads = {id(slot): g for at, (_, slot) in enumerate(places) if (g := arrived.take(at)) is not None}
        self.reached |= {call.layer for call in recorder.calls if not grads.keys().isdisjoint(map(id, call.slots))}
        for index in self._calls:
            self._show(index, grads, len(vectors[0]), batched)
        self._first = False

    def _places(self) -> list[tuple[RecordedCall, OutputSlot]]:
        """Where gradients arrive, with the calls that returned there."""
        return [(call, slot) for call in self.recorder.calls for slot in call.slots if slot.edge is not None]

    def _send_each(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
        """Several vectors [V, *output], one at a time."""
        singles = [tuple([v[k] for v in vectors]) for k in range(len(vectors[0]))]
        if not self._narrow(outputs):
            return self._stream(VectorGroup(outputs, len(singles), iter(singles)), keep_graph=True)
        for single in singles:
            self._send_at_once(outputs, [v[None] for v in single])

    def _show(self, index: int, grads: dict[int, Tensor] | None = None, V: int = 1, batched: bool = False) -> None:
        """Pass one layer's batch to the consumer, which may run modules again: those calls are not recorded."""
        recorder, calls = self.recorder, self._calls[index]
        if grads is not None:
            for recorded in calls:
                recorded.set_gradients(grads, V, batched)
        layer = recorder.layers[index]
        batch = LayerBatch(
            layer,
            self._of_batch[layer],
            recorder.num_examples,
            self._first,
            self.mask,
            self.weight,
            of_batch=self._of_batch,
        )
        with recorder.disabled, plain_mode(layer.device.type):
            if self.see is not None:
                self.see(replace(batch.first_vector(), mask=None, example_weights=None))
            self.consume(batch)
        for recorded in calls:
            recorded.call.grads = None


def _warn_of_rough(calls: Iterable[RecordedCall]) -> None:
    """Say which layers have gradients below the range of float16."""
    if names := ", ".join(dict.fromkeys(title(recorded.call.use.name) for recorded in calls)):
        warn(
            f"The gradients that arrive at {names} are so much smaller than those at other layers that float16 holds "
            "few digits of them: statistics there are rough. bfloat16 and float32 have the range.",
            CurvatureWarning,
            stacklevel=2,
        )


_AFTER = "Call `loss.backward()` after the block: then vectors are sent by a pass of their own."


class UserBackward:
    """What arrives at the outputs of a model and of its layers while the user goes back through a recorded pass.

    Args:
        outputs: What the losses read, as the model returned it.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Tensor]) -> None:
        self._layers, self._calls = recorder.layers, recorder.by_layer()
        self._at_outputs: dict[int, list[Tensor]] = {id(f): [] for f in outputs}
        self._at_slots: dict[int, tuple[Tensor, int]] = {}  # with versions
        self._scale: Tensor | None = None
        self._handles = [f.register_hook(self._at_outputs[id(f)].append) for f in outputs if f.requires_grad]
        recorder.receive = self._receive

    def close(self) -> None:
        """Remove the hooks from the outputs."""
        for handle in self._handles:
            handle.remove()

    @property
    def happened(self) -> bool:
        """Whether the user went back."""
        return any(self._at_outputs.values())

    @property
    def below_range(self) -> bool:
        """Whether what arrived has lost digits in float16."""
        return below_range(g for g, _ in self._at_slots.values())

    def _receive(self, recorded: RecordedCall, slot: OutputSlot, g: Tensor) -> None:
        g = g.detach()
        self._at_slots[id(slot)] = g, g._version

    def gradients(self, outputs: Sequence[Tensor], vector: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients that `vector` at the outputs has at the layers' outputs, by identity of the slot.

        Whatever number the user's loss was multiplied with is divided out: a mean, parts of a batch, a gradient scaler.

        Raises:
            UnsupportedError: If what arrived is no multiple of `vector`, or did not arrive everywhere.
        """
        factor, found, missing = self._factor(outputs, vector), {}, []
        for recorded in (recorded for calls in self._calls.values() for recorded in calls):
            for slot in recorded.slots:
                if (g := self._arrived(recorded, slot)) is not None:
                    found[id(slot)] = (_wide(g) if g.dtype == torch.float16 else g) / factor
                elif slot.edge is not None:
                    missing.append((recorded, slot))
        nodes = {node for node, _ in postorder([f.grad_fn for f in outputs])} if missing else set()
        for recorded, slot in missing:
            if slot.edge.node in nodes:
                raise UnsupportedError(
                    f"The backward pass inside `listen` did not reach {title(recorded.call.use.name)}. Call "
                    "`loss.backward()`, without `inputs`, so that it reaches all layers, or after the block."
                )
        return found

    def _arrived(self, recorded: RecordedCall, slot: OutputSlot) -> Tensor | None:
        g, version = self._at_slots.get(id(slot), (None, 0))
        if g is not None and g._version != version:
            where = title(recorded.call.use.name)
            raise UnsupportedError(f"The gradient of {where} was written to in the backward pass. {_AFTER}")
        return g

    def _factor(self, outputs: Sequence[Tensor], vector: Sequence[Tensor]) -> Tensor:
        """The number that `vector` was multiplied with, 0-d."""
        self.require_once()
        arrived = [self._at_outputs[id(f)] for f in outputs]
        pairs = [(g[0].detach() if g else torch.zeros_like(v), v) for g, v in zip(arrived, vector, strict=True)]
        g, v = (torch.cat([_wide(t).flatten() for t in ts]) for ts in zip(*pairs))
        factor, away = _multiple(g, v)
        if not away <= TOLERANCE[min(f.element_size() for f in outputs)] and bool(g.sum().isfinite()):
            raise UnsupportedError(
                "The gradient that the backward pass inside `listen` brought to the model's output is no multiple of "
                f"that of the risk's loss for this batch: the rest has {away:.1e} of its norm. Was it another loss, or "
                f"one with other weights or targets? {_AFTER}"
            )
        return factor

    def require_once(self) -> None:
        """Refuse a second backward pass."""
        if (times := max(map(len, self._at_outputs.values()))) > 1:
            raise UnsupportedError(
                f"The model's output was differentiated {times} times inside `listen`, expected once. {_AFTER}"
            )

    def compare(self, batch: LayerBatch, itemsize: int) -> None:
        """Compare what arrived with gradients from a pass of our own: it must be the same multiple in all layers.

        Args:
            batch: A layer's, from that pass.
            itemsize: Bytes of the coarsest numbers in the user's pass.

        Raises:
            UnsupportedError: If it is not.
        """
        for where, theirs, ours in self._pairs(batch):
            coarsest, theirs, ours = min(itemsize, theirs.element_size()), _wide(theirs), _wide(ours)
            scale, away = _multiple(theirs, ours)
            if self._scale is None and bool(ours.any()):
                self._scale = scale
            elif self._scale is not None:
                away = _distance(theirs, self._scale * ours, relative_to=self._scale * ours)
            if not away <= TOLERANCE[coarsest]:
                raise UnsupportedError(
                    f"The gradient that the backward pass inside `listen` brought to {where} is not that of the risk's "
                    f"loss for this batch: they differ by {away:.1e} of its norm. Was it another loss, is something "
                    f"else differentiated (a penalty on activations), or not all of the model? {_AFTER}"
                )

    def _pairs(self, batch: LayerBatch) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The layer's name, what arrived at its calls, and what arrived there in another pass."""
        index = next(k for k, layer in enumerate(self._layers) if layer is batch.layer)
        for recorded, call in zip(self._calls[index], batch.calls, strict=True):
            ours = [call.grads] if isinstance(call.grads, Tensor) else call.grads or ()
            for slot, own in zip(recorded.slots, ours, strict=True):
                yield batch.layer.title, slot.gradient(self._arrived(recorded, slot), 1, False), own


def _multiple(g: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """The number times which `v` is closest to `g`, and how far it is from it, relative to `g`."""
    square = (v * v).sum()
    factor = torch.where(square > 0, (g * v).sum() / square, torch.ones_like(square))
    return factor, _distance(g, factor * v, relative_to=g)


def _distance(a: Tensor, b: Tensor, relative_to: Tensor) -> float:
    """Distance over the norm of one of them; 0 of zeros."""
    away = torch.dist(a, b)
    return float(torch.where(away == 0, away, away / relative_to.norm()))


def _wide(t: Tensor) -> Tensor:
    return at_least_float32(t.detach())
