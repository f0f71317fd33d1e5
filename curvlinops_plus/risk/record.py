"""A recorded pass: what layers read in a forward pass, and the gradients at what they returned.

Forward hooks show a `RecordedPass` what layers read and returned; a mode shows it the functions
that read parameters outside of modules. Then a `BackwardPass` sends vectors back. Hooks
stay until that is over: activation checkpointing runs layers once more in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.contexts import Endings, GradMode, entered
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.broadcast import mask_to_expand, with_mask
from curvlinops_plus.layer.experts import rows_up_to
from curvlinops_plus.layer.functions import BIAS, LINEAR, AffineCall, Function, affine_calls
from curvlinops_plus.layer.kept import CallStart, may_change
from curvlinops_plus.layer.recurrent_functions import RecurrentRead, recurrent_read
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.risk.backward_pass import (
    BackwardPass,
    Consumer,
    VectorsToSend,
    vectors_to_send,
)
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.check import check_batch
from curvlinops_plus.risk.function_calls import FunctionCalls, ParameterViews, function_of
from curvlinops_plus.risk.layers import Layer, ModuleUse
from curvlinops_plus.risk.loss_passes import LossWeights, loss_weights
from curvlinops_plus.risk.losses import Totals
from curvlinops_plus.risk.preserve import Uncopied, this_thread
from curvlinops_plus.risk.recorded_pass import LayerRead, RecordedPass
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.routes import GatheredRows
from curvlinops_plus.risk.tables import BroadcastUses, TableCall
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
    if weights is None:
        weights = loss_weights(risk) if vectors.backward else LossWeights(risk)
    recorder = Recorder(risk, layers, vectors, weights, repeatable=repeatable)
    draws = Draws(vectors.seed or 0)
    totals = Totals()
    outside_reads: OutsideReads | None = None
    batch: Batch | None = None
    with recorder.hooked():
        try:
            for batch in risk.batches(desc):
                totals.add(recorder.observe(batch, draws, consume))
        except OutsideReads as error:
            # Frames hold contexts of the model's that are open, as of checkpointing.
            outside_reads = error.with_traceback(None)
    try:
        totals = totals.over(risk.processes, outside_reads)
    except OutsideReads as error:
        if error is outside_reads:  # others have been told of it without the batch
            error.batch = batch
        raise
    weights.require(totals)
    return totals


class ModuleHooks(NamedTuple):
    """Hooks of a module: before it runs, if it reads what functions read elsewhere or may change,
    and after.

    Attributes:
        first: Whether the one before comes before others, which are part of what runs again.
    """

    module: nn.Module
    before: Uncopied | None
    after: Uncopied
    first: bool


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
    alone, the model runs under `recording`; then vectors go through a `backward_pass`. `observe`
    does all of it for one batch. Nothing is left on the modules when the context ends, also after
    an exception.

    Args:
        weights: Relative weights of the losses; not needed by who sends vectors of their own.
        own_pass: Whether the passes are made for recording. In those of others nothing is changed
            that shows: where recording would raise, or expand one row for all examples to one for
            each, the rest is left alone. Modes are set by whoever makes them.
        repeatable: Whether two evaluations of the model have to agree; not so in training loops.
        may_learn: Whether other layers can still be taken if this batch shows that these are wrong,
            but not after it.
        params: What the modules have in place of the layers' parameters while they run, by key;
            default: these.
        ignored: Layers whose calls are not recorded.

    Attributes:
        last: What was recorded in the last forward pass.
        reads: What the layers' uses read.
        disabled: Context in which modules that run are not recorded, and their outputs not
            replaced.
        doubt: Why a pass of others was not recorded to its end.
        gathers: Whether it follows rows that are gathered.
        is_open: Whether the context is entered, also where there are no modules to hook.
        restarting: Layers whose modules, run again, begin with what they held before a call. In
            their first one they may have made something of the batch for good; then they don't,
            unless the self-check has found that they change in each call.
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
        self.may_learn = False
        self.ignored = ignored
        self.backward = vectors.backward
        self.example_axis = risk.options.example_axis or {}
        self.disabled = Depth()
        self.is_open = False
        self.restarting: Collection[Layer] = ()
        self._handles: list[Any] = []
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
            elif use.function.is_recurrent:
                self._functions[use.function, frozenset(use.keys.items())] = (index, use)
            else:
                read = (use.function, use.keys.get("weight"), use.keys.get("bias"))
                self._functions[read] = (index, use)
        self._views = ParameterViews({key: params[key] for key in self._function_keys})
        self._sees_functions = bool(self._function_keys) or self.gathers
        self._mode = FunctionCalls(self._function_call) if self._sees_functions else nullcontext()
        self._mode_of_call = Endings()
        # What the modules that run answer for: functions inside of them don't count.
        self._inside: list[set[str]] = []
        #: What modules held when their calls of now began.
        self._starts: dict[ModuleUse, CallStart] = {}
        self._broadcast = BroadcastUses(
            risk.model,
            broadcast,
            params,
            self._views.key,
            self._inside,
            self.backward,
            partial(_resumed, weakref.ref(self)),
        )
        self.doubt: Exception | None = None
        self.last = self._new_pass()
        self._hooks = [
            self._hooks_of(LayerRead(index, use, use.rule))
            for index, use in self._uses
            if use.function is None
        ]

    @property
    def visited(self) -> set[str]:
        """Names of the layers that have seen rows which were gathered."""
        return {self.layers[call.layer].name for call in self.last.calls if call.routed is not None}

    def beside(self, params: Mapping[str, Tensor]) -> Recorder:
        """A recorder of the same layers for another pass meanwhile, with tensors in place of the
        parameters.
        """
        other = Recorder(
            self.risk,
            self.layers,
            self.vectors,
            repeatable=self.repeatable,
            params=params,
            ignored=self.ignored,
        )
        other.restarting = self.restarting
        return other

    # ------------------------------------------------------------------------------------ one batch
    def observe(self, batch: Batch, draws: Draws, consume: Consumer) -> Totals:
        """Run the model on one batch, send vectors back, and pass every layer's `LayerBatch` to
        `consume`.
        """
        with self.recording(batch):
            outputs = self.risk.run(batch)
        self.returned()
        return self.send_back(batch, outputs, draws, consume)

    def send_back(
        self,
        batch: Batch,
        outputs: tuple[Any, Any, Any],
        draws: Draws,
        consume: Consumer,
        keep_graph: bool = False,
        is_checked: bool = False,
    ) -> Totals:
        """Send vectors back from what the model returned in the recorded forward pass.

        Args:
            outputs: Outputs, targets and class axes, as `EmpiricalRisk.run` returns them.
            consume: Called with a `LayerBatch`, once per layer and piece of vectors.
            keep_graph: Keep the graph: somebody else goes back through it afterwards.
            is_checked: Whether the self-check has looked at the batch already.

        Returns:
            The totals of the batch.
        """
        totals, groups = self.vectors_to_send(batch, outputs, draws)
        heads = outputs[0]
        if not is_checked:
            check_batch(self.risk, self, batch, heads)
        back = self.backward_pass(consume, batch)
        for group in groups:
            keep = keep_graph or group is not groups[-1]
            read = [heads[k] for k in group.outputs]
            back.send(read, group.vectors, group.number, back.at_once(group.number), keep)
        if not self.backward:
            back.show_inputs()
        totals.reached = back.reached
        return totals

    def vectors_to_send(
        self, batch: Batch, outputs: tuple[Any, Any, Any], draws: Draws
    ) -> tuple[Totals, list[VectorsToSend]]:
        """The totals of a batch, and what goes back, of which nothing is computed yet.

        Args:
            outputs: As for `send_back`.
        """
        assert self.weights is not None
        risk = self.risk
        heads, targets, class_axes = outputs
        with plain_mode(risk.device.type), self._suspecting_tables():
            detached = [f.detach() for f in heads]
            # Streams don't add the values up.
            terms = risk.losses.terms((detached, targets, class_axes), batch, values=self.own_pass)
            if self.own_pass:
                risk.losses.require_targets(terms)
        totals = terms.totals
        totals.called = {*self.last.by_layer}
        if not self.backward:
            return totals, []
        numbers = risk.processes.numbers(draws.before + batch.first, batch.num_examples)
        draws.of_examples(numbers, risk.device)
        factors = self.weights.factors(totals, self.vectors.of_loss)
        groups = vectors_to_send(risk, self.vectors, heads, terms, class_axes, draws, factors)
        return totals, groups

    def backward_pass(self, consume: Consumer, batch: Batch | None = None) -> BackwardPass:
        """What sends vectors through the last pass.

        Args:
            consume: As for `BackwardPass`.
            batch: That the pass was made on, for its mask and weights; None if none count.
        """
        changing = self.risk.checked.changing
        for call in self.last.calls:
            call.restarts = call.use.name in changing or self.layers[call.layer] in self.restarting
        watched = partial(entered, self._mode) if self._sees_functions else nullcontext
        weight = None if batch is None else batch.weight
        mask = None
        if batch is not None and self.risk.options.mask is not None:
            mask = _read_mask(self.risk, batch)
        return BackwardPass(
            self.last, self.layers, self.risk.device, self.disabled, watched, consume, mask, weight
        )

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
        for module, before, after, first in self._hooks:
            if before is not None:
                add(module.register_forward_pre_hook(before, prepend=first))
            add(module.register_forward_hook(after, prepend=True, with_kwargs=True))

    def _hooks_of(self, read: LayerRead) -> ModuleHooks:
        """The hooks of the module that a use is."""
        use = read.use
        places = use.places(use.module)
        holders = [(module, name, self._params[key]) for module, name, key in places]
        answers_for = self._function_keys & {*use.keys.values()}
        changing = None
        # Of a model in evaluation mode two evaluations agree.
        may_matter = use.module.training or not self.repeatable
        if may_matter and read.rule.replays and may_change(use.module):
            changing = use
        before = None
        if answers_for or changing is not None:
            before = Uncopied(self._enter, changing, holders, answers_for)
        after = Uncopied(self._module_call, read, holders, bool(answers_for))
        return ModuleHooks(use.module, before, after, changing is not None)

    def remove(self) -> None:
        """Take the hooks away, and forget the batch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.is_open = False
        self._forget()

    @contextmanager
    def recording(self, batch: Batch) -> Iterator[None]:
        """One forward pass of the model happens in here, on this batch; the one before is
        forgotten.
        """
        with Endings() as endings:
            endings.surely(self.stop)
            self.start(batch)
            with self._suspecting_tables():
                yield

    @contextmanager
    def _suspecting_tables(self) -> Iterator[None]:
        """Context in which an error may come from one row for all examples, which was expanded: of
        the model, or of the loss, which gets outputs of another shape.
        """
        try:
            yield
        except OutsideReads:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            refusal = self.last.refusal_of_one_row(f"which does not go on from there: {error}")
            if refusal is not None:
                raise refusal from error
            raise

    def start(self, batch: Batch) -> None:
        """Begin to record a forward pass on a batch; the one before is forgotten."""
        self._forget()
        self.last = self._new_pass(batch)
        self.disabled.depth = 0  # an interrupt may have left it
        self._thread = this_thread()
        self._broadcast.begin()
        if self._sees_functions:
            self._mode_of_call.enter_context(self._mode)

    def returned(self) -> None:
        """The model has returned: refuse layers of which all calls ran without a graph."""
        refusal = self.last.refusal_of_constants()
        if refusal is not None and self.doubt is None:
            self._failed(*refusal)

    def stop(self) -> None:
        """The forward pass is over."""
        self._mode_of_call.close()
        self.last.is_over = True
        self._inside.clear()
        self._starts.clear()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Context, inside of `disabled`, in which modules and functions run as in the last pass."""
        depth = self.disabled.depth
        self.disabled.depth = 0
        try:
            with entered(self._mode) if self._sees_functions else nullcontext():
                yield
        finally:
            self.disabled.depth = depth

    def _new_pass(self, batch: Batch | None = None) -> RecordedPass:
        rows = None
        if self.gathers and batch is not None and batch.num_examples:
            rows = GatheredRows(batch.num_examples, batch.example_of_rows)
        num_examples = 0 if batch is None else batch.num_examples
        in_lists = batch is not None and batch.in_lists
        return RecordedPass(num_examples, in_lists, self.backward, self.own_pass, rows)

    def _forget(self) -> None:
        """The last pass is over, and forgotten."""
        self.last.forget_graph()
        self.last = self._new_pass()
        self.doubt = None
        self._broadcast.forget()

    # ---------------------------------------------------------------------------------------- hooks
    def _listens(self) -> bool:
        """Whether calls of now are those of the recorded pass: in its thread, or in a backward
        pass, where checkpointing calls modules once more. Between passes data may call the model.
        """
        own = not self.last.is_over and this_thread() == self._thread
        return own or torch._C._current_graph_task_id() != -1

    def _enter(
        self,
        changing: ModuleUse | None,
        holders: Sequence[Any],
        answers_for: set[str],
        module: nn.Module,
        args: Any,
    ) -> None:
        """A module begins to run that reads parameters which functions read outside of it, or that
        may change in its call.
        """
        if self.disabled.depth or not self._listens():
            return
        if answers_for:
            self._inside.append(answers_for if _holds(holders) else set())
        if changing is not None and not self.last.is_over:
            self._starts[changing] = CallStart(module)

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
        start = self._starts.pop(read.use, None)
        # With other tensors in place, by functional_call, it is no call of the layer.
        if self.doubt is not None or not _holds(holders):
            return None
        try:
            axis = self.example_axis.get(read.use.name, 0)
            return self.last.note([read], (args, kwargs), output, axis, start=start)
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
        recurrent = recurrent_read(function, args, kwargs)
        if recurrent is not None:
            return self._recurrent_call(recurrent, function, args, kwargs)
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

    def _recurrent_call(
        self, read: RecurrentRead, function: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """A function that runs a recurrent layer."""
        output = self._called(function, args, kwargs).output
        keys = {local: self._views.whole(weight) for local, weight in read.weights.items()}
        is_answered = any(not inside.isdisjoint(keys.values()) for inside in self._inside)
        function_read = (Function(read.name, read.options), frozenset(keys.items()))
        if is_answered or function_read not in self._functions:
            return output
        index, use = self._functions[function_read]
        inputs: tuple[Any, ...] = (read.x, read.states)
        packed = None
        if read.batch_sizes is not None:
            packed = self.last.packed.rows(read.batch_sizes, self.last.num_examples)
            if packed is None:
                return output
            states = [packed.unsorted(t.detach(), 1) for t in read.states]
            inputs = (packed.padded(read.x.detach()), states, packed.lengths)
        return self._recorded([LayerRead(index, use, use.rule)], inputs, output, 0, None, packed)

    def _called(
        self, function: Any, args: Any, kwargs: Mapping[str, Any], axis: int | None = None
    ) -> TableCall:
        """What a function returned, and the tables that it broadcasts, along an axis if one is
        given.
        """
        rows = self.last.rows
        number = self.last.num_examples
        call = self._broadcast.call(function, args, kwargs, number, rows, axis)
        if rows is None:
            self.last.packed.follow(function, args, kwargs, call.output)
        self._views.select(function, args, call.output)
        if call.outside is not None:
            self._failed(call.outside.use, call.outside.error)
        return call

    def _recorded(
        self, reads: Sequence[LayerRead], inputs: tuple[Tensor, ...], output: Any, *axes: Any
    ) -> Any:
        """Record a function call; what the model goes on with."""
        try:
            replaced = self.last.note(reads, (inputs, {}), output, *axes)
        except Exception as error:
            self._failed(reads[0].use, error)
            return output
        if replaced is None:
            return output
        if self.last.rows is not None:
            for t, of in zip(tree_leaves(replaced), tree_leaves(output)):
                self.last.rows.same(t, of)
        return replaced

    def _failed(self, use: ModuleUse, error: Exception) -> None:
        if not self.own_pass:
            # The rest of a pass of others is left alone; frames hold what it has computed.
            self.doubt = error.with_traceback(None)
            return
        if isinstance(error, (UnsupportedError, ValueError)):
            raise error
        # Inside of `vmap`, or with sparse tensors: what is around it may be run for each example.
        message = f"{use.title} can't be recorded: {error}"
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


def _resumed(recorder: weakref.ref[Recorder]) -> AbstractContextManager[None]:
    """The context of a recorder, if it is still there; tables, which it holds, don't hold it."""
    owner = recorder()
    return nullcontext() if owner is None else owner.resumed()


def follows_rows(risk: EmpiricalRisk) -> bool:
    """Whether passes follow rows that are gathered, or ragged."""
    is_gathered = risk.reads is not None and risk.reads.gathered
    return is_gathered or risk.options.example_of_rows is not None


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
