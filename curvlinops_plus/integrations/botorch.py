"""A model for BoTorch: a network with a Laplace approximation as the surrogate of Bayesian
optimization.

The posterior over outputs is that of `Laplace.joint`, differentiable in the inputs, so that all
acquisition functions of BoTorch can be optimized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.elementwise import MSE
from curvlinops_plus.options import integer

if TYPE_CHECKING:
    Model = object
    GPyTorchPosterior: Any = None
    MultivariateNormal: Any = None
    MultitaskMultivariateNormal: Any = None
else:
    try:
        from botorch.models.model import Model
        from botorch.posteriors import GPyTorchPosterior
        from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    except ImportError:  # the module can be read without
        Model = object


class LaplaceModel(Model):
    """A `Laplace` approximation of a regression network as a model of BoTorch.

    Args:
        la: The approximation, `Laplace(K)`, of a loss `MSELoss`.
        num_outputs: How many numbers the network returns.

    Raises:
        ImportError: If BoTorch is not installed.
        UnsupportedError: If the loss is another one.

    Cost of a posterior for `[*batch, q, d]`: derivatives of all outputs; with q > 1 one set of
    inputs after the other.

    Example:
        >>> from botorch.acquisition import LogExpectedImprovement  # doctest: +SKIP
        >>> acquisition = LogExpectedImprovement(LaplaceModel(la), best_f)  # doctest: +SKIP
    """

    def __init__(self, la: Any, num_outputs: int = 1) -> None:
        if Model is object:
            raise ImportError("LaplaceModel needs BoTorch: pip install botorch.")
        super().__init__()
        if not isinstance(la.likelihood, MSE):
            raise UnsupportedError(
                f"BoTorch's models predict numbers, and {la.likelihood.name} has none: train with "
                "MSELoss."
            )
        self.la = la
        self._num_outputs = integer("num_outputs", num_outputs, low=1)

    @property
    def num_outputs(self) -> int:
        """How many numbers are predicted."""
        return self._num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """There is one model."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The normal distribution of outputs for inputs `[*batch, q, d]`, jointly for each q.

        Args:
            X: The inputs.
            output_indices: Which outputs; default: all.
            observation_noise: Whether the noise of observations is added.
            posterior_transform: Applied to the result.
        """
        *batch, q, d = X.shape
        mean, covariance = self._moments(X.reshape(-1, q, d))
        if output_indices is not None:
            mean = mean[..., output_indices]
            covariance = covariance[:, :, output_indices][..., output_indices]
        C = mean.shape[-1]
        covariance = covariance.reshape(*batch, q * C, q * C)
        if observation_noise is not False:
            noise = torch.as_tensor(self.la.noise, dtype=torch.float64).to(covariance) ** 2
            covariance = covariance + noise * torch.eye(q * C).to(covariance)
        if C == 1:
            distribution = MultivariateNormal(mean.reshape(*batch, q), covariance)
        else:
            distribution = MultitaskMultivariateNormal(mean.reshape(*batch, q, C), covariance)
        posterior = GPyTorchPosterior(distribution)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, q, C] and covariance [B, q, C, q, C] for inputs [B, q, d]."""
        if X.shape[1] == 1:
            mean, covariance = self.la.outputs(X[:, 0])
            return mean[:, None], covariance[:, None, :, None]
        means, covariances = zip(*[self.la.joint(x) for x in X])
        return torch.stack(means), torch.stack(covariances)
