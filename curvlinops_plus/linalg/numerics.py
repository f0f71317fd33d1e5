"""Decompositions of dense matrices that do not give up, and which eigenvalues are zero.

Cholesky fails when rounding has made a zero eigenvalue negative; `torch.linalg.eigh` fails for some
rank-deficient float32 matrices (factors of layers with dead units are such) and returns NaN for NaN
without an error. Here every decomposition first checks that its matrix is finite, retries in
float64, and says what to do if that fails too.

Which eigenvalues are zero? Those of a positive semi-definite `d x d` matrix that was decomposed in
finite precision are only known up to `d * eps * largest`; whatever is below counts as 0. All of
this package follows that rule; with a damping, small ones count where they are large for the
entries of the matrix that their eigenvector is made of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import scipy  # its modules are imported where they are first used
import torch
from torch import Tensor

from curvlinops_plus.contexts import Endings, GradMode
from curvlinops_plus.errors import (
    CurvatureWarning,
    NumericsError,
    SingularMatrixError,
    level_of_user,
)
from curvlinops_plus.linalg.decisions import is_finite, is_true

T = TypeVar("T")
R = TypeVar("R")

# Below, LAPACK's eigensolver takes no longer than the steps around a smaller problem.
_LOW_RANK_SIZE = 192
# Operations, a few milliseconds; below, starting threads costs more than they gain.
_MUCH = 1e7


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half-precision floats to float32; other tensors are returned unchanged.

    Example:
        >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    dtype = tensor.dtype
    return tensor.float() if dtype.itemsize < 4 and dtype.is_floating_point else tensor


def wide(x: Tensor) -> torch.dtype:
    """The dtype of double precision for numbers like these, where the device has it."""
    return x.dtype if x.device.type == "mps" else torch.promote_types(x.dtype, torch.float64)


def frobenius(x: Tensor, axes: int | tuple[int, ...] | None = None) -> Tensor:
    """Root of the sum of squares over all axes or some, also where squares under- or overflow in
    the tensor's dtype.
    """
    return torch.linalg.vector_norm(x, dim=axes, dtype=wide(x)).to(x.dtype.to_real())


def psd_clip(  # [*b, d] -> [*b, d]
    values: Tensor, rtol: float | None = None, scales: Callable[[], Tensor] | None = None
) -> Tensor:
    """Eigenvalues of a positive semi-definite matrix, with 0 where they are below `rtol` times the
    largest.

    Args:
        values: Eigenvalues along the last axis; leading axes are separate matrices.
        rtol: Relative threshold; by default `d * eps`, the accuracy of an eigendecomposition. With
            0 only negative numbers become 0.
        scales: Returns for each eigenvector `z` of a matrix `M` the mean `zᵀ diag(M) z` of its
            diagonal, and is called if a value is below: with the default of `rtol` what is above
            `√eps` times that is not 0, so that inputs of a small scale beside others of a large one
            count, unless it is above `d` times that, which no eigenvalue is.

    Example:
        >>> psd_clip(torch.tensor([-1e-9, 1e-9, 0.5, 2.0]))
        tensor([0.0000, 0.0000, 0.5000, 2.0000])
    """
    if values.numel() == 0:
        return values
    d = values.shape[-1]
    eps = torch.finfo(values.dtype).eps
    largest = values.detach().amax(-1, keepdim=True).clamp(min=0)
    threshold = d * eps if rtol is None else rtol
    positive = values > threshold * largest
    # Elsewhere than on the CPU, to look would take longer than what it saves.
    if values.device.type == "cpu" and bool(positive.all()):
        return values.clone()
    if rtol is None and scales is not None:
        # No eigenvalue is above d times the mean of the diagonal in its eigenvector's entries.
        of_diagonal = scales()
        large_in_scale = (values > eps**0.5 * of_diagonal) & (values <= d * of_diagonal)
        positive |= large_in_scale & (values > (d * eps) ** 2 * largest)
    return torch.where(positive, values, torch.zeros_like(values))


def with_zeros(  # [*b, d], [*b, d, d], [*b, d, d] -> [*b, d]
    values: Tensor, Q: Tensor, M: Tensor, rtol: float | None
) -> Tensor:
    """The eigenvalues of positive semi-definite matrices, with zeros by the rule of `psd_clip`.

    Args:
        values: Eigenvalues of `M`.
        Q: Its eigenvectors, columns.
        M: The matrices.
        rtol: As for `psd_clip`.
    """

    def scales() -> Tensor:
        """`zᵀ diag(M) z` of each eigenvector z."""
        diagonal = M.diagonal(dim1=-2, dim2=-1)[..., None, :]
        return (diagonal @ Q.square())[..., 0, :].detach()

    return psd_clip(values, rtol, scales)


def powers(values: Tensor, p: float, what: object) -> Tensor:
    """`values ** p` of eigenvalues in which zeros are exact; `what` names their matrix in messages.

    Raises:
        SingularMatrixError: If `p` is negative and an eigenvalue is 0.
    """
    if p < 0 and is_true((values == 0).any()):
        largest = float(values.detach().abs().max())
        zeros = int((values == 0).sum())
        advice = "Add a damping, for example RelativeDamping(1e-3)."
        if largest == 0:
            advice = (
                "Add a damping that is a number, such as damping=1e-3, as RelativeDamping of a "
                "matrix of zeros is 0. If it is a block of a curvature, all gradients of its "
                "parameters were 0, as behind a layer that starts at zero: or leave them out."
            )
        raise SingularMatrixError(
            f"{what} is singular: {zeros} of its {values.numel()} eigenvalues count as zero (the "
            f"largest is {largest:.1e}). {advice}"
        )
    return values**p


def damped_cholesky(
    M: Tensor,
    damping: float | Tensor = 0.0,
    *,
    retry_double_precision: bool = True,
    what: str = "the matrix",
) -> Tensor:
    """The lower Cholesky factor of `M + damping * I`, with `damping` one number or one per matrix
    of a batch.

    Returns:
        `[*b, d, d]` in the dtype of `M`, or in float64 if only that worked (then with a warning).

    Raises:
        NumericsError: If the matrix has NaN or infinite entries.
        SingularMatrixError: If `M + damping * I` is not positive definite; says which damping would
            do.
    """
    check_finite(M, what)
    L, info = torch.linalg.cholesky_ex(add_to_diagonal(at_least_float32(M), damping))
    if not is_true(info.any()):
        return L
    shown = _show(damping)
    if retry_double_precision and L.dtype == torch.float32:
        warnings.warn(
            f"The Cholesky decomposition of {what} with damping {shown} failed in float32; "
            "retrying in float64.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )
        L, info = torch.linalg.cholesky_ex(add_to_diagonal(M.double(), damping))
        if not bool(info.any()):
            return L
    # Above every rounding error: ten times d eps times the largest eigenvalue, which no row sum is
    # below.
    finfo = torch.finfo(torch.promote_types(M.dtype, torch.float32))
    row_sum = float(M.detach().abs().sum(-1).max())
    enough = max(10 * M.shape[-1] * finfo.eps * row_sum, torch.finfo(torch.float32).tiny)
    precision = ", or pass retry_double_precision=True"
    if retry_double_precision or M.dtype == torch.float64:
        precision = ""
    raise SingularMatrixError(
        f"{what} {list(M.shape)} with damping {shown} is not positive definite in {M.dtype}; a "
        f"damping of {enough:.1e} would do{precision}."
    )


def cholesky_inverse(
    M: Tensor, damping: float | Tensor = 0.0, retry_double_precision: bool = True
) -> Tensor:
    """The inverse of the positive definite `M + damping * I`, through its Cholesky factor.

    Raises:
        NumericsError: If the matrix has NaN or infinite entries.
        SingularMatrixError: If `M + damping * I` is not positive definite; says which damping would
            do.

    Example:
        >>> cholesky_inverse(torch.zeros(2, 2), damping=4.0).diagonal()
        tensor([0.2500, 0.2500])
    """
    # (L Lᵀ)⁻¹ from L
    L = damped_cholesky(M, damping, retry_double_precision=retry_double_precision)
    return torch.cholesky_inverse(L).to(M.dtype)


def eigh(  # [*b, d, d] -> [*b, d], [*b, d, d]
    M: Tensor, what: str = "the matrix", *, semidefinite: bool = False, rtol: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix, in its own dtype.

    Works in float32 at least. When PyTorch fails it retries in float64, then in float64 on the CPU.

    Args:
        M: The matrix, or a batch of them.
        what: Its name in messages.
        semidefinite: Whether it is known to be positive semi-definite. On the CPU a large one is
            then tested for a low rank, at 2 % of the cost; at a quarter of full rank it takes a
            third of the time, and the eigenvalues outside of its range are exactly 0.
        rtol: In a semidefinite matrix, what is left of the diagonal below `rtol` times its largest
            entry counts as zero.

    Raises:
        NumericsError: If the matrix has NaN or infinite entries, or every attempt fails.

    Example:
        >>> values, Q = eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> values
        tensor([1., 2.])
    """
    check_finite(M, what)
    large = M.ndim == 2 and len(M) >= _LOW_RANK_SIZE
    lapack = M.device.type == "cpu" and M.dtype in (torch.float32, torch.float64)
    if semidefinite and large and lapack and not M.requires_grad:
        decomposition = _eigh_of_low_rank(M, what, rtol)
        if decomposition is not None:
            return decomposition
    attempts = [(M.device, torch.float64), (torch.device("cpu"), torch.float64)]
    if M.dtype != torch.float64:
        attempts.insert(0, (M.device, torch.float32))
    failures = []
    for device, dtype in dict.fromkeys(attempts):
        try:
            values, Q = torch.linalg.eigh(M.to(device, dtype))
        # Not converged, cuSOLVER gave up, or a device without float64.
        except (RuntimeError, TypeError) as error:
            failures.append(f"{dtype} on {device}: {str(error).splitlines()[0]}")
            continue
        if is_finite(values.detach().sum() + Q.detach().sum()):
            return values.to(M), Q.to(M)
        failures.append(f"{dtype} on {device}: the result was not finite")
    raise NumericsError(
        f"The eigendecomposition of {what} {list(M.shape)} failed in every precision "
        f"({'; '.join(failures)}). Check that the matrix is symmetric and its entries are of "
        "moderate size."
    )


def _eigh_of_low_rank(M: Tensor, what: str, rtol: float) -> tuple[Tensor, Tensor] | None:
    """Through a basis of the range, or None where that does not pay.

    Cholesky with pivots finds `M = L Lᵀ` with `L [d, r]` (Higham 2002, section 10.3); in the
    complete QR decomposition of `L` the first `r` columns span the range, and an `r x r`
    eigenproblem is left.
    """
    d = len(M)
    highest = int(0.55 * d) - 24  # above this rank it does not pay
    if not rtol:
        part = M[: highest + 1, : highest + 1]
        if not int(torch.linalg.cholesky_ex(part)[1]):
            return None  # a part of the matrix has a higher rank already
    tolerance = float(max(rtol, 16 * torch.finfo(M.dtype).eps) * M.diagonal().amax())
    # LAPACK stores by columns, but M is symmetric.
    factor, pivots, r, _ = _pstrf(M.dtype)(M.numpy().T, lower=1, tol=tolerance)
    if not 0 < r <= highest:
        return None
    L = M.new_zeros(d, r)
    L[torch.from_numpy(pivots).long() - 1] = torch.from_numpy(factor)[:, :r].tril()
    Q = torch.linalg.qr(L, "complete")[0]
    basis = Q[:, :r]
    # M = B (Bᵀ M B) Bᵀ with the basis B of the range: an eigenproblem of size r.
    values, U = eigh(basis.T @ M @ basis, what)
    # The caller was wrong if something is left beside the range.
    if M.norm() > (1 + d * rtol + 1e-3) * values.norm():
        return None
    values = torch.cat([M.new_zeros(d - r), values.clamp(min=0)])
    return values, torch.cat([Q[:, r:], basis @ U], 1)


@cache
def _pstrf(dtype: torch.dtype) -> Any:
    """LAPACK's Cholesky decomposition with pivots, which PyTorch lacks."""
    return scipy.linalg.get_lapack_funcs("pstrf", dtype=str(dtype).removeprefix("torch."))


def threads_for(items: Sequence[T], work: Callable[[T], float]) -> int:
    """How many threads `side_by_side` takes: 1 where more gain nothing."""
    available = torch.get_num_threads()
    if available == 1:
        return 1
    costs = [work(item) for item in items]
    threads = min(available, sum(cost > 0 for cost in costs))
    # The longest item is a thread's own; what the others take is gained.
    return threads if threads > 1 and sum(costs) - max(costs) >= _MUCH else 1


def side_by_side(
    function: Callable[[T], R], items: Sequence[T], work: Callable[[T], float]
) -> list[R]:
    """`function` of each item, on the CPU's threads: decompositions hardly gain from a second one,
    two gain a factor 2.

    Args:
        function: Must not change what others read.
        work: About how many operations it takes, 0 if none of them are on the CPU.

    Example:
        >>> side_by_side(abs, [-1, 2], lambda item: 1.0)
        [1, 2]
    """
    threads = threads_for(items, work)
    if threads == 1:
        return [function(item) for item in items]
    available = torch.get_num_threads()
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()

    def run(item: T) -> R:
        with torch.inference_mode(inference), GradMode(grad):
            return function(item)

    with Endings() as endings:
        # New threads would begin with the number of the last one that was set.
        endings.callback(torch.set_num_threads, available)
        start = (torch.set_num_threads, (available // threads,))
        pool = endings.enter_context(ThreadPoolExecutor(threads, "", *start))
        return list(pool.map(run, items))


def add_to_diagonal(M: Tensor, damping: float | Tensor) -> Tensor:  # [*b, d, d] -> [*b, d, d]
    """`M + damping * I` in new memory, with one damping or one for each matrix `[*b]`;
    differentiable in both.
    """
    damping = torch.as_tensor(damping, dtype=M.dtype, device=M.device)
    return M + torch.diag_embed(damping[..., None].expand(*damping.shape, M.shape[-1]))


def slogdet_of(values: Tensor) -> tuple[Tensor, Tensor]:  # [*b, d] -> [*b], [*b]
    """Sign and logarithm of the absolute value of the product of eigenvalues; the logarithm of 0 is
    -inf, never NaN.
    """
    return values.sign().prod(-1), values.abs().log().sum(-1)


def standard_normal(
    num: int, dim: int, generator: torch.Generator | None, like: Tensor
) -> Tensor:  # -> [dim, num]
    """Independent N(0, 1) numbers that depend on the generator only, not on the dtype or device of
    the result.

    The columns come one after another from the generator's own uniform numbers, so that the first
    draws stay the same when more are asked for.
    """
    device = torch.device("cpu") if generator is None else generator.device
    # The normal quantiles of uniform numbers.
    uniform = torch.rand(num, dim, generator=generator, device=device, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(min=2.0**-54)).to(like).T  # at 0 the quantile is -inf


def check_finite(M: Tensor, what: str) -> None:
    """Refuse a matrix with NaN or infinite entries.

    Raises:
        NumericsError: If it has some; says how many, and where they may come from.
    """
    # The sum of all entries is finite unless one of them is not, or it overflows: look at each of
    # them only then.
    if is_finite(M.detach().sum()):
        return
    bad = int((~torch.isfinite(M)).sum())
    if bad:
        raise NumericsError(
            f"{what} {list(M.shape)} has {bad} entries that are NaN or infinite. Look for NaN in "
            "the data, for a diverged model, or for overflow in half precision."
        )


def _show(damping: float | Tensor) -> str:
    damping = torch.as_tensor(damping).detach()
    if damping.ndim == 0:
        return f"{float(damping):.1e}"
    return f"{float(damping.min()):.1e} to {float(damping.max()):.1e}"
