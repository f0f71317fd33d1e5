"""Optimization with curvature: K-FAC, and stochastic reconfiguration."""

from curvlinops_plus.optim.kfac.kfac_optimizer import KFACOptimizer
from curvlinops_plus.optim.kfac.policies import (
    LevenbergMarquardt,
    NormConstraint,
    StepReport,
    WeightDecay,
)
from curvlinops_plus.optim.kfac.preconditioner import KFACPreconditioner
from curvlinops_plus.optim.reconfiguration.damped_solve import (
    CenteredFisherLinearOperator,
    SolveReport,
)
from curvlinops_plus.optim.reconfiguration.directions import (
    Reconfiguration,
    StochasticReconfiguration,
    fisher_inverse,
    stochastic_reconfiguration,
)

__all__ = [
    "CenteredFisherLinearOperator",
    "KFACOptimizer",
    "KFACPreconditioner",
    "LevenbergMarquardt",
    "NormConstraint",
    "Reconfiguration",
    "SolveReport",
    "StepReport",
    "StochasticReconfiguration",
    "WeightDecay",
    "fisher_inverse",
    "stochastic_reconfiguration",
]
