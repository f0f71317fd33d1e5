"""The registry of likelihoods: which likelihood a loss has, and what to use instead of unsupported losses."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.likelihood import Likelihood, computes_like

__all__ = ["has_likelihood", "likelihood_of", "register_likelihood"]

_Maker = TypeVar("_Maker", bound=Callable[..., Likelihood])

_MAKERS: dict[type, Callable[[Any], Likelihood]] = {}


def register_likelihood(loss_type: type) -> Callable[[_Maker], _Maker]:
    """Decorator that registers a loss: of a `Likelihood` class, or of a function `loss -> Likelihood`.

    Subclasses of the loss are included, unless they have a `forward` of their own.

    Args:
        loss_type: Class of the loss. An existing entry is replaced.

    Example:
        >>> import torch
        >>> from curvlinops_plus.likelihood import FromDistribution
        >>> class MyPoissonLoss(torch.nn.PoissonNLLLoss):
        ...     pass
        >>> @register_likelihood(MyPoissonLoss)
        ... def _(loss):
        ...     return FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))
        >>> likelihood_of(MyPoissonLoss(reduction="sum")).reduction
        'sum'
    """
    if not isinstance(loss_type, type):
        raise TypeError(f"register_likelihood expects the class of a loss, got {loss_type!r}.")

    def register(make: _Maker) -> _Maker:
        _MAKERS[loss_type] = make
        return make

    return register


def likelihood_of(loss: Any) -> Likelihood:
    """The likelihood of a loss.

    Args:
        loss: A loss whose class, or a base class with the same `forward`, is registered. A `Likelihood` is returned
            unchanged.

    Raises:
        UnsupportedError: If nothing is registered for the loss, or its reduction is neither "mean" nor "sum".

    Example:
        >>> type(likelihood_of(nn.CrossEntropyLoss())).__name__
        'CrossEntropy'
    """
    if isinstance(loss, Likelihood):
        likelihood = loss
    else:
        make = _maker_of(loss)
        if make is None:
            raise _not_registered(loss)
        likelihood = make(loss)
        if likelihood.loss is None:
            likelihood.loss = loss
    _ = likelihood.reduction  # raises here if the loss is not reduced
    return likelihood


def has_likelihood(loss: Any) -> bool:
    """Whether a likelihood is registered for the class of this loss; it may still refuse one of its options.

    Example:
        >>> has_likelihood(nn.MSELoss()), has_likelihood(nn.HuberLoss())
        (True, False)
    """
    return isinstance(loss, Likelihood) or _maker_of(loss) is not None


def _maker_of(loss: Any) -> Callable[[Any], Likelihood] | None:
    """What makes the likelihood of a loss; None if its class is not registered, or overrides `forward`."""
    parent = _registered_class(loss)
    return _MAKERS[parent] if parent is not None and computes_like(loss, parent) else None


def _registered_class(loss: Any) -> type | None:
    return next((t for t in type(loss).__mro__ if t in _MAKERS), None)


def _not_registered(loss: Any) -> UnsupportedError:
    kind, parent = type(loss), _registered_class(loss)
    name = getattr(loss, "__name__", "a function") if isinstance(loss, (FunctionType, type)) else kind.__name__
    why = f" It changes the forward of {parent.__name__}, whose rules may be wrong for it." if parent else _advice(loss)
    return UnsupportedError(
        f"no likelihood is registered for the loss {name}.{why} Known losses: "
        f"{', '.join(sorted(t.__name__ for t in _MAKERS))}. To add yours (a class), say which distribution it is the "
        f"negative log-likelihood of:\n\n    @register_likelihood({name})\n    def _(loss):\n"
        "        return FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))\n\n"
        "or decorate a subclass of Likelihood, which needs one method, nll."
    )


_ROBUST = (
    " {name} has no curvature far from the target: its Hessian is 0 there, so it depends on which examples "
    "happen to be fitted. GGNLinearOperator and HessianLinearOperator accept it; for all else choose a "
    "distribution, as torch.distributions.Laplace(f, 1.0), whose Fisher matrix counts every example."
)
# What to use instead of losses of PyTorch that are not supported.
_ADVICE: dict[type, str] = {
    nn.L1Loss: _ROBUST,
    nn.SmoothL1Loss: _ROBUST,
    nn.HuberLoss: _ROBUST,
    nn.KLDivLoss: (
        " It reads log-probabilities, in which it is linear, so its Hessian is 0. Use nn.CrossEntropyLoss on the "
        "logits, which takes class probabilities as targets and differs by a constant."
    ),
    nn.SoftMarginLoss: " It is nn.BCEWithLogitsLoss with targets (y + 1) / 2 in place of y = ±1: use that.",
    nn.MultiLabelSoftMarginLoss: ' With reduction="mean" it is nn.BCEWithLogitsLoss: use that.',
}


def _advice(loss: Any) -> str:
    """Why a loss is not supported and what to use instead, if known; else empty."""
    if isinstance(loss, type):
        return f" This is a class, not a loss: call it, {loss.__name__}(...)."
    if getattr(loss, "__module__", None) == nn.functional.__name__:
        return " Losses are known by their class, which holds the options: pass the module of torch.nn instead."
    kind = next((t for t in type(loss).__mro__ if t in _ADVICE), None)
    return "" if kind is None else _ADVICE[kind].format(name=type(loss).__name__)
