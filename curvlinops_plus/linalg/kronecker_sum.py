"""Sums of Kronecker products, as curvatures of several data sets or tasks have them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg.conjugate_gradients import CGInverseLinearOperator
from curvlinops_plus.linalg.damping import Scalar, is_zero
from curvlinops_plus.linalg.eigendecomposition import eigh
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Kronecker
from curvlinops_plus.linalg.kronecker_approximation import nearest_kronecker
from curvlinops_plus.linalg.numerics import powers, psd_clip, slogdet_of
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator

__all__ = ["Congruent", "KroneckerSum"]


class KroneckerSum(LinearOperator):
    """`Σ_u G_u ⊗ A_u`, of Kronecker products of one shape; what adding them returns.

    Products, trace, diagonal and Frobenius norm come from the factors. Two positive semi-definite products are
    diagonalised together, by a congruence of their factors, so that the inverse without damping, the determinant and
    samples are exact. With a damping, or of three products and more, the inverse is solved for by conjugate gradients
    with the inverse of the nearest Kronecker product as preconditioner.

    Args:
        terms: The products, with square factors of equal sizes and batches.

    Raises:
        ValueError: If sizes, batches, dtypes or devices differ.

    Cost: of a product the sum of those with the terms; the first inverse of two takes four eigendecompositions.

    Example:
        >>> K = Kronecker(torch.eye(2), torch.eye(3)) + Kronecker(torch.diag(torch.tensor([1.0, 3.0])), torch.eye(3))
        >>> K, K.inverse() @ torch.ones(6)
        (KroneckerSum(6 x 6, PSD, torch.float32, cpu), tensor([0.5000, 0.5000, 0.5000, 0.2500, 0.2500, 0.2500]))
    """

    def __init__(self, terms: Sequence[Kronecker]) -> None:
        self.terms = tuple(terms)
        first = self.terms[0]
        self._sizes = (*first.batch, first.G.size, first.A.size)
        for term in self.terms:
            sizes, rows = (*term.batch, term.G.size, term.A.size), (*term.batch, term.G.rows, term.A.rows)
            if sizes != self._sizes or rows != sizes:
                pairs = [[list(t.G.shape), list(t.A.shape)] for t in (first, term)]
                raise ValueError(
                    f"Expected products of square factors of equal sizes, got factors {pairs[0]} and {pairs[1]}."
                )
            if term.dtype != first.dtype or term.device != first.device:
                raise ValueError(f"Expected one dtype and device, got {first.label} and {term.label}.")
        super().__init__(Space.flat(prod(self._sizes)), first.dtype, first.device)

    @property
    def structure(self) -> Structure:
        return min(term.structure for term in self.terms)

    def _matmat(self, X: Tensor) -> Tensor:
        return _total([term._matmat(X) for term in self.terms])

    def _rmatmat(self, X: Tensor) -> Tensor:
        return _total([term._rmatmat(X) for term in self.terms])

    def adjoint(self) -> KroneckerSum:
        return self if self.structure >= Structure.SYMMETRIC else KroneckerSum([t.adjoint() for t in self.terms])

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> KroneckerSum:
        return KroneckerSum([term.to(device, dtype) for term in self.terms])

    def _to_dense(self) -> Tensor:
        return _total([term.to_dense() for term in self.terms])

    def nearest_kronecker(self) -> Kronecker:
        """The one Kronecker product that is nearest in the Frobenius norm; see the function `nearest_kronecker`.

        Raises:
            NoClosedForm: If a term is not known to be positive semi-definite.
        """
        if self.structure < Structure.PSD:
            raise self._no_closed_form("power")
        pairs = list(zip(self._G, self._A, strict=True))
        if not self._batch:
            return _product(*nearest_kronecker(pairs))
        nearest = [nearest_kronecker([(G[b], A[b]) for G, A in pairs]) for b in range(self._batch[0])]
        return _product(*(torch.stack(factors) for factors in zip(*nearest, strict=True)), batch_axes=1)

    # Closed forms ----------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Tensor:
        return _total([term.trace for term in self.terms])

    def diagonal(self) -> Tensor:
        return _total([term.diagonal() for term in self.terms])

    @property
    def frobenius_norm(self) -> Tensor:
        axes = len(self._batch)
        inner = [
            (_inner(G, H, axes) * _inner(A, B, axes)).sum()
            for G, A in zip(self._G, self._A, strict=True)
            for H, B in zip(self._G, self._A, strict=True)
        ]
        return _total(inner).clamp(min=0).sqrt()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self._together("logdet")._slogdet()

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self._together("sample")._root_matmat(X)

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if len(self.terms) == 2 and is_zero(damping):
            return self._together("inverse").inverse()
        if isinstance(damping, Tensor) and damping.requires_grad:
            raise NoClosedForm(
                f"The inverse of {self.label} with a damping is solved for, and not differentiable in the damping; for "
                "one that is, take that of its nearest Kronecker product, A.nearest_kronecker().inverse(damping)."
            )
        preconditioner = self.nearest_kronecker().inverse(damping, retry_double_precision=retry)
        tolerance = 1e-12 if self.dtype == torch.float64 else 1e-5
        return CGInverseLinearOperator(self.shift(damping), tolerance=tolerance, preconditioner=preconditioner)

    def _scale(self, c: Scalar) -> KroneckerSum:
        return KroneckerSum([scaled_product(term, c) for term in self.terms])

    @property
    def _batch(self) -> tuple[int, ...]:
        return self._sizes[:-2]

    @property
    def _G(self) -> list[Tensor]:
        return _entries([term.G for term in self.terms], self._batch)

    @property
    def _A(self) -> list[Tensor]:
        return _entries([term.A for term in self.terms], self._batch)

    def _together(self, member: str) -> Congruent:
        """Both terms diagonalised."""
        if len(self.terms) != 2 or self.structure < Structure.PSD:
            raise self._no_closed_form(member)
        return self._diagonalised

    @cached_property
    def _diagonalised(self) -> Congruent:
        axes = len(self._batch)
        (U_G, of_G), (U_A, of_A) = (_simultaneous(F[0], F[1], axes) for F in (self._G, self._A))
        values = _total([(g[..., :, None] * a[..., None, :]).flatten() for g, a in zip(of_G, of_A, strict=True)])
        return Congruent(Kronecker(U_G[0], U_A[0]), Kronecker(U_G[1], U_A[1]), values)


class Congruent(LinearOperator):
    """`U diag(values) Uᵀ` for an invertible `U` and non-negative values.

    Args:
        U: The matrix.
        inverse_U: Its inverse.
        values: `[n]`; those that are 0 count as zero.

    Example:
        >>> U, half = torch.tensor([[2.0, 0.0], [2.0, 2.0]]), torch.tensor([[0.5, 0.0], [-0.5, 0.5]])
        >>> C = Congruent(Dense(U), Dense(half), torch.tensor([1.0, 2.0]))
        >>> C.diagonal(), C.inverse() @ (C @ torch.ones(2)), C.det
        (tensor([ 4., 12.]), tensor([1., 1.]), tensor(32.))
    """

    structure = Structure.PSD

    def __init__(self, U: LinearOperator, inverse_U: LinearOperator, values: Tensor) -> None:
        super().__init__(U.out_space, values.dtype, values.device)
        self.U, self.inverse_U, self.values = U, inverse_U, values

    def _matmat(self, X: Tensor) -> Tensor:
        return self.U._matmat(self.values[:, None] * self.U._rmatmat(X))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Congruent:
        values = self.values.to(device=device, dtype=dtype)
        return Congruent(self.U.to(device, dtype), self.inverse_U.to(device, dtype), values)

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def diagonal(self) -> Tensor:
        return self.U._entrywise_square()._matmat(self.values[:, None])[:, 0]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, of_values = slogdet_of(self.values)
        return sign, of_values + 2 * self.U._slogdet()[1]

    def _inverse(self, damping: Scalar, retry: bool) -> Congruent:
        if not is_zero(damping):
            raise self._no_closed_form("inverse")
        return Congruent(self.inverse_U.T, self.U.T, powers(self.values, -1.0, self))

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.U._matmat(self.values.sqrt()[:, None] * X)


def scaled_product(K: Kronecker, c: Scalar) -> Kronecker:
    """`c K` as a Kronecker product: the smaller factor is multiplied."""
    side = "G" if K.G.size <= K.A.size and not isinstance(K.G, IdentityLinearOperator) else "A"
    factor: Factor = getattr(K, side)
    if isinstance(factor, Dense):
        structure = factor.structure if c >= 0 else min(factor.structure, Structure.SYMMETRIC)
        times: Factor = Dense(c * factor.matrix, structure, factor.rtol)
    else:
        times = Diagonal(c * factor.diagonals())
    return Kronecker(times, K.A) if side == "G" else Kronecker(K.G, times)


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _entries(factors: Sequence[Factor], batch: tuple[int, ...]) -> list[Tensor]:
    """Factors as matrices `[*batch, n, n]`, or as diagonals `[*batch, n]` if all are diagonal."""
    if not any(isinstance(factor, Dense) for factor in factors):
        return [factor.diagonals().expand(*batch, factor.size) for factor in factors]
    matrices = [
        factor.matrix if isinstance(factor, Dense) else torch.diag_embed(factor.diagonals()) for factor in factors
    ]
    return [matrix.expand(*batch, *matrix.shape[-2:]) for matrix in matrices]


def _product(G: Tensor, A: Tensor, batch_axes: int = 0) -> Kronecker:
    """The Kronecker product of factors as `_entries` gives them."""
    G_, A_ = (Diagonal(factor) if factor.ndim == batch_axes + 1 else factor for factor in (G, A))
    return Kronecker(G_, A_)


def _inner(M: Tensor, N: Tensor, batch_axes: int) -> Tensor:  # [*b, ...], twice -> [*b]
    return (M * N).flatten(batch_axes).sum(-1)


def _simultaneous(M: Tensor, N: Tensor, batch_axes: int) -> tuple[tuple[Factor, Factor], tuple[Tensor, Tensor]]:
    """`U`, `U⁻¹` and values with `M = U diag(m) Uᵀ` and `N = U diag(n) Uᵀ`, for positive semi-definite `M`, `N`.

    With `M/a + N/b = E diag(λ) Eᵀ` and `R = diag(λ)^-½ Eᵀ`, the eigenvalues `s` of `R (M/a) Rᵀ = Q diag(s) Qᵀ` are
    between 0 and 1, those of `R (N/b) Rᵀ` are `1 - s` for the same `Q` (Golub & Van Loan 2013, section 8.7), and `U` is
    `E diag(λ)^½ Q`. Directions in which both are zero stay as they are in `E`.

    Args:
        M: `[*b, n, n]`, or the diagonal `[*b, n]`.
        N: The same.
        batch_axes: The number of axes `b`.
    """
    if M.ndim == batch_axes + 1:
        ones = Diagonal(torch.ones_like(M))
        return (ones, ones), (M, N)
    scales = [F.diagonal(dim1=-2, dim2=-1).mean(-1) for F in (M, N)]
    a, b = (torch.where(scale > 0, scale, torch.ones_like(scale))[..., None] for scale in scales)
    values, E = eigh(M / a[..., None] + N / b[..., None], semidefinite=True)
    values = psd_clip(values)
    both_zero = values == 0
    root = torch.where(both_zero, torch.ones_like(values), values).sqrt()
    R = E.mT / root[..., :, None]
    # A third eigenvalue, so that directions in which both are zero are not mixed with those in which M is.
    S = R @ (M / a[..., None]) @ R.mT * ~(both_zero[..., None] | both_zero[..., None, :])
    share, Q = eigh(S + torch.diag_embed(2.0 * both_zero))
    accuracy = M.shape[-1] * torch.finfo(M.dtype).eps
    m, n = (torch.where((part > accuracy) & (share < 1.5), part, torch.zeros_like(part)) for part in (share, 1 - share))
    return (Dense((E * root[..., None, :]) @ Q), Dense(Q.mT @ R)), (a * m, b * n)
