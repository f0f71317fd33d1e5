"""What is noted in a recorded forward pass: the calls of layers, with what they have read.

A call's inputs are detached, and the gradient edge of its output is kept. Two details without which
results would be silently wrong:

* `nn.Linear` on [N, S, d] returns a *view*. An in-place activation behind it rewrites the view's
  history, and the edge noted before is lost. Such outputs, and those of frozen layers that depend
  on nothing differentiable, are replaced by an alias that autograd does not treat as a view.
  Nothing is copied, values are bit-identical.
* A pass is over for its calls, not for their outputs: activation checkpointing runs layers once
  more in the backward pass, and must see the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.broadcast import BroadcastRule
from curvlinops_plus.layer.example_lists import has_lists
from curvlinops_plus.layer.kept import CallStart
from curvlinops_plus.risk.calls import Output, OutsideReads, RecordedCall, title
from curvlinops_plus.risk.layers import ModuleUse
from curvlinops_plus.risk.packed import PackedOrders, PackedRows
from curvlinops_plus.risk.routes import GatheredRows, Origins, RoutedRows


class LayerRead(NamedTuple):
    """What a call is to one layer: the index of the layer, the use, and its rule.

    Attributes:
        matrices: Of a stack: the number of the matrix that all rows meet, or that of each row.
    """

    layer: int
    use: ModuleUse
    rule: Any
    matrices: int | Tensor | None = None


class RecordedPass:
    """One forward pass, and what it has shown of the layers.

    Args:
        num_examples: N of its batch; 0 before there is one.
        in_lists: Whether they are entries of lists.
        backward: Whether vectors go back through it.
        own_pass: Whether it is made for recording; see `Recorder`.
        rows: Follows rows that are gathered; None if nobody does.

    Attributes:
        packed: How sequences were sorted before they were packed.
        is_over: Whether calls are of layers that run once more, in a backward pass.
        calls: What was recorded.
        kinds: What was called: names, whether one row was returned for all examples, axes of the
            inputs.
        dtypes: Those of what the calls returned.
        numbers: How many numbers they returned.
        without_graph: Layers that ran under `torch.no_grad()`, of which no call is recorded, by
            index.
        has_graph: Whether the pass began with gradients enabled.
    """

    def __init__(
        self,
        num_examples: int,
        in_lists: bool = False,
        backward: bool = False,
        own_pass: bool = True,
        rows: GatheredRows | None = None,
    ) -> None:
        self.num_examples = num_examples
        self.in_lists = in_lists
        self.backward = backward
        self.own_pass = own_pass
        self.rows = rows
        self.packed = PackedOrders() if rows is None else rows.packed
        self.is_over = not num_examples
        self.calls: list[RecordedCall] = []
        self.kinds: set[Any] = set()
        self.dtypes: set[torch.dtype] = set()
        self.numbers = 0
        self.without_graph: dict[int, ModuleUse] = {}
        self.has_graph = torch.is_grad_enabled()

    @property
    def by_layer(self) -> dict[int, list[RecordedCall]]:
        """Index of a layer to its calls."""
        calls: dict[int, list[RecordedCall]] = {}
        for call in self.calls:
            calls.setdefault(call.layer, []).append(call)
        return calls

    @property
    def edges(self) -> list[Any]:
        """Where gradients arrive, of all calls."""
        return [output.edge for call in self.calls for output in call.outputs]

    @property
    def outlives_graph(self) -> bool:
        """Whether a backward pass that frees its graph takes that of a table before the layer has
        all of its gradients, which come from several calls.
        """
        for calls in self.by_layer.values():
            for call in calls if len(calls) > 1 else ():
                rule = call.rule
                if isinstance(rule, BroadcastRule) and any(t.is_computed for t in rule.tables):
                    return True
        return False

    def refusal_of_constants(self) -> tuple[ModuleUse, UnsupportedError] | None:
        """A layer that ran under `torch.no_grad()` alone, and what to raise; None if there is none.

        Beside calls with a graph, as where a model feeds a first result back into itself, such
        calls add nothing.
        """
        if not self.without_graph:
            return None
        with_graph = {call.layer for call in self.calls}
        for index, use in self.without_graph.items():
            if index not in with_graph:
                keys = list(use.keys.values())
                message = (
                    f"{title(use.name)} ran under torch.no_grad(). If this is activation "
                    "checkpointing, pass use_reentrant=False; if it is a frozen part of the model, "
                    f"leave its parameters {keys} out of `params`; if a solver goes back by the "
                    "adjoint method, take the one that is differentiated as it is, as `odeint` "
                    "instead of `odeint_adjoint`."
                )
                if use.function is not None:  # of an autograd function, whose module tells more
                    return use, OutsideReads(message, keys)
                # Without keys: of what an autograd function gives gradients, the graph tells.
                kind = OutsideReads if self.has_graph else UnsupportedError
                return use, kind(message)
        return None

    def forget_graph(self) -> None:
        """Calls may be kept for another sweep, but not their graph."""
        for call in self.calls:
            for output in call.outputs:
                output.edge = None

    def note(
        self,
        reads: Sequence[LayerRead],
        inputs: Any,
        output: Any,
        axis: int,
        fold: int | None = None,
        packed: PackedRows | None = None,
        start: CallStart | None = None,
    ) -> Any:
        """Record a call for one layer, or for several that read different parameters in it.

        Args:
            inputs: Its arguments and keywords.
            axis: The axis of inputs and outputs that carries the examples.
            fold: Number of examples if the axis carries positions and, inside them, examples.
            packed: Of packed sequences: the rows of the first output; the inputs are padded.
            start: What the module held before.

        Returns:
            What the model goes on with instead of the output; None for the output itself.
        """
        _, use, rule, _ = reads[0]
        if self.backward and not torch.is_grad_enabled():
            # No gradient arrives: its parameters are constants in this call.
            self.without_graph.update({read.layer: read.use for read in reads})
            return None
        leaves, structure = [output], None
        if not isinstance(output, Tensor):
            leaves, structure = tree_flatten(output)
        places = self._places_of_outputs(use, rule, inputs, output, leaves)
        routed = None
        axes = [axis]
        is_squeezed = packed is None and self._is_squeezed(reads[0], inputs)
        if packed is not None:
            axes = [0, *[1] * (len(places) - 1)]
        elif fold is None and not is_squeezed:
            routed = self._routed(reads[0], inputs, leaves[places[0]], axis)
            axes = rule.axes(use.module, axis, [leaves[k] for k in places], False)
        expanded = False
        outputs = []
        for k, on in zip(places, axes, strict=True):
            t = leaves[k]
            # What a function has written into, the model goes on with, whatever is returned.
            is_input = use.function is not None and any(t is x for x in inputs[0])
            if self.backward and not (is_input and t.requires_grad):
                of_function = use.function is not None and not use.function.is_recurrent
                is_known = isinstance(rule, AffineRule) or of_function
                t = _with_edge(t, is_known, len(places) > 1)
            # One row for all examples, as of position embeddings.
            is_row = t.ndim > on and t.shape[on] == 1 < self.num_examples
            if is_row and fold is None and routed is None:
                t = self._row_per_example(use, t, on)
                expanded = True
            leaves[k] = t
            if not self.is_over:
                outputs.append(self._output(use, t, on, fold, routed, packed, is_squeezed))
        if not self.is_over:
            for read in reads:
                if routed is None:
                    call = self._call(read, inputs, outputs, axis, expanded)
                else:
                    call = self._routed_call(read, inputs, outputs, routed)
                call.single = structure is None
                call.start = start
                self.calls.append(call)
        if not (self.backward or expanded):
            return None
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)

    def _places_of_outputs(
        self, use: ModuleUse, rule: Any, inputs: Any, output: Any, leaves: Sequence[Any]
    ) -> list[int]:
        """Which leaves of an output are tensors that gradients arrive at."""
        places = []
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                places.append(k)
        is_packed = False
        if not isinstance(output, Tensor):
            args, kwargs = inputs
            is_packed = any(isinstance(t, PackedSequence) for t in (*args, *kwargs.values()))
        is_one = len(places) == 1 or not isinstance(rule, AffineRule)
        if not places or is_packed or not is_one:
            kind = getattr(output, "dtype", None) or type(output).__name__
            raise self._not_by_example(use, f"returned a {kind}")
        return places

    def _is_squeezed(self, read: LayerRead, inputs: Any) -> bool:
        """Whether the input of a call is that of a single example, without an axis for it."""
        if self.num_examples != 1 or not isinstance(read.rule, AffineRule):
            return False
        if read.use.function is not None:
            return False
        x = read.rule.input_of(read.use.module, *inputs)
        return read.rule.lacks_examples(read.use.module, x)

    def _output(
        self,
        use: ModuleUse,
        t: Tensor,
        axis: int,
        fold: int | None,
        routed: RoutedRows | None,
        packed: PackedRows | None,
        is_squeezed: bool,
    ) -> Output:
        """An output that gradients arrive at, whose rows belong to examples.

        Raises:
            OutsideReads: If they don't.
        """
        shape = torch.Size((1, *t.shape)) if is_squeezed else t.shape
        rows = fold or (shape[axis] if len(shape) > axis else 0)
        rows = rows if packed is None else packed.num_sequences
        by_example = rows > 0 and rows % self.num_examples == 0
        if routed is not None:
            by_example = t.shape[: routed.axes].numel() == len(routed.order)
        # On another axis than the first there may be no positions beside the examples.
        if not by_example or (axis and rows != self.num_examples and use.function is None):
            raise self._not_by_example(use, f"returned {list(t.shape)}")
        self.dtypes.add(t.dtype)
        self.numbers += t.numel()
        edge = get_gradient_edge(t) if self.backward else None
        return Output(shape, t.dtype, t.device, axis, fold, edge, routed, is_squeezed, packed)

    def _routed(self, read: LayerRead, inputs: Any, output: Tensor, axis: int) -> RoutedRows | None:
        """To which examples the rows of a call belong that were gathered or are ragged, or of which
        each meets a matrix of its own; None of others.
        """
        rows = self.rows
        matrices = read.matrices
        if rows is None and not isinstance(matrices, Tensor):
            return None
        is_affine = isinstance(read.rule, AffineRule)
        if axis and not is_affine:
            return None
        x = read.rule.input_of(read.use.module, *inputs) if is_affine else output
        places = None if rows is None else rows.places(x)
        if not isinstance(matrices, Tensor):
            assert rows is not None
            if places is None and not axis and not rows.are_known(x):
                raise self._not_by_example(read.use, f"got {list(x.shape)}")
            # Others treat rows one by one, if examples don't have as many.
            if places is None or not (is_affine or rows.moves_rows(x)):
                return None
            return RoutedRows.of(places, self.num_examples)
        axes = matrices.ndim
        if places is None:
            # The rows of all examples, once or for each matrix.
            number = x.shape[axes - 1]
            if number % self.num_examples:
                raise self._not_by_example(read.use, f"got {list(x.shape)}")
            index = torch.arange(number, device=x.device).expand(matrices.shape)
            places = Origins(index.flatten(), number)
        return replace(RoutedRows.of(places, self.num_examples), axes=axes)

    def _routed_call(
        self, read: LayerRead, inputs: Any, outputs: Sequence[Output], routed: RoutedRows
    ) -> RecordedCall:
        """A call with gathered rows, sorted by examples.

        Which layers see some differs from batch to batch, so they are of no `kinds`.
        """
        index, use, rule, matrices = read
        if isinstance(rule, AffineRule):
            x = rule.input_of(use.module, *inputs).detach()
            call = RecordedCall(use, rule, (routed.sorted(x),), {}, None, index, False, outputs)
        else:
            leaves, structure = tree_flatten((tuple(inputs[0]), dict(inputs[1])))
            in_axes: list[int | None] = []
            for k, t in enumerate(leaves):
                if not isinstance(t, Tensor):
                    continue
                has_rows = t.ndim > 0 and len(t) == len(routed.order)
                leaves[k] = routed.sorted(t.detach()) if has_rows else t.detach()
                in_axes.append(0 if has_rows else None)
            args, kwargs = tree_unflatten(leaves, structure)
            call = RecordedCall(use, rule, args, kwargs, in_axes, index, False, outputs)
        if isinstance(matrices, Tensor):
            matrices = routed.sorted(matrices)
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
        expanded: bool,
    ) -> RecordedCall:
        """A call with its inputs, the examples first.

        Raises:
            OutsideReads: If the axes taken for the examples' don't carry them; the module around
                may tell them apart.
        """
        index, use, rule, matrices = read
        fold = outputs[0].fold
        rows = outputs[0].rows
        for output in outputs:
            if output.rows != rows:
                raise self._not_by_example(use, f"returned {list(output.shape)}")
        if isinstance(rule, AffineRule):  # it reads one tensor; the rest is not kept alive
            read_tensor = rule.input_of(use.module, *inputs).detach()
            x = read_tensor[None] if outputs[0].is_squeezed else read_tensor
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
        arguments = dict(enumerate(inputs[0])) | inputs[1]
        in_lists = self.in_lists and has_lists(arguments, self.num_examples)
        for k, t, on in zip(places, tensors, axes, strict=True):
            if in_lists:
                leaves[k] = t
                in_axes.append(None)
                continue
            leaves[k], moved_from = self._examples_first(use, t, on, fold, expanded)
            by_example = moved_from or (t.ndim > 0 and len(leaves[k]) == rows)
            in_axes.append(moved_from if by_example else None)
        args, kwargs = tree_unflatten(leaves, structure)
        call = RecordedCall(use, rule, args, kwargs, in_axes, index, expanded, outputs)
        call.note_versions(tensors)
        of_inputs = ("lists",) if in_lists else in_axes
        kind = (*of_inputs, outputs[0].axis, len(outputs[0].shape))
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
            f"{use.title} {fact} in a batch of {self.num_examples} examples: expected "
            "floating-point numbers, whose first axis carries the examples, or a multiple of "
            f"them. If another does, pass EmpiricalRisk(..., example_axis={{{use.name!r}: axis}}); "
            "if examples have different numbers of rows, example_of_rows=. "
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


def _refusal_of_one_row(use: ModuleUse, num_examples: int, why: str) -> OutsideReads:
    return OutsideReads(
        f"{use.title} returned one row for all {num_examples} examples, which was expanded to one "
        f"row for each, so that each has a gradient of its own; {why}. If the layer makes weights "
        "or a table for all examples, leave its "
        f"parameters {list(use.keys.values())} out of `params`; if a row, expand it to the batch "
        "in the model.",
        use.keys.values(),
    )
