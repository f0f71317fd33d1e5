"""Linear operators, structured matrices and solvers; nothing here depends on networks, losses or data."""

from __future__ import annotations

from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.damping import HeuristicDamping, RelativeDamping, heuristic_damping
from curvlinops_plus.linalg.deferred import Deferred, DeferredResult, Formed
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_approximation import nearest_kronecker
from curvlinops_plus.linalg.kronecker_sum import Congruent, KroneckerSum
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.numerics import cholesky_inverse, eigh, psd_clip
from curvlinops_plus.linalg.operator import Adjoint, LinearOperator, Product, Scaled, Shifted, Sum
from curvlinops_plus.linalg.owned import OwnedBlockDiagonal
from curvlinops_plus.linalg.positioned_blocks import PositionedBlocks
from curvlinops_plus.linalg.scipy_export import to_scipy
from curvlinops_plus.linalg.scipy_import import from_scipy
from curvlinops_plus.linalg.solvers import (
    CGInverseLinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    SolveInfo,
    cg,
    lsmr,
    minres,
    neumann,
)
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, Identity, IdentityLinearOperator
from curvlinops_plus.linalg.submatrices import (
    PrincipalPart,
    ProjectedLinearOperator,
    SubmatrixLinearOperator,
    submatrix,
)
from curvlinops_plus.linalg.sums import FormedSum, structured_sum

__all__ = [
    "Adjoint",
    "BlockDiagonal",
    "CGInverseLinearOperator",
    "Congruent",
    "Deferred",
    "DeferredResult",
    "Dense",
    "Diagonal",
    "Eigendecomposed",
    "Factor",
    "Formed",
    "FormedSum",
    "HeuristicDamping",
    "Identity",
    "IdentityLinearOperator",
    "Kronecker",
    "KroneckerSum",
    "LSMRInverseLinearOperator",
    "Layout",
    "LinearOperator",
    "MINRESInverseLinearOperator",
    "NeumannInverseLinearOperator",
    "OwnedBlockDiagonal",
    "PositionedBlocks",
    "PrincipalPart",
    "Product",
    "ProjectedLinearOperator",
    "RelativeDamping",
    "Scaled",
    "Shifted",
    "SolveInfo",
    "Space",
    "Structure",
    "SubmatrixLinearOperator",
    "Sum",
    "cg",
    "cholesky_inverse",
    "eigh",
    "from_scipy",
    "gram",
    "heuristic_damping",
    "lsmr",
    "minres",
    "nearest_kronecker",
    "neumann",
    "psd_clip",
    "structured_sum",
    "submatrix",
    "to_scipy",
]
