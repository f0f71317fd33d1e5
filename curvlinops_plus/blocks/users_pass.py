"""A forward pass that the user makes is recorded, and vectors go back through its graph: in a
backward pass of our own, or in the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.sums import Sums
from curvlinops_plus.contexts import Endings
from curvlinops_plus.layer.replay import NoExampleGradients
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, Totals
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.check import check_batch
from curvlinops_plus.risk.preserve import eager, exclusive, own_calls, own_passes, refuse_capture
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.users_backward import UsersBackward

# Shows a batch to a consumer, with vectors that are drawn from the given random numbers; as often
# as it is called.
ShowDrawn = Callable[[Draws, Consumer], Totals]

# With fewer gradients of layers' outputs our own pass takes less time than taking them from the
# user's.
_ENOUGH_NUMBERS = 2**17


@dataclass(frozen=True)
class PassStart:
    """What a forward pass begins with, so that another one can begin with the same.

    Attributes:
        buffers: Modules, and names and copies of buffers in them.
    """

    random: RandomState
    buffers: Sequence[tuple[nn.Module, str, Tensor]]

    @classmethod
    def now(cls, model: nn.Module) -> PassStart:
        """The state of now."""
        buffers = [
            (m, name, b.detach().clone())
            for m in model.modules()
            for name, b in m._buffers.items()
            if b is not None
        ]
        return cls(RandomState.now(), buffers)

    def restore(self) -> None:
        """Begin with the same; inside `preserve_state`, which brings the model's own buffers
        back.
        """
        self.random.restore()
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer.clone()


class UsersPass:
    """One call of the model by the user: `begin`, the call, `end`, then `add` with its targets, or
    `close`.

    The user's pass goes on as it would without that. Where it can't be recorded as it is, the batch
    is added by a pass of our own.

    Args:
        batch: The batch; targets may come later.
        recorder: What records; None if the user's pass can't be recorded.
        add: Adds what it is shown, with this decay; or, of a batch that was shown, its sums.
        fresh: Makes sums for a batch; None if it may have to be shown more than once.
        add_by_own_pass: Adds a batch by a pass of our own; an error says what was wrong with the
            layers.
    """

    _recorder: Recorder | None = None  # also of one that an interrupt has not let become one

    def __init__(
        self,
        batch: Batch,
        recorder: Recorder | None,
        add: Callable[[ShowDrawn, float | None, Sums | None], None],
        fresh: Callable[[], Sums | None],
        add_by_own_pass: Callable[[Batch, float | None, OutsideReads | None], None],
    ) -> None:
        self.batch = batch
        self._add = add
        self._fresh = fresh
        self._add_by_own_pass = add_by_own_pass
        self._output: Any = None
        self._following: UsersBackward | None = None
        self._is_checked = False  # by the self-check
        #: Why gradients of examples can't be told.
        self._found: Exception | None = None
        self._phase = "before the call"
        self._recorder = recorder
        if recorder is not None:
            recorder.attach()

    def begin(self) -> None:
        """The model is about to be called."""
        if self._recorder is not None:
            refuse_capture(self._recorder.risk.device.type)
            self._phase = "the call"  # what the end of it undoes may not have begun
            eager.start(id(self))  # hooks of a compiled model that ran before never fire
            self._recorder.start(self.batch)

    def end(self, output: Any) -> None:
        """The model has returned."""
        self._output = output
        self._leave_phase()
        if self._recorder is not None:
            self._recorder.returned()
            self._phase = "after the call"
            self._recorder.disabled.depth = 1  # until vectors are sent

    def _leave_phase(self) -> None:
        """Undo what the phase of now has changed."""
        if self._recorder is None:
            return
        if self._phase == "the call":
            self._recorder.stop()
            eager.leave(id(self))
        elif self._phase == "after the call":
            self._recorder.disabled.depth = 0
        self._phase = ""

    def close(self) -> None:
        """Leave it; nothing is added."""
        self._leave_phase()
        if self._following is not None:
            self._following.close()
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None

    def __del__(self) -> None:
        # A model that raises never returns.
        if not sys.is_finalizing():
            self.close()

    def follow(self, y: Any, then: Callable[[], None]) -> bool:
        """Take gradients from the user's backward pass: `then`, which calls `add`, is called in it.

        Returns:
            Whether it is waited for. It is not where another pass could bring something else than
            our own: with several losses or random vectors, and in float16; nor for small passes.
        """
        recorder = self._recorder
        # In another form the output is a tensor of ours.
        if recorder is None or self.batch.forms or not _may_follow(recorder):
            return False
        batch = replace(self.batch, y=y)
        try:
            outputs = recorder.risk.read_output(self._output, batch)
            head = outputs[0][0]
            if not head.requires_grad or head.dtype == torch.float16:
                return False
            self._is_checked = True
            with self._own_passes():
                check_batch(recorder.risk, recorder, batch, outputs[0])
        except OutsideReads as error:
            self._found = error
            return False
        except BaseException:
            self.close()
            raise
        self._following = UsersBackward(recorder, batch, outputs, self._fresh, then)
        return True

    @property
    def has_failed(self) -> bool:
        """Whether the backward pass of the user was begun, and not ended."""
        return self._following is not None and self._following.is_under_way

    def add(self, y: Any, decay: float | None = None) -> None:
        """Add the batch with these targets, by sending vectors back, unless gradients have come
        from the user's pass; the graph is kept for the loss's backward pass.

        Raises:
            ValueError: If the output has no graph, or it is gone.
            NumericsError: As for `CurvatureEstimator.update`.
        """
        batch = replace(self.batch, y=y)
        outside: OutsideReads | None = None
        try:
            self._leave_phase()
            if self._take(decay):
                return
            if self._recorder is not None and self._send_back(self._recorder, batch, decay):
                return
        except OutsideReads as error:
            outside = error
        except NoExampleGradients:  # a pass of our own finds it, too, and what to do
            pass
        finally:
            self.close()
        self._add_by_own_pass(batch, decay, outside)

    def _take(self, decay: float | None) -> bool:
        """Whether the batch was added with gradients that the user's pass has brought."""
        following = self._following
        if following is not None:
            self._found = following.error
        if self._found is not None:
            raise self._found
        if following is None or following.totals is None:
            return False
        totals = following.totals
        with self._own_passes():
            self._add(lambda draws, consume: totals, decay, following.sums)
        return True

    def _send_back(self, recorder: Recorder, batch: Batch, decay: float | None) -> bool:
        """Whether the batch was added; it is not where the recording is in doubt."""
        risk = recorder.risk
        outputs = risk.read_output(self._output, batch)
        heads = outputs[0]
        lacks_graph = recorder.backward and not any(f.requires_grad for f in heads)
        if lacks_graph and any(p.requires_grad for p in risk.params.values()):
            raise recorder.doubt or ValueError(
                "The output of the model has no graph, so nothing can be backpropagated from it. "
                "Is there a `.detach()` in the model?"
            )
        if recorder.doubt is not None:
            return False
        show = partial(
            recorder.send_back, batch, outputs, keep_graph=True, is_checked=self._is_checked
        )
        # Gradients that the user retains are those of the user's own backward pass.
        retained = [(f, f.grad) for f in heads if f.retains_grad]
        try:
            with self._own_passes():
                self._add(show, decay, None)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            if self._following is not None:  # a pass from elsewhere than the loss took it
                return False
            raise ValueError(
                "The graph of the model's output is gone. Call `loss.backward()` after the block, "
                "not inside."
            ) from error
        finally:
            for f, grad in retained:
                f.grad = grad
        return True

    @contextmanager
    def _own_passes(self) -> Iterator[None]:
        """Context of passes of our own through the user's graph."""
        inference = torch.is_inference_mode_enabled()
        with Endings() as endings:
            endings.enter_context(exclusive)
            own_passes.enter(endings)
            if inference:
                endings.enter_context(torch.inference_mode(False))
            yield


def _may_follow(recorder: Recorder) -> bool:
    """Whether the user's backward pass may bring what our own would."""
    vectors = recorder.vectors
    return (
        recorder.doubt is None
        and vectors.of_loss
        and not vectors.random
        and len(recorder.risk.losses) == 1
        and recorder.last.numbers >= _ENOUGH_NUMBERS
        and torch.float16 not in recorder.last.dtypes
        and not recorder.last.outlives_graph
    )


@contextmanager
def called_once(users_pass: UsersPass, model: nn.Module) -> Iterator[None]:
    """The user calls the model once in here.

    Raises:
        ValueError: If it was not called exactly once.
    """
    calls = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # others are refused at the end
            users_pass.begin()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if calls == 1:
            users_pass.end(output)

    with Endings() as endings:
        eager.enter(endings)  # before a compiled model is called
        endings.callback(model.register_forward_pre_hook(own_calls(begin)).remove)
        endings.callback(model.register_forward_hook(own_calls(end)).remove)
        yield
    if calls != 1:
        raise ValueError(
            f"The model was called {calls} times inside `listen`, expected once, on the batch that "
            "`listen` was given. Call it once there; evaluate outside."
        )
