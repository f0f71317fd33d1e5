"""Uses of curvature: functions and small classes made of a risk and an operator."""

from __future__ import annotations

from curvlinops_plus.applications.laplace import Laplace
from curvlinops_plus.applications.merging import merge
from curvlinops_plus.applications.penalty import QuadraticPenalty
from curvlinops_plus.applications.predictive import Normal

__all__ = ["Laplace", "Normal", "QuadraticPenalty", "merge"]
