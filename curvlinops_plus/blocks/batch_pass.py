"""Showing one batch to accumulators: by a forward pass of its own, or through the one that the user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, Totals, Vectors
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.loss_weights import LossWeights
from curvlinops_plus.risk.model_calls import tensors_of
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.process_state import exclusive, own_calls
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.sweep import RecordedPasses

__all__ = ["BatchPass", "Show"]

# Shows a batch to a consumer, with vectors that are drawn from the given random numbers; as often as it is called.
Show = Callable[[Consumer, Draws], Totals]


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

    def run(self, random: Tensor, add: Callable[[Show], None]) -> None:
        """Call `add` in a pass that leaves the model, its buffers and random state unchanged.

        Args:
            random: The state of the global random numbers in each forward pass.
            add: Called once.
        """
        passes = RecordedPasses(self.risk, self.layers, self.vectors, self.weights, repeatable=False)
        with preserve_state(self.risk.model, self.risk.data), passes:

            def show(consume: Consumer, draws: Draws) -> Totals:
                torch.set_rng_state(random)  # a batch that is shown twice has the same dropout
                return passes.observe(self.batch, draws, consume)

            add(show)

    @contextmanager
    def listen(self, add: Callable[[Show], None]) -> Iterator[None]:
        """The user calls the model once in here; at the end `add` is called, and vectors go through the model's graph.

        Args:
            add: Called once, unless the block raises.

        Raises:
            ValueError: If the model was not called exactly once, or its graph is gone.
        """
        outputs: list[Any] = []

        def check(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not outputs:  # how many calls there were is asked at the end
                self._require_input((args, kwargs))

        model = self.risk.model
        handles = [
            model.register_forward_pre_hook(own_calls(check), with_kwargs=True),
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

                def show(consume: Consumer, draws: Draws) -> Totals:
                    try:
                        return passes.send_back(self.batch, read, draws, consume, keep_graph=True)
                    except RuntimeError as error:
                        if "backward through the graph a second time" not in str(error):
                            raise
                        raise ValueError(
                            "The graph of the model's output is gone. Call `loss.backward()` after the block, not "
                            "inside."
                        ) from error

                with exclusive(), torch.inference_mode(False), torch.enable_grad():  # whatever the modes at its end
                    add(show)
        finally:
            for handle in handles:
                handle.remove()

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
