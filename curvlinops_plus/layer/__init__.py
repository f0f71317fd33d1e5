"""Layer rules: what a layer saw, as rows and per-example gradients (formats: `curvlinops_plus.layer.rule`)."""

from __future__ import annotations

from curvlinops_plus.layer.conv import ConvRule
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.replay import at_least_float32
from curvlinops_plus.layer.rule import RULES, AffineRule, LayerRule, register_rule, rule_of, why_generic

__all__ = [
    "RULES",
    "AffineRule",
    "ConvRule",
    "LayerRule",
    "LinearRule",
    "at_least_float32",
    "register_rule",
    "rule_of",
    "why_generic",
]
