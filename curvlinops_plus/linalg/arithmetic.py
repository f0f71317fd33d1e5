"""Results of `+ - * / @ .T`: sums, products, adjoints and multiples of operators; operators of
other libraries, and one that is computed later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg.damping import Damping, Scalar, is_zero
from curvlinops_plus.linalg.numerics import add_to_diagonal, slogdet_of, wide
from curvlinops_plus.linalg.operator import LinearOperator, linear_in
from curvlinops_plus.linalg.space import Space, Structure, to_numpy


class Sum(LinearOperator):
    """The sum `A + B`."""

    # The trace and the diagonal are linear; eigenvalues, determinant and inverse are not.

    _made_of = ("A", "B")

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        _check_fit(A, B, A.in_space.matches(B.in_space) and A.out_space.matches(B.out_space), "+")
        # Of two spaces that match, the one with names and shapes.
        in_space = B.in_space if A.in_space.is_flat else A.in_space
        out_space = B.out_space if A.out_space.is_flat else A.out_space
        super().__init__(in_space, A.dtype, A.device, min(A.structure, B.structure), out_space)
        self.A = A
        self.B = B

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(X) + self.B._matmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.A._rmatmat(X) + self.B._rmatmat(X)

    def _to_dense(self) -> Tensor:
        return self.A.to_dense() + self.B.to_dense()

    def _scale(self, c: Scalar) -> LinearOperator:
        return self.A._scale(c) + self.B._scale(c)

    @property
    def trace(self) -> Tensor:
        return self.A.trace + self.B.trace

    def diagonal(self) -> Tensor:
        return self.A.diagonal() + self.B.diagonal()


class Product(LinearOperator):
    """The product `A B`."""

    _made_of = ("A", "B")

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        _check_fit(A, B, A.in_space.matches(B.out_space), "@")
        super().__init__(B.in_space, A.dtype, A.device, out_space=A.out_space)
        self.A = A
        self.B = B

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(self.B._matmat(X))

    def _rmatmat(self, X: Tensor) -> Tensor:
        # (A B)ᵀ = Bᵀ Aᵀ
        return self.B._rmatmat(self.A._rmatmat(X))


class Adjoint(LinearOperator):
    """`Aᵀ`."""

    _made_of = ("A",)

    def __init__(self, A: LinearOperator) -> None:
        super().__init__(A.out_space, A.dtype, A.device, A.structure, A.in_space)
        self.A = A

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._rmatmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(X)

    def adjoint(self) -> LinearOperator:
        return self.A

    def _to_dense(self) -> Tensor:
        return self.A.to_dense().T


class Scaled(LinearOperator):
    """The matrix `c A + delta I` for numbers or 0-d tensors `c` and `delta`; a negative one makes
    it indefinite.
    """

    _made_of = ("A", "c", "delta")

    def __init__(self, A: LinearOperator, c: Scalar = 1.0, delta: Scalar = 0.0) -> None:
        # With c, δ ≥ 0 no eigenvalue c λ + δ of a positive semi-definite A is negative.
        keeps_sign = c >= 0 and delta >= 0
        structure = A.structure if keeps_sign else min(A.structure, Structure.SYMMETRIC)
        super().__init__(A.in_space, A.dtype, A.device, structure, A.out_space)
        self.A = A
        self.c = c
        self.delta = delta

    def __repr__(self) -> str:
        c, delta = (float(torch.as_tensor(number).detach()) for number in (self.c, self.delta))
        return f"{super().__repr__()}\n  {c:.4g} A + {delta:.4g} I, A = {self.A!r}"

    def _matmat(self, X: Tensor) -> Tensor:
        return self._plus_shift(self.c * self.A._matmat(X), X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._plus_shift(self.c * self.A._rmatmat(X), X)

    def _plus_shift(self, Y: Tensor, X: Tensor) -> Tensor:
        return Y if is_zero(self.delta) else Y + self.delta * X

    def _adjoint(self) -> LinearOperator:
        return Scaled(self.A.adjoint(), self.c, self.delta)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        # (c A + δ I) + B = (c A + B) + δ I, where c A + B may have closed forms.
        if is_zero(self.delta):
            return None
        multiple = self.A if self._only_shifts else self.A._scale(self.c)
        return (multiple + other).shift(self.delta)

    def _shift(self, delta: Scalar) -> LinearOperator:
        return Scaled(self.A, self.c, self.delta + delta)

    def _scale(self, c: Scalar) -> LinearOperator:
        scaled = self.A._scale(c * self.c)
        return scaled if is_zero(self.delta) else scaled.shift(c * self.delta)

    def _to_dense(self) -> Tensor:
        dense = self.c * self.A.to_dense()
        return dense if is_zero(self.delta) else add_to_diagonal(dense, self.delta)

    @property
    def trace(self) -> Tensor:
        return self.c * self.A.trace + self.shape[0] * self.delta

    def diagonal(self) -> Tensor:
        return self.c * self.A.diagonal() + self.delta

    def eigenvalues(self) -> Tensor:
        # Those of A, multiplied and shifted; the eigenvectors are the same.
        return self.c * self.A.eigenvalues() + self.delta

    def _counted(self) -> Tensor:
        return self.c * self.A._counted() + self.delta

    @property
    def frobenius_norm(self) -> Tensor:
        # ‖c A + δ I‖² = ‖c A‖² + 2 δ tr(c A) + n δ², whose terms may be infinite in single
        # precision.
        norm_A = self.A.frobenius_norm
        precision = {"dtype": wide(norm_A), "device": norm_A.device}
        norm = torch.as_tensor(self.c * norm_A, **precision)
        trace = torch.as_tensor(self.c * self.A.trace, **precision)
        delta = torch.as_tensor(self.delta, **precision)
        square = norm.square() + 2 * delta * trace + self.shape[0] * delta.square()
        return square.clamp(min=0).sqrt().to(norm_A.dtype)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        try:
            return slogdet_of(self.eigenvalues())
        except NoClosedForm:
            raise self._no_closed_form("logdet") from None

    @property
    def _only_shifts(self) -> bool:
        return isinstance(self.c, float) and self.c == 1

    def _unscaled(self, member: str) -> LinearOperator:
        """`A` if `c` is one: multiples of what has inverses and powers are no `Scaled`."""
        if self._only_shifts:
            return self.A
        raise self._no_closed_form(member)

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        return self._unscaled("inverse").inverse(self.delta + damping, retry_double_precision=retry)

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        return self._unscaled("power").power(p, self.delta + damping)


class Foreign(LinearOperator):
    """An operator of another library: curvlinops', SciPy's, or any object with `shape`, `@` and a
    transpose.

    Args:
        op: The operator. If its dtype is PyTorch's, it gets tensors in that, on its device; else
            arrays.
        like: Has the dtype and device that this operator shall have; by default `op`.
        structure: What is known about the matrix.
    """

    def __init__(self, op: Any, like: Any = None, structure: Structure = Structure.GENERAL) -> None:
        m, n = map(int, op.shape)
        like = op if like is None else like
        device = torch.empty(0, device=like.device).device
        super().__init__(Space.flat(n), like.dtype, device, structure, Space.flat(m))
        self.op = op

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._adjoint_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._adjoint_product, self._product)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        like = torch.empty(0, dtype=dtype or self.dtype, device=device or self.device)
        return Foreign(self.op, like, self.structure)

    def _product(self, X: Tensor) -> Tensor:
        return self._multiply(self.op, X)

    def _adjoint_product(self, X: Tensor) -> Tensor:
        if self.structure >= Structure.SYMMETRIC:
            return self._product(X)
        try:
            adjoint = self.op.adjoint() if hasattr(self.op, "adjoint") else self.op.T
            return self._multiply(adjoint, X)
        except TypeError as error:  # SciPy's, which calls None
            raise NotImplementedError(
                f"{self.op!r} cannot multiply from the left; give it `rmatvec`."
            ) from error

    def _multiply(self, op: Any, X: Tensor) -> Tensor:
        dtype = getattr(self.op, "dtype", self.dtype)
        if isinstance(dtype, torch.dtype):
            Y = op @ X.detach().to(getattr(self.op, "device", X.device), dtype)
        else:
            Y = torch.as_tensor(op @ to_numpy(X))
        return Y.to(X, copy=True)  # it may be the argument


def operator_of(A: Any, square: bool = True) -> LinearOperator:
    """`A`; an operator of curvlinops or the like is wrapped."""
    if not isinstance(A, LinearOperator):
        if isinstance(A, Tensor) or not isinstance(getattr(A, "dtype", None), torch.dtype):
            raise TypeError(
                f"Expected a LinearOperator, got {type(A).__name__}; wrap it: "
                "curvlinops_plus.linalg.Dense(A) or curvlinops_plus.from_scipy(A)."
            )
        A = Foreign(A)
    if square and A.shape[0] != A.shape[1]:
        raise ValueError(
            f"Expected a square matrix, got {A.label}; use LSMR for a rectangular one."
        )
    return A


class Deferred(LinearOperator):
    """Stands for `self.operator`, which a subclass may compute at first use: its products and
    closed forms.

    Spaces, dtype, device and structure are known before; sums and multiples are made of what is
    computed.
    """

    operator: LinearOperator

    def _matmat(self, X: Tensor) -> Tensor:
        return self.operator._matmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.operator._rmatmat(X)

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self.operator._root_matmat(X)

    def _to_dense(self) -> Tensor:
        return self.operator._to_dense()

    def _plus(self, other: LinearOperator) -> LinearOperator:
        return self.operator + other

    def _scale(self, c: Scalar) -> LinearOperator:
        return self.operator._scale(c)

    def shift(self, delta: Damping) -> LinearOperator:
        return self.operator.shift(delta)

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

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self.operator._slogdet()

    def inverse(self, damping: Damping = 0.0, **options: Any) -> Any:
        return self.operator.inverse(damping, **options)

    def power(self, p: float, damping: Damping = 0.0, **options: Any) -> Any:
        return self.operator.power(p, damping, **options)


def _check_fit(A: LinearOperator, B: LinearOperator, spaces_fit: bool, operation: str) -> None:
    if not spaces_fit:
        raise ValueError(f"The spaces of {_spaces(A)} {operation} {_spaces(B)} don't fit.")
    if A.dtype != B.dtype or A.device != B.device:
        raise TypeError(
            f"Expected both operators in one dtype and on one device, got {A.dtype} on {A.device} "
            f"and {B.dtype} on {B.device}; convert one of them with .to(device=..., dtype=...)."
        )


def _spaces(A: LinearOperator) -> str:
    return f"{type(A).__name__}({[*map(list, A.out_shapes)]} x {[*map(list, A.in_shapes)]})"
