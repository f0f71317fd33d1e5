"""A matrix that is known by its products: `LinearOperator`.

To write one, subclass `LinearOperator`, hand `in_space`, `dtype` and `device` to its constructor
(or set them on the class) and write `_matmat`; declare a symmetric matrix by `structure`, or write
`_rmatmat`. Products with every kind of vector, arithmetic, export to SciPy and adjoints follow;
what `+ - * / @ .T` return is in `arithmetic`.

Closed forms (trace, determinant, eigenvalues, inverse, square root) are there for all: structured
matrices implement them, the others raise `NoClosedForm`, which says what to use instead. An
operator holds the numbers of when it was made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, NumericsError
from curvlinops_plus.linalg.damping import Damping, Scalar, resolve, scalar
from curvlinops_plus.linalg.numerics import standard_normal
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.linalg.space import Space, Structure, to_numpy
from curvlinops_plus.options import device_of, flag, instance, integer, number, random_generator

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
    "frobenius_norm": (
        "estimate its square from products with random vectors: `hutchinson_squared_fro(A, ...)`"
    ),
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
        ...     in_space, structure = Space.from_shapes([(3,)]), Structure.PSD
        ...     dtype, device = torch.float32, torch.device("cpu")
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

    #: Names of the constructor's arguments, in their order: what `to` moves and a state saves.
    _made_of: tuple[str, ...] = ()

    def __init__(
        self,
        in_space: Space | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        structure: Structure | None = None,
        out_space: Space | None = None,
    ) -> None:
        if in_space is not None:
            self.in_space = in_space
        if dtype is not None:
            self.dtype = dtype
        if device is not None:
            self.device = device
        if structure is not None:
            self.structure = structure
        if out_space is not None:
            self.out_space = out_space

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

    #: Of a block, its name and its parameters, for those who print it.
    _of: str | None = None

    def __repr__(self) -> str:
        if self._of is None:
            return self.label
        with suppress(NoClosedForm):
            return f"{self.label}, {self._of}, trace {float(self.trace.detach()):.4g}"
        return f"{self.label}, {self._of}"

    # Products
    # ----------------------------------------------------------------------------------------------

    def __matmul__(self, X: Any) -> Any:
        """`A @ X`."""
        if isinstance(X, LinearOperator):
            from curvlinops_plus.linalg.arithmetic import Product

            return Product(self, X)
        try:
            x, container = self.in_space.read(X, self.dtype, self.device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.label} @ X: {error}") from error
        if x.shape[1] == 0:
            return self.out_space.write(x.new_zeros(self.shape[0], 0), container)
        with full_precision(self.device.type):
            return self.out_space.write(self._matmat(x), container)

    def __rmatmul__(self, X: Any) -> Any:
        """`X @ A`: the `K` axis of rows is the first one, in lists and dictionaries, too."""
        if isinstance(X, (Tensor, np.ndarray)):
            return (self.adjoint() @ X.T).T if X.ndim == 2 else self.adjoint() @ X
        shapes = self.out_space.shapes
        pairs: list[tuple[Any, torch.Size]] = []
        if isinstance(X, Mapping):
            pairs = [(X[name], shape) for name, shape in shapes.items() if name in X]
        elif isinstance(X, (list, tuple)):
            pairs = [*zip(X, shapes.values())]
        are_tensors = all(isinstance(t, Tensor) for t, _ in pairs)
        # A vector, or what the product says is none.
        if not are_tensors or not any(t.ndim > len(shape) for t, shape in pairs):
            return self.adjoint() @ X
        return _moved_axis(self.adjoint() @ _moved_axis(X, 0, -1), -1, 0)

    def rmatmat(self, X: Any) -> Any:
        """`Aᵀ @ X`, under SciPy's name."""
        return self.adjoint() @ X

    #: The same, under SciPy's other names.
    matmat = matvec = __matmul__
    rmatvec = rmatmat

    def adjoint(self) -> LinearOperator:
        """The transposed matrix; a symmetric one is its own."""
        return self if self.structure >= Structure.SYMMETRIC else self._adjoint()

    def _adjoint(self) -> LinearOperator:
        """The transposed matrix, of one that is not symmetric."""
        from curvlinops_plus.linalg.arithmetic import Adjoint

        return Adjoint(self)

    @property
    def T(self) -> LinearOperator:
        """The transposed matrix."""
        return self.adjoint()

    #: The same, under SciPy's name: all matrices here are real.
    H = T

    def __getitem__(self, key: tuple[Any, Any]) -> LinearOperator:
        """`A[rows, cols]`, see `submatrix`."""
        from curvlinops_plus.linalg.submatrices import submatrix

        if not isinstance(key, tuple) or len(key) != 2:
            raise ValueError(
                f"Expected A[rows, cols], with : for all rows or columns; got A[{key!r}]."
            )
        return submatrix(self, *key)

    def to_dense(self) -> Tensor:
        """The matrix `[m, n]`. Cost: one product with `n` columns, or less where a class knows a
        cheaper way.
        """
        with full_precision(self.device.type):
            return self._to_dense()

    def _to_dense(self) -> Tensor:
        m, n = self.shape
        # The columns of A are its products with the columns of the identity.
        eye = torch.eye(n, dtype=self.dtype, device=self.device)
        return self._matmat(eye) if n else eye.new_zeros(m, 0)

    def materialize(self) -> LinearOperator:
        """The same matrix with all its entries, on the same spaces: a `Dense` one, with all closed
        forms.

        The exact matrices of a small network thus get `inverse`, `logdet`, `eigenvalues`, `sample`
        and so on, and still take and return lists and dictionaries of tensors like the parameters.

        Cost: one `to_dense`; memory of `m n` numbers.

        Example:
            >>> from curvlinops_plus.linalg import Dense
            >>> space = Space.from_shapes({"w": (2,), "b": (1,)})
            >>> A = Dense(torch.diag(torch.tensor([1.0, 2.0, 4.0])), Structure.PSD, in_space=space)
            >>> B = (A @ A.T + A).materialize()
            >>> B.diagonal(), B.structure.name
            (tensor([ 2.,  6., 20.]), 'GENERAL')
            >>> A.materialize().inverse() @ {"w": torch.ones(2), "b": torch.ones(1)}
            {'w': tensor([1.0000, 0.5000]), 'b': tensor([0.2500])}
        """
        from curvlinops_plus.linalg.dense import Dense

        entries = self.to_dense()
        return Dense(entries, self.structure, in_space=self.in_space, out_space=self.out_space)

    def to_scipy(self, dtype: Any = None) -> Any:
        """`A` as a `scipy.sparse.linalg.LinearOperator`, see `to_scipy`."""
        from curvlinops_plus.linalg.scipy_operators import to_scipy

        return to_scipy(self, dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make an array whose only entry is the operator."""
        raise TypeError(
            f"{self.label} is not an array. For its entries write A.to_dense().cpu().numpy(), for "
            "SciPy A.to_scipy(); products with arrays are A @ x and x @ A."
        )

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
            dtype = device
            device = None
        place = None
        instance("dtype", dtype, torch.dtype, "one of PyTorch, as torch.float64", optional=True)
        if device is not None:
            place = device_of("device", device)
            if place.type == self.device.type and place.index is None:
                place = self.device
            # As its tensors say: "cuda" is "cuda:0", and "cpu:0" is "cpu".
            place = torch.empty(0, device=place).device
        if place in (None, self.device) and dtype in (None, self.dtype):
            return self
        return self._to(place, dtype)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Any:
        if not self._made_of:
            raise NotImplementedError(
                f"{type(self).__name__} owns no tensors that could be moved: what it is computed "
                "from has to be there. If that is a model and data, convert these, model.to(...) "
                "and X.to(...), and make it again."
            )
        parts = [getattr(self, name) for name in self._made_of]
        return type(self)(*[moved(part, device, dtype) for part in parts])

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
        from curvlinops_plus.linalg.arithmetic import Sum

        B = self._addend(other)
        if B is NotImplemented:
            return NotImplemented
        # Either operator may know the closed form; making the sum checks that they can be added.
        total = Sum(self, B)
        closed = self._plus(B)
        if closed is None:
            closed = B._plus(self)
        return total if closed is None else closed

    def __radd__(self, other: Any) -> LinearOperator:
        if isinstance(other, int) and other == 0:  # `sum([A, B])` begins with it
            return self
        return self + other

    def __sub__(self, other: Any) -> LinearOperator:
        B = self._addend(other)
        return NotImplemented if B is NotImplemented else self + (-B)

    def __rsub__(self, other: Any) -> LinearOperator:
        B = self._addend(other)
        return NotImplemented if B is NotImplemented else B + (-self)

    def _addend(self, addend: Any) -> Any:
        """The addend as an operator; `NotImplemented` for types that may know how to do it
        themselves.
        """
        if isinstance(addend, LinearOperator):
            return addend
        if isinstance(addend, (int, float, complex, np.generic, np.ndarray, Tensor)):
            raise TypeError(
                f"{type(addend).__name__} can't be added to {self.label}. Add c times the identity "
                "by A.shift(c), a matrix M of entries by A + curvlinops_plus.linalg.Dense(M)."
            )
        if hasattr(addend, "shape") and hasattr(addend, "__matmul__"):
            from curvlinops_plus.linalg.arithmetic import Foreign

            return Foreign(addend, self)
        return NotImplemented

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
        if callable(delta):
            delta = delta(self)
        return self._shift(scalar(delta, self, "the shift"))

    def _shift(self, delta: Scalar) -> LinearOperator:
        from curvlinops_plus.linalg.arithmetic import Scaled

        return Scaled(self, 1.0, delta)

    def _scale(self, c: Scalar) -> LinearOperator:
        from curvlinops_plus.linalg.arithmetic import Scaled

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
        # A negative determinant has no real logarithm.
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
        flag("retry_double_precision", retry_double_precision)
        resolved = resolve(damping, self, each=True, batch=getattr(self, "batch", ()))
        with full_precision(self.device.type):
            return self._inverse(resolved, retry_double_precision)

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
        self._need_psd("have real powers")
        flag("exact", exact)
        with full_precision(self.device.type):
            return self._power(number("p", p), resolve(damping, self))

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
        self._need_psd("are covariances")
        random_generator(generator, ", for several draws num=...")
        num = integer("num", num, low=1, optional=True)
        # If z is standard normal, L z has the covariance L Lᵀ = A.
        like = torch.empty((), dtype=self.dtype, device=self.device)
        numbers = standard_normal(1 if num is None else num, self.shape[1], generator, like)
        draws = self._root_matmat(numbers)
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
        with full_precision(self.device.type):
            form = self._quadratic_form(rows)
        return to_numpy(form) if kind == "numpy" else form

    # What a structure implements; arguments are checked, and dampings are numbers
    # ----------------------------------------------------------------------------------------------

    def _quadratic_form(self, rows: Tensor) -> Tensor:  # [n] -> [], [..., m, n] -> [..., m, m]
        # (A Jᵀ)ᵀ in one product with all rows as columns, then J (A Jᵀ).
        products = (self @ rows.reshape(-1, self.shape[1]).T).T.reshape(rows.shape)
        return rows @ (products.mT if rows.ndim > 1 else products)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        """Sign of the determinant and logarithm of its absolute value."""
        raise self._no_closed_form("logdet")

    def _counted(self) -> Tensor:
        """The eigenvalues, with 0 where they count as zero."""
        return self.eigenvalues()

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

    def _need_psd(self, purpose: str) -> None:
        if self.structure < Structure.PSD:
            raise ValueError(
                f"Expected a positive semi-definite matrix, got {self.label}; only those {purpose}."
            )

    def _no_closed_form(self, member: str) -> NoClosedForm:
        symmetric = self.structure >= Structure.SYMMETRIC
        formed = f"A.materialize().{member}" if symmetric else "A.to_dense()"
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


#: Errors about a part of a matrix, to which `about` adds the name of the part.
OF_PARTS = (NumericsError, NotImplementedError, TypeError, ValueError)


def about(part: str, error: Exception) -> Exception:
    """The error, beginning with the name of the part of the matrix that it is about."""
    return type(error)(f"{part}: {error}")


def _moved_axis(tree: Any, source: int, target: int) -> Any:
    """A list, tuple or dictionary of tensors with one of their axes at another place."""
    if isinstance(tree, Mapping):
        return {key: t.movedim(source, target) for key, t in tree.items()}
    return type(tree)(t.movedim(source, target) for t in tree)


def moved(part: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """A tensor or operator on another device and in another dtype; anything else as it is."""
    if isinstance(part, (Tensor, LinearOperator)):
        return part.to(device=device, dtype=dtype)
    return part


Multiply = Callable[[Tensor], Tensor]


def linear_in(X: Tensor, product: Multiply, adjoint: Multiply) -> Tensor:
    """`product(X)`, linear in `X [n, K]`, whose derivative in `X` is what `adjoint` multiplies
    with, to any order.

    For products that are computed without a graph, of their own operator or in other libraries.
    """
    if not X.requires_grad:
        return product(X)
    return _Linear.apply(X, product, adjoint)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, product: Multiply, adjoint: Multiply) -> Tensor:
        ctx.product = product
        ctx.adjoint = adjoint
        return product(X.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The derivative of A X is A, and gradients are multiplied with its transpose; which is a
        # linear product again, with A as its adjoint.
        return _Linear.apply(grads[0], ctx.adjoint, ctx.product), None, None
