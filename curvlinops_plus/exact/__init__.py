"""Floor 4: exact matrix-free operators about a risk."""

from curvlinops_plus.exact.activation import ActivationHessianLinearOperator
from curvlinops_plus.exact.jacobian import (
    GGNFactorLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.exact.matrix_free import (
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
)

__all__ = [
    "ActivationHessianLinearOperator",
    "EFLinearOperator",
    "FisherMCLinearOperator",
    "GGNFactorLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "JacobianLinearOperator",
    "TransposedJacobianLinearOperator",
]
