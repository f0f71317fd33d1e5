"""Decisions about numbers on a device, which the host reads together.

A number that the host reads, as `bool(t)` does, makes it wait until the device has done all that
was asked of it. Nearly all such decisions turn out as expected: a matrix is finite, its
decomposition succeeded, no eigenvalue is 0. `read_together` computes as if all did, and then reads
all of them with one transfer. Only if one did not, everything is computed again, one decision after
the other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Expectations:
    """What a computation has taken for granted, and how what was made with that is undone."""

    def __init__(self) -> None:
        #: By dtype: flags that must be false, and numbers that must be finite.
        self.scalars: dict[torch.dtype, list[Tensor]] = {}
        self.undo: list[Callable[[], object]] = []

    def expect(self, scalar: Tensor) -> None:
        self.scalars.setdefault(scalar.dtype, []).append(scalar.detach())

    def hold(self) -> bool:
        """Whether all is as expected; waits for the device once."""
        surprises = []
        for dtype, scalars in self.scalars.items():
            together = torch.stack(scalars)
            surprises.append((together if dtype == torch.bool else ~together.isfinite()).any())
        return not surprises or not bool(torch.stack(surprises).any())


def _no_expectations() -> None:
    return None


class _OfThread(threading.local):
    """The expectations of the computation that this thread is in.

    They end with the computation also where an interrupt falls before `read_together` has said so.
    """

    def __init__(self) -> None:
        self.reference: Callable[[], _Expectations | None] = _no_expectations


_of_thread = _OfThread()


def read_together(compute: Callable[[], T], device: torch.device) -> T:
    """`compute()`, with one transfer for all decisions of `is_true` and `is_finite` in it.

    Args:
        compute: What may be called twice: a function whose only lasting effects are declared by
            `undo_if_unexpected`.
        device: Where its numbers are. From the CPU they are read one by one, which costs nothing.

    Example:
        >>> read_together(lambda: is_true(torch.tensor(True)), torch.device("cpu"))
        True
    """
    if device.type == "cpu" or _of_thread.reference() is not None:
        return compute()
    expectations = _Expectations()
    result: list[T] = []
    try:
        _of_thread.reference = weakref.ref(expectations)
        value = compute()
        if expectations.hold():
            result.append(value)
    except Exception:
        # Perhaps of numbers that are not as expected. If not, it is raised again below.
        pass
    finally:
        _of_thread.reference = _no_expectations
        if not result:
            for undo in expectations.undo:
                undo()
    return result[0] if result else compute()


def is_true(flag: Tensor) -> bool:
    """Whether a 0-d flag is true, which hardly ever is; False at first in `read_together`."""
    expectations = _of_thread.reference()
    if expectations is None or flag.device.type == "cpu":
        return bool(flag)
    expectations.expect(flag)
    return False


def is_finite(number: Tensor) -> bool:
    """Whether a 0-d tensor is finite, as it nearly always is; True at first in `read_together`."""
    expectations = _of_thread.reference()
    if expectations is None or number.device.type == "cpu":
        return isfinite(number)
    expectations.expect(number)
    return True


def undo_if_unexpected(undo: Callable[[], object]) -> None:
    """Call `undo` if a decision of the `read_together` around turns out otherwise, or is never
    read.
    """
    expectations = _of_thread.reference()
    if expectations is not None:
        expectations.undo.append(undo)
