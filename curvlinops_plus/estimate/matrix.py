"""A matrix as estimators see it, whatever library it comes from; random vectors, means over them;
Lanczos iterations.

For a vector `v` of length 1, `steps` products give nodes `θ` and weights `w` with `vᵀ f(A) v ≈ Σ w
f(θ)`, exact for polynomials `f` up to degree `2 steps - 1` (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, cast, overload

import torch
from torch import Generator, Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import LinearOperator, Structure, from_scipy
from curvlinops_plus.linalg.numerics import standard_normal
from curvlinops_plus.linalg.arithmetic import Foreign

BLOCK_BYTES = 2**27  # of random vectors, and what is kept for each, at once
P = ParamSpec("P")
Kind = Literal["a matrix", "square", "symmetric"]
#: Multiplies a matrix with columns, [n, K] -> [n, K].
Product: TypeAlias = Callable[[Tensor], Tensor]


class MatrixLike(Protocol):
    """An operator of this package, a 2-d tensor or NumPy array, a SciPy operator or sparse
    matrix.
    """

    @property
    def shape(self) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...


class Estimator(Protocol, Generic[P]):
    """Signature of an estimator whose `return_error=True` makes it return `(estimate, standard
    error)`.
    """

    @overload
    def __call__(
        self, *args: Any, return_error: Literal[True], **options: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...


def estimator(function: Callable[P, Tensor | tuple[Tensor, Tensor]]) -> Estimator[P]:
    """Tell type checkers what `return_error` does; the function stays as it is."""
    return cast(Estimator[P], function)


class Matrix:
    """An operator `[m, n]` and products with tensors `[n, K]`.

    `dtype` is what estimators compute in: float32 if the matrix itself is in half precision. `eps`
    is the relative rounding error of products.
    """

    def __init__(self, A: Any, kind: Kind) -> None:
        if not isinstance(A, (LinearOperator, Tensor)):
            A = Foreign(A) if isinstance(getattr(A, "dtype", None), torch.dtype) else from_scipy(A)
        self.shape, self.device = tuple(A.shape), A.device
        if len(self.shape) != 2 or (kind != "a matrix" and self.shape[0] != self.shape[1]):
            raise ValueError(f"Operator must be {kind}. Got shape {self.shape}.")
        if not A.dtype.is_floating_point:
            raise TypeError(f"Expected a matrix of real floating-point numbers, got {A.dtype}.")
        self.dtype, self.eps = torch.promote_types(A.dtype, torch.float32), torch.finfo(A.dtype).eps
        #: A 0-d tensor of the dtype and device in which to compute.
        self.zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._A = A.to(self.dtype) if isinstance(A, Tensor) else A

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
        found = (A @ X.to(A.dtype)).to(self.dtype)
        if not torch.isfinite(found).all():
            raise NumericsError(
                "A product with A has NaN or infinite entries; look for them in the model and data."
            )
        return found

    def for_singular_values(self) -> tuple[Product, float]:
        """A symmetric product, and the power that makes its absolute eigenvalues singular values of
        `A`.
        """
        if self.asymmetry() <= 100 * self.eps:
            return self.matmat, 1.0
        first, then = (
            (self.matmat, self.rmatmat)
            if self.shape[0] >= self.shape[1]
            else (self.rmatmat, self.matmat)
        )
        return lambda X: then(first(X)), 0.5

    @torch.no_grad()
    def asymmetry(self) -> float:
        """`|uᵀAv - vᵀAu|` for two random vectors, relative to `|Av|`; 0 if the matrix says that it
        is symmetric.
        """
        if self.shape[0] != self.shape[1]:
            return 1.0
        if getattr(self._A, "structure", Structure.GENERAL) >= Structure.SYMMETRIC:
            return 0.0
        V = random_vectors(2, self.shape[0], "normal", Generator().manual_seed(0), self.zero)
        AV = self.matmat(V).double()
        H, size = V.double().T @ AV, float(torch.linalg.vector_norm(AV, dim=0).max())
        return float((H[0, 1] - H[1, 0]).abs()) / size if size else 0.0

    def draws(
        self, num: int, distribution: str, generator: Generator | None, copies: int
    ) -> Iterator[Tensor]:
        """Random vectors in blocks `[min(m, n), k]`, with memory for so many copies of each; in one
        block if 0.
        """
        size = (
            max(1, BLOCK_BYTES // (max(self.shape) * self.zero.element_size() * copies))
            if copies
            else num
        )
        for start in range(0, num, size):
            yield random_vectors(
                min(size, num - start), min(self.shape), distribution, generator, self.zero
            )


@contextmanager
def multiplying(A: Any, kind: Kind = "square") -> Iterator[Matrix]:
    """The matrix, outside of autocast.

    Raises:
        NumericsError: Inside, if a product is NaN or infinite.
        TypeError: If `A` is no matrix of real floating-point numbers.
        ValueError: If it is not of this kind.
    """
    M = Matrix(A, kind)
    with torch.autocast(M.device.type, enabled=False):
        if kind == "symmetric" and (difference := M.asymmetry()) > M.eps**0.5:
            words = (
                f"A is not symmetric: for random u and v, uᵀAv and vᵀAu differ by {difference:.1e} "
                "|Av|"
            )
            raise ValueError(
                f"{words}. Take `(A + A.T) / 2`, or look for randomness such as dropout."
            )
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
    if distribution not in ("rademacher", "normal", "sphere"):
        raise ValueError(
            f"Unknown distribution {distribution!r}. Expected 'rademacher', 'normal' or 'sphere'."
        )
    signs, v = distribution == "rademacher", torch.empty(dim, device=device, dtype=dtype)
    if generator is None:
        v = v.bernoulli_(0.5).mul_(2).sub_(1) if signs else v.normal_()
    elif signs:
        v.copy_(2 * torch.randint(0, 2, (dim,), generator=generator, device=generator.device) - 1)
    else:
        v = standard_normal(1, dim, generator, v)[:, 0]
    return v * (sqrt(dim) / torch.linalg.vector_norm(v)) if distribution == "sphere" else v


def random_vectors(
    num: int, dim: int, distribution: str, generator: Generator | None, like: Tensor
) -> Tensor:
    """Columns drawn one after another as by `random_vector`, `[dim, num]`: two draws of one are one
    draw of two.
    """
    draws = [
        random_vector(dim, distribution, like.device, like.dtype, generator) for _ in range(num)
    ]
    return torch.stack(draws).T


def mean_of_draws(
    M: Matrix,
    num: int,
    distribution: str,
    generator: Generator | None,
    sample: Product,
    copies: int = 1,
) -> tuple[Tensor, Tensor]:
    """Mean and standard error of what `sample` makes of blocks of random vectors, `[min(m, n), k]
    -> [..., k']`.

    The error of a single sample is NaN. Blocks are added as by Chan, Golub, LeVeque 1983.
    """
    mean = squares = torch.zeros((), dtype=torch.float32)  # squares of the deviations from the mean
    count = 0
    for V in M.draws(num, distribution, generator, copies):
        samples = sample(V)
        k, new = samples.shape[-1], samples.mean(-1)
        delta = new - mean
        squares = (
            squares
            + (samples - new[..., None]).square().sum(-1)
            + delta.square() * (count * k / (count + k))
        )
        mean, count = mean + delta * (k / (count + k)), count + k
    return mean, (squares / (count - 1)).sqrt() / sqrt(count)


@torch.no_grad()
def lanczos(
    product: Product, V: Tensor, steps: int, *, reorthogonalize: bool
) -> tuple[Tensor, Tensor]:
    """Tridiagonalize a symmetric matrix on the Krylov space of every column of `V`.

    Args:
        product: With the matrix, `[n, K] -> [n, K]`.
        V: Starting vectors `[n, K]`; their lengths don't matter.
        steps: How many, at most `n`.
        reorthogonalize: Keep the vectors of all steps and make each new one orthogonal to them.
            Otherwise only two are kept; rounding then repeats eigenvalues that were found, with
            their weight shared among the copies.

    Returns:
        The diagonals `[K, steps]`, and the numbers next to them with, as the last, the length of
        what was left: 0 from where a vector's Krylov space ended. In float64 on the CPU.

    Cost: `steps` products with `K` columns each; memory of `K` times 4 vectors, or `steps + 4`.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        >>> nodes, weights = quadrature(*lanczos(A.matmul, torch.ones(3, 1), 3, reorthogonalize=True))
        >>> nodes.round(decimals=3), (weights * 3).round(decimals=3)
        (tensor([[1., 2., 4.]], dtype=torch.float64), tensor([[1., 1., 1.]], dtype=torch.float64))
    """
    n, K = V.shape
    V = V / torch.linalg.vector_norm(V, dim=0)
    before, beta = torch.zeros_like(V), torch.zeros(K, dtype=V.dtype, device=V.device)
    basis = torch.empty((K, steps if reorthogonalize else 0, n), dtype=V.dtype, device=V.device)
    alive, scale = torch.ones_like(beta, dtype=torch.bool), torch.zeros_like(beta)
    alphas, betas = [], []
    for step in range(steps):
        W = product(V) - beta * before  # before the next line: the stable order (Paige 1976)
        alpha = (V * W).sum(0)
        # A space that has ended goes on with zeros; their node, with weight 0, stays among the
        # eigenvalues.
        alphas.append(torch.where(alive, alpha, alphas[0] if alphas else alpha))
        W = W - alpha * V
        if reorthogonalize:
            basis[:, step] = V.T
            for _ in range(2):  # twice is enough (Giraud, Langou, Rozložník 2005)
                known = basis[:, : step + 1]
                W = W - (known.mT @ (known @ W.T[..., None]))[..., 0].T
        size = torch.linalg.vector_norm(W, dim=0)
        scale = torch.maximum(scale, alpha.abs() + beta)
        alive = alive & (size > 100 * torch.finfo(V.dtype).eps * scale)
        beta = torch.where(alive, size, torch.zeros_like(size))
        before, V = V, torch.where(alive, W / size, torch.zeros_like(W))
        betas.append(beta)
    return torch.stack(alphas, 1).to("cpu", torch.float64), torch.stack(betas, 1).to(
        "cpu", torch.float64
    )


def quadrature(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights, `[K, steps]` each, of what `lanczos` returns; weights sum to 1."""
    beta = beta[:, :-1]
    T = (
        torch.diag_embed(alpha)
        + torch.diag_embed(beta, offset=1)
        + torch.diag_embed(beta, offset=-1)
    )
    nodes, vectors = torch.linalg.eigh(T)
    return nodes, vectors[:, 0].square()
