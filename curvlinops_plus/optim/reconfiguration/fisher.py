"""`S`, the covariance of log-derivatives, as a linear operator on vectors like the parameters."""

from __future__ import annotations

from collections.abc import Mapping
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


class CenteredFisherLinearOperator(LinearOperator):
    """`S = Cov(∇ log|ψ|)`, the covariance of log-derivatives over samples; also called quantum geometric tensor.

    With `p = |ψ|²/Z` the score is `2 (O - ⟨O⟩)`, so that `S` is ¼ of the Fisher matrix of `p`; for `log ψ = log p` (any
    log-density with samples from it) `S` is the Fisher matrix itself. Adding a function of the parameters alone to
    `log ψ` changes nothing: normalisation does not matter.

    It multiplies tensors like the parameters, lists and dicts of complex tensors included; as a flat vector a
    complex parameter is `torch.view_as_real` of it, real and imaginary parts in turn. For a holomorphic amplitude that
    is the complex matrix `S = Cov(O*, O)` on complex vectors; for a complex one its real part, `Re⟨O* O⟩ - …`.

    The matrix is that of the parameters' values when it was made.

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
        UnsupportedError: If `log ψ` is random, mixes samples, or has a backward pass that is not linear.

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
        if not isinstance(X, (Mapping, list, tuple)):
            return super().__matmul__(X)
        named = isinstance(X, Mapping)
        items = dict(X) if named else dict(enumerate(X))
        if not any(isinstance(t, Tensor) and t.is_complex() for t in items.values()):
            return super().__matmul__(X)
        params = self.scores.ensemble.psi.params
        # Number of axes of each complex parameter.
        ndim = {key: p.ndim for key, p in (params.items() if named else enumerate(params.values())) if p.is_complex()}
        real = {key: _split_complex(t, ndim.get(key)) for key, t in items.items()}
        Y = super().__matmul__(real if named else type(X)(real.values()))
        result = {key: _join_complex(t, ndim.get(key)) for key, t in (Y.items() if named else enumerate(Y))}
        return result if named else type(X)(result.values())

    def _to_dense(self) -> Tensor:
        with full_precision_no_grad(self.device):
            return self.scores.covariance()

    def diagonal(self) -> Tensor:
        with full_precision_no_grad(self.device):
            return self.scores.variances()

    @property
    def trace(self) -> Tensor:
        return self.diagonal().sum()


def _split_complex(t: Tensor, ndim: int | None) -> Tensor:  # complex [*s, K] -> [*s, 2, K]
    return t if ndim is None or not t.is_complex() else as_real(t).movedim(-1, ndim)


def _join_complex(t: Tensor, ndim: int | None) -> Tensor:  # [*s, 2, K] -> complex [*s, K]
    return t if ndim is None else torch.view_as_complex(t.movedim(ndim, -1).contiguous())
