"""Policies of the K-FAC optimizer: how damping adapts, how long an update may be, what weight decay
means; and what a step has done."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from typing import Any, Literal

import torch
from torch import Tensor

from curvlinops_plus.options import flag, instance, integer, number, one_of

#: No damping grows beyond, however often it is raised.
LARGEST_DAMPING = sys.float_info.max


def as_policy(kind: type, value: Any) -> Any:
    """A policy, which a number stands for."""
    return value if value is None or isinstance(value, kind) else kind(value)


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping that follows how well the quadratic model predicts the change of the loss.

    After every `interval`-th step the ratio `ρ = (L(θ + δ) - L(θ)) / q(δ)` of the real to the
    predicted change, both on the batch of that step, decides: below the first threshold the damping
    is divided by `decay ** interval`, above the second one multiplied by it. A loss that is not
    finite counts as a bad prediction. The next step uses the result.

    Args:
        initial: `λ` of the first step, from `min` to `max`.
        interval: Steps between two decisions.
        decay: By how much the damping may change per step, in (0, 1].
        thresholds: Between these the damping stays.
        min: `λ` never gets smaller. The ratio is measured on the batch that the step was made for,
            so it stays near 1 when `λ` vanishes, and steps are noise along directions without
            curvature: kfac_jax's 1e-8 bounds nothing.
        max: `λ` never gets larger.
        include_damping: Whether `q` has the term `λ/2 |δ|²`.

    Source: Martens and Grosse 2015, arXiv 1503.05671, section 6.5.

    Example:
        >>> rule = LevenbergMarquardt(1.0, interval=5, decay=0.9)
        >>> [round(rule.adapted(2.0, rho), 3) for rho in (0.1, 0.5, 0.8, float("nan"))]
        [3.387, 2.0, 1.181, 3.387]
    """

    initial: float = 1.0
    interval: int = 5
    decay: float = 0.9
    thresholds: tuple[float, float] = (0.25, 0.75)
    min: float = 1e-4
    max: float = inf
    include_damping: bool = False

    def __post_init__(self) -> None:
        number("decay", self.decay, above=0, high=1)
        integer("interval", self.interval, low=1)
        number("min", self.min, low=0)
        largest = number("max", self.max, low=self.min, infinite=True)
        number("initial", self.initial, low=self.min, high=None if largest == inf else largest)
        pair = instance("thresholds", self.thresholds, (tuple, list), "two numbers, (low, high)")
        if len(pair) != 2:
            raise ValueError(f"thresholds={pair!r}; expected two numbers, (low, high).")
        number("The first threshold", pair[0])
        number("The second threshold", pair[1], above=pair[0])
        flag("include_damping", self.include_damping)

    def adapted(self, damping: float, rho: float) -> float:
        """The damping after a step with the ratio `rho`."""
        factor = self.decay**self.interval
        if isnan(rho) or rho < self.thresholds[0]:
            damping = min(damping / factor, LARGEST_DAMPING)
        elif rho > self.thresholds[1]:
            damping *= factor
        return min(max(damping, self.min), self.max)


@dataclass(frozen=True)
class NormConstraint:
    """The largest squared norm of an update; longer ones are shortened to it.

    Args:
        c: The bound.
        of: "update" bounds the whole update `δ = -α P g + μ v`, momentum included. "step" bounds
            the part `α P g`, as kfac_jax does; momentum may then multiply it by up to `1 / (1 -
            μ)`.
        norm: "damped" is `⟨δ, (C + λ) δ⟩`, "fisher" `⟨δ, C δ⟩`, "euclidean" `⟨δ, δ⟩`.

    Source: Ba et al. 2017, "Distributed second-order optimization using Kronecker-factored
    approximations", section 5, for `of="step"`.

    Example:
        >>> NormConstraint(1e-3).factor(4e-3)
        0.5
    """

    c: float
    of: Literal["update", "step"] = "update"
    norm: Literal["damped", "fisher", "euclidean"] = "damped"

    def __post_init__(self) -> None:
        number("The norm constraint", self.c, above=0)
        one_of("of", self.of, "update", "step")
        one_of("norm", self.norm, "damped", "fisher", "euclidean")

    def factor(self, square: float) -> float:
        """What a vector of this squared norm is multiplied with, at most 1."""
        if square <= self.c:
            return 1.0
        return (self.c / square) ** 0.5 if isfinite(square) else 0.0

    def factor_on_device(self, square: Tensor) -> Tensor:
        """The same of a 0-d tensor, without reading it."""
        factor = (self.c / square).sqrt()
        factor = torch.where(square <= self.c, 1.0, factor)
        return torch.where(square.isfinite(), factor, 0.0)


@dataclass(frozen=True)
class WeightDecay:
    """A weight decay `η`: decoupled, coupled, or already in the loss.

    Args:
        strength: `η`.
        kind: "decoupled" shrinks parameters by `lr · η` beside the update, as AdamW. "coupled" adds
            `η θ` to the gradient and `η I` to the curvature: what is minimised is the loss plus
            `η/2 |θ|²`. "in_loss" is for a loss that has this term already: `η I` is added to the
            curvature alone.

    Example:
        >>> WeightDecay(1e-2, "coupled").kind
        'coupled'
    """

    strength: float
    kind: Literal["decoupled", "coupled", "in_loss"] = "decoupled"

    def __post_init__(self) -> None:
        number("The weight decay", self.strength, low=0)
        one_of("kind", self.kind, "decoupled", "coupled", "in_loss")


class GroupOptions:
    """The options of a parameter group in a step, as they are read.

    Attributes:
        coefficients: Learning rate and momentum, numbers or "adaptive".
        rates: The same, 1 where they are adaptive.
        decoupled, coupled: The weight decay, if it is of this kind.
        in_curvature: The weight decay that is added to the diagonal of the curvature.
        shift: Beside the curvature: the damping with that.
        of_blocks: What all parameters of a block have in common.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.coefficients: list[Any] = []
        for name, default in (("lr", 1.0), ("momentum", 0.0)):
            value = group.get(name, default)
            is_adaptive = isinstance(value, str) and value == "adaptive"
            self.coefficients.append(value if is_adaptive else number(name, value, low=0))
        self.rates = [1.0 if v == "adaptive" else float(v) for v in self.coefficients]
        self.damping = number("damping", group["damping"], low=0)
        self.norm_constraint: NormConstraint | None = as_policy(
            NormConstraint, group["norm_constraint"]
        )
        decay = as_policy(WeightDecay, group.get("weight_decay")) or WeightDecay(0.0)
        self.decoupled = decay.strength if decay.kind == "decoupled" else 0.0
        self.coupled = decay.strength if decay.kind == "coupled" else 0.0
        self.in_curvature = decay.strength - self.decoupled
        self.shift = self.damping + self.in_curvature
        self.of_blocks = (*self.coefficients, self.shift, self.norm_constraint)


@dataclass
class StepReport:
    """What the last step of a `KFACOptimizer` did.

    Attributes:
        step: Its number, from 0.
        examples: Examples in the statistics of this step; 0 if none were due.
        refreshed: Whether the inverse was renewed.
        lr: The learning rate of each group, or the adaptive one.
        momentum: The same of momentum.
        damping: The damping of each group, before it was adapted.
        update_norm: The Euclidean norm of the update.
        scale: What the update was multiplied with by the norm constraint; 1 if it was short enough.
        loss: The loss of the step's batches before the update, None where it was not needed.
        new_loss: The same after it.
        quadratic_change: The change of the loss that the quadratic model predicts, None where it
            was not needed.
        rho: `(new_loss - loss) / quadratic_change`.
        rejected: Whether the update was undone.
        left_alone: Parameters without gradient, or without curvature yet.

    Example:
        >>> import torch
        >>> from curvlinops_plus import KFACOptimizer
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.MSELoss()
        >>> optimizer = KFACOptimizer(model, loss)
        >>> loss(model(torch.rand(8, 3)), torch.rand(8, 2)).backward()
        >>> optimizer.step()
        >>> optimizer.last_step.examples, optimizer.last_step.refreshed, optimizer.last_step.lr
        (8, True, [0.1])
    """

    step: int
    examples: int = 0
    refreshed: bool = False
    lr: list[float] = field(default_factory=list)
    momentum: list[float] = field(default_factory=list)
    damping: list[float] = field(default_factory=list)
    update_norm: float = 0.0
    scale: float = 1.0
    loss: float | None = None
    new_loss: float | None = None
    quadratic_change: float | None = None
    rho: float | None = None
    rejected: bool = False
    left_alone: list[str] = field(default_factory=list)
