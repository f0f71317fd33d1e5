"""Numbers of a matrix from its products alone: trace, diagonal, norms, log-determinant,
eigenvalues, spectral density.

Every function takes an operator of this package, a tensor, a NumPy array, or a SciPy operator or
sparse matrix, and returns tensors in its dtype and on its device.
"""

from curvlinops_plus.estimate.eigen import (
    approximate_boundaries,
    approximate_boundaries_abs,
    condition_number,
    spectral_norm,
    top_eigenpairs,
)
from curvlinops_plus.estimate.matrix import random_vector
from curvlinops_plus.estimate.spectrum import (
    LanczosApproximateLogSpectrumCached,
    LanczosApproximateSpectrumCached,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    logdet,
)
from curvlinops_plus.estimate.trace import (
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    xdiag,
    xtrace,
)

__all__ = [
    "LanczosApproximateLogSpectrumCached",
    "LanczosApproximateSpectrumCached",
    "approximate_boundaries",
    "approximate_boundaries_abs",
    "condition_number",
    "hutchinson_diag",
    "hutchinson_squared_fro",
    "hutchinson_trace",
    "hutchpp_trace",
    "lanczos_approximate_log_spectrum",
    "lanczos_approximate_spectrum",
    "logdet",
    "random_vector",
    "spectral_norm",
    "top_eigenpairs",
    "xdiag",
    "xtrace",
]
