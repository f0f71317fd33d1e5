"""Hooks on a model and on its losses, by which plain training loops are heard."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import frexp, isfinite
from typing import Any, Protocol
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from curvlinops_plus.blocks import CurvatureEstimator
from curvlinops_plus.blocks.batch_pass import PassStart
from curvlinops_plus.blocks.heard_pass import HeardBatch
from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.risk.batches import Batch, tensors_of
from curvlinops_plus.risk.process_state import NoHook, own_passes, untraced

# Calls of a model that wait for their losses; of more, the graphs would be kept for nothing where none comes.
_LIMIT = 4


class Listener(Protocol):
    """What hooks tell of batches.

    Attributes:
        steps: That were taken.
    """

    curvature: CurvatureEstimator
    steps: int

    @property
    def due(self) -> bool:
        """Whether the step updates the statistics."""
        ...

    @property
    def looks_again(self) -> bool:
        """Whether the step runs the model on its batches once more."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the model holds its own tensors."""
        ...

    def add(self, heard: HeardBatch | None, batch: Batch, start: PassStart | None) -> None:
        """Take a batch."""
        ...


@dataclass(eq=False)
class _Call:
    """A call of the model whose losses are waited for.

    Attributes:
        batch: Without targets.
        heard: The recording, if statistics are due.
        start: What it began with, if the step looks at it once more.
        output: What the model returned.
        versions: Of the tensors in it, by identity.
        targets: Of the losses that were called, by their index.
    """

    batch: Batch
    heard: HeardBatch | None
    start: PassStart | None
    output: Any = None
    versions: dict[int, int] = field(default_factory=dict)
    targets: dict[int, Any] = field(default_factory=dict)

    def close(self) -> None:
        if self.heard is not None:
            self.heard.close()


class Hooks:
    """Hears the calls of a model, and of the losses that are applied to its outputs.

    A call is heard in training mode with gradients enabled, if its step updates the statistics or looks at its batches
    once more. Calls that no loss is applied to are dropped, and so are outputs that were written to.

    Args:
        owner: The optimizer. It is held weakly: hooks go with it.
        losses: The loss modules, in the order of the risk's losses.

    Attributes:
        paused: Whether calls are ignored: somebody else hears them.
    """

    def __init__(self, owner: Listener, model: nn.Module, losses: Sequence[nn.Module]) -> None:
        self._owner, self.paused = weakref.ref(owner), False
        self._open: _Call | None = None  # the call that the model is in
        self._waiting: list[_Call] = []
        self._factors: dict[int, list[Tensor]] = {}  # index of a loss to what it was multiplied with in the first step
        handles = [
            model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
            *(m.register_forward_hook(_Hook(self._loss, i), with_kwargs=True) for i, m in enumerate(losses)),
        ]
        self._remove = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Remove all hooks."""
        self.drop()
        self._remove()

    def drop(self) -> None:
        """Forget all calls; a step was taken."""
        for call in self._waiting:
            call.close()
        self._waiting = []

    def warn_of_factors(self) -> None:
        """Warn of losses that were multiplied with something before their backward pass, in the first step.

        Parts of a sum and the scales of gradient scalers are none of what is minimised.
        """
        factors, self._factors, owner = self._factors, {}, self._owner()
        assert owner is not None
        for index, found in factors.items():
            loss = owner.curvature.risk.losses[index]
            numbers = [abs(float(g)) / loss.weight for g in found if g.numel() == 1]
            if not all(map(_is_part, numbers)) and not _is_part(sum(numbers)):
                warn(
                    f"{loss.title} is multiplied by {sum(numbers):.4g} before its backward pass, beside the weight "
                    "that it was given with, and the curvature is that without this factor. Give the optimizer "
                    "(loss, weight), or divide the damping by it.",
                    CurvatureWarning,
                    stacklevel=level_of_user(),
                )

    @property
    def _listener(self) -> Listener | None:
        """The optimizer; None in calls that are none of its loop: passes of ours, calls again in backward passes."""
        deaf = self.paused or own_passes.depth > 0 or torch._C._current_graph_task_id() != -1
        return None if deaf else self._owner()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner = self._listener
        if owner is None or not module.training or not torch.is_grad_enabled():
            return
        if self._open is not None:  # a call that was interrupted, or has called the model itself
            self._open.close()
            self._open = None
        if not (owner.due or owner.looks_again) or not owner.in_place:  # with other tensors it is another model
            return
        single = len(args) == 1 and not kwargs
        X = args[0] if single else _by_name(module, args, kwargs)
        start = PassStart.now(module) if owner.looks_again else None
        if owner.due:
            heard = owner.curvature.begin(X, not single, watch=False)
            self._open = _Call(heard.batch, heard, start)
        else:
            self._open = _Call(owner.curvature.risk.read_input(X, not single), None, start)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._listener is None or self._open is None:
            return
        call, self._open = self._open, None
        if output is None:  # the call has failed
            return call.close()
        if call.heard is not None:
            call.heard.end(output)
        call.output = output
        call.versions = {id(t): t._version for t in tensors_of(output) if not t.is_inference()}
        self._waiting.append(call)
        if len(self._waiting) > _LIMIT:
            self._waiting.pop(0).close()

    def _loss(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        owner = self._listener
        if owner is None or not self._waiting:
            return
        given = inspect.signature(module.forward).bind(*args, **kwargs).args if kwargs else args
        risk = owner.curvature.risk
        for call in self._waiting:
            f = risk.losses.select(call.output, risk.options.output)[0][index]
            if len(given) > 1 and f is given[0] and call.versions.get(id(f), f._version) == f._version:
                break
        else:
            return
        if owner.steps == 0 and isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(partial(_append, self._factors.setdefault(index, [])))
        call.targets.setdefault(index, given[1])
        if len(call.targets) < len(risk.losses):
            return  # others will be called on this output
        self._waiting.remove(call)
        y = risk.losses.joined([call.targets[i] for i in range(len(risk.losses))])
        owner.add(call.heard, replace(call.batch, y=y), call.start)


def _append(found: list[Tensor], g: Tensor) -> None:
    found.append(g.detach())


def _is_part(factor: float) -> bool:
    """Whether it is 1/k, as of micro-batches, or a power of two, as of gradient scalers; or nothing."""
    if not isfinite(factor) or factor == 0:
        return True
    k = max(1.0, round(1 / factor))
    return abs(factor * k - 1) < 1e-3 or abs(frexp(factor * (1 + 1e-6))[0] - 0.5) < 1e-3


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
    signature = inspect.signature(module.forward)
    named = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(
                f"{type(module).__name__} was called with several inputs that have no names. Call it inside "
                "`with optimizer.listen((X, y)):`, or give its inputs names."
            )
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
