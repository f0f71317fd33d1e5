"""A matrix that is known by its products: `LinearOperator`, and what `+ - * / @ .T` return.

To write one, subclass `LinearOperator`, hand `in_space`, `dtype` and `device` to its constructor (or set them on the
class) and write `_matmat`; declare a symmetric matrix by `structure`, or write `_rmatmat`. Products with every kind of
vector, arithmetic, export to SciPy and adjoints follow.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, SingularMatrixError
from curvlinops_plus.linalg.closed_forms import ClosedForms
from curvlinops_plus.linalg.damping import Damping, Scalar, applied, is_zero, scalar
from curvlinops_plus.linalg.numerics import add_to_diagonal, slogdet_of, wide
from curvlinops_plus.linalg.products import Products, derived
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure

if TYPE_CHECKING:
    from typing_extensions import Self


class LinearOperator(ClosedForms):
    """A matrix `[m, n]` that is multiplied with and need not be formed.

    `A @ X` takes a tensor or NumPy array `[n]` or `[n, K]`, a list or dictionary of tensors `[*shape]` or `[*shape,
    K]`, and returns the container type it was given; or another operator. `X @ A` takes the same with `K` first.

    Args:
        in_space: The space of the vectors that it multiplies. This and what follows is by default what the class says.
        dtype: What it computes in.
        device: Where it computes.
        structure: What is known about the matrix; `Structure.GENERAL` if the class says nothing.
        out_space: The space of the results; `in_space` if the class says nothing.

    Example:
        >>> class Twice(LinearOperator):
        ...     in_space, dtype, device = Space.from_shapes([(3,)]), torch.float32, torch.device("cpu")
        ...     structure = Structure.PSD
        ...     def _matmat(self, X):
        ...         return 2 * X
        >>> A = Twice()
        >>> A @ torch.ones(3), (A - A / 2) @ [torch.ones(3)]
        (tensor([2., 2., 2.]), [tensor([1., 1., 1.])])
    """

    def _compose(self, other: Products) -> LinearOperator:
        assert isinstance(other, LinearOperator)
        return Product(self, other)

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same matrix on another device or in another dtype (a copy where something changes).

        Args:
            device: Where it shall be, or a dtype alone, as in `tensor.to(torch.float64)`.
            dtype: What it shall compute in.

        Raises:
            NotImplementedError: If something changes, and the matrix is not made of tensors of its own.

        Example:
            >>> from curvlinops_plus.linalg import Diagonal
            >>> Diagonal(torch.ones(2)).to(torch.float64)
            Diagonal(2 x 2, PSD, torch.float64, cpu)
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        where = None if device is None else torch.device(device)
        stays = where is None or where == self.device or (where.type == self.device.type and where.index is None)
        return self if stays and dtype in (None, self.dtype) else self._to(where, dtype)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Any:
        where = " and ".join(str(part) for part in (device, dtype) if part is not None)
        raise NotImplementedError(
            f"{type(self).__name__} owns no tensors that could be moved to {where}: what it is computed from has to be "
            "there. If that is a model and data, convert these, model.to(...) and X.to(...), and make it again."
        )

    def adjoint(self) -> LinearOperator:
        """The transposed matrix; a symmetric one is its own."""
        return self if self.structure >= Structure.SYMMETRIC else Adjoint(self)

    if TYPE_CHECKING:  # set where the classes they return are defined, which builds on this one

        def __getitem__(self, key: tuple[Any, Any]) -> LinearOperator: ...

        def materialize(self) -> LinearOperator: ...

        def _structured_sum(self, other: LinearOperator) -> LinearOperator | None: ...

    @property
    def T(self) -> LinearOperator:
        """The transposed matrix."""
        return self.adjoint()

    #: The same, under SciPy's name: all matrices here are real.
    H = T

    def __add__(self, other: Any) -> LinearOperator:
        """The sum, which holds both operators and keeps the structure that they share; see `structured_sum`.

        Operators of other libraries, with `shape` and `@`, are multiplied with as they are.
        """
        if (other := self._addend(other, "+")) is NotImplemented:
            return NotImplemented
        total = Sum(self, other)  # also checks that they can be added
        if (c := other._identity_factor()) is not None:
            return self.shift(c)
        if (c := self._identity_factor()) is not None:
            return other.shift(c)
        known = self._structured_sum(other)
        return total if known is None else known

    def __radd__(self, other: Any) -> LinearOperator:
        # `sum([A, B])` begins with 0
        return self if isinstance(other, int) and other == 0 else self + other

    def __sub__(self, other: Any) -> LinearOperator:
        other = self._addend(other, "-")
        return NotImplemented if other is NotImplemented else self + (-other)

    def __rsub__(self, other: Any) -> LinearOperator:
        other = self._addend(other, "-")
        return NotImplemented if other is NotImplemented else other + (-self)

    def _addend(self, other: Any, sign: str) -> Any:
        """What can be added to this operator; `NotImplemented` of types that may know how to do it themselves."""
        if isinstance(other, LinearOperator):
            return other
        if isinstance(other, (int, float, complex, np.generic, np.ndarray, Tensor)):
            raise TypeError(
                f"unsupported operand for {sign}: {type(other).__name__} with {self.label}. Add c times the identity "
                "by A.shift(c), a matrix M of entries by A + Dense(M)."
            )
        return Foreign(other, self) if hasattr(other, "shape") and hasattr(other, "__matmul__") else NotImplemented

    def __neg__(self) -> LinearOperator:
        return self._scale(-1.0)

    def __mul__(self, c: Any) -> LinearOperator:
        return self._scale(scalar(c, self, "the factor"))

    __rmul__ = __mul__

    def __truediv__(self, c: Any) -> LinearOperator:
        divisor = scalar(c, self, "the divisor")
        if divisor == 0:
            raise ZeroDivisionError(f"{self.label} can't be divided by 0.")
        return self._scale(1 / divisor)

    def shift(self, delta: Damping) -> LinearOperator:
        """`A + delta I`, which keeps the closed forms of `A`.

        Its `trace`, `logdet`, `inverse` and so on are differentiable in a tensor `delta`.

        Args:
            delta: A number, 0-d tensor or rule; a block-diagonal matrix also takes one per block.
        """
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"Only a square matrix can be shifted by a multiple of the identity, got {self.label}.")
        return self._shift(scalar(applied(delta, self), self, "the shift"))

    def _shift(self, delta: Scalar) -> LinearOperator:
        return Shifted(self, delta)

    def _scale(self, c: Scalar) -> LinearOperator:
        return Scaled(self, c)

    def _identity_factor(self) -> Scalar | None:
        """`c` if the matrix is `c` times the identity."""
        return None


class Wrapper(LinearOperator):
    """An operator made from another one, `A`, whose attributes it has unless it sets its own.

    They are read from `A` when they are asked for: entries of a matrix may change, and its structure with them.
    """

    A: LinearOperator

    in_space = derived("A.in_space")
    out_space = derived("A.out_space")
    dtype = derived("A.dtype")
    device = derived("A.device")
    structure = derived("A.structure")

    def __init__(self, A: LinearOperator) -> None:
        self.A = A


class Foreign(LinearOperator):
    """An operator of another library: curvlinops', SciPy's, or any object with `shape` and `@`.

    Args:
        op: The operator. Of SciPy it gets arrays, of others tensors in its dtype on its device, if it has these.
        like: An operator of the same shape, whose spaces, dtype and device this one has.
    """

    def __init__(self, op: Any, like: LinearOperator) -> None:
        if tuple(op.shape) != like.shape:
            raise ValueError(f"Expected operators of equal shapes, got {list(op.shape)} and {like.label}.")
        super().__init__(like.in_space, like.dtype, like.device, Structure.GENERAL, like.out_space)
        self.op = op

    def _matmat(self, X: Tensor) -> Tensor:
        return self._product(self.op, X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._product(self.op.adjoint() if hasattr(self.op, "adjoint") else self.op.T, X)

    def _product(self, op: Any, X: Tensor) -> Tensor:
        dtype = getattr(self.op, "dtype", self.dtype)
        if isinstance(dtype, torch.dtype):
            found = op @ X.to(getattr(self.op, "device", X.device), dtype)
        else:  # NumPy's
            found = torch.as_tensor(op @ X.detach().cpu().numpy())
        return found.to(X)


class Sum(Wrapper):
    """`A + B`."""

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        if not (A.in_space.matches(B.in_space) and A.out_space.matches(B.out_space)):
            raise ValueError(f"Expected operators on equal spaces, got {_spaces(A)} and {_spaces(B)}.")
        _check_same_place(A, B)
        self.A, self.B = A, B
        self.in_space = _with_names(A.in_space, B.in_space)
        self.out_space = _with_names(A.out_space, B.out_space)

    @property
    def structure(self) -> Structure:
        return min(self.A.structure, self.B.structure)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(X) + self.B._matmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.A._rmatmat(X) + self.B._rmatmat(X)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Sum(self.A.to(device, dtype), self.B.to(device, dtype))

    def _to_dense(self) -> Tensor:
        return self.A.to_dense() + self.B.to_dense()

    @property
    def trace(self) -> Tensor:
        return self.A.trace + self.B.trace

    def diagonal(self) -> Tensor:
        return self.A.diagonal() + self.B.diagonal()


class Product(Wrapper):
    """`A B`."""

    in_space = derived("B.in_space")
    structure = Structure.GENERAL

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        if not A.in_space.matches(B.out_space):
            raise ValueError(f"Expected the spaces inside a product to be equal, got {_spaces(A)} @ {_spaces(B)}.")
        _check_same_place(A, B)
        self.A, self.B = A, B

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(self.B._matmat(X))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.B._rmatmat(self.A._rmatmat(X))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Product(self.A.to(device, dtype), self.B.to(device, dtype))

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        if self.A.shape[0] != self.A.shape[1] or self.B.shape[0] != self.B.shape[1]:
            raise self._no_closed_form("logdet")
        (sign_A, log_A), (sign_B, log_B) = self.A._slogdet(), self.B._slogdet()
        return sign_A * sign_B, log_A + log_B

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if not is_zero(damping):
            raise self._no_closed_form("inverse")
        A, B = (part.inverse(retry_double_precision=retry) for part in (self.A, self.B))
        return Product(B, A)


class Adjoint(Wrapper):
    """`Aᵀ`."""

    in_space = derived("A.out_space")
    out_space = derived("A.in_space")

    trace = derived("A.trace")
    frobenius_norm = derived("A.frobenius_norm")
    diagonal = derived("A.diagonal")
    _slogdet = derived("A._slogdet")
    _matmat = derived("A._rmatmat")
    _rmatmat = derived("A._matmat")

    def adjoint(self) -> LinearOperator:
        return self.A

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Adjoint(self.A.to(device, dtype))

    def _to_dense(self) -> Tensor:
        return self.A.to_dense().T

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        return self.A.inverse(damping, retry_double_precision=retry).adjoint()

    def _entrywise_square(self) -> LinearOperator:
        return Adjoint(self.A._entrywise_square())


class Scaled(Wrapper):
    """`c A` for a number or 0-d tensor `c`."""

    def __init__(self, A: LinearOperator, c: Scalar) -> None:
        self.A, self.c = A, c

    @property
    def structure(self) -> Structure:
        return self.A.structure if self.c >= 0 else min(self.A.structure, Structure.SYMMETRIC)

    def _scale(self, c: Scalar) -> LinearOperator:
        return Scaled(self.A, self.c * c)

    def _identity_factor(self) -> Scalar | None:
        inner = self.A._identity_factor()
        return None if inner is None else self.c * inner

    def _matmat(self, X: Tensor) -> Tensor:
        return self.c * self.A._matmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.c * self.A._rmatmat(X)

    def adjoint(self) -> LinearOperator:
        return self if self.structure >= Structure.SYMMETRIC else Scaled(self.A.adjoint(), self.c)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        A = self.A.to(device, dtype)
        return Scaled(A, scalar(self.c, A, "the factor"))

    def _to_dense(self) -> Tensor:
        return self.c * self.A.to_dense()

    @property
    def trace(self) -> Tensor:
        return self.c * self.A.trace

    @property
    def frobenius_norm(self) -> Tensor:
        return abs(self.c) * self.A.frobenius_norm

    def eigenvalues(self) -> Tensor:
        return self.c * self.A.eigenvalues()

    def diagonal(self) -> Tensor:
        return self.c * self.A.diagonal()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = self.A._slogdet()
        c, n = torch.as_tensor(self.c, dtype=logarithm.dtype, device=logarithm.device), self.shape[0]
        if n == 0 or not bool(torch.isfinite(logarithm)):  # no entries, or 0 whatever the factor is: never 0 * inf
            return sign, logarithm
        return sign * c.sign() ** n, logarithm + n * c.abs().log()

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        if self.c == 0:
            return self._power(-1.0, damping)
        _require_semidefinite(self, self.A, damping / self.c, damping)
        return Scaled(self.A.inverse(damping / self.c, retry_double_precision=retry), 1 / self.c)

    def _inverse_by_factors(self, damping: tuple[Any, Any], retry: bool) -> LinearOperator:
        # The factors of `c G ⊗ A` are taken to be `c G` and `A`.
        self._require_positive_factor()
        return Scaled(self.A._inverse_by_factors((damping[0], damping[1] / self.c), retry), 1 / self.c)

    def _split_damping(self, damping: Scalar, smallest: float) -> Scalar | tuple[Any, Any]:
        self._require_positive_factor()
        split = self.A._split_damping(damping / self.c, smallest)
        return (split[0], split[1] * self.c) if isinstance(split, tuple) else damping

    def _require_positive_factor(self) -> None:
        if not self.c > 0:
            raise ValueError(
                f"Dampings of factors need a positive multiple of a Kronecker product; this one is multiplied by "
                f"{float(self.c):g}. Damp the whole matrix, with a number."
            )

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        if self.c == 0:  # what is left is the damping
            if p < 0 and is_zero(damping):
                raise SingularMatrixError(f"{self.label} is zero; add a damping.")
            return Shifted(self, damping**p)
        return Scaled(self.A.power(p, damping / self.c), self.c**p)

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.c**0.5 * self.A._root_matmat(X)

    def _entrywise_square(self) -> LinearOperator:
        return Scaled(self.A._entrywise_square(), self.c**2)


class Shifted(Wrapper):
    """`A + delta I` for a square `A` and a number or 0-d tensor `delta`."""

    def __init__(self, A: LinearOperator, delta: Scalar) -> None:
        self.A, self.delta = A, delta

    @property
    def structure(self) -> Structure:
        return self.A.structure if self.delta >= 0 else min(self.A.structure, Structure.SYMMETRIC)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(X) + self.delta * X

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.A._rmatmat(X) + self.delta * X

    def adjoint(self) -> LinearOperator:
        return self if self.structure >= Structure.SYMMETRIC else Shifted(self.A.adjoint(), self.delta)

    def _shift(self, delta: Scalar) -> LinearOperator:
        return self.A._shift(self.delta + delta)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        A = self.A.to(device, dtype)
        return Shifted(A, scalar(self.delta, A, "the shift"))

    def _to_dense(self) -> Tensor:
        return add_to_diagonal(self.A.to_dense(), self.delta)

    @property
    def trace(self) -> Tensor:
        return self.A.trace + self.shape[0] * self.delta

    @property
    def frobenius_norm(self) -> Tensor:
        size = self.A.frobenius_norm
        of = partial(torch.as_tensor, dtype=wide(size), device=size.device)
        parts = map(of, (size, self.A.trace, self.delta))
        norm, trace, delta = parts  # whose squares may be infinite in single precision
        square = norm.square() + 2 * delta * trace + self.shape[0] * delta.square()
        return square.clamp(min=0).sqrt().to(size.dtype)

    def eigenvalues(self) -> Tensor:
        return self.A.eigenvalues() + self.delta

    def diagonal(self) -> Tensor:
        return self.A.diagonal() + self.delta

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        try:
            return slogdet_of(self.eigenvalues())
        except NoClosedForm:
            raise self._no_closed_form("logdet") from None

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        _require_semidefinite(self, self.A, self.delta + damping, damping)
        return self.A.inverse(self.delta + damping, retry_double_precision=retry)

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        return self.A.power(p, self.delta + damping)

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.power(0.5)._matmat(X)


def _with_names(a: Space, b: Space) -> Space:
    """Of two spaces that match, the one with names and shapes."""
    return b if a.is_flat and not b.is_flat else a


def _spaces(A: LinearOperator) -> str:
    return f"{type(A).__name__}({[list(s) for s in A.out_shapes]} x {[list(s) for s in A.in_shapes]})"


def _check_same_place(A: LinearOperator, B: LinearOperator) -> None:
    if A.dtype != B.dtype or A.device != B.device:
        raise TypeError(
            f"Expected both operators in one dtype and on one device, got {A.dtype} on {A.device} and {B.dtype} "
            f"on {B.device}; convert one of them with .to(device=..., dtype=...)."
        )


def _require_semidefinite(operator: LinearOperator, A: LinearOperator, shift: Scalar, damping: Scalar) -> None:
    """Refuse to invert what is `A` plus `shift` times the identity, up to a factor, with a negative shift.

    Raises:
        ValueError: In the words of the operator that `A` is in.
    """
    if A.structure == Structure.PSD and shift < 0:
        raise ValueError(
            f"{operator.label} plus {float(damping):g} times the identity may be indefinite, and only matrices that "
            "are known to be semi-definite have inverses in closed form. If it is small, use "
            "A.materialize().inverse(damping)."
        )
