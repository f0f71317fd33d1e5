"""Hooks on a model and on its losses, by which plain training loops are heard."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from curvlinops_plus.blocks.heard_pass import HeardBatch
from curvlinops_plus.risk.process_state import OwnThread, in_own_passes

__all__ = ["Watch"]


class Watch:
    """Hears calls of a model, and of the losses that are applied to its outputs.

    A call is heard in training mode with gradients enabled. Calls that no loss is applied to are dropped.

    Args:
        model: The model.
        losses: The loss modules, in the order of the risk's losses.
        begin: Called before a call of the model, with its input and whether it is unpacked; returns what hears it, or
            None.
        outputs: Picks the tensors that the losses read out of what the model returned.
        add: Called with what has heard a call, and the targets.

    The hooks hold their owner weakly: they are gone with it.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[nn.Module],
        begin: Callable[[Any, bool], HeardBatch | None],
        outputs: Callable[[Any], Sequence[Tensor]],
        add: Callable[[HeardBatch, Sequence[Any]], None],
    ) -> None:
        self._model, self._losses = model, losses
        self._begin, self._outputs, self._add = begin, outputs, add
        self._heard: HeardBatch | None = None
        self._targets: dict[int, Any] = {}
        #: Whether calls are ignored: somebody else hears them.
        self.paused = False
        self._ours = OwnThread()
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
        """Forget a call to which no loss was applied."""
        if self._heard is not None:
            self._heard.close()
        self._heard, self._targets = None, {}

    # --------------------------------------------------------------------------------------------------------- hooks
    @property
    def _is_deaf(self) -> bool:
        """Whether a call is none of the user's loop."""
        return self.paused or in_own_passes() or not self._ours()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_deaf or not module.training or not torch.is_grad_enabled():
            return
        self.drop()
        single = len(args) == 1 and not kwargs
        X = args[0] if single else _by_name(module, args, kwargs)
        self._heard = self._begin(X, not single)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._heard is None or self._is_deaf or self._heard.output is not None:
            return
        if output is None:  # the call has failed
            self.drop()
        else:
            self._heard.end(output)

    def _loss_called(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> None:
        if self._heard is None or self._is_deaf or self._heard.output is None:
            return
        given = inspect.signature(module.forward).bind(*args, **kwargs).args
        read = self._outputs(self._heard.output)
        if not given or given[0] is not read[index]:
            return
        self._targets[index] = given[1]
        if len(self._targets) == len(self._losses):
            heard, targets = self._heard, [self._targets[i] for i in range(len(self._losses))]
            self._heard, self._targets = None, {}
            self._add(heard, targets)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _Hook:
    """A hook that holds its owner weakly. Copies and pickles of a module have nothing in its place.

    Args:
        method: A bound method.
        first: Its first arguments.
    """

    only_reads = True

    def __init__(self, method: Callable[..., None], *first: Any) -> None:
        self._method, self._first = weakref.WeakMethod(method), first

    def __call__(self, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(*self._first, *args)

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    """A hook that does nothing."""

    only_reads = True

    def __call__(self, *args: Any) -> None:
        pass


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
