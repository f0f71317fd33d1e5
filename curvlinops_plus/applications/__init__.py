"""Uses of curvature: functions and small classes made of a risk and an operator."""

from __future__ import annotations

from curvlinops_plus.applications.merging import merge
from curvlinops_plus.applications.penalty import QuadraticPenalty

__all__ = ["QuadraticPenalty", "merge"]
