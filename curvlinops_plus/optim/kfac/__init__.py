"""K-FAC as an optimizer."""

from curvlinops_plus.optim.kfac.kfac_optimizer import KFACOptimizer
from curvlinops_plus.optim.kfac.policies import LevenbergMarquardt, NormConstraint, StepReport, WeightDecay
from curvlinops_plus.optim.kfac.preconditioner import KFACPreconditioner

__all__ = ["KFACOptimizer", "KFACPreconditioner", "LevenbergMarquardt", "NormConstraint", "StepReport", "WeightDecay"]
