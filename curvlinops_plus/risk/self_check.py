"""Comparing, on a few examples of a batch, what layer rules make of recorded calls with autograd.

Nobody has to ask for it: the first batch in which a layer is called is looked at, see `check_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.risk.determinism import training_modules
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer, title
from curvlinops_plus.risk.parameter_reads import OutsideReads
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.recorded_call import RecordedCall
from curvlinops_plus.risk.replaced_parameters import copied_buffers
from curvlinops_plus.risk.risk import EmpiricalRisk

__all__ = ["check_batch", "refuse_expanded_outputs"]

# How many examples are looked at.
_FEW = 3
# Batches of so many shapes have their outputs compared.
_SHAPES = 8
# Largest relative difference that passes as rounding, by bytes of a number.
_TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-8}


def check_batch(
    risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
) -> None:
    """Look at a batch in which a layer is called for the first time, or whose shape is new; else do nothing.

    A few of its examples are run by themselves, and random vectors for single ones are sent back:

    * their outputs are their part of the batch's outputs;
    * a vector for one example reaches no other example's rows in any layer;
    * the gradient that each layer's rule makes of its recorded calls is autograd's gradient of the parameters.

    The whole batch stands in for the few examples where they can't be told apart in its input.

    Args:
        risk: Model, losses and options.
        recorder: Which recorded the batch.
        batch: The batch.
        outputs: What the losses read in it.
        repeatable: Whether two evaluations have to agree; not so in training loops.

    Raises:
        UnsupportedError: Naming the layer, and both numbers.
        RuntimeError: If two evaluations of the model disagree.

    Warns:
        CurvatureWarning: In training loops, if there is batch norm in training mode, which mixes examples.

    Cost: a forward and two backward passes over three examples, and their gradients of the parameters.
    """
    if not risk.options.check:
        return
    N, checked = batch.num_examples, risk.checked
    unchecked = {_name(recorded, N) for recorded in recorder.calls} - checked.layers if recorder.backward else set()
    shape = (N, *(t.shape for t in tree_leaves(batch.X) if isinstance(t, Tensor))) if repeatable else None
    # All of a small batch would be a few examples of itself, which tells nothing but that the model is not random.
    new_shape = repeatable and shape not in checked.shapes and len(checked.shapes) < _SHAPES
    new_shape = new_shape and (N > _FEW or not checked.shapes)
    if not unchecked and not new_shape:
        return
    check = _Check(risk, recorder, batch, outputs, repeatable)
    with torch.random.fork_rng(check.devices), eager():
        check.run(bool(unchecked))
    checked.layers |= unchecked
    checked.shapes.add(shape)


def _name(recorded: RecordedCall, N: int) -> tuple[str, bool, bool]:
    """What has to be looked at once: a module, if it gives a row for all examples, and if there are several."""
    return recorded.call.use.name, recorded.expanded, N > 1


class _Check:
    """The look at one batch; arguments as for `check_batch`."""

    def __init__(
        self, risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
    ) -> None:
        self.risk, self.recorder, self.batch, self.repeatable = risk, recorder, batch, repeatable
        self.outputs = [f.detach() for f in outputs]
        self.devices = [risk.device] if risk.device.type == "cuda" else []
        kind = nn.modules.batchnorm._BatchNorm
        #: Modules that mix examples, and are known for it.
        self.mixing = [name for name, m in risk.model.named_modules() if isinstance(m, kind) and m.training]

    def run(self, backward: bool) -> None:
        """Compare a few examples, or all if the model can't run a few.

        Args:
            backward: Compare rows and rules too.
        """
        if self.mixing:
            self._report_batch_norm()
        N = self.batch.num_examples
        examples = [0, N // 2, N - 1]
        few = take_examples(self.batch, examples) if N > _FEW and self._are_examples_clear() else None
        if few is None or not self._look(few, examples, backward):
            self._look(self.batch, list(range(N)), backward)

    def _are_examples_clear(self) -> bool:
        """Whether it is clear for each tensor of the input if it carries examples, and on which axis."""
        N, elsewhere = self.batch.num_examples, bool(self.risk.options.example_axis)
        if self.risk.options.example_of_row:  # of a graph, say, a tensor's rows are not examples
            return False
        for t in tree_leaves(self.batch.X):
            if isinstance(t, Tensor) and t.ndim:
                axes = t.shape[:2].count(N)
                # A multiple of N may be examples times positions, or a table that all examples share.
                if (axes == 0 and t.shape[0] % N == 0) or (axes == 2 and elsewhere):
                    return False
        return True

    def _report_batch_norm(self) -> None:
        said = (
            f"{self.mixing} are batch norm in training mode: the examples of a batch depend on each other, and what "
            "layers before them contribute through the batch's statistics"
        )
        if self.repeatable:
            raise UnsupportedError(
                f"{said} would be left out. Call model.eval() first, or leave it out with "
                "EmpiricalRisk(..., check=False)."
            )
        warn(f"{said} is left out. Call model.eval() first.", CurvatureWarning, stacklevel=2)

    def _look(self, few: Batch, examples: list[int], backward: bool) -> bool:
        """Run `few`, which are these examples of the batch, and compare; False if the model can't run them."""
        risk, whole = self.risk, self.recorder
        with whole.disabled():
            if not backward:
                with torch.no_grad():
                    found = self._outputs_of(few, risk.model)
                return found is not None and self._compare_outputs(found, few, examples)
            # Parameters, as modules may ask for them by that type.
            free: dict[str, Tensor] = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
            axes, rows = risk.options.example_axis or {}, risk.options.example_of_row
            own = Recorder(whole.layers, axes, True, whole.intercept, free, rows)

            def send(model: nn.Module) -> tuple[Sequence[Tensor], _Sent] | None:
                with own:
                    # Left again at once, so that a second run draws the same numbers.
                    with torch.random.fork_rng(self.devices), own.recording(few.num_examples, (few.X, few.y)):
                        found = self._outputs_of(few, model)
                    if found is not None and (expanded := [c for c in own.calls if c.expanded]):
                        with own.disabled(), torch.no_grad():
                            _compare_expanded(expanded[0], found, self._outputs_of(few, model) or ())
                    return None if found is None else (found, _send(own, [f for f in found if f.requires_grad], free))

            with torch.enable_grad(), copied_buffers(risk.model):
                found_and_sent = risk.at(free, send)
            if found_and_sent is None or not self._compare_outputs(found_and_sent[0], few, examples):
                return False
            # Rules look at the modules, which have their own parameters again.
            with torch.no_grad(), torch.autocast(risk.device.type, enabled=False):
                found_and_sent[1].compare(own.layers, mixing=bool(self.mixing))
        return True

    def _outputs_of(self, few: Batch, model: nn.Module) -> Sequence[Tensor] | None:
        """What the losses read; None if the model needs the whole batch, as the nodes of a graph do."""
        try:
            return self.risk.run(few, model)[0]
        except Exception:
            if few is self.batch:
                raise
            return None

    def _compare_outputs(self, found: Sequence[Tensor], few: Batch, examples: list[int]) -> bool:
        """Compare outputs of a few examples with their part of the batch's; False if they have another shape."""
        if not self.repeatable:
            return True
        for f, alone in zip(self.outputs, found, strict=True):
            part = _rows_of(f, examples, self.batch.num_examples)
            if part.shape != alone.shape:
                return False
            away = _difference(alone.detach(), part)
            if away > _TOLERANCE[part.element_size()]:
                raise self._why_different(away, few, examples)
        return True

    def _why_different(self, away: float, few: Batch, examples: list[int]) -> Exception:
        """The model is random, or its examples depend on each other."""
        N, run = self.batch.num_examples, self.risk.run
        with torch.no_grad(), self.recorder.disabled():
            first, second = (_outputs_of_modules(self.risk.model, lambda: run(self.batch)) for _ in range(2))
            alone = _outputs_of_modules(self.risk.model, lambda: run(few))
        if where := _first_different(self.risk.model, first, second):
            random = training_modules(self.risk.model)
            cause = f"These modules are in training mode: {random}; call model.eval()." if random else ""
            return RuntimeError(
                f"Two evaluations of the model on the same examples differ, by {away:.1e} of the output's norm, first "
                f"in {where}. {cause or 'Does it draw random numbers, or count its calls?'} "
                "EmpiricalRisk(..., check=False) takes them as they come."
            )
        parts = [(name, [_rows_of(t, examples, N) for t in tensors]) for name, tensors in first]
        where = _first_different(self.risk.model, parts, alone)
        return UnsupportedError(
            f"The model's outputs for {len(examples)} of {N} examples by themselves differ from their part of the "
            f"batch's, by {away:.1e} of the norm{f', first in {where}' if where else ''}: the examples of a batch "
            "depend on each other, so they have no gradients of their own. (Or a tensor of the input has as many rows "
            "as there are examples, and is not one of rows for examples.) EmpiricalRisk(..., check=False) goes on "
            "without this check."
        )


@dataclass
class _Sent:
    """What vectors for single examples left behind.

    Attributes:
        calls: The recorded calls.
        first: What a vector for the first example left at their slots, by identity.
        grads: The same of a vector for the example in the middle.
        expected: Autograd's gradients of parameters for the latter, by key.
        num_examples: N.
    """

    calls: list[RecordedCall]
    first: dict[int, Tensor]
    grads: dict[int, Tensor]
    expected: dict[str, Tensor]
    num_examples: int

    def compare(self, layers: Sequence[Layer], mixing: bool) -> None:
        """Compare rows and rules.

        Args:
            layers: The layers.
            mixing: Whether rows of other examples may be reached.
        """
        if not all(math.isfinite(g.sum()) for g in self.grads.values()):
            return  # statistics that are not finite name layer and batch
        if not mixing and self.num_examples > 1:
            _compare_rows(self, self.first, 0)
            _compare_rows(self, self.grads, self.num_examples // 2)
        for index, layer in enumerate(layers):
            _compare_rule(self, layer, [recorded for recorded in self.calls if recorded.layer == index], mixing)


def _send(recorder: Recorder, outputs: Sequence[Tensor], free: Mapping[str, Tensor]) -> _Sent:
    """Send a random vector for the first example back, and one for that in the middle.

    Args:
        recorder: Which recorded the forward pass.
        outputs: What it returned, with a graph.
        free: Key to the tensor that stood for the parameter in it.
    """
    N = recorder.num_examples
    if not outputs:
        return _Sent([], {}, {}, {}, N)
    recorder.require_unchanged()
    recorder.sources(outputs)  # refuses parameters that something else reads
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    edges = [slot.edge for slot in slots]

    def send(n: int, inputs: list[Any], retain_graph: bool = False) -> tuple[Tensor | None, ...]:
        vectors = [_vector_for(f, n, N) for f in outputs]
        return torch.autograd.grad(outputs, inputs, vectors, retain_graph=retain_graph, allow_unused=True)

    # Two of them: examples that change places may leave one where it is.
    first = send(0, edges, retain_graph=True) if N > 1 else ()
    found = send(N // 2, [*edges, *free.values()])
    grads, before = ({id(s): g.detach() for s, g in zip(slots, gs) if g is not None} for gs in (found, first))
    expected = {key: g for key, g in zip(free, found[len(slots) :]) if g is not None}
    return _Sent(recorder.calls, before, grads, expected, N)


def _compare_rows(sent: _Sent, grads: Mapping[int, Tensor], n: int) -> None:
    """Refuse layers in which a vector for example `n`, which left these gradients, reaches rows of other examples."""
    N = sent.num_examples
    for recorded in sent.calls:
        for slot in recorded.slots:
            g = grads.get(id(slot))
            if g is None:
                continue
            rows = slot.arrange(g).unflatten(0, (N, -1))
            if not bool(rows[:n].any() | rows[n + 1 :].any()):
                continue
            use = recorded.call.use
            if recorded.expanded:
                raise _more_than_broadcast(recorded, N)
            raise UnsupportedError(
                f"{title(use.name)} ({type(use.owner).__name__}) returned shape {list(slot.out.shape)} for {N} "
                f"examples, but axis {slot.axis} does not carry the examples (is it a position embedding, or "
                f"time-major?), or the model mixes examples: a vector for example {n} has a gradient of norm "
                f"{float(rows[n].norm()):.3g} in its rows, and of {float(_others(rows, n).norm()):.3g} in others. "
                f"Say EmpiricalRisk(..., example_axis={{{use.name!r}: axis}}), expand the layer's input to the batch "
                "in the model (embedding(places[None]) of positions), or leave its parameters out of `params`."
            )


def _compare_expanded(expanded: RecordedCall, found: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Refuse a row for all examples that the model takes for something else when it is a row for each."""
    for f, as_it_is in zip(found, plain, strict=True):
        if f.shape != as_it_is.shape or _difference(f.detach(), as_it_is) > _TOLERANCE[f.element_size()]:
            raise _more_than_broadcast(expanded, len(expanded.slots[0].out))


def refuse_expanded_outputs(risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor]) -> None:
    """Refuse a row for all examples that gave the model's outputs another shape when it was expanded.

    Args:
        risk: Model, losses and options.
        recorder: Which recorded the batch.
        batch: The batch.
        outputs: What the model returned, and the losses can't read.

    Raises:
        UnsupportedError: Naming the layer.

    Cost: a forward pass, if there is such a row.
    """
    expanded = [recorded for recorded in recorder.calls if recorded.expanded]
    if expanded:
        with recorder.disabled(), torch.no_grad(), eager():
            plain = risk.run(batch)[0]
        if any(f.shape != as_it_is.shape for f, as_it_is in zip(outputs, plain, strict=True)):
            raise _more_than_broadcast(expanded[0], batch.num_examples)


def _more_than_broadcast(recorded: RecordedCall, N: int) -> UnsupportedError:
    use = recorded.call.use
    return UnsupportedError(
        f"{title(use.name)} ({type(use.owner).__name__}) returns one row for all {N} examples of a batch, and the "
        "model does more with it than broadcast it (it picks a row, reduces over the first axis, or adds a table "
        "[T, d] of one position to [N, T, d]). Its gradient can't be told apart by examples: leave its parameters out "
        "of `params`, or expand its output to the batch in the model, as with table[None]."
    )


def _compare_rule(sent: _Sent, layer: Layer, calls: Sequence[RecordedCall], mixing: bool) -> None:
    """Refuse a layer whose rule makes another gradient of its recorded calls than autograd."""
    N, n, expected = sent.num_examples, sent.num_examples // 2, sent.expected
    for recorded in calls:
        recorded.set_gradients(sent.grads, 1, batched=False)
    batch = LayerBatch(layer, [recorded.call for recorded in calls], N)
    made = _summed_gradients(batch if mixing else batch.examples(n, n + 1)) if calls else {}
    for key, p in layer.params.items():
        ours = made[key] if key in made else torch.zeros_like(p)
        theirs = expected[key] if key in expected else torch.zeros_like(p)
        kinds = [*(slot.out.dtype for recorded in calls for slot in recorded.slots), p.dtype]
        away = torch.dist(ours, theirs)
        if not bool(away <= _TOLERANCE[min(kind.itemsize for kind in kinds)] * theirs.norm()):
            rounding = 100 * max(torch.finfo(kind).eps for kind in kinds) * _size(calls)
            if not float(away) <= rounding:
                raise _wrong_rule(layer, key, ours, theirs, bool(calls))
    for recorded in calls:
        recorded.call.grads = None


def _summed_gradients(batch: LayerBatch) -> dict[str, Tensor]:
    """Gradients of a layer's parameters, by key: those of each example, added up."""
    found: dict[str, Tensor] = {}
    for group in batch.layer.groups:
        J = batch.restrict(group).per_example_grads
        J = J.flatten() if J.shape[:2] == (1, 1) else J.sum((0, 1)).flatten()
        found |= {key: g[..., 0] for key, g in group.layout.split(J[:, None]).items()}
    return found


def _size(calls: Sequence[RecordedCall]) -> float:
    """A bound of the numbers that add up to a gradient: where they cancel, rounding is relative to it."""
    return sum(_norm(c.call.grads) * (1 + _norm((c.call.args, dict(c.call.kwargs)))) for c in calls)


def _wrong_rule(layer: Layer, key: str, ours: Tensor, theirs: Tensor, called: bool) -> OutsideReads:
    """What to say of two gradients that differ, if it can't be found which functions read the parameter."""
    if not called:
        why = "The layer was not called, so something else reads the parameter."
    elif not theirs.any():
        why = "Was the module called with other tensors than its parameters (functional_call, swapped weights)?"
    else:
        why = (
            "Does something else read the parameter, does the module compute something else when it is run again "
            "(attributes set around the call, counters, numbers of the batch), does a hook change what it returns, "
            "or is something differentiated in the forward pass?"
        )
    return OutsideReads(
        f"{layer.title} ({type(layer.uses[0].owner).__name__}): the gradient of {key!r} for one example has norm "
        f"{float(ours.norm()):.4g} by the layer's rule and {float(theirs.norm()):.4g} by autograd, and they differ by "
        f"{float((ours - theirs).norm()):.2g}. {why} Leave the parameters {list(layer.params)} out of `params`, or "
        "restructure that part of the model. EmpiricalRisk(..., check=False) goes on without this check, and with "
        "numbers that are wrong."
    )


def _vector_for(f: Tensor, n: int, N: int) -> Tensor:
    """A random vector of the output's shape that is zero for all examples but one."""
    v = torch.zeros(f.shape, dtype=f.dtype, device=f.device)
    piece = v.unflatten(0, (N, -1))[n]
    generator = torch.Generator().manual_seed(0)
    piece.copy_(torch.randn(piece.shape, generator=generator, dtype=torch.float64))
    return v


def _rows_of(t: Tensor, examples: list[int], N: int) -> Tensor:
    """The rows of some examples; the tensor itself if it does not carry examples first."""
    return t.unflatten(0, (N, -1))[examples].flatten(0, 1) if t.ndim and t.shape[0] % N == 0 else t


def _others(rows: Tensor, n: int) -> Tensor:
    return torch.cat([rows[:n], rows[n + 1 :]])


def _norm(tree: Any) -> float:
    """The norm of the first floating-point tensor in a tree: of inputs, those behind it are masks and the like."""
    first = next((t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()), None)
    return 0.0 if first is None else float(first.norm(dtype=torch.promote_types(first.dtype, torch.float32)))


def _difference(a: Tensor, b: Tensor) -> float:
    """Relative difference; 0 where it can't be told because a number is not finite."""
    a, b = a.double(), b.double()
    size = float(b.norm())
    return float((a - b).norm()) / (size or 1.0) if bool((a + b).isfinite().all()) else 0.0


def _outputs_of_modules(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, list[Tensor]]]:
    """What each call of a module returned, with the module's name, in the order in which the calls ended."""
    outputs: list[tuple[str, list[Tensor]]] = []
    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
            leaves = [t.detach().clone() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
            outputs.append((name, leaves))

        handles.append(module.register_forward_hook(note))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _first_different(
    model: nn.Module, one: Sequence[tuple[str, list[Tensor]]], two: Sequence[tuple[str, list[Tensor]]]
) -> str:
    """The first module whose outputs differ, in words; "" if there is none."""
    for (name, before), (_, after) in zip(one, two):
        for a, b in zip(before, after):
            if a.shape == b.shape and _difference(b, a) > _TOLERANCE[a.element_size()]:
                return f"{title(name)} ({type(model.get_submodule(name)).__name__})"
    return ""
