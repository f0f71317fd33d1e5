"""Comparing, on a few examples of a batch, what layer rules make of recorded calls with autograd.

Nobody has to ask for it: the first batch in which a layer is called is looked at, see `check_batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.random_state import RandomState, kept_random_state
from curvlinops_plus.risk.call_kinds import are_rows_unclear, batch_kind, carry_rows, rows_per_example
from curvlinops_plus.risk.compare_rules import TOLERANCE, SentVectors
from curvlinops_plus.risk.constant_statistics import batch_norms
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.gradient_check import (
    compare,
    compare_all_rows,
    halves_by_digits,
    random_halves,
    send_single,
)
from curvlinops_plus.risk.preserve import kept_attributes
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.recorded_call import RecordedCall
from curvlinops_plus.risk.refused_calls import MORE_THAN_BROADCAST, refusal_of_one_row
from curvlinops_plus.risk.repeatable import (
    are_examples_clear,
    first_different,
    not_repeatable,
    outputs_of_modules,
    relative_difference,
    require_repeatable,
)
from curvlinops_plus.risk.replaced_parameters import copied_buffers
from curvlinops_plus.risk.risk import Checked, EmpiricalRisk

# How many examples are looked at.
_FEW = 3
# So many multiplications in a layer take less time than running it once more.
_LIGHT = 2**20
# Batches of so many shapes have their outputs compared.
_SHAPES = 8
# Batches of so many kinds have their layers compared as soon as they come.
_KINDS = 8


def check_batch(
    risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
) -> None:
    """Look at a batch in which layers are called as in no batch before, or whose shape is new; else do nothing.

    A few of its examples are run by themselves, and random vectors for single ones are sent back:

    * their outputs are their part of the batch's outputs;
    * a vector for one example reaches no other example's rows in any layer;
    * of one that is longer as much more arrives (outside of float16): there is a hook that clamps gradients otherwise;
    * the gradient that each layer's rule makes of its recorded calls is autograd's gradient of the parameters.

    A chain of PyTorch's own modules needs no look, see `known_chain`.

    Where little is computed, vectors for halves of the examples, for two and for one are sent back through the batch
    itself, and the few examples are run for their outputs only. The whole batch stands in for them where they can't be
    told apart in its input. The statistics of batch norm in training mode are constants in all of these passes.

    Whether layers are called as before is seen from what is recorded of each batch, see `batch_kind`: which modules are
    called in which order, their attributes, hooks and tensors at that moment, their rows per example, and how many
    operations autograd notes between them. Vectors for half of the examples are sent back through the whole batch:

    * where the model may be random, and the outputs of a few examples are not their part of the batch's, for each of
      the first eight numbers of examples;
    * in every batch where rows per example are no axis of the input, which has masks, indices or other integers.

    So these stay unnoticed:

    * a module that reads something outside of itself (a global variable, an attribute of its parent, or of an object
      that it holds) which is changed in a later batch for the time of the call;
    * a difference that the examples looked at don't show: one in three of them only, or one that is within rounding;
    * after the first eight kinds of batches, those between the 2ᵏth ones;
    * hooks that clamp, of which longer vectors than that one would tell;
    * rows that belong to other examples in a later batch only, if there are as many as an axis of the input has for
      each example, or as before and all of the input is floating-point numbers (as zeros for padding);
    * in training loops, a function that reads a parameter in batches of more than three examples only, if it does so
      from the first batch on.

    Args:
        repeatable: Whether two evaluations have to agree; not so in training loops.

    Raises:
        UnsupportedError: Naming the layer, and both numbers.
        RuntimeError: If two evaluations of the model disagree.

    Warns:
        CurvatureWarning: In training loops, if there is batch norm in training mode, which mixes examples.

    Cost: a forward and two backward passes over three examples, and the gradients of the parameters for one of them;
    where all rows are compared, four backward passes to the layers' outputs. Where little is computed, a forward
    pass over three examples, and up to six backward passes. In batches that are not looked at, a few microseconds per
    call of a layer.
    """
    new = _New.of(risk.checked, recorder, batch, outputs, repeatable)
    risk.checked.batches += recorder.backward
    if not new:
        return
    check = _Check(risk, recorder, batch, outputs, repeatable)
    with kept_random_state(), eager(), kept_attributes(risk.model.modules()):
        reached = check.run(bool(new.called)) if new.called or new.outputs else set()
        if new.rows and (new.unclear or not check.apart):
            compare_all_rows(recorder, outputs, random_halves(batch.num_examples))
    new.note(risk.checked, recorder, reached)


def is_unchecked(
    risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
) -> bool:
    """Whether `check_batch` would look at a batch whose graph is gone; it has to be done in another pass then.

    Otherwise the batch counts as seen.
    """
    new = _New.of(risk.checked, recorder, batch, outputs, repeatable)
    risk.checked.batches += recorder.backward and not new
    return bool(new)


@dataclass(frozen=True)
class _New:
    """What is new in a batch.

    Attributes:
        called: What is called, if its layers have to be looked at.
        outputs: Whether its outputs have to be compared.
        rows: Whether all rows have to be compared.
        unclear: Whether that is because they may belong to other examples in every batch.
        kind: What its layers look like.
        shape: Of its data.
    """

    called: set[Any]
    outputs: bool
    rows: bool
    unclear: bool
    kind: Any
    shape: Any

    @classmethod
    def of(
        cls, checked: Checked, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
    ) -> _New:
        """Arguments as for `check_batch`."""
        backward, rows = recorder.backward, rows_per_example(recorder.calls, batch)
        kind = batch_kind(recorder.calls, outputs, rows) if backward else ()
        shape, is_new = _shape(checked, batch, repeatable)
        # Where outputs differ, random modules being allowed, all rows are compared, for each number of examples.
        unclear = are_rows_unclear(rows, batch)
        return cls(
            called=_unchecked(checked, recorder, kind),
            outputs=is_new and _tell_outputs(checked, batch.num_examples, repeatable, backward),
            rows=backward and ((is_new and not repeatable) or unclear),
            unclear=unclear,
            kind=kind,
            shape=shape,
        )

    def __bool__(self) -> bool:
        return bool(self.called) or self.outputs or self.rows

    def note(self, checked: Checked, recorder: Recorder, reached: set[int]) -> None:
        """Note what need not be looked at again, where a gradient reached these layers."""
        checked.shapes.add(self.shape)
        if self.called:
            checked.kinds.add(self.kind)
            checked.tried |= self.called
            checked.layers |= {_name(c, recorder.num_examples) for c in recorder.calls if c.layer in reached}


def _tell_outputs(checked: Checked, N: int, repeatable: bool, backward: bool) -> bool:
    """Whether outputs of a few examples tell anything, and are needed."""
    # All of a small batch would be a few examples of itself, which tells nothing but that the model is not random.
    return (N > _FEW or not checked.shapes) if repeatable else (N > _FEW and backward)


def _shape(checked: Checked, batch: Batch, repeatable: bool) -> tuple[Any, bool]:
    """The shape of a batch, only its number of examples in training loops, and whether it is one of the first ones."""
    shapes = (t.shape for t in tree_leaves(batch.X) if isinstance(t, Tensor)) if repeatable else ()
    shape = (batch.num_examples, *shapes)
    return shape, shape not in checked.shapes and len(checked.shapes) < _SHAPES


def _unchecked(checked: Checked, recorder: Recorder, kind: Any) -> set[Any]:
    """What is called in a batch, if the batch has to be looked at."""
    if not recorder.backward:
        return set()
    called = {_name(recorded, recorder.num_examples) for recorded in recorder.calls}
    found = called - checked.layers
    # Where gradients were zero, and where every batch is of a kind of its own, in ever fewer batches.
    again = checked.batches & (checked.batches + 1) == 0
    if kind not in checked.kinds and (again or len(checked.kinds) < _KINDS):
        return called
    return found if again or not found <= checked.tried else set()


def _name(recorded: RecordedCall, N: int) -> tuple[str, bool, bool]:
    """What has to be looked at once: a module, if it gives a row for all examples, and if there are several."""
    return recorded.call.use.name, recorded.expanded, N > 1


class _Check:
    """The look at one batch; arguments as for `check_batch`."""

    def __init__(
        self, risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
    ) -> None:
        self.risk, self.recorder, self.batch, self.repeatable = risk, recorder, batch, repeatable
        self.outputs = outputs
        self.axes = risk.options.example_axis or {}
        self.called = {recorded.layer for recorded in recorder.calls}
        self.all_rows = False  # whether all rows were compared
        self.drew = False  # whether the model drew random numbers
        self.agreed = False  # whether some of the examples by themselves had the outputs that they have in the batch

    def run(self, backward: bool) -> set[int]:
        """Compare a few examples, or all if the model can't run a few, or if some layers got no gradient from them.

        Returns:
            Indices of the layers that got one.
        """
        if norms := [*batch_norms(self.risk.model)]:
            self._report(norms)
        reached = self._compare_some(backward)
        if backward and self._runs_again():
            self._compare_every()
        return reached

    def _compare_some(self, backward: bool) -> set[int]:
        """As `run`, where rules are compared for a single example."""
        if not (backward and self._is_light()):
            return self._look_apart(backward)
        self._look_apart(backward=False)
        try:
            reached = self._look_again(every=False)
            return reached if reached >= self.called else self._look_again(every=True)
        except UnsupportedError:
            self._look_apart(backward=True)  # knows better of models that keep their parameters elsewhere
            raise

    def _runs_again(self) -> bool:
        """Whether a rule runs a module again for single examples, which may depend on their places in the batch."""
        rules = [use.rule for index in self.called for use in self.recorder.layers[index].uses]
        again = any(not (isinstance(rule, AffineRule) or rule.direct_grads) for rule in rules)
        return again and self.batch.num_examples > 1

    def _compare_every(self) -> None:
        """Compare rules for all examples that are looked at, in one sum."""
        if self._is_light():
            self._look_again(every=True)
        elif (few := self._few()) is None or self._look(*few, True, every=True) is None:
            self._look(self.batch, list(range(self.batch.num_examples)), True, every=True)

    def _look_apart(self, backward: bool) -> set[int]:
        """Run a few examples by themselves, or all; arguments and result as for `run`."""
        everyone = self.batch, list(range(self.batch.num_examples))
        reached = self._look(*(self._few() or everyone), backward)
        if reached is not None and (reached >= self.called or not backward):
            return reached
        return self._look(*everyone, backward, every=True) or set()

    @property
    def apart(self) -> bool:
        """Whether it is known that examples don't depend on each other."""
        return self.all_rows or self.agreed

    def _few(self) -> tuple[Batch, list[int]] | None:
        """Some of the examples and their numbers, if they can be told apart from more than these."""
        N = self.batch.num_examples
        if N <= _FEW or not are_examples_clear(self.batch, self.risk.options):
            return None
        # Any three: what depends on each other may be next to each other, or not.
        generator = torch.Generator().manual_seed(len(self.risk.checked.shapes))
        examples = sorted(torch.randperm(N, generator=generator)[:_FEW].tolist())
        few = take_examples(self.batch, examples)
        return None if few is None else (few, examples)

    def _is_light(self) -> bool:
        """Whether backward passes through the whole batch take less time than a forward pass on a few examples does."""
        calls, layers = self.recorder.calls, self.recorder.layers
        if any(c.expanded for c in calls):
            return False
        if not all(p.requires_grad and not p._backward_hooks for p in self.risk.params.values()):
            return False  # hooks are the user's, of gradients that are, too: other tensors have none
        sizes = [
            slot.shape.numel() * layers[c.layer].groups[0].layout.matrix_shape[-1] for c in calls for slot in c.slots
        ]
        return sum(sizes) <= _LIGHT * len(calls)

    def _report(self, norms: list[str]) -> None:
        """Say what is left out if there is batch norm in training mode."""
        said = (
            f"{norms} are batch norm in training mode: the examples of a batch depend on each other. The statistics of "
            "a batch are taken as constants; what layers before them contribute through these"
        )
        if self.repeatable:
            raise UnsupportedError(
                f"{said} would be left out. Call model.eval() first, or leave it out with "
                "EmpiricalRisk(..., check=False)."
            )
        warn(
            f"{said} is left out. While training, K-FAC does without; parameters of the batch norms themselves are "
            "left to another optimizer, out of `params`. The curvature of a trained model is that in evaluation mode.",
            CurvatureWarning,
            stacklevel=2,
        )

    def _look(self, few: Batch, examples: list[int], backward: bool, every: bool = False) -> set[int] | None:
        """Run `few`, which are these examples of the batch, and compare.

        Args:
            every: Compare rules for all of them, where no single one is known to reach the layers.

        Returns:
            Indices of the layers that got a gradient; None if the model can't run these examples.
        """
        risk, whole = self.risk, self.recorder
        with whole.disabled:
            if not backward:
                with torch.no_grad(), copied_buffers(risk.model):
                    found = self._outputs_of(few, risk.model)
                self._refuse_draws()
                return set() if found is not None and self._compare_outputs(found, few, examples) else None
            # Parameters, as modules may ask for them by that type.
            free: dict[str, Tensor] = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
            with Recorder(whole.layers, self.axes, True, whole.intercept, free, risk.options.example_of_row) as own:
                with own.watching(), torch.enable_grad(), copied_buffers(risk.model):
                    found = risk.at(free, lambda model: self._send(own, few, model, free, every))
                if found is None or not self._compare_outputs(found[0], few, examples) or self._read_otherwise(own):
                    return None
                # Rules look at the modules, which have their own parameters again.
                with own.disabled, plain_mode(risk.device.type):
                    return self._compare(own, *found)

    def _read_otherwise(self, own: Recorder) -> bool:
        """Whether a table for all examples counts as rows of examples in the batch, or in these few of it."""
        pairs = list(zip(self.recorder.calls, own.calls))
        same = all(whole.call.use is few.call.use for whole, few in pairs)
        return same and any(carry_rows(whole) != carry_rows(few) for whole, few in pairs)

    def _send(
        self, own: Recorder, few: Batch, model: nn.Module, free: Mapping[str, Tensor], every: bool
    ) -> tuple[Sequence[Tensor], SentVectors] | None:
        """Run the model, and send vectors back; None if it can't run these examples."""
        with own.recording(few.num_examples, (few.X, few.y)):
            found = self._outputs_of(few, model)
        if found is None:
            return None
        with own.disabled:
            self._refuse_draws()
        if expanded := [recorded for recorded in own.calls if recorded.expanded]:
            with own.disabled, torch.no_grad():
                _compare_expanded(expanded[0], found, self._outputs_of(few, model) or ())
        return found, send_single(own, [f for f in found if f.requires_grad], free, self.batch.num_examples, every)

    def _look_again(self, every: bool) -> set[int]:
        """Send vectors back through the batch itself; arguments and result as for `_look`."""
        recorder, live, N = self.recorder, [f for f in self.outputs if f.requires_grad], self.batch.num_examples
        if not self.all_rows:
            compare_all_rows(recorder, live, halves_by_digits(N))
            self.all_rows = True
        sent = send_single(recorder, live, self.risk.params, N, every)
        with recorder.disabled, plain_mode(self.risk.device.type):
            return self._compare(recorder, live, sent)

    def _compare(self, own: Recorder, outputs: Sequence[Tensor], sent: SentVectors) -> set[int]:
        """Compare rows and rules."""
        try:
            return compare(sent, own.layers)
        except UnsupportedError:
            own.sources(outputs)  # knows better if something else reads a parameter
            raise

    def _outputs_of(self, few: Batch, model: nn.Module) -> Sequence[Tensor] | None:
        """What the losses read; None if the model needs the whole batch, as the nodes of a graph do."""
        # The state is as before at once, so that a second run draws the same numbers.
        with kept_random_state():
            before = RandomState.now(self.risk.device)
            try:
                found = self.risk.run(few, model)[0]
            except Exception:
                if few is self.batch:
                    raise
                return None
            self.drew = RandomState.now(self.risk.device) != before
        return found

    def _refuse_draws(self) -> None:
        if self.drew and self.repeatable:
            require_repeatable(self.risk, self.batch)

    def _compare_outputs(self, found: Sequence[Tensor], few: Batch, examples: list[int]) -> bool:
        """Compare outputs of a few examples with their part of the batch's; False if they have another shape."""
        agreed = True
        for f, alone in zip(self.outputs, found, strict=True):
            part = _rows_of(f.detach(), examples, self.batch.num_examples)
            if part.shape != alone.shape:
                return not self.repeatable
            away = relative_difference(alone.detach(), part)
            if away > TOLERANCE[part.element_size()]:
                if self.repeatable:
                    raise self._why_different(away, few, examples)
                agreed = False
        self.agreed = agreed and few is not self.batch
        return True

    def _why_different(self, away: float, few: Batch, examples: list[int]) -> Exception:
        """The model is random, or its examples depend on each other."""
        N, run = self.batch.num_examples, self.risk.run
        with torch.no_grad(), self.recorder.disabled:
            first, second = (outputs_of_modules(self.risk.model, lambda: run(self.batch)) for _ in range(2))
            alone = outputs_of_modules(self.risk.model, lambda: run(few))
        if where := first_different(self.risk.model, first, second):
            return not_repeatable(self.risk.model, away, where)
        parts = [(name, [_rows_of(t, examples, N) for t in tensors]) for name, tensors in first]
        where = first_different(self.risk.model, parts, alone)
        return UnsupportedError(
            f"The model's outputs for {len(examples)} of {N} examples by themselves differ from their part of the "
            f"batch's, by {away:.1e} of the norm{f', first in {where}' if where else ''}: the examples of a batch "
            "depend on each other, so they have no gradients of their own. (Or code of the model depends on the "
            "number of examples, as `len(x)`; or a tensor of the input has as many rows as there are examples, and is "
            "not one of rows for examples.) EmpiricalRisk(..., check=False) goes on without this check."
        )


def _compare_expanded(expanded: RecordedCall, found: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Refuse a row for all examples that the model takes for something else when it is a row for each."""
    for f, as_it_is in zip(found, plain, strict=True):
        if f.shape != as_it_is.shape or relative_difference(f.detach(), as_it_is) > TOLERANCE[f.element_size()]:
            raise refusal_of_one_row(expanded.call.use, expanded.slots[0].shape[0], MORE_THAN_BROADCAST)


def _rows_of(t: Tensor, examples: list[int], N: int) -> Tensor:
    """The rows of some examples; the tensor itself if it does not carry examples first."""
    if not t.ndim or t.shape[0] % N:
        return t
    index = torch.tensor(examples, device=t.device)
    if t.shape[0] == N:
        return t.index_select(0, index)
    return t.unflatten(0, (N, -1)).index_select(0, index).flatten(0, 1)
