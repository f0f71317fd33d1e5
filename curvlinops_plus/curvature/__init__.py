"""Floor 4: operators about a risk."""

from curvlinops_plus.curvature.accumulate import Accumulator, Approximation
from curvlinops_plus.curvature.activation import ActivationHessianLinearOperator
from curvlinops_plus.curvature.blockwise import BlockwiseLinearOperator, curvature
from curvlinops_plus.curvature.classic import (
    EKFACLinearOperator,
    FisherType,
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
    KFACType,
    KFOCLinearOperator,
)
from curvlinops_plus.curvature.estimator import CurvatureEstimator
from curvlinops_plus.curvature.inverse import KFACInverseLinearOperator
from curvlinops_plus.curvature.jacobian import (
    GGNFactorLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.curvature.kronecker import EKFAC, KFAC, compute_eigenvalue_correction_linear_weight_sharing
from curvlinops_plus.curvature.matrixfree import (
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
)
from curvlinops_plus.curvature.nearest import NearestKronecker
from curvlinops_plus.curvature.simple import DiagonalBlock, FullBlock, ScaledIdentity
from curvlinops_plus.curvature.state import load, save
from curvlinops_plus.curvature.tnt import TNT
from curvlinops_plus.curvature.verify import Verification

__all__ = [
    "EKFAC",
    "KFAC",
    "TNT",
    "Accumulator",
    "ActivationHessianLinearOperator",
    "Approximation",
    "BlockwiseLinearOperator",
    "CurvatureEstimator",
    "DiagonalBlock",
    "EFLinearOperator",
    "EKFACLinearOperator",
    "FisherMCLinearOperator",
    "FisherType",
    "FullBlock",
    "GGNDiagonalLinearOperator",
    "GGNFactorLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "JacobianLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KFOCLinearOperator",
    "NearestKronecker",
    "ScaledIdentity",
    "TransposedJacobianLinearOperator",
    "Verification",
    "compute_eigenvalue_correction_linear_weight_sharing",
    "curvature",
    "load",
    "save",
]
