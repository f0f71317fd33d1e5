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

__all__ = [
    "EKFACLinearOperator",
    "FisherType",
    "GGNDiagonalLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KFOCLinearOperator",
]
