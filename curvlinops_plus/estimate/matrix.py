"""A matrix as estimators see it, whatever library it comes from; random vectors, and means with standard errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any, Generic, Literal, ParamSpec, Protocol, cast, overload

import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import LinearOperator, Structure, from_scipy
from curvlinops_plus.linalg.numerics import standard_normal, whole
from curvlinops_plus.linalg.operator import Foreign

BLOCK_BYTES = 2**27  # of the columns that are multiplied at once
P = ParamSpec("P")


class MatrixLike(Protocol):
    """An operator of this package, a 2-d tensor or NumPy array, a SciPy operator or sparse matrix."""

    @property
    def shape(self) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...


class Estimator(Protocol, Generic[P]):
    """Signature of an estimator whose `return_error=True` makes it return `(estimate, standard error)`."""

    @overload
    def __call__(
        self, A: MatrixLike, *args: Any, return_error: Literal[True], **options: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...


def estimator(function: Callable[P, Tensor | tuple[Tensor, Tensor]]) -> Estimator[P]:
    """Tell type checkers what `return_error` does; the function stays as it is."""
    return cast(Estimator[P], function)


class Matrix:
    """An operator `[m, n]` and products with tensors `[n, K]`, in blocks of columns.

    `dtype` is what estimators compute in: float32 if the matrix itself is in half precision. `eps` is the relative
    rounding error of products.
    """

    def __init__(self, A: Any) -> None:
        if not hasattr(A, "shape"):  # a risk, say, instead of a matrix of it
            what = "a LinearOperator, a tensor, an array or a SciPy operator"
            raise TypeError(f"Expected {what}, got {type(A).__name__}.")
        if not isinstance(A, (LinearOperator, Tensor)):
            A = Foreign(A) if isinstance(getattr(A, "dtype", None), torch.dtype) else from_scipy(A)
        self.shape, self.device = tuple(A.shape), A.device
        if not A.dtype.is_floating_point:
            raise TypeError(f"Expected a matrix of real floating-point numbers, got {A.dtype}.")
        if len(self.shape) != 2 or 0 in self.shape:
            raise ValueError(f"A must be a matrix with entries. Got shape {self.shape}.")
        self.dtype, self.eps = torch.promote_types(A.dtype, torch.float32), torch.finfo(A.dtype).eps
        #: A 0-d tensor of the dtype and device in which to compute.
        self.zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._A = A.to(self.dtype) if isinstance(A, Tensor) else A

    def rounding(self, terms: int) -> float:
        """Relative rounding error of sums of so many terms in `dtype`, or of a product where that is larger."""
        return max(terms * torch.finfo(self.dtype).eps, self.eps)

    def blocks(self, total: int, copies: int = 1) -> Iterator[int]:
        """Sizes of the blocks in which `total` columns go through, when `copies` vectors are kept per column."""
        size = max(1, BLOCK_BYTES // (max(self.shape) * self.zero.element_size() * copies))
        return (min(size, total - start) for start in range(0, total, size))

    def matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [m, K]
        """`A @ X`."""
        return self._in_blocks(self._A, X, self.shape[0])

    def rmatmat(self, X: Tensor) -> Tensor:  # [m, K] -> [n, K]
        """`Aᵀ @ X`."""
        return self._in_blocks(self._A.T, X, self.shape[1])

    def gram(self, X: Tensor) -> Tensor:
        """`AᵀA X`, or `AAᵀ X` if that is smaller."""
        return self.rmatmat(self.matmat(X)) if self.shape[0] >= self.shape[1] else self.matmat(self.rmatmat(X))

    def _in_blocks(self, A: Any, X: Tensor, rows: int) -> Tensor:
        results = [X.new_zeros((rows, 0))]
        results += [(A @ block.to(A.dtype)).to(self.dtype) for block in X.split(list(self.blocks(X.shape[1])), dim=1)]
        if not all(bool(torch.isfinite(result).all()) for result in results):
            raise NumericsError("A product with A has NaN or infinite entries; look for them in the model and data.")
        return torch.cat(results, dim=1)

    @torch.no_grad()
    def asymmetry(self) -> float:
        """`|uᵀAv - vᵀAu|` for two random vectors, relative to `|Av|`; 0 if the matrix says that it is symmetric."""
        if self.shape[0] != self.shape[1]:
            return 1.0
        if getattr(self._A, "structure", Structure.GENERAL) >= Structure.SYMMETRIC:
            return 0.0
        V = random_vectors(2, self.shape[0], "normal", torch.Generator().manual_seed(0), self.zero)
        AV = self.matmat(V).double()
        H, size = V.double().T @ AV, float(torch.linalg.vector_norm(AV, dim=0).max())
        return float((H[0, 1] - H[1, 0]).abs()) / size if size else 0.0

    def require_symmetric(self) -> None:
        """Refuse a matrix whose products are not those of a symmetric one."""
        if (difference := self.asymmetry()) > self.eps**0.5:
            raise ValueError(
                f"A is not symmetric: for random u and v, uᵀAv and vᵀAu differ by {difference:.1e} |Av|. Take "
                "`A.T @ A` or `(A + A.T) / 2`, or look for randomness such as dropout."
            )


@contextmanager
def multiplying(A: Any, square: bool = True) -> Iterator[Matrix]:
    """The matrix, outside of autocast.

    Raises:
        NumericsError: Inside, if a product is NaN or infinite.
        TypeError: If `A` is no matrix of real floating-point numbers.
        ValueError: If it has not two axes, no entries, or, where that is needed, not as many rows as columns.
    """
    matrix = Matrix(A)
    if square and matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"Operator must be square. Got shape {matrix.shape}.")
    with torch.autocast(matrix.device.type, enabled=False):
        yield matrix


def random_vector(
    dim: int,
    distribution: str = "rademacher",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: Generator | None = None,
) -> Tensor:
    """A vector [dim] with independent entries of mean 0 and variance 1, as the estimators draw them, one per product.

    Args:
        dim: Number of entries.
        distribution: "rademacher" (random signs), "normal", or "sphere" (length √dim).
        device: Where the vector is put.
        dtype: Of the vector.
        generator: With a generator, the draw depends on nothing else, also not on `device` and `dtype`. By default the
            numbers are those of `Tensor.bernoulli_` and `torch.randn` from the global generator of the device.

    Raises:
        ValueError: If the distribution is unknown.

    Example:
        >>> random_vector(3, generator=torch.Generator().manual_seed(0)).square()
        tensor([1., 1., 1.])
    """
    return random_vectors(1, dim, distribution, generator, torch.zeros((), device=device, dtype=dtype))[:, 0]


def random_vectors(num: int, dim: int, distribution: str, generator: Generator | None, like: Tensor) -> Tensor:
    """Columns drawn one after another as by `random_vector`, `[dim, num]`: two draws of one are one draw of two."""
    if distribution not in ("rademacher", "normal", "sphere"):
        raise ValueError(f"Unknown distribution {distribution!r}. Expected 'rademacher', 'normal' or 'sphere'.")
    signs = distribution == "rademacher"
    columns = like.new_empty(num, dim)
    for column in columns:  # each by a call of its own: what one call gives first depends on how much it gives
        if generator is None:
            column.bernoulli_(0.5).mul_(2).sub_(1) if signs else column.normal_()
        elif signs:
            column.copy_(2 * torch.randint(0, 2, (dim,), generator=generator, device=generator.device) - 1)
        else:
            column.copy_(standard_normal(1, dim, generator, like)[:, 0])
    if distribution == "sphere":
        columns *= sqrt(dim) / torch.linalg.vector_norm(columns, dim=1, keepdim=True)
    return columns.T


class Mean:
    """Mean and standard error of samples that come in blocks `[..., k]` (Chan, Golub, LeVeque 1983).

    Example:
        >>> mean = Mean(torch.tensor([1.0, 2.0]))
        >>> mean.update(torch.tensor([3.0]))
        >>> mean.value, mean.error
        (tensor(2.), tensor(0.5774))
    """

    def __init__(self, samples: Tensor) -> None:
        self.count, self.value = samples.shape[-1], samples.mean(-1)
        self.squares = (samples - self.value[..., None]).square().sum(-1)  # of the deviations from the mean

    def update(self, samples: Tensor) -> None:
        """Add a block."""
        new, total = Mean(samples), self.count + samples.shape[-1]
        delta = new.value - self.value
        self.squares = self.squares + new.squares + delta.square() * (self.count * new.count / total)
        self.value, self.count = self.value + delta * (new.count / total), total

    @property
    def error(self) -> Tensor:
        """The standard error of the mean."""
        return (self.squares / (self.count - 1)).sqrt() / sqrt(self.count)


def mean_of_draws(
    M: Matrix, num: int, distribution: str, generator: Generator | None, sample: Callable[[Tensor], Tensor]
) -> Mean:
    """The mean of what `sample` makes of blocks of random vectors, `[min(m, n), k] -> [..., k]`."""
    drawn = (random_vectors(size, min(M.shape), distribution, generator, M.zero) for size in M.blocks(num))
    mean = Mean(sample(next(drawn)))
    for V in drawn:
        mean.update(sample(V))
    return mean


def check_at_least(smallest: int, **numbers: int) -> None:
    """Refuse counts that are too small or no integers, by name."""
    for name, number in numbers.items():
        if whole(number) is None:
            raise TypeError(f"{name} ({number!r}) must be an integer.")
        if number < smallest:
            raise ValueError(f"{name} ({number}) must be at least {smallest}.")


def number_of_draws(num_matvecs: int, M: Matrix, return_error: bool, divisor: int = 1) -> int:
    """`num_matvecs / divisor`.

    Raises:
        TypeError: If it is no integer.
        ValueError: If there are none (for a standard error one), if they don't divide, or if the exact answer would
            cost no more.
    """
    check_at_least(1, num_matvecs=num_matvecs)
    if num_matvecs >= min(M.shape):
        raise ValueError(f"num_matvecs ({num_matvecs}) must be less than A's size {M.shape}: take the whole matrix.")
    if num_matvecs % divisor != 0:
        raise ValueError(f"num_matvecs ({num_matvecs}) must be divisible by {divisor}.")
    draws = num_matvecs // divisor
    check_draws(draws, return_error)
    return draws


def check_draws(draws: int, return_error: bool) -> None:
    """Refuse a standard error that would rest on a single draw."""
    if return_error and draws < 2:
        raise ValueError(f"A standard error needs at least two draws, got {draws}; take twice as many products.")
