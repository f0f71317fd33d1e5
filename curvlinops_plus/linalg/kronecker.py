"""Kronecker products, and matrices given by their eigenvectors and eigenvalues.

The convention, stated here once: `G ⊗ A` acts on the row-major `vec(W)` of a matrix `W [o, i]` as `W ↦ G W Aᵀ`, that is
`G W A` for symmetric factors. With a batch axis the vector is that of `W [b, o, i]`, and each `b` has its own factors.

Every number is computed from the small factors, never from the big matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.damping import Scalar, heuristic_damping, is_zero, resolve
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.numerics import frobenius, powers, psd_clip, slogdet_of
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.products import error_context
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense


class Kronecker(LinearOperator):
    """`G ⊗ A` on the row-major `vec(W)` of `W [o, i]` (or `[b, o, i]`): `W ↦ G W Aᵀ`.

    Args:
        G: A tensor `[o, o]` (or `[b, o, o]`), or a `Dense`, `Diagonal` or identity operator.
        A: The same of size `i`. If only one of both has a batch, the other is shared by all its members.
        structure: What is known about factors given as tensors; operators know their own.

    Tensors are kept by reference (`K.G.matrix`): change a factor in place, and the operator has changed.
    A product with `[n, K]` costs `2 o i (o + i) K` operations, an eigendecomposition `O(o³ + i³)`.

    Raises:
        ValueError: If the batches, dtypes or devices of the factors differ.

    Example:
        >>> K = Kronecker(torch.diag(torch.tensor([1.0, 2.0])), torch.eye(3))
        >>> K @ torch.ones(6)
        tensor([1., 1., 1., 2., 2., 2.])
        >>> K.inverse(damping=1.0).trace
        tensor(2.5000)
    """

    def __init__(self, G: Tensor | Factor, A: Tensor | Factor, structure: Structure = Structure.PSD) -> None:
        self.G = Dense(G, structure) if isinstance(G, Tensor) else G
        self.A = Dense(A, structure) if isinstance(A, Tensor) else A
        for name, factor in (("G", self.G), ("A", self.A)):
            if not isinstance(factor, (Dense, Factor)):
                raise ValueError(
                    f"Factor {name}: expected a tensor, Dense, Diagonal or identity, got {type(factor).__name__}."
                )
        if self.G.batch and self.A.batch and self.G.batch != self.A.batch:
            raise ValueError(
                f"Expected factors with equal batches, got G with {self.G.batch[0]} and A with {self.A.batch[0]}."
            )
        if self.G.dtype != self.A.dtype or self.G.device != self.A.device:
            raise ValueError(
                f"Expected factors in one dtype and on one device, got G {self.G.dtype} on {self.G.device} "
                f"and A {self.A.dtype} on {self.A.device}."
            )
        self.batch = self.G.batch or self.A.batch
        super().__init__(dtype=self.G.dtype, device=self.G.device)

    # Spaces are made when asked for: most products of eigenvectors never are.
    @property
    def shape(self) -> tuple[int, int]:
        b = prod(self.batch)
        return b * self.G.rows * self.A.rows, b * self.G.size * self.A.size

    @cached_property
    def in_space(self) -> Space:
        return Space.flat(self.shape[1])

    @cached_property
    def out_space(self) -> Space:
        m, n = self.shape
        return self.in_space if m == n else Space.flat(m)

    @property
    def structure(self) -> Structure:
        return min(self.G.structure, self.A.structure)

    # Products --------------------------------------------------------------------------------------------------------

    def _matmat(self, X: Tensor) -> Tensor:  # [b o i, K] -> [b o' i', K]
        """Two matrix products, whatever the number of columns."""
        G, A, K = self.G, self.A, X.shape[1]
        if K == 1:
            return A.right(G.left(X.reshape(*self.batch, G.size, A.size))).reshape(-1, 1)
        # Columns first: then all of them are rows of one product with A. No copy if X was stored like that already.
        M = X.T.reshape(K, *self.batch, G.size, A.size)
        return G.left(A.right(M)).reshape(K, prod(self.batch) * G.rows * A.rows).T

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._transposed._matmat(X)

    @cached_property
    def _transposed(self) -> Kronecker:
        return Kronecker(self.G.adjoint(), self.A.adjoint())

    def adjoint(self) -> Kronecker:
        return self if self.structure >= Structure.SYMMETRIC else self._transposed

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Kronecker:
        return Kronecker(self.G.to(device, dtype), self.A.to(device, dtype))

    def _to_dense(self) -> Tensor:
        if not self.batch:
            return _kron(self.G.to_dense(), self.A.to_dense())
        pairs = zip(_matrices(self.G, self.batch[0]), _matrices(self.A, self.batch[0]), strict=True)
        return torch.block_diag(*(_kron(G, A) for G, A in pairs))

    # Closed forms ----------------------------------------------------------------------------------------------------

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
        (sign_G, log_G), (sign_A, log_A) = self._factors(lambda factor: factor.slogdets())
        o, i = self.G.size, self.A.size
        return (sign_G**i * sign_A**o).expand(self.batch).prod(), (i * log_G + o * log_A).expand(self.batch).sum()

    def _eigh(self) -> tuple[Tensor, Kronecker]:
        (values_G, Q_G), (values_A, Q_A) = self._factors(lambda factor: factor.eigh())
        return _outer(values_G, values_A, self.batch), Kronecker(Q_G, Q_A)

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if is_zero(damping):
            return Kronecker(*self._factors(lambda factor: factor._inverse(0.0, retry)))
        if self.structure < Structure.SYMMETRIC:
            raise self._no_closed_form("inverse")
        values, Q = self._eigh()
        return Eigendecomposed(Q, powers(values + damping, -1.0, self), self.structure, rtol=0.0)

    def _inverse_by_factors(self, damping: tuple[Any, Any], retry: bool) -> LinearOperator:
        damping_A, damping_G = damping
        return Kronecker(
            *self._factors(lambda factor, d: factor._inverse(_factor_damping(d, factor), retry), damping_G, damping_A)
        )

    def _split_damping(self, damping: Scalar, smallest: float) -> tuple[Tensor, Tensor]:
        return heuristic_damping(self.A, self.G, damping, smallest)

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        if is_zero(damping):
            return Kronecker(*self._factors(lambda factor: factor._power(p, 0.0)))
        values, Q = self._eigh()
        return Eigendecomposed(Q, powers(values + damping, p, self), rtol=0.0)

    def _power_by_factors(self, p: float, damping: Scalar) -> LinearOperator:
        usable = bool((self.G.traces() * self.A.traces() > 0).all())
        if is_zero(damping) or not usable or 1 in (self.G.size, self.A.size):
            return self._power(p, damping)
        damping_A, damping_G = heuristic_damping(self.A, self.G, damping, min_damping=0.0)
        return Kronecker(
            *self._factors(lambda factor, d: factor._power(p, _factor_damping(d, factor)), damping_G, damping_A)
        )

    def _root_matmat(self, X: Tensor) -> Tensor:
        values, Q = self._eigh()
        return Q._matmat(values.sqrt()[:, None] * Q._rmatmat(X))

    def _entrywise_square(self) -> Kronecker:
        return Kronecker(self.G._entrywise_square(), self.A._entrywise_square())

    def _factors(self, function: Callable[..., Any], *for_each: Any) -> tuple[Any, Any]:
        """`function` of both factors, and of what is `for_each` of them; its errors say which one they are about."""
        with error_context("factor G"):
            of_G = function(self.G, *for_each[:1])
        with error_context("factor A"):
            return of_G, function(self.A, *for_each[1:])


class Eigendecomposed(LinearOperator):
    """`Q diag(values) Qᵀ` for an orthogonal `Q`.

    Args:
        basis: `Q`, for example a `Kronecker` product of eigenvectors, or `Dense`.
        values: `[n]`, kept by reference.
        structure: PSD if no value is negative (the default), SYMMETRIC otherwise.
        rtol: Values of a positive semi-definite matrix below `rtol` times the largest count as zero in its determinant,
            inverse and powers; by default `d * eps` with `d` the size of the largest matrix in the basis. 0 for values
            that are exact.

    Raises:
        ValueError: If the number of values does not fit the basis.

    Example:
        >>> E = Eigendecomposed(Dense(torch.tensor([[0.6, -0.8], [0.8, 0.6]])), torch.tensor([1.0, 4.0]))
        >>> E.inverse().diagonal()
        tensor([0.5200, 0.7300])
    """

    def __init__(
        self, basis: LinearOperator, values: Tensor, structure: Structure = Structure.PSD, rtol: float | None = None
    ) -> None:
        if basis.shape[0] != basis.shape[1] or values.shape != (basis.shape[1],):
            raise ValueError(
                f"Expected a square basis [n, n] and values [n], got {list(basis.shape)} and {list(values.shape)}."
            )
        if values.dtype != basis.dtype or values.device != basis.device:
            raise ValueError(
                f"Expected basis and values in one dtype and on one device, got {basis.dtype} on {basis.device} "
                f"and {values.dtype} on {values.device}."
            )
        super().__init__(basis.out_space, values.dtype, values.device, structure)
        self.basis, self.values, self.rtol = basis, values, rtol

    def _matmat(self, X: Tensor) -> Tensor:
        return self.basis._matmat(self.values[:, None] * self.basis._rmatmat(X))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Eigendecomposed:
        values = self.values.to(device=device, dtype=dtype)
        return Eigendecomposed(self.basis.to(device, dtype), values, self.structure, self.rtol)

    @property
    def trace(self) -> Tensor:
        return self.values.sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(self.values)

    def eigenvalues(self) -> Tensor:
        return psd_clip(self.values, rtol=0.0) if self.structure == Structure.PSD else self.values.clone()

    def diagonal(self) -> Tensor:
        return self.basis._entrywise_square()._matmat(self.values[:, None])[:, 0]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return slogdet_of(self._counted())

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        return self._function(-1.0, damping)

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        return self._function(p, damping)

    def _function(self, p: float, damping: Scalar) -> Eigendecomposed:
        values = self._counted() if is_zero(damping) else self.eigenvalues()
        return Eigendecomposed(self.basis, powers(values + damping, p, self), self.structure, rtol=0.0)

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.basis._matmat(self.eigenvalues().sqrt()[:, None] * self.basis._rmatmat(X))

    def _counted(self) -> Tensor:
        """The values, with 0 where they count as zero."""
        if self.structure < Structure.PSD:
            return self.values
        if self.rtol is not None:
            return psd_clip(self.values, self.rtol)
        return psd_clip(self.values, _decomposed_size(self.basis) * torch.finfo(self.dtype).eps)


def _kron(G: Tensor, A: Tensor) -> Tensor:  # [o, o'], [i, i'] -> [o i, o' i']
    """`torch.kron` cannot read matrices that are stored column by column, as inverses are."""
    product = G[:, None, :, None] * A[None, :, None, :]
    return product.reshape(G.shape[0] * A.shape[0], G.shape[1] * A.shape[1])


def _outer(of_G: Tensor, of_A: Tensor, batch: tuple[int, ...]) -> Tensor:  # [*b, o], [*b, i] -> [b o i]
    product = of_G[..., :, None] * of_A[..., None, :]
    return product.expand(*batch, *product.shape[-2:]).flatten()


def _matrices(factor: Factor, b: int) -> list[Tensor]:
    """Each matrix of a batch, formed; one that is shared by the batch is repeated."""
    n = factor.size
    if not factor.batch:
        return [factor.to_dense()] * b
    whole = factor.to_dense()
    return [whole[k * n : (k + 1) * n, k * n : (k + 1) * n] for k in range(b)]


def _decomposed_size(basis: LinearOperator) -> int:
    """Size of the largest matrix that was decomposed to find a basis; the identity was not."""
    factors = (basis.G, basis.A) if isinstance(basis, Kronecker) else (basis,)
    return max(factor.largest if isinstance(factor, Factor) else factor.shape[0] for factor in factors)


def _factor_damping(damping: Any, factor: Factor) -> Scalar:
    """A number or rule for one factor; heuristic damping also comes as one number per matrix of a batch."""
    if isinstance(damping, Tensor) and damping.ndim == 1:
        return damping.to(factor.device, factor.dtype)
    return resolve(damping, factor)
