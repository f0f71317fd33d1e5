"""A risk is model, losses and data; its mini-batches are read, run and recorded here."""

from curvlinops_plus.risk.complex_parts import split_complex
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Group, Layer, ModuleUse, find_layers
from curvlinops_plus.risk.losses import Totals
from curvlinops_plus.risk.parameters import named_params
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.risk_options import AllRiskKeywords, Loss, RiskKeywords
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
    "AllRiskKeywords",
    "CurvaturePropagation",
    "Draws",
    "Empirical",
    "EmpiricalRisk",
    "Exact",
    "ForwardOnly",
    "Group",
    "Layer",
    "LayerBatch",
    "Loss",
    "ModuleUse",
    "MonteCarlo",
    "RiskKeywords",
    "Totals",
    "Vectors",
    "as_vectors",
    "find_layers",
    "named_params",
    "split_complex",
]
