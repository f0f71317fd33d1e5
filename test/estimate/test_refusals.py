"""What estimators refuse, and in which words: a line for each."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as SciPyLinearOperator
from scipy.sparse.linalg import aslinearoperator

from curvlinops_plus.estimate import (
    hutchpp_trace,
    lanczos_approximate_spectrum,
    logdet,
    spectral_norm,
    top_eigenpairs,
    xtrace,
)
from test.helpers import Refusal, normal, refusals

I12 = torch.eye(12)
WIDE = normal(4, 9).numpy()
ONE_WAY = SciPyLinearOperator((4, 9), matvec=lambda x: WIDE @ x, dtype=np.float64)


REFUSED: list[Refusal] = [
    (lambda: hutchpp_trace(I12, 7), ValueError, r"num_matvecs \(7\) must be divisible by 3"),
    (lambda: xtrace(I12, 5), ValueError, r"num_matvecs \(5\) must be divisible by 2"),
    (lambda: spectral_norm(torch.zeros(2, 3, 3)),
     ValueError, r"must be a matrix. Got shape \(2, 3, 3\)"),
    (lambda: xtrace(I12.long(), 2), TypeError, "real floating-point numbers, got torch.int64"),
    (lambda: xtrace(aslinearoperator(1j * np.eye(5)), 2),
     TypeError, "real numbers, got dtype complex128"),
    (lambda: xtrace(I12, 6.0), TypeError, "num_matvecs is the float 6.0; expected an integer"),
    (lambda: logdet(I12, distribution="gauss"), ValueError, "Unknown distribution 'gauss'"),
    (lambda: top_eigenpairs(I12, 0),
     ValueError, r"k \(0\) must be at least 1 and at most A's size \(12\)"),
    (lambda: top_eigenpairs(I12, 13), ValueError, r"k \(13\) must be at least 1"),
    (lambda: spectral_norm(ONE_WAY),
     NotImplementedError, "cannot multiply from the left; give it `rmatvec`"),
    (lambda: lanczos_approximate_spectrum(I12, 5, boundaries=(2, 1)),
     ValueError, r"boundaries \(2, 1\) must be the"),
]  # fmt: skip
test_refusals = refusals(REFUSED)
