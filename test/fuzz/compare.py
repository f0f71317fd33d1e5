"""Comparing numbers, and what a comparison that fails says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Failure(AssertionError):
    """A law that does not hold, and what was found and expected."""

    def __init__(self, law: str, numbers: str) -> None:
        super().__init__(f"{law}: {numbers}")
        self.law, self.numbers = law, numbers


class Skipped(Exception):
    """A check that says nothing about a case."""


def require(condition: bool) -> None:
    """Leave a check that does not apply to a case."""
    if not condition:
        raise Skipped


def holds(law: str, condition: bool, numbers: str) -> None:
    """Fail unless something is true."""
    if not condition:
        raise Failure(law, numbers)


def equal(law: str, got: Any, expected: Any, tolerance: float, scale: float | None = None) -> None:
    """Fail unless shapes agree and the difference is below the tolerance, relative to `scale` or the norm expected."""
    got, expected = (torch.as_tensor(t).detach().to(torch.float64) for t in (got, expected))
    holds(law, got.shape == expected.shape, f"shape {list(got.shape)}, expected {list(expected.shape)}")
    if not got.numel():
        return
    holds(law, bool(expected.isfinite().all()), "the expected numbers are not finite")
    holds(law, bool(got.isfinite().all()), f"not finite: {_short(got)}, expected {_short(expected)}")
    error = float((got - expected).norm())
    size = max(float(expected.norm()) if scale is None else scale, 1e-4)
    holds(
        law, error <= tolerance * size, f"relative error {error / size:.1e}: {_short(got)}, expected {_short(expected)}"
    )


def _short(t: Tensor) -> str:
    if t.numel() == 1:
        return f"{float(t):.10g}"
    return f"norm {float(t.norm()):.8g} of {list(t.shape)}"
