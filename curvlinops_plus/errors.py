"""Warnings and errors of this package, so that a program can tell ours from everybody else's.

Every error says what was expected, what came, and what to do next. Each class is also a built-in one, so that code that
catches `ValueError` or `NotImplementedError` keeps working.
"""

from __future__ import annotations

__all__ = [
    "CurvatureWarning",
    "NoClosedForm",
    "NumericsError",
    "SingularMatrixError",
    "UnsupportedError",
    "VerificationError",
]


class CurvatureWarning(UserWarning):
    """Category of every warning of this package: silence it with `warnings.filterwarnings`."""


class UnsupportedError(NotImplementedError, ValueError):
    """An option of a loss, a layer or a model that we refuse by name, because the answer would be wrong."""


class NoClosedForm(NotImplementedError):
    """A number of a matrix that does not follow from its structure without forming the matrix."""


class NumericsError(RuntimeError):
    """A matrix with NaN or infinite entries, or a decomposition that failed in every precision."""


class SingularMatrixError(NumericsError):
    """An inverse, or a negative power, of a matrix that has eigenvalues equal to zero."""


class VerificationError(RuntimeError):
    """A check of `verify()` that failed: some number of ours disagrees with plain autodiff."""
