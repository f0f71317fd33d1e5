"""Stochastic reconfiguration: natural gradients for log-amplitudes and other scores."""

from curvlinops_plus.optim.reconfiguration.damped_solve import SolveReport
from curvlinops_plus.optim.reconfiguration.directions import (
    Reconfiguration,
    fisher_inverse,
    stochastic_reconfiguration,
)
from curvlinops_plus.optim.reconfiguration.fisher import CenteredFisherLinearOperator
from curvlinops_plus.optim.reconfiguration.optimizer import StochasticReconfiguration

__all__ = [
    "CenteredFisherLinearOperator",
    "Reconfiguration",
    "SolveReport",
    "StochasticReconfiguration",
    "fisher_inverse",
    "stochastic_reconfiguration",
]
