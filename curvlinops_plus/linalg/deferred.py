"""A proxy for an operator that may not be computed yet."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.damping import Damping, Scalar
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.products import derived, outside_autocast
from curvlinops_plus.linalg.remembered import remember
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure


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

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> LinearOperator:
        return self.operator.inverse(damping, retry_double_precision=retry_double_precision)

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        return self.operator.power(p, damping, exact=exact)

    def shift(self, delta: Damping) -> LinearOperator:
        return self.operator.shift(delta)

    # Attributes and methods of the operator.
    trace = derived("operator.trace")
    frobenius_norm = derived("operator.frobenius_norm")
    eigenvalues = derived("operator.eigenvalues")
    diagonal = derived("operator.diagonal")
    _matmat = derived("operator._matmat")
    _rmatmat = derived("operator._rmatmat")
    _to_dense = derived("operator.to_dense")
    _scale = derived("operator._scale")
    _slogdet = derived("operator._slogdet")
    _inverse = derived("operator._inverse")
    _power = derived("operator._power")
    _power_by_factors = derived("operator._power_by_factors")
    _root_matmat = derived("operator._root_matmat")
    _entrywise_square = derived("operator._entrywise_square")


class DeferredResult(Deferred):
    """What a function makes of operators that may not be computed yet, such as their sum, or a part of one.

    It is made at first use, and again when one of them has been computed anew. If it is block-diagonal, it has the
    members of a `BlockDiagonal`.

    Args:
        function: Called with the operators that the parts stand for; linear in all of them together.
        parts: Each a `Deferred`, or an operator that stands for itself.
        in_space: The space of the vectors that the result multiplies.
        out_space: That of the products.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> A = Diagonal(torch.ones(2))
        >>> DeferredResult(lambda A: 2 * A, [A], A.in_space, A.out_space).trace
        tensor(4.)
    """

    def __init__(
        self, function: Callable[..., LinearOperator], parts: list[LinearOperator], in_space: Space, out_space: Space
    ) -> None:
        self.function, self.parts = function, parts
        super().__init__(in_space, parts[0].dtype, parts[0].device, out_space=out_space)
        self._known: tuple[list[LinearOperator], LinearOperator] | None = None

    @property
    def structure(self) -> Structure:
        return min(part.structure for part in self.parts)

    @property
    def operator(self) -> LinearOperator:
        parts = [part.operator if isinstance(part, Deferred) else part for part in self.parts]
        if self._known is None or any(a is not b for a, b in zip(self._known[0], parts, strict=True)):
            self._known = parts, self.function(*parts)
        return self._known[1]

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return DeferredResult(self.function, [p.to(device, dtype) for p in self.parts], self.in_space, self.out_space)

    def _scale(self, c: Scalar) -> LinearOperator:
        return DeferredResult(self.function, [p._scale(c) for p in self.parts], self.in_space, self.out_space)

    # Of a block-diagonal one -----------------------------------------------------------------------------------------

    @property
    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator."""
        return dict(self._block_diagonal("blocks").blocks)

    def split(self, v: Any) -> dict[str, Tensor]:
        """A vector's parts, block by block; see `BlockDiagonal.split`."""
        return self._block_diagonal("split").split(v)

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector that `parts` are the blocks' parts of: undoes `split`."""
        return self._block_diagonal("merge").merge(parts)

    def nearest_kronecker(self) -> LinearOperator:
        """See `BlockDiagonal.nearest_kronecker`."""
        return self._block_diagonal("nearest_kronecker").nearest_kronecker()

    def state_dict(self) -> dict[str, Any]:
        """See `BlockDiagonal.state_dict`."""
        return self._block_diagonal("state_dict").state_dict()

    def _block_diagonal(self, member: str) -> Any:
        operator: Any = self.operator
        if hasattr(operator, member):
            return operator
        raise TypeError(f"{operator.label} has no `{member}`: it is not block-diagonal, with blocks that are known.")


class Formed(Deferred):
    """Closed forms from an operator that is made of the present entries when one is asked for.

    It is remembered until they change. Subclasses write products without it; multiples and shifts keep a reference.
    """

    @abstractmethod
    def _form(self) -> LinearOperator:
        """The operator with the closed forms."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor] | None:
        """What it is made of; None if that is not known."""

    @property
    def operator(self) -> LinearOperator:
        with outside_autocast(self.device):
            return remember(self._memory, "operator", self.tensors, self._form)

    @cached_property
    def _memory(self) -> dict[str, tuple[Any, Any]]:
        return {}

    shift = LinearOperator.shift
    _scale = LinearOperator._scale
