"""Sums of Kronecker products, as curvatures of several data sets or tasks have them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, SingularMatrixError
from curvlinops_plus.linalg.damping import Scalar, is_zero
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Kronecker
from curvlinops_plus.linalg.kronecker_approximation import nearest_kronecker
from curvlinops_plus.linalg.numerics import eigh, frobenius, powers, psd_clip, slogdet_of
from curvlinops_plus.linalg.operator import LinearOperator, Scaled
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.linalg.remembered import needs_gradient, remember
from curvlinops_plus.linalg.solvers import CGInverseLinearOperator, cg
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator, OneTensor


class KroneckerSum(LinearOperator):
    """`Σ_u c_u G_u ⊗ A_u`, of Kronecker products of one shape; what adding them returns.

    Products, trace, diagonal and Frobenius norm come from the factors. If all products share a factor (one tensor, or
    the identity), the sum has every closed form of a Kronecker product. Otherwise, two positive semi-definite products
    are diagonalised together, by a congruence of their factors, so that the inverse without damping, the determinant
    and samples are exact. With a damping, or of three products and more, the inverse is solved for by conjugate
    gradients with the inverse of the nearest Kronecker product as preconditioner. Factors and numbers `c_u` are kept by
    reference.

    Derivatives are taken through products, `trace` and `diagonal`, and where a factor is shared through everything.

    Args:
        terms: The products, or multiples of them, with square factors of equal sizes and batches.

    Raises:
        ValueError: If sizes, batches, dtypes or devices differ.

    Cost: of a product the sum of those with the terms; the first inverse of two takes four eigendecompositions.

    Example:
        >>> K = Kronecker(torch.eye(2), torch.eye(3)) + Kronecker(torch.diag(torch.tensor([1.0, 3.0])), torch.eye(3))
        >>> K, K.inverse() @ torch.ones(6)
        (KroneckerSum(6 x 6, PSD, torch.float32, cpu), tensor([0.5000, 0.5000, 0.5000, 0.2500, 0.2500, 0.2500]))
    """

    def __init__(self, terms: Sequence[LinearOperator]) -> None:
        self.terms = tuple(terms)
        self._products = [_product_of(term) for term in terms]
        first = self._products[0]
        self._sizes = _sizes(first)
        for term in self._products:
            if not _same_sizes(first, term):
                pairs = [[list(t.G.shape), list(t.A.shape)] for t in (first, term)]
                raise ValueError(
                    f"Expected products of square factors of equal sizes, got factors {pairs[0]} and {pairs[1]}."
                )
            if term.dtype != first.dtype or term.device != first.device:
                raise ValueError(f"Expected one dtype and device, got {first.label} and {term.label}.")
        self._memory: dict[str, tuple[Any, Any]] = {}
        super().__init__(Space.flat(prod(self._sizes)), first.dtype, first.device)

    @classmethod
    def of(cls, terms: Sequence[LinearOperator]) -> KroneckerSum | None:
        """The sum, or None if sizes or batches differ."""
        products = [_product_of(term) for term in terms]
        return cls(terms) if all(_same_sizes(products[0], product) for product in products) else None

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

    def _scale(self, c: Scalar) -> KroneckerSum:
        return KroneckerSum([term._scale(c) for term in self.terms])

    def nearest_kronecker(self) -> Kronecker:
        """The one Kronecker product that is nearest in the Frobenius norm; see the function `nearest_kronecker`.

        Raises:
            NoClosedForm: If a term is not known to be positive semi-definite, or derivatives would be taken.
        """
        if (joined := self._joined()) is not None:
            return joined
        if self.structure < Structure.PSD:
            raise NoClosedForm(
                f"{self.label} has no `nearest_kronecker`, because a term is not known to be positive semi-definite. "
                "If it is small, use A.materialize(); to solve with it, MINRESInverseLinearOperator(A)."
            )
        self._refuse_gradients("nearest_kronecker")
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
        """From triangular factors `R` of the matrices `[vec(G_1), ...] = Q R` and of the `A_u`: nothing cancels."""
        if (joined := self._joined()) is not None:
            return joined.frobenius_norm
        self._refuse_gradients("frobenius_norm")
        axes = len(self._batch)
        with outside_autocast(self.device):
            R_G, R_A = (_triangular(factors, axes) for factors in (self._G, self._A))
            return frobenius(R_G @ R_A.mT).to(self.dtype)

    def eigenvalues(self) -> Tensor:
        return self._as_product("eigenvalues").eigenvalues()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return (self._joined() or self._together("logdet"))._slogdet()

    def _root_matmat(self, X: Tensor) -> Tensor:
        return (self._joined() or self._together("sample"))._root_matmat(X)

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        return self._as_product("power")._power(p, damping)

    def _power_by_factors(self, p: float, damping: Scalar) -> LinearOperator:
        return self._as_product("power")._power_by_factors(p, damping)

    def _inverse_by_factors(self, damping: tuple[Any, Any], retry: bool) -> LinearOperator:
        joined = self._joined()
        return (super() if joined is None else joined)._inverse_by_factors(damping, retry)

    def _split_damping(self, damping: Scalar, smallest: float) -> Scalar | tuple[Tensor, Tensor]:
        joined = self._joined()
        return damping if joined is None else joined._split_damping(damping, smallest)

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if (joined := self._joined()) is not None:
            return joined._inverse(damping, retry)
        if self.structure < Structure.PSD:
            raise self._no_closed_form("inverse")
        if len(self.terms) == 2 and is_zero(damping):
            together = self._together("inverse")
            if zeros := int((together.values == 0).sum()):
                raise SingularMatrixError(
                    f"{self.label} is singular: its terms share a null space of dimension {zeros}. Add a damping, "
                    "for example RelativeDamping(1e-3)."
                )
            return together.inverse()
        if isinstance(damping, Tensor) and damping.requires_grad:
            raise NoClosedForm(
                f"The inverse of {self.label} with a damping is solved for, and not differentiable in the damping; for "
                "one that is, take that of its nearest Kronecker product, A.nearest_kronecker().inverse(damping)."
            )
        self._refuse_gradients("inverse")
        preconditioner = self.nearest_kronecker().inverse(damping, retry_double_precision=retry)
        pairs = zip(self._G, self._A, strict=True)  # copied: an inverse does not follow its matrix
        copies = [_product(G.double(), A.double().clone(), len(self._batch)) for G, A in pairs]
        return DampedSumInverse(KroneckerSum(copies).shift(float(damping)), self.dtype, preconditioner)

    @property
    def _batch(self) -> tuple[int, ...]:
        return self._sizes[:-2]

    @property
    def _numbers(self) -> list[Scalar]:
        return [term.c if isinstance(term, Scaled) else 1.0 for term in self.terms]

    @property
    def _G(self) -> list[Tensor]:
        """The factors on the left, each times its number."""
        entries = _entries([term.G for term in self._products], self._batch)
        return [c * G for c, G in zip(self._numbers, entries, strict=True)]

    @property
    def _A(self) -> list[Tensor]:
        return _entries([term.A for term in self._products], self._batch)

    @property
    def _tensors(self) -> list[Tensor] | None:
        factors = [factor for term in self._products for factor in (term.G, term.A)]
        if not all(isinstance(factor, (OneTensor, IdentityLinearOperator)) for factor in factors):
            return None
        own = [factor._tensor for factor in factors if isinstance(factor, OneTensor)]
        return own + [c for c in self._numbers if isinstance(c, Tensor)]

    def _refuse_gradients(self, member: str) -> None:
        if needs_gradient(self._tensors or []):
            raise NoClosedForm(
                f"`{member}` of {self.label} is not differentiable in what its terms are made of. If it is small, "
                f"use A.materialize().{member}; without derivatives, compute it under torch.no_grad()."
            )

    def _joined(self) -> Kronecker | None:
        """The sum as one product, if all terms share a factor. Numbers belong to `G`, unless that is shared alone."""
        for shared in ("A", "G"):
            factors = [getattr(product, shared) for product in self._products]
            if all(same_tensor(factor, factors[0]) for factor in factors):
                return remember(
                    self._memory, "joined", self._tensors, self._sum_of_G if shared == "A" else self._sum_of_A
                )
        return None

    def _sum_of_G(self) -> Kronecker:
        return Kronecker(self._added(self._G, [product.G for product in self._products]), self._products[0].A)

    def _sum_of_A(self) -> Kronecker:
        scaled = [c * A for c, A in zip(self._numbers, self._A, strict=True)]
        return Kronecker(self._products[0].G, self._added(scaled, [product.A for product in self._products]))

    def _added(self, entries: list[Tensor], factors: list[Factor]) -> Factor:
        """The sum of factors, each already times its number."""
        total = _total(entries)
        if total.ndim == len(self._batch) + 1:
            return Diagonal(total)
        rtols = [factor.rtol for factor in factors if isinstance(factor, Dense)]
        known = [rtol for rtol in rtols if rtol is not None]
        structures = [
            factor.structure if c >= 0 else min(factor.structure, Structure.SYMMETRIC)
            for c, factor in zip(self._numbers, factors, strict=True)
        ]
        return Dense(total, min(structures), max(known) if len(known) == len(rtols) else None)

    def _as_product(self, member: str) -> Kronecker:
        if (joined := self._joined()) is None:
            raise self._no_closed_form(member)
        return joined

    def _together(self, member: str) -> Congruent:
        """Both terms diagonalised."""
        if len(self.terms) != 2 or self.structure < Structure.PSD:
            raise self._no_closed_form(member)
        self._refuse_gradients(member)
        with outside_autocast(self.device):
            return remember(self._memory, "together", self._tensors, self._diagonalise)

    def _diagonalise(self) -> Congruent:
        axes = len(self._batch)
        (U_G, of_G), (U_A, of_A) = (_simultaneous(F[0], F[1], axes) for F in (self._G, self._A))
        values = _total([(g[..., :, None] * a[..., None, :]).flatten() for g, a in zip(of_G, of_A, strict=True)])
        return Congruent(Kronecker(U_G[0], U_A[0]), Kronecker(U_G[1], U_A[1]), values)


class DampedSumInverse(CGInverseLinearOperator):
    """The inverse of a damped sum of Kronecker products, by conjugate gradients in float64.

    In float32 they stagnate at dampings that are small beside the matrix.

    Args:
        A: The damped sum, in float64.
        dtype: Of the vectors.
        preconditioner: The inverse of a damped Kronecker product.
    """

    def __init__(self, A: LinearOperator, dtype: torch.dtype, preconditioner: LinearOperator) -> None:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        super().__init__(A, tolerance=tolerance, preconditioner=preconditioner)
        self.dtype = dtype

    def _matmat(self, X: Tensor) -> Tensor:
        x, self.info = cg(self.A, X.double(), **self.options)
        return x.to(X.dtype)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> DampedSumInverse:
        preconditioner = self.options["preconditioner"].to(device, dtype)
        return DampedSumInverse(self.A.to(device), dtype or self.dtype, preconditioner)


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


def same_tensor(F: LinearOperator, G: LinearOperator) -> bool:
    """Whether both are one matrix as far as can be seen without its entries: one tensor, or the identity."""
    if isinstance(F, IdentityLinearOperator) and isinstance(G, IdentityLinearOperator):
        return F.size == G.size
    if isinstance(F, OneTensor) and isinstance(G, OneTensor):
        return type(F) is type(G) and F._tensor is G._tensor
    return F is G


def _product_of(term: LinearOperator) -> Kronecker:
    product = term.A if isinstance(term, Scaled) else term
    if not isinstance(product, Kronecker):
        raise ValueError(f"Expected Kronecker products and multiples of them as terms, got {term.label}.")
    return product


def _sizes(K: Kronecker) -> tuple[int, ...]:
    return (*K.batch, K.G.size, K.A.size)


def _same_sizes(first: Kronecker, K: Kronecker) -> bool:
    return _sizes(first) == _sizes(K) == (*K.batch, K.G.rows, K.A.rows)


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


def _triangular(factors: Sequence[Tensor], batch_axes: int) -> Tensor:  # U of [*b, ...] -> [*b, min(n, U), U]
    """`R` of the QR decomposition of the matrix whose columns are the factors' entries."""
    columns = torch.stack([factor.flatten(batch_axes) for factor in factors], -1)
    return torch.linalg.qr(columns if columns.dtype == torch.float64 else columns.float(), mode="r").R


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
    share, Q = eigh(S + torch.diag_embed(2 * both_zero.to(S.dtype)))
    accuracy = M.shape[-1] * torch.finfo(M.dtype).eps
    m, n = (torch.where((part > accuracy) & (share < 1.5), part, torch.zeros_like(part)) for part in (share, 1 - share))
    return (Dense((E * root[..., None, :]) @ Q), Dense(Q.mT @ R)), (a * m, b * n)
