"""Floor 4: the classic door, classes with the names, arguments and defaults of curvlinops 3.0.1."""

from curvlinops_plus.classic.kfac_inverse import KFACInverseLinearOperator
from curvlinops_plus.classic.kronecker_factored import (
    EKFACLinearOperator,
    FisherType,
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
    KFACType,
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
