"""Floor 3: model + loss + data, seen through module hooks."""

from curvlinops_plus.risk.layer_batch import Call, LayerBatch
from curvlinops_plus.risk.layers import Group, Layer, Use, find_layers, named_params
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.totals import Totals
from curvlinops_plus.risk.vectors import (
    CurvaturePropagation,
    Draws,
    Empirical,
    Exact,
    ForwardOnly,
    MonteCarlo,
    Vectors,
    as_vectors,
)

__all__ = [
    "Call",
    "CurvaturePropagation",
    "Draws",
    "Empirical",
    "EmpiricalRisk",
    "Exact",
    "ForwardOnly",
    "Group",
    "Layer",
    "LayerBatch",
    "MonteCarlo",
    "Recorder",
    "Totals",
    "Use",
    "Vectors",
    "as_vectors",
    "find_layers",
    "named_params",
]
