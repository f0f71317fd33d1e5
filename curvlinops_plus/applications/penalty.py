"""Quadratic penalties: what a network has learnt before, in the loss of what it learns now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvlinops_plus.applications.networks import parameters_of, require_present, risk_of
from curvlinops_plus.exact.base import RiskOperator
from curvlinops_plus.linalg import LinearOperator, Structure
from curvlinops_plus.options import instance, number


class QuadraticPenalty:
    """`½ strength (θ - θ₀)ᵀ K (θ - θ₀)` with the network's parameters `θ` at the time of the call.

    Added to the loss of a new task it keeps what was learnt on an old one: with `K` a Fisher matrix
    of the old task it is elastic weight consolidation, with its layers whole instead of the
    diagonal (Ritter et al. 2018). Penalties of several tasks add up: `sum(penalty() for penalty in
    penalties)`.

    `K` has the reduction of the old loss. With a mean, `strength=1` weighs as much as the old mean
    loss.

    Args:
        K: A symmetric matrix over the parameters, such as `curvature(risk, KFAC)`, that stays as it
            is.
        at: `θ₀`, a vector, dictionary or list. Default: the current parameters (of a risk at other
            values, these).
        strength: A factor, of at least 0.
        params: The parameters themselves, by their names in `K`, for sums, inverses and plain
            matrices. Default: those of the network that `K` was computed from.

    Raises:
        TypeError: If `K` is computed anew from the present parameters in each product, as a `GGN`.
        ValueError: If `K` is not symmetric, or doesn't tell its network and there are no `params`;
            if parameters have changed since, and `at` is not given.

    Cost: a call is a product with `K` and a few vectors; its derivative is another product.

    Example:
        >>> from torch import nn
        >>> from curvlinops_plus import KFAC, EmpiricalRisk, QuadraticPenalty, curvature
        >>> _ = torch.manual_seed(0)
        >>> model, data = nn.Linear(2, 1), [(torch.eye(2), torch.zeros(2, 1))]
        >>> penalty = QuadraticPenalty(
        ...     curvature(EmpiricalRisk(model, nn.MSELoss(), data), KFAC), strength=10.0
        ... )
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
        at: Mapping[str, Tensor] | Sequence[Tensor] | Tensor | None = None,
        strength: float = 1.0,
        *,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        instance("K", K, LinearOperator, "an operator, such as curvature(risk, KFAC)")
        if isinstance(at, (int, float)):
            raise TypeError(
                f"`at`, the second argument, is the number {at}; expected the parameters around "
                f"which the penalty is zero. Did you mean strength={at}?"
            )
        number("strength", strength)
        instance("params", params, Mapping, "a dict of parameters by their names", optional=True)
        if K.structure < Structure.SYMMETRIC:
            raise ValueError(f"Expected a symmetric matrix, got {K.label}.")
        risk = risk_of(K)
        if isinstance(K, RiskOperator) and any(
            K.risk.params[key] is p for key, p in K.risk.own_params.items()
        ):
            raise TypeError(
                f"{K.label} is computed in each product from the parameters that the network has "
                "then. Take one that stays: curvature(risk, ...) or A.materialize()."
            )
        if risk is None and params is None:
            raise ValueError(
                f"{K.label} doesn't tell the network it was computed from; say which parameters "
                "the penalty is of: params=dict(model.named_parameters())."
            )
        self.K = K
        self.strength = strength
        self._risk = risk if params is None else None
        #: The parameters, in the order of `K`.
        self.params: dict[str, Tensor] = dict(params or {})
        if self._risk is not None:
            self.params = self._risk.own_params
        if at is None:
            if risk is not None:
                require_present(risk, parameters_of(K), K.label)
            at = self._vector().detach() if self._risk is None else self._risk.vector()
        vector, _ = K.in_space.read(at, K.dtype, K.device)
        #: `θ₀` as one vector.
        self.at = vector.squeeze(1).detach().clone()

    def __repr__(self) -> str:
        return f"QuadraticPenalty({self.K.label}, strength={self.strength:g})"

    def __call__(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """The value, 0-d, differentiable in the parameters.

        Args:
            params: The present parameters by their names in `K`, for a network that has other ones
                than when the penalty was made: of a head that has grown, its old rows. Default:
                those of the network.

        Raises:
            ValueError: If names or shapes of `params` are others, or without them, if the network
                has other tensors in place of its parameters.
        """
        instance("params", params, Mapping, "a dict of parameters by their names", optional=True)
        if params is not None:
            expected = {name: list(p.shape) for name, p in self.params.items()}
            given = {name: list(p.shape) for name, p in params.items()}
            wrong = [n for n in {**expected, **given} if expected.get(n) != given.get(n)]
            if wrong:
                raise ValueError(
                    f"Expected parameters of the shapes {expected}, got {given}: {wrong} are "
                    "others, or missing."
                )
        elif self._risk is not None:
            try:
                self._risk.require_in_place()
            except ValueError as error:
                raise ValueError(
                    f"{error} Or give the penalty its parameters, penalty(params): of a head that "
                    "has grown the old rows."
                ) from error
        return 0.5 * self.strength * self.K.quadratic_form(self._vector(params) - self.at)

    def _vector(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        values = self.params if params is None else params
        return torch.cat([values[name].to(self.K.dtype).flatten() for name in self.params])
