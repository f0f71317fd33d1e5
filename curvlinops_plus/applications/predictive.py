"""Averages of predictions over normally distributed outputs.

For regression the predictive distribution is normal again. Class probabilities have no closed form,
and three approximations are usual.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.applications.output_covariance import Spread
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.likelihood.bce import BCEWithLogits
from curvlinops_plus.likelihood.cross_entropy import NLL, CrossEntropy
from curvlinops_plus.likelihood.elementwise import MSE, GaussianNLL
from curvlinops_plus.linalg.numerics import eigh, standard_normal

#: Likelihoods with a predictive distribution, and their links from outputs to class probabilities.
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


def needed_spread(likelihood: Likelihood, link: str) -> str:
    """Which part of the covariances between the numbers of a loss term is needed: "variances",
    "sums" of rows too, or all "covariances".

    Raises:
        ValueError: If the loss does not have this link.
        UnsupportedError: If it has no predictive distribution here.
    """
    links = LINKS.get(type(likelihood))
    if links is None:
        raise UnsupportedError(
            f"{likelihood.name} has no predictive distribution here; outputs(X) has their moments."
        )
    if not isinstance(link, str) or link not in links:
        raise ValueError(f"link={link!r}; {likelihood.name} has {', '.join(map(repr, links))}.")
    if link == "bridge":
        return "sums"
    return "covariances" if isinstance(likelihood, CrossEntropy) and link == "mc" else "variances"


def predictive(
    likelihood: Likelihood,
    link: str,
    mean: Tensor,
    spread: Spread,
    noise: Tensor | None,
    samples: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, ...]:
    """The predictive distribution of each loss term, [N, R, C]: class probabilities, or means and
    variances.

    Args:
        link: As `needed_spread` has accepted it.
        mean: Of the outputs, [N, R, C].
        spread: What is needed of their covariances.
        noise: Standard deviation of the observations, of `MSE`.
    """
    if isinstance(likelihood, MSE):
        assert noise is not None
        return Normal(mean, spread.variances + noise.to(mean) ** 2)
    if isinstance(likelihood, GaussianNLL):
        # The outputs are means and variances of observations.
        center, noise_variance = mean.chunk(2, -1)
        center_variance, _ = spread.variances.chunk(2, -1)
        return Normal(center, center_variance + noise_variance.clamp(min=likelihood.loss.eps))
    if link == "bridge":
        assert spread.sums is not None
        return (_bridge(mean, spread.variances, spread.sums),)
    if isinstance(likelihood, CrossEntropy):
        probabilities = partial(torch.softmax, dim=-1)
    else:
        probabilities = torch.sigmoid
    if link == "probit":
        return (probabilities(mean / (1 + math.pi / 8 * spread.variances).sqrt()),)
    # One row of draws for each number of the outputs, example by example: [N, R, C, samples].
    draws = standard_normal(samples, mean.numel(), generator, mean).view(*mean.shape, samples)
    if spread.covariances is None:
        deviations = spread.variances.sqrt()[..., None] * draws
    else:
        # S^½ z = Q √Λ z
        eigenvalues, Q = eigh(spread.covariances)
        deviations = Q @ (eigenvalues.clamp(min=0).sqrt()[..., None] * draws)
    return (probabilities((mean[..., None] + deviations).mT).mean(-2),)


def _bridge(mean: Tensor, variances: Tensor, row_sums: Tensor) -> Tensor:
    """Mean of the Dirichlet distribution whose Laplace approximation in the logits is N(m, S), of S
    the diagonal and the sums of rows.

    A constant that is added to all logits doesn't matter, so the normal distribution is conditioned
    on a sum of 0.

    Source: Hobbhahn, Kristiadi & Hennig 2022, "Fast predictive uncertainty for classification with
    Bayesian deep networks".
    """
    K = mean.shape[-1]
    tiny = torch.finfo(mean.dtype).tiny
    # m - S1 1ᵀm / 1ᵀS1 and the diagonal of S - S1 (S1)ᵀ / 1ᵀS1
    total = row_sums.sum(-1, keepdim=True).clamp(min=tiny)
    mean = mean - row_sums * mean.sum(-1, keepdim=True) / total
    variances = variances - row_sums.square() / total
    variances = variances.clamp(min=tiny)
    # α_k = (1 - 2/K + exp(m_k) / K² Σ_l exp(-m_l)) / S_kk, in logarithms.
    alpha = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(K)
    if K > 2:
        alpha = torch.logaddexp(alpha, torch.full_like(alpha, math.log(1 - 2 / K)))
    return (alpha - variances.log()).softmax(-1)
