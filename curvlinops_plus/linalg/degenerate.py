"""Eigenvectors of repeated eigenvalues: a choice that depends on the matrix alone, not on rounding.

What has eigenvectors `Z [d, k]` of one eigenvalue has `Z U` with any orthogonal `U`. Which of them an eigensolver
returns depends on the rounding of its matrix, and so on the order of sums, and on the number of processes. What is
computed in such a basis from other data, such as corrected eigenvalues of later batches, depends on `U`.

Only the projector `P = Z Zᵀ` is determined. With a fixed generic matrix `Ω` the choice here is the orthogonal factor in
the QR decomposition of `P Ω`, which is `Z` times that of `Zᵀ Ω`: unique up to signs, and as well-conditioned as `Zᵀ Ω`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import sub

import torch
from torch import Tensor

from curvlinops_plus.linalg.gram_sum import gram

_TOLERANCE = 64  # times the machine epsilon and the largest eigenvalue: rounding of a Gram matrix is about 10 of these
_LARGE = 128  # null spaces for which a QR decomposition takes longer than the steps around that of a smaller range


def canonical(  # [*b, d], [*b, d, d], [*b, d] -> [*b, d, d]
    values: Tensor, Q: Tensor, diagonal: Tensor, range_only: bool = False
) -> Tensor:
    """Eigenvectors of a positive semi-definite matrix that are, up to signs, determined also if eigenvalues repeat.

    Eigenvalues are 0 up to `64 eps` times the largest, and equal if they differ by no more; also by no more than `√eps`
    times the mean `zᵀ diag(M) z` of the diagonal by their eigenvector `z`, so that small eigenvalues of inputs of small
    scale, beside others of a large one, are told apart. Those of one of a batch of matrices are 0 up to `(64 eps)²`
    times the largest of all. Of others the eigenvectors are determined up to `eps` times the largest, divided by the
    distance to the next one. Where so many are near to each other that no groups can be told, as in single precision,
    they stay as they are.

    Args:
        Q: Eigenvectors, in columns, that are changed in place.
        range_only: Leave those of the eigenvalue 0.

    Returns:
        `Q`.

    Example:
        >>> Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]  # the identity has any eigenvectors
        >>> ones = torch.ones(3, dtype=torch.float64)
        >>> canonical(ones, Q, ones).abs().round(decimals=2)
        tensor([[0.9100, 0.0800, 0.4100],
                [0.3400, 0.7000, 0.6300],
                [0.2400, 0.7100, 0.6700]], dtype=torch.float64)
    """
    d = Q.shape[-1]
    if Q.dtype not in (torch.float32, torch.float64) or Q.requires_grad or d < 2:
        return Q
    tolerance = _TOLERANCE * torch.finfo(Q.dtype).eps
    of_each = values.reshape(-1, d).tolist()
    # A matrix of what cancels, beside others in a batch, is the square of rounding: all of it counts as zero.
    noise = tolerance * max((max(each[-1], -each[0]) for each in of_each), default=0.0)
    for index, each in enumerate(of_each):
        most = tolerance * max(each[-1], -each[0], noise)
        if not most or min(map(sub, each[1:], each)) > most:  # of the matrix zero all are coordinates already
            continue
        allowed = _allowed(each, most, tolerance * noise, Q.view(-1, d, d)[index], diagonal.view(-1, d)[index])
        nulls = next((k for k in range(d) if abs(each[k]) > allowed[k]), d)
        for first, end in _groups(each, allowed, nulls, nulls if range_only else 0):
            if end == nulls > max(d // 2, _LARGE) and first == 0:
                _span_complement(Q.view(-1, d, d)[index], end)
            else:
                Z = Q.view(-1, d, d)[index, :, first:end]
                Z.copy_(Z @ torch.linalg.qr(Z.T @ _generic(Z, end - first))[0])
    return Q


def _allowed(values: Sequence[float], most: float, least: float, Q: Tensor, diagonal: Tensor) -> list[float]:
    """By how much each eigenvalue may differ from 0 or the next one and still be equal to it."""
    near = [k for k, (a, b) in enumerate(pairwise(values)) if b - a <= most and b]
    allowed = [most] * len(values)
    if near:
        first, end = near[0], near[-1] + 2
        scales = diagonal @ Q[:, first:end].square()
        own = (torch.finfo(Q.dtype).eps ** 0.5 * scales).clamp(least, most).tolist()
        # No eigenvalue is larger than d times that mean: such ones, of dead units, are rounding.
        limits = (len(Q) * scales).tolist()
        pairs = zip(values[first:end], own, limits, strict=True)
        allowed[first:end] = [most if abs(value) > limit else each for value, each, limit in pairs]
    return [most if value == 0 else each for value, each in zip(values, allowed, strict=True)]


def _groups(values: Sequence[float], allowed: Sequence[float], nulls: int, start: int) -> Iterator[tuple[int, int]]:
    """Where groups of equal values begin and end: of those with small gaps, if all are as near to each other."""
    values = [0.0] * nulls + [*values[nulls:]]
    gaps = (b - a > min(pair) for (a, b), pair in zip(pairwise(values), pairwise(allowed), strict=True))
    ends = [k for k, wide in enumerate(gaps, 1) if wide and k > start]
    for first, end in pairwise([start, *ends, len(values)]):
        if end - first > 1 and values[end - 1] - values[first] <= min(allowed[first:end]):
            yield first, end


def _span_complement(Q: Tensor, zeros: int) -> None:
    """Replace the first columns by others that span the same, which follow from the remaining few.

    These are turned as above, also to determined signs. Then all columns of the orthogonal matrix in their Householder
    QR decomposition are determined: unless entries whose signs it depends on are 0, as those of dead units would be
    without a reflection before and after.
    """
    R = Q[:, zeros:]
    r = R.shape[1]
    generic = _generic(Q, r + 1)
    w = generic[:, r:] / generic[:, r:].norm()
    U, T = torch.linalg.qr(R.T @ generic[:, :r])
    del generic
    Y = ((U * T.diagonal().sign()).T @ R.T).T
    V, W, _ = householder(Y.sub_(2 * w * (w.T @ Y)))
    Z = torch.mm(V, W[:, r:], out=Q[:, :zeros]).neg_()
    Z[r:].diagonal().add_(1)
    Z.addmm_(w, w.T @ Z, alpha=-2)


def _generic(like: Tensor, columns: int) -> Tensor:  # -> [d, columns]
    """A fixed matrix that is related to nothing."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(like), columns, generator=generator, dtype=like.dtype).to(like.device)


def householder(L: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [d, r] -> [d, r], [r, d], [r, r]
    """`V`, `W` and `T` with `I - V W` orthogonal and `L = (I - V W)[:, :r] T`: QR in products of matrices.

    `V` is made in the memory of `L`, which is stored by columns.
    """
    r = L.shape[1]
    V, tau = torch.geqrf(L, out=(L, L.new_empty(r)))
    T = V[:r].triu()
    V = V.tril_(-1)
    V.diagonal().fill_(1)
    V.mul_(tau != 0)  # a reflection with tau = 0 is the identity
    # W = S Vᵀ with S⁻¹ = striu(VᵀV) + diag(1 / tau)
    inverse = gram(V).triu_(1)
    inverse.diagonal().copy_(torch.where(tau == 0, 1, 1 / tau))
    return V, torch.linalg.solve_triangular(inverse.T, V, upper=False, left=False).T, T
