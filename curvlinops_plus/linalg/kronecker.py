"""Kronecker products and their sums, and matrices given by eigenvectors and eigenvalues.

The convention, stated here once: `G ⊗ A` acts on the row-major `vec(W)` of a matrix `W [o, i]` as
`W ↦ G W Aᵀ`, that is `G W A` for symmetric factors. With a batch axis the vector is that of `W [b,
o, i]`, and each `b` has its own factors.

Every number is computed from the small factors, never from the big matrix.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg.arithmetic import Foreign, Sum
from curvlinops_plus.linalg.damping import Damping, Scalar, heuristic_damping, is_zero, resolve
from curvlinops_plus.linalg.decisions import is_true
from curvlinops_plus.linalg.dense import Dense, Diagonal, Factor, IdentityMultiple, OneTensor
from curvlinops_plus.linalg.inverses import CGInverseLinearOperator
from curvlinops_plus.linalg.nearest import nearest_kronecker
from curvlinops_plus.linalg.numerics import (
    add_to_diagonal,
    frobenius,
    powers,
    psd_clip,
    slogdet_of,
    wide,
)
from curvlinops_plus.linalg.operator import Flat, LinearOperator
from curvlinops_plus.linalg.space import Structure
from curvlinops_plus.options import flag


class Kronecker(Flat):
    """`G ⊗ A` on the row-major `vec(W)` of `W [o, i]` (or `[b, o, i]`): `W ↦ G W Aᵀ`.

    Args:
        G: A tensor `[o, o]` (or `[b, o, o]`), or a `Dense`, `Diagonal` or identity operator.
        A: The same of size `i`. If only one of both has a batch, the other is shared by all its
            members.
        structure: What is known about factors given as tensors; operators know their own.

    Tensors are kept by reference (`K.G.matrix`).
    A product with `[n, K]` costs `2 o i (o + i) K` operations, an eigendecomposition `O(o³ + i³)`.

    Raises:
        ValueError: If the batches of the factors differ.

    Example:
        >>> K = Kronecker(torch.diag(torch.tensor([1.0, 2.0])), torch.eye(3))
        >>> K @ torch.ones(6)
        tensor([1., 1., 1., 2., 2., 2.])
        >>> K.inverse(damping=1.0).trace
        tensor(2.5000)
    """

    _made_of = ("G", "A")

    def __init__(
        self, G: Tensor | Factor, A: Tensor | Factor, structure: Structure = Structure.PSD
    ) -> None:
        if isinstance(G, Tensor):
            G = Dense(G, structure)
        if isinstance(A, Tensor):
            A = Dense(A, structure)
        self.G = G
        self.A = A
        self.factors = (G, A)
        if self.G.batch and self.A.batch and self.G.batch != self.A.batch:
            raise ValueError(
                f"Expected factors with equal batches, got G with {self.G.batch[0]} and A with "
                f"{self.A.batch[0]}."
            )
        self.batch = self.G.batch or self.A.batch
        b = prod(self.batch)
        self.shape = (b * self.G.rows * self.A.rows, b * self.G.size * self.A.size)
        self.dtype = self.G.dtype
        self.device = self.G.device

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        return min(self.G.structure, self.A.structure)

    # Products
    # ----------------------------------------------------------------------------------------------

    def _matmat(self, X: Tensor, transposed: bool = False) -> Tensor:  # [b o i, K] -> [b o' i', K]
        """Two matrix products, whatever the number of columns."""
        G, A = self.factors
        o, i = (G.rows, A.rows) if transposed else (G.size, A.size)
        K = X.shape[1]
        if K == 1:
            W = X.reshape(*self.batch, o, i)
            return A.right(G.left(W, transposed), transposed).reshape(-1, 1)
        # Columns first: then all of them are rows of one product with A. No copy if X was stored
        # like that already.
        W = X.T.reshape(K, *self.batch, o, i)
        return G.left(A.right(W, transposed), transposed).reshape(K, -1).T

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._matmat(X, True)

    def _adjoint(self) -> Kronecker:
        factors: list[Any] = [factor.adjoint() for factor in self.factors]
        return Kronecker(*factors)

    def _to_dense(self) -> Tensor:
        # The entry (o i, o' i') is G[o, o'] A[i, i'].
        G = self.G.matrices()[..., :, None, :, None]
        A = self.A.matrices()[..., None, :, None, :]
        products = (G * A).flatten(-4, -3).flatten(-2)  # [*b, o, i, o', i'] -> [*b, o i, o' i']
        return torch.block_diag(*products) if self.batch else products

    # Arithmetic
    # ----------------------------------------------------------------------------------------------

    def _scale(self, c: Scalar) -> Kronecker:
        """`(c G) ⊗ A`."""
        return Kronecker(self.G._scale(c), self.A)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        if not isinstance(other, Kronecker) or (self.A is not other.A and self.G is not other.G):
            return _kronecker_sum(self, other)
        if self.A is other.A:
            # G ⊗ A + H ⊗ A = (G + H) ⊗ A
            G = self.G + other.G
            return Kronecker(G, self.A) if isinstance(G, Factor) else None
        # G ⊗ A + G ⊗ B = G ⊗ (A + B)
        A = self.A + other.A
        return Kronecker(self.G, A) if isinstance(A, Factor) else None

    def entrywise_square(self) -> Kronecker:
        """The matrix of the squared entries."""
        return Kronecker(self.G.entrywise_square(), self.A.entrywise_square())

    # Closed forms
    # ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Tensor:
        # tr(G ⊗ A) = tr(G) tr(A)
        return (self.G.traces() * self.A.traces()).sum()

    @property
    def frobenius_norm(self) -> Tensor:
        # ‖G ⊗ A‖ = ‖G‖ ‖A‖
        return frobenius(self.G.norms() * self.A.norms())

    def eigenvalues(self) -> Tensor:
        return self._eigh()[0]

    def diagonal(self) -> Tensor:
        return _outer(self.G.diagonals(), self.A.diagonals(), self.batch)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        # det(G ⊗ A) = det(G)ⁱ det(A)ᵒ
        sign_G, log_G = self.G.slogdets()
        sign_A, log_A = self.A.slogdets()
        o = self.G.size
        i = self.A.size
        sign = sign_G**i * sign_A**o
        logarithm = i * log_G + o * log_A
        return sign.expand(self.batch).prod(), logarithm.expand(self.batch).sum()

    def _eigh(self) -> tuple[Tensor, Kronecker]:
        # G ⊗ A = (Q_G ⊗ Q_A) diag(v_G ⊗ v_A) (Q_G ⊗ Q_A)ᵀ
        values_G, Q_G = self.G.eigh()
        values_A, Q_A = self.A.eigh()
        return _outer(values_G, values_A, self.batch), Kronecker(Q_G, Q_A)

    def _inverse(self, damping: Any, retry: bool) -> LinearOperator:
        if not isinstance(damping, tuple) and is_zero(damping):
            damping = (0.0, 0.0)
        if isinstance(damping, tuple):
            # (G ⊗ A)⁻¹ = G⁻¹ ⊗ A⁻¹, each factor with its own damping.
            for_A, for_G = damping
            return Kronecker(self.G._inverse(for_G, retry), self.A._inverse(for_A, retry))
        if self.structure < Structure.SYMMETRIC:
            raise self._no_closed_form("inverse")
        # With one damping the inverse is no Kronecker product, but has the same eigenvectors.
        values, Q = self._eigh()
        if isinstance(damping, Tensor) and damping.ndim:
            damping = damping.repeat_interleave(len(values) // len(damping))
        return Eigendecomposed(Q, powers(values + damping, -1.0, self), self.structure, rtol=0.0)

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        flag("exact", exact)
        # A factor of size 1 is a number: the exact power costs no more.
        exact = exact or 1 in (self.G.size, self.A.size)
        if exact or is_true(~(self.G.traces() * self.A.traces() > 0).all()):
            return super().power(p, damping)
        for_A, for_G = heuristic_damping(self.A, self.G, resolve(damping, self), min_damping=0.0)
        return Kronecker(self.G._power(p, for_G), self.A._power(p, for_A))

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        if is_zero(damping):
            return Kronecker(self.G._power(p, 0.0), self.A._power(p, 0.0))
        values, Q = self._eigh()
        return Eigendecomposed(Q, powers(values + damping, p, self), rtol=0.0)


class Eigendecomposed(Flat):
    """`Q diag(values) Qᵀ` for an orthogonal `Q`.

    Args:
        basis: `Q`, for example a `Kronecker` product of eigenvectors, or `Dense`.
        values: `[n]`, kept by reference.
        structure: PSD if no value is negative (the default), SYMMETRIC otherwise.
        rtol: Values of a positive semi-definite matrix below `rtol` times the largest count as zero
            in its determinant, inverse and powers; by default `d * eps` with `d` the size of the
            largest matrix in the basis. 0 for values that are exact.

    Raises:
        ValueError: If the number of values does not fit the basis.

    Example:
        >>> Q = Dense(torch.tensor([[0.6, -0.8], [0.8, 0.6]]))
        >>> E = Eigendecomposed(Q, torch.tensor([1.0, 4.0]))
        >>> E.inverse().diagonal()
        tensor([0.5200, 0.7300])
    """

    _made_of = ("basis", "values", "structure", "rtol")

    def __init__(
        self,
        basis: LinearOperator,
        values: Tensor,
        structure: Structure = Structure.PSD,
        rtol: float | None = None,
    ) -> None:
        self.basis = basis
        self.values = values
        self.structure = structure
        self.rtol = rtol
        self.dtype = values.dtype
        self.device = values.device
        self.shape = (values.numel(), values.numel())
        if basis.shape != self.shape:
            raise ValueError(
                f"Expected a square basis [n, n] and values [n], got {list(basis.shape)} and "
                f"{list(values.shape)}."
            )

    def _matmat(self, X: Tensor) -> Tensor:
        return self.basis._matmat(self.values[:, None] * self.basis._rmatmat(X))

    def _scale(self, c: Scalar) -> Eigendecomposed:
        structure = self.structure if c >= 0 else Structure.SYMMETRIC
        return Eigendecomposed(self.basis, c * self.values, structure, self.rtol)

    def _plus(self, other: LinearOperator) -> Eigendecomposed | None:
        if not isinstance(other, Eigendecomposed) or other.basis is not self.basis:
            return None
        structure = min(self.structure, other.structure)
        rtol = self.rtol if self.rtol == other.rtol else None
        return Eigendecomposed(self.basis, self.values + other.values, structure, rtol)

    @property
    def trace(self) -> Tensor:
        return self.values.sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(self.values)

    def eigenvalues(self) -> Tensor:
        if self.structure == Structure.PSD:
            return psd_clip(self.values, rtol=0.0)
        return self.values.clone()

    def diagonal(self) -> Tensor:
        # The entries (j, j) of Q diag(values) Qᵀ are sums of values times squared entries of Q.
        Q = self.basis
        if not isinstance(Q, (Factor, Kronecker)):
            Q = Dense(Q.to_dense())
        return Q.entrywise_square()._matmat(self.values[:, None])[:, 0]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return slogdet_of(self._counted())

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        return self._power(-1.0, damping)

    def _power(self, p: float, damping: Scalar) -> Eigendecomposed:
        values = self._counted() if is_zero(damping) else self.eigenvalues()
        raised = powers(values + damping, p, self)
        return Eigendecomposed(self.basis, raised, self.structure, rtol=0.0)

    def _counted(self) -> Tensor:
        if self.structure < Structure.PSD:
            return self.values
        if self.rtol is not None:
            return psd_clip(self.values, self.rtol)
        # The size of the largest matrix that was decomposed to find the basis; the identity was
        # not.
        Q = self.basis
        size = 1
        for factor in getattr(Q, "factors", (Q,)):
            if not isinstance(factor, IdentityMultiple):
                size = max(size, getattr(factor, "size", factor.shape[0]))
        return psd_clip(self.values, size * torch.finfo(self.dtype).eps)


class KroneckerSum(Sum):
    """A sum of positive semi-definite Kronecker products of one shape; what adding them returns.

    It has products, trace, diagonal and Frobenius norm, and an inverse with damping that is solved
    for by conjugate gradients with the inverse of the nearest Kronecker product as preconditioner.
    A sum of two products (those with one factor in common count as one) has a determinant: both are
    diagonal in one basis, which need not be orthogonal. A shifted one has it where a factor is a
    multiple of the identity, as `G ⊗ A + c I ⊗ B + δ I = G ⊗ A + I ⊗ (c B + δ I)`.

    Example:
        >>> K = Kronecker(torch.eye(2), torch.eye(3)) + Kronecker(
        ...     torch.diag(torch.tensor([1.0, 3.0])), torch.eye(3)
        ... )
        >>> K.structure.name, K.inverse(2.0) @ torch.ones(6)
        ('PSD', tensor([0.2500, 0.2500, 0.2500, 0.1667, 0.1667, 0.1667]))
        >>> K.det, K.frobenius_norm
        (tensor(512.), tensor(7.7460))
    """

    @property
    def frobenius_norm(self) -> Tensor:
        # ‖Σ_k G_k ⊗ A_k‖² = Σ_{k,l} ⟨G_k, G_l⟩ ⟨A_k, A_l⟩, where no term is negative.
        terms = _terms(self)
        square: Any = 0.0
        for K in terms:
            for L in terms:
                square = square + (_inner(K.G, L.G) * _inner(K.A, L.A)).expand(K.batch).sum()
        return square.sqrt().to(self.dtype)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        terms = _joined_terms(_terms(self))
        if len(terms) == 1:
            return terms[0]._slogdet()
        if len(terms) > 2:
            return super()._slogdet()
        K, L = terms
        pencil_G = _Pencil(K.G, L.G)
        pencil_A = _Pencil(K.A, L.A)
        first = (pencil_G.scales[0] * pencil_A.scales[0])[..., None, None]
        second = (pencil_G.scales[1] * pencil_A.scales[1])[..., None, None]
        a = pencil_G.values[..., :, None]
        b = pencil_A.values[..., None, :]
        # X ⊗ Y of the two bases makes of the sum the numbers s a b + t (1 - a) (1 - b).
        numbers = first * a * b + second * psd_clip(1 - a, 0.0) * psd_clip(1 - b, 0.0)
        logarithm = numbers.log().sum((-2, -1))
        logarithm = logarithm + K.A.size * pencil_G.logdet + K.G.size * pencil_A.logdet
        total = logarithm.expand(K.batch).sum().to(self.dtype)
        return torch.where(total == -inf, 0.0, torch.ones_like(total)), total

    def _shift(self, delta: Scalar) -> LinearOperator:
        terms = _joined_terms(_terms(self))
        for k, K in enumerate(terms if delta >= 0 else ()):
            G = K.G
            A = K.A
            # c I ⊗ A + δ I = I ⊗ (c A + δ I), and the same on the other side.
            if isinstance(G, IdentityMultiple):
                shifted = Kronecker(G._times(1.0), _with_shift(A._scale(G.c), delta))
            elif isinstance(A, IdentityMultiple):
                shifted = Kronecker(_with_shift(G._scale(A.c), delta), A._times(1.0))
            else:
                continue
            return sum([*terms[:k], *terms[k + 1 :]], shifted)
        return super()._shift(delta)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        return _kronecker_sum(self, other)

    def nearest_kronecker(self) -> Kronecker:
        """The one Kronecker product that is nearest in the Frobenius norm; see the function
        `nearest_kronecker`.
        """
        terms = _terms(self)
        batch = terms[0].batch
        Gs = _entries([term.G for term in terms], batch)
        As = _entries([term.A for term in terms], batch)
        if not batch:
            return _kronecker_of(*nearest_kronecker(list(zip(Gs, As))), axes=2)
        items = []
        for b in range(batch[0]):
            items.append(nearest_kronecker([(G[b], A[b]) for G, A in zip(Gs, As)]))
        G = torch.stack([G for G, _ in items])
        A = torch.stack([A for _, A in items])
        return _kronecker_of(G, A, axes=3)

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if isinstance(damping, Tensor) and damping.requires_grad:
            raise NoClosedForm(
                f"The inverse of {self.label} is solved for, and not differentiable in the "
                "damping; for one that is, take that of its nearest Kronecker product, "
                "A.nearest_kronecker().inverse(damping)."
            )
        nearest = self.nearest_kronecker().inverse(damping, retry_double_precision=retry)
        # In float32 conjugate gradients stagnate at dampings that are small beside the matrix.
        damped = self.to(torch.float64).shift(float(damping))
        tolerance = 1e-12 if self.dtype == torch.float64 else 1e-6
        inverse = CGInverseLinearOperator(damped, tolerance=tolerance, preconditioner=nearest)
        return Foreign(inverse, self, inverse.structure)


class _Pencil:
    """Two factors as diagonal matrices in one basis, `Xᵀ F_k X / s_k`: `values` and 1 minus them.

    The basis is that in which the sum `S` of both, each over its trace, is the identity; it exists
    if `S` has no null space. A common one is that of the sum of products, too.

    Attributes:
        scales: `s_k`, the traces [*b].
        values: Of the first factor [*b, n], between 0 and 1.
        logdet: `log det S` [*b], -inf if it is singular.
    """

    def __init__(self, first: Factor, second: Factor) -> None:
        eps = first.size * torch.finfo(first.dtype).eps
        precise = [F.matrices().to(wide(F.diagonals())) for F in (first, second)]
        traces = [M.diagonal(dim1=-2, dim2=-1).sum(-1) for M in precise]
        self.scales = traces
        units = [
            M / torch.where(t > 0, t, torch.ones_like(t))[..., None, None]
            for M, t in zip(precise, traces)
        ]
        S = units[0] + units[1]
        n = S.shape[-1]
        is_singular = (psd_clip(torch.linalg.eigvalsh(S.detach()), eps) == 0).any(-1)
        one = torch.eye(n, dtype=S.dtype, device=S.device)
        # S = C Cᵀ, and C⁻¹ F C⁻ᵀ has the eigenvalues.
        C = torch.linalg.cholesky(torch.where(is_singular[..., None, None], one, S))
        W = torch.linalg.solve_triangular(C, units[0], upper=False)
        W = torch.linalg.solve_triangular(C, W.mT, upper=False)
        values = psd_clip(torch.linalg.eigvalsh((W + W.mT) / 2), eps).clamp(max=1)
        self.values = torch.where(1 - values > eps, values, torch.ones_like(values))
        logdet = 2 * C.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self.logdet = torch.where(is_singular, -inf, logdet)


def _inner(F: Factor, H: Factor) -> Tensor:  # [*b]
    """`⟨F, H⟩`, the sum of products of entries."""
    dtype = wide(F.diagonals())
    if isinstance(F, Dense) and isinstance(H, Dense):
        return (F.matrices().to(dtype) * H.matrices().to(dtype)).sum((-2, -1))
    return (F.diagonals().to(dtype) * H.diagonals().to(dtype)).sum(-1)


def _with_shift(F: Factor, delta: Scalar) -> Factor:
    """`F + δ I`."""
    if isinstance(F, IdentityMultiple):
        return F._times(F.c + delta)
    if isinstance(F, Diagonal):
        return Diagonal(F.vector + delta)
    return Dense(add_to_diagonal(F.matrices(), delta), F.structure)


def _is_copy(F: Factor, H: Factor) -> bool:
    """Whether two factors are one, or copies of it."""
    if F is H or type(F) is not type(H) or not isinstance(F, OneTensor):
        return F is H
    assert isinstance(H, OneTensor)
    return torch.equal(F.tensor, H.tensor)


def _joined_terms(terms: list[Kronecker]) -> list[Kronecker]:
    """The same sum, with terms that have a factor in common as one."""
    joined: list[Kronecker] = []
    for term in terms:
        for k, other in enumerate(joined):
            total = None
            if _is_copy(term.A, other.A):
                total = other._plus(Kronecker(term.G, other.A))
            elif _is_copy(term.G, other.G):
                total = other._plus(Kronecker(other.G, term.A))
            if isinstance(total, Kronecker):
                joined[k] = total
                break
        else:
            joined.append(term)
    return joined


def _kronecker_sum(A: LinearOperator, B: LinearOperator) -> KroneckerSum | None:
    """The sum of positive semi-definite Kronecker products of one shape, or of sums of them; None
    of other matrices.
    """
    terms = _terms(A)
    addends = _terms(B)
    for term in terms + addends:
        if _sizes(term) != _sizes(terms[0]) or term.structure != Structure.PSD:
            return None
    return KroneckerSum(A, B) if addends else None


def _terms(A: LinearOperator) -> list[Kronecker]:
    """The Kronecker products that a matrix is a sum of; none of another matrix."""
    if isinstance(A, KroneckerSum):
        return _terms(A.A) + _terms(A.B)
    if isinstance(A, Kronecker):
        return [A]
    return []


def _sizes(K: Kronecker) -> tuple[Any, ...]:
    return (K.batch, K.G.size, K.A.size)


def _entries(factors: list[Factor], batch: tuple[int, ...]) -> list[Tensor]:
    """Factors as matrices `[*batch, n, n]`, or as diagonals `[*batch, n]` if all are diagonal."""
    if any(isinstance(factor, Dense) for factor in factors):
        matrices = [factor.matrices() for factor in factors]
        return [M.expand(*batch, *M.shape[-2:]) for M in matrices]
    diagonals = [factor.diagonals() for factor in factors]
    return [v.expand(*batch, v.shape[-1]) for v in diagonals]


def _kronecker_of(G: Tensor, A: Tensor, axes: int) -> Kronecker:
    """`G ⊗ A` of matrices, which have so many axes, or of diagonals, which have one less."""
    factors: list[Any] = [
        Dense(F, Structure.PSD) if F.ndim == axes else Diagonal(F) for F in (G, A)
    ]
    return Kronecker(*factors)


def _outer(of_G: Tensor, of_A: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Products of the numbers `[*b, o]` and `[*b, i]` of both factors, `[b o i]`."""
    product = of_G[..., :, None] * of_A[..., None, :]
    return product.expand(*batch, *product.shape[-2:]).flatten()
