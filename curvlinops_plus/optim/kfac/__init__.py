"""K-FAC as an optimizer."""

from curvlinops_plus.optim.kfac.kfac_optimizer import KFACOptimizer
from curvlinops_plus.optim.kfac.policies import LevenbergMarquardt, NormConstraint, WeightDecay
from curvlinops_plus.optim.kfac.preconditioner import KFACPreconditioner
from curvlinops_plus.optim.kfac.step_report import StepReport

__all__ = ["KFACOptimizer", "KFACPreconditioner", "LevenbergMarquardt", "NormConstraint", "StepReport", "WeightDecay"]
