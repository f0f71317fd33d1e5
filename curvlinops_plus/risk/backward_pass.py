"""Vectors that go back through a recorded forward pass, to what its layers returned.

Autograd is asked for the gradients at the edges of all calls at once (large ones arrive one by
one), and not for those of parameters. Each layer's calls, with their gradients, are shown to a
consumer as a `LayerBatch`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.linalg.pieces import rows_at_once
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.risk.batches import gradients_of, stream_gradients
from curvlinops_plus.risk.calls import title
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.losses import Terms
from curvlinops_plus.risk.preserve import quiet
from curvlinops_plus.risk.recorded_pass import RecordedPass
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.stack_batch import batch_of
from curvlinops_plus.risk.vectors import Draws, Vectors

Consumer = Callable[[LayerBatch], None]
# Gradients of more numbers than these are shown to layers as they are computed, to save memory.
_MANY_NUMBERS = 2**22
# Larger gradients of vectors, if their numbers take four bytes each, are computed one after the
# other on a CPU.
_VECTOR_BYTES = 2**16


class BackwardPass:
    """Sends vectors back through a recorded pass, and shows each layer what arrives.

    Args:
        recorded: The forward pass.
        layers: Those that calls name by their index.
        device: Where they are.
        disabled: Context in which modules that run are not recorded.
        watched: Makes the context of a backward pass, in which checkpointing may call functions
            once more.
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        mask: Positions that count, [N, T] bool; None for all.
        weight: Weights of the examples [N]; None for ones.

    Attributes:
        calls: Those of the forward pass.
        reached: Indices of the layers that a gradient has reached.
        is_first: Whether no vector was sent yet.

    Raises:
        UnsupportedError: If the input of a layer was written to since it was read.
    """

    def __init__(
        self,
        recorded: RecordedPass,
        layers: Sequence[Layer],
        device: torch.device,
        disabled: AbstractContextManager[Any],
        watched: Callable[[], AbstractContextManager[Any]],
        consume: Consumer,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        self._recorded = recorded
        self.calls = recorded.calls
        self._layers = layers
        self._device = device
        self._disabled = disabled
        self._watched = watched
        self._consume = consume
        self._mask = mask
        self._weight = weight
        self.is_first = True
        self._by_layer = recorded.by_layer
        self.reached: set[int] = set()
        num_edges = 0
        for call in recorded.calls:
            if call.routed is not None and not len(call.routed.order):
                self.reached.add(call.layer)  # as far as there are rows
            call.first_edge = num_edges
            num_edges += len(call.outputs)
            for t, version in call.versions:
                if t._version != version:
                    raise UnsupportedError(
                        f"the input of {title(call.use.name)} was modified in place after the "
                        "layer read it, so its curvature can't be computed from it. Replace the "
                        "in-place operation (for instance `x += y` by `x = x + y`)."
                    )

    def show_inputs(self) -> None:
        """Show batches with the layers' inputs alone; there are no gradients."""
        self.reached |= self._by_layer.keys()
        self.show([], 0)

    def at_once(self, number: int) -> int:
        """How many of so many vectors to send in one vectorised pass: 1 streams, which is faster
        for large batches on the CPU.
        """
        if number == 1:
            return 1
        rows = rows_at_once(self._device, _VECTOR_BYTES, 4 * self._recorded.numbers)
        return max(1, min(number, rows))

    def send(
        self,
        outputs: Sequence[Tensor],
        vectors: Iterable[Sequence[Tensor]],
        number: int = 1,
        at_once: int = 1,
        keep_graph: bool = False,
    ) -> None:
        """Send vectors back, and show each layer what arrives.

        Args:
            outputs: Of the recorded pass, with its graph.
            vectors: Each has a part for every output.
            number: Of vectors.
            at_once: How many to send in one vectorised pass: fast for small batches and on GPUs,
                memory times this number. Where an operation can't be vectorised, and with 1, they
                go one after the other.
            keep_graph: Keep the graph: somebody goes back through it afterwards.
        """
        edges = self._recorded.edges
        sent = 0
        remaining = iter(vectors)
        while chunk := list(islice(remaining, at_once)):
            if len(chunk) > 1:
                stacks = [torch.stack(parts) for parts in zip(*chunk, strict=True)]
                stacks, power = in_range(stacks, outputs, self._recorded.dtypes)
                gradients = _vectorised_gradients(outputs, edges, stacks, self._watched())
                if gradients is not None:
                    sent += len(chunk)
                    self.show(gradients, len(chunk), power)
                    continue
            for vector in chunk:
                sent += 1
                keep = keep_graph or sent < number
                parts, power = in_range(vector, outputs, self._recorded.dtypes)
                if self._recorded.numbers > _MANY_NUMBERS:
                    self._stream(outputs, edges, parts, keep, power)
                    continue
                gradients = []
                if edges:
                    with self._watched():
                        gradients = [*gradients_of(outputs, edges, parts, keep)]
                self.show(gradients, 1, power)

    def show(
        self,
        gradients: list[Tensor | None],
        num_vectors: int,
        power: float = 1.0,
        indices: Iterable[int] | None = None,
    ) -> None:
        """Show layers their batches.

        Args:
            gradients: At the edges of all calls, times `power`; None for zero. Those of the layers
                are given up.
            indices: Of the layers; default: all, and what comes next is another vector.
        """
        with self._disabled, plain_mode(self._device.type):
            for index in self._by_layer if indices is None else indices:
                self._show(index, gradients, num_vectors, power)
        if indices is None:
            self.is_first = False

    def _show(
        self, index: int, gradients: list[Tensor | None], num_vectors: int, power: float
    ) -> None:
        """Pass a layer's batch to the consumer, which may run modules again: `disabled`, and in
        plain mode. Arguments as for `show`.
        """
        layer = self._layers[index]
        calls = self._by_layer[index]
        for call in calls if num_vectors else ():
            grads = []
            for k, output in enumerate(call.outputs, call.first_edge):
                g = gradients[k]
                gradients[k] = None
                if g is not None:
                    self.reached.add(index)
                grads.append(output.gradient(g, num_vectors))
            if power != 1:
                grads = [at_least_float32(g) / power for g in grads]
            call.grads = grads[0] if call.single else grads
        group = layer.groups[0] if len(layer.groups) == 1 else None
        num_examples = self._recorded.num_examples
        batch = batch_of(layer, calls, num_examples, self.is_first, self._mask, self._weight, group)
        self._consume(batch)
        for call in calls:
            call.grads = None

    def _stream(
        self,
        outputs: Sequence[Tensor],
        edges: Sequence[Any],
        vector: Sequence[Tensor],
        keep_graph: bool,
        power: float,
    ) -> None:
        """Send one vector back, and show each layer as soon as its gradients are there: all of them
        at once would take as much memory as all that the layers have read.
        """
        arrivals = Arrivals(self, power)
        with self._watched():
            stream_gradients(outputs, edges, vector, keep_graph, arrivals.add)
        arrivals.finish()


class Arrivals:
    """Gradients of one vector, which come one by one: each layer is shown as soon as it has its
    own.

    Args:
        back: Shows them.
        power: What all of them are multiplied by.
    """

    def __init__(self, back: BackwardPass, power: float) -> None:
        self.back = back
        self._power = power
        self._layer_of_edge = [call.layer for call in back.calls for _ in call.outputs]
        self._gradients: list[Tensor | None] = [None] * len(self._layer_of_edge)
        self._missing = Counter(self._layer_of_edge)

    def add(self, k: int, g: Tensor | None) -> None:
        """The gradient at an edge, by its number."""
        index = self._layer_of_edge[k]
        self._gradients[k] = g
        self._missing[index] -= 1
        if not self._missing[index]:
            self.back.show(self._gradients, 1, self._power, [index])

    def finish(self) -> None:
        """No more will come: some calls of a layer, or all of them, don't reach the output."""
        late = [index for index, number in self._missing.items() if number]
        self.back.show(self._gradients, 1, self._power, late)
        self.back.is_first = False


def in_range(
    vectors: Sequence[Tensor], outputs: Sequence[Tensor], dtypes: Collection[torch.dtype]
) -> tuple[Sequence[Tensor], float]:
    """Vectors from outputs on, and a power of two that they are multiplied by.

    It is 1 but for float16, where it leaves room on both sides.

    Args:
        dtypes: Of what layers returned.
    """
    if torch.float16 not in {*dtypes, *[f.dtype for f in outputs]}:
        return vectors, 1.0
    largest = max(float(v.detach().abs().amax()) for v in vectors)
    power = 2.0 ** (8 - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
    return [(v * power).to(f.dtype) for v, f in zip(vectors, outputs, strict=True)], power


def _vectorised_gradients(
    outputs: Sequence[Tensor], edges: Sequence[Any], stacks: Sequence[Tensor], mode: Any
) -> list[Tensor | None] | None:
    """Gradients at edges for several vectors [V, *output] in one pass; None where an operation
    can't be vectorised. The graph stays.
    """
    if not edges:
        return []
    try:
        with mode, quiet():
            gradients = torch.autograd.grad(
                outputs,
                edges,
                stacks,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
    # Custom functions without a vmap rule, and more; what else is wrong is raised again.
    except RuntimeError:
        return None
    return [*gradients]


# -------------------------------------------------------------------------------- what is sent back
class VectorsToSend(NamedTuple):
    """Vectors that go back together.

    Attributes:
        outputs: Numbers of the outputs that they have parts for.
        number: Of vectors.
        vectors: Each a part for every output, of its shape.
    """

    outputs: Sequence[int]
    number: int
    vectors: Iterable[Sequence[Tensor]]


def vectors_to_send(
    risk: EmpiricalRisk,
    vectors: Vectors,
    outputs: Sequence[Tensor],
    terms: Terms,
    class_axes: Sequence[int | None],
    draws: Draws,
    factors: Sequence[float],
) -> list[VectorsToSend]:
    """What goes back in one batch. Outputs without a graph are left out.

    Args:
        outputs: What the losses read, attached to the graph.
        terms: The same in canonical form, and targets.
        class_axes: Of the outputs.
        factors: What the vectors of each loss are multiplied by.
    """
    # All streams before any of them draws.
    streams = [draws.of_loss(k) for k in range(len(risk.losses))]

    def of_loss(k: int) -> Iterator[tuple[Tensor]]:
        """The vectors of one loss times their factor, of the output's shape."""
        likelihood = risk.losses[k].require_likelihood()
        f, F = outputs[k], terms.outputs[k]
        for v in vectors.send(likelihood, F, terms.targets[k], streams[k]):
            if factors[k] != 1:
                v = v * factors[k]
            if terms.weight is not None:  # squares of vectors are weighted
                v = v * terms.weight.sqrt().to(v)[:, None, None]
            v = likelihood.restore(v, f.shape, F.shape[0], class_axes[k])
            yield (v.to(torch.float32 if f.dtype == torch.float16 else f.dtype),)

    groups: list[VectorsToSend] = []
    numbers: set[int] = set()
    for k, f in enumerate(outputs):
        number = vectors.count(risk.losses[k].require_likelihood(), terms.outputs[k])
        numbers.add(number)
        if f.requires_grad and number:  # an output that no tracked layer reaches has no graph
            groups.append(VectorsToSend([k], number, of_loss(k)))
    if len(groups) > 1 and vectors.together and len(numbers) == 1:
        parts = zip(*[group.vectors for group in groups], strict=True)
        joined = (tuple(part for (part,) in of_losses) for of_losses in parts)
        return [VectorsToSend([group.outputs[0] for group in groups], groups[0].number, joined)]
    return groups
