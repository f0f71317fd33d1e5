"""The curvature of a negative log-likelihood, which is a sum over data, from that of a loss that may be a mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.blocks.fingerprint import Fingerprint, changed_parameters, fingerprint
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact import GGN
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.likelihood.mse import MSE
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.losses import loss_pass
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import untraced


@dataclass(frozen=True)
class SumOverData:
    """What turns a curvature into that of a sum over the data, and the sum itself.

    Attributes:
        count: What the curvature is multiplied by: 1 over the factor of the loss's reduction.
        loss: The sum of the un-reduced loss.
        numbers: How many numbers are observed, of `MSELoss`.
        parameters: Of the parameters that all of it belongs to.
    """

    likelihood: Likelihood
    count: float
    loss: float
    numbers: float
    parameters: Fingerprint

    @property
    def has_noise(self) -> bool:
        """Whether the variance of the observations is free."""
        return isinstance(self.likelihood, MSE)

    def starting_noise(self, noise: Any) -> Any:
        """The standard deviation that was given, or that of the residuals; None for losses without.

        Raises:
            ValueError: If one is given to a loss without, it is no positive number, or all residuals are zero.
        """
        if not self.has_noise:
            if noise is not None:
                raise ValueError(
                    f"noise={noise!r} is the standard deviation of observations around outputs, of MSELoss; "
                    f"{self.likelihood.name} has none: leave it out."
                )
            return None
        if noise is None:
            if not self.loss > 0:
                raise ValueError("All residuals are zero, so they don't tell the noise: give noise=....")
            return math.sqrt(self.loss / self.numbers)
        if torch.as_tensor(noise).ndim or not 0 < float(noise) < float("inf"):
            raise ValueError(f"noise is {noise!r}; expected one positive finite number, a standard deviation.")
        return noise

    def factor(self, noise: Any) -> Tensor:
        """What the curvature is multiplied by: that of `MSELoss` is of the squared error, twice `noise²` too large."""
        count = torch.tensor(self.count, dtype=torch.float64)
        return count / (2 * _double(noise) ** 2) if self.has_noise else count

    def log_likelihood(self, noise: Any) -> Tensor:
        """Minus the loss as a sum; of `MSELoss` the logarithm of normal densities."""
        if not self.has_noise:
            return torch.tensor(-self.loss, dtype=torch.float64)
        variance = _double(noise) ** 2
        return -(self.loss / variance + self.numbers * (2 * math.pi * variance).log()) / 2

    def require_unchanged(self, risk: EmpiricalRisk) -> None:
        """Refuse a model that was trained further."""
        if changed := changed_parameters(self.parameters, fingerprint(risk), 1e-12):
            raise ValueError(
                f"The parameters {changed[:3]} have changed since the curvature was computed; the posterior is that of "
                "the old ones. Compute the curvature and the Laplace approximation anew."
            )


def sum_over_data(K: Any) -> SumOverData:
    """What turns the curvature `K` into that of a sum over the data.

    Raises:
        TypeError: If `K` is not such a curvature.
        ValueError: If it is not that of the present parameters and of all data.
        UnsupportedError: If the loss has no likelihood, or there are several.
    """
    risk = _risk_of(K)
    if len(risk.losses) > 1 or not risk.losses.known:
        what = f"the {len(risk.losses)} losses" if len(risk.losses) > 1 else risk.losses[0].title
        raise UnsupportedError(
            f"Laplace needs the negative log-likelihood of the data as a sum, and for {what} it is not known what that "
            "is. Take one loss with a likelihood, such as CrossEntropyLoss or MSELoss, or register one for yours "
            "(@register_likelihood)."
        )
    (one,) = risk.losses
    if one.weight != 1:
        raise UnsupportedError(
            f"Laplace: {one.title} has the weight {one.weight:g}, and {one.weight:g} times a negative log-likelihood "
            "is none. Give it the weight 1; a prior_precision divided by the old weight has the same mode."
        )
    if isinstance(K, BlockwiseLinearOperator):
        _ = K.operator  # computed now, if it was not yet
    totals = _totals(risk)
    parameters = getattr(K, "parameters", None) or fingerprint(risk)
    examples = getattr(K, "examples", None)
    if examples is not None and examples != totals.examples:
        raise ValueError(
            f"K was computed from {examples} examples, and the data of its risk now have {totals.examples}. Laplace "
            "needs the curvature of all data: compute K from them, at the final parameters."
        )
    count = 1 / float(risk.scale(totals))
    likelihood = risk.losses[0].likelihood
    numbers = float(totals.counts[0]) if isinstance(likelihood, MSE) else 0.0
    found = SumOverData(likelihood, count, float(totals.losses[0]), numbers, parameters)
    found.require_unchanged(risk)
    return found


def _risk_of(K: Any) -> EmpiricalRisk:
    """The risk of a curvature that is one."""
    blockwise = isinstance(K, BlockwiseLinearOperator)
    if not blockwise and not isinstance(K, GGN):
        raise TypeError(
            f"Laplace takes the curvature of a risk, curvature(risk, ...) or GGN(risk), got a {type(K).__name__}: it "
            "doesn't tell model, loss and data. A matrix that was formed: give GGN(risk) itself, which is formed here. "
            "A part K[i, i]: Laplace(K, subnetwork=i). A Hessian may be indefinite: GGN(risk). A sum: the curvature of "
            "a risk with all data."
        )
    if blockwise and float(K.scale) != 1:
        raise ValueError(
            f"K is {float(K.scale):g} times a curvature. Laplace makes the sum over the data itself: give it K as "
            "curvature(risk, ...) returns it."
        )
    if not K.vectors.backward:
        raise UnsupportedError(
            f"K was made with {K.vectors!r}, which is not a curvature of the loss: a posterior needs Exact(), "
            "MonteCarlo() or Empirical()."
        )
    return K.risk


@untraced
def _totals(risk: EmpiricalRisk) -> Totals:
    """Loss and counts over all data."""
    with preserve_state(risk.model, risk.data):
        return risk.together("the loss over all data", lambda: loss_pass(risk)).plain()


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
