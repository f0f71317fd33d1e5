"""What the factors of a Kronecker product share: one matrix, or a batch of matrices, asked matrix by matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.linalg.damping import Scalar
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.space import Space

__all__ = ["Factor", "OneTensor"]

T = TypeVar("T")


class Factor(LinearOperator):
    """A matrix `[m, n]`, or `b` of them seen as one block-diagonal matrix; may be a factor of a `Kronecker` product.

    Subclasses answer for each matrix of the batch (`[*b]` stands for no axis or one of size `b`); the numbers of the
    whole follow here.
    """

    batch: tuple[int, ...]  # () or (b,)

    @property
    @abstractmethod
    def size(self) -> int:
        """Columns of one matrix."""

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.size

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
        """Eigenvalues, with zeros by the rule of `numerics.py`, and the orthogonal matrix of eigenvectors (columns)."""

    @abstractmethod
    def root(self) -> Factor:
        """Some `L` with `L Lᵀ` the matrix."""

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Factor: ...

    @abstractmethod
    def adjoint(self) -> Factor: ...

    @abstractmethod
    def _inverse(self, damping: Scalar, retry: bool) -> Factor:
        """The inverse with a damping that is one number, or a tensor `[*b]` of one per matrix."""

    @abstractmethod
    def _power(self, p: float, damping: Scalar) -> Factor: ...

    @abstractmethod
    def _entrywise_square(self) -> Factor: ...

    @property
    def trace(self) -> Tensor:
        return self.traces().sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.norms())

    def eigenvalues(self) -> Tensor:
        return self.eigh()[0].flatten().clone()  # what is remembered stays ours

    def diagonal(self) -> Tensor:
        return self.diagonals().flatten().clone()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = self.slogdets()
        return sign.prod(), logarithm.sum()

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.root()._matmat(X)

    def _split_damping(self, damping: Scalar, min_damping: float) -> Scalar:
        return damping  # one factor takes it whole


class OneTensor(Factor):
    """What `Dense` and `Diagonal` share: one tensor, kept by reference, and results remembered until it changes."""

    def __init__(self, tensor: Tensor, axes: int) -> None:
        if not isinstance(tensor, Tensor) or tensor.ndim not in (axes, axes + 1) or not tensor.is_floating_point():
            given = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{type(self).__name__}: expected a real tensor with {axes} axes, or {axes + 1} for a batch; "
                f"got {given}."
            )
        self._tensor = tensor
        self.batch = tuple(tensor.shape[:-axes])
        self._memory: dict[str, tuple[Any, Any]] = {}
        self._in_space = Space.from_shapes([(tensor.shape[:-axes].numel() * tensor.shape[-1],)])

    @property
    def size(self) -> int:
        return self._tensor.shape[-1]

    @property
    def in_space(self) -> Space:
        return self._in_space

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def _state(self) -> Any:
        """Changes whenever the tensor does; None if nothing may be remembered."""
        if self._tensor.is_inference() or (torch.is_grad_enabled() and self._tensor.requires_grad):
            return None  # no version to look at; or a graph that can be used only once
        return self._tensor._version, self._tensor.data_ptr()

    def _remember(self, name: str, compute: Callable[[], T]) -> T:
        state = self._state()
        known = self._memory.get(name)
        if known is not None and state is not None and known[0] == state:
            return known[1]
        value = compute()
        if state is not None:
            self._memory[name] = state, value
        return value
