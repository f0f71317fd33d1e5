"""Kronecker products, sums of them and the nearest to a matrix, and matrices given by eigenvectors
and eigenvalues.

The convention, stated here once: `G ⊗ A` acts on the row-major `vec(W)` of a matrix `W [o, i]` as
`W ↦ G W Aᵀ`, that is `G W A` for symmetric factors. With a batch axis the vector is that of `W [b,
o, i]`, and each `b` has its own factors.

Every number is computed from the small factors, never from the big matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg.damping import Damping, Scalar, heuristic_damping, is_zero, resolve
from curvlinops_plus.linalg.dense import Dense, Diagonal, Factor, IdentityLinearOperator
from curvlinops_plus.linalg.numerics import eigh, frobenius, powers, psd_clip, slogdet_of
from curvlinops_plus.linalg.operator import Flat, Foreign, LinearOperator, Sum
from curvlinops_plus.linalg.solvers import CGInverseLinearOperator
from curvlinops_plus.linalg.space import Structure


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

    def __init__(
        self, G: Tensor | Factor, A: Tensor | Factor, structure: Structure = Structure.PSD
    ) -> None:
        self.G = Dense(G, structure) if isinstance(G, Tensor) else G
        self.A = Dense(A, structure) if isinstance(A, Tensor) else A
        if self.G.batch and self.A.batch and self.G.batch != self.A.batch:
            raise ValueError(
                f"Expected factors with equal batches, got G with {self.G.batch[0]} and A with "
                f"{self.A.batch[0]}."
            )
        self.batch, self.factors = self.G.batch or self.A.batch, (self.G, self.A)
        b = prod(self.batch)
        self.shape = b * self.G.rows * self.A.rows, b * self.G.size * self.A.size
        self.dtype, self.device = self.G.dtype, self.G.device

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        return min(self.G.structure, self.A.structure)

    # Products
    # ----------------------------------------------------------------------------------------------

    def _matmat(self, X: Tensor, transposed: bool = False) -> Tensor:  # [b o i, K] -> [b o' i', K]
        """Two matrix products, whatever the number of columns."""
        G, A, K = self.G, self.A, X.shape[1]
        o, i = (G.rows, A.rows) if transposed else (G.size, A.size)
        if K == 1:
            return A.right(G.left(X.reshape(*self.batch, o, i), transposed), transposed).reshape(
                -1, 1
            )
        # Columns first: then all of them are rows of one product with A. No copy if X was stored
        # like that already.
        M = X.T.reshape(K, *self.batch, o, i)
        return G.left(A.right(M, transposed), transposed).reshape(K, -1).T

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._matmat(X, True)

    def adjoint(self) -> Kronecker:
        return (
            self
            if self.structure >= Structure.SYMMETRIC
            else Kronecker(self.G.adjoint(), self.A.adjoint())
        )

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Kronecker:
        return Kronecker(self.G.to(device, dtype), self.A.to(device, dtype))

    def _to_dense(self) -> Tensor:
        G, A = self.G.matrices(), self.A.matrices()
        whole = G[..., :, None, :, None] * A[..., None, :, None, :]  # [*b, o, i, o', i']
        whole = whole.flatten(-4, -3).flatten(-2)
        return torch.block_diag(*whole) if self.batch else whole

    # Arithmetic
    # ----------------------------------------------------------------------------------------------

    def _scale(self, c: Scalar) -> Kronecker:
        """`(c G) ⊗ A`."""
        return Kronecker(self.G._scale(c), self.A)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        if isinstance(other, Kronecker) and self.A is other.A:
            G = self.G + other.G
            return Kronecker(G, self.A) if isinstance(G, Factor) else None
        own, theirs = _terms(self), _terms(other)
        fit = all(
            _sizes(term) == _sizes(own[0]) and term.structure == Structure.PSD
            for term in own + theirs
        )
        return KroneckerSum(self, other) if theirs and fit else None

    # Closed forms
    # ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Tensor:
        return (self.G.traces() * self.A.traces()).sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(self.G.norms() * self.A.norms())

    def eigenvalues(self) -> Tensor:
        return self._eigh()[0]

    def diagonal(self) -> Tensor:
        return _outer(self.G.diagonals(), self.A.diagonals(), self.batch)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        (sign_G, log_G), (sign_A, log_A) = self.G.slogdets(), self.A.slogdets()
        o, i = self.G.size, self.A.size
        return (sign_G**i * sign_A**o).expand(self.batch).prod(), (i * log_G + o * log_A).expand(
            self.batch
        ).sum()

    def _eigh(self) -> tuple[Tensor, Kronecker]:
        (values_G, Q_G), (values_A, Q_A) = self.G.eigh(), self.A.eigh()
        return _outer(values_G, values_A, self.batch), Kronecker(Q_G, Q_A)

    def _inverse(self, damping: Any, retry: bool) -> LinearOperator:
        if isinstance(damping, tuple) or is_zero(damping):
            for_A, for_G = damping if isinstance(damping, tuple) else (0.0, 0.0)
            return Kronecker(self.G._inverse(for_G, retry), self.A._inverse(for_A, retry))
        if self.structure < Structure.SYMMETRIC:
            raise self._no_closed_form("inverse")
        values, Q = self._eigh()
        if isinstance(damping, Tensor) and damping.ndim:
            damping = damping.repeat_interleave(len(values) // len(damping))
        return Eigendecomposed(Q, powers(values + damping, -1.0, self), self.structure, rtol=0.0)

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        if (
            exact
            or 1 in (self.G.size, self.A.size)
            or not bool((self.G.traces() * self.A.traces() > 0).all())
        ):
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
        >>> E = Eigendecomposed(Dense(torch.tensor([[0.6, -0.8], [0.8, 0.6]])), torch.tensor([1.0, 4.0]))
        >>> E.inverse().diagonal()
        tensor([0.5200, 0.7300])
    """

    def __init__(
        self,
        basis: LinearOperator,
        values: Tensor,
        structure: Structure = Structure.PSD,
        rtol: float | None = None,
    ) -> None:
        self.basis, self.values, self.structure, self.rtol = basis, values, structure, rtol
        self.dtype, self.device = values.dtype, values.device
        self.shape = values.numel(), values.numel()
        if basis.shape != self.shape:
            raise ValueError(
                f"Expected a square basis [n, n] and values [n], got {list(basis.shape)} and "
                f"{list(values.shape)}."
            )

    def _matmat(self, X: Tensor) -> Tensor:
        return self.basis._matmat(self.values[:, None] * self.basis._rmatmat(X))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Eigendecomposed:
        values = self.values.to(device=device, dtype=dtype)
        return Eigendecomposed(self.basis.to(device, dtype), values, self.structure, self.rtol)

    def _scale(self, c: Scalar) -> Eigendecomposed:
        structure = self.structure if c >= 0 else Structure.SYMMETRIC
        return Eigendecomposed(self.basis, c * self.values, structure, self.rtol)

    def _plus(self, other: LinearOperator) -> Eigendecomposed | None:
        if not isinstance(other, Eigendecomposed) or other.basis is not self.basis:
            return None
        rtol = self.rtol if self.rtol == other.rtol else None
        return Eigendecomposed(
            self.basis, self.values + other.values, min(self.structure, other.structure), rtol
        )

    @property
    def trace(self) -> Tensor:
        return self.values.sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(self.values)

    def eigenvalues(self) -> Tensor:
        return (
            psd_clip(self.values, rtol=0.0)
            if self.structure == Structure.PSD
            else self.values.clone()
        )

    def diagonal(self) -> Tensor:
        Q = self.basis
        squares: Any = (
            Kronecker(Q.G.entrywise_square(), Q.A.entrywise_square())
            if isinstance(Q, Kronecker)
            else Q
        )
        squares = squares.entrywise_square() if isinstance(squares, Factor) else squares
        return squares._matmat(self.values[:, None])[:, 0]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return slogdet_of(self._counted())

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        return self._power(-1.0, damping)

    def _power(self, p: float, damping: Scalar) -> Eigendecomposed:
        values = self._counted() if is_zero(damping) else self.eigenvalues()
        return Eigendecomposed(
            self.basis, powers(values + damping, p, self), self.structure, rtol=0.0
        )

    def _counted(self) -> Tensor:
        """The values, with 0 where they count as zero."""
        if self.structure < Structure.PSD:
            return self.values
        if self.rtol is not None:
            return psd_clip(self.values, self.rtol)
        # The size of the largest matrix that was decomposed to find the basis; the identity was
        # not.
        Q = self.basis
        factors = (Q.G, Q.A) if isinstance(Q, Kronecker) else (Q,)
        size = max(
            1 if isinstance(F, IdentityLinearOperator) else getattr(F, "size", F.shape[0])
            for F in factors
        )
        return psd_clip(self.values, size * torch.finfo(self.dtype).eps)


class KroneckerSum(Sum):
    """A sum of positive semi-definite Kronecker products of one shape; what adding them returns.

    It has products, trace and diagonal, and an inverse with damping that is solved for by conjugate
    gradients with the inverse of the nearest Kronecker product as preconditioner.

    Example:
        >>> K = Kronecker(torch.eye(2), torch.eye(3)) + Kronecker(
        ...     torch.diag(torch.tensor([1.0, 3.0])), torch.eye(3)
        ... )
        >>> K, K.inverse(2.0) @ torch.ones(6)
        (KroneckerSum(6 x 6, PSD, torch.float32, cpu), tensor([0.2500, 0.2500, 0.2500, 0.1667, 0.1667, 0.1667]))
    """

    _plus = Kronecker._plus  # type: ignore[assignment]

    def nearest_kronecker(self) -> Kronecker:
        """The one Kronecker product that is nearest in the Frobenius norm; see the function
        `nearest_kronecker`.
        """
        terms = _terms(self)
        G, A = (
            _entries([getattr(term, name) for term in terms], terms[0].batch) for name in ("G", "A")
        )
        batch = bool(terms[0].batch)
        each = [
            nearest_kronecker(list(zip(*of_b)))
            for of_b in (zip(zip(*G), zip(*A)) if batch else [(G, A)])
        ]
        found = [torch.stack(of_b) if batch else of_b[0] for of_b in zip(*each, strict=True)]
        G, A = (Diagonal(t) if t.ndim == 1 + batch else Dense(t, Structure.PSD) for t in found)
        return Kronecker(G, A)

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if isinstance(damping, Tensor) and damping.requires_grad:
            raise NoClosedForm(
                f"The inverse of {self.label} is solved for, and not differentiable in the "
                "damping; for one that is, take that of its nearest Kronecker product, "
                "A.nearest_kronecker().inverse(damping)."
            )
        nearest = self.nearest_kronecker().inverse(damping, retry_double_precision=retry)
        # In float32 conjugate gradients stagnate at dampings that are small beside the matrix.
        damped, tolerance = (
            self.to(torch.float64).shift(float(damping)),
            1e-12 if self.dtype == torch.float64 else 1e-6,
        )
        inverse = CGInverseLinearOperator(damped, tolerance=tolerance, preconditioner=nearest)
        return Foreign(inverse, self, inverse.structure)


def _terms(A: LinearOperator) -> list[Kronecker]:
    """The Kronecker products that a matrix is a sum of; none of another matrix."""
    if isinstance(A, KroneckerSum):
        return _terms(A.A) + _terms(A.B)
    return [A] if isinstance(A, Kronecker) else []


def _sizes(K: Kronecker) -> tuple[Any, ...]:
    return (K.batch, K.G.size, K.A.size)


def _entries(factors: list[Factor], batch: tuple[int, ...]) -> list[Tensor]:
    """Factors as matrices `[*batch, n, n]`, or as diagonals `[*batch, n]` if all are diagonal."""
    dense = any(isinstance(factor, Dense) for factor in factors)
    entries = [factor.matrices() if dense else factor.diagonals() for factor in factors]
    return [t.expand(*batch, *t.shape[-2 if dense else -1 :]) for t in entries]


def _outer(
    of_G: Tensor, of_A: Tensor, batch: tuple[int, ...]
) -> Tensor:  # [*b, o], [*b, i] -> [b o i]
    product = of_G[..., :, None] * of_A[..., None, :]
    return product.expand(*batch, *product.shape[-2:]).flatten()


def nearest_kronecker(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Factors `G, A` that minimise `|Σ_u G_u ⊗ A_u - G ⊗ A|` in the Frobenius norm.

    `vec(G) vec(A)ᵀ` is the best approximation of rank one to `Σ_u vec(G_u) vec(A_u)ᵀ` (Van Loan and
    Pitsianis 1993), so that `G` is a combination of the `G_u` and `A` one of the `A_u`; only inner
    products of the given matrices are needed to find it. If all of these are positive
    semi-definite, the result is too.

    Args:
        pairs: `(G_u [o, o], A_u [i, i])`, symmetric positive semi-definite.

    Returns:
        `G` and `A`; the latter is a mean of the `A_u`, with weights that add up to one.

    Cost: U² inner products, with U the number of pairs.

    Example:
        >>> eye, one = torch.eye(2), torch.ones(2, 2)
        >>> G, A = nearest_kronecker([(eye, one), (2 * eye, one)])
        >>> G
        tensor([[3., 0.],
                [0., 3.]])
    """
    (first_G, first_A), *others = pairs
    if not others:
        return first_G, first_A
    P = _inner_products([G for G, _ in pairs])
    R = _inner_products([A for _, A in pairs])
    # The coefficients of A solve an eigenproblem, P R b = s b. All entries are non-negative, and so
    # is the leading eigenvector; scaling makes the problem independent of the units of the pairs.
    scale = R.diagonal().clamp(min=torch.finfo(R.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eig((scale[:, None] ** -1) * (P @ R) * scale)
    b = vectors[:, values.real.argmax()].real.abs() * scale
    b = b / b.sum()
    norm = b @ R @ b
    a = (R @ b) / norm if norm > 0 else torch.ones_like(b)
    G = sum(float(x) * G for x, (G, _) in zip(a, pairs, strict=True))
    A = sum(float(x) * A for x, (_, A) in zip(b, pairs, strict=True))
    assert isinstance(G, Tensor)
    assert isinstance(A, Tensor)
    return G, A


def _inner_products(
    matrices: Sequence[Tensor],
) -> Tensor:  # U matrices -> [U, U], float64 on the CPU
    return torch.tensor(
        [[float((M * N).sum()) for N in matrices] for M in matrices], dtype=torch.float64
    )


def nearest_to_matrix(R: Tensor) -> tuple[Tensor, Tensor]:
    """Positive semi-definite factors `G, A` that minimise `|F - G ⊗ A|` for a positive
    semi-definite `F`.

    Rearranged as `R[o, p, i, j] = F[(o i), (p j)]`, with pairs `(o, p)` as rows and `(i, j)` as
    columns, a Kronecker product has rank one, so the leading singular pair of `R` is the answer
    (Van Loan and Pitsianis 1993). Where several pairs tie, it is the one that alternating least
    squares reaches from the identity. What rounding makes indefinite is replaced by its absolute
    value, which is as near and positive semi-definite.

    Args:
        R: The matrix `F`, rearranged: `[*b, o, o, i, i]`, with a batch axis `b` one problem for
            each of its items.

    Returns:
        `G [*b, o, o]` and `A [*b, i, i]`, with equal mean eigenvalues.

    Raises:
        NumericsError: If an entry is NaN or infinite.

    Cost: one eigendecomposition of size `k²`, with `k` the smaller one of `o` and `i`.

    Example:
        >>> G, A = nearest_to_matrix(torch.einsum("op,ij->opij", torch.eye(2), torch.ones(2, 2)))
        >>> (torch.kron(G, A) - torch.kron(torch.eye(2), torch.ones(2, 2))).abs().max() < 1e-6
        tensor(True)
    """
    o, i = R.shape[-3], R.shape[-1]
    C = R.flatten(-4, -3).flatten(-2)  # [*b, o o, i i]
    if o <= i:
        G = _absolute(_leading(C @ C.mT, o))
        A = (C.mT @ G.flatten(-2)[..., None] / _square_norm(G)).unflatten(-2, (i, i))[..., 0]
        return balanced(G, (A + A.mT) / 2)
    A = _absolute(_leading(C.mT @ C, i))
    G = (C @ A.flatten(-2)[..., None] / _square_norm(A)).unflatten(-2, (o, o))[..., 0]
    return balanced((G + G.mT) / 2, A)


def balanced(G: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The same product `G ⊗ A` from factors of equal mean eigenvalues.

    Args:
        G: `[*b, o, o]`.
        A: `[*b, i, i]`.

    Example:
        >>> balanced(8 * torch.eye(2), torch.diag(torch.tensor([1.0, 3.0])))[1].diagonal()
        tensor([2., 6.])
    """
    mean_G, mean_A = (M.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] for M in (G, A))
    known, one = (mean_G > 0) & (mean_A > 0), torch.ones_like(mean_G)
    root = torch.where(known, mean_G, one).sqrt() / torch.where(known, mean_A, one).sqrt()
    return G / root, A * root


def _leading(M: Tensor, n: int) -> Tensor:  # [*b, n n, n n] -> [*b, n, n]
    """What powers of `M` turn the identity to: of several leading eigenvectors the projection onto
    all.
    """
    values, Q = eigh(M, "the rearranged block")
    tie = values >= values[..., -1:] * (1 - 10 * M.shape[-1] * torch.finfo(M.dtype).eps)
    start = torch.eye(n, dtype=M.dtype, device=M.device).flatten()
    return (Q @ (tie * (start @ Q))[..., None])[..., 0].unflatten(-1, (n, n))


def _absolute(M: Tensor) -> Tensor:  # [*b, n, n] -> [*b, n, n]
    """`√(M²)` of symmetric matrices."""
    values, Q = eigh((M + M.mT) / 2)
    result = (Q * values.abs()[..., None, :]) @ Q.mT
    return (result + result.mT) / 2


def _square_norm(M: Tensor) -> Tensor:  # [*b, n, n] -> [*b, 1, 1]
    square = M.square().sum((-2, -1), keepdim=True)
    return torch.where(square > 0, square, torch.ones_like(square))
