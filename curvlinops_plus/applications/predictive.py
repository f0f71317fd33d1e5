"""Averages of predictions over normally distributed outputs.

The outputs `f` of a loss term are normal, with mean `m` and covariance `S`. For regression the predictive distribution
is normal again. Class probabilities have no closed form, and three approximations are usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.likelihood.bce import BCEWithLogits
from curvlinops_plus.likelihood.cross_entropy import NLL, CrossEntropy
from curvlinops_plus.likelihood.gaussian import GaussianNLL
from curvlinops_plus.likelihood.mse import MSE
from curvlinops_plus.linalg.eigendecomposition import eigh
from curvlinops_plus.linalg.numerics import standard_normal

#: What has a predictive distribution here, and by which links from outputs to class probabilities.
LINKS: dict[type[Likelihood], tuple[str, ...]] = {
    CrossEntropy: ("probit", "mc", "bridge"),
    NLL: ("probit", "mc", "bridge"),
    BCEWithLogits: ("probit", "mc"),
    MSE: ("probit",),
    GaussianNLL: ("probit",),
}


class Normal(NamedTuple):
    """A normal distribution of each number of a prediction.

    Attributes:
        mean: Its mean.
        variance: Its variance.
    """

    mean: Tensor
    variance: Tensor


def needs_covariance(likelihood: Likelihood, link: str) -> bool:
    """Whether covariances between the numbers of a loss term are needed, or variances alone.

    Raises:
        ValueError: If the loss does not have this link.
        UnsupportedError: If it has no predictive distribution here.
    """
    links = LINKS.get(type(likelihood))
    if links is None:
        raise UnsupportedError(
            f"{likelihood.name} has no predictive distribution here: there are those of CrossEntropyLoss, "
            "BCEWithLogitsLoss, MSELoss and GaussianNLLLoss. `outputs(X)` gives mean and covariance of the model's "
            "outputs."
        )
    if link not in links:
        raise ValueError(f"link={link!r}; {likelihood.name} has {', '.join(map(repr, links))}.")
    return isinstance(likelihood, CrossEntropy) and link != "probit"


def predictive(
    likelihood: Likelihood,
    link: str,
    mean: Tensor,
    spread: Tensor,
    noise: Tensor | None,
    samples: int,
    generator: torch.Generator | None,
) -> Tensor | Normal:
    """The predictive distribution of each loss term, [N, R, C].

    Args:
        link: As `needs_covariance` has accepted it.
        mean: Of the outputs, [N, R, C].
        spread: Their variances, or covariances if these are needed.
        noise: Standard deviation of the observations, of `MSE`.
    """
    if isinstance(likelihood, MSE):
        assert noise is not None
        return Normal(mean, spread + noise.to(mean) ** 2)
    if isinstance(likelihood, GaussianNLL):
        (m, s), v = mean.chunk(2, -1), spread.chunk(2, -1)[0]
        return Normal(m, v + s.clamp(min=likelihood.loss.eps))
    average: Callable[[Tensor], Tensor] = torch.sigmoid
    if isinstance(likelihood, CrossEntropy):
        average = lambda f: f.softmax(-1)  # noqa: E731
    if link == "probit":
        variances = spread if spread.ndim == 3 else spread.diagonal(dim1=-2, dim2=-1)
        return average(mean / (1 + math.pi / 8 * variances).sqrt())
    if link == "bridge":
        return _bridge(mean, spread)
    return _sampled(average, mean, spread, samples, generator)


def _sampled(
    average: Callable[[Tensor], Tensor], mean: Tensor, spread: Tensor, samples: int, generator: torch.Generator | None
) -> Tensor:
    """The mean over draws, which come example by example."""
    normal = standard_normal(samples, mean.numel(), generator, mean).view(*mean.shape, samples)
    if spread.ndim == mean.ndim:
        deviations = spread.sqrt()[..., None] * normal
    else:
        values, Q = eigh(spread)
        deviations = Q @ (values.clamp(min=0).sqrt()[..., None] * normal)
    return average((mean[..., None] + deviations).mT).mean(-2)


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet distribution whose Laplace approximation in the logits is N(m, S).

    A constant that is added to all logits doesn't matter, so the normal distribution is conditioned on a sum of 0.

    Source: Hobbhahn, Kristiadi & Hennig 2022, "Fast predictive uncertainty for classification with Bayesian deep
    networks".
    """
    K, rows = mean.shape[-1], covariance.sum(-1)
    total = rows.sum(-1, keepdim=True).clamp(min=torch.finfo(mean.dtype).tiny)
    mean = mean - rows * mean.sum(-1, keepdim=True) / total
    variances = (covariance.diagonal(dim1=-2, dim2=-1) - rows.square() / total).clamp(min=torch.finfo(mean.dtype).tiny)
    # α_k = (1 - 2/K + exp(m_k) / K² Σ_l exp(-m_l)) / S_kk, in logarithms.
    alpha = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(K)
    if K > 2:
        alpha = torch.logaddexp(alpha, torch.full_like(alpha, math.log(1 - 2 / K)))
    return (alpha - variances.log()).softmax(-1)
