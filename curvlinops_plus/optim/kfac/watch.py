"""Hooks on a model and on its losses, by which plain training loops are heard."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.optim.kfac.running_curvature import HeardCall, RunningCurvature
from curvlinops_plus.optim.kfac.step_batches import Factor, other_targets, same_targets
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import tensors_of
from curvlinops_plus.risk.graph import postorder
from curvlinops_plus.risk.process_state import NoHook, own_passes, untraced

# Calls of a model that wait for their losses; of more, the graphs would be kept for nothing where none comes.
_LIMIT = 4


@dataclass(eq=False)
class _Call:
    """A call of the model whose losses are waited for, or were called.

    Attributes:
        versions: Of the tensors that it returned, by identity.
        class_axes: Of the outputs, where they are not the losses' own.
        targets: Of the losses that were called, by their index.
    """

    call: HeardCall
    versions: dict[int, int]
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    class_axes: Sequence[int | None] = ()
    targets: dict[int, Any] = field(default_factory=dict)
    factors: dict[int, Factor] = field(default_factory=dict)

    def read(self, risk: EmpiricalRisk) -> list[weakref.ref[Tensor]]:
        """What each loss reads."""
        if not self.outputs:
            read, self.class_axes = risk.losses.select(self.call.heard.output, risk.options.output)
            self.outputs = [weakref.ref(f) for f in read]
        return self.outputs


class Watch:
    """Hears calls of a model, and of the losses that are applied to its outputs.

    A call is heard in training mode with gradients enabled, in any thread. Calls that no loss is applied to are
    dropped, and so are outputs that were written to.

    Args:
        losses: The loss modules, in the order of the risk's losses.
        remembers: Whether the step looks at its batches once more.

    The hooks hold their owner weakly: they are gone with it.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[nn.Module],
        curvature: RunningCurvature,
        remembers: Callable[[], bool],
    ) -> None:
        self._curvature, self._remembers = curvature, remembers
        self._open = threading.local()  # the call that this thread is in
        self._calls: list[_Call] = []
        self._added: list[_Call] = []  # to which all losses were applied
        self._dropped: list[weakref.ref[Tensor]] = []  # outputs of calls that waited too long
        #: Whether calls are ignored: somebody else hears them.
        self.paused = False
        handles = [
            model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
            *(
                loss.register_forward_hook(_Hook(self._loss_called, index), with_kwargs=True)
                for index, loss in enumerate(losses)
            ),
        ]
        self._remove = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Remove all hooks."""
        self.drop()
        self._remove()

    def drop(self) -> None:
        """Forget all calls; a step was taken."""
        for waiting in self._calls:
            waiting.call.heard.close()
        self._calls, self._added, self._dropped = [], [], []

    # --------------------------------------------------------------------------------------------------------- hooks
    @property
    def _is_deaf(self) -> bool:
        """Whether a call is none of the user's loop: own passes, and calls again in backward passes."""
        return self.paused or own_passes.depth > 0 or torch._C._current_graph_task_id() != -1

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_deaf:
            return
        if not module.training or not torch.is_grad_enabled():
            mode = "without gradients (torch.no_grad)" if module.training else "in eval mode (write `model.train()`)"
            self._curvature.noticed.calls.add(mode)
            return
        self._added = [call for call in self._added if any(f() is not None for f in call.outputs)]
        if (left := self._left()) is not None:  # it was interrupted, or has called the model itself
            left.heard.close()
        single = len(args) == 1 and not kwargs
        X = args[0] if single else _by_name(module, args, kwargs)
        self._open.call = self._curvature.begin(X, not single, self._remembers())

    def _left(self) -> HeardCall | None:
        """The call that this thread is in; it is in none then."""
        call, self._open.call = getattr(self._open, "call", None), None
        return call

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_deaf or (call := self._left()) is None:
            return
        if output is None:  # the call has failed
            call.heard.close()
            return
        call.heard.end(output)
        self._calls.append(_Call(call, {id(t): t._version for t in tensors_of(output) if not t.is_inference()}))
        if len(self._calls) > _LIMIT:
            oldest = self._calls.pop(0).call.heard
            self._dropped = [ref for ref in self._dropped if ref() is not None]
            self._dropped += [weakref.ref(t) for t in tensors_of(oldest.output)]
            oldest.close()

    def _loss_called(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> None:
        if self._is_deaf:
            return
        noticed, inside = self._curvature.noticed, getattr(self._open, "call", None) is not None
        noticed.inside |= inside
        if not (self._calls or self._added or self._dropped):
            return
        given = inspect.signature(module.forward).bind(*args, **kwargs).args if kwargs else args
        if len(given) < 2:
            return
        if (found := self._of_output(given[0], index)) is None:
            if self._calls and not inside:
                noticed.called_on(index, *given[:2], self._calls[-1].read(self._curvature.risk)[index]())
            return
        self._require_constant(given[1])
        self._apply(found, index, given[0], given[1], value)

    def _apply(self, found: _Call, index: int, f: Tensor, y: Any, value: Tensor) -> None:
        """A loss was called on an output and targets, with this value."""
        losses = self._curvature.risk.losses
        waits = found in self._calls  # for others of the losses
        if waits and index in found.targets:
            if not same_targets(found.targets[index], y):
                raise other_targets()
            found.factors[index].watch(value)
            return
        factor = Factor(self._curvature.seen, value)
        if not waits:
            self._curvature.repeat(found.call, index, f, found.class_axes[index], y, factor)
            return
        found.targets[index], found.factors[index] = y, factor
        missing = self._curvature.noticed.missing = set(range(len(losses))) - found.targets.keys()
        if not missing:
            self._calls.remove(found)
            self._added.append(found)
            joined = losses.joined([found.targets[i] for i in range(len(losses))])
            self._curvature.add(found.call, joined, [found.factors[i] for i in range(len(losses))])
            found.call.heard.output = None  # it is the user's to keep

    def _require_constant(self, y: Any) -> None:
        """Refuse targets that depend on the parameters, as a second output of the model."""
        functions = [t.grad_fn for t in tensors_of(y) if t.grad_fn is not None]
        if functions:
            params = set(self._curvature.risk.params.values())
            if any(getattr(node, "variable", None) in params for node, _ in postorder(functions)):
                raise UnsupportedError(
                    "The target of the loss depends on the parameters (another call of the model?), and would count "
                    "as a constant in the curvature. Detach it; or make a model that returns both outputs as one, and "
                    "a loss of them."
                )

    def _of_output(self, f: Any, index: int) -> _Call | None:
        """The call that has returned what a loss is called on, if it was not written to since then.

        Raises:
            RuntimeError: If the model was called too often meanwhile.
        """
        for call in (*self._calls, *self._added):
            if call.read(self._curvature.risk)[index]() is f:
                return call if call.versions.get(id(f), f._version) == f._version else None
        if any(ref() is f for ref in self._dropped):
            raise RuntimeError(
                f"The model was called {_LIMIT} more times before the loss was called on this output. Call the loss "
                "earlier; or the model inside `with optimizer.listen((X, y)):`, once for each batch."
            )
        return None


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _Hook:
    """A hook that holds its owner weakly. Copies and pickles of a module have nothing in its place."""

    only_reads = True

    def __init__(self, method: Callable[..., None], *first: Any) -> None:
        self._method, self._first = weakref.WeakMethod(method), first

    @untraced  # what it does is not part of the model
    def __call__(self, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(*self._first, *args)

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        return NoHook, ()


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    named = {}
    for name, value in bound.items():
        kind = inspect.signature(module.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(
                f"{type(module).__name__} was called with several inputs that have no names. Call it inside "
                "`with optimizer.listen((X, y)):`, or give its inputs names."
            )
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
