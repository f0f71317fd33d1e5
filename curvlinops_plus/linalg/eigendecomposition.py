"""Eigendecompositions of symmetric matrices that do not give up, and that use it if the rank is far below the size.

`torch.linalg.eigh` fails for some rank-deficient float32 matrices (factors of layers with dead units are such) and
returns NaN for NaN without an error. Here every decomposition first checks that its matrix is finite, retries in
float64, and says what to do if that fails too.

A layer with fewer rows than features has a factor `M` of low rank `r`. Cholesky with pivots finds `M = L Lᵀ` with
`L [d, r]` (Higham 2002, section 10.3), Householder QR of `L` an orthogonal matrix of which the first `r` columns span
the range of `M`, and an `r x r` eigenproblem is left. Eigenvectors made of `L` alone would not be orthogonal where the
spectrum decays. Where this pays is measured: the benchmark of eigendecompositions among the examples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg.aligned import aligned
from curvlinops_plus.linalg.degenerate import canonical, householder
from curvlinops_plus.linalg.gram_sum import blas_threads, gram
from curvlinops_plus.linalg.numerics import check_finite

_SMALLEST = 192  # below, LAPACK's eigensolver takes no longer than the steps around a smaller problem


def eigh(
    M: Tensor, what: str = "the matrix", *, semidefinite: bool = False
) -> tuple[Tensor, Tensor]:  # [*b, d, d] -> [*b, d], [*b, d, d]
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix, in its own dtype.

    Works in float32 at least. When PyTorch fails it retries in float64, then in float64 on the CPU.

    Args:
        M: The matrix, or a batch of them.
        what: Its name in messages.
        semidefinite: Whether it is known to be positive semi-definite. On the CPU a large one is then looked at for a
            low rank, at 2 % of the cost; at a quarter of full rank it takes a third of the time, and the eigenvalues
            outside of its range are exactly 0.

    Raises:
        NumericsError: If the matrix has NaN or infinite entries, or every attempt fails.

    Example:
        >>> values, Q = eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> values
        tensor([1., 2.])
    """
    check_finite(M, what)
    return _on_support(M, lambda part: _semidefinite(part, what, 0.0, refine=True)) if semidefinite else _eigh(M, what)


def eigenbasis(  # [*b, d, d] -> [*b, d, d]
    M: Tensor, what: str = "the matrix", *, rtol: float = 0.0, range_only: bool = False
) -> Tensor:
    """An orthogonal matrix whose columns are eigenvectors of a positive semi-definite one, in ascending order.

    Orthogonal to rounding always; for a low rank cheaper than `eigh`, because nobody looks at the eigenvalues. Also of
    a repeated eigenvalue the eigenvectors are, up to signs, a continuous function of the matrix, see `canonical`.

    Args:
        M: The matrix, or a batch of them.
        rtol: Directions need not be told apart that together leave less than `rtol` times the largest diagonal entry on
            each entry of the diagonal. The more directions, the cheaper. By default all are, up to rounding.
        range_only: Whether it does not matter which orthonormal vectors span the null space, which saves up to half of
            the time where that is large.

    Raises:
        NumericsError: If the matrix has NaN or infinite entries, or every attempt fails.

    Example:
        >>> eigenbasis(torch.tensor([[2.0, 0.0], [0.0, 1.0]])).abs()
        tensor([[0., 1.],
                [1., 0.]])
    """
    check_finite(M, what)

    def decompose(part: Tensor) -> tuple[Tensor, Tensor]:
        values, Q = _semidefinite(part, what, rtol, refine=False)
        return values, canonical(values, Q, part.diagonal(dim1=-2, dim2=-1).contiguous(), range_only)

    return _on_support(M, decompose)[1]


def _eigh(M: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """The first attempt that works."""
    attempts = [(M.device, torch.float64), (torch.device("cpu"), torch.float64)]
    if M.dtype != torch.float64:
        attempts.insert(0, (M.device, torch.float32))
    failures = []
    for device, dtype in dict.fromkeys(attempts):
        try:
            values, Q = torch.linalg.eigh(M.to(device, dtype))
        except (RuntimeError, TypeError) as error:  # not converged, cuSOLVER gave up, or a device without float64
            failures.append(f"{dtype} on {device}: {str(error).splitlines()[0]}")
            continue
        if bool(torch.isfinite(values).all()) and bool(Q.detach().sum().isfinite()):
            return values.to(M), Q.to(M)
        failures.append(f"{dtype} on {device}: the result was not finite")
    raise NumericsError(
        f"The eigendecomposition of {what} {list(M.shape)} failed in every precision ({'; '.join(failures)}). "
        "Check that the matrix is symmetric and its entries are of moderate size."
    )


def _on_support(M: Tensor, decompose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Of a positive semi-definite matrix, without its zero rows: those of dead units, or of pixels at the border."""
    if M.ndim != 2 or len(M) < _SMALLEST or M.requires_grad:
        return decompose(M)
    seen = M.diagonal() != 0
    if bool(seen.all()) or bool(M[~seen].any()):
        return decompose(M)
    at, zeros = seen.nonzero()[:, 0], (~seen).nonzero()[:, 0]
    values, U = _on_support(M[at[:, None], at], decompose)
    Q, n = torch.zeros_like(M), len(zeros)
    Q[zeros, torch.arange(n, device=M.device)] = 1
    Q[at, n:] = U
    return torch.cat([values.new_zeros(n), values.clamp(min=0)]), Q


def _semidefinite(M: Tensor, what: str, rtol: float, refine: bool) -> tuple[Tensor, Tensor]:
    """Of a positive semi-definite matrix; arguments as for `_by_range`."""
    found = _by_range(M, what, rtol, refine)
    return _eigh(M, what) if found is None else found


def _by_range(M: Tensor, what: str, rtol: float, refine: bool) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues and eigenvectors through a basis of the range, or None where that does not pay or is not exact.

    Args:
        M: `[d, d]`, positive semi-definite.
        rtol: See `eigenbasis`.
        refine: Take the small eigenproblem from `M` itself instead of from its Cholesky factor: the error of the
            latter, about ten times that of `eigh`, does not matter for a basis.
    """
    if M.ndim != 2 or len(M) < _SMALLEST or M.requires_grad:
        return None
    if M.device.type != "cpu" or M.dtype not in (torch.float32, torch.float64):
        return None
    d, highest = len(M), int(0.55 * len(M)) - 24
    if not rtol and not int(torch.linalg.cholesky_ex(M[: highest + 1, : highest + 1])[1]):
        return None  # a part of the matrix has a higher rank already
    L = _pivoted_cholesky(M, max(rtol, 16 * torch.finfo(M.dtype).eps), highest)
    if L is None:
        return None
    r = L.shape[1]
    V, W, T = householder(L)  # I - V W is orthogonal, and its first r columns times T are L
    del L  # everything here is as large as half of M, or a quarter
    if refine:  # by a product with M, once there is a basis
        values, U = M.new_zeros(r), torch.eye(r, dtype=M.dtype)
    else:
        values, U = _eigh(gram(T.T), what)
        W[:, :r] = W[:, :r] @ U
    del T
    Q = aligned(d, d, like=M)
    complement, range_ = Q[:, : d - r], Q[:, d - r :]
    torch.mm(V, W[:, r:], out=complement).neg_()[r:].diagonal().add_(1)
    torch.mm(V, W[:, :r], out=range_).neg_()[:r].add_(U)
    del V, W
    if refine:
        values, U = _eigh(range_.T @ (M @ range_), what)
        range_.copy_(range_ @ U)
    values = torch.cat([values.new_zeros(d - r), values.clamp(min=0)])
    # A look from a random direction, as the caller may be wrong about M.
    x = torch.randn(d, 1, generator=torch.Generator().manual_seed(0), dtype=M.dtype)
    residual = M @ x - Q @ (values[:, None] * (Q.T @ x))
    allowed = max(d * torch.finfo(M.dtype).eps, (d - r) * rtol) * values[-1:] * x.norm()
    return (values, Q) if bool((residual.norm() <= allowed).all()) else None


def _pivoted_cholesky(M: Tensor, rtol: float, highest: int) -> Tensor | None:
    """`L [d, r]` with `M = L Lᵀ` up to `rtol` times the largest diagonal entry; None if `r` is higher than allowed."""
    with blas_threads():
        # LAPACK stores by columns, but M is symmetric; it takes the lower triangle of its own copy.
        factor, pivots, r, info = _pstrf(M.dtype)(M.detach().numpy().T, lower=1, tol=float(rtol * M.diagonal().amax()))
    if info < 0 or not 0 < r <= highest:
        return None
    L = M.new_empty(r, len(M)).T
    L[torch.from_numpy(pivots).long() - 1] = torch.from_numpy(factor)[:, :r].tril_()
    return L


@cache
def _pstrf(dtype: torch.dtype) -> Any:
    """LAPACK's Cholesky decomposition with pivots, which PyTorch lacks. SciPy takes long to import."""
    from scipy.linalg import get_lapack_funcs

    return get_lapack_funcs("pstrf", dtype=str(dtype).removeprefix("torch."))
