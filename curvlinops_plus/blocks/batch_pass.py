"""Showing one batch to accumulators: by a forward pass of its own, or through the one that the user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, Totals, Vectors
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.constant_statistics import batch_norms
from curvlinops_plus.risk.gradient_check import TOLERANCE
from curvlinops_plus.risk.loss_weights import LossWeights
from curvlinops_plus.risk.model_calls import tensors_of
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.process_state import exclusive, own_calls
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.repeatable import relative_difference
from curvlinops_plus.risk.sweep import RecordedPasses

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


@dataclass(frozen=True)
class _UserPass:
    """A call of the user's that has to be run again: its start, versions of the parameters, and its precision."""

    start: PassStart
    versions: list[int]
    autocast: bool


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
        model, outputs, begun = self.risk.model, list[Any](), list[_UserPass]()

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not outputs:  # how many calls there were is asked at the end
                self._require_input((args, kwargs))
                if batch_norms(model):
                    autocast = torch.is_autocast_enabled(self.risk.device.type)
                    begun.append(_UserPass(PassStart.now(model), self._versions(), autocast))

        handles = [
            model.register_forward_pre_hook(own_calls(begin), with_kwargs=True),
            model.register_forward_hook(own_calls(lambda module, args, out: outputs.append(out))),
        ]
        try:
            with RecordedPasses(
                self.risk, self.layers, self.vectors, self.weights, own_pass=False, repeatable=False
            ) as passes:
                with passes.recording(self.batch):
                    yield
                for handle in handles:
                    handle.remove()
                read = self._read_output(outputs)
                if not begun:
                    self._send_through(passes, read, add)
            if begun:
                self._run_again(begun[0], [f.detach() for f in read[0]], add)
        finally:
            for handle in handles:
                handle.remove()

    def _send_through(self, passes: RecordedPasses, read: tuple[Any, Any, Any], add: Callable[[Show], None]) -> None:
        """Call `add` with vectors that go through the graph of the user's pass."""

        def show(consume: Consumer, draws: Draws) -> Totals:
            try:
                return passes.send_back(self.batch, read, draws, consume, keep_graph=True)
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise ValueError(
                    "The graph of the model's output is gone. Call `loss.backward()` after the block, not inside."
                ) from error

        with exclusive(), torch.inference_mode(False), torch.enable_grad():  # whatever the modes at its end
            add(show)

    def _run_again(self, theirs: _UserPass, outputs: Sequence[Tensor], add: Callable[[Show], None]) -> None:
        """Call `add` with vectors that go through a pass that begins as the user's did."""
        if theirs.versions != self._versions():
            raise ValueError(
                "Parameters were written to inside `listen`, after the model was called. Call `optimizer.step()` after "
                "the block: with batch norm in training mode the model is run once more at its end."
            )
        self.run(theirs.start, add, lambda own: _require_same(outputs, own, theirs.autocast))

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

    def _read_output(self, outputs: list[Any]) -> tuple[Any, Any, Any]:
        """What the losses read of the model's only output inside `listen`."""
        if len(outputs) != 1:
            raise ValueError(
                f"The model was called {len(outputs)} times inside `listen`, expected once, on the batch that `listen` "
                "was given. Call it once there; evaluate outside."
            )
        read = self.risk.read_output(outputs[0], self.batch)
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


def _require_same(theirs: Sequence[Tensor], ours: Sequence[Tensor], autocast: bool) -> None:
    """Refuse a model that does something else when it is run once more; by itself it runs without autocast."""
    for f, own in zip(theirs, ours, strict=True):
        away = relative_difference(own.detach(), f) if f.shape == own.shape else float("inf")
        if not away <= TOLERANCE[2 if autocast else f.element_size()]:
            raise UnsupportedError(
                "With batch norm in training mode `listen` runs the model once more, on the batch that it was given, "
                "with the statistics of the batch as constants. There the model's output differs from that in the "
                f"block, by {away:.1e} of the norm. Does the model draw random numbers that are not PyTorch's, was it "
                "called with more than the batch, or has it a state that is no buffer? Call model.eval() before, or "
                "the batch norms' eval()."
            )
