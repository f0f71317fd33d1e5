"""Closed forms, which need no entries of the whole matrix: trace, determinant, eigenvalues, inverse, square root.

Every operator has these members. Structured ones implement them; the others raise `NoClosedForm`, which says what to
use instead. Which eigenvalues count as zero is the rule of `psd_clip`.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg.damping import Damping, Scalar, resolve
from curvlinops_plus.linalg.numerics import standard_normal, whole
from curvlinops_plus.linalg.products import Products, outside_autocast
from curvlinops_plus.linalg.space import to_numpy
from curvlinops_plus.linalg.structure import Structure

if TYPE_CHECKING:  # for annotations only: operators inherit from what is defined here
    from curvlinops_plus.linalg.operator import LinearOperator

_ADVICE = {
    "trace": "estimate it from products with random vectors: `xtrace(A, ...)` or `hutchinson_trace(A, ...)`",
    "logdet": "estimate it from products by stochastic Lanczos quadrature: `curvlinops_plus.estimate.logdet(A, ...)`",
    "frobenius_norm": "estimate its square from products with random vectors: `hutchinson_squared_fro(A, ...)`",
    "eigenvalues": "compute the largest with `top_eigenpairs(A, k)` or scipy.sparse.linalg.eigsh(A.to_scipy())",
    "diagonal": "estimate it from products with random vectors: `xdiag(A, ...)` or `hutchinson_diag(A, ...)`",
    "inverse": "solve with `CGInverseLinearOperator(A)`, or MINRES if it is indefinite",
    "power": "approximate its eigenvectors with scipy.sparse.linalg.eigsh(A.to_scipy())",
    "sample": "approximate the matrix by a structured one, for example KFAC, and sample from that",
}


class ClosedForms(Products):
    """The members that follow from structure; by default they raise errors that say what to use instead."""

    @property
    def trace(self) -> Tensor:
        """Sum of the eigenvalues, a 0-d tensor."""
        raise self._no_closed_form("trace")

    @property
    def det(self) -> Tensor:
        """Product of the eigenvalues, a 0-d tensor; 0 if one counts as zero. Use `logdet` for large matrices."""
        sign, logarithm = self._slogdet()
        return sign * logarithm.exp()

    @property
    def logdet(self) -> Tensor:
        """Logarithm of the determinant, 0-d: -inf if the matrix is singular, NaN if the determinant is negative.

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

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> LinearOperator:
        """The matrix `(A + damping I)⁻¹` as an operator that has its own `logdet`, `trace`, `sample`.

        Args:
            damping: A number, a 0-d tensor (results are differentiable in it), a rule such as `RelativeDamping` or
                `HeuristicDamping`; of a Kronecker product also a pair `(λ_A, λ_G)`, and of a block-diagonal matrix one
                per block: a tensor, or a mapping from block name to any of these.
            retry_double_precision: Repeat a Cholesky decomposition that failed in float32 in float64, with a warning.

        Raises:
            NoClosedForm: If the structure does not give an inverse.
            SingularMatrixError: If the matrix is singular and there is no damping.
            ValueError: If the damping is negative or of a kind that does not fit the matrix.
        """
        if callable(damping) and not isinstance(damping, type):
            damping = damping(self)
        if isinstance(damping, tuple):
            return self._inverse_by_factors(damping, retry_double_precision)
        return self._inverse(resolve(damping, self), retry_double_precision)

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        """The matrix `(A + damping I)ᵖ` of a positive semi-definite `A`, for any real `p`.

        Args:
            damping: A number, a 0-d tensor or a rule; of a block-diagonal matrix also one per block.
            exact: False splits the damping between the factors of a Kronecker product (`heuristic_damping`), whose
                power is then a product of powers, as in kfac_jax: nothing is decomposed together, the matrix dominates
                the damped one. Where one factor is 1 x 1 or zero, the exact power costs nothing and is taken.
                Without effect on matrices that are no Kronecker product.

        Raises:
            NoClosedForm: If the structure does not give powers.
            SingularMatrixError: If `p < 0` and the matrix is singular and there is no damping.
            ValueError: If the matrix is not positive semi-definite, or the damping negative.
        """
        if self.structure < Structure.PSD:
            raise ValueError(
                f"Expected a positive semi-definite matrix, got {self.label}; only those have real powers."
            )
        if not isinstance(p, Real):
            raise TypeError(f"Expected the exponent to be a number, got {type(p).__name__} {p!r}.")
        power = self._power if exact else self._power_by_factors
        return power(float(p), resolve(damping, self))

    def sample(self, generator: torch.Generator | None = None, num: int | None = None) -> Tensor:
        """Draws from N(0, A): one, `[n]`, or `num` of them, `[n, num]`; `A.in_space.unflatten` makes them a dictionary.

        Args:
            generator: Where the random numbers come from, on the CPU or on the operator's device; the same generator
                gives the same draws on every device and in every dtype. By default PyTorch's global one.
            num: How many. More draws begin with the fewer ones.

        Raises:
            NoClosedForm: If the structure does not give a square root.
            TypeError: If `generator` is no `torch.Generator`, or `num` no integer.
            ValueError: If the matrix is not positive semi-definite, or `num` is negative.
        """
        if self.structure < Structure.PSD:
            raise ValueError(f"Expected a positive semi-definite matrix, got {self.label}; only those are covariances.")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"Expected a torch.Generator, got {type(generator).__name__} {generator!r}; for a seed write "
                "generator=torch.Generator().manual_seed(seed), for several draws num=..."
            )
        if num is not None:
            if (found := whole(num)) is None:
                raise TypeError(f"Expected num to be an integer, the number of draws, got {num!r}.")
            if (num := found) < 0:
                raise ValueError(f"Expected num to be at least 0, got {num}.")
        like = torch.empty((), dtype=self.dtype, device=self.device)
        draws = self._root_matmat(standard_normal(1 if num is None else num, self.shape[1], generator, like))
        return draws[:, 0] if num is None else draws

    def quadratic_form(self, J: Any) -> Any:
        """`J A Jᵀ`: a number for one vector, `[..., m, m]` for the rows of Jacobians.

        It is differentiable in `J`, so that `A.quadratic_form({name: p - p0[name] for name, p in ...})` is a penalty.
        Costs one product with as many columns as `J` has rows; of a `GGN` a forward pass with tangents for each row.

        Args:
            J: A tensor or NumPy array `[n]` or `[..., m, n]`; or a list, tuple or dictionary of tensors `[*shape]` or
                `[..., m, *shape]`.

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
        m, n = self.shape
        if m != n:
            raise ValueError(f"Only a square matrix has quadratic forms, got {self.label}; use A.T @ A or A @ A.T.")
        try:
            rows, kind = self.in_space.read_rows(J, self.dtype, self.device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.label}.quadratic_form(J): {error}") from error
        with outside_autocast(self.device):
            form = self._quadratic_form(rows)
        return to_numpy(form) if kind == "numpy" else form

    # What a structure implements; arguments are checked, and dampings are numbers -------------------------------------

    def _quadratic_form(self, rows: Tensor) -> Tensor:  # [n] -> [], [..., m, n] -> [..., m, m]
        def times(A: Any) -> Tensor:
            return (A @ rows.reshape(-1, self.shape[1]).T).T.reshape(rows.shape)

        products = times(self)
        form = rows @ (products.mT if rows.ndim > 1 else products)
        if rows.requires_grad and not products.requires_grad:  # of an operator whose products carry no graph
            left = products if self.structure >= Structure.SYMMETRIC else times(self.adjoint())
            form = form + left @ (rows.mT if rows.ndim > 1 else rows) - form.detach()
        return form

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        """Sign of the determinant and logarithm of its absolute value."""
        raise self._no_closed_form("logdet")

    def _inverse(self, damping: Scalar, retry: bool) -> LinearOperator:
        raise self._no_closed_form("inverse")

    def _inverse_by_factors(self, damping: tuple[Any, Any], retry: bool) -> LinearOperator:
        raise ValueError(
            f"A pair of dampings (λ_A, λ_G) belongs to the two factors of a Kronecker product, got one for "
            f"{self.label}; pass a single number."
        )

    def _split_damping(self, damping: Scalar, smallest: float) -> Scalar | tuple[Tensor, Tensor]:
        """What `HeuristicDamping` adds: a pair of at least `smallest` for two factors, otherwise the whole damping."""
        return damping

    def _power(self, p: float, damping: Scalar) -> LinearOperator:
        raise self._no_closed_form("power")

    def _power_by_factors(self, p: float, damping: Scalar) -> LinearOperator:
        return self._power(p, damping)

    def _root_matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [n, K]
        """`L X` with `L Lᵀ = A`, the symmetric `L` where it is known: no rounding of `A` changes it much."""
        raise self._no_closed_form("sample")

    def _entrywise_square(self) -> LinearOperator:
        """The matrix of the squared entries."""
        raise self._no_closed_form("diagonal")

    def _no_closed_form(self, member: str) -> NoClosedForm:
        formed = f"A.materialize().{member}" if self.structure >= Structure.SYMMETRIC else "A.to_dense()"
        advice = f"if the matrix is small, use {formed}; otherwise {_ADVICE[member]}"
        return NoClosedForm(f"{self.label} has no closed form of `{member}`: {advice}.")
