"""The interface of the factors of a Kronecker product: one matrix, or a batch of matrices of one size."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from curvlinops_plus.linalg.damping import Damping, Scalar, resolve
from curvlinops_plus.linalg.numerics import frobenius
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.products import derived


class Factor(LinearOperator):
    """A matrix `[m, n]`, or `b` of them seen as one block-diagonal matrix; may be a factor of a `Kronecker` product.

    Subclasses give the numbers of each matrix of the batch (`[*b]` stands for no axis or one of size `b`); the numbers
    of the whole follow here.
    """

    batch: tuple[int, ...]  # () or (b,)
    size: int  # columns of one matrix
    rows: int = derived("size")  # rows of one matrix

    @property
    def largest(self) -> int:
        """Size of the largest matrix that an eigendecomposition has to do with."""
        return self.size

    def matrices(self) -> Tensor:
        """All entries, `[*b, m, n]`, zeros too."""
        return torch.diag_embed(self.diagonals())

    @abstractmethod
    def left(self, M: Tensor) -> Tensor:  # [..., n, k] -> [..., m, k]
        """`F M` for matrices `M`, whose leading axes end with the batch."""

    @abstractmethod
    def right(self, M: Tensor) -> Tensor:  # [..., k, n] -> [..., k, m]
        """`M Fᵀ` for matrices `M`, whose leading axes end with the batch."""

    @abstractmethod
    def traces(self) -> Tensor:  # [*b]
        """Trace of each matrix."""

    @abstractmethod
    def norms(self) -> Tensor:  # [*b]
        """Frobenius norm of each matrix."""

    @abstractmethod
    def diagonals(self) -> Tensor:  # [*b, n]
        """Diagonal of each matrix."""

    @abstractmethod
    def slogdets(self) -> tuple[Tensor, Tensor]:  # [*b], [*b]
        """Sign and log |det| of each matrix."""

    @abstractmethod
    def eigh(self) -> tuple[Tensor, Factor]:  # [*b, n] and a factor Q
        """Eigenvalues, with zeros by the rule of `psd_clip`, and the orthogonal matrix of eigenvectors (columns)."""

    @abstractmethod
    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Factor: ...

    @abstractmethod
    def adjoint(self) -> Factor: ...

    @abstractmethod
    def _inverse(self, damping: Scalar, retry: bool) -> Factor:
        """The inverse with a damping that is one number, or a tensor `[*b]` of one per matrix."""

    @abstractmethod
    def _power(self, p: float, damping: Scalar) -> Factor: ...

    @abstractmethod
    def _entrywise_square(self) -> Factor: ...

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> LinearOperator:
        """See `LinearOperator.inverse`; of a batch the damping may also be a tensor `[b]`, one for each matrix."""
        if self.batch and isinstance(damping, Tensor) and damping.shape == self.batch:
            _ = resolve(damping.detach().min(), self)  # refuses what is negative or no number
            return self._inverse(damping.to(self.device, self.dtype), retry_double_precision)
        return super().inverse(damping, retry_double_precision=retry_double_precision)

    @property
    def trace(self) -> Tensor:
        return self.traces().sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(self.norms())

    def eigenvalues(self) -> Tensor:
        return self.eigh()[0].flatten().clone()  # what is remembered must not be changed by the caller

    def diagonal(self) -> Tensor:
        return self.diagonals().flatten().clone()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = self.slogdets()
        return sign.prod(), logarithm.sum()

    def _root_matmat(self, X: Tensor) -> Tensor:
        values, Q = self.eigh()
        return Q._matmat(values.sqrt().reshape(-1, 1) * Q._rmatmat(X))
