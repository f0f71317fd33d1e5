"""Eigendecompositions from products of matrices, QR and Cholesky alone: what GPUs are fast at.

`sign(A - σ I)` has the eigenvalue 1 where `A` is above `σ`, and -1 below. The mean of it and the identity projects onto
the upper eigenspace; an orthonormal basis of both eigenspaces splits the problem in two, and so on. The sign of a
symmetric matrix is its polar factor, which the dynamically weighted Halley iteration finds in at most six steps of QR
or Cholesky in float64, whatever the condition number.

Sources: Nakatsukasa & Higham 2013, "Stable and efficient spectral divide and conquer algorithms for the symmetric
eigenvalue decomposition and the SVD"; Nakatsukasa, Bai & Gygi 2010 for the iteration.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError

_TRIES = 8


def divide_and_conquer(M: Tensor, smallest: int = 256) -> tuple[Tensor, Tensor]:  # [*b, d, d] -> [*b, d], [*b, d, d]
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix, by splitting its spectrum.

    An alternative to `eigh` on devices where products are far faster than PyTorch's eigensolver. On CPUs it is several
    times slower, and it was never measured on a GPU: nothing uses it unless asked to. Measure it on yours:
    the examples have a benchmark of eigendecompositions.

    Args:
        M: A finite symmetric matrix, or a batch that is done one by one; float32 or float64.
        smallest: Parts of at most this size are left to `torch.linalg.eigh`.

    Cost: some 50 d³ operations in matrix products, QR and Cholesky; memory of ten matrices.

    Raises:
        NumericsError: If an iteration does not converge, or a spectrum cannot be split; `eigh` is for these.

    Example:
        >>> values, Q = divide_and_conquer(torch.diag(torch.tensor([3.0, 1.0, 2.0])), smallest=1)
        >>> values.round(decimals=4)
        tensor([1., 2., 3.])
    """
    if M.ndim > 2:
        found = [divide_and_conquer(m, smallest) for m in M.flatten(0, -3)]
        values, Q = (torch.stack(parts) for parts in zip(*found, strict=True))
        return values.reshape(M.shape[:-1]), Q.reshape(M.shape)
    largest = M.abs().max() if M.numel() else 1.0
    A = M / (largest if largest > 0 else 1.0)  # norms would overflow else
    rounding = float(torch.finfo(A.dtype).eps * A.shape[-1] ** 0.5 * A.norm())  # as `psd_clip` counts, in this norm
    values, Q = _split(A, max(1, smallest), rounding)
    order = values.argsort()
    return largest * values[order], Q[:, order]


def _split(A: Tensor, smallest: int, negligible: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of one part, in any order; numbers of size `negligible` are rounding errors."""
    d, eye = len(A), torch.eye(len(A), dtype=A.dtype, device=A.device)
    center = A.diagonal().mean() if d else 0.0
    if d <= smallest and d > 1:
        return torch.linalg.eigh(A)
    if d < 2 or float((A - center * eye).norm()) <= negligible:
        return A.diagonal().clone(), eye  # a multiple of the identity, whose eigenvectors are any
    # Where the diagonal is cut in halves, the spectrum mostly is; a cut through a cluster may miss, and is moved.
    diagonal = A.diagonal().sort().values
    for cut in range(_TRIES):
        median, mean = diagonal[d // 2], center
        sigma = (median, mean)[cut] if cut < 2 else mean + (-1) ** cut * (cut // 2) * (A - mean * eye).norm() / (4 * d)
        P = (polar(A - sigma * eye) + eye) / 2
        k = round(float(P.diagonal().sum()))
        if not 0 < k < d:
            continue
        V = _range(P, k)
        off = V[:, k:].T @ (A @ V[:, :k])
        if float(off.norm()) <= 10 * negligible:
            break
    else:
        raise NumericsError(
            f"A part of {d} eigenvalues of a symmetric matrix could not be split in two. Use `eigh` for this matrix."
        )
    (low, U), (high, W) = (
        _split(_symmetric(X.T @ A @ X), smallest, negligible) for X in (V[:, k:].contiguous(), V[:, :k].contiguous())
    )
    return torch.cat([low, high]), torch.cat([V[:, k:] @ U, V[:, :k] @ W], 1)


def _range(P: Tensor, k: int) -> Tensor:
    """An orthogonal matrix whose first `k` columns span the range of a projection of rank `k`.

    One step of subspace iteration from random columns: the spectrum is {0, 1}, so that one is enough; a second QR makes
    up for columns that were nearly dependent.
    """
    start = torch.randn(*P.shape, generator=torch.Generator().manual_seed(0), dtype=P.dtype).to(P.device)
    first = torch.linalg.qr(P @ start[:, :k])[0]
    return torch.linalg.qr(torch.cat([P @ first, start[:, k:] - P @ start[:, k:]], 1))[0]


def polar(A: Tensor, steps: int = 20) -> Tensor:  # [d, d] -> [d, d]
    """The orthogonal polar factor of a symmetric matrix: its sign, by the dynamically weighted Halley iteration.

    Args:
        A: The matrix. Eigenvalues of the size of its rounding errors get some value between -1 and 1.
        steps: Raise if it has not converged after so many.

    Raises:
        NumericsError: If it does not converge.

    Example:
        >>> polar(torch.diag(torch.tensor([3.0, -1e-3])))
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    eps = torch.finfo(A.dtype).eps
    scale = float(A.norm())
    if scale == 0:
        return A.clone()
    X, low = A / scale, eps  # the singular values of X that count are between `low` and 1
    for _ in range(steps):
        a, b, c = _weights(low)
        before = X
        X = _halley(X, a, b, c)
        low = min(1.0, low * (a + b * low**2) / (1 + c * low**2))
        if 1 - low <= 10 * eps and float((X - before).norm()) <= eps ** (1 / 3) * float(X.norm()):
            return _symmetric(X)
    raise NumericsError(
        f"The polar iteration of a {list(A.shape)} matrix did not converge in {steps} steps. Use `eigh` for it."
    )


def _weights(low: float) -> tuple[float, float, float]:
    """Of the step that maps [low, 1] into [low', 1] with the largest low' (Nakatsukasa, Bai & Gygi 2010, section 3)."""
    gap = (4 * (1 - low**2) / low**4) ** (1 / 3)
    root = sqrt(1 + gap)
    a = root + sqrt(max(0.0, 8 - 4 * gap + 8 * (2 - low**2) / (low**2 * root))) / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _halley(X: Tensor, a: float, b: float, c: float) -> Tensor:
    """`X (a + b XᵀX) (1 + c XᵀX)⁻¹`: by QR where `c` is large, which Cholesky would not survive."""
    eye = torch.eye(len(X), dtype=X.dtype, device=X.device)
    if c > 100:
        Q = torch.linalg.qr(torch.cat([sqrt(c) * X, eye]))[0]
        return (b / c) * X + (a - b / c) / sqrt(c) * (Q[: len(X)] @ Q[len(X) :].T)
    L = torch.linalg.cholesky(eye + c * (X.T @ X))
    return (b / c) * X + (a - b / c) * torch.cholesky_solve(X.T, L).T


def _symmetric(X: Tensor) -> Tensor:
    return (X + X.T) / 2
