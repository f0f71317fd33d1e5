"""`S`, the covariance of log-derivatives, as a linear operator on the space of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg import LinearOperator, Structure
from curvlinops_plus.optim.reconfiguration.amplitude import (
    Amplitude,
    LogAmplitude,
    LogPsi,
    Params,
    as_real,
    full_precision_no_grad,
)
from curvlinops_plus.optim.reconfiguration.ensemble import Ensemble
from curvlinops_plus.optim.reconfiguration.scores import MatrixFreeScores, StoredScores

__all__ = ["CenteredFisherLinearOperator"]


class CenteredFisherLinearOperator(LinearOperator):
    """`S = Cov(∇ log|ψ|)`, the covariance of log-derivatives over samples; also called quantum geometric tensor.

    With `p = |ψ|²/Z` the score is `2 (O - ⟨O⟩)`, so that `S` is ¼ of the Fisher matrix of `p`; for `log ψ = log p` (any
    log-density with samples from it) `S` is the Fisher matrix itself. Adding a function of the parameters alone to
    `log ψ` changes nothing: normalisation does not matter.

    It multiplies lists and dicts of tensors like the parameters, including complex ones; as a flat vector a
    complex parameter is `torch.view_as_real` of it, real and imaginary parts in turn. For a holomorphic amplitude that
    is the complex matrix `S = Cov(O*, O)` on complex vectors; for a complex one its real part, `Re⟨O* O⟩ - …`.

    The matrix belongs to the parameters' values at construction.

    Args:
        log_psi: A module called with the samples, or a function `(params, samples)`; returns `log ψ` of each, `[n]`.
        params: Parameters, a list or a dict; of a module its own, None for all that require a gradient.
        samples: `[n, ...]`, or a tuple, list or dict of such tensors; drawn from |ψ|², or with `weights`.
        weights: Weights `[n]` of the samples, for instance |ψ|²/q for samples from q, or |ψ|² of an enumeration;
            divided by their sum.
        chunk_size: How many samples are differentiated at once; None: all. Does not change the result.
        amplitude: "real", "complex" or "holomorphic", see `LogAmplitude`.
        stored: Keep all derivatives, n·P numbers (twice that if complex): each product is then two matrix products.

    Raises:
        ValueError: If arguments do not fit each other, or fewer than two samples count.
        NumericsError: If `log ψ` or its derivatives are NaN or infinite; names the samples.
        UnsupportedError: If `log ψ` is random, or mixes samples.

    Cost: one forward pass to make it. A product with one vector takes three backward passes, and with chunks two
        forward passes more; without chunks the graph of one forward pass stays in memory. Stored, one backward pass per
        sample once, and two matrix products each time.

    Source: Amari 1998, "Natural gradient works efficiently in learning"; Sorella 1998, arXiv cond-mat/9803107.

    Example:
        >>> psi = lambda params, x: -(x - params[0]) ** 2 / 4  # log ψ of a normal distribution with variance 1
        >>> x = torch.tensor([-1.0, 1.0, 3.0])
        >>> S = CenteredFisherLinearOperator(psi, [torch.zeros(())], x)
        >>> S @ [torch.tensor(1.0)]  # the variance of x/2
        [tensor(0.6667)]
    """

    def __init__(
        self,
        log_psi: LogPsi,
        params: Params,
        samples: Any,
        weights: Any = None,
        chunk_size: int | None = None,
        amplitude: Amplitude = "real",
        *,
        stored: bool = False,
    ) -> None:
        psi = LogAmplitude(log_psi, params, amplitude)
        with full_precision_no_grad(psi.device):
            ensemble = Ensemble(psi, samples, weights, chunk_size)
            self._set(StoredScores(ensemble) if stored else MatrixFreeScores(ensemble))

    @classmethod
    def of(cls, scores: LinearOperator) -> CenteredFisherLinearOperator:
        """`Ōᵀ Ō` of an operator `Ō`."""
        self = cls.__new__(cls)
        self._set(scores)
        return self

    def _set(self, scores: Any) -> None:
        super().__init__(scores.in_space, scores.dtype, scores.device, Structure.PSD)
        self.scores = scores

    def _matmat(self, X: Tensor) -> Tensor:
        return self.scores._rmatmat(self.scores._matmat(X))

    def __matmul__(self, X: Any) -> Any:
        """`S @ X`; also lists and dicts of complex tensors."""
        if isinstance(X, Mapping):
            return self._times_named(dict(X)) if _any_complex(X.values()) else super().__matmul__(X)
        if isinstance(X, (list, tuple)) and _any_complex(X):
            names = self.in_space.names
            if len(X) != len(names):
                return super().__matmul__(X)  # raises with the numbers of tensors
            product = self._times_named(dict(zip(names, X)))
            return type(X)(product[name] for name in names)
        return super().__matmul__(X)

    def _times_named(self, X: dict[str, Tensor]) -> dict[str, Tensor]:
        """Some tensors of `X` are complex: [*s, K] is the real [*s, 2, K]."""
        params = self.scores.ensemble.psi.params
        axes = {name: p.ndim for name, p in params.items() if p.is_complex()}
        real = {k: as_real(t).movedim(-1, axes[k]) if k in axes and t.is_complex() else t for k, t in X.items()}
        return {
            k: torch.view_as_complex(t.movedim(axes[k], -1).contiguous()) if k in axes else t
            for k, t in super().__matmul__(real).items()
        }

    def _to_dense(self) -> Tensor:
        with full_precision_no_grad(self.device):
            return self.scores.covariance()

    def diagonal(self) -> Tensor:
        with full_precision_no_grad(self.device):
            return self.scores.variances()

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()


def _any_complex(tensors: Iterable[Any]) -> bool:
    return any(isinstance(t, Tensor) and t.is_complex() for t in tensors)
