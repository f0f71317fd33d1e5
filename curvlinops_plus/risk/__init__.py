"""Floor 3: model + loss + data, seen through module hooks."""

from curvlinops_plus.risk.batch import Call, LayerBatch
from curvlinops_plus.risk.layers import Group, Layer, Use, find_layers, named_params
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.totals import Totals
from curvlinops_plus.risk.vectors import Draws, Empirical, Exact, ForwardOnly, MonteCarlo, Vectors

__all__ = [
    "Call",
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
    "find_layers",
    "named_params",
]
