"""A recorded pass: what layers read in a forward pass, and the gradients at what they returned.

Forward hooks keep a layer's detached input and the gradient edge of its output. Then vectors go
back: autograd is asked for the gradients at all these edges at once (large ones arrive one by one),
and not for those of parameters. Each layer's calls, with their gradients, are shown to a consumer
as a `LayerBatch`.

Two details without which results would be silently wrong:

* `nn.Linear` on [N, S, d] returns a *view*. An in-place activation behind it rewrites the view's
  history, and the edge noted before is lost. Such outputs, and those of frozen layers that depend
  on nothing differentiable, are replaced by an alias that autograd does not treat as a view.
  Nothing is copied, values are bit-identical.
* Hooks stay until the backward pass is over: activation checkpointing runs layers once more then,
  and must see the same graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.contexts import Endings, GradMode, entered
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.broadcast import mask_to_expand, with_mask
from curvlinops_plus.layer.experts import rows_up_to
from curvlinops_plus.layer.functions import BIAS, LINEAR, AffineCall, affine_calls
from curvlinops_plus.linalg.pieces import rows_at_once
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.risk.batches import Batch, gradients_of, stream_gradients
from curvlinops_plus.risk.calls import Output, OutsideReads, RecordedCall, title
from curvlinops_plus.risk.check import check_batch
from curvlinops_plus.risk.function_reads import FunctionCalls, ParameterViews, function_of
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer, ModuleUse
from curvlinops_plus.risk.loss_passes import LossWeights, loss_weights
from curvlinops_plus.risk.losses import Terms, Totals
from curvlinops_plus.risk.preserve import Uncopied, quiet, this_thread
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.routes import GatheredRows, Origins, RoutedRows
from curvlinops_plus.risk.stack_batch import batch_of
from curvlinops_plus.risk.tables import BroadcastUses, TableCall
from curvlinops_plus.risk.vectors import Draws, Vectors

Consumer = Callable[[LayerBatch], None]
# Gradients of more numbers than these are shown to layers as they are computed, to save memory.
_MANY_NUMBERS = 2**22
# Larger gradients of vectors, if their numbers take four bytes each, are computed one after the
# other on a CPU.
_VECTOR_BYTES = 2**16


def sweep(
    risk: EmpiricalRisk,
    layers: Sequence[Layer],
    vectors: Vectors,
    consume: Consumer,
    desc: str = "sweep",
    weights: LossWeights | None = None,
    repeatable: bool = True,
) -> Totals:
    """LayerRead the data once and pass the batches of every layer to `consume`.

    Args:
        consume: Called with a `LayerBatch`, once per layer and piece of vectors.
        weights: Relative weights of the losses; default: `loss_weights(risk)`.
        repeatable: Whether two evaluations of the model have to agree.

    Returns:
        The totals over all batches.

    Cost: one forward pass, and one backward pass per vector to the layers' outputs only. Several
    losses, of which at least one has the reduction "mean": see `loss_weights`.
    """
    if weights is None:
        weights = loss_weights(risk) if vectors.backward else LossWeights(risk)
    recorder = Recorder(risk, layers, vectors, weights, repeatable=repeatable)
    draws = Draws(vectors.seed or 0)
    totals = Totals()
    outside_reads: OutsideReads | None = None
    with recorder.hooked():
        try:
            for batch in risk.batches(desc):
                totals.add(recorder.observe(batch, draws, consume))
        except OutsideReads as error:
            outside_reads = error
    totals = totals.over(risk.processes, outside_reads)
    weights.require(totals)
    return totals


class LayerRead(NamedTuple):
    """What a call is to one layer: the index of the layer, the use, and its rule.

    Attributes:
        matrices: Of a stack: the number of the matrix that all rows meet, or that of each row.
    """

    layer: int
    use: ModuleUse
    rule: Any
    matrices: int | Tensor | None = None


class ModuleHooks(NamedTuple):
    """Hooks of a module: before it runs, if it reads what functions read elsewhere, and after."""

    module: nn.Module
    before: Uncopied | None
    after: Uncopied


class Depth:
    """Context that counts how often it is entered; generators take several times as long."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Recorder:
    """Forward passes of a risk's model under hooks on its layers, and vectors that go back.

    In `hooked()`, or in the context of the recorder itself, which leaves the modes of PyTorch
    alone, the model runs under `recording`; after `begin`, `send` sends vectors back. `observe`
    does all of it for one batch. Nothing is left on the modules when the context ends, also after
    an exception.

    Args:
        weights: Relative weights of the losses; not needed by who sends vectors of their own.
        own_pass: Whether the passes are made for recording. In those of others nothing is changed
            that shows: where recording would raise, or expand one row for all examples to one for
            each, the rest is left alone. Modes are set by whoever makes them.
        repeatable: Whether two evaluations of the model have to agree; not so in training loops.
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
        gathers: Whether it follows rows that are gathered.
        is_open: Whether the context is entered, also where there are no modules to hook.
        scales_gradients: Whether modules scale gradients by how often rows occur.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        layers: Sequence[Layer],
        vectors: Vectors,
        weights: LossWeights | None = None,
        own_pass: bool = True,
        repeatable: bool = True,
        params: Mapping[str, Tensor] | None = None,
        ignored: Collection[Layer] = (),
    ) -> None:
        self.risk = risk
        self.layers = layers
        self.vectors = vectors
        self.weights = weights
        self.own_pass = own_pass
        self.repeatable = repeatable
        self.ignored = ignored
        self.backward = vectors.backward
        self.example_axis = risk.options.example_axis or {}
        self.disabled = Depth()
        self.calls: list[RecordedCall] = []
        self.is_open = False
        self._handles: list[Any] = []
        self._recording = False
        self._thread = this_thread()
        self.gathers = follows_rows(risk)

        self._uses: list[tuple[int, ModuleUse]] = []
        for index, layer in enumerate(layers):
            if layer not in ignored:
                self._uses += [(index, use) for use in layer.uses]
        self.scales_gradients = any(
            vars(use.module).get("scale_grad_by_freq") for _, use in self._uses
        )
        self.reads = frozenset((use.name, *use.keys.items()) for _, use in self._uses)
        if params is None:
            params = {key: p for layer in layers for key, p in layer.params.items()}
        self._params = params
        # Functions that read parameters, by what they are and the keys of weight and bias.
        self._functions: dict[Any, tuple[int, ModuleUse]] = {}
        broadcast: list[tuple[int, ModuleUse]] = []
        self._function_keys: set[str] = set()
        for index, use in self._uses:
            if use.function is None:
                continue
            self._function_keys |= {*use.keys.values()}
            if use.function.name == "broadcast":
                broadcast.append((index, use))
            else:
                read = (use.function, use.keys.get("weight"), use.keys.get("bias"))
                self._functions[read] = (index, use)
        self._views = ParameterViews({key: params[key] for key in self._function_keys})
        self._sees_functions = bool(self._function_keys) or self.gathers
        self._mode = FunctionCalls(self._function_call) if self._sees_functions else nullcontext()
        self._mode_of_call = Endings()
        # What the modules that run answer for: functions inside of them don't count.
        self._inside: list[set[str]] = []
        self._broadcast = BroadcastUses(
            risk.model, broadcast, params, self._views.key, self._inside, self.backward
        )
        self._reset(0)
        self._hooks = [
            self._hooks_of(LayerRead(index, use, use.rule))
            for index, use in self._uses
            if use.function is None
        ]

    @property
    def visited(self) -> set[str]:
        """Names of the layers that have seen rows which were gathered."""
        return {self.layers[call.layer].name for call in self.calls if call.routed is not None}

    def beside(self, params: Mapping[str, Tensor]) -> Recorder:
        """A recorder of the same layers for another pass meanwhile, with tensors in place of the
        parameters.
        """
        return Recorder(self.risk, self.layers, self.vectors, params=params, ignored=self.ignored)

    # ------------------------------------------------------------------------------------ one batch
    def observe(self, batch: Batch, draws: Draws, consume: Consumer) -> Totals:
        """Run the model on one batch, send vectors back, and pass every layer's `LayerBatch` to
        `consume`.
        """
        with self.recording(batch.num_examples):
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
        assert self.weights is not None
        risk = self.risk
        heads, targets, class_axes = outputs
        with plain_mode(risk.device.type):
            detached = [f.detach() for f in heads]
            # Streams don't add the values up.
            terms = risk.losses.terms((detached, targets, class_axes), batch, values=self.own_pass)
        totals = terms.totals
        check_batch(risk, self, batch, heads)
        mask = None if risk.options.mask is None else _read_mask(risk, batch)
        self.begin(consume, mask, batch.weight)
        totals.called = {*self.by_layer}
        if self.backward:
            numbers = risk.processes.numbers(draws.before + batch.first, batch.num_examples)
            draws.of_examples(numbers, risk.device)
            factors = self.weights.factors(totals, self.vectors.of_loss)
            groups = vectors_to_send(risk, self.vectors, heads, terms, class_axes, draws, factors)
            for group in groups:
                keep = keep_graph or group is not groups[-1]
                read = [heads[k] for k in group.outputs]
                at_once = vectors_at_once(self, group.number)
                self.send(read, group.vectors, group.number, at_once, keep)
        else:
            self.show_inputs()
        totals.reached = self.reached
        return totals

    # ------------------------------------------------------------------------------------- contexts
    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the hooks are on the modules, and PyTorch is in the modes for it."""
        with Endings() as endings:
            if self.own_pass:
                endings.enter_context(torch.inference_mode(False))
                endings.enter_context(GradMode(self.backward))
            with self.risk.placed(), self.attached():
                yield

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the hooks are on the modules."""
        with Endings() as endings:
            endings.surely(self.remove)
            self.attach()
            yield

    def attach(self) -> None:
        """Put the hooks on the modules."""
        self.is_open = True
        add = self._handles.append
        for module, before, after in self._hooks:
            if before is not None:
                add(module.register_forward_pre_hook(before))
            add(module.register_forward_hook(after, prepend=True, with_kwargs=True))

    def _hooks_of(self, read: LayerRead) -> ModuleHooks:
        """The hooks of the module that a use is."""
        use = read.use
        places = use.places(use.module)
        holders = [(module, name, self._params[key]) for module, name, key in places]
        answers_for = self._function_keys & {*use.keys.values()}
        before = Uncopied(self._enter, holders, answers_for) if answers_for else None
        after = Uncopied(self._module_call, read, holders, bool(answers_for))
        return ModuleHooks(use.module, before, after)

    def remove(self) -> None:
        """Take the hooks away, and forget the batch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.is_open = False
        self._reset(0)

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """One forward pass of the model happens in here; the batch before is forgotten."""
        with Endings() as endings:
            endings.surely(self.stop)
            self.start(num_examples)
            try:
                yield
            except OutsideReads:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                if refusal := self.refusal_of_one_row(f"which does not go on from there: {error}"):
                    raise refusal from error
                raise

    def start(self, num_examples: int) -> None:
        """Begin to record a forward pass; the batch before is forgotten."""
        self._reset(num_examples)
        self.disabled.depth = 0  # an interrupt may have left it
        self._recording = True
        self._thread = this_thread()
        self._broadcast.begin()
        if self._sees_functions:
            self._mode_of_call.enter_context(self._mode)

    def stop(self) -> None:
        """The forward pass is over."""
        self._mode_of_call.close()
        self._recording = False
        self._inside.clear()

    def _watched(self) -> AbstractContextManager[Any]:
        """Context of a backward pass, in which checkpointing may call functions once more."""
        return entered(self._mode) if self._sees_functions else self._mode

    def _reset(self, num_examples: int) -> None:
        for call in self.calls:  # which may be kept for another sweep, but not their graph
            for output in call.outputs:
                output.edge = None
        self.num_examples = num_examples
        self.doubt: Exception | None = None
        self.calls = []
        self.by_layer: dict[int, list[RecordedCall]] = {}
        self.kinds: set[Any] = set()
        self.dtypes: set[torch.dtype] = set()
        self.numbers = 0
        self._broadcast.forget()
        self._rows = GatheredRows(num_examples) if self.gathers and num_examples else None

    # ---------------------------------------------------------------------------------------- hooks
    def _listens(self) -> bool:
        """Whether calls of now are those of the recorded pass: in its thread, or in a backward
        pass, where checkpointing calls modules once more. Between passes data may call the model.
        """
        own = self._recording and this_thread() == self._thread
        return own or torch._C._current_graph_task_id() != -1

    def _enter(
        self, holders: Sequence[Any], answers_for: set[str], module: nn.Module, args: Any
    ) -> None:
        """A module begins to run that reads parameters which functions read outside of it."""
        if not self.disabled.depth and self._listens():
            self._inside.append(answers_for if _holds(holders) else set())

    def _module_call(
        self,
        read: LayerRead,
        holders: Sequence[Any],
        answers: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any = None,
    ) -> Any:
        """The forward hook of one module; if it was removed while the module ran, PyTorch calls it
        without kwargs.
        """
        if self.disabled.depth or not self._handles or not self._listens():
            return None
        if answers and self._inside:
            self._inside.pop()
        # With other tensors in place, by functional_call, it is no call of the layer.
        if self.doubt is not None or not _holds(holders):
            return None
        try:
            axis = self.example_axis.get(read.use.name, 0)
            return self._record([read], (args, kwargs), output, axis)
        except Exception as error:
            self._failed(read.use, error)

    def _function_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_examples: int | None,
    ) -> Any:
        """A torch function: record products with weights, and tables that are broadcast, for the
        layers whose parameters they read.
        """
        if self.disabled.depth or self.doubt is not None:
            return function(*args, **kwargs)
        for product in affine_calls(function, args, kwargs):
            reads = self._reads_of(product)
            if not reads:
                continue
            fold = None
            axis = self.example_axis.get(reads[0].use.name, 0)
            # Inside attention examples are on axis 1, or on an axis with positions.
            if num_examples is not None:
                axis = 1
                fold = None if product.input.ndim == 3 else num_examples
            # What is added may be a table.
            call = self._called(function, args, kwargs, axis)
            reads += [LayerRead(*read) for read in call.reads]
            return self._recorded(reads, (product.input,), call.output, axis, fold)
        masked = mask_to_expand(function, args, kwargs)
        if masked is not None and self._broadcast.tables.of(masked[0]):
            mask, sizes = masked
            expanded = self._function_call(Tensor.expand, (mask, *sizes), {}, num_examples)
            args, kwargs = with_mask(args, kwargs, expanded)
        call = self._called(function, args, kwargs)
        if not call.reads:
            return call.output
        reads = [LayerRead(*read) for read in call.reads]
        return self._recorded(reads, tuple(call.inputs), call.output, call.axis)

    def _called(
        self, function: Any, args: Any, kwargs: Mapping[str, Any], axis: int | None = None
    ) -> TableCall:
        """What a function returned, and the tables that it broadcasts, along an axis if one is
        given.
        """
        if self._broadcast.keys:
            call = self._broadcast.call(function, args, kwargs, self.num_examples, axis)
        else:
            call = TableCall(function(*args, **kwargs))
        if self._rows is not None:
            self._rows.follow(function, args, kwargs, call.output)
        self._views.select(function, args, call.output)
        if call.outside is not None:
            self._failed(call.outside.use, call.outside.error)
        return call

    def _recorded(
        self, reads: Sequence[LayerRead], inputs: tuple[Tensor, ...], output: Any, *axes: Any
    ) -> Any:
        """Record a function call; what the model goes on with."""
        try:
            replaced = self._record(reads, (inputs, {}), output, *axes)
        except Exception as error:
            self._failed(reads[0].use, error)
            return output
        if replaced is None:
            return output
        if self._rows is not None:
            self._rows.same(replaced, output)
        return replaced

    def _failed(self, use: ModuleUse, error: Exception) -> None:
        if not self.own_pass:
            # The rest of a pass of others is left alone; frames hold what it has computed.
            self.doubt = error.with_traceback(None)
            return
        if isinstance(error, (UnsupportedError, ValueError)):
            raise error
        # Inside of `vmap`, or with sparse tensors: what is around it may be run for each example.
        message = f"{_of(use)} can't be recorded: {error}"
        raise OutsideReads(message, use.keys.values()) from error

    def _reads_of(self, product: AffineCall) -> list[LayerRead]:
        """The reads that a product is; one inside a module that answers for the parameter belongs
        to the module.
        """
        weight = self._view_of(product.weight)
        bias = self._view_of(product.bias)
        function = function_of(product, weight, bias)
        weight_key = None if weight is None else weight.key
        bias_key = None if bias is None else bias.key
        joint = self._functions.get((function, weight_key, bias_key))
        if joint is not None:
            pairs = [(joint, weight or bias)]
        else:  # the two belong to layers of their own, or only one is tracked
            is_stack = bias is not None and bias.matrices is not None
            by_weight = self._functions.get((function, weight_key, None))
            by_bias = self._functions.get((LINEAR, None, bias_key))
            by_bias = by_bias or self._functions.get(
                (replace(BIAS, stacked=is_stack), None, bias_key)
            )
            pairs = [(by_weight, weight), (by_bias, bias)]
        reads = []
        for entry, view in pairs:
            if entry is None or view is None:
                continue
            index, use = entry
            rule: Any = use.rule
            matrices = view.matrices
            if product.of_stack:
                matrices = _matrices_met(product, len(self._params[view.key]))
            if not rule.stacked:
                rule = rule.at(view.rows, len(self._params[view.key]))
            reads.append(LayerRead(index, use, rule, matrices))
        return reads

    def _view_of(self, t: Tensor | None) -> Any:
        """The parameter that a tensor is a view of, unless a module that runs answers for it."""
        view = self._views.find(t)
        if view is None or any(view.key in keys for keys in self._inside):
            return None
        return view

    # -------------------------------------------------------------------------------- what is noted
    def _record(
        self,
        reads: Sequence[LayerRead],
        inputs: Any,
        output: Any,
        axis: int,
        fold: int | None = None,
    ) -> Any:
        """Record a call for one layer, or for several that read different parameters in it.

        Args:
            inputs: Its arguments and keywords.
            axis: The axis of inputs and outputs that carries the examples.
            fold: Number of examples if the axis carries positions and, inside them, examples.

        Returns:
            What the model goes on with instead of the output; None for the output itself.
        """
        _, use, rule, _ = reads[0]
        if self.backward and not torch.is_grad_enabled():
            raise UnsupportedError(
                f"{title(use.name)} ran under torch.no_grad(). If this is activation "
                "checkpointing, pass use_reentrant=False; if it is a frozen part of the model, "
                f"leave its parameters {list(use.keys.values())} out of `params`."
            )
        is_affine = isinstance(rule, AffineRule)
        leaves, structure = [output], None
        packed = False
        if not isinstance(output, Tensor):
            leaves, structure = tree_flatten(output)
            args, kwargs = inputs
            packed = any(isinstance(t, PackedSequence) for t in (*args, *kwargs.values()))
        routed = None
        may_be = self._rows is not None or isinstance(reads[0].matrices, Tensor)
        if may_be and is_affine and fold is None:
            routed = self._routed(reads[0], inputs)
        places = []
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                places.append(k)
        several = len(places) > 1
        if not places or packed or (several and is_affine):
            kind = getattr(output, "dtype", None) or type(output).__name__
            raise self._not_by_example(use, f"returned a {kind}")
        axes = [axis]
        if fold is None:
            axes = rule.axes(use.module, axis, [leaves[k] for k in places], False)
        expanded = False
        outputs = []
        rows = 0  # the examples, or a multiple of them
        for k, on in zip(places, axes, strict=True):
            t = leaves[k]
            # What a function has written into, the model goes on with, whatever is returned.
            is_input = use.function is not None and any(t is x for x in inputs[0])
            if self.backward and not (is_input and t.requires_grad):
                t = _with_edge(t, is_affine or use.function is not None, several)
            size = fold or (t.shape[on] if t.ndim > on else 0)
            # One row for all examples, as of position embeddings.
            if size == 1 < self.num_examples and fold is None and routed is None:
                t = self._row_per_example(use, t, on)
                size = self.num_examples
                expanded = True
            leaves[k] = t
            if not self._recording:
                continue
            by_example = size and not size % self.num_examples and rows in (0, size)
            if routed is not None:
                by_example = t.shape[: routed.axes].numel() == len(routed.order)
            # On another axis than the first there may be no positions beside the examples.
            if not by_example or (on and size != self.num_examples and not use.function):
                raise self._not_by_example(use, f"returned {list(t.shape)}")
            rows = size
            edge = get_gradient_edge(t) if self.backward else None
            outputs.append(Output(t.shape, t.dtype, t.device, on, fold, edge, routed))
            self.dtypes.add(t.dtype)
            self.numbers += t.numel()
        if self._recording:
            for read in reads:
                if routed is None:
                    call = self._call(read, inputs, outputs, axis, rows, expanded)
                else:
                    call = self._routed_call(read, inputs, outputs, routed)
                call.single = structure is None
                self.calls.append(call)
        if not (self.backward or expanded):
            return None
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)

    def _routed(self, read: LayerRead, inputs: Any) -> RoutedRows | None:
        """To which examples the rows of an input belong that was gathered, or of which each meets a
        matrix of its own; None of others.
        """
        x = read.rule.input_of(read.use.module, *inputs)
        places = None if self._rows is None else self._rows.places(x)
        if not isinstance(read.matrices, Tensor):
            return None if places is None else RoutedRows.of(places, self.num_examples)
        axes = read.matrices.ndim
        if places is None:
            # The rows of all examples, once or for each matrix.
            rows = x.shape[axes - 1]
            if rows % self.num_examples:
                raise self._not_by_example(read.use, f"got {list(x.shape)}")
            index = torch.arange(rows, device=x.device).expand(read.matrices.shape)
            places = Origins(index.flatten(), rows)
        return replace(RoutedRows.of(places, self.num_examples), axes=axes)

    def _routed_call(
        self, read: LayerRead, inputs: Any, outputs: Sequence[Output], routed: RoutedRows
    ) -> RecordedCall:
        """A call with gathered rows, sorted by examples.

        Which layers see some differs from batch to batch, so they are of no `kinds`.
        """
        index, use, rule, matrices = read
        x = rule.input_of(use.module, *inputs).detach()
        if isinstance(matrices, Tensor):
            matrices = routed.sorted(matrices)
        call = RecordedCall(use, rule, (routed.sorted(x),), {}, None, index, False, outputs)
        call.routed = routed
        call.matrices = matrices
        return call

    def _row_per_example(self, use: ModuleUse, t: Tensor, axis: int) -> Tensor:
        """The row expanded to one for each example, so that each has a gradient of its own."""
        N = self.num_examples
        if not self.own_pass:
            raise _refusal_of_one_row(use, N, "this is not done in passes of others")
        return t.expand(*t.shape[:axis], N, *t.shape[axis + 1 :])

    def _call(
        self,
        read: LayerRead,
        inputs: Any,
        outputs: Sequence[Output],
        axis: int,
        rows: int,
        expanded: bool,
    ) -> RecordedCall:
        """A call with its inputs, the examples first.

        Raises:
            OutsideReads: If the axes taken for the examples' don't carry them; the module around
                may tell them apart.
        """
        index, use, rule, matrices = read
        fold = outputs[0].fold
        if isinstance(rule, AffineRule):  # it reads one tensor; the rest is not kept alive
            read_tensor = rule.input_of(use.module, *inputs).detach()
            x = read_tensor
            if axis or expanded or fold is not None:
                x, _ = self._examples_first(use, x, axis, fold, expanded)
            if x.shape[0] != rows:
                shapes = f"got {list(read_tensor.shape)} and returned {list(outputs[0].shape)}"
                raise self._not_by_example(use, shapes)
            call = RecordedCall(use, rule, (x,), {}, None, index, expanded, outputs)
            call.matrices = matrices
            call.note_versions([read_tensor])
            self.kinds.add((use.name, expanded, ()))
            return call
        leaves, structure = tree_flatten((tuple(inputs[0]), dict(inputs[1])))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[k].detach() for k in places]
        axes = rule.axes(use.module, axis, tensors, True)
        in_axes: list[int | None] = []
        for k, t, on in zip(places, tensors, axes, strict=True):
            leaves[k], moved_from = self._examples_first(use, t, on, fold, expanded)
            by_example = moved_from or (t.ndim > 0 and len(leaves[k]) == rows)
            in_axes.append(moved_from if by_example else None)
        args, kwargs = tree_unflatten(leaves, structure)
        call = RecordedCall(use, rule, args, kwargs, in_axes, index, expanded, outputs)
        call.note_versions(tensors)
        kind = (*in_axes, outputs[0].axis, len(outputs[0].shape))
        self.kinds.add((use.name, expanded, kind))
        return call

    def _examples_first(
        self, use: ModuleUse, t: Tensor, axis: int, fold: int | None, expanded: bool
    ) -> tuple[Tensor, int]:
        """An input with the examples on the first axis, and the axis that they were moved from."""
        N = self.num_examples
        if fold is not None:
            t = t.unflatten(0, (-1, fold))
        moves = axis != 0 and t.ndim > axis
        moves = moves and (use.function is not None or t.shape[axis] in (1, N))
        if moves:
            t = t.movedim(axis, 0)
        if expanded and t.ndim and len(t) == 1:
            t = t.expand(N, *t.shape[1:])
        return t, axis if moves else 0

    def _not_by_example(self, use: ModuleUse, fact: str) -> OutsideReads:
        """The error about rows of a layer that don't belong to examples."""
        return OutsideReads(
            f"{_of(use)} {fact} in a batch of {self.num_examples} examples: expected "
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
        self._consume = consume
        self._mask = mask
        self._weight = weight
        self._is_first = True
        self.reached: set[int] = set()
        self.by_layer = {}
        num_edges = 0
        for call in self.calls:
            if call.routed is not None and not len(call.routed.order):
                self.reached.add(call.layer)  # as far as there are rows
            call.first_edge = num_edges
            num_edges += len(call.outputs)
            self.by_layer.setdefault(call.layer, []).append(call)
            for t, version in call.versions:
                if t._version != version:
                    raise UnsupportedError(
                        f"the input of {title(call.use.name)} was modified in place after the "
                        "layer read it, so its curvature can't be computed from it. Replace the "
                        "in-place operation (for instance `x += y` by `x = x + y`)."
                    )

    def show_inputs(self) -> None:
        """Show batches with the layers' inputs alone; there are no gradients."""
        self.reached |= self.by_layer.keys()
        self._show_all([], 0)

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
        edges = [output.edge for call in self.calls for output in call.outputs]
        sent = 0
        remaining = iter(vectors)
        while chunk := list(islice(remaining, at_once)):
            if len(chunk) > 1:
                stacks = [torch.stack(parts) for parts in zip(*chunk, strict=True)]
                stacks, power = self.in_range(stacks, outputs)
                gradients = _vectorised_gradients(outputs, edges, stacks, self._watched())
                if gradients is not None:
                    sent += len(chunk)
                    self._show_all(gradients, len(chunk), power)
                    continue
            for vector in chunk:
                sent += 1
                keep = keep_graph or sent < number
                parts, power = self.in_range(vector, outputs)
                if self.numbers > _MANY_NUMBERS:
                    self._stream(outputs, edges, parts, keep, power)
                    continue
                gradients = []
                if edges:
                    with self._watched():
                        gradients = [*gradients_of(outputs, edges, parts, keep)]
                self._show_all(gradients, 1, power)

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

    def _show_all(
        self, gradients: list[Tensor | None], num_vectors: int, power: float = 1.0
    ) -> None:
        """Show each layer its batch; arguments as for `_show`."""
        with self.disabled, plain_mode(self.risk.device.type):
            for index in self.by_layer:
                self._show(index, gradients, num_vectors, power)
        self._is_first = False

    def _show(
        self, index: int, gradients: list[Tensor | None], num_vectors: int, power: float
    ) -> None:
        """Pass a layer's batch to the consumer, which may run modules again: `disabled`, and in
        plain mode.

        Args:
            gradients: At the edges of all calls, times `power`; None for zero. Those of the layer
                are given up.
        """
        layer = self.layers[index]
        calls = self.by_layer[index]
        for call in calls if num_vectors else ():
            grads = []
            for k, output in enumerate(call.outputs, call.first_edge):
                g = gradients[k]
                gradients[k] = None
                if g is not None:
                    self.reached.add(index)
                grads.append(output.gradient(g, num_vectors))
            if power != 1:
                grads = [g.float() / power for g in grads]
            call.grads = grads[0] if call.single else grads
        group = layer.groups[0] if len(layer.groups) == 1 else None
        batch = batch_of(
            layer, calls, self.num_examples, self._is_first, self._mask, self._weight, group
        )
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
        gradients: list[Tensor | None] = [None] * len(edges)
        layer_of_edge = [call.layer for call in self.calls for _ in call.outputs]
        missing = Counter(layer_of_edge)

        def arrive(k: int, g: Tensor | None) -> None:
            gradients[k] = g
            index = layer_of_edge[k]
            missing[index] -= 1
            if not missing[index]:
                with self.disabled, plain_mode(self.risk.device.type):
                    self._show(index, gradients, 1, power)

        with self._watched():
            stream_gradients(outputs, edges, vector, keep_graph, arrive)
        with self.disabled, plain_mode(self.risk.device.type):
            for index, number in missing.items():
                if number:  # some call, or all of them, does not reach the output
                    self._show(index, gradients, 1, power)
        self._is_first = False


def follows_rows(risk: EmpiricalRisk) -> bool:
    """Whether passes follow rows that are gathered."""
    return risk.reads is not None and risk.reads.gathered


def _holds(holders: Sequence[tuple[nn.Module, str, Tensor]]) -> bool:
    """Whether modules hold these tensors under these names."""
    for module, name, p in holders:  # noqa: SIM110, generators take twice as long
        if module._parameters.get(name) is not p:
            return False
    return True


def _matrices_met(product: AffineCall, number: int) -> Tensor:  # [M] or [m, M]
    """Which matrix of a stack each row meets in a product with all of the stack."""
    rows = product.input.shape[:2]
    if product.ends is not None:
        return rows_up_to(product.ends, rows[0])
    return torch.arange(number, device=product.input.device)[:, None].expand(rows)


def _with_edge(t: Tensor, affine: bool, several: bool) -> Tensor:
    """An output with a gradient edge of its own, which in-place operations behind it keep.

    Args:
        affine: Whether a layer with an affine rule returned it, or a function that is known: they
            don't save it for backward.
        several: Whether it is one of several outputs. One may be computed from another inside the
            module, and what arrives at it must have come from outside.
    """
    is_kept = t.requires_grad and not several and not t._is_view()
    if is_kept:
        return t
    if not t.requires_grad:
        t = t.detach().requires_grad_()
    # A module of unknown code may have saved its output, and an alias has a version counter of its
    # own.
    return torch.ops.aten._unsafe_view(t, t.shape) if affine else t.clone()


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


def _of(use: ModuleUse) -> str:
    return f"{title(use.name)} ({type(use.owner).__name__})"


def _refusal_of_one_row(use: ModuleUse, num_examples: int, why: str) -> OutsideReads:
    return OutsideReads(
        f"{_of(use)} returned one row for all {num_examples} examples, which was expanded to one "
        f"row for each, so that each has a gradient of its own; {why}. If the layer makes weights "
        "or a table for all examples, leave its "
        f"parameters {list(use.keys.values())} out of `params`; if a row, expand it to the batch "
        "in the model.",
        use.keys.values(),
    )


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


def vectors_at_once(recorder: Recorder, number: int) -> int:
    """How many vectors to send in one vectorised pass: 1 streams, which is faster for large batches
    on the CPU.
    """
    if number == 1:
        return 1
    device = recorder.risk.device
    return max(1, min(number, rows_at_once(device, _VECTOR_BYTES, 4 * recorder.numbers)))


def _read_mask(risk: EmpiricalRisk, batch: Batch) -> Tensor:
    """The user's mask of one batch.

    Raises:
        ValueError: If it is no bool tensor [N, T].
    """
    assert risk.options.mask is not None
    N = batch.num_examples
    mask = risk.options.mask(batch.X, batch.y)
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 2
    if not is_mask or mask.shape[0] != N:
        kind = type(mask).__name__
        if isinstance(mask, Tensor):
            kind = f"{mask.dtype} {list(mask.shape)}"
        raise ValueError(
            f"`mask` returned {kind}; expected a bool tensor [{N}, T], True where a position "
            "counts."
        )
    return mask.to(risk.device)
