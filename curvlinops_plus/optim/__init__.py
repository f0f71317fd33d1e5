"""Floor 5: algorithms that step."""

from curvlinops_plus.optim.fisher import CenteredFisherLinearOperator
from curvlinops_plus.optim.optimizer import StochasticReconfiguration
from curvlinops_plus.optim.reconfiguration import Reconfiguration, fisher_inverse, stochastic_reconfiguration
from curvlinops_plus.optim.solve import SolveReport

__all__ = [
    "CenteredFisherLinearOperator",
    "Reconfiguration",
    "SolveReport",
    "StochasticReconfiguration",
    "fisher_inverse",
    "stochastic_reconfiguration",
]
