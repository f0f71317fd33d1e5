"""Linear operators, structured matrices and solvers; nothing here depends on networks, losses or
data.
"""

from __future__ import annotations

from curvlinops_plus.linalg.arithmetic import Adjoint, Deferred, Product, Scaled, Sum
from curvlinops_plus.linalg.block_diagonal import BlockDiagonal
from curvlinops_plus.linalg.damping import (
    Damping,
    HeuristicDamping,
    RelativeDamping,
    heuristic_damping,
)
from curvlinops_plus.linalg.dense import Dense, Diagonal, Factor, IdentityLinearOperator
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.inverses import (
    CGInverseLinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
)
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.nearest import nearest_kronecker
from curvlinops_plus.linalg.numerics import cholesky_inverse, eigh, psd_clip
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.owned_blocks import OwnedBlockDiagonal
from curvlinops_plus.linalg.scipy_operators import from_scipy, to_scipy
from curvlinops_plus.linalg.solvers import SolveInfo, cg, lsmr, minres, neumann
from curvlinops_plus.linalg.space import Space, Structure
from curvlinops_plus.linalg.submatrices import (
    PositionedBlocks,
    ProjectedLinearOperator,
    SubmatrixLinearOperator,
    submatrix,
)

__all__ = [
    "Adjoint",
    "BlockDiagonal",
    "CGInverseLinearOperator",
    "Damping",
    "Deferred",
    "Dense",
    "Diagonal",
    "Eigendecomposed",
    "Factor",
    "HeuristicDamping",
    "IdentityLinearOperator",
    "Kronecker",
    "LSMRInverseLinearOperator",
    "Layout",
    "LinearOperator",
    "MINRESInverseLinearOperator",
    "NeumannInverseLinearOperator",
    "OwnedBlockDiagonal",
    "PositionedBlocks",
    "Product",
    "ProjectedLinearOperator",
    "RelativeDamping",
    "Scaled",
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
    "submatrix",
    "to_scipy",
]
