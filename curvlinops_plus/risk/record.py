"""Recording layers: their inputs in the forward pass, the gradients of their outputs in backward
passes.

A forward hook stores a layer's detached input, and registers a hook for the gradient of its output.
Gradients of parameters are not computed: autograd is asked for those of a few layer outputs only.

Two details without which results would be silently wrong:

* `nn.Linear` on [N, S, d] returns a *view*. An in-place activation behind it rewrites the view's
  history and the gradient noted before is lost. Such outputs, and those of frozen layers that
  depend on nothing differentiable, are replaced by an alias that autograd does not treat as a view.
  Nothing is copied, values are bit-identical.
* Hooks stay until the backward pass is over, disabled: activation checkpointing runs layers once
  more then, and must see the same graph.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import BIAS, LINEAR, AffineCall, affine_calls
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk.batches import gradients_of, postorder
from curvlinops_plus.risk.function_reads import FunctionCalls, ParameterViews
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Call, Layer, ModuleUse, Output, OutsideReads, title
from curvlinops_plus.risk.preserve import Depth, Uncopied, quiet, runs_for

Consumer = Callable[[LayerBatch], None]
#: The use that a call is, with the index of its layer and its rule.
Found = tuple[int, ModuleUse, Any]


class Recorder:
    """Context manager that owns all hooks on the modules of `layers`.

    Args:
        example_axis: Module name to the axis of its inputs and outputs that carries the examples,
            where it is not 0.
        backward: Whether gradients are wanted, too.
        own_pass: Whether the passes are made for recording. In those of others nothing is changed
            that shows: where recording would raise, or expand one row for all examples to one for
            each, the rest is left alone.
        params: What the modules have in place of the layers' parameters while they run, by key;
            default: these.
        ignored: Layers whose calls are not recorded.

    Attributes:
        calls: What was recorded in the last forward pass.
        num_examples: N of that batch.
        kinds: What was called in it: names, whether one row was returned for all examples, axes of
            the inputs.
        dtypes: Those of what the calls returned.
        numbers: How many numbers they returned.
        reached: Indices of the layers that a gradient has reached.
        reads: What the layers' uses read.
        disabled: Context in which modules that run are not recorded, and their outputs not
            replaced.
        doubt: Why a pass of others was not recorded to its end.

    Use: inside the context, the model runs under `recording`; after `begin`, `send` backpropagates
    vectors. Nothing is left on the modules when the context ends, also after an exception.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        example_axis: Mapping[str, int],
        backward: bool,
        own_pass: bool = True,
        params: Mapping[str, Tensor] | None = None,
        ignored: Collection[Layer] = (),
    ) -> None:
        self.layers, self.backward, self.own_pass, self.example_axis = (
            layers,
            backward,
            own_pass,
            example_axis,
        )
        self.ignored = ignored
        self._uses = [
            (i, use) for i, layer in enumerate(layers) if layer not in ignored for use in layer.uses
        ]
        self.calls: list[Call] = []
        self.by_layer: dict[int, list[Call]] = {}
        self.num_examples, self.disabled, self.doubt = 0, Depth(), None
        self._recording, self._thread, self._handles = False, threading.get_ident(), list[Any]()
        self._waiting: dict[int, int] | None = (
            None  # while a vector is sent: gradients that each layer waits for
        )
        if params is None:
            params = {key: p for layer in layers for key, p in layer.params.items()}
        functions = [(i, use) for i, use in self._uses if use.function is not None]
        self._functions = {
            (u.function, u.keys.get("weight"), u.keys.get("bias")): (i, u) for i, u in functions
        }
        read = {key: params[key] for _, use in functions for key in use.keys.values()}
        self._params, self._views = params, ParameterViews(read)
        self.reads = frozenset((use.name, *use.keys.items()) for _, use in self._uses)
        self._mode = FunctionCalls(self._function_call) if functions else nullcontext()
        self._inside: list[
            set[str]
        ] = []  # what the modules that run answer for: functions in them don't count

    def __enter__(self) -> Recorder:
        read = {key for _, use in self._functions.values() for key in use.keys.values()}
        for index, use in self._uses:
            if use.function is None:
                own = [
                    (module, name, self._params[key])
                    for module, name, key in use.places(use.module)
                ]
                if shared := read & {*use.keys.values()}:
                    enter = Uncopied(self._enter, own, shared)
                    self._handles.append(use.module.register_forward_pre_hook(enter))
                hook = Uncopied(self._module_call, index, use, own, bool(shared))
                self._handles.append(
                    use.module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                )
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._release()

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """One forward pass of the model happens in here; the batch before is forgotten."""
        self._release()
        self.num_examples, self._recording, self.doubt, self._thread = (
            num_examples,
            True,
            None,
            threading.get_ident(),
        )
        try:
            with self._mode:
                yield
        except OutsideReads:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            if refusal := self.refusal_of_one_row(f"which does not go on from there: {error}"):
                raise refusal from error
            raise
        finally:
            self._recording = False
            self._inside.clear()

    def _release(self) -> None:
        # Nodes, their hooks, this object and edges are a cycle that no garbage collector sees.
        for call in self.calls:
            for output in call.outputs:
                output.edge = None
        self.calls, self.by_layer, self._waiting = [], {}, None
        self.kinds, self.dtypes, self.numbers = set[Any](), set[torch.dtype](), 0

    # ---------------------------------------------------------------------------------------- hooks
    def _enter(self, own: Sequence[Any], shared: set[str], module: nn.Module, args: Any) -> None:
        """A module begins to run that reads parameters which functions read outside of it."""
        if not self.disabled.depth and runs_for(self._thread):
            self._inside.append(
                shared if all(m._parameters.get(name) is p for m, name, p in own) else set()
            )

    def _module_call(
        self,
        index: int,
        use: ModuleUse,
        own: Sequence[Any],
        shared: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any = None,
    ) -> Any:
        """The forward hook of one module; if it was removed while the module ran, PyTorch calls it
        without kwargs.
        """
        if self.disabled.depth or not self._handles or not runs_for(self._thread):
            return None
        if shared and self._inside:
            self._inside.pop()
        if self.doubt is not None:
            return None
        for (
            holder,
            name,
            p,
        ) in own:  # with other tensors in place, by functional_call, it is no call of the layer
            if holder._parameters.get(name) is not p:
                return None
        try:
            return self._note(
                [(index, use, use.rule)], (args, kwargs), out, self.example_axis.get(use.name, 0)
            )
        except Exception as error:
            self._failed(use, error)

    def _function_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        examples: int | None,
    ) -> Any:
        """A torch function: note products with weights for the layers whose parameters they
        read.
        """
        if self.disabled.depth or self.doubt is not None:
            return out
        for product in affine_calls(function, args, kwargs):
            if found := self._uses_of(product):
                # Inside attention examples are on axis 1, or on an axis with positions.
                fold = None if examples is None or product.input.ndim == 3 else examples
                axis = self.example_axis.get(found[0][1].name, 0) if examples is None else 1
                try:
                    made = self._note(found, ((product.input,), {}), out, axis, fold)
                    return out if made is None else made
                except Exception as error:
                    self._failed(found[0][1], error)
                break
        return out

    def _failed(self, use: ModuleUse, error: Exception) -> None:
        if not self.own_pass:
            # The rest of a pass of others is left alone; frames hold what the user's pass has
            # computed.
            self.doubt = error.with_traceback(None)
        elif isinstance(error, (UnsupportedError, ValueError)):
            raise error
        # inside of `vmap`, or with sparse tensors: what is around it may be run for each example
        else:
            raise OutsideReads(
                f"{_of(use)} can't be recorded: {error}", use.keys.values()
            ) from error

    def _uses_of(self, product: AffineCall) -> list[Found]:
        """The uses that a product is; one inside a module that answers for the parameter belongs to
        the module.
        """
        weight, bias = map(self._views.find, (product.weight, product.bias))
        weight, bias = (
            v and (None if any(v.key in keys for keys in self._inside) else v)
            for v in (weight, bias)
        )
        function, w, b = product.function, weight and weight.key, bias and bias.key
        if weight is not None and weight.transposed:
            function = function.transpose()
        known = self._functions.get
        whole, found = known((function, w, b)), list[Found]()
        pairs = [(whole, weight or bias)]
        if whole is None:  # the two belong to layers of their own, or only one is tracked
            pairs = [
                (known((function, w, None)), weight),
                (known((LINEAR, None, b)) or known((BIAS, None, b)), bias),
            ]
        for entry, view in pairs:
            if entry is not None and view is not None:
                rule: Any = entry[1].rule
                found.append((*entry, rule.at(view.rows, len(self._params[view.key]))))
        return found

    def _note(
        self, found: Sequence[Found], given: Any, out: Any, axis: int, fold: int | None = None
    ) -> Any:
        """Note a call for one layer, or several that read different parameters in it.

        Returns:
            What the model goes on with instead of the output; None for the output itself.
        """
        (_, use, rule), N, expanded, changed, rows = (
            found[0],
            self.num_examples,
            False,
            self.backward,
            0,
        )
        if self.backward and not torch.is_grad_enabled():
            raise UnsupportedError(
                f"{title(use.name)} ran under torch.no_grad(). If this is activation "
                "checkpointing, pass use_reentrant=False; if it is a frozen part of the model, "
                f"leave its parameters {list(use.keys.values())} out of `params`."
            )
        leaves, spec = ([out], None) if isinstance(out, Tensor) else tree_flatten(out)
        at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        affine = isinstance(rule, AffineRule)
        packed = spec is not None and any(
            isinstance(t, PackedSequence) for t in (*given[0], *given[1].values())
        )
        if not at or packed or (affine and len(at) > 1):
            raise self._not_by_example(
                use, f"returned a {getattr(out, 'dtype', None) or type(out).__name__}"
            )
        axes = (
            [axis]
            if fold is not None
            else rule.axes(use.module, axis, [leaves[k] for k in at], False)
        )
        outputs = list[Output]()
        for k, on in zip(at, axes, strict=True):
            t = leaves[k]
            if self.backward:
                alias = not t.requires_grad or len(at) > 1 or t._is_view()
                # Neither a leaf nor a view: in-place operations keep its edge. Of several tensors
                # one may be computed from another inside the module: what arrives at it must have
                # come from outside. A module of unknown code may have saved its output for
                # backward, and an alias has a version counter of its own.
                t = t if t.requires_grad else t.detach().requires_grad_()
                t = (
                    t
                    if not alias
                    else torch.ops.aten._unsafe_view(t, t.shape)
                    if affine
                    else t.clone()
                )
            size = fold or (t.shape[on] if t.ndim > on else 0)
            # One row for all examples (position embeddings): each example gets a gradient of its
            # own.
            if size == 1 < N and fold is None:
                if not self.own_pass:
                    raise _refusal_of_one_row(use, N, "this is not done in passes of others")
                t, size, expanded, changed = (
                    t.expand(*t.shape[:on], N, *t.shape[on + 1 :]),
                    N,
                    True,
                    True,
                )
            leaves[k] = t
            if self._recording:
                by_example = (
                    size
                    and not size % N
                    and rows in (0, size)
                    and (on == 0 or size == N or use.function)
                )
                if not by_example:
                    raise self._not_by_example(use, f"returned {list(t.shape)}")
                rows = size
                outputs.append(
                    Output(
                        t.shape,
                        t.dtype,
                        t.device,
                        on,
                        fold,
                        get_gradient_edge(t) if self.backward else None,
                    )
                )
                self.dtypes.add(t.dtype)
                self.numbers += t.numel()
        for one in found if self._recording else ():
            own = outputs if len(found) == 1 else [replace(output) for output in outputs]
            call = self._call(one, given, own, axis, fold, rows, expanded)
            call.single = spec is None
            for place, k in enumerate(at if self.backward else ()):
                leaves[k].register_hook(partial(self._arrive, len(self.calls), place))
            self.calls.append(call)
        return None if not changed else leaves[0] if spec is None else tree_unflatten(leaves, spec)

    def _call(
        self,
        found: Found,
        given: Any,
        outputs: list[Output],
        axis: int,
        fold: int | None,
        rows: int,
        expanded: bool,
    ) -> Call:
        """A call with its inputs, the examples first.

        Raises:
            OutsideReads: If the axes taken for the examples' don't carry them; the module around
                may tell them apart.
        """
        (index, use, rule), N = found, self.num_examples

        def first(t: Tensor, on: int) -> tuple[Tensor, int]:
            t = t if fold is None else t.unflatten(0, (-1, fold))
            moved = on != 0 and t.ndim > on and (use.function is not None or t.shape[on] in (1, N))
            t = t.movedim(on, 0) if moved else t
            return (
                t.expand(N, *t.shape[1:]) if expanded and t.ndim and len(t) == 1 else t
            ), on if moved else 0

        in_axes, kwargs = None, {}
        if isinstance(rule, AffineRule):  # it reads one tensor; the rest is not kept alive
            x = rule.input_of(use.module, *given).detach()
            inputs = [x]
            x = first(x, axis)[0] if axis or expanded or fold is not None else x
            if len(x) != rows:
                raise self._not_by_example(
                    use, f"got {list(inputs[0].shape)} and returned {list(outputs[0].shape)}"
                )
            args: tuple[Any, ...] = (x,)
        else:
            leaves, spec = tree_flatten((tuple(given[0]), dict(given[1])))
            at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor)]
            inputs, in_axes = [leaves[k].detach() for k in at], list[int | None]()
            for k, t, on in zip(at, inputs, rule.axes(use.module, axis, inputs, True), strict=True):
                t, moved = leaves[k], _ = first(t, on)
                in_axes.append(moved if moved or (t.ndim > 0 and len(t) == rows) else None)
            args, kwargs = tree_unflatten(leaves, spec)
        self.kinds.add((use.name, expanded, tuple(in_axes or ())))
        versions = [(t, t._version) for t in inputs if not t.is_inference()]
        axes = [output.axis for output in outputs]
        return Call(use, rule, args, kwargs, in_axes, axes, index, expanded, outputs, versions)

    def _not_by_example(self, use: ModuleUse, what: str) -> OutsideReads:
        """The error about rows of a layer that don't belong to examples."""
        return OutsideReads(
            f"{_of(use)} {what} in a batch of {self.num_examples} examples: expected "
            "floating-point numbers, whose first axis carries the examples, or a multiple of "
            f"them. If another does, say EmpiricalRisk(..., example_axis={{{use.name!r}: axis}}). "
            "A table for all examples, as of positions, needs an axis of size 1 for them, as "
            f"embedding(places[None]). Or leave its parameters {list(use.keys.values())} out of "
            "`params`.",
            use.keys.values(),
        )

    def refusal_of_one_row(self, why: str) -> OutsideReads | None:
        """What to raise if this could come from one row for all examples, which was expanded; None
        if none was.
        """
        expanded = [call.use for call in self.calls if call.expanded]
        return _refusal_of_one_row(expanded[0], self.num_examples, why) if expanded else None

    # ------------------------------------------------------------------------- sending vectors back
    def begin(
        self, consume: Consumer, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> None:
        """Vectors will be sent through what was recorded.

        Args:
            consume: Called with a `LayerBatch`, once per layer and piece of vectors.
            mask: Positions that count, [N, T] bool; None for all.
            weight: Weights of the examples [N]; None for ones.

        Raises:
            UnsupportedError: If the input of a layer was written to since it was read.
        """
        self._consume, self._mask, self._weight = consume, mask, weight
        self._first, self._power, self.reached, self.by_layer = True, 1.0, set[int](), {}
        for call in self.calls:
            self.by_layer.setdefault(call.layer, []).append(call)
            for t, version in call.versions:
                if t._version != version:
                    raise UnsupportedError(
                        f"the input of {title(call.use.name)} was modified in place after the "
                        "layer read it, so its curvature can't be computed from it. Replace the "
                        "in-place operation (for instance `x += y` by `x = x + y`)."
                    )

    def show_inputs(self) -> None:
        """Pass on batches with the layers' inputs alone; there are no gradients."""
        for index in self.by_layer:
            self._show(index, 0)
            self.reached.add(index)

    def send(
        self,
        outputs: Sequence[Tensor],
        vectors: Iterator[Sequence[Tensor]],
        number: int,
        at_once: int,
        keep: bool,
    ) -> None:
        """Send vectors back.

        Args:
            outputs: Of the recorded pass, with its graph.
            vectors: Each has a part for every output.
            number: Of vectors.
            at_once: How many to send in one vectorised pass; 1 streams them.
            keep: Keep the graph: somebody goes back through it afterwards.
        """
        while at_once > 1 and (chunk := list(islice(vectors, at_once))):
            if len(chunk) == 1 or not self._send_at_once(
                outputs, [torch.stack(part) for part in zip(*chunk)]
            ):
                self.send(outputs, iter(chunk), len(chunk), 1, True)
        if at_once > 1:
            return
        with self._mode:
            sources = self._sources(outputs)
            for left, vector in enumerate(
                vectors, 1 - number
            ):  # a layer is consumed as soon as it is complete
                self._waiting = waiting = dict.fromkeys(self.by_layer, 0)
                for call in self.calls:
                    waiting[call.layer] += len(call.outputs)
                try:
                    if sources:
                        gradients_of(
                            outputs, sources, self._sent(vector, outputs), keep or left < 0
                        )
                finally:
                    self._waiting = None
                for index, missing in waiting.items():
                    if (
                        missing
                    ):  # some call, or all of them, does not reach the output: its gradient is zero
                        self._show(index)
                self._first = False

    def _sources(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Edges with no other recorded edge between them and the input: asking for these visits
        all.

        An edge outside the graph of the outputs is no source: its layer does not reach them.
        """
        edges, marked = list[Any](), set[Any]()
        for call in self.calls:
            for output in call.outputs:
                edges.append(output.edge)
                marked.add(output.edge.node)
        above: dict[Any, bool] = {}  # whether a recorded edge is below the node
        for node, below in postorder([t.grad_fn for t in outputs]).items():
            found = False
            for child in below:
                found = found or child in marked or above[child]
            above[node] = found
        return [edge for edge in edges if above.get(edge.node) is False]

    def _sent(self, vectors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        sent, self._power = self.in_range(vectors, outputs)
        return sent

    def in_range(
        self, vectors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], float]:
        """Vectors from outputs on, and a power of two that they are multiplied by.

        It is 1 but for float16, where it leaves room on both sides.
        """
        if torch.float16 not in self.dtypes.union([f.dtype for f in outputs]):
            return vectors, 1.0
        largest = max(float(v.detach().abs().amax()) for v in vectors)
        power = 2.0 ** (8 - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        return [(v * power).to(f.dtype) for v, f in zip(vectors, outputs, strict=True)], power

    def _arrive(self, number: int, place: int, g: Tensor) -> None:
        """The hook of one output tensor of a call."""
        if (waiting := self._waiting) is not None:
            call = self.calls[number]
            call.outputs[place].grad = g.detach()
            self.reached.add(call.layer)
            waiting[call.layer] -= 1
            if waiting[call.layer] == 0:
                self._show(call.layer)

    def _send_at_once(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> bool:
        """Several vectors [V, *output] in one vectorised backward pass: fast for small batches and
        on GPUs, memory times V. Returns False where an operation can't be vectorised.
        """
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        edges, sent = self._edges(), self._sent(vectors, outputs)
        try:
            with self._mode, quiet():
                arrived = torch.autograd.grad(outputs, edges, sent, **options) if edges else ()
        except (
            RuntimeError
        ):  # custom functions without a vmap rule, and more; what else is wrong is raised again
            return False
        self._show_all(arrived, len(vectors[0]))
        return True

    def send_one(self, outputs: Sequence[Tensor], vector: Sequence[Tensor]) -> None:
        """Send one vector back and keep the graph. Gradients of all calls are there at once: for
        small batches.
        """
        edges, sent = self._edges(), self._sent(vector, outputs)
        with self._mode:
            arrived = gradients_of(outputs, edges, sent, True) if edges else ()
        self._show_all(arrived, 1)

    def _edges(self) -> list[Any]:
        return [output.edge for call in self.calls for output in call.outputs]

    def _show_all(self, arrived: Sequence[Tensor | None], V: int) -> None:
        """Pass on the batches of all layers, with gradients at `_edges`."""
        places = ((call, output) for call in self.calls for output in call.outputs)
        for (call, output), g in zip(places, arrived, strict=True):
            output.grad = g
            if g is not None:
                self.reached.add(call.layer)
        for index in self.by_layer:
            self._show(index, V)
        self._first = False

    def _show(self, index: int, V: int = 1) -> None:
        """Pass one layer's batch to the consumer, which may run modules again: those calls are not
        recorded.
        """
        layer, calls, power = self.layers[index], self.by_layer[index], self._power
        for call in calls if V else ():
            grads = []
            for output in call.outputs:
                grads.append(output.gradient(V))
                output.grad = None
            call.grads = grads[0] if call.single else grads
            if power != 1:
                call.grads = tree_map_only(Tensor, lambda g: g.float() / power, call.grads)
        group = layer.groups[0] if len(layer.groups) == 1 else None
        batch = LayerBatch(
            layer, calls, self.num_examples, self._first, self._mask, self._weight, group
        )
        self.disabled.depth += 1
        try:
            with plain_mode(layer.device.type):
                self._consume(batch)
        finally:
            self.disabled.depth -= 1
        for call in calls:
            call.grads = None


def _of(use: ModuleUse) -> str:
    return f"{title(use.name)} ({type(use.owner).__name__})"


def _refusal_of_one_row(use: ModuleUse, num_examples: int, why: str) -> OutsideReads:
    return OutsideReads(
        f"{_of(use)} returned one row for all {num_examples} examples, which was expanded to one "
        f"row for each, so that each has a gradient of its own; {why}. If the layer makes weights "
        f"or a table for all examples, leave its parameters {list(use.keys.values())} out of "
        "`params`; if a row, expand it to the batch in the model.",
        use.keys.values(),
    )
