"""What a user's loss returns, against what is assumed of it.

Values of losses without a likelihood, for a few examples together and for each by itself: what is
no mean, or sum, over examples depends on how the data are split into batches. And the gradient of a
loss with a likelihood of the user's own, against the likelihood's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.risk.batches import mapped
from curvlinops_plus.risk.preserve import kept_modules, kept_random_state, relative_difference

if TYPE_CHECKING:
    from curvlinops_plus.risk.losses import OutputLoss

#: Largest relative difference of two values of a loss that passes as rounding, by bytes of an
#: output's number.
_LOSS_ROUNDING = {2: 5e-2, 4: 1e-4, 8: 1e-6}

# Largest relative difference of the gradients of a loss and its likelihood, which are computed in
# double precision: a loss may convert what it gets to another one.
_GRADIENT_ROUNDING = 1e-2

# How many examples are compared: enough for differing weights, masks and classes among them.
_COMPARED = 8


def no_mean(loss: OutputLoss, f: Tensor, y: Any, N: int) -> str:
    """What is to be said of a loss whose value for a few examples is not the mean, or sum, of
    theirs by themselves.

    Nothing if it is; if output or target can't be cut into examples, as lists of one target for
    each; or if the loss can't be computed for a single example, or is random.

    Cost: ten calls of the loss.
    """
    values = _values_of(loss, f, y, N)
    if values is None or loss.reduction in values.fitting:
        return ""
    advice = "Give all data in one batch, or a loss that averages what single examples have"
    if values.fitting:
        fitting = values.fitting[0]
        advice = f"It is their {fitting}: say EmpiricalRisk(..., reduction={fitting!r})"
    return (
        f"{loss.title} is not the {loss.reduction} of the losses of single examples: for "
        f"{values.number} of them it is {values.together:.4g}, and their {loss.reduction} is "
        f"{values.by_reduction[loss.reduction]:.4g}. So loss, gradient and curvature depend on how "
        f"the data are split into batches. {advice}."
    )


def require_no_broadcast(loss: OutputLoss, f: Tensor, y: Any, N: int) -> None:
    """Refuse a loss that pairs each output with the targets of all examples, as `f - y` does for
    [N, 1] and [N]: it is no mean over examples, and would be if the target had the output's shape.

    Raises:
        ValueError: If it is so.

    Cost: up to twenty calls of the loss, only where shapes differ by axes of size 1.
    """
    if not isinstance(y, Tensor) or y.shape == f.shape or _without_ones(y) != _without_ones(f):
        return
    values = _values_of(loss, f, y, N)
    if values is None or loss.reduction in values.fitting:
        return
    meant = _values_of(loss, f, y.reshape(f.shape), N)
    if meant is not None and loss.reduction in meant.fitting:
        raise ValueError(
            f"The loss {loss.title} broadcasts an output of shape {list(f.shape)} and a target of "
            f"shape {list(y.shape)}: for {values.number} examples it is {values.together:.4g}, and "
            f"{meant.together:.4g} for a target of the output's shape. Nothing is broadcast "
            "silently, so reshape one of them."
        )


def require_own_gradient(
    loss: OutputLoss, likelihood: Likelihood, f: Tensor, y: Any, class_axis: int | None, N: int
) -> None:
    """Refuse a likelihood that was registered for a loss and is not its own: all that is computed
    from the likelihood would be that of another loss.

    Nothing is compared where the loss can't be differentiated in double precision, or is random.

    Raises:
        UnsupportedError: If the gradients with respect to the output differ.

    Cost: two gradients of the loss and one of the likelihood, at the outputs.
    """
    double = f.detach().double()
    target = y.double() if isinstance(y, Tensor) and y.is_floating_point() else y
    modules = [*loss.loss.modules()] if isinstance(loss.loss, nn.Module) else []

    def gradient() -> Tensor:
        free = double.clone().requires_grad_()
        if class_axis is None:
            value = loss.loss(free, target)
        else:
            value = loss.loss(free.flatten(0, -2), target.flatten())
        return torch.autograd.grad(value, free)[0]

    try:
        with GradMode(True), kept_random_state(), kept_modules(modules):
            theirs = gradient()
            again = gradient()
        with GradMode(False), kept_random_state():
            F, Y = likelihood.canonical(double, target, N, class_axis)
            ours = likelihood.restore(likelihood.grad(F, Y), f.shape, N, class_axis)
            if likelihood.reduction == "mean":
                ours = ours / likelihood.count(F, Y)
            difference = relative_difference(ours, theirs)
            is_random = relative_difference(again, theirs) > _GRADIENT_ROUNDING
    except Exception:
        return
    if is_random or not math.isfinite(difference) or difference <= _GRADIENT_ROUNDING:
        return
    ratio = float((ours * theirs).sum() / ours.square().sum())
    if relative_difference(ratio * ours, theirs) <= _GRADIENT_ROUNDING:
        found = f"is {ratio:.4g} times that of the likelihood"
    else:
        found = f"and that of the likelihood differ by {difference:.1e} of their norm"
    raise UnsupportedError(
        f"{loss.title}: the likelihood that is registered for this loss is not its own. The "
        f"gradient of the loss at the model's outputs {found}, with the reduction "
        f"{likelihood.reduction!r}. Is the loss a mean over all numbers of the output, as assumed "
        "of it? If it adds up those of an example, torch.distributions.Independent(distribution, "
        "1) is one term for each example, and `count` of a Likelihood is what the mean divides "
        "by. A sum "
        'has the attribute reduction = "sum". EmpiricalRisk(..., check=False) continues; results '
        "are those of the likelihood."
    )


def _without_ones(t: Tensor) -> list[int]:
    return [size for size in t.shape if size != 1]


@dataclass
class _Values:
    """A loss of a few examples.

    Attributes:
        number: How many they are.
        together: Their loss.
        by_reduction: "mean" and "sum" of their losses by themselves.
        fitting: Those of them that their loss is.
    """

    number: int
    together: float
    by_reduction: dict[str, float]
    fitting: list[str]


def _values_of(loss: OutputLoss, f: Tensor, y: Any, N: int) -> _Values | None:
    """The loss of a few examples; None if they can't be told, or it is random."""
    targets = [y]
    if isinstance(y, Mapping):
        targets = [*y.values()]
    elif isinstance(y, (tuple, list)) and len(y) != N:
        targets = [*y]
    if not all(target is None or isinstance(target, Tensor) for target in targets):
        return None
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0), device="cpu")
    chosen = order[:_COMPARED].tolist()

    def rows(t: Tensor, examples: list[int]) -> Tensor:
        t = t.detach()
        if t.ndim == 0 or len(t) == 1:
            return t.clone()
        return t.unflatten(0, (N, -1))[examples].flatten(0, 1)

    def value(examples: list[int]) -> float:
        return float(loss.loss(rows(f, examples), mapped(rows, y, examples)))

    modules = [*loss.loss.modules()] if isinstance(loss.loss, nn.Module) else []
    try:
        with GradMode(False), kept_random_state(), kept_modules(modules):
            together = value(chosen)
            again = value(chosen)
            singles = [value([n]) for n in chosen]
    except Exception:
        return None
    sizes = [abs(number) for number in (together, *singles) if math.isfinite(number)]
    room = _LOSS_ROUNDING[f.element_size()] * max(sizes, default=math.nan)
    # Random losses differ from themselves, and infinite ones from everything.
    if not abs(together - again) <= room:
        return None
    by_reduction = {"mean": sum(singles) / len(singles), "sum": sum(singles)}
    fitting = [kind for kind, number in by_reduction.items() if abs(together - number) <= room]
    return _Values(len(singles), together, by_reduction, fitting)
