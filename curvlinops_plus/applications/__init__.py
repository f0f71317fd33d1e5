"""Uses of curvature: functions and small classes made of a risk and an operator."""

from __future__ import annotations

from curvlinops_plus.applications.attribution import (
    attribution_scores,
    per_example_gradients,
    self_influence,
)
from curvlinops_plus.applications.datamodeling import (
    DatamodelingScore,
    linear_datamodeling_score,
)
from curvlinops_plus.applications.laplace import Laplace
from curvlinops_plus.applications.merging import merge
from curvlinops_plus.applications.penalty import QuadraticPenalty
from curvlinops_plus.applications.predictive import Normal
from curvlinops_plus.applications.pruning import prune

__all__ = [
    "DatamodelingScore",
    "Laplace",
    "Normal",
    "QuadraticPenalty",
    "attribution_scores",
    "linear_datamodeling_score",
    "merge",
    "per_example_gradients",
    "prune",
    "self_influence",
]
