"""A matrix that is known by its products: `LinearOperator`, and what `+ - * / @ .T` return.

To write one, subclass `LinearOperator`, hand `in_space`, `dtype` and `device` to its constructor
(or set them on the class) and write `_matmat`; declare a symmetric matrix by `structure`, or write
`_rmatmat`. Products with every kind of vector, arithmetic, export to SciPy and adjoints follow.

Closed forms (trace, determinant, eigenvalues, inverse, square root) are there for all: structured
matrices implement them, the others raise `NoClosedForm`, which says what to use instead. An
operator holds the numbers of when it was made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, NumericsError
from curvlinops_plus.linalg.damping import Damping, Scalar, is_zero, resolve, scalar
from curvlinops_plus.linalg.numerics import add_to_diagonal, slogdet_of, standard_normal, wide
from curvlinops_plus.linalg.space import Space, Structure, to_numpy

if TYPE_CHECKING:
    from typing_extensions import Self

_ADVICE = {
    "trace": (
        "estimate it from products with random vectors: `xtrace(A, ...)` or `hutchinson_trace(A, "
        "...)`"
    ),
    "logdet": (
        "estimate it from products by stochastic Lanczos quadrature: "
        "`curvlinops_plus.estimate.logdet(A, ...)`"
    ),
    "frobenius_norm": "estimate its square from products with random vectors: `hutchinson_squared_fro(A, ...)`",
    "eigenvalues": (
        "compute the largest with `top_eigenpairs(A, k)` or scipy.sparse.linalg.eigsh(A.to_scipy())"
    ),
    "diagonal": (
        "estimate it from products with random vectors: `xdiag(A, ...)` or `hutchinson_diag(A, "
        "...)`"
    ),
    "inverse": "solve with `CGInverseLinearOperator(A)`, or MINRES if it is indefinite",
    "power": "approximate its eigenvectors with scipy.sparse.linalg.eigsh(A.to_scipy())",
    "sample": "approximate the matrix by a structured one, for example KFAC, and sample from that",
}


Product_ = Callable[[Tensor], Tensor]


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which matrix products keep their precision, whatever the caller's autocast
    says.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


#: What errors about a part of a matrix are of.
OF_PARTS = (NumericsError, NotImplementedError, TypeError, ValueError)


def about(part: str, error: Exception) -> Exception:
    """The error, beginning with the name of the part of the matrix that it is about."""
    return type(error)(f"{part}: {error}")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, product: Product_, adjoint: Product_) -> Tensor:
        ctx.product, ctx.adjoint = product, adjoint
        return product(X.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Linear.apply(grads[0], ctx.adjoint, ctx.product), None, None


def linear_in(X: Tensor, product: Product_, adjoint: Product_) -> Tensor:
    """`product(X)`, linear in `X [n, K]`, whose derivative in `X` is what `adjoint` multiplies
    with, to any order.

    For products that are computed without a graph, of their own operator or in other libraries.
    """
    return _Linear.apply(X, product, adjoint) if X.requires_grad else product(X)  # type: ignore[return-value]


class LinearOperator(ABC):
    """A matrix `[m, n]` that is multiplied with and need not be formed.

    `A @ X` takes a tensor or NumPy array `[n]` or `[n, K]`, a list or dictionary of tensors
    `[*shape]` or `[*shape, K]`, and returns the container type it was given; or another operator.
    `X @ A` is `(A.T @ X.T).T`: of tensors and arrays it takes `[m]` or `[K, m]`, of lists and
    dictionaries the same as `A.T @ X`.

    Args:
        in_space: The space of the vectors that it multiplies. This and what follows is by default
            what the class says.
        dtype: What it computes in.
        device: Where it computes.
        structure: What is known about the matrix; `Structure.GENERAL` if the class says nothing.
        out_space: The space of the results; `in_space` if the class says nothing.

    Example:
        >>> class Twice(LinearOperator):
        ...     in_space, dtype, device = Space.from_shapes([(3,)]), torch.float32, torch.device("cpu")
        ...     structure = Structure.PSD
        ...
        ...     def _matmat(self, X):
        ...         return 2 * X
        >>> A = Twice()
        >>> A @ torch.ones(3), (A - A / 2) @ [torch.ones(3)]
        (tensor([2., 2., 2.]), [tensor([1., 1., 1.])])
    """

    __array_ufunc__ = None  # NumPy hands `array @ A` and `number * A` over to us

    in_space: Space
    dtype: torch.dtype
    device: torch.device
    structure: Structure = Structure.GENERAL

    def __init__(
        self,
        in_space: Space | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        structure: Structure | None = None,
        out_space: Space | None = None,
    ) -> None:
        given = {
            "in_space": in_space,
            "dtype": dtype,
            "device": device,
            "structure": structure,
            "out_space": out_space,
        }
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)

    @cached_property
    def out_space(self) -> Space:
        """The space of the results."""
        return self.in_space

    @abstractmethod
    def _matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [m, K]
        """The product with a matrix of the right shape, dtype and device."""

    def _rmatmat(self, X: Tensor) -> Tensor:  # [m, K] -> [n, K]
        """The product of the transposed matrix."""
        if self.structure >= Structure.SYMMETRIC:
            return self._matmat(X)
        raise NotImplementedError(
            f"{type(self).__name__} has no adjoint: it is not declared symmetric and does not "
            "define `_rmatmat(self, X)`. Write that method, or a `structure` of "
            "Structure.SYMMETRIC if it is symmetric."
        )

    # Shapes
    # ----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """`(m, n)`: rows and columns."""
        return self.out_space.dim, self.in_space.dim

    @property
    def in_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the tensors that it multiplies."""
        return tuple(self.in_space.shapes.values())

    @property
    def out_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the tensors of a result."""
        return tuple(self.out_space.shapes.values())

    @property
    def label(self) -> str:
        """The operator in one line, for messages."""
        m, n = self.shape
        return (
            f"{type(self).__name__}({m} x {n}, {self.structure.name}, {self.dtype}, {self.device})"
        )

    def __repr__(self) -> str:
        return self.label

    # Products
    # ----------------------------------------------------------------------------------------------

    def __matmul__(self, X: Any) -> Any:
        """`A @ X`."""
        if isinstance(X, LinearOperator):
            return Product(self, X)
        try:
            x, container = self.in_space.read(X, self.dtype, self.device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.label} @ X: {error}") from error
        with outside_autocast(self.device):
            return self.out_space.write(
                self._matmat(x) if x.shape[1] else x.new_zeros(self.shape[0], 0), container
            )

    def __rmatmul__(self, X: Any) -> Any:
        """`X @ A`, with the `K` axis of tensors and arrays first."""
        if isinstance(X, (Tensor, np.ndarray)) and X.ndim == 2:
            return (self.adjoint() @ X.T).T
        return self.adjoint() @ X

    def rmatmat(self, X: Any) -> Any:
        """`Aᵀ @ X`, under SciPy's name."""
        return self.adjoint() @ X

    #: The same, under SciPy's other names.
    matmat = matvec = __matmul__
    rmatvec = rmatmat

    def adjoint(self) -> LinearOperator:
        """The transposed matrix; a symmetric one is its own."""
        return self if self.structure >= Structure.SYMMETRIC else Adjoint(self)

    @property
    def T(self) -> LinearOperator:
        """The transposed matrix."""
        return self.adjoint()

    #: The same, under SciPy's name: all matrices here are real.
    H = T

    def to_dense(self) -> Tensor:
        """The matrix `[m, n]`. Cost: one product with `n` columns, or less where a class knows a
        cheaper way.
        """
        with outside_autocast(self.device):
            return self._to_dense()

    def _to_dense(self) -> Tensor:
        m, n = self.shape
        eye = torch.eye(n, dtype=self.dtype, device=self.device)
        return self._matmat(eye) if n else eye.new_zeros(m, 0)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make an array whose only entry is the operator."""
        raise TypeError(
            f"{self.label} is not an array. For its entries write A.to_dense().cpu().numpy(), for "
            "SciPy A.to_scipy(); products with arrays are A @ x and x @ A."
        )

    if TYPE_CHECKING:  # set where the classes they return are defined, which build on this one

        def __getitem__(self, key: tuple[Any, Any]) -> LinearOperator: ...

        def materialize(self) -> LinearOperator: ...

        def to_scipy(self, dtype: Any = None) -> Any: ...

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The same matrix on another device or in another dtype (a copy where something changes).

        Args:
            device: Where it shall be, or a dtype alone, as in `tensor.to(torch.float64)`.
            dtype: What it shall compute in.

        Raises:
            NotImplementedError: If something changes, and the matrix is not made of tensors of its
                own.

        Example:
            >>> from curvlinops_plus.linalg import Diagonal
            >>> Diagonal(torch.ones(2)).to(torch.float64)
            Diagonal(2 x 2, PSD, torch.float64, cpu)
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        where = None if device is None else torch.device(device)
        if where is not None and where.type == self.device.type and where.index is None:
            where = self.device
        if where is not None:  # as its tensors say: "cuda" is "cuda:0", and "cpu:0" is "cpu"
            where = torch.empty(0, device=where).device
        return (
            self
            if where in (None, self.device) and dtype in (None, self.dtype)
            else self._to(where, dtype)
        )

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} owns no tensors that could be moved: what it is computed from "
            "has to be there. If that is a model and data, convert these, model.to(...) and "
            "X.to(...), and make it again."
        )

    # Arithmetic
    # ----------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> LinearOperator:
        """The sum, with closed forms where entries or blocks can be added; otherwise with products,
        trace and diagonal.

        Block-diagonal matrices of equal groups of parameters are added block by block, `Dense` and
        `Diagonal` ones by their entries, multiples of the identity are shifts. Sums of Kronecker
        products have inverses with damping, by conjugate gradients. Operators of other libraries,
        with `shape` and `@`, are multiplied with as they are.
        """
        if (other := self._addend(other)) is NotImplemented:
            return NotImplemented
        total = Sum(self, other)  # also checks that they can be added
        known = self._plus(other)
        known = other._plus(self) if known is None else known
        return total if known is None else known

    def __radd__(self, other: Any) -> LinearOperator:
        # `sum([A, B])` begins with 0
        return self if isinstance(other, int) and other == 0 else self + other

    def __sub__(self, other: Any) -> LinearOperator:
        other = self._addend(other)
        return NotImplemented if other is NotImplemented else self + (-other)

    def __rsub__(self, other: Any) -> LinearOperator:
        other = self._addend(other)
        return NotImplemented if other is NotImplemented else other + (-self)

    def _addend(self, other: Any) -> Any:
        """What can be added to this operator; `NotImplemented` of types that may know how to do it
        themselves.
        """
        if isinstance(other, LinearOperator):
            return other
        if isinstance(other, (int, float, complex, np.generic, np.ndarray, Tensor)):
            raise TypeError(
                f"{type(other).__name__} can't be added to {self.label}. Add c times the identity "
                "by A.shift(c), a matrix M of entries by A + Dense(M)."
            )
        return (
            Foreign(other, self)
            if hasattr(other, "shape") and hasattr(other, "__matmul__")
            else NotImplemented
        )

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        """The sum with closed forms; None where only products are known."""
        return None

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
            raise ValueError(
                "Only a square matrix can be shifted by a multiple of the identity, got "
                f"{self.label}."
            )
        return self._shift(scalar(delta(self) if callable(delta) else delta, self, "the shift"))

    def _shift(self, delta: Scalar) -> LinearOperator:
        return Scaled(self, 1.0, delta)

    def _scale(self, c: Scalar) -> LinearOperator:
        return Scaled(self, c)

    # Closed forms
    # ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Tensor:
        """Sum of the eigenvalues, a 0-d tensor."""
        raise self._no_closed_form("trace")

    @property
    def det(self) -> Tensor:
        """Product of the eigenvalues, a 0-d tensor; 0 if one counts as zero. Use `logdet` for large
        matrices.
        """
        sign, logarithm = self._slogdet()
        return sign * logarithm.exp()

    @property
    def logdet(self) -> Tensor:
        """Logarithm of the determinant, 0-d: -inf if the matrix is singular, NaN if the determinant
        is negative.

        `A.shift(delta).logdet` is differentiable in a tensor `delta`.
        """
        sign, logarithm = self._slogdet()
        return torch.where(sign < 0, torch.full_like(logarithm, torch.nan), logarithm)

    @property
    def frobenius_norm(self) -> Tensor:
        """Root of the sum of squared entries, a 0-d tensor."""
        raise self._no_closed_form("frobenius_norm")

    def eigenvalues(self) -> Tensor:
        """All eigenvalues of a symmetric matrix, `[n]`, in the order of its blocks (not sorted)."""
        raise self._no_closed_form("eigenvalues")

    def diagonal(self) -> Tensor:
        """The diagonal, `[n]`; `A.in_space.unflatten` makes a dictionary of it."""
        raise self._no_closed_form("diagonal")

    def inverse(
        self, damping: Damping = 0.0, *, retry_double_precision: bool = True
    ) -> LinearOperator:
        """The matrix `(A + damping I)⁻¹` as an operator that has its own `logdet`, `trace`,
        `sample`.

        Args:
            damping: A number, a 0-d tensor (results are differentiable in it), a rule such as
                `RelativeDamping` or `HeuristicDamping`; of a Kronecker product also a pair `(λ_A,
                λ_G)`, and of a block-diagonal matrix one per block: a tensor, or a mapping from
                block name to any of these.
            retry_double_precision: Repeat a Cholesky decomposition that failed in float32 in
                float64, with a warning.

        Raises:
            NoClosedForm: If the structure does not give an inverse.
            SingularMatrixError: If the matrix is singular and there is no damping.
            ValueError: If the damping is negative or of a kind that does not fit the matrix.
        """
        damping = resolve(damping, self, each=True, batch=getattr(self, "batch", ()))
        return self._inverse(damping, retry_double_precision)

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        """The matrix `(A + damping I)ᵖ` of a positive semi-definite `A`, for any real `p`.

        Args:
            damping: A number, a 0-d tensor or a rule; of a block-diagonal matrix also one per
                block.
            exact: False splits the damping between the factors of a Kronecker product
                (`heuristic_damping`), whose power is then a product of powers, as in kfac_jax:
                nothing is decomposed together, the matrix dominates the damped one. Where one
                factor is 1 x 1 or zero, the exact power costs nothing and is taken. Without effect
                on matrices that are no Kronecker product.

        Raises:
            NoClosedForm: If the structure does not give powers.
            SingularMatrixError: If `p < 0` and the matrix is singular and there is no damping.
            ValueError: If the matrix is not positive semi-definite, or the damping negative.
        """
        if self.structure < Structure.PSD:
            raise ValueError(
                f"Expected a positive semi-definite matrix, got {self.label}; only those have real "
                "powers."
            )
        return self._power(float(p), resolve(damping, self))

    def sample(self, generator: torch.Generator | None = None, num: int | None = None) -> Tensor:
        """Samples from N(0, A): one, `[n]`, or `num` of them, `[n, num]`; `A.in_space.unflatten`
        makes a dictionary.

        Args:
            generator: Where the random numbers come from, on the CPU or on the operator's device;
                the same generator gives the same draws on every device and in every dtype. By
                default PyTorch's global one.
            num: How many. More draws begin with the fewer ones.

        Raises:
            NoClosedForm: If the structure does not give a square root.
            TypeError: If `generator` is no `torch.Generator`.
            ValueError: If the matrix is not positive semi-definite.
        """
        if self.structure < Structure.PSD:
            raise ValueError(
                f"Expected a positive semi-definite matrix, got {self.label}; only those are "
                "covariances."
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"Expected a torch.Generator, got {type(generator).__name__} {generator!r}; for a "
                "seed write generator=torch.Generator().manual_seed(seed), for several draws "
                "num=..."
            )
        like = torch.empty((), dtype=self.dtype, device=self.device)
        draws = self._root_matmat(
            standard_normal(1 if num is None else num, self.shape[1], generator, like)
        )
        return draws[:, 0] if num is None else draws

    def quadratic_form(self, J: Any) -> Any:
        """`J A Jᵀ`: a number for one vector, `[..., m, m]` for the rows of Jacobians.

        It is differentiable in `J`, so that `A.quadratic_form({name: p - p0[name] for name, p in
        ...})` is a penalty. Costs one product with as many columns as `J` has rows; of a `GGN` a
        forward pass with tangents for each row.

        Args:
            J: A tensor or NumPy array `[n]` or `[..., m, n]`; or a list, tuple or dictionary of
                tensors `[*shape]` or `[..., m, *shape]`.

        Returns:
            A tensor, 0-d for one vector; for a NumPy array another array.

        Raises:
            TypeError: If `J` is none of these, or its dtype or device does not fit.
            ValueError: If the shapes do not fit, or the matrix is not square.

        Example:
            >>> from curvlinops_plus.linalg import Diagonal
            >>> A = Diagonal(torch.tensor([1.0, 2.0]))
            >>> A.quadratic_form(torch.ones(2)), A.quadratic_form(torch.eye(2))
            (tensor(3.), tensor([[1., 0.],
                    [0., 2.]]))
        """
        if self.shape[0] != self.shape[1]:
            raise ValueError(
                f"Only a square matrix has quadratic forms, got {self.label}; use A.T @ A or A @ "
                "A.T."
            )
        rows, kind = self.in_space.read_rows(J, self.dtype, self.device)
        with outside_autocast(self.device):
            form = self._quadratic_form(rows)
        return to_numpy(form) if kind == "numpy" else form

    # What a structure implements; arguments are checked, and dampings are numbers
    # -------------------------------------

    def _quadratic_form(self, rows: Tensor) -> Tensor:  # [n] -> [], [..., m, n] -> [..., m, m]
        products = (self @ rows.reshape(-1, self.shape[1]).T).T.reshape(rows.shape)
        return rows @ (products.mT if rows.ndim > 1 else products)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        """Sign of the determinant and logarithm of its absolute value."""
        raise self._no_closed_form("logdet")

    def _inverse(self, damping: Any, retry: bool) -> LinearOperator:
        """The inverse; of a Kronecker product also with a pair of dampings, of a batch with one for
        each, `[b]`.
        """
        raise self._no_closed_form("inverse")

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        raise self._no_closed_form("power")

    def _root_matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [n, K]
        """`L X` with `L Lᵀ = A`, the symmetric `L` where it is known: no rounding of `A` changes it
        much.
        """
        try:
            return self._power(0.5, 0.0)._matmat(X)
        except NoClosedForm:
            raise self._no_closed_form("sample") from None

    def _no_closed_form(self, member: str) -> NoClosedForm:
        formed = (
            f"A.materialize().{member}" if self.structure >= Structure.SYMMETRIC else "A.to_dense()"
        )
        advice = f"if the matrix is small, use {formed}; otherwise {_ADVICE[member]}"
        return NoClosedForm(f"{self.label} has no closed form of `{member}`: {advice}.")


class Flat(LinearOperator):
    """A matrix that knows its shape, whose spaces are made when asked for: by default one flat
    vector.
    """

    shape: tuple[int, int] = (0, 0)  # type: ignore[assignment] (an attribute here)

    @cached_property
    def in_space(self) -> Space:  # type: ignore[override]
        return Space.flat(self.shape[1])

    @cached_property
    def out_space(self) -> Space:
        m, n = self.shape
        return self.in_space if m == n else Space.flat(m)


class Foreign(LinearOperator):
    """An operator of another library: curvlinops', SciPy's, or any object with `shape`, `@` and a
    transpose.

    Args:
        op: The operator. If its dtype is PyTorch's, it gets tensors in that, on its device; else
            arrays.
        like: What has the dtype and device of this one; the operator itself, if nothing else is
            said.
        structure: What is known about the matrix.
    """

    def __init__(self, op: Any, like: Any = None, structure: Structure = Structure.GENERAL) -> None:
        m, n = map(int, op.shape)
        like = op if like is None else like
        super().__init__(
            Space.flat(n),
            like.dtype,
            torch.empty(0, device=like.device).device,
            structure,
            Space.flat(m),
        )
        self.op = op

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._adjoint_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._adjoint_product, self._product)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        like = torch.empty(0, dtype=dtype or self.dtype, device=device or self.device)
        return Foreign(self.op, like, self.structure)

    def _product(self, X: Tensor) -> Tensor:
        return self._of(self.op, X)

    def _adjoint_product(self, X: Tensor) -> Tensor:
        if self.structure >= Structure.SYMMETRIC:
            return self._product(X)
        try:
            return self._of(self.op.adjoint() if hasattr(self.op, "adjoint") else self.op.T, X)
        except TypeError as error:  # SciPy's, which calls None
            raise NotImplementedError(
                f"{self.op!r} cannot multiply from the left; give it `rmatvec`."
            ) from error

    def _of(self, op: Any, X: Tensor) -> Tensor:
        dtype = getattr(self.op, "dtype", self.dtype)
        if isinstance(dtype, torch.dtype):
            found = op @ X.detach().to(getattr(self.op, "device", X.device), dtype)
        else:
            found = torch.as_tensor(op @ to_numpy(X))
        return found.to(X, copy=True)  # it may be the argument


class Sum(LinearOperator):
    """`A + B`."""

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        _check_fit(A, B, A.in_space.matches(B.in_space) and A.out_space.matches(B.out_space), "+")
        # Of two spaces that match, the one with names and shapes.
        spaces = [
            b if a.is_flat else a for a, b in ((A.in_space, B.in_space), (A.out_space, B.out_space))
        ]
        super().__init__(spaces[0], A.dtype, A.device, min(A.structure, B.structure), spaces[1])
        self.A, self.B = A, B

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(X) + self.B._matmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.A._rmatmat(X) + self.B._rmatmat(X)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return type(self)(self.A.to(device, dtype), self.B.to(device, dtype))

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
    """`A B`."""

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        _check_fit(A, B, A.in_space.matches(B.out_space), "@")
        super().__init__(B.in_space, A.dtype, A.device, out_space=A.out_space)
        self.A, self.B = A, B

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(self.B._matmat(X))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.B._rmatmat(self.A._rmatmat(X))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Product(self.A.to(device, dtype), self.B.to(device, dtype))


class Adjoint(LinearOperator):
    """`Aᵀ`."""

    def __init__(self, A: LinearOperator) -> None:
        super().__init__(A.out_space, A.dtype, A.device, A.structure, A.in_space)
        self.A = A

    def _matmat(self, X: Tensor) -> Tensor:
        return self.A._rmatmat(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.A._matmat(X)

    def adjoint(self) -> LinearOperator:
        return self.A

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Adjoint(self.A.to(device, dtype))

    def _to_dense(self) -> Tensor:
        return self.A.to_dense().T


class Scaled(LinearOperator):
    """`c A + delta I` for numbers or 0-d tensors `c` and `delta`; a negative one makes it
    indefinite.
    """

    def __init__(self, A: LinearOperator, c: Scalar = 1.0, delta: Scalar = 0.0) -> None:
        structure = A.structure if c >= 0 and delta >= 0 else min(A.structure, Structure.SYMMETRIC)
        super().__init__(A.in_space, A.dtype, A.device, structure, A.out_space)
        self.A, self.c, self.delta = A, c, delta

    def _matmat(self, X: Tensor) -> Tensor:
        return self._plus_shift(self.c * self.A._matmat(X), X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._plus_shift(self.c * self.A._rmatmat(X), X)

    def _plus_shift(self, Y: Tensor, X: Tensor) -> Tensor:
        return Y if is_zero(self.delta) else Y + self.delta * X

    def adjoint(self) -> LinearOperator:
        return (
            self
            if self.structure >= Structure.SYMMETRIC
            else Scaled(self.A.adjoint(), self.c, self.delta)
        )

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        A = self.A.to(device, dtype)
        return Scaled(A, scalar(self.c, A, "the factor"), scalar(self.delta, A, "the shift"))

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        if is_zero(self.delta):
            return None
        return ((self.A if self._only_shifts else self.A._scale(self.c)) + other).shift(self.delta)

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
        return self.c * self.A.eigenvalues() + self.delta

    @property
    def frobenius_norm(self) -> Tensor:
        size = self.A.frobenius_norm
        norm, trace, delta = (  # whose squares may be infinite in single precision
            torch.as_tensor(x, dtype=wide(size), device=size.device)
            for x in (self.c * size, self.c * self.A.trace, self.delta)
        )
        square = norm.square() + 2 * delta * trace + self.shape[0] * delta.square()
        return square.clamp(min=0).sqrt().to(size.dtype)

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


class Deferred(LinearOperator):
    """Stands for `self.operator`, which a subclass may compute at first use: its products and
    closed forms.

    Spaces, dtype, device and structure are known before; sums and multiples are made of what is
    computed.
    """

    operator: LinearOperator

    vars().update(
        {
            name: property(attrgetter(f"operator.{name}"))
            for name in (
                *(
                    "trace",
                    "frobenius_norm",
                    "eigenvalues",
                    "diagonal",
                    "inverse",
                    "power",
                    "shift",
                ),
                *(
                    "_rmatmat",
                    "_to_dense",
                    "_scale",
                    "_slogdet",
                    "_inverse",
                    "_power",
                    "_root_matmat",
                ),
            )
        }
    )

    def _matmat(self, X: Tensor) -> Tensor:
        return self.operator._matmat(X)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        return self.operator + other


def _check_fit(A: LinearOperator, B: LinearOperator, spaces_fit: bool, operation: str) -> None:
    if not spaces_fit:
        spaces = [
            f"{type(X).__name__}({[*map(list, X.out_shapes)]} x {[*map(list, X.in_shapes)]})"
            for X in (A, B)
        ]
        raise ValueError(f"The spaces of {spaces[0]} {operation} {spaces[1]} don't fit.")
    if A.dtype != B.dtype or A.device != B.device:
        raise TypeError(
            f"Expected both operators in one dtype and on one device, got {A.dtype} on {A.device} "
            f"and {B.dtype} on {B.device}; convert one of them with .to(device=..., dtype=...)."
        )
