"""Contexts that end also where an interrupt falls between a block and its end.

Python leaves a `with` block by a call, and Ctrl-C may come just before it: what the block has
entered then stays entered for good, such as `torch.no_grad()` or a lock. Here it ends when nothing
refers to the context any more, which is at once: contexts of this package that are generators are
entered by `with`, all others through `Endings`. (A generator inside of an `ExitStack` is referred
to by the stack's own frame, until garbage is collected.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


class Endings(ExitStack):
    """An exit stack that is also left when it is dropped.

    Example:
        >>> endings = Endings()
        >>> _ = endings.enter_context(torch.no_grad())
        >>> del endings
        >>> torch.is_grad_enabled()
        True
    """

    def surely(self, undo: Callable[..., Any], *args: Any) -> None:
        """Call a function of this package at the end: twice, since an interrupt may fall into the
        first call. What it undoes must be undone no further by the second one.
        """
        self.callback(undo, *args)
        self.callback(undo, *args)

    def __del__(self) -> None:
        self.close()


@contextmanager
def entered(context: AbstractContextManager[Any]) -> Iterator[None]:
    """A context of another package, which also ends when it is dropped."""
    with Endings() as endings:
        endings.enter_context(context)
        yield


class _Entered(threading.local):
    """Identities of the `GradMode` contexts that this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.modes: list[int] = []


_entered = _Entered()


class GradMode:
    """`torch.set_grad_enabled(enabled)`, which also ends when it is dropped, or when a context
    around it ends: whichever is first.

    Example:
        >>> with GradMode(False):
        ...     torch.is_grad_enabled()
        False
    """

    _depth = -1

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        modes = _entered.modes
        self._before = torch.is_grad_enabled()
        self._depth = len(modes)
        modes.append(id(self))
        torch._C._set_grad_enabled(self._enabled)

    def __exit__(self, *error: object) -> None:
        modes = _entered.modes
        if -1 < self._depth < len(modes) and modes[self._depth] == id(self):
            torch._C._set_grad_enabled(self._before)
            del modes[self._depth :]

    def __del__(self) -> None:
        # Not by a call: Python goes on after an interrupt here, and each call is one more place.
        modes = _entered.modes
        if -1 < self._depth < len(modes) and modes[self._depth] == id(self):
            torch._C._set_grad_enabled(self._before)
            del modes[self._depth :]
