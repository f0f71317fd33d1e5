"""Recording what layers see: inputs in the forward pass, output gradients in the backward pass.

A forward hook keeps a layer's detached input and lets autograd tell us the gradient of its output. Parameters never
take part: `torch.autograd.grad` is asked for the gradients of a few layer outputs only, so that no weight gradient is
computed.

Two details that decide between right and silently wrong:

* `nn.Linear` on [N, S, d] returns a *view*. An in-place activation behind it rewrites the view's history and the
  gradient noted before is lost. Such outputs, and those of frozen layers that depend on nothing differentiable, are
  handed on through an alias that autograd does not take for a view. Nothing is copied, values are bit-identical.
* Hooks stay until the backward pass is over, switched off: activation checkpointing runs layers once more then, and
  must see the same graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.risk.function_calls import FunctionCalls, rows_of
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer, Use, title
from curvlinops_plus.risk.parameter_reads import ParameterReads
from curvlinops_plus.risk.recorded_call import Event, Port, connect, isolate, make_event

__all__ = ["Recorder"]

Consumer = Callable[[LayerBatch], None]


class Recorder:
    """Context manager that owns all hooks on the modules of `layers`.

    Args:
        layers: The layers.
        example_axis: Module name to the axis of its inputs and outputs that carries the examples.
        backward: Whether output gradients will be asked for.
        intercept: Watch function calls even if no layer is read by them: fused inference would hide submodules.

    Use: inside the context, the model runs under `recording`, then `inputs_only` or `send` hand each layer's
    `LayerBatch` to a consumer. Nothing is left on the modules when the context ends, also after an exception.
    """

    def __init__(
        self, layers: Sequence[Layer], example_axis: Callable[[str], int], backward: bool, intercept: bool = False
    ) -> None:
        self.layers = layers
        self.backward = backward
        uses = [(index, use) for index, layer in enumerate(layers) for use in layer.uses]
        self.intercept = intercept or any(use.functional for _, use in uses)
        self._axis = {id(use.module): example_axis(use.name) for _, use in uses}
        #: Parameter to the layer and the use in whose function calls it is read.
        self._functional = {
            id(layer.params[key]): (layer.params[key], index, use)
            for index, layer in enumerate(layers)
            for use in layer.uses
            if use.functional
            for key in use.keys.values()
        }
        self._handles: list[Any] = []
        self._mode: FunctionCalls | None = None
        self._on = False
        self._inert = False
        self._events: list[Event] = []
        self._num_examples = 0
        self._watched = False
        self._receive: Callable[[Event, Port, Tensor], None] | None = None

    # ------------------------------------------------------------------------------------------------------- hooks
    def __enter__(self) -> Recorder:
        if self.intercept:  # until the backward passes are over, like the hooks
            self._mode = FunctionCalls(self._call)
            self._mode.__enter__()
        for index, layer in enumerate(self.layers):
            for use in layer.uses:
                if not use.functional:
                    hook = self._hook(index, use)
                    self._handles.append(use.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
            self._mode = None

    def _hook(self, index: int, use: Use) -> Callable[..., Any]:
        axis = self._axis[id(use.module)]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            if self._inert:
                return None
            leaves, spec = tree_flatten(out)
            at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
            if not at or isinstance(out, PackedSequence) or (len(at) > 1 and isinstance(use.rule, AffineRule)):
                what = f"a {out.dtype} tensor" if isinstance(out, Tensor) else f"a {type(out).__name__}"
                hint = " Pad the sequences, and say `mask=` for the padding." if isinstance(out, PackedSequence) else ""
                raise UnsupportedError(
                    f"{title(use.name)} ({type(module).__name__}) returned {what}; expected floating-point tensors "
                    f"with examples on one axis.{hint} Or leave its parameters {list(use.keys.values())} out of "
                    "`params`."
                )
            axes = use.rule.axes(module, axis, [leaves[k] for k in at], inputs=False)
            tensors, ports, expanded = [], [], False
            for k, port_axis in zip(at, axes, strict=True):
                t = leaves[k]
                if self.backward:
                    t = isolate(t, use, several=len(at) > 1)
                # One row for all examples (position embeddings): each example gets a gradient of its own.
                one_row = self._num_examples > 1 and t.ndim > port_axis and t.shape[port_axis] == 1
                if one_row:
                    t = t.expand(*t.shape[:port_axis], self._num_examples, *t.shape[port_axis + 1 :])
                expanded |= one_row
                leaves[k] = t
                tensors.append(t)
                ports.append(Port(t.detach().new_empty(()).expand(t.shape), port_axis, expanded=one_row))
            if self._on:
                single = isinstance(out, Tensor)
                event = make_event(use, index, args, kwargs, ports, single, axis, self._num_examples)
                self._note(event, tensors)
            return tree_unflatten(leaves, spec) if self.backward or expanded else None

        return hook

    def _call(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, examples: int | None) -> Tensor:
        """A product inside attention: note it for the layers whose parameters it reads."""
        if self._inert:
            return out
        read: dict[int, tuple[int, Use]] = {}
        for t in (weight, bias):
            found = rows_of(t, [p for p, _, _ in self._functional.values()])
            if found is not None:
                p, rows = found
                _, index, use = self._functional[id(p)]
                assert isinstance(use.rule, AffineRule)
                read[id(use)] = index, Use(use.name, use.module, use.rule.at(rows, len(p)), use.keys, use.owner, True)
        for position, (index, use) in enumerate(read.values()):
            if self.backward and position == 0:
                out = isolate(out, use)
            if not self._on:
                break
            port = Port(out.detach().new_empty(()).expand(out.shape), 1, examples)
            event = make_event(use, index, (x,), {}, [port], True, 1, self._num_examples, examples)
            self._note(event, [out])
        return out

    def _note(self, event: Event, tensors: Sequence[Tensor]) -> None:
        if self.backward:
            for port, t in zip(event.ports, tensors, strict=True):
                connect(port, t, partial(self._arrive, event, port))
        self._events.append(event)

    def _arrive(self, event: Event, port: Port, g: Tensor) -> None:
        if self._receive is not None:
            self._receive(event, port, g)

    def _forget(self) -> None:
        for event in self._events:
            event.forget()
        self._events = []
        self._receive = None

    # ------------------------------------------------------------------------------------------------------ passes
    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """One forward pass of the model happens in here; the batch before is forgotten."""
        self._forget()
        self._num_examples, self._on = num_examples, True
        frozen = [p for layer in self.layers for p in layer.params.values() if not p.requires_grad]
        # Frozen parameters leave no trace in the graph; who reads them is looked at once.
        reads = ParameterReads(frozen) if frozen and not self._watched else None
        try:
            with reads or nullcontext():
                yield
        finally:
            self._on = False
        if reads is not None:
            self._watched = True
            self._check_readers(reads.counts)

    def plainly(self, run: Callable[[], Any]) -> Any:
        """Run the model with the hooks asleep."""
        self._inert = True
        try:
            return run()
        finally:
            self._inert = False

    @property
    def expanded(self) -> set[str]:
        """Names of layers whose one row for all examples was handed on as a row for each."""
        return {event.call.use.name for event in self._events if event.expanded}

    def check_rows(self, output: Tensor, plain: Tensor, vectors: Sequence[tuple[int, Tensor]]) -> None:
        """Refuse models in which a row for each example is not the same as one row for all.

        Args:
            output: The model's output with a row for each example.
            plain: The same with one row for all.
            vectors: An example's number and a vector that is zero for all others.
        """
        events = [event for event in self._events if event.expanded]
        names = [event.call.use.name for event in events]
        rounding = 100 * torch.finfo(output.dtype).eps  # the same sums of the same numbers, row by row
        same = torch.allclose(output, plain, rtol=rounding, atol=rounding * float(plain.abs().max()))
        if same and self.backward and output.requires_grad:
            for n, v in vectors:
                ports = [port for event in events for port in event.ports]
                edges = [port.edge for port in ports]
                found = torch.autograd.grad(output, edges, v, retain_graph=True, allow_unused=True)
                for port, g in zip(ports, found):
                    if g is not None:
                        rows = port.arrange(g)
                        same &= not bool(rows[:n].any() | rows[n + 1 :].any())
        if not same:
            raise UnsupportedError(
                f"layer {names[0]!r} returns one row for all {self._num_examples} examples of a batch, and the model "
                f"does more with it than broadcast it (it picks a row, or reduces over the first axis). Its gradient "
                f"can't be told apart by examples: leave its parameters out of `params`, or expand its output to the "
                f"batch in the model."
            )

    @property
    def output_numel(self) -> int:
        """Numbers in the outputs of all recorded calls of this batch."""
        return sum(port.out.numel() for event in self._events for port in event.ports)

    @property
    def called(self) -> set[int]:
        """Indices of the layers that were called in this batch."""
        return {event.layer for event in self._events}

    def _hand_over(self, consume: Consumer, index: int, events: list[Event], **facts: Any) -> None:
        """Show one layer to a consumer, which may run modules again: the hooks let those calls pass."""
        self._inert = True
        try:
            consume(LayerBatch(self.layers[index], [e.call for e in events], self._num_examples, **facts))
        finally:
            self._inert = False
        for event in events:
            event.call.grads = None

    def inputs_only(self, consume: Consumer, **facts: Any) -> None:
        """Hand over what the layers read in this batch; there are no gradients."""
        self._check_versions()
        for index, events in self._by_layer().items():
            self._hand_over(consume, index, events, **facts)

    def check_examples(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], n: int) -> None:
        """Refuse layers whose rows are not examples: a vector for one example must reach no other example's rows.

        Catches position embeddings `[T, d]`, time-major data and models that mix examples. Cost: one backward pass.

        Args:
            outputs: What the model returned.
            vectors: For each output a vector that is zero for all examples but `n`.
            n: The example.
        """
        self._check_versions()
        wrong: list[Event] = []

        def receive(event: Event, port: Port, g: Tensor) -> None:
            rows = port.arrange(g.detach()).unflatten(0, (self._num_examples, -1))
            if bool(rows[:n].any() | rows[n + 1 :].any()) and bool(rows.isfinite().all()):
                wrong.append(event)

        sources = self._sources(outputs)
        self._receive = receive
        try:
            if sources:
                torch.autograd.grad(outputs, sources, vectors, retain_graph=True, allow_unused=True)
        finally:
            self._receive = None
        if wrong:
            event = min(wrong, key=self._events.index)
            name, shape, axis = event.call.use.name, list(event.ports[0].out.shape), event.ports[0].axis
            raise UnsupportedError(
                f"{title(name)} ({type(event.call.use.owner).__name__}) returned shape {shape} in a batch of "
                f"{self._num_examples} examples, but axis {axis} does not carry the examples (is it a position "
                f"embedding, or time-major?), or the model mixes examples. Say EmpiricalRisk(..., "
                f"example_axis={{{name!r}: axis}}), expand the layer's input to the batch in the model, or leave its "
                f"parameters out of `params`."
            )

    def send(
        self,
        outputs: Sequence[Tensor],
        vectors: Iterable[Sequence[Tensor]],
        consume: Consumer,
        begin: bool = True,
        keep: bool = False,
        **facts: Any,
    ) -> set[int]:
        """Send vectors back one at a time; each layer is consumed, and its gradient freed, as soon as it is complete.

        Args:
            outputs: What the model returned, attached to its graph.
            vectors: For each vector its parts, of the outputs' shapes.
            consume: Called once per layer and vector.
            begin: Whether the first of them is the batch's first.
            keep: Keep the graph for vectors that follow.
            facts: Passed on to `LayerBatch`.

        Returns:
            Indices of the layers that the gradient reached.
        """
        sources = self._sources(outputs)
        by_layer, reached = self._by_layer(), set()
        for first, last, parts in _with_ends(vectors):
            first = first and begin
            waiting = {index: sum(len(e.ports) for e in events) for index, events in by_layer.items()}
            received: dict[int, Tensor] = {}

            def finish(index: int, first: bool = first, received: dict[int, Tensor] = received) -> None:
                for event in by_layer[index]:
                    event.receive({id(port): received.pop(id(port), None) for port in event.ports}, 1, lead=0)
                self._hand_over(consume, index, by_layer[index], first=first, **facts)

            def receive(
                event: Event,
                port: Port,
                g: Tensor,
                waiting: dict[int, int] = waiting,
                received: dict[int, Tensor] = received,
            ) -> None:
                received[id(port)] = g.detach()
                reached.add(event.layer)
                waiting[event.layer] -= 1
                if waiting[event.layer] == 0:
                    finish(event.layer)

            if first:
                self._check_versions()
            self._receive = receive
            try:
                if sources:
                    torch.autograd.grad(outputs, sources, parts, retain_graph=keep or not last, allow_unused=True)
            finally:
                self._receive = None
            for index, left in waiting.items():
                if left:  # some call, or all of them, does not reach the output: its gradient is zero
                    finish(index)
        return reached

    def send_batched(
        self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], first: bool, consume: Consumer, **facts: Any
    ) -> set[int]:
        """Send several vectors in one vectorised backward pass: fast for small batches and on GPUs, memory times V.

        Where an operation can't be vectorised, they are sent one at a time.

        Args:
            outputs: What the model returned.
            vectors: For each output the vectors [V, *output].
            first: Whether these are the batch's first vectors.
            consume: Called once per layer.
            facts: Passed on to `LayerBatch`.
        """
        if first:
            self._check_versions()
            self._sources(outputs)  # who reads the parameters
        ports = [port for event in self._events for port in event.ports if port.edge is not None]
        if not ports:
            return set()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*batching rule.*")  # vmap's own loop: slower, and right
                found = torch.autograd.grad(
                    outputs,
                    [port.edge for port in ports],
                    vectors,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
        except RuntimeError:  # custom functions without a vmap rule, and more; what else is wrong is raised again below
            one_by_one = ([v[index] for v in vectors] for index in range(len(vectors[0])))
            return self.send(outputs, one_by_one, consume, begin=first, keep=True, **facts)
        grads, reached = {id(port): g for port, g in zip(ports, found)}, set()
        del found
        for index, mine in self._by_layer().items():
            for event in mine:
                arrived = {id(port): grads.pop(id(port), None) for port in event.ports}
                if any(g is not None for g in arrived.values()):
                    reached.add(index)
                event.receive(arrived, len(vectors[0]), lead=1)
            self._hand_over(consume, index, mine, first=first, **facts)
        return reached

    # --------------------------------------------------------------------------------------------------- internals
    def _by_layer(self) -> dict[int, list[Event]]:
        by_layer: dict[int, list[Event]] = {}
        for event in self._events:
            by_layer.setdefault(event.layer, []).append(event)
        return dict(sorted(by_layer.items()))

    def _check_versions(self) -> None:
        for event in self._events:
            if any(t._version != version for t, version in event.versions):
                raise UnsupportedError(
                    f"the input of {title(event.call.use.name)} was modified in place after the layer read it, "
                    "so its curvature can't be computed from it. "
                    f"Replace the in-place operation (for instance `x += y` by `x = x + y`)."
                )

    def _sources(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Edges with no other recorded edge between them and the input: asking for these visits all."""
        edges = [port.edge for e in self._events for port in e.ports if port.edge is not None]
        marked = {edge.node for edge in edges}
        reaches: dict[Any, bool] = {}
        readers: dict[int, int] = {}
        for root in [t.grad_fn for t in outputs if t.grad_fn is not None]:
            stack = [(root, False)]
            while stack:
                node, ready = stack.pop()
                if ready:
                    below = [child for child, _ in node.next_functions if child is not None]
                    reaches[node] = any(child in marked or reaches[child] for child in below)
                    for child in below:
                        if (leaf := getattr(child, "variable", None)) is not None:
                            readers[id(leaf)] = readers.get(id(leaf), 0) + 1
                elif node not in reaches:
                    reaches[node] = False
                    stack.append((node, True))
                    children = [child for child, _ in node.next_functions if child is not None]
                    stack += [(child, False) for child in children if child not in reaches]
        self._check_readers(readers)
        # An edge outside the graph of the output is no source: its layer does not reach the output.
        return [edge for edge in edges if reaches.get(edge.node) is False]

    def _check_readers(self, readers: Mapping[int, int]) -> None:
        """Refuse a weight that something else than its layer reads: that part of its gradient would be missing.

        Args:
            readers: Identity of a parameter to the number of its readers in a forward pass.
        """
        for index, layer in enumerate(self.layers):
            if not all(isinstance(use.rule, AffineRule) for use in layer.uses):
                continue
            for key, param in layer.params.items():
                calls = sum(e.layer == index and key in e.call.use.keys.values() for e in self._events)
                # Without any call, the sweep as a whole will tell that the layer never ran.
                if calls and readers.get(id(param), 0) > calls:
                    raise ValueError(
                        f"The parameter {key!r} of {layer.title} is read {readers[id(param)]} times in a forward pass, "
                        f"{calls} times by calls of the layer: it is used outside of its layer, so its curvature can't "
                        f"be computed from what the layer sees. Leave it out of `params`, or give that use a module."
                    )


def _with_ends(items: Iterable[Sequence[Tensor]]) -> Iterable[tuple[bool, bool, Sequence[Tensor]]]:
    """(is first, is last, item), looking one item ahead."""
    iterator = iter(items)
    first = True
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield first, following is None, current
        first, current = False, following
