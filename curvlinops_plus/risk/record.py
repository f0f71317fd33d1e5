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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import Product, added_bias, products
from curvlinops_plus.risk.autograd_graph import postorder
from curvlinops_plus.risk.function_calls import FunctionCalls
from curvlinops_plus.risk.function_uses import FunctionUses
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.module_uses import ModuleUse, title
from curvlinops_plus.risk.parameter_reads import ParameterReads, refuse_outside_readers
from curvlinops_plus.risk.process_state import Depth, OwnThread, Uncopied
from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall, isolate, make_recorded_call
from curvlinops_plus.risk.refused_calls import OutsideReads, refusal_of_one_row, refuse_call
from curvlinops_plus.risk.row_order import RowOrder, packed_order, read_order, refuse_functions

Receive = Callable[[RecordedCall, OutputSlot, Tensor], None]


class Recorder:
    """Context manager that owns all hooks on the modules of `layers`.

    Args:
        example_axis: Module name to the axis of its inputs and outputs that carries the examples, where it is not 0.
        intercept: Watch function calls even if no layer is read by them: fused inference would hide submodules.
        values: Key to the tensor that stands in for a parameter while the model runs, as inside `EmpiricalRisk.at`;
            default: the layers' own.
        example_of_row: Module name to the function of a batch that says which rows of its output are whose.
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
        example_of_row: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
        own_pass: bool = True,
    ) -> None:
        self.layers, self.backward, self.intercept = layers, backward, intercept
        self.calls: list[RecordedCall] = []
        self.num_examples = 0
        self.doubt: Exception | None = None
        self._own_pass = own_pass
        self.receive: Receive | None = None
        self._axes, self._example_of_row = example_axis, example_of_row or {}
        self._data: tuple[Any, Any] = (None, None)
        functions = [(i, use) for i, layer in enumerate(layers) for use in layer.uses if use.function is not None]
        refuse_functions([use for _, use in functions], self._example_of_row)
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
        try:
            if not use.holds(module, self._params):
                return self._refuse_replaced(use, module)
            if isinstance(out, Tensor) or (order := packed_order(use, out, self.num_examples)) is None:
                return self._output(index, use, args, kwargs, out)
            packed, *states = out
            inputs = order.without_packed(args), order.without_packed(kwargs)
            made = self._output(index, use, *inputs, (packed.data, *states), order)
            return made and (PackedSequence(made[0], *packed[1:]), *made[1:])
        except Exception as error:
            return self._doubted(error)

    def _doubted(self, error: Exception) -> None:
        """Leave the rest of a pass of others alone."""
        if self._own_pass:
            raise error
        self.doubt = error.with_traceback(None)  # whose frames hold what the user's pass has computed

    def _output(
        self,
        index: int,
        use: ModuleUse,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        packed: RowOrder | None = None,
    ) -> Any:
        """What the model goes on with instead of a module's output; None for the output itself.

        Of a packed sequence, the output is its data and states, and `packed` the order of the data.
        """
        single = isinstance(out, Tensor)
        leaves, spec = ([out], None) if single else tree_flatten(out)
        only = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
        given = args if only else tree_leaves((args, kwargs))
        refuse_call(use, [*given, *leaves])
        at = [0] if single and out.is_floating_point() else _float_tensors(leaves, out, use)
        axis = self._axes.get(use.name, 0)
        tensors = [leaves[k] for k in at]
        axes = use.rule.axes(use.module, axis, tensors, inputs=False) if packed is None else [0, 1, 1][: len(at)]
        tensors, slots = self._outputs(use, tensors, axes, packed=packed)
        for k, t in zip(at, tensors, strict=True):
            leaves[k] = t
        if self._recording:
            call = make_recorded_call(use, index, args, kwargs, slots, single, axis, self.num_examples)
            self._note(call, tensors)
        handed_on = self.backward or any(slot.expanded for slot in slots)
        if not handed_on:
            return None
        return leaves[0] if spec is None else tree_unflatten(leaves, spec)

    def _refuse_replaced(self, use: ModuleUse, module: nn.Module) -> None:
        """Refuse other tensors in place of some parameters of unknown code; other readers are found by counting them.

        Raises:
            OutsideReads: Naming them.
        """
        own = use.own(module, self._params)
        if any(own.values()) and not isinstance(use.rule, AffineRule):
            replaced = [key for key, same in own.items() if not same]
            raise OutsideReads(
                f"{title(use.name)} ({type(use.owner).__name__}) was called with other tensors in place of its "
                f"parameters {replaced} (by functional_call inside forward, or an assignment around the call). Leave "
                f"its parameters {list(use.keys.values())} out of `params`."
            )

    def _outputs(
        self,
        use: ModuleUse,
        tensors: Sequence[Tensor],
        axes: Sequence[int],
        fold: int | None = None,
        packed: RowOrder | None = None,
    ) -> tuple[list[Tensor], list[OutputSlot]]:
        """What the model goes on with instead of a call's outputs, and where their gradients will arrive."""
        found, slots = [], []
        for t, axis in zip(tensors, axes, strict=True):
            if self.backward:
                t = isolate(t, use, several=len(tensors) > 1)
            order = packed if not slots else None
            if order is None and self._example_of_row:
                order = self._order(use, t, axis)
            # One row for all examples (position embeddings): each example gets a gradient of its own.
            one_row = self.num_examples > 1 and t.ndim > axis and t.shape[axis] == 1 and fold is None and order is None
            if one_row and not self._own_pass:
                raise refusal_of_one_row(use, self.num_examples, "this is not done in passes of others")
            if one_row:
                t = t.expand(*t.shape[:axis], self.num_examples, *t.shape[axis + 1 :])
            found.append(t)
            slots.append(OutputSlot(t.shape, t.dtype, t.device, axis, fold, one_row, order))
        return found, slots

    def _order(self, use: ModuleUse, out: Tensor, axis: int) -> RowOrder | None:
        """The order of the rows of an output, if the user says that they have one of their own."""
        function = self._example_of_row.get(use.name)
        if function is None or out.ndim <= axis:
            return None
        return read_order(function(*self._data), use.name, out.shape[axis], self.num_examples)

    def _function_call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, examples: int | None
    ) -> Any:
        """A torch function: note products with weights for the layers whose parameters they read."""
        functions = self._functions
        if self.disabled.depth or self.doubt is not None or functions is None:
            return out
        try:
            for h, b in added_bias(function, args, kwargs):
                functions.add_bias(h, b, out)
            for product in products(function, args, kwargs):
                if found := functions.of(product):
                    return self._product(functions, product, found, out, examples)
        except Exception as error:
            self._doubted(error)
        return out

    def _product(
        self,
        functions: FunctionUses,
        product: Product,
        found: Sequence[tuple[int, ModuleUse]],
        out: Tensor,
        examples: int | None,
    ) -> Tensor:
        """A product with a weight. Inside attention examples are on axis 1, or on an axis with positions."""
        axis, fold = self._axes.get(found[0][1].name, 0), None
        if examples is not None:
            axis, fold = 1, None if product.inputs[0].ndim == 3 else examples
        (out,), (slot,) = self._outputs(found[0][1], [out], [axis], fold)
        if self._recording:
            for index, use in found:
                slot = OutputSlot(out.shape, out.dtype, out.device, axis, fold, slot.expanded)
                call = make_recorded_call(use, index, product.inputs, {}, [slot], True, axis, self.num_examples)
                self._note(call, [out])
                functions.remember(out, call)
        return out

    def _note(self, recorded: RecordedCall, tensors: Sequence[Tensor]) -> None:
        if self.backward:
            for slot, t in zip(recorded.slots, tensors, strict=True):
                slot.connect(t, partial(self._arrive, recorded, slot))
        self.calls.append(recorded)

    def _arrive(self, recorded: RecordedCall, slot: OutputSlot, g: Tensor) -> None:
        """The hook of one output tensor."""
        if self.receive is not None:
            self.receive(recorded, slot, g)

    def _release(self) -> None:
        for recorded in self.calls:
            recorded.release()
        self.calls, self.receive = [], None

    # ------------------------------------------------------------------------------------------------------ passes
    @contextmanager
    def recording(self, num_examples: int, data: tuple[Any, Any] = (None, None)) -> Iterator[None]:
        """One forward pass of the model on the data (X, y) happens in here; the batch before is forgotten."""
        self._release()
        self.num_examples, self._data, self._recording, self.doubt = num_examples, data, True, None
        self._ours = OwnThread()
        if self._functions is not None:
            self._functions.start()
        frozen = [p for p in self._params.values() if not p.requires_grad]
        # Frozen parameters leave no trace in the graph that tells which operations read them.
        reads = ParameterReads(frozen) if frozen else None
        try:
            with reads or nullcontext():
                yield
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            refusal = self.refusal_of_one_row(f"then the model failed: {error}")
            if refusal is None or isinstance(error, UnsupportedError):
                raise
            raise refusal from error
        finally:
            self._recording = False
            if self._functions is not None:
                self._functions.end()
        if reads is not None:
            refuse_outside_readers(self.layers, self.calls, reads.counts, self._params)

    def refusal_of_one_row(self, why: str) -> OutsideReads | None:
        """What to raise if this could come from one row for all examples, which was expanded; None if none was."""
        expanded = [recorded.call.use for recorded in self.calls if recorded.expanded]
        return refusal_of_one_row(expanded[0], self.num_examples, why) if expanded else None

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
            recorded.require_unchanged()

    def sources(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Edges with no other recorded edge between them and the input: asking for these visits all.

        An edge outside the graph of the outputs is no source: its layer does not reach them.

        Raises:
            ValueError: If a parameter is read by something else than its layer.
            UnsupportedError: If a product to which a bias is added is used without it, too.

        Cost: a walk through the graph.
        """
        edges = [slot.edge for slot in self.slots if slot.edge is not None]
        marked = {edge.node for edge in edges}
        above: dict[Any, bool] = {}  # whether a recorded edge is below the node
        readers: dict[int, int] = {}
        consumers: dict[Any, int] = {}  # of recorded outputs
        for node, below in postorder([t.grad_fn for t in outputs]):
            found = False
            for child in below:
                if child in marked:
                    found = True
                    consumers[child] = consumers.get(child, 0) + 1
                elif above[child]:
                    found = True
                elif (leaf := getattr(child, "variable", None)) is not None:
                    readers[id(leaf)] = readers.get(id(leaf), 0) + 1
            above[node] = found
        refuse_outside_readers(self.layers, self.calls, readers, self._params)
        if self._functions is not None:
            self._functions.check_sums(consumers)
        return [edge for edge in edges if above.get(edge.node) is False]


def _float_tensors(leaves: Sequence[Any], out: Any, use: ModuleUse) -> list[int]:
    """Positions of the floating-point tensors among what a module returned.

    Raises:
        UnsupportedError: If there are none, or several where the rule of the layer knows one.
    """
    at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
    if not at or isinstance(out, PackedSequence) or (len(at) > 1 and isinstance(use.rule, AffineRule)):
        what = f"a {out.dtype} tensor" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        hint = " Pad the sequences, and say `mask=` for the padding." if isinstance(out, PackedSequence) else ""
        raise UnsupportedError(
            f"{title(use.name)} ({type(use.module).__name__}) returned {what}; expected floating-point tensors "
            f"with examples on one axis.{hint} Or leave its parameters {list(use.keys.values())} out of "
            "`params`."
        )
    return at
