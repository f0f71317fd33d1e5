"""Classes with the names, arguments and defaults of curvlinops 3.0.1."""

from curvlinops_plus.classic.arguments import FisherType, KFACType
from curvlinops_plus.classic.kronecker_factored import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    KFOCLinearOperator,
)
from curvlinops_plus.classic.matrix_free import (
    ActivationHessianLinearOperator,
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNFactorLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)

__all__ = [
    "ActivationHessianLinearOperator",
    "EFLinearOperator",
    "EKFACLinearOperator",
    "FisherMCLinearOperator",
    "FisherType",
    "GGNDiagonalLinearOperator",
    "GGNFactorLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "JacobianLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KFOCLinearOperator",
    "TransposedJacobianLinearOperator",
]
