"""Warnings and errors of this package.

Every message says what was expected, what was given, and what to do next. Each class derives from a
built-in one, so that code that catches `ValueError` or `NotImplementedError` keeps working.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = [
    "CurvatureWarning",
    "NoClosedForm",
    "NumericsError",
    "ProcessError",
    "SingularMatrixError",
    "UnsupportedError",
    "VerificationError",
    "level_of_user",
]

# What stands between a user's line and a warning.
_NOT_USERS = {__name__.partition(".")[0], "torch", "contextlib"}


class CurvatureWarning(UserWarning):
    """Category of every warning of this package: silence it with `warnings.filterwarnings`."""


class UnsupportedError(NotImplementedError, ValueError):
    """An option of a loss, a layer or a model that is not supported, because the result would be
    wrong.
    """


class NoClosedForm(NotImplementedError):
    """A number of a matrix that does not follow from its structure without forming the matrix."""


class NumericsError(RuntimeError):
    """A matrix with NaN or infinite entries, or a decomposition that failed in every precision."""


class ProcessError(RuntimeError):
    """A computation by several processes that failed in one of them, in which all raise this;
    nothing has changed.
    """


class SingularMatrixError(NumericsError):
    """An inverse, or a negative power, of a matrix that has eigenvalues equal to zero."""


class VerificationError(RuntimeError):
    """A check of `verify()` that failed: a number disagrees with plain autodiff."""


def level_of_user() -> int:
    """The `stacklevel` of a warning that points at the user's line, whatever calls are between
    them.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in _NOT_USERS:
        level += 1
        frame = frame.f_back
    return level


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
