"""Quadratic penalties: what a network has learnt before, in the loss of what it learns now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.applications.networks import require_fixed, require_present, risks_of
from curvlinops_plus.linalg import Deferred, LinearOperator, Structure
from curvlinops_plus.risk import EmpiricalRisk


class Penalty(ABC):
    """A number that depends on parameters of a network; penalties add up."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """Its value, 0-d, differentiable in the parameters."""

    def __add__(self, other: Any) -> Penalty:
        return Total(self, other) if isinstance(other, Penalty) else NotImplemented

    def __radd__(self, other: Any) -> Penalty:  # where `sum` begins
        return self if isinstance(other, int) and other == 0 else NotImplemented


class Total(Penalty):
    """The sum of two penalties."""

    def __init__(self, one: Penalty, other: Penalty) -> None:
        self.parts = one, other

    def __call__(self) -> Tensor:
        return self.parts[0]() + self.parts[1]()


class QuadraticPenalty(Penalty):
    """`½ strength (θ - θ₀)ᵀ K (θ - θ₀)` of the parameters `θ` that a network has when it is called.

    Added to the loss of a new task it keeps what was learnt on an old one: with `K` a Fisher matrix of the old task it
    is elastic weight consolidation, with its layers whole instead of the diagonal (Ritter et al. 2018). Penalties of
    several tasks add up: `sum(penalties)`.

    `K` is the curvature of the old loss as it is reduced. Of a mean, the penalty weighs as much as one mean of the old
    loss; `strength` is then how many.

    Args:
        K: A symmetric matrix over the parameters, such as `curvature(risk, KFAC)`, that stays as it is.
        at: `θ₀`, a vector, dictionary or list. Default: the parameters of now (of a risk at other values, these).
        strength: A factor, of at least 0.
        params: The parameters themselves, by their names in `K`. Default: those of the network that `K` was computed
            from.

    Raises:
        TypeError: If `K` is no operator, or is computed anew from the present parameters in each product, as a `GGN`.
        ValueError: If `K` is not symmetric, `strength` is negative or not finite, shapes do not fit, `K` was computed
            from no network, or from several, and there are no `params`, or parameters have changed since, and `at` is
            not given.

    Cost: a call is a product with `K` and a few vectors; its derivative is another product.

    Example:
        >>> from torch import nn
        >>> from curvlinops_plus import KFAC, EmpiricalRisk, QuadraticPenalty, curvature
        >>> _ = torch.manual_seed(0)
        >>> model, data = nn.Linear(2, 1), [(torch.eye(2), torch.zeros(2, 1))]
        >>> penalty = QuadraticPenalty(curvature(EmpiricalRisk(model, nn.MSELoss(), data), KFAC), strength=10.0)
        >>> penalty().item()
        0.0
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1.0)
        >>> value = penalty()
        >>> value.backward()
        >>> round(value.item(), 4), model.bias.grad.round(decimals=3)  # ½ · 10 · 2, 10 · 2
        (10.0, tensor([20.]))
    """

    def __init__(
        self,
        K: LinearOperator,
        at: Any = None,
        strength: float = 1.0,
        *,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        if not isinstance(K, LinearOperator):
            raise TypeError(f"Expected an operator, such as curvature(risk, KFAC), got {type(K).__name__}.")
        if K.structure < Structure.SYMMETRIC:
            raise ValueError(f"Expected a symmetric matrix, got {K.label}.")
        if not 0 <= strength < float("inf"):
            raise ValueError(f"Expected strength to be finite and at least 0, got {strength}.")
        require_fixed(K)
        if isinstance(K, Deferred):
            _ = K.operator  # computed now, while the parameters are those of the old task
        self.K, self.strength = K, strength
        self._risk = _only_risk(K) if params is None else None
        #: The parameters, in the order of `K`.
        self.params: dict[str, Tensor] = dict(params or {}) if self._risk is None else self._risk.own_params
        if [p.shape for p in self.params.values()] != list(K.in_space.shapes.values()):
            shapes = {key: list(p.shape) for key, p in self.params.items()}
            raise ValueError(f"Expected parameters of the shapes of {K.in_space}, got {shapes}.")
        if at is None:
            require_present(K, K.label)
            at = self._vector().detach().clone() if self._risk is None else self._risk.vector()
        point, container = K.in_space.read(at, K.dtype, K.device)
        if container.columns is not None:
            raise ValueError(f"Expected `at` to be one vector [{K.in_space.dim}], got {point.shape[1]} columns.")
        #: `θ₀` as one vector.
        self.at = point[:, 0].detach().clone()

    def _vector(self) -> Tensor:
        return torch.cat([p.to(self.K.dtype).flatten() for p in self.params.values()])

    def __call__(self) -> Tensor:
        if self._risk is not None:
            self._risk.require_in_place()
        return 0.5 * self.strength * self.K.quadratic_form(self._vector() - self.at)


def _only_risk(K: LinearOperator) -> EmpiricalRisk:
    """The risk of an operator, or the first of several of the same parameters."""
    risks = risks_of(K)
    own = [list(risk.own_params.values()) for risk in risks]
    if not risks or any(len(p) != len(own[0]) or any(a is not b for a, b in zip(p, own[0])) for p in own[1:]):
        many = f"{len(risks)} networks" if risks else "no network"
        raise ValueError(
            f"{K.label} was computed from {many}; say which parameters the penalty is of: QuadraticPenalty(K, at, "
            "params=dict(model.named_parameters()))."
        )
    return risks[0]
