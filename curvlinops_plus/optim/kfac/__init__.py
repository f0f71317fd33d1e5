"""K-FAC as an optimizer."""

from curvlinops_plus.optim.kfac.kfac_optimizer import KFACOptimizer, KFACPreconditioner
from curvlinops_plus.optim.kfac.policies import LevenbergMarquardt, NormConstraint, StepReport, WeightDecay

__all__ = ["KFACOptimizer", "KFACPreconditioner", "LevenbergMarquardt", "NormConstraint", "StepReport", "WeightDecay"]
