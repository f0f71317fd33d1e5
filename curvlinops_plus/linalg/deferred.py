"""A proxy for an operator that may not be computed yet."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from curvlinops_plus.linalg.damping import Damping, Scalar
from curvlinops_plus.linalg.operator import LinearOperator

__all__ = ["Deferred"]


class Deferred(LinearOperator):
    """Forwards products and closed forms to `self.operator`; spaces, dtype, device and structure are known without it.

    Subclasses write `operator`, and set those attributes by the constructor of `LinearOperator` or on the class.

    Example:
        >>> import torch
        >>> from curvlinops_plus.linalg import Diagonal, Space, Structure
        >>> class Later(Deferred):
        ...     in_space = Space.from_shapes([(2,)])
        ...     dtype, device, structure = torch.float32, torch.device("cpu"), Structure.PSD
        ...     @property
        ...     def operator(self):
        ...         return Diagonal(torch.tensor([1.0, 2.0]))
        >>> (3 * Later()).trace
        tensor(9.)
    """

    @property
    @abstractmethod
    def operator(self) -> LinearOperator:
        """The operator that this one stands for."""

    def _matmat(self, X: Tensor) -> Tensor:
        return self.operator._matmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.operator._rmatmat(X)

    def _to_dense(self) -> Tensor:
        return self.operator.to_dense()

    @property
    def trace(self) -> Tensor:
        return self.operator.trace

    @property
    def frobenius_norm(self) -> Tensor:
        return self.operator.frobenius_norm

    def eigenvalues(self) -> Tensor:
        return self.operator.eigenvalues()

    def diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> LinearOperator:
        return self.operator.inverse(damping, retry_double_precision=retry_double_precision)

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        return self.operator.power(p, damping, exact=exact)

    def shift(self, delta: Damping) -> LinearOperator:
        return self.operator.shift(delta)

    def _scale(self, c: Scalar) -> LinearOperator:
        return self.operator._scale(c)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self.operator._slogdet()

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        return self.operator._inverse(damping, retry)

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        return self.operator._power(p, damping)

    def _power_by_factors(self, p: float, damping: Scalar) -> LinearOperator:
        return self.operator._power_by_factors(p, damping)

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.operator._root_matmat(X)

    def _entrywise_square(self) -> LinearOperator:
        return self.operator._entrywise_square()
