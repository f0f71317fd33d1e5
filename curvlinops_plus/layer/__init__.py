"""Layer rules: the inputs and output gradients of a layer as rows, and its per-example gradients.

Shapes and conventions are those of `LayerRule` and `AffineRule`.
"""

from __future__ import annotations

from curvlinops_plus.layer.attention import AttentionRule
from curvlinops_plus.layer.conv import ConvRule, TransposedConvRule
from curvlinops_plus.layer.embedding import EmbeddingBagRule, EmbeddingRule
from curvlinops_plus.layer.linear import Conv1DRule, LinearRule
from curvlinops_plus.layer.normalization import PReLURule, ScaleShiftRule
from curvlinops_plus.layer.recurrent import RecurrentRule
from curvlinops_plus.layer.registry import RULES, register_rule, rule_of, why_generic
from curvlinops_plus.layer.replay import differentiable_parameters
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.layer.rule import AffineRule, LayerRule
from curvlinops_plus.layer.rule_check import check_rule
from curvlinops_plus.linalg.numerics import at_least_float32

__all__ = [
    "RULES",
    "AffineRule",
    "AttentionRule",
    "Conv1DRule",
    "ConvRule",
    "EmbeddingBagRule",
    "EmbeddingRule",
    "LayerRule",
    "LinearRule",
    "PReLURule",
    "RecurrentRule",
    "ScaleShiftRule",
    "SparseRows",
    "TransposedConvRule",
    "at_least_float32",
    "check_rule",
    "differentiable_parameters",
    "register_rule",
    "rule_of",
    "why_generic",
]
