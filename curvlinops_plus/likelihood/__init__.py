"""Likelihoods: a loss with respect to the model's output, its Hessian, roots of it, and Monte-Carlo
vectors.

All losses share one format: an output `F [N, R, C]` of `N` examples with `R` loss terms of `C`
numbers each, and a target `Y` that begins with the same axes. `likelihood_of(loss)` finds the
likelihood of a PyTorch loss, `register_likelihood` adds one, and `FromDistribution` builds one from
a `torch.distributions` object.
"""

from __future__ import annotations

from curvlinops_plus.likelihood.bce import BCE, BCEWithLogits
from curvlinops_plus.likelihood.cross_entropy import NLL, CrossEntropy
from curvlinops_plus.likelihood.distribution import FromDistribution
from curvlinops_plus.likelihood.elementwise import MSE, DiagonalLikelihood, GaussianNLL, PoissonNLL
from curvlinops_plus.likelihood.likelihood import (
    Likelihood,
    has_likelihood,
    likelihood_of,
    rebuild_loss,
    register_likelihood,
)

__all__ = [
    "BCE",
    "MSE",
    "NLL",
    "BCEWithLogits",
    "CrossEntropy",
    "DiagonalLikelihood",
    "FromDistribution",
    "GaussianNLL",
    "Likelihood",
    "PoissonNLL",
    "has_likelihood",
    "likelihood_of",
    "rebuild_loss",
    "register_likelihood",
]
