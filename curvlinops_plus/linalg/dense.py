"""Matrices that hold their entries: `Dense`, `Diagonal` and the identity.

Each is one matrix, or with a batch axis in front a block-diagonal matrix of `b` equal-sized ones.
They are operators of their own and also the factors of a `Kronecker` product, which needs the
numbers of each matrix: see `Factor`.

Tensors are kept by reference. Decompositions are remembered until they are written to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.errors import SingularMatrixError
from curvlinops_plus.linalg.damping import Scalar, is_zero, scalar
from curvlinops_plus.linalg.numerics import (
    add_to_diagonal,
    at_least_float32,
    damped_cholesky,
    eigh,
    frobenius,
    powers,
    psd_clip,
    slogdet_of,
)
from curvlinops_plus.linalg.operator import Flat, LinearOperator, Sum
from curvlinops_plus.linalg.space import Space, Structure

T = TypeVar("T")


class Factor(Flat):
    """A matrix `[m, n]`, or `b` of them seen as one block-diagonal matrix; may be a factor of a
    `Kronecker` product.

    Subclasses give the numbers of each matrix of the batch (`[*b]` stands for no axis or one of
    size `b`); the numbers of the whole follow here.
    """

    batch: tuple[int, ...]  # () or (b,)
    size: int  # columns of one matrix
    rows: int  # rows of one matrix

    @abstractmethod
    def left(self, M: Tensor, transposed: bool = False) -> Tensor:  # [..., n, k] -> [..., m, k]
        """`F M`, or `Fᵀ M`, for matrices `M`, whose leading axes end with the batch."""

    @abstractmethod
    def right(self, M: Tensor, transposed: bool = False) -> Tensor:  # [..., k, n] -> [..., k, m]
        """`M Fᵀ`, or `M F`, for matrices `M`, whose leading axes end with the batch."""

    @abstractmethod
    def diagonals(self) -> Tensor:  # [*b, n]
        """Diagonal of each matrix."""

    def matrices(self) -> Tensor:  # [*b, m, n]
        """All entries, zeros too."""
        return torch.diag_embed(self.diagonals())

    def traces(self) -> Tensor:  # [*b]
        """Trace of each matrix."""
        return self.diagonals().sum(-1)

    def norms(self) -> Tensor:  # [*b]
        """Frobenius norm of each matrix."""
        return frobenius(self.diagonals(), -1)

    def slogdets(self) -> tuple[Tensor, Tensor]:  # [*b], [*b]
        """Sign and log |det| of each matrix."""
        return slogdet_of(self.diagonals())

    @abstractmethod
    def eigh(self) -> tuple[Tensor, Factor]:  # [*b, n] and a factor Q
        """Eigenvalues, with zeros by the rule of `psd_clip`, and the orthogonal matrix of
        eigenvectors (columns).
        """

    @abstractmethod
    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Factor: ...

    @abstractmethod
    def _scale(self, c: Scalar) -> Factor: ...

    def adjoint(self) -> Factor:
        return self

    @abstractmethod
    def _inverse(self, damping: Any, retry: bool) -> Factor: ...

    @abstractmethod
    def _power(self, p: float, damping: Scalar) -> Factor: ...

    @abstractmethod
    def entrywise_square(self) -> Factor:
        """The matrix of the squared entries."""

    @property
    def trace(self) -> Tensor:
        return self.traces().sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(self.norms())

    def eigenvalues(self) -> Tensor:
        return (
            self.eigh()[0].flatten().clone()
        )  # what is remembered must not be changed by the caller

    def diagonal(self) -> Tensor:
        return self.diagonals().flatten().clone()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = self.slogdets()
        return sign.prod(), logarithm.sum()

    def _root_matmat(self, X: Tensor) -> Tensor:
        values, Q = self.eigh()
        return Q._matmat(values.sqrt().reshape(-1, 1) * Q._rmatmat(X))


class OneTensor(Factor):
    """What `Dense` and `Diagonal` share: one tensor, kept by reference, and results remembered
    until it changes.
    """

    def __init__(self, tensor: Tensor, axes: int, space: Space | None = None) -> None:
        if (
            not isinstance(tensor, Tensor)
            or tensor.ndim not in (axes, axes + 1)
            or not tensor.dtype.is_floating_point
        ):
            given = (
                f"{tensor.dtype} {list(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ValueError(
                f"{type(self).__name__}: expected a real tensor with {axes} axes, or {axes + 1} "
                f"for a batch; got {given}."
            )
        self._tensor, self.size, self.rows = tensor, tensor.shape[-1], tensor.shape[-axes]
        self.batch = tuple(tensor.shape[:-axes])
        b = prod(self.batch)
        self.shape = b * self.rows, b * self.size
        self._memory: dict[str, tuple[Any, Any]] = {}
        self.dtype, self.device = tensor.dtype, tensor.device
        if space is not None:
            self.in_space = space

    def _remember(self, name: str, compute: Callable[[], T]) -> T:
        """The result of `compute`, which is called again only when the tensor has changed."""
        t = self._tensor
        # A graph can be used only once; tensors of inference mode have no version to look at.
        if (t.requires_grad and torch.is_grad_enabled()) or t.is_inference():
            return compute()
        now, known = (t._version, t.data_ptr()), self._memory.get(name)
        if known is None or known[0] != now:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # it may be used where derivatives are taken
                known = self._memory[name] = now, compute()
        return known[1]


class Dense(OneTensor):
    """A matrix with all its entries, `[m, n]`, or `b` square ones on the diagonal, `[b, d, d]`.

    Args:
        matrix: The entries; kept by reference.
        structure: What is known about them (not checked, except that symmetric matrices are
            square).
        rtol: Eigenvalues of a positive semi-definite matrix below `rtol` times the largest count as
            zero; by default `d * eps`. Products and traces always use the entries as they are.
        in_space: Names and shapes of the vectors that it multiplies; by default one flat vector.
        out_space: Those of the results; by default `in_space` of a square matrix, one flat vector
            otherwise.

    Raises:
        ValueError: If the tensor is not a matrix or batch of square matrices, or a space has
            another size.

    Example:
        >>> A = Dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), Structure.PSD)
        >>> A.inverse(damping=1.0) @ torch.tensor([8.0, 0.0])
        tensor([ 3.0000, -1.0000])
    """

    def __init__(
        self,
        matrix: Tensor,
        structure: Structure = Structure.GENERAL,
        rtol: float | None = None,
        *,
        in_space: Space | None = None,
        out_space: Space | None = None,
    ) -> None:
        super().__init__(matrix, 2, in_space)
        self.structure, self.rtol, self._spaces = structure, rtol, (in_space, out_space)
        if self.rows != self.size and (structure > Structure.GENERAL or self.batch):
            kind = (
                f"a {structure.name} matrix"
                if structure > Structure.GENERAL
                else "a batch of matrices"
            )
            raise ValueError(f"Dense: expected {kind} to be square, got {list(matrix.shape)}.")
        if out_space is not None:
            self.out_space = out_space
        if (in_space or out_space) and self.shape != (self.out_space.dim, self.in_space.dim):
            m, n = self.shape
            raise ValueError(
                f"Dense: expected spaces of {m} rows and {n} columns, got {self.out_space} and "
                f"{self.in_space}."
            )

    @property
    def matrix(self) -> Tensor:
        """The entries, `[m, n]` or `[b, d, d]`."""
        return self._tensor

    def matrices(self) -> Tensor:
        return self._tensor

    def left(self, M: Tensor, transposed: bool = False) -> Tensor:
        return (self._tensor.mT if transposed else self._tensor) @ M

    def right(self, M: Tensor, transposed: bool = False) -> Tensor:
        return M @ (
            self._tensor if transposed or self.structure >= Structure.SYMMETRIC else self._tensor.mT
        )

    def _matmat(self, X: Tensor) -> Tensor:
        if not self.batch:
            return self._tensor @ X
        b, d = self.batch[0], self.size
        if X.shape[1] == 1:  # a batched product with one column is slow
            return (self._tensor * X.reshape(b, 1, d)).sum(-1).view(b * d, 1)
        return (self._tensor @ X.reshape(b, d, X.shape[1])).view(b * d, X.shape[1])

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.adjoint()._matmat(X)

    def adjoint(self) -> Dense:
        if self.structure >= Structure.SYMMETRIC:
            return self
        return Dense(self._tensor.mT, in_space=self.out_space, out_space=self.in_space)

    def _like(self, matrix: Tensor, structure: Structure, rtol: float | None) -> Dense:
        """A matrix that multiplies the same vectors."""
        if matrix.ndim != self._tensor.ndim:  # one damping per matrix of the other factor's batch
            return Dense(matrix, structure, rtol)
        return Dense(matrix, structure, rtol, in_space=self._spaces[0], out_space=self._spaces[1])

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Dense:
        return self._like(self._tensor.to(device=device, dtype=dtype), self.structure, self.rtol)

    def materialize(self) -> Dense:
        return (
            self
            if not self.batch
            else Dense(self.to_dense(), self.structure, self.rtol, in_space=self.in_space)
        )

    def _to_dense(self) -> Tensor:
        return torch.block_diag(*self._tensor) if self.batch else self._tensor.clone()

    def _plus(self, other: LinearOperator) -> Dense | None:
        if isinstance(other, Dense) and self.batch == other.batch:
            M, rtol = self._tensor + other._tensor, self.rtol if self.rtol == other.rtol else None
        elif isinstance(other, Diagonal):
            M, rtol = (
                self._tensor + torch.diag_embed(other.vector.reshape(*self.batch, self.size)),
                self.rtol,
            )
        else:
            return None
        total = Sum(self, other)
        return Dense(M, total.structure, rtol, in_space=total.in_space, out_space=total.out_space)

    def _scale(self, c: Scalar) -> Dense:
        structure = self.structure if c >= 0 else min(self.structure, Structure.SYMMETRIC)
        scaled = self._like(c * self._tensor, structure, self.rtol)
        if c > 0 and "eigh" in self._memory:
            values, Q = self.eigh()
            scaled.remember_eigh(c * values, Q)
        return scaled

    def norms(self) -> Tensor:
        return frobenius(self._tensor, (-2, -1))

    def diagonals(self) -> Tensor:
        self._need_square()
        return self._tensor.diagonal(dim1=-2, dim2=-1)

    def slogdets(self) -> tuple[Tensor, Tensor]:
        self._need_square()
        if self.structure == Structure.PSD:
            return self._remember(
                "slogdets", lambda: slogdet_of(psd_clip(self.eigh()[0], self.rtol))
            )
        sign, logarithm = torch.linalg.slogdet(at_least_float32(self._tensor))
        return sign.to(self.dtype), logarithm.to(self.dtype)

    def eigh(self) -> tuple[Tensor, Dense]:
        if self.structure < Structure.SYMMETRIC:
            raise self._no_closed_form("eigenvalues")
        return self._remember("eigh", self._decompose)

    def remember_eigh(self, values: Tensor, Q: Tensor | Dense) -> None:
        """Take over what `eigh` has returned, here or in another process."""
        self._memory.pop("eigh", None)
        self._remember("eigh", lambda: (values, Q if isinstance(Q, Dense) else Dense(Q)))

    def _decompose(self) -> tuple[Tensor, Dense]:
        semidefinite = self.structure == Structure.PSD
        values, Q = eigh(self._tensor, semidefinite=semidefinite)
        if not semidefinite:
            return values, Dense(Q)
        scales = (self._tensor.diagonal(dim1=-2, dim2=-1)[..., None, :] @ Q.square())[
            ..., 0, :
        ].detach()
        return psd_clip(values, self.rtol, scales), Dense(Q)

    def _shift(self, delta: Scalar) -> LinearOperator:
        if self.structure >= Structure.SYMMETRIC:
            return super()._shift(delta)
        # Without eigenvalues, a shifted matrix has to be formed to have a determinant and an
        # inverse.
        return self._like(add_to_diagonal(self._tensor, delta), Structure.GENERAL, None)

    def _inverse(self, damping: Scalar, retry: bool) -> Dense:
        if self.structure < Structure.PSD:
            return self._solve(damping)
        if is_zero(damping):  # only the eigenvalues tell whether it is singular
            return self._power(-1.0, 0.0)
        L = damped_cholesky(self._tensor, damping, retry_double_precision=retry)
        log_det = -2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1).to(self.dtype)
        inverse = self._like(torch.cholesky_inverse(L).to(self.dtype), Structure.PSD, rtol=0.0)
        inverse._remember("slogdets", lambda: (torch.ones_like(log_det), log_det))
        return inverse

    def _solve(self, damping: Scalar) -> Dense:
        self._need_square()
        inverse, info = torch.linalg.inv_ex(
            self._tensor if is_zero(damping) else add_to_diagonal(self._tensor, damping)
        )
        if bool(info.any()) or not bool(torch.isfinite(inverse).all()):
            raise SingularMatrixError(
                f"{self.label} with damping {damping} is singular or not finite; add a damping."
            )
        return Dense(inverse, self.structure, in_space=self.out_space, out_space=self.in_space)

    def _power(self, p: float, damping: Scalar) -> Dense:
        values, Q = self.eigh()
        if (
            is_zero(damping) and self.structure == Structure.PSD
        ):  # what may be rounding has no power of its own
            values = psd_clip(values, self.rtol)
        result = powers(values + _column(damping), p, self)
        # Formed, because a product with the whole is half the work of two products with its
        # eigenvectors.
        power = self._like((Q.matrix * result[..., None, :]) @ Q.matrix.mT, Structure.PSD, rtol=0.0)
        power.remember_eigh(result, Q)
        return power

    def entrywise_square(self) -> Dense:
        return Dense(self._tensor.square())

    def _need_square(self) -> None:
        if self.rows != self.size:
            raise ValueError(
                f"Only a square matrix has a trace, a determinant and an inverse, got {self.label}."
            )


class Diagonal(OneTensor):
    """A diagonal matrix `[d]`, or `b` of them, `[b, d]`; positive semi-definite if no entry is
    negative.

    Entries are what they are: only those equal to 0 count as zero eigenvalues.

    Args:
        vector: The diagonal; kept by reference.

    Example:
        >>> D = Diagonal(torch.tensor([1.0, 4.0]))
        >>> D.power(-0.5).diagonal(), D.structure.name
        (tensor([1.0000, 0.5000]), 'PSD')
    """

    def __init__(self, vector: Tensor) -> None:
        super().__init__(vector, 1)

    @property
    def vector(self) -> Tensor:
        """The diagonal, `[d]` or `[b, d]`."""
        return self._tensor

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        return self._remember(
            "structure",
            lambda: Structure.PSD if bool((self._tensor >= 0).all()) else Structure.SYMMETRIC,
        )

    def left(self, M: Tensor, transposed: bool = False) -> Tensor:
        return self._tensor[..., :, None] * M

    def right(self, M: Tensor, transposed: bool = False) -> Tensor:
        return M * self._tensor[..., None, :]

    def _matmat(self, X: Tensor) -> Tensor:
        return self._tensor.reshape(-1, 1) * X

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Diagonal:
        return Diagonal(self._tensor.to(device=device, dtype=dtype))

    def _to_dense(self) -> Tensor:
        return torch.diag(self._tensor.flatten())

    def _plus(self, other: LinearOperator) -> Diagonal | None:
        if not isinstance(other, Diagonal) or self.batch != other.batch:
            return None
        return Diagonal(self.vector + other.vector)

    def _scale(self, c: Scalar) -> Diagonal:
        return Diagonal(c * self._tensor)

    def diagonals(self) -> Tensor:
        return self._tensor

    def eigh(self) -> tuple[Tensor, Factor]:
        if self.batch:  # the identity has no batch of its own
            return self._tensor, Diagonal(self._tensor.new_ones(1, 1).expand(self._tensor.shape))
        return self._tensor, IdentityLinearOperator([(self.size,)], self.device, self.dtype)

    def _inverse(self, damping: Scalar, retry: bool) -> Diagonal:
        return self._power(-1.0, damping)

    def _power(self, p: float, damping: Scalar) -> Diagonal:
        return Diagonal(powers(self._tensor + _column(damping), p, self))

    def entrywise_square(self) -> Diagonal:
        return Diagonal(self._tensor.square())


def _column(damping: Scalar) -> Scalar:
    """One number per matrix of a batch as a column; one number as it is."""
    return damping[..., None] if isinstance(damping, Tensor) and damping.ndim else damping


class IdentityLinearOperator(Factor):
    """The identity on tensors of given shapes; adding a multiple of it shifts an operator.

    Args:
        shapes: Shapes of the tensors, a sequence or a mapping from names.
        device: Where it computes, by default the CPU.
        dtype: What it computes in, by default PyTorch's default dtype.

    Example:
        >>> A = Diagonal(torch.tensor([1.0, 2.0]))
        >>> (A + 0.5 * IdentityLinearOperator([(2,)])).logdet.exp()
        tensor(3.7500)
    """

    def __init__(
        self,
        shapes: Space | Mapping[str, Sequence[int]] | Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        space = shapes if isinstance(shapes, Space) else Space.from_shapes(shapes)
        where = torch.empty(0, device="cpu" if device is None else device).device
        super().__init__(
            space, torch.get_default_dtype() if dtype is None else dtype, where, Structure.PSD
        )
        self.batch, self.size, self.rows, self.shape = (
            (),
            space.dim,
            space.dim,
            (space.dim, space.dim),
        )
        #: What it is multiplied by.
        self.c: Scalar = 1.0

    def _times(self, c: Scalar) -> IdentityLinearOperator:
        """`c` times the identity."""
        other = copy(self)
        other.c, other.structure = c, Structure.PSD if c >= 0 else Structure.SYMMETRIC
        return other

    def left(self, M: Tensor, transposed: bool = False) -> Tensor:
        return self.c * M

    right = left

    def _matmat(self, X: Tensor) -> Tensor:
        return self.c * X

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> IdentityLinearOperator:
        other = IdentityLinearOperator(self.in_space, device or self.device, dtype or self.dtype)
        return other._times(scalar(self.c, other, "the factor"))

    def _plus(self, other: LinearOperator) -> LinearOperator:
        return other.shift(self.c)

    def _scale(self, c: Scalar) -> IdentityLinearOperator:
        return self._times(self.c * c)

    def _shift(self, delta: Scalar) -> LinearOperator:
        return self._times(self.c + delta)

    def diagonals(self) -> Tensor:
        return torch.as_tensor(self.c, dtype=self.dtype, device=self.device).expand(self.size)

    def eigh(self) -> tuple[Tensor, Factor]:
        return self.diagonals(), self._times(1.0)

    def _inverse(self, damping: Scalar, retry: bool) -> Factor:
        return self._power(-1.0, damping)

    def _power(self, p: float, damping: Scalar) -> Factor:
        value = powers(self.diagonals()[:1] + _column(damping), p, self)  # [*b, 1]
        return (
            self._times(value[0])
            if value.ndim == 1
            else Diagonal(value.expand(len(value), self.size))
        )

    def entrywise_square(self) -> IdentityLinearOperator:
        return self._times(self.c**2)


def _materialize(self: LinearOperator) -> LinearOperator:
    """The same matrix with all its entries, on the same spaces: a `Dense` one, with all closed
    forms.

    The exact matrices of a small network thus get `inverse`, `logdet`, `eigenvalues`, `sample` and
    so on, and still take and return lists and dictionaries of tensors like the parameters.

    Cost: one `to_dense`; memory of `m n` numbers.

    Example:
        >>> space = Space.from_shapes({"w": (2,), "b": (1,)})
        >>> A = Dense(torch.diag(torch.tensor([1.0, 2.0, 4.0])), Structure.PSD, in_space=space)
        >>> B = (A @ A.T + A).materialize()
        >>> B.diagonal(), B.structure.name
        (tensor([ 2.,  6., 20.]), 'GENERAL')
        >>> A.materialize().inverse() @ {"w": torch.ones(2), "b": torch.ones(1)}
        {'w': tensor([1.0000, 0.5000]), 'b': tensor([0.2500])}
    """
    return Dense(self.to_dense(), self.structure, in_space=self.in_space, out_space=self.out_space)


# Set from here, because operators are defined without the classes that build on them.
LinearOperator.materialize = _materialize
