"""Showing one batch to accumulators: by a forward pass of its own, or through the one that the user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, LayerBatch, Totals, Vectors
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.constant_statistics import batch_norms
from curvlinops_plus.risk.gradient_check import TOLERANCE
from curvlinops_plus.risk.loss_weights import LossWeights
from curvlinops_plus.risk.model_calls import tensors_of
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.process_state import eager, exclusive, own_calls
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.repeatable import relative_difference
from curvlinops_plus.risk.sweep import RecordedPasses
from curvlinops_plus.risk.user_backward import UserBackward

__all__ = ["BatchPass", "PassStart", "Show"]

# Shows a batch to a consumer, with vectors that are drawn from the given random numbers; as often as it is called.
Show = Callable[[Consumer, Draws], Totals]


@dataclass(frozen=True)
class PassStart:
    """What a forward pass begins with, so that another one can begin with the same.

    Attributes:
        random: State of the global random numbers.
        buffers: Modules, and names and copies of buffers in them.
    """

    random: RandomState
    buffers: Sequence[tuple[nn.Module, str, Tensor]] = ()

    @classmethod
    def now(cls, model: nn.Module | None = None) -> PassStart:
        """The state of now, with the buffers of a model if one is given."""
        held = () if model is None else model.modules()
        buffers = [(m, name, b.detach().clone()) for m in held for name, b in m._buffers.items() if b is not None]
        return cls(RandomState.now(), buffers)

    def restore(self) -> None:
        """Begin with the same; inside `preserve_state`, which brings the model's own buffers back."""
        self.random.restore()
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer.clone()


class _GraphGone(ValueError):
    """The user went back through the graph already."""


@dataclass
class _UserPass:
    """What is noted of the user's pass.

    Attributes:
        calls: How often the model was called.
        read: What the losses read of its output.
        versions: Those of the parameters when it was called.
        autocast: Whether it was called under autocast.
        start: What it began with, if it may have to be run again.
        again: Whether it has to be run again, and why.
        backward: What arrives of the user's backward pass, if that is of use.
        error: What is wrong with the call; the user's block goes on, and it is raised at its end.
    """

    calls: int = 0
    read: tuple[Any, Any, Any] | None = None
    versions: list[int] = field(default_factory=list)
    autocast: bool = False
    start: PassStart | None = None
    again: str = ""
    backward: UserBackward | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class BatchPass:
    """A batch that is shown in a training loop, where two evaluations of the model need not agree.

    Attributes:
        risk: Model, losses and options.
        layers: The layers to record.
        vectors: What is sent back.
        weights: Relative weights of the losses.
        batch: The batch.
    """

    risk: EmpiricalRisk
    layers: Sequence[Layer]
    vectors: Vectors
    weights: LossWeights
    batch: Batch

    def run(
        self, start: PassStart, add: Callable[[Show], None], check: Callable[[Sequence[Tensor]], None] | None = None
    ) -> None:
        """Call `add` in a pass that leaves the model, its buffers and random state unchanged.

        Args:
            start: What each forward pass begins with.
            add: Called once.
            check: Called with what the losses read.
        """
        passes = RecordedPasses(self.risk, self.layers, self.vectors, self.weights, repeatable=False)
        with preserve_state(self.risk.model, self.risk.data), passes:

            def show(consume: Consumer, draws: Draws) -> Totals:
                start.restore()  # a batch that is shown twice has the same dropout
                with passes.recording(self.batch):
                    read = self.risk.run(self.batch)
                if check is not None:
                    check(read[0])
                return passes.send_back(self.batch, read, draws, consume)

            add(show)

    @contextmanager
    def listen(self, add: Callable[[Show], None]) -> Iterator[None]:
        """The user calls the model once in here; at the end `add` is called, and vectors go through the model's graph.

        If the model has batch norm in training mode, which has other derivatives there, vectors go through a pass of
        its own that begins as the user's did.

        Args:
            add: Called once, unless the block raises.

        Raises:
            ValueError: If the model was not called exactly once, or its graph is gone.
            UnsupportedError: If a pass of its own is needed, and does something else.
        """
        theirs = _UserPass()
        with ExitStack() as contexts:
            passes = contexts.enter_context(
                RecordedPasses(self.risk, self.layers, self.vectors, self.weights, own_pass=False, repeatable=False)
            )
            recording = contexts.enter_context(ExitStack())
            contexts.enter_context(eager())  # before a compiled model is called
            hooks = self._hooks(theirs, passes, recording)
            for hook in hooks:
                contexts.callback(hook.remove)
            yield
            for hook in hooks:
                hook.remove()
            if theirs.backward is not None:
                contexts.callback(theirs.backward.close)
            read = self._read(theirs)
            if not theirs.again:
                self._send_through(passes, read, add, theirs)
        if theirs.again:
            self._run_again(theirs, [f.detach() for f in read[0]], add)

    def _hooks(self, theirs: _UserPass, passes: RecordedPasses, recording: ExitStack) -> list[RemovableHandle]:
        """Hooks on the model that note the user's first call."""
        model, of_loss = self.risk.model, self.vectors.of_loss and self.vectors.together

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            theirs.calls += 1
            if theirs.calls > 1:  # refused at the end
                return
            self._require_input((args, kwargs))
            theirs.versions, theirs.autocast = self._versions(), torch.is_autocast_enabled(self.risk.device.type)
            norms = batch_norms(model)
            theirs.start = PassStart.now(model) if norms or of_loss else None
            if norms:  # only the pass of our own counts
                theirs.again = "batch norm in training mode"
                recording.enter_context(passes.recorder.disabled())
            else:
                recording.enter_context(passes.recording(self.batch))

        def end(module: nn.Module, args: Any, out: Any) -> None:
            if theirs.calls > 1:
                return
            try:
                if not theirs.again:
                    recording.close()
                theirs.read = fs, *_ = self._read_output(out)
                returned = {id(t) for t in tensors_of(out)}
                if of_loss and not theirs.again and all(id(f) in returned for f in fs):
                    theirs.backward = UserBackward(passes.recorder, fs)
            except Exception as error:
                theirs.error = error

        return [
            model.register_forward_pre_hook(own_calls(begin), with_kwargs=True),
            model.register_forward_hook(own_calls(end)),
        ]

    def _read(self, theirs: _UserPass) -> tuple[Any, Any, Any]:
        """What the losses read.

        Raises:
            ValueError: If the model was not called once.
        """
        if theirs.calls != 1:
            raise ValueError(
                f"The model was called {theirs.calls} times inside `listen`, expected once, on the batch that `listen` "
                "was given. Call it once there; evaluate outside."
            )
        if theirs.error is not None:
            raise theirs.error
        assert theirs.read is not None
        return theirs.read

    def _send_through(
        self, passes: RecordedPasses, read: tuple[Any, Any, Any], add: Callable[[Show], None], theirs: _UserPass
    ) -> None:
        """Call `add` with vectors that go through the graph of the user's pass, or with those that went through it.

        In the 1st, 2nd, 4th, ... batch, and where a check needs the graph, these are compared with a pass of our own.
        """
        user = theirs.backward if theirs.backward is not None and theirs.backward.happened else None
        number = self.risk.checked.batches + 1
        if user is not None:
            theirs.again = "`loss.backward()` inside the block" if number & (number - 1) == 0 else ""
            if theirs.again and self.risk.options.check:
                return
            self._require_unwritten(theirs, "`loss.backward()` inside the block")

        def show(consume: Consumer, draws: Draws) -> Totals:
            try:
                return passes.send_back(self.batch, read, draws, consume, keep_graph=True, user=user)
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise _GraphGone(
                    "The graph of the model's output is gone. Call `loss.backward()` after the block, not inside."
                ) from error

        theirs.again = ""
        try:
            with exclusive(), torch.inference_mode(False), torch.enable_grad():  # whatever the modes at its end
                add(show)
        except _GraphGone:
            if user is None:
                raise
            theirs.again = "`loss.backward()` inside the block"

    def _run_again(self, theirs: _UserPass, outputs: Sequence[Tensor], add: Callable[[Show], None]) -> None:
        """Call `add` with vectors that go through a pass that begins as the user's did."""
        assert theirs.start is not None
        self._require_unwritten(theirs, theirs.again)
        user, itemsize = theirs.backward, 2 if theirs.autocast else min(f.element_size() for f in outputs)
        if user is not None:
            user.require_once()

        def add_compared(show: Show) -> None:
            def show_compared(consume: Consumer, draws: Draws) -> Totals:
                def compared(batch: LayerBatch) -> None:
                    if user is not None:
                        user.compare(batch, itemsize)
                    consume(batch)

                return show(compared, draws)

            add(show_compared)

        self.run(theirs.start, add_compared, lambda own: _require_same(outputs, own, itemsize, theirs.again))

    def _require_unwritten(self, theirs: _UserPass, why: str) -> None:
        """Refuse parameters that are no longer those of the user's pass."""
        if theirs.versions != self._versions():
            raise ValueError(
                "Parameters were written to inside `listen`, after the model was called. Call `optimizer.step()` after "
                f"the block: with {why} the model is looked at once more at its end."
            )

    def _versions(self) -> list[int]:
        return [p._version for p in self.risk.params.values() if not p.is_inference()]

    def _require_input(self, called: Any) -> None:
        """Refuse a call on other tensors than those of the batch: its targets belong to these."""
        given, called = tensors_of(self.batch.X), tensors_of(called)
        if given and called and not any(_equal(mine, theirs) for mine in given for theirs in called):
            raise ValueError(
                f"Inside `listen` the model was called on other tensors, of shapes {[list(t.shape) for t in called]}, "
                f"than `listen` was given, {[list(t.shape) for t in given]}. Give it what the model is called on, "
                "after augmentation: listen((X, y)) around model(X)."
            )

    def _read_output(self, out: Any) -> tuple[Any, Any, Any]:
        """What the losses read of the model's output inside `listen`."""
        read = self.risk.read_output(out, self.batch)
        trained = any(p.requires_grad for p in self.risk.params.values())
        if self.vectors.backward and trained and not any(f.requires_grad for f in read[0]):
            raise ValueError(
                "The output of the model has no graph, so no gradient can be sent back from it. Is there a `.detach()` "
                "in the model?"
            )
        return read


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
