"""Block-diagonal curvature, a block or a few for each layer, from sums over the data."""

from curvlinops_plus.blocks.accumulator import Accumulator, Approximation, Needs
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator, curvature
from curvlinops_plus.blocks.ekfac import EKFAC, compute_eigenvalue_correction_linear_weight_sharing
from curvlinops_plus.blocks.estimator import CurvatureEstimator
from curvlinops_plus.blocks.files import Checkpoint, load, save
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.per_example import (
    TNT,
    DiagonalBlock,
    FullBlock,
    NearestKronecker,
    ScaledIdentity,
)
from curvlinops_plus.blocks.plan import Memory
from curvlinops_plus.blocks.summary import Summary
from curvlinops_plus.blocks.verify import Verification

__all__ = [
    "EKFAC",
    "KFAC",
    "TNT",
    "Accumulator",
    "Approximation",
    "BlockwiseLinearOperator",
    "Checkpoint",
    "CurvatureEstimator",
    "DiagonalBlock",
    "FullBlock",
    "Memory",
    "NearestKronecker",
    "Needs",
    "ScaledIdentity",
    "Summary",
    "Verification",
    "compute_eigenvalue_correction_linear_weight_sharing",
    "curvature",
    "load",
    "save",
]
