"""Recording layers: their inputs in the forward pass, the gradients of their outputs in the backward pass.

A forward hook stores a layer's detached input, and registers a hook for the gradient of its output. Gradients of
parameters are not computed: `torch.autograd.grad` is asked for those of a few layer outputs only.

Two details without which results would be silently wrong:

* `nn.Linear` on [N, S, d] returns a *view*. An in-place activation behind it rewrites the view's history and the
  gradient noted before is lost. Such outputs, and those of frozen layers that depend on nothing differentiable, are
  replaced by an alias that autograd does not treat as a view. Nothing is copied, values are bit-identical.
* Hooks stay until the backward pass is over, disabled: activation checkpointing runs layers once more then, and
  must see the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import products
from curvlinops_plus.risk.function_reads import FunctionCalls, FunctionUses
from curvlinops_plus.risk.graph import postorder
from curvlinops_plus.risk.layers import Call, Layer, ModuleUse, title
from curvlinops_plus.risk.process_state import Depth, OwnThread, Uncopied

Receive = Callable[["RecordedCall", "OutputSlot", Tensor], None]


class OutsideReads(UnsupportedError):
    """What a layer's calls show is not all that the model does with a parameter; `look_for_functions` finds the rest.

    Args:
        message: What to say if that does not help.
        keys: Keys of parameters whose gradients only a module around their layer can tell apart by examples.
    """

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


@dataclass(eq=False)
class OutputSlot:
    """One tensor that a call returned, and where its gradient arrives.

    Attributes:
        shape: Of the tensor, which is not kept.
        dtype: Likewise.
        device: Likewise.
        axis: The axis that carries the examples.
        fold: Number of examples if that axis carries positions and, inside them, examples.
        expanded: Whether it was one row for all examples before.
        edge: Where autograd delivers the gradient.
        handle: Of the hook that receives it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    axis: int
    fold: int | None = None
    expanded: bool = False
    edge: Any = None
    handle: Any = None

    @property
    def num_rows(self) -> int:
        """How many rows there are on the axis of the examples, when it is the first one; 0 if there is no such axis."""
        return self.fold or (self.shape[self.axis] if len(self.shape) > self.axis else 0)

    def connect(self, t: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Let autograd deliver the gradient of the tensor to `receive`."""
        node = t.grad_fn
        if node is None or isinstance(node, torch._C._FunctionBase):
            self.edge = get_gradient_edge(t)  # which keeps the graph of a node written in Python
        else:
            self.edge = GradientEdge(node, t.output_nr)
        self.handle = t.register_hook(receive)

    def gradient(self, g: Tensor | None, V: int) -> Tensor:
        """A gradient [V, *out], examples first; zeros for None. That of a single vector comes without the axis V."""
        if g is None:
            g = torch.zeros(V, *self.shape, dtype=self.dtype, device=self.device)
        elif g.ndim == len(self.shape):
            g = g.unsqueeze(0)
        return examples_first(g, self.axis, self.fold, 1)


@dataclass(eq=False)
class RecordedCall:
    """A recorded call, which lasts until the next batch.

    Attributes:
        call: What a `LayerBatch` shows of it.
        layer: Index of its layer.
        slots: What it returned, one slot per floating-point tensor.
        single: Whether it returned just one tensor.
        versions: Its inputs and their versions, to notice changes in place.
        expanded: Whether it returned one row for all examples.
    """

    call: Call
    layer: int
    slots: list[OutputSlot]
    single: bool
    versions: list[tuple[Tensor, int]]
    expanded: bool

    def set_gradients(self, grads: dict[int, Tensor], V: int) -> None:
        """Move the gradients of the slots (by identity) into `call.grads`; zeros where there are none."""
        found = [slot.gradient(grads.pop(id(slot), None), V) for slot in self.slots]
        self.call.grads = found[0] if self.single else found


def examples_first(t: Tensor, axis: int, fold: int | None = None, lead: int = 0) -> Tensor:
    """The same numbers with the examples first, after `lead` leading axes."""
    t = t if fold is None else t.unflatten(lead, (-1, fold))
    return t.movedim(axis + lead, lead) if axis else t


class Recorder:
    """Context manager that owns all hooks on the modules of `layers`.

    Args:
        example_axis: Module name to the axis of its inputs and outputs that carries the examples, where it is not 0.
        intercept: Watch function calls even if no layer is read by them: fused inference would hide submodules.
        values: Key to the tensor that stands in for a parameter while the model runs, as inside `EmpiricalRisk.at`;
            default: the layers' own.
        own_pass: Whether the passes are made for recording. In those of others nothing is changed that shows: where
            recording would raise, or expand one row for all examples to one for each, the rest is left alone.

    Attributes:
        calls: What was recorded in the last forward pass.
        num_examples: N of that batch.
        disabled: Context in which modules that run are not recorded, and their outputs not replaced.
        doubt: Why a pass of others was not recorded to its end.
        receive: Called with call, slot and gradient whenever autograd delivers one; None ignores them.

    Use: inside the context, the model runs under `recording`; then `BackwardPasses` shows what was recorded to a
    consumer. Nothing is left on the modules when the context ends, also after an exception.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        example_axis: Mapping[str, int],
        backward: bool,
        intercept: bool = False,
        values: Mapping[str, Tensor] | None = None,
        own_pass: bool = True,
    ) -> None:
        self.layers, self.backward, self.intercept = layers, backward, intercept
        self.calls: list[RecordedCall] = []
        self.num_examples = 0
        self.doubt: Exception | None = None
        self.receive: Receive | None = None
        self._axes, self._own_pass = example_axis, own_pass
        functions = [(i, use) for i, layer in enumerate(layers) for use in layer.uses if use.function is not None]
        #: The tensors that the model reads, by key.
        self._params = {key: p for layer in layers for key, p in layer.params.items()} | dict(values or {})
        self._functions = FunctionUses(functions, self._params) if functions else None
        self._mode = FunctionCalls(self._function_call) if intercept or functions else None
        self._handles: list[Any] = []
        self._recording, self.disabled = False, Depth()
        self._ours = OwnThread()  # another thread may evaluate the model meanwhile

    def __enter__(self) -> Recorder:
        for index, layer in enumerate(self.layers):
            for use in layer.uses:
                if use.function is None:
                    self._handles += self._functions.watch(use) if self._functions is not None else ()
                    hook = Uncopied(self._module_call, index, use)
                    self._handles.append(use.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unhook()
        self._release()

    def unhook(self) -> None:
        """Remove the hooks from the modules; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watching(self) -> AbstractContextManager[Any]:
        """Function calls are seen in here: in forward passes, and in backward passes, which may run modules again."""
        return self._mode or nullcontext()

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """One forward pass of the model happens in here; the batch before is forgotten."""
        self._release()
        self.num_examples, self._recording, self.doubt = num_examples, True, None
        self._ours = OwnThread()
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            if refusal := self.refusal_of_one_row(f"which does not go on from there: {error}"):
                raise refusal from error
            raise
        finally:
            self._recording = False
            if self._functions is not None:
                self._functions.inside.clear()

    def _release(self) -> None:
        # Nodes, their hooks and calls are a cycle that no garbage collector sees.
        for slot in self.slots:
            if slot.handle is not None:
                slot.handle.remove()
            slot.edge = slot.handle = None
        self.calls, self.receive = [], None

    # ------------------------------------------------------------------------------------------------------- hooks
    def _module_call(
        self,
        index: int,
        use: ModuleUse,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any = None,
    ) -> Any:
        """The forward hook of one module; if it was removed while the module ran, PyTorch calls it without kwargs."""
        if self.disabled.depth or self.doubt is not None or not self._handles or not self._ours():
            return None
        # With other tensors in place of its parameters, by functional_call, it is no call of the layer.
        return self._note([(index, use)], (args, kwargs), out) if use.holds(module, self._params) else None

    def _function_call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, examples: int | None
    ) -> Any:
        """A torch function: note products with weights for the layers whose parameters they read."""
        if self.disabled.depth or self.doubt is not None or self._functions is None:
            return out
        for product in products(function, args, kwargs):
            if found := self._functions.of(product):
                # Inside attention examples are on axis 1, or on an axis with positions.
                fold = None if examples is None or product.input.ndim == 3 else examples
                made = self._note(found, ((product.input,), {}), out, None if examples is None else 1, fold)
                return out if made is None else made
        return out

    def _note(
        self,
        uses: Sequence[tuple[int, ModuleUse]],
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        out: Any,
        axis: int | None = None,
        fold: int | None = None,
    ) -> Any:
        """Note a call for one layer, or several that read different parameters in it.

        Returns:
            What the model goes on with instead of the output; None for the output itself.
        """
        use = uses[0][1]
        try:
            axis = self._axes.get(use.name, 0) if axis is None else axis
            leaves, spec = ([out], None) if isinstance(out, Tensor) else tree_flatten(out)
            at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
            packed = any(isinstance(t, PackedSequence) for t in (*given[0], *given[1].values()))
            if packed or not at or (len(at) > 1 and isinstance(use.rule, AffineRule)):
                what = f"a {out.dtype} tensor" if isinstance(out, Tensor) else f"a {type(out).__name__}"
                raise OutsideReads(
                    f"{_of(use)} returned {what}; expected floating-point tensors with examples on one axis. Leave its "
                    f"parameters {list(use.keys.values())} out of `params`.",
                    use.keys.values(),
                )
            tensors = [leaves[k] for k in at]
            axes = [axis] if fold is not None else use.rule.axes(use.module, axis, tensors, inputs=False)
            slots: list[OutputSlot] = []
            for k, on in zip(at, axes, strict=True):
                t = isolate(leaves[k], use, len(at) > 1) if self.backward else leaves[k]
                # One row for all examples (position embeddings): each example gets a gradient of its own.
                one_row = self.num_examples > 1 and t.ndim > on and t.shape[on] == 1 and fold is None
                if one_row and not self._own_pass:
                    raise _refusal_of_one_row(use, self.num_examples, "this is not done in passes of others")
                if one_row:
                    t = t.expand(*t.shape[:on], self.num_examples, *t.shape[on + 1 :])
                leaves[k] = t
                slots.append(OutputSlot(t.shape, t.dtype, t.device, on, fold, one_row))
            for index, one in uses if self._recording else ():
                own = slots if one is use else [OutputSlot(s.shape, s.dtype, s.device, s.axis, fold) for s in slots]
                recorded = self._call(index, one, given, own, spec is None, axis)
                for k, slot in zip(at, own, strict=True) if self.backward else ():
                    slot.connect(leaves[k], partial(self._arrive, recorded, slot))
                self.calls.append(recorded)
        except Exception as error:
            if self._own_pass and isinstance(error, (UnsupportedError, ValueError)):
                raise
            if self._own_pass:  # inside of `vmap`, with sparse tensors: what is around it may be run for each example
                raise OutsideReads(f"{_of(use)} can't be recorded: {error}", use.keys.values()) from error
            # The rest of a pass of others is left alone; frames hold what the user's pass has computed.
            self.doubt = error.with_traceback(None)
            return None
        if not self.backward and not any(slot.expanded for slot in slots):
            return None
        return leaves[0] if spec is None else tree_unflatten(leaves, spec)

    def _call(
        self,
        index: int,
        use: ModuleUse,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        slots: list[OutputSlot],
        single: bool,
        axis: int,
    ) -> RecordedCall:
        """A call with its inputs, the examples first.

        Raises:
            OutsideReads: If the axes taken for the examples' don't carry them; the module around may tell them apart.
        """
        N, slot = self.num_examples, slots[0]
        rows, expanded = slot.num_rows, any(slot.expanded for slot in slots)
        sizes = {s.num_rows for s in slots}
        if len(sizes) > 1 or not rows or rows % N or (slot.axis != 0 and rows != N and use.function is None):
            raise self._not_by_example(use, f"returned {[list(s.shape) for s in slots]}")

        def first(t: Tensor, on: int) -> tuple[Tensor, int]:
            if slot.fold is not None:
                t = t.unflatten(0, (-1, slot.fold))
            moved = on != 0 and t.ndim > on and (use.function is not None or t.shape[on] in (1, N))
            t = t.movedim(on, 0) if moved else t
            return (t.expand(N, *t.shape[1:]) if expanded and t.ndim and len(t) == 1 else t), on if moved else 0

        out_axes = [slot.axis for slot in slots]
        if isinstance(use.rule, AffineRule):  # it reads one tensor; the rest is not kept alive
            read = use.rule.input_of(use.module, *given).detach()
            x, moved = first(read, axis if slot.fold is None else 1)
            if x.shape[0] != rows:
                raise self._not_by_example(use, f"got {list(read.shape)} and returned {list(slot.shape)}")
            call, inputs = Call(use, (x,), {}, None, [moved], out_axes), [read]
        else:
            leaves, spec = tree_flatten((tuple(given[0]), dict(given[1])))
            at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor)]
            inputs, in_axes = [leaves[k].detach() for k in at], list[int | None]()
            for k, t, on in zip(at, inputs, use.rule.axes(use.module, axis, inputs, inputs=True), strict=True):
                t, moved = leaves[k], _ = first(t, on)
                in_axes.append(moved if moved or (t.ndim > 0 and len(t) == rows) else None)
            positional, named = tree_unflatten(leaves, spec)
            call = Call(use, positional, named, None, in_axes, out_axes)
        versions = [(t, t._version) for t in inputs if not t.is_inference()]
        return RecordedCall(call, index, slots, single, versions, expanded)

    def _not_by_example(self, use: ModuleUse, what: str) -> OutsideReads:
        """The error about rows of a layer that don't belong to examples."""
        return OutsideReads(
            f"{_of(use)} {what} in a batch of {self.num_examples} examples: its first axis should carry the examples, "
            f"or a multiple of them. If another does, say EmpiricalRisk(..., example_axis={{{use.name!r}: axis}}). "
            "A table for all examples, as of positions, needs an axis of size 1 for them, as embedding(places[None]). "
            f"Or leave its parameters {list(use.keys.values())} out of `params`.",
            use.keys.values(),
        )

    def refusal_of_one_row(self, why: str) -> OutsideReads | None:
        """What to raise if this could come from one row for all examples, which was expanded; None if none was."""
        expanded = [recorded.call.use for recorded in self.calls if recorded.expanded]
        return _refusal_of_one_row(expanded[0], self.num_examples, why) if expanded else None

    def _arrive(self, recorded: RecordedCall, slot: OutputSlot, g: Tensor) -> None:
        """The hook of one output tensor."""
        if self.receive is not None:
            self.receive(recorded, slot, g)

    # ---------------------------------------------------------------------------------------------- what was recorded
    @property
    def slots(self) -> list[OutputSlot]:
        """What all calls returned."""
        return [slot for recorded in self.calls for slot in recorded.slots]

    def by_layer(self) -> dict[int, list[RecordedCall]]:
        """Index of a layer to its calls."""
        by_layer: dict[int, list[RecordedCall]] = {}
        for recorded in self.calls:
            by_layer.setdefault(recorded.layer, []).append(recorded)
        return dict(sorted(by_layer.items()))

    def require_unchanged(self) -> None:
        """Refuse layers whose input was written to since they read it."""
        for recorded in self.calls:
            if any(t._version != version for t, version in recorded.versions):
                raise UnsupportedError(
                    f"the input of {title(recorded.call.use.name)} was modified in place after the layer read it, "
                    "so its curvature can't be computed from it. "
                    "Replace the in-place operation (for instance `x += y` by `x = x + y`)."
                )

    def sources(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Edges with no other recorded edge between them and the input: asking for these visits all.

        An edge outside the graph of the outputs is no source: its layer does not reach them.

        Cost: a walk through the graph.
        """
        edges = [slot.edge for slot in self.slots if slot.edge is not None]
        marked = {edge.node for edge in edges}
        above: dict[Any, bool] = {}  # whether a recorded edge is below the node
        for node, below in postorder([t.grad_fn for t in outputs]):
            found = False
            for child in below:
                found = found or child in marked or above[child]
            above[node] = found
        return [edge for edge in edges if above.get(edge.node) is False]


def _of(use: ModuleUse) -> str:
    return f"{title(use.name)} ({type(use.owner).__name__})"


def _refusal_of_one_row(use: ModuleUse, num_examples: int, why: str) -> OutsideReads:
    return OutsideReads(
        f"{_of(use)} returned one row for all {num_examples} examples, which was expanded to one row for each, so that "
        f"each has a gradient of its own; {why}. If the layer makes weights or a table for all examples, leave its "
        f"parameters {list(use.keys.values())} out of `params`; if a row, expand it to the batch in the model.",
        use.keys.values(),
    )


def isolate(out: Tensor, use: ModuleUse, several: bool = False) -> Tensor:
    """The same numbers, differentiable, and neither a leaf nor a view: in-place operations keep its edge.

    Args:
        several: Whether it is one of several tensors, of which one may be computed from another inside the module:
            what arrives at it must have come from outside.

    Raises:
        UnsupportedError: If gradients are switched off.
    """
    if not torch.is_grad_enabled():
        raise UnsupportedError(
            f"{title(use.name)} ran under torch.no_grad(). If this is activation checkpointing, pass "
            "use_reentrant=False; if it is a frozen part of the model, leave its parameters "
            f"{list(use.keys.values())} out of `params`."
        )
    if not out.requires_grad:
        out = out.detach().requires_grad_()
    elif not several and not out._is_view():
        return out
    # A module of unknown code may have saved its output for backward, and an alias has a version counter of its own.
    if not isinstance(use.rule, AffineRule):
        return out.clone()
    return torch.ops.aten._unsafe_view(out, out.shape)
