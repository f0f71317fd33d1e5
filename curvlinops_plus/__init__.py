"""Curvature of neural networks as linear operators: Hessian, GGN, Fisher, KFAC, EKFAC.

The classic door: `KFACLinearOperator`, `EKFACLinearOperator`, `GGNLinearOperator`, …. The composing door:
`curvature(EmpiricalRisk(model, loss, data), {layer: approximation})`.
"""

from curvlinops_plus.curvature import (
    EKFAC,
    KFAC,
    Accumulator,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    FisherMCLinearOperator,
    FisherType,
    FullBlock,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    KFACType,
    compute_eigenvalue_correction_linear_weight_sharing,
    curvature,
    load,
    save,
)
from curvlinops_plus.errors import (
    CurvatureWarning,
    NoClosedForm,
    NumericsError,
    SingularMatrixError,
    UnsupportedError,
    VerificationError,
)
from curvlinops_plus.layer import AffineRule, LayerRule, SparseRows, check_rule, register_rule
from curvlinops_plus.likelihood import FromDistribution, Likelihood, register_likelihood
from curvlinops_plus.linalg import IdentityLinearOperator, LinearOperator, RelativeDamping
from curvlinops_plus.risk import (
    CurvaturePropagation,
    Empirical,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    MonteCarlo,
    as_vectors,
)
from curvlinops_plus.version import __version__

__all__ = [
    "EKFAC",
    "KFAC",
    "Accumulator",
    "AffineRule",
    "BlockwiseLinearOperator",
    "CurvatureEstimator",
    "CurvaturePropagation",
    "CurvatureWarning",
    "DiagonalBlock",
    "EFLinearOperator",
    "EKFACLinearOperator",
    "Empirical",
    "EmpiricalRisk",
    "Exact",
    "FisherMCLinearOperator",
    "FisherType",
    "ForwardOnly",
    "FromDistribution",
    "FullBlock",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "IdentityLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "LayerRule",
    "Likelihood",
    "LinearOperator",
    "MonteCarlo",
    "NoClosedForm",
    "NumericsError",
    "RelativeDamping",
    "SingularMatrixError",
    "SparseRows",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "as_vectors",
    "check_rule",
    "compute_eigenvalue_correction_linear_weight_sharing",
    "curvature",
    "load",
    "register_likelihood",
    "register_rule",
    "save",
]
