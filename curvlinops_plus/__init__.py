"""Curvature of neural networks as linear operators: Hessian, GGN, Fisher, KFAC, EKFAC.

The classic door: `KFACLinearOperator`, `EKFACLinearOperator`, `GGNLinearOperator`, …. The composing door:
`curvature(EmpiricalRisk(model, loss, data), {layer: approximation})`.
"""

from curvlinops_plus.blocks import (
    EKFAC,
    KFAC,
    TNT,
    Accumulator,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    DiagonalBlock,
    FullBlock,
    NearestKronecker,
    ScaledIdentity,
    compute_eigenvalue_correction_linear_weight_sharing,
    curvature,
)
from curvlinops_plus.blocks import (
    load as load,
)
from curvlinops_plus.blocks import (
    save as save,
)
from curvlinops_plus.classic import (
    EKFACLinearOperator,
    FisherType,
    GGNDiagonalLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    KFACType,
    KFOCLinearOperator,
)
from curvlinops_plus.errors import (
    CurvatureWarning,
    NoClosedForm,
    NumericsError,
    SingularMatrixError,
    UnsupportedError,
    VerificationError,
)
from curvlinops_plus.estimate import (
    LanczosApproximateLogSpectrumCached,
    LanczosApproximateSpectrumCached,
    approximate_boundaries,
    approximate_boundaries_abs,
    condition_number,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    plot_spectrum,
    random_vector,
    spectral_norm,
    top_eigenpairs,
    xdiag,
    xtrace,
)
from curvlinops_plus.estimate import (
    logdet as logdet,
)
from curvlinops_plus.exact import (
    ActivationHessianLinearOperator,
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNFactorLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.layer import AffineRule, LayerRule, SparseRows, check_rule, register_rule
from curvlinops_plus.likelihood import FromDistribution, Likelihood, register_likelihood
from curvlinops_plus.linalg import (
    CGInverseLinearOperator,
    HeuristicDamping,
    IdentityLinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    ProjectedLinearOperator,
    RelativeDamping,
    SolveInfo,
    SubmatrixLinearOperator,
    from_scipy,
    neumann,
    submatrix,
)
from curvlinops_plus.linalg import (
    LinearOperator as LinearOperator,
)
from curvlinops_plus.linalg import (
    cg as cg,
)
from curvlinops_plus.linalg import (
    lsmr as lsmr,
)
from curvlinops_plus.linalg import (
    minres as minres,
)
from curvlinops_plus.optim import (
    CenteredFisherLinearOperator,
    SolveReport,
    StochasticReconfiguration,
    fisher_inverse,
    stochastic_reconfiguration,
)
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

# Names that SciPy or PyTorch have too can be imported by name, and do not come with `*`.
__all__ = [
    "EKFAC",
    "KFAC",
    "TNT",
    "Accumulator",
    "ActivationHessianLinearOperator",
    "AffineRule",
    "BlockwiseLinearOperator",
    "CGInverseLinearOperator",
    "CenteredFisherLinearOperator",
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
    "GGNDiagonalLinearOperator",
    "GGNFactorLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "HeuristicDamping",
    "IdentityLinearOperator",
    "JacobianLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KFOCLinearOperator",
    "LSMRInverseLinearOperator",
    "LanczosApproximateLogSpectrumCached",
    "LanczosApproximateSpectrumCached",
    "LayerRule",
    "Likelihood",
    "MINRESInverseLinearOperator",
    "MonteCarlo",
    "NearestKronecker",
    "NeumannInverseLinearOperator",
    "NoClosedForm",
    "NumericsError",
    "ProjectedLinearOperator",
    "RelativeDamping",
    "ScaledIdentity",
    "SingularMatrixError",
    "SolveInfo",
    "SolveReport",
    "SparseRows",
    "StochasticReconfiguration",
    "SubmatrixLinearOperator",
    "TransposedJacobianLinearOperator",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "approximate_boundaries",
    "approximate_boundaries_abs",
    "as_vectors",
    "check_rule",
    "compute_eigenvalue_correction_linear_weight_sharing",
    "condition_number",
    "curvature",
    "fisher_inverse",
    "from_scipy",
    "hutchinson_diag",
    "hutchinson_squared_fro",
    "hutchinson_trace",
    "hutchpp_trace",
    "lanczos_approximate_log_spectrum",
    "lanczos_approximate_spectrum",
    "neumann",
    "plot_spectrum",
    "random_vector",
    "register_likelihood",
    "register_rule",
    "spectral_norm",
    "stochastic_reconfiguration",
    "submatrix",
    "top_eigenpairs",
    "xdiag",
    "xtrace",
]
