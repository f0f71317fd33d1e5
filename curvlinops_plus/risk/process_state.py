"""What belongs to the whole process while a risk is evaluated: a lock, and switches of PyTorch and Python.

The random generators, the options of compilers and kernels, the filters of warnings and the modules themselves are
seen by every thread. So one thread at a time evaluates risks; others wait, and each finds everything as it left it.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.backends import mha

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.RLock()


def _new_lock() -> None:
    """A process that was forked while another thread had the lock would wait for ever."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def exclusive() -> AbstractContextManager[Any]:
    """Context that one thread at a time is in, as often as it likes."""
    return _lock


class Depth:
    """Context that counts how often it is entered; generators take several times as long."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class _OwnPasses(Depth, threading.local):
    pass


#: Context in which this thread's calls of models are this package's own, not the user's.
own_passes = _OwnPasses()


class _Eager:
    depth = 0
    contexts = ExitStack()


@contextmanager
def eager() -> Iterator[None]:
    """Context in which compiled modules run eagerly, and transformers without fused inference: else no hooks fire.

    Counted, since these contexts need not be left in the opposite order: an inner one that restored what it had found
    would leave everything eager for good.
    """
    with exclusive():
        if _Eager.depth == 0:
            _Eager.contexts.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            if _is_compiler_loaded():
                _Eager.contexts.enter_context(torch.compiler.set_stance("force_eager"))
        _Eager.depth += 1
        try:
            yield
        finally:
            _Eager.depth -= 1
            if _Eager.depth == 0:
                _Eager.contexts.close()


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the warnings of `vmap` about operations that it takes in a loop: slower, and right."""
    with exclusive(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        yield


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """A function that `torch.compile` does not look into: around it, the graph of its caller is divided.

    PyTorch's own `torch.compiler.disable`, which loads the compiler: that takes a second, and is left out as long as
    nobody has loaded it, so that nothing is compiled.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if _is_compiler_loaded() else function)(*args, **kwargs)

    return called


def _is_compiler_loaded() -> bool:
    return "torch._dynamo" in sys.modules


class OwnThread:
    """Whether code runs for the thread that made this object: in it, or in a backward pass.

    Autograd has threads of its own, where activation checkpointing calls modules once more.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __call__(self) -> bool:
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1


class Uncopied(partial[Any]):
    """A hook of a module that copies and pickles of the module don't carry, and that changes no output."""

    only_reads = True

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        return NoHook, ()


class NoHook:
    """A hook that does nothing."""

    only_reads = True

    def __call__(self, *args: Any) -> None:
        pass


def own_calls(hook: Callable[P, T]) -> Callable[P, T | None]:
    """A hook of a module that ignores calls of other threads, which may evaluate the model meanwhile."""
    ours = OwnThread()

    def called(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return hook(*args, **kwargs) if ours() else None

    return Uncopied(called)
