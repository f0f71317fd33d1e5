"""Optimization with curvature: stochastic reconfiguration."""

from curvlinops_plus.optim.reconfiguration import (
    CenteredFisherLinearOperator,
    Reconfiguration,
    SolveReport,
    StochasticReconfiguration,
    fisher_inverse,
    stochastic_reconfiguration,
)

__all__ = [
    "CenteredFisherLinearOperator",
    "Reconfiguration",
    "SolveReport",
    "StochasticReconfiguration",
    "fisher_inverse",
    "stochastic_reconfiguration",
]
