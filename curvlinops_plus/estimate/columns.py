"""Inner products, lengths and orthonormal bases of few long columns, accurate in float32.

With a million rows, plain float32 products lose two digits and LAPACK's QR decomposition three: columns are orthonormal
up to 7e-5. Adding up blocks of rows keeps six digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 2**13  # of a block


def inner(X: Tensor, Y: Tensor) -> Tensor:  # [n, K], [n, L] -> [K, L]
    """`Xᵀ Y`."""
    if len(X) <= ROWS:
        return X.T @ Y
    whole = len(X) - len(X) % ROWS
    x, y = (Z[:whole].unflatten(0, (-1, ROWS)) for Z in (X, Y))
    return (x.mT @ y).sum(0) + X[whole:].T @ Y[whole:]


def length(X: Tensor) -> Tensor:  # [n, K] -> [K]
    """The Euclidean lengths of columns."""
    return X.square().sum(0).sqrt()


def orthonormal(Y: Tensor) -> tuple[Tensor, Tensor]:  # [n, K] -> [n, min(n, K)], [min(n, K), K]
    """Orthonormal columns `Q` and a factor `R` with `Q R = Y`.

    Example:
        >>> Q, R = orthonormal(torch.tensor([[3.0], [4.0]]))
        >>> (Q @ R).round(decimals=3), R.abs().round(decimals=3)
        (tensor([[3.],
                [4.]]), tensor([[5.]]))
    """
    Q, R = torch.linalg.qr(Y)
    if len(Y) > ROWS:
        C = torch.linalg.cholesky(inner(Q, Q)).mH  # nearly the identity: Q C⁻¹ is orthonormal up to rounding
        Q, R = torch.linalg.solve_triangular(C, Q, upper=True, left=False), C @ R
    return Q, R
