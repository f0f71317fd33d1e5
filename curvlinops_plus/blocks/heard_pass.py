"""Showing one batch to accumulators through the forward pass that the user makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.batch_pass import BatchPass, PassStart, Show
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import Draws, Totals
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.batches import Batch, tensors_of
from curvlinops_plus.risk.determinism import TOLERANCE, relative_difference
from curvlinops_plus.risk.process_state import eager, exclusive, own_calls, own_passes
from curvlinops_plus.risk.record import OutsideReads
from curvlinops_plus.risk.sweep import RecordedPasses

# Shows a batch by passes of our own; see `CurvatureEstimator.update`.
Update = Callable[..., None]


@contextmanager
def listen(batch_pass: BatchPass, add: Callable[[Show], None], update: Update) -> Iterator[None]:
    """The user calls the model once in here; at the end `add` is called, and vectors go through the model's graph.

    Args:
        batch_pass: The batch.
        add: Called once, unless the block raises.
        update: As for `HeardPass`.

    Raises:
        ValueError: If the model was not called exactly once, or its graph is gone.
        UnsupportedError: If a pass of its own is needed, and does something else.
    """
    model, heard, calls = batch_pass.risk.model, HeardPass(batch_pass, update), []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(module)
        if len(calls) == 1:  # others are refused at the end
            heard.begin((args, kwargs))

    def end(module: nn.Module, args: Any, out: Any) -> None:
        if len(calls) == 1:
            heard.end(out)

    with heard.contexts, eager():  # before a compiled model is called
        with _hooked(model, begin, end):
            yield
        if len(calls) != 1:
            raise ValueError(
                f"The model was called {len(calls)} times inside `listen`, expected once, on the batch that `listen` "
                "was given. Call it once there; evaluate outside."
            )
        heard.add(batch_pass.batch, add)


@contextmanager
def _hooked(model: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    """Calls of the model in here are seen, before and after."""
    handles = [
        model.register_forward_pre_hook(own_calls(begin), with_kwargs=True),
        model.register_forward_hook(own_calls(end)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class HeardPass:
    """A call of the model by the user, which is recorded, and through whose graph vectors are sent afterwards.

    The user's pass goes on as it would without that. Where it can't be recorded as it is, and if the model has
    embeddings with `scale_grad_by_freq`, which send something else back than derivatives, vectors go through a pass of
    its own that begins as the user's did.

    Args:
        owner: The batch, whose targets need not be known before `add`.
        update: Called with a batch, what its pass begins with, `add`, a check of outputs, and what may be wrong with
            the layers, if a pass of our own is needed.

    Attributes:
        output: What the model returned.
        contexts: What it is in; closing them leaves no hooks.
    """

    def __init__(self, owner: BatchPass, update: Update) -> None:
        self._owner, self._update, self.output = owner, update, None
        self.contexts = ExitStack()
        self._passes = RecordedPasses(
            owner.risk, owner.layers, owner.vectors, owner.weights, own_pass=False, repeatable=False
        )
        self.contexts.enter_context(self._passes.hooked())
        self._phase = self.contexts.enter_context(ExitStack())  # the call, then the time until vectors are sent
        self._versions: list[int] = []  # those of the parameters in the call
        self._autocast = False  # whether it was under autocast
        self._start: PassStart | None = None  # what it began with
        self._again = ""  # why it has to be run again

    def begin(self, called: Any) -> None:
        """The call begins.

        Args:
            called: What the model is called with.

        Raises:
            ValueError: If these are other tensors than those of the batch: its targets belong to these; or there are no
                examples.
        """
        risk = self._owner.risk
        if not self._owner.batch.num_examples:
            raise ValueError("The batch has no examples.")
        _require_input(self._owner.batch.X, called)
        self._versions, self._autocast = self._versions_now(), torch.is_autocast_enabled(risk.device.type)
        scales = any(getattr(use.module, "scale_grad_by_freq", False) for one in self._owner.layers for use in one.uses)
        likely = scales or not risk.checked.recorded
        self._start = PassStart.now(risk.model) if likely else PassStart.in_short(risk.device)
        if scales:  # only the pass of our own counts
            self._again = "scale_grad_by_freq of an embedding"
            self._phase.enter_context(self._passes.recorder.disabled)
        else:
            self._phase.enter_context(self._passes.recording(self._owner.batch))

    def end(self, output: Any) -> None:
        """The call has returned."""
        self.output, recorder = output, self._passes.recorder
        try:
            self._phase.close()
            doubt = recorder.doubt
        except Exception as error:
            doubt = error
        self._phase.enter_context(recorder.disabled)  # until vectors are sent, nothing is recorded any more
        if doubt is not None:  # a pass of our own finds the same, or takes it
            self._again = f"a pass that can't be recorded as it is ({doubt})"

    def add(self, batch: Batch, add: Callable[[Show], None]) -> None:
        """Call `add`, which is shown the batch.

        Args:
            batch: The batch, with targets.
            add: Called once.

        Raises:
            ValueError: If the graph is gone.
            UnsupportedError: If a pass of its own is needed, and does something else.
        """
        self._phase.close()
        read, checked = self._read_output(batch), self._owner.risk.checked
        error: OutsideReads | None = None
        if not self._again:
            try:
                self._send_through(batch, read, add)
                checked.recorded = True
                return
            except OutsideReads as found:
                error, self._again = found, "functions that read parameters"
        checked.recorded = False
        self.contexts.close()  # else our hooks see the passes that look for these
        self._require_unwritten(self._again)
        self._update(batch, self._start, add, self._check(read[0]), error)

    def _send_through(self, batch: Batch, read: tuple[Any, Any, Any], add: Callable[[Show], None]) -> None:
        """Call `add` with vectors that go through the graph of the user's pass."""

        terms = self._passes.terms(batch, read)

        def show(consume: Consumer, draws: Draws) -> Totals:
            try:
                return self._passes.send_back(batch, read, terms, draws, consume, keep_graph=True)
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise ValueError(
                    "The graph of the model's output is gone. Call `loss.backward()` after the block, not inside."
                ) from error

        kept = [(f, f.grad) for f in read[0] if f.retains_grad]  # by the user, for gradients that are the user's
        try:
            with exclusive(), own_passes, torch.inference_mode(False), torch.enable_grad():  # whatever the modes
                add(show)
        finally:
            for f, grad in kept:
                f.grad = grad

    def _check(self, outputs: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        """Refuses outputs of a pass of our own that are not the user's."""
        outputs, itemsize, why = [f.detach() for f in outputs], self._itemsize(outputs), self._again
        return lambda own: _require_same(outputs, own, itemsize, why)

    def _itemsize(self, outputs: Sequence[Tensor]) -> int:
        """Bytes of the coarsest numbers in the user's pass."""
        return 2 if self._autocast else min(f.element_size() for f in outputs)

    def _require_unwritten(self, why: str) -> None:
        """Refuse parameters that are no longer those of the user's pass."""
        if self._versions != self._versions_now():
            raise ValueError(
                "Parameters were written to inside `listen`, after the model was called. Call `optimizer.step()` after "
                f"the block: with {why} the model is looked at once more at its end."
            )

    def _versions_now(self) -> list[int]:
        return [p._version for p in self._owner.risk.params.values() if not p.is_inference()]

    def _read_output(self, batch: Batch) -> tuple[Any, Any, Any]:
        """What the losses read of the model's output."""
        risk = self._owner.risk
        read = risk.read_output(self.output, batch)
        trained = any(p.requires_grad for p in risk.params.values())
        if self._owner.vectors.backward and trained and not any(f.requires_grad for f in read[0]):
            if (doubt := self._passes.recorder.doubt) is not None:
                raise doubt
            raise ValueError(
                "The output of the model has no graph, so nothing can be backpropagated from it. Is there a "
                "`.detach()` in the model?"
            )
        return read


class HeardBatch:
    """A call of the model whose targets come later, see `CurvatureEstimator.begin`.

    Args:
        batch: The batch, without targets.
        heard: The recording; None if a pass of its own will be needed in any case.
        add: Called with batch, recording and decay.
        model: The model, if nobody else sees what it is called with and what it returns.

    Attributes:
        output: What the model returned; None before `end`.
    """

    def __init__(
        self,
        batch: Batch,
        heard: HeardPass | None = None,
        add: Callable[..., None] = lambda *_: None,
        model: nn.Module | None = None,
    ) -> None:
        self.batch, self.output, self._heard, self._add = batch, None, heard, add
        self._calls: list[Any] | None = None  # what the model was called with, and returned, in turn
        self._contexts = ExitStack() if heard is None else heard.contexts
        weakref.finalize(self, self._contexts.close).atexit = False  # whoever forgets it leaves no hooks
        if heard is not None:
            heard.begin(batch.X)
        if model is not None:
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        """Note what the model is called with, and what it returns."""
        self._calls = calls = list[Any]()  # which the hooks hold, and not this object
        hooks = _hooked(model, lambda module, *called: calls.append(called), lambda m, args, out: calls.append(out))
        self._watching = self._contexts.enter_context(ExitStack())
        self._watching.enter_context(eager())
        self._watching.enter_context(hooks)

    def end(self, output: Any) -> None:
        """The model has returned.

        Raises:
            ValueError: If it was not called once since `begin`, on what this was given, or has returned something else.
        """
        if (calls := self._calls) is not None:
            self._watching.close()
            self._calls = None
            try:
                _require_call(self.batch.X, calls, output)
            except ValueError:
                self.close()
                raise
        self.output = output
        if self._heard is not None:
            self._heard.end(output)

    def add(self, y: Any, decay: float | None = None) -> None:
        """Send vectors back, with these targets; the graph is kept for the loss's backward pass.

        Args:
            y: Targets.
            decay: As for `CurvatureEstimator.update`.

        Raises:
            NumericsError: As for `CurvatureEstimator.update`.
        """
        try:
            self._add(replace(self.batch, y=y), self._heard, decay)
        finally:
            self.close()

    def close(self) -> None:
        """Leave it; nothing is added."""
        with suppress(Exception):  # of what was recorded of a call that failed
            self._contexts.close()
        self._heard = None


def _require_call(X: Any, calls: Sequence[Any], output: Any) -> None:
    """Refuse what is not the output of the model for this batch, as that of a copy: nothing was recorded then."""
    if len(calls) != 2:
        raise ValueError(
            f"The model was called {len(calls) // 2} times between `begin` and `end`, expected once, on what `begin` "
            "was given. A copy of the model is another one; evaluate before `begin`, or after `end`."
        )
    called, returned = calls
    _require_input(X, called)
    if not {id(t) for t in tensors_of(output)} <= {id(t) for t in tensors_of(returned)}:
        raise ValueError(
            "`end` was given tensors that the model has not returned since `begin`. Give it what the model returned, "
            "as it is: heard = estimator.begin(X); out = model(X); heard.end(out)."
        )


def _require_input(X: Any, called: Any) -> None:
    """Refuse a call on other tensors than those of the batch: its targets belong to these."""
    if called is X or (isinstance(X, Tensor) and X is next(iter(called[0]), None)):
        return
    given, called = tensors_of(X), tensors_of(called)
    if given and called and not any(_equal(mine, theirs) for mine in given for theirs in called):
        raise ValueError(
            f"The model was called on other tensors, of shapes {[list(t.shape) for t in called]}, than `listen` or "
            f"`begin` was given, {[list(t.shape) for t in given]}. Give it what the model is called on, after "
            "augmentation: listen((X, y)) around model(X)."
        )


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape or mine.device != theirs.device:
        return False
    if mine.layout != torch.strided or mine.is_nested or mine.data_ptr() == theirs.data_ptr():
        return True
    return torch.equal(mine.to(theirs.dtype), theirs) or bool(mine.is_floating_point() and mine.isnan().any())


def _require_same(theirs: Sequence[Tensor], ours: Sequence[Tensor], itemsize: int, why: str) -> None:
    """Refuse a model that does something else when it is run once more; by itself it runs without autocast."""
    for f, own in zip(theirs, ours, strict=True):
        away = relative_difference(own.detach(), f) if f.shape == own.shape else float("inf")
        if not away <= TOLERANCE[itemsize]:
            raise UnsupportedError(
                f"With {why} `listen` runs the model once more, on the batch that it was given, with the statistics of "
                "a batch norm as constants. There the model's output differs from that in the block, by "
                f"{away:.1e} of the norm. Does the model draw random numbers that are not PyTorch's, was it called "
                "with more than the batch, or has it a state that is no buffer? Call model.eval() before, or the batch "
                "norms' eval(), or `loss.backward()` after the block."
            )
