"""Matrices that hold their entries: `Dense`, `Diagonal` and the identity.

Each is one matrix, or with a batch axis in front a block-diagonal matrix of `b` equal-sized ones.
They are operators of their own and also the factors of a `Kronecker` product, which needs the
numbers of each matrix: see `Factor`.

Tensors are kept by reference. Decompositions are remembered until they are written to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import SingularMatrixError
from curvlinops_plus.linalg.arithmetic import Sum
from curvlinops_plus.linalg.damping import Scalar, is_zero
from curvlinops_plus.linalg.decisions import is_true, undo_if_unexpected
from curvlinops_plus.linalg.numerics import (
    add_to_diagonal,
    at_least_float32,
    damped_cholesky,
    eigh,
    frobenius,
    powers,
    psd_clip,
    slogdet_of,
    with_zeros,
)
from curvlinops_plus.linalg.operator import Flat, LinearOperator, moved
from curvlinops_plus.linalg.space import Space, Structure
from curvlinops_plus.options import device_of, instance

T = TypeVar("T")


class Factor(Flat):
    """A matrix `[m, n]`, or `b` of them seen as one block-diagonal matrix; may be a factor of a
    `Kronecker` product.

    Subclasses give the numbers of each matrix of the batch (`[*b]` stands for no axis or one of
    size `b`); the numbers of the whole follow here.
    """

    batch: tuple[int, ...] = ()  # () or (b,)
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
    def _scale(self, c: Scalar) -> Factor: ...

    def _inverse(self, damping: Any, retry: bool) -> Factor:
        return self._power(-1.0, damping)

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
        # A copy: what is remembered must not be changed by the caller.
        return self.eigh()[0].flatten().clone()

    def diagonal(self) -> Tensor:
        return self.diagonals().flatten().clone()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = self.slogdets()
        return sign.prod(), logarithm.sum()

    def _root_matmat(self, X: Tensor) -> Tensor:
        # Q diag(√v) Qᵀ, the symmetric root.
        values, Q = self.eigh()
        return Q._matmat(values.sqrt().reshape(-1, 1) * Q._rmatmat(X))


class OneTensor(Factor):
    """What `Dense` and `Diagonal` share: one tensor, kept by reference, and results remembered
    until it changes.
    """

    def __init__(self, tensor: Tensor, axes: int) -> None:
        is_tensor = isinstance(tensor, Tensor)
        if (
            not is_tensor
            or tensor.ndim not in (axes, axes + 1)
            or not tensor.dtype.is_floating_point
        ):
            kind = f"{tensor.dtype} {list(tensor.shape)}" if is_tensor else type(tensor).__name__
            raise ValueError(
                f"{type(self).__name__}: expected a real tensor with {axes} axes, or {axes + 1} "
                f"for a batch; got {kind}."
            )
        self._tensor = tensor
        self.size = tensor.shape[-1]
        self.rows = tensor.shape[-axes]
        self.batch = tuple(tensor.shape[:-axes])
        b = prod(self.batch)
        self.shape = (b * self.rows, b * self.size)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self._memory: dict[str, tuple[Any, Any]] = {}

    @property
    def tensor(self) -> Tensor:
        """The entries of the matrix or diagonal, or of a batch of them."""
        return self._tensor

    def move(self, memory: Tensor) -> None:
        """Have the entries in other memory, which holds the same ones."""
        self._tensor = memory

    def _state(self) -> tuple[int, int] | None:
        """What is another when the tensor has changed; None if nothing is to be remembered."""
        t = self._tensor
        # A graph can be used only once; tensors of inference mode have no version to look at.
        if (t.requires_grad and torch.is_grad_enabled()) or t.is_inference():
            return None
        return (t._version, t.data_ptr())

    def lacks(self, name: str) -> bool:
        """Whether a result would be computed and then remembered."""
        state = self._state()
        return state is not None and self._memory.get(name, (None,))[0] != state

    def _remember(self, name: str, compute: Callable[[], T]) -> T:
        """The result of `compute`, which is called again only when the tensor has changed."""
        state = self._state()
        if state is None:
            return compute()
        remembered = self._memory.get(name)
        if remembered is None or remembered[0] != state:
            # It may be used where derivatives are taken.
            with torch.inference_mode(False), GradMode(False):
                remembered = (state, compute())
            self._memory[name] = remembered
            undo_if_unexpected(partial(self._memory.pop, name, None))
        return remembered[1]


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

    _made_of = ("matrix", "structure", "rtol")

    def __init__(
        self,
        matrix: Tensor,
        structure: Structure = Structure.GENERAL,
        rtol: float | None = None,
        *,
        in_space: Space | None = None,
        out_space: Space | None = None,
    ) -> None:
        super().__init__(matrix, 2)
        self.structure = structure
        self.rtol = rtol
        self._spaces = {"in_space": in_space, "out_space": out_space}
        symmetric = structure > Structure.GENERAL
        if self.rows != self.size and (symmetric or self.batch):
            kind = f"a {structure.name} matrix" if symmetric else "a batch of matrices"
            raise ValueError(f"Dense: expected {kind} to be square, got {list(matrix.shape)}.")
        if in_space is not None:
            self.in_space = in_space
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
        as_it_is = transposed or self.structure >= Structure.SYMMETRIC
        return M @ (self._tensor if as_it_is else self._tensor.mT)

    def _matmat(self, X: Tensor) -> Tensor:
        if not self.batch:
            return self._tensor @ X
        # X [b d, K] is split into the parts [d, K] of the b matrices.
        b = self.batch[0]
        K = X.shape[1]
        if K == 1:
            # A batched product with one column is slow.
            return (self._tensor * X.reshape(b, 1, self.size)).sum(-1).view(-1, 1)
        return (self._tensor @ X.reshape(b, self.size, K)).view(-1, K)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.adjoint()._matmat(X)

    def _adjoint(self) -> Dense:
        return Dense(self._tensor.mT, in_space=self.out_space, out_space=self.in_space)

    def _like(self, matrix: Tensor, structure: Structure, rtol: float | None) -> Dense:
        """A matrix that multiplies the same vectors."""
        if matrix.ndim != self._tensor.ndim:  # one damping per matrix of the other factor's batch
            return Dense(matrix, structure, rtol)
        return Dense(matrix, structure, rtol, **self._spaces)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Dense:
        return self._like(moved(self._tensor, device, dtype), self.structure, self.rtol)

    def materialize(self) -> Dense:
        if not self.batch:
            return self
        return Dense(self.to_dense(), self.structure, self.rtol, in_space=self.in_space)

    def _to_dense(self) -> Tensor:
        return torch.block_diag(*self._tensor) if self.batch else self._tensor.clone()

    def _plus(self, other: LinearOperator) -> Dense | None:
        if isinstance(other, Dense) and self.batch == other.batch:
            # Thresholds that differ are forgotten: the sum gets the default one.
            M = self._tensor + other._tensor
            rtol = self.rtol if self.rtol == other.rtol else None
        elif isinstance(other, Diagonal):
            M = self._tensor + torch.diag_embed(other.vector.reshape(*self.batch, self.size))
            rtol = self.rtol
        else:
            return None
        total = Sum(self, other)
        return Dense(M, total.structure, rtol, in_space=total.in_space, out_space=total.out_space)

    def _scale(self, c: Scalar) -> Dense:
        structure = self.structure if c >= 0 else min(self.structure, Structure.SYMMETRIC)
        # Eigenvectors stay; known ones are not computed again. A negative c would reverse the order
        # of the eigenvalues.
        scaled = self._like(c * self._tensor, structure, self.rtol)
        if c > 0 and "eigh" in self._memory:
            values, Q = self.eigh()
            scaled.remember_eigh(c * values, Q)
        return scaled

    def parted(self) -> list[Dense]:
        """The matrices of a batch, which know what it remembers."""
        parts = [Dense(M, self.structure, self.rtol) for M in self._tensor.unbind()]
        if "eigh" in self._memory:
            values, Q = self.eigh()
            for part, *of_part in zip(parts, values.unbind(), Q.matrix.unbind(), strict=True):
                part.remember_eigh(*of_part)
        if "slogdets" in self._memory:
            signs, logarithms = self.slogdets()
            for part, *of_part in zip(parts, signs.unbind(), logarithms.unbind(), strict=True):
                part._remember("slogdets", partial(tuple, of_part))
        return parts

    def norms(self) -> Tensor:
        return frobenius(self._tensor, (-2, -1))

    def diagonals(self) -> Tensor:
        if self.rows != self.size:
            raise self._not_square()
        return self._tensor.diagonal(dim1=-2, dim2=-1)

    def slogdets(self) -> tuple[Tensor, Tensor]:
        if self.rows != self.size:
            raise self._not_square()
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
        if semidefinite:
            values = with_zeros(values, Q, self._tensor, self.rtol)
        return values, Dense(Q)

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
        # M + λI = L Lᵀ, and the inverse has the determinant 1 / det(L)².
        log_det = -2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1).to(self.dtype)
        inverse = self._like(torch.cholesky_inverse(L).to(self.dtype), Structure.PSD, rtol=0.0)
        inverse._remember("slogdets", lambda: (torch.ones_like(log_det), log_det))
        return inverse

    def _solve(self, damping: Scalar) -> Dense:
        if self.rows != self.size:
            raise self._not_square()
        M = self._tensor if is_zero(damping) else add_to_diagonal(self._tensor, damping)
        inverse, info = torch.linalg.inv_ex(M)
        if is_true(info.any()) or is_true(~inverse.isfinite().all()):
            raise SingularMatrixError(
                f"{self.label} with damping {damping} is singular or not finite; add a damping."
            )
        return Dense(inverse, self.structure, in_space=self.out_space, out_space=self.in_space)

    def _power(self, p: float, damping: Scalar) -> Dense:
        # (Q diag(v) Qᵀ + λI)ᵖ = Q diag((v + λ)ᵖ) Qᵀ
        values, Q = self.eigh()
        # An eigenvalue that may be rounding counts as zero.
        if is_zero(damping) and self.structure == Structure.PSD:
            values = psd_clip(values, self.rtol)
        raised = powers(values + _column(damping), p, self)
        # Formed: one product with it is half the work of two products with its eigenvectors.
        power = self._like((Q.matrix * raised[..., None, :]) @ Q.matrix.mT, Structure.PSD, rtol=0.0)
        power.remember_eigh(raised, Q)
        return power

    def entrywise_square(self) -> Dense:
        return Dense(self._tensor.square())

    def _not_square(self) -> ValueError:
        return ValueError(
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

    _made_of = ("vector",)

    def __init__(self, vector: Tensor) -> None:
        super().__init__(vector, 1)

    @property
    def vector(self) -> Tensor:
        """The diagonal, `[d]` or `[b, d]`."""
        return self._tensor

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        # Looked at again whenever the entries change.
        negative = self._remember("structure", lambda: is_true(~(self._tensor >= 0).all()))
        return Structure.SYMMETRIC if negative else Structure.PSD

    def left(self, M: Tensor, transposed: bool = False) -> Tensor:
        return self._tensor[..., :, None] * M

    def right(self, M: Tensor, transposed: bool = False) -> Tensor:
        return M * self._tensor[..., None, :]

    def _matmat(self, X: Tensor) -> Tensor:
        return self._tensor.reshape(-1, 1) * X

    def _to_dense(self) -> Tensor:
        return torch.diag(self._tensor.flatten())

    def _plus(self, other: LinearOperator) -> Diagonal | None:
        if not isinstance(other, Diagonal) or self.batch != other.batch:
            return None
        return Diagonal(self.vector + other.vector)

    def _scale(self, c: Scalar) -> Diagonal:
        return Diagonal(c * self._tensor)

    def parted(self) -> list[Diagonal]:
        """The diagonals of a batch."""
        return [Diagonal(vector) for vector in self._tensor.unbind()]

    def diagonals(self) -> Tensor:
        return self._tensor

    def eigh(self) -> tuple[Tensor, Factor]:
        if self.batch:  # the identity has no batch of its own
            return self._tensor, Diagonal(self._tensor.new_ones(1, 1).expand(self._tensor.shape))
        return self._tensor, IdentityLinearOperator([(self.size,)], self.device, self.dtype)

    def _power(self, p: float, damping: Scalar) -> Diagonal:
        return Diagonal(powers(self._tensor + _column(damping), p, self))

    def entrywise_square(self) -> Diagonal:
        return Diagonal(self._tensor.square())


class IdentityMultiple(Factor):
    """`c` times the identity; adding it shifts an operator."""

    def __init__(self, space: Space, c: Scalar, device: torch.device, dtype: torch.dtype) -> None:
        structure = Structure.PSD if c >= 0 else Structure.SYMMETRIC
        LinearOperator.__init__(self, space, dtype, device, structure)
        self.c = c
        self.size = space.dim
        self.rows = space.dim
        self.shape = (space.dim, space.dim)

    def _times(self, c: Scalar) -> IdentityMultiple:
        """`c` times the identity, whatever this one is a multiple of."""
        return IdentityMultiple(self.in_space, c, self.device, self.dtype)

    def left(self, M: Tensor, transposed: bool = False) -> Tensor:
        return self.c * M

    right = left

    def _matmat(self, X: Tensor) -> Tensor:
        return self.c * X

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> IdentityMultiple:
        c = moved(self.c, device, dtype)
        return IdentityMultiple(self.in_space, c, device or self.device, dtype or self.dtype)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        # A + c I is a shift of A, which keeps its closed forms.
        return other.shift(self.c)

    def _scale(self, c: Scalar) -> IdentityMultiple:
        return self._times(self.c * c)

    def _shift(self, delta: Scalar) -> LinearOperator:
        return self._times(self.c + delta)

    def diagonals(self) -> Tensor:
        return torch.as_tensor(self.c, dtype=self.dtype, device=self.device).expand(self.size)

    def eigh(self) -> tuple[Tensor, Factor]:
        return self.diagonals(), self._times(1.0)

    def _power(self, p: float, damping: Scalar) -> Factor:
        # All entries are equal: one number is raised, or one for each damping, [*b, 1].
        raised = powers(self.diagonals()[:1] + _column(damping), p, self)
        if raised.ndim == 1:
            return self._times(raised[0])
        return Diagonal(raised.expand(len(raised), self.size))

    def entrywise_square(self) -> IdentityMultiple:
        return self._times(self.c**2)


class IdentityLinearOperator(IdentityMultiple):
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
        instance("dtype", dtype, torch.dtype, "one of PyTorch, as torch.float64", optional=True)
        place = torch.empty(0, device=device_of("device", device) or "cpu").device
        super().__init__(space, 1.0, place, dtype or torch.get_default_dtype())


def _column(damping: Scalar) -> Scalar:
    """One number per matrix of a batch as a column; one number as it is."""
    return damping[..., None] if isinstance(damping, Tensor) and damping.ndim else damping
