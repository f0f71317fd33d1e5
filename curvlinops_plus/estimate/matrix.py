"""A matrix as estimators see it, whatever library it comes from; random vectors, and means over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, cast, overload

import torch
from torch import Generator, Tensor
from tqdm.auto import tqdm

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import LinearOperator, Structure, from_scipy
from curvlinops_plus.linalg.arithmetic import Foreign
from curvlinops_plus.linalg.numerics import standard_normal
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.options import device_of, flag, instance, integer, random_generator

BLOCK_BYTES = 2**27  # of random vectors, and what is kept for each, at once
Arguments = ParamSpec("Arguments")
Form = Literal["a matrix", "square", "symmetric"]
#: Multiplies a matrix with columns, [n, K] -> [n, K].
ColumnMap: TypeAlias = Callable[[Tensor], Tensor]


class MatrixLike(Protocol):
    """An operator of this package, a 2-d tensor or NumPy array, a SciPy operator or sparse
    matrix.
    """

    @property
    def shape(self) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...


class Estimator(Protocol, Generic[Arguments]):
    """Signature of an estimator whose `return_error=True` makes it return `(estimate, standard
    error)`.
    """

    @overload
    def __call__(
        self, *args: Any, return_error: Literal[True], **options: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor: ...


def estimator(
    function: Callable[Arguments, Tensor | tuple[Tensor, Tensor]],
) -> Estimator[Arguments]:
    """Tell type checkers what `return_error` does; the function stays as it is."""
    return cast(Estimator[Arguments], function)


class Matrix:
    """An operator `[m, n]` and products with tensors `[n, K]`.

    `dtype` is what estimators compute in: float32 if the matrix itself is in half precision. `eps`
    is the relative rounding error of products.
    """

    def __init__(self, A: Any, form: Form) -> None:
        if not isinstance(A, (LinearOperator, Tensor)):
            computes_in_torch = isinstance(getattr(A, "dtype", None), torch.dtype)
            A = Foreign(A) if computes_in_torch else from_scipy(A)
        self.shape = tuple(A.shape)
        if len(self.shape) != 2 or (form != "a matrix" and self.shape[0] != self.shape[1]):
            raise ValueError(f"Operator must be {form}. Got shape {self.shape}.")
        if not A.dtype.is_floating_point:
            raise TypeError(f"Expected a matrix of real floating-point numbers, got {A.dtype}.")
        self.device = A.device
        self.dtype = torch.promote_types(A.dtype, torch.float32)
        self.eps = torch.finfo(A.dtype).eps
        #: A 0-d tensor of the dtype and device in which to compute.
        self.zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._A = A.to(self.dtype) if isinstance(A, Tensor) else A
        #: Counts products; `reset(total)` says how many there will be, where that is known.
        self.bar = tqdm(disable=True)

    def rounding(self, terms: int) -> float:
        """Relative rounding error of sums of so many terms in `dtype`, or of a product where that
        is larger.
        """
        return max(terms * torch.finfo(self.dtype).eps, self.eps)

    def matmat(self, X: Tensor) -> Tensor:  # [n, K] -> [m, K]
        """`A @ X`."""
        return self._product(self._A, X)

    def rmatmat(self, X: Tensor) -> Tensor:  # [m, K] -> [n, K]
        """`Aᵀ @ X`."""
        return self._product(self._A.T, X)

    def _product(self, A: Any, X: Tensor) -> Tensor:
        AX = (A @ X.to(A.dtype)).to(self.dtype)
        self.bar.update(X.shape[1])
        if not torch.isfinite(AX).all():
            raise NumericsError(
                "A product with A has NaN or infinite entries; look for them in the model and data."
            )
        return AX

    def for_singular_values(self) -> tuple[ColumnMap, float]:
        """A symmetric product, and the power that makes its absolute eigenvalues singular values of
        `A`.
        """
        m, n = self.shape
        if self.asymmetry() <= 100 * self.eps:
            return self.matmat, 1.0
        if m >= n:
            return lambda X: self.rmatmat(self.matmat(X)), 0.5
        return lambda X: self.matmat(self.rmatmat(X)), 0.5

    @torch.no_grad()
    def asymmetry(self) -> float:
        """`|uᵀAv - vᵀAu|` for two random vectors, relative to `|Av|`; 0 if the matrix says that it
        is symmetric.
        """
        m, n = self.shape
        if m != n:
            return 1.0
        if getattr(self._A, "structure", Structure.GENERAL) >= Structure.SYMMETRIC:
            return 0.0
        V = random_vectors(2, n, "normal", Generator().manual_seed(0), self.zero)
        AV = self.matmat(V).double()
        H = V.double().T @ AV
        length = float(torch.linalg.vector_norm(AV, dim=0).max())
        return float((H[0, 1] - H[1, 0]).abs()) / length if length else 0.0

    def draws(
        self, num: int, distribution: str, generator: Generator | None, copies: int
    ) -> Iterator[Tensor]:
        """Random vectors in blocks `[min(m, n), k]`, with memory for so many copies of each; in one
        block if 0.
        """
        block = num
        if copies:
            vector_bytes = max(self.shape) * self.zero.element_size()
            block = max(1, BLOCK_BYTES // (vector_bytes * copies))
        for start in range(0, num, block):
            size = min(block, num - start)
            yield random_vectors(size, min(self.shape), distribution, generator, self.zero)


@contextmanager
def multiplying(A: Any, form: Form = "square", progressbar: bool = False) -> Iterator[Matrix]:
    """The matrix, outside of autocast.

    Args:
        progressbar: Whether to show a bar that counts products with vectors.

    Raises:
        NumericsError: Inside, if a product is NaN or infinite.
        TypeError: If `A` is no matrix of real floating-point numbers.
        ValueError: If it does not have this form.
    """
    flag("progressbar", progressbar)
    M = Matrix(A, form)
    with full_precision(M.device.type), tqdm(desc="products", disable=not progressbar) as bar:
        asymmetry = M.asymmetry() if form == "symmetric" else 0.0
        if asymmetry > M.eps**0.5:
            raise ValueError(
                f"A is not symmetric: for random u and v, uᵀAv and vᵀAu differ by {asymmetry:.1e} "
                "|Av|. Take `(A + A.T) / 2`, or look for randomness such as dropout."
            )
        M.bar = bar
        yield M


def random_vector(
    dim: int,
    distribution: str = "rademacher",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: Generator | None = None,
) -> Tensor:
    """A vector [dim] with independent entries of mean 0 and variance 1, as the estimators draw
    them, one per product.

    Args:
        dim: Number of entries.
        distribution: "rademacher" (random signs), "normal", or "sphere" (length √dim).
        device: Where the vector is put.
        dtype: Of the vector.
        generator: With a generator, the draw depends on nothing else, also not on `device` and
            `dtype`. By default the numbers are those of `Tensor.bernoulli_` and `torch.randn` from
            the global generator of the device.

    Raises:
        ValueError: If the distribution is unknown.

    Example:
        >>> random_vector(3, generator=torch.Generator().manual_seed(0)).square()
        tensor([1., 1., 1.])
    """
    if not isinstance(distribution, str) or distribution not in ("rademacher", "normal", "sphere"):
        raise ValueError(
            f"Unknown distribution {distribution!r}. Expected 'rademacher', 'normal' or 'sphere'."
        )
    dim = integer("dim", dim, low=0)
    device = device_of("device", device)
    instance("dtype", dtype, torch.dtype, "one of PyTorch, as torch.float64")
    random_generator(generator)
    v = torch.empty(dim, device=device, dtype=dtype)
    if distribution == "rademacher":
        if generator is None:
            return v.bernoulli_(0.5).mul_(2).sub_(1)
        bits = torch.randint(0, 2, (dim,), generator=generator, device=generator.device)
        return v.copy_(2 * bits - 1)
    v = v.normal_() if generator is None else standard_normal(1, dim, generator, v)[:, 0]
    if distribution == "sphere":
        v = v * (sqrt(dim) / torch.linalg.vector_norm(v))
    return v


def random_vectors(
    num: int, dim: int, distribution: str, generator: Generator | None, zero: Tensor
) -> Tensor:
    """Columns drawn one after another as by `random_vector`, `[dim, num]`: two draws of one are one
    draw of two.
    """
    v = partial(random_vector, dim, distribution, zero.device, zero.dtype, generator)
    return torch.stack([v() for _ in range(num)]).T


def mean_of_draws(
    M: Matrix,
    num: int,
    distribution: str,
    generator: Generator | None,
    sample: ColumnMap,
    copies: int = 1,
) -> tuple[Tensor, Tensor]:
    """Mean and standard error of what `sample` makes of blocks of random vectors, `[min(m, n), k]
    -> [..., k']`.

    The error of a single sample is NaN. Blocks are added as by Chan, Golub, LeVeque 1983.
    """
    mean = squares = torch.zeros((), dtype=torch.float32, device="cpu")
    count = 0
    for V in M.draws(num, distribution, generator, copies):
        samples = sample(V)
        k = samples.shape[-1]
        block_mean = samples.mean(-1)
        step = block_mean - mean
        # `squares` is the sum of the squared deviations from the mean of all samples so far.
        between = step.square() * (count * k / (count + k))
        squares = squares + (samples - block_mean[..., None]).square().sum(-1) + between
        count += k
        mean = mean + step * (k / count)
    return mean, (squares / (count - 1)).sqrt() / sqrt(count)
