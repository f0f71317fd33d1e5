"""The losses of PyTorch that are supported with all their options, and their construction from saved options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.bce import BCE, BCEWithLogits
from curvlinops_plus.likelihood.cross_entropy import NLL, CrossEntropy
from curvlinops_plus.likelihood.gaussian import GaussianNLL
from curvlinops_plus.likelihood.likelihood import Likelihood
from curvlinops_plus.likelihood.mse import MSE
from curvlinops_plus.likelihood.poisson import PoissonNLL

BUILTIN: tuple[type[Likelihood], ...] = (MSE, CrossEntropy, NLL, BCEWithLogits, BCE, GaussianNLL, PoissonNLL)


def rebuild_loss(options: Mapping[str, Any]) -> nn.Module:
    """The loss that `Likelihood.options()` describes.

    Raises:
        UnsupportedError: If the loss is not one of the supported losses of PyTorch.

    Example:
        >>> from curvlinops_plus.likelihood import likelihood_of
        >>> rebuild_loss(likelihood_of(nn.CrossEntropyLoss(label_smoothing=0.1)).options()).label_smoothing
        0.1
    """
    name = options["loss"]
    losses = {rules.loss_type.__name__: rules.loss_type for rules in BUILTIN if rules.loss_type}
    if name not in losses:
        raise UnsupportedError(
            f"the loss {name} can't be rebuilt from saved options, as {', '.join(losses)} can; pass it as loss_func=..."
        )
    return losses[name](**{option: value for option, value in options.items() if option != "loss"})
