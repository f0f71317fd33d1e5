"""How the batches of training loops are recorded: by hooks on a model and on its losses, or in
`listen`.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import frexp, isfinite
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from curvlinops_plus.blocks import CurvatureEstimator
from curvlinops_plus.blocks.users_pass import PassStart, UsersPass
from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import CurvatureWarning, NumericsError, level_of_user
from curvlinops_plus.optim.kfac.loss_calls import LossCall, LossFunctions, function_of_loss
from curvlinops_plus.risk.batches import Batch, copy_of, mapped, tensors_of
from curvlinops_plus.risk.output_forms import OutputForm, form_of
from curvlinops_plus.risk.preserve import own_passes
from curvlinops_plus.risk.preserve import weak_hook as _hook

# Calls of a model that wait for their losses; of more, the graphs would be kept for nothing where
# none comes.
_WAITING = 4


@dataclass(eq=False)
class _Call:
    """A call of the model whose losses are waited for.

    Attributes:
        users_pass: The recording, of a batch without targets.
        due: Whether it is one for the statistics.
        start: What it began with, if the step evaluates it once more.
        thread: That has called the model.
        outputs: What the losses read of what the model returned.
        versions: Of these tensors when the model returned them.
        targets: Of the losses that were called, by their index.
        values: What these have returned.
        forms: In which they have read the outputs.
    """

    users_pass: UsersPass
    due: bool
    start: PassStart | None
    thread: threading.Thread = field(default_factory=threading.current_thread)
    outputs: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    targets: dict[int, Any] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    forms: dict[int, OutputForm] = field(default_factory=dict)

    def form_of(self, f: Any, index: int) -> OutputForm | None:
        """The form in which a loss has read its output; None if that was not the output."""
        output = self.outputs[index]
        if not isinstance(f, Tensor) or self.versions[index] != output._version:
            return None
        return form_of(f, output, self.users_pass.batch.num_examples)


class Hooks:
    """Records the batches of a step.

    A call of the model in training mode with gradients is recorded if its step updates the
    statistics or evaluates its batches once more. Its losses are those that were given, as objects,
    and while it waits for them equal ones and their functions. Calls that no loss is applied to are
    dropped, and so are outputs that were written to. A call whose input or output can't be read,
    such as one for features, belongs to no loss.

    A recording belongs to the thread that has called the model; meanwhile others may call it, and
    are not recorded. PyTorch tells nobody of a call that Ctrl-C has ended: its recording ends when
    the model is called again, or with `forget`.

    Args:
        model: What is called, which may be a wrapper.
        estimator: The statistics that batches are added to.
        every: Steps between two updates of the statistics.

    Attributes:
        steps: That were taken.
        batches: That were added since the last step.
        has_heard: Whether there was one, with examples or without.
        keeps: Whether this step evaluates its batches once more.
        kept: These, with what their forward passes began with.
        error: Of a batch that could not be added.
        unreadable: Why the last call that can't be read can't, None if this step had none.
        miss: What was wrong with a loss that was nearly heard, "" if there was none.
        paused: Whether calls are none of this training.
    """

    def __init__(self, model: nn.Module, estimator: CurvatureEstimator, every: int) -> None:
        self._estimator = estimator
        self._every = every
        self.steps = 0
        self.batches = 0
        self.has_heard = False
        self._before = 0  # examples of the estimator when the step began
        self.kept: list[tuple[Batch, PassStart]] = []
        self.error: NumericsError | None = None
        self.unreadable: Exception | None = None
        self.miss = ""
        #: Tensors that such calls have returned, to the reason.
        self._unreadable = WeakIdKeyDictionary()
        self.keeps = False
        self.paused = False
        #: The call that the model is in, by thread.
        self._open: dict[threading.Thread, _Call] = {}
        self._waiting: list[_Call] = []
        #: The call that waits for the user's backward pass, and its targets.
        self._following: tuple[UsersPass, Any] | None = None
        #: Index of a loss to what it was multiplied with in the first step.
        self._factors: dict[int, list[Tensor]] = {}
        losses = [loss.loss for loss in estimator.risk.losses]
        self._functions = LossFunctions(self._function)
        handles = []
        #: Whether any of the losses is also a function.
        self._has_functions = any(map(function_of_loss, losses))
        if all(isinstance(loss, nn.Module) for loss in losses):  # functions take no hooks
            handles += [
                model.register_forward_pre_hook(_hook(self._enter), with_kwargs=True),
                model.register_forward_hook(_hook(self._leave), always_call=True),
            ]
            for i, loss in enumerate(losses):
                hook = _hook(self._loss, i)
                handles.append(loss.register_forward_hook(hook, with_kwargs=True))
        contexts = ExitStack()
        contexts.callback(self._functions.end)
        for handle in handles:
            contexts.callback(handle.remove)
        #: Remove all hooks.
        self.remove = weakref.finalize(self, contexts.close)

    def forget(self) -> None:
        """What was recorded until now belongs to no step any more."""
        self._end_interrupted()
        self.end_waiting()
        for call in self._waiting:
            call.users_pass.close()
        self._waiting = []
        if self._following is not None:
            self._following[0].close()
            self._following = None
        self.batches = 0
        self.has_heard = False
        self.error = None
        self._before = self._estimator.examples
        self.kept.clear()
        self._unreadable.clear()
        self.unreadable = None
        self.miss = ""

    def end_waiting(self) -> None:
        """Functions of this thread are not watched for losses until the model is called again."""
        self._functions.end()

    def load(self, steps: int, batches: int, examples: int) -> None:
        """Go on after these steps, with this many batches and examples since the last one."""
        self.forget()
        self.steps = steps
        self.batches = batches
        self._before -= examples

    @property
    def due(self) -> bool:
        """Whether this step updates the statistics."""
        return self.steps % self._every == 0 or not self._estimator.updates

    @property
    def examples(self) -> int:
        """Examples that were added since the last step."""
        return self._estimator.examples - self._before

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A batch is added in here; alone, one without examples adds nothing."""
        before = self._estimator.updates
        yield
        self.batches += self._estimator.updates - before

    def keep(self, batch: Batch, start: PassStart) -> None:
        """Keep a batch for evaluating it once more, if it has examples."""
        if not batch.num_examples:
            return
        # A loader may fill the same memory anew for the next batch of the step.
        copied = replace(batch, X=mapped(copy_of, batch.X), y=mapped(copy_of, batch.y))
        self.kept.append((copied, start))

    @property
    def _is_paused(self) -> bool:
        """Whether a call is none of the user's loop: our own passes, calls again in backward
        passes.
        """
        return self.paused or own_passes.depth > 0 or torch._C._current_graph_task_id() != -1

    def _end_interrupted(self) -> None:
        """End calls that never returned, or have called the model themselves, in this thread and in
        those that have ended.
        """
        for thread, call in [*self._open.items()]:
            if thread is threading.current_thread() or not thread.is_alive():
                call.users_pass.close()
                self._open.pop(thread, None)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_paused:
            return
        self._end_interrupted()
        self.end_waiting()
        due = self.due
        if not (due or self.keeps) or not module.training or not torch.is_grad_enabled():
            return
        estimator = self._estimator
        try:
            estimator.risk.require_in_place()
        except ValueError:  # with other tensors it is another model
            return
        self.add_waiting()  # its graph would be kept for nothing if no backward pass comes
        single = len(args) == 1 and not kwargs
        try:
            X = (
                args[0]
                if single
                else _arguments_by_name(inspect.signature(module.forward), args, kwargs)
            )
            batch = estimator.risk.read_input(X, not single)
        except Exception as error:  # also of the user's `batch_size_fn`
            self.unreadable = error.with_traceback(None)
            return
        start = PassStart.now(module) if self.keeps else None
        call = _Call(estimator._users_pass(batch, due), due, start)
        self._open[call.thread] = call
        call.users_pass.begin()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_paused:
            return
        call = self._open.pop(threading.current_thread(), None)
        if call is not None:
            self._await_losses(call, output)
        if self._has_functions and (self._waiting or self._unreadable):
            self._functions.begin()

    def _await_losses(self, call: _Call, output: Any) -> None:
        """A call has returned, or has failed, without an output."""
        if output is None:
            return call.users_pass.close()
        call.users_pass.end(output)
        risk = self._estimator.risk
        try:
            call.outputs = risk.losses.select(
                output, risk.options.output, call.users_pass.batch.num_examples
            )[0]
        except Exception as error:  # also of the user's `output`
            call.users_pass.close()
            self.unreadable = error.with_traceback(None)  # frames would keep the graph
            for t in tensors_of(output):
                self._unreadable[t] = self.unreadable
            return
        call.versions = [f._version for f in call.outputs]
        self._waiting.append(call)
        waiting = [other for other in self._waiting if other.thread is call.thread]
        if len(waiting) > _WAITING:
            self._waiting.remove(waiting[0])
            waiting[0].users_pass.close()

    # ------------------------------------------------------------------------ losses of these calls
    def _loss(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,
    ) -> None:
        """The very loss that was given was called."""
        if not (self._waiting or self._unreadable) or self._is_paused:
            return
        if kwargs:
            args = inspect.signature(module.forward).bind(*args, **kwargs).args
        if len(args) >= 2:
            self._hear(index, args[0], args[1], value)
        if not self._waiting:
            self.end_waiting()

    def _function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> bool:
        """A loss function was called, perhaps by a loss that equals a given one; says whether no
        call waits any more.
        """
        if self._is_paused:
            return False
        called = LossCall.read(function, args, kwargs)
        misses = []
        for index, loss in enumerate(self._estimator.risk.losses):
            is_output = any(call.form_of(called.f, index) is not None for call in self._waiting)
            problem = called.problem(loss.loss)
            if not problem and self._hear(index, called.f, called.y, value):
                return not self._waiting
            if is_output:
                misses.append(f"{problem}, which the optimizer was given.")
            elif not problem and self._waiting:
                shapes = [list(call.outputs[index].shape) for call in self._waiting]
                misses.append(
                    f"{function.__name__} was called on something else than the output of the "
                    f"model, {', '.join(map(str, shapes))}, or on one that was changed. It may "
                    "have another shape, order of axes or dtype, and nothing else."
                )
        self.miss = " ".join(misses[:1]) or self.miss
        return False

    def _hear(self, index: int, f: Any, y: Any, value: Any) -> bool:
        """A loss was called; says whether it is that of a call which waits for it."""
        risk = self._estimator.risk
        forms = [(call, call.form_of(f, index)) for call in self._waiting]
        # Of the output itself rather than of another one that it was made of.
        forms.sort(key=lambda pair: pair[1] != ())
        call, form = next(((c, form) for c, form in forms if form is not None), (None, None))
        if call is None or form is None:
            error = self._unreadable.get(f) if isinstance(f, Tensor) else None
            if error is None:
                return False
            self._unreadable.clear()  # an error that is raised keeps frames, and these the graph
            raise error
        if self.steps == 0 and isinstance(value, Tensor) and value.requires_grad:
            if call.values.get(index) is not value:  # a module and its function
                value.register_hook(self._factors.setdefault(index, []).append)
            call.values[index] = value
        call.targets.setdefault(index, y)
        call.forms.setdefault(index, form)
        if len(call.targets) == len(risk.losses):  # else others will be called on this output
            self._waiting.remove(call)
            self._take(call)
        return True

    def _take(self, call: _Call) -> None:
        """Add a batch whose targets are known, or wait for the user's backward pass."""
        # An error was of a batch that no step was taken for, as after an overflow that a gradient
        # scaler has seen.
        self.error = None
        self.has_heard = True
        risk = self._estimator.risk
        y = risk.losses.joined([call.targets[i] for i in range(len(risk.losses))])
        users_pass = call.users_pass
        if any(call.forms.values()):
            forms = [call.forms[i] for i in range(len(risk.losses))]
            users_pass.batch = replace(users_pass.batch, forms=forms)
        if call.start is not None:
            self.keep(replace(users_pass.batch, y=y), call.start)
        if not call.due:
            return
        self.add_waiting()
        if users_pass.follow(y, _hook(self.add_waiting)):
            self._following = users_pass, y
        else:
            self._add(users_pass, y)

    def add_waiting(self) -> None:
        """Add the batch that waits for the user's backward pass, if there is one: gradients of
        layers have come with it, or there was another pass, or none.
        """
        if self._following is None:
            return
        users_pass, y = self._following
        self._following = None
        if users_pass.has_failed:
            users_pass.close()
        else:
            self._add(users_pass, y)

    def _add(self, users_pass: UsersPass, y: Any) -> None:
        try:
            with self.counted(), GradMode(True):  # as in the forward pass
                # Several batches of a step are one update.
                users_pass.add(y, 1.0 if self.batches else None)
        except NumericsError as error:  # which a step raises, or rejects
            self.error = error

    def warn_of_factors(self) -> None:
        """Warn of losses that were multiplied with something before their backward pass.

        Parts of a sum and the scales of gradient scalers are none of what is minimised.
        """
        for index, gradients in self._factors.items():
            loss = self._estimator.risk.losses[index]
            factors = [abs(float(g)) / loss.weight for g in gradients if g.numel() == 1]
            if not all(map(_is_part, factors)) and not _is_part(sum(factors)):
                warn(
                    f"{loss.title} is multiplied by {sum(factors):.4g} before its backward pass, "
                    "and the curvature is that without this factor. Give the optimizer (loss, "
                    "weight), or divide the damping by it.",
                    CurvatureWarning,
                    stacklevel=level_of_user(),
                )
        self._factors = {}


def _arguments_by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    named = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named


def _is_part(factor: float) -> bool:
    """Whether it is 1/k, as of micro-batches, or a power of two, as of gradient scalers; or
    nothing.
    """
    if not isfinite(factor) or factor == 0:
        return True
    k = max(1.0, round(1 / factor))
    return abs(factor * k - 1) < 1e-3 or abs(frexp(factor * (1 + 1e-6))[0] - 0.5) < 1e-3
