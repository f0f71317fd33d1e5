"""What looks at the loss of a step's batches again: coefficients of a quadratic model, and how far to trust it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks import CurvatureEstimator
from curvlinops_plus.blocks.listening import PassStart
from curvlinops_plus.exact import GGN
from curvlinops_plus.optim.kfac.flat import Flat, Vectors
from curvlinops_plus.optim.kfac.policies import LevenbergMarquardt, as_weight_decay
from curvlinops_plus.risk.batches import Batch


@dataclass(frozen=True)
class QuadraticModel:
    """`q(w) = ½ wᵀ (A + R + D) w + bᵀ w`, the change of the loss along `Σ w_i v_i`; all matrices `[k, k]` in float64.

    Attributes:
        curvature: `A_ij = ⟨v_i, C v_j⟩`.
        decay: `R_ij = ⟨v_i, η v_j⟩`, of weight decay that is part of the objective.
        damping: `D_ij = ⟨v_i, λ v_j⟩`.
        slope: `b_i = ⟨v_i, g⟩`, `[k]`.

    Source: Martens and Grosse 2015, arXiv 1503.05671, sections 6.4 and 7.

    Example:
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> model = QuadraticModel(2 * one, 0 * one, 0 * one, -one[0])
        >>> model.minimizer([None]), model.change([0.5])
        ([0.5], -0.25)
    """

    curvature: Tensor
    decay: Tensor
    damping: Tensor
    slope: Tensor

    def minimizer(self, fixed: Sequence[float | None]) -> list[float]:
        """The coefficients of least `q`, damping included; those that are numbers in `fixed` stay.

        The coefficient of a direction that is zero is zero.
        """
        M = self.curvature + self.decay + self.damping
        free = [i for i, value in enumerate(fixed) if value is None and bool(M[i].any())]
        w = torch.tensor([value or 0.0 for value in fixed], dtype=torch.float64)
        if free:
            at = torch.tensor(free)
            w[at] = torch.linalg.lstsq(M[at][:, at], -(self.slope + M @ w)[at, None], driver="gelsd").solution[:, 0]
        return w.tolist()

    def change(self, w: Sequence[float], include_damping: bool = False) -> float:
        """`q(w)`; with or without the term of the damping."""
        M = self.curvature + self.decay + (self.damping if include_damping else 0)
        coefficients = torch.tensor(w, dtype=torch.float64)
        return float(coefficients @ M @ coefficients / 2 + self.slope @ coefficients)


class Trust:
    """The batches of a step, evaluated once more from the random state and buffers that they were first seen with.

    Args:
        estimator: The statistics.
        batches: Of the step of now, with what their forward passes began with.
        exact: Whether the quadratic model has the exact GGN of the batches instead of the statistics.
        levenberg: How the damping adapts.
        reject: The factor of the damping after a step that was undone.
    """

    def __init__(
        self,
        estimator: CurvatureEstimator,
        batches: Sequence[tuple[Batch, PassStart]],
        exact: bool,
        levenberg: LevenbergMarquardt | None,
        reject: float | None,
    ) -> None:
        self._estimator, self._exact, self.levenberg, self.reject = estimator, exact, levenberg, reject
        self._batches = batches
        self._risk = estimator.risk.with_data(self)

    def __iter__(self) -> Iterator[Batch]:
        for batch, start in self._batches:
            start.restore()
            yield batch

    def loss(self) -> float:
        """The loss of the step's batches at the parameters of now. Collective."""
        return float(self._risk.loss())

    @cached_property
    def _ggn(self) -> GGN:
        """How the model is differentiated is found out once."""
        return GGN(self._risk, check_deterministic=False)

    def _form(self, flat: Flat, directions: Sequence[Vectors]) -> Tensor:
        """`⟨v_i, C v_j⟩`, `[k, k]`."""
        rows = flat.split([torch.stack(parts) for parts in zip(*directions, strict=True)])
        V, k = dict(zip(flat.keys, rows, strict=True)), len(directions)
        C, params = self._ggn if self._exact else self._estimator.operator, self._estimator.risk.params
        V = {key: V[key] if key in V else params[key].new_zeros((k, *params[key].shape)) for key in C.in_space.names}
        return C.quadratic_form(V)

    def model(self, flat: Flat, directions: Sequence[Vectors]) -> QuadraticModel:
        """The quadratic model of this step's loss along some directions."""
        A, k, inner = self._form(flat, directions).double().cpu(), len(directions), []
        for *v, g in zip(*directions, flat.gradient, strict=True):
            rows = torch.stack((*v, g))
            inner.append(rows[:k] @ rows.mT)
        table = torch.stack(inner).double().cpu()  # [groups, k, k + 1]
        decays = [as_weight_decay(group["weight_decay"]).curvature for group in flat.groups]
        R, D = (
            (torch.tensor(factors, dtype=table.dtype) @ table[..., :k].flatten(1)).view(k, k)
            for factors in (decays, flat.option("damping"))
        )
        return QuadraticModel((A + A.T) / 2, R, D, table[..., k].sum(0))

    def coefficients(
        self, flat: Flat, lr: Sequence[Any], momentum: Sequence[Any]
    ) -> tuple[list[float], list[float], QuadraticModel, list[float]]:
        """Learning rates and momenta, those that are "adaptive" from the minimum of the quadratic model.

        Returns:
            Both of each vector; the model, and its minimizer.
        """
        # The model chooses factors of both directions; a number of a group is part of its direction, times 1.
        fixed = [None if "adaptive" in values else 1.0 for values in (lr, momentum)]
        lr, momentum = ([1.0 if value == "adaptive" else value for value in values] for values in (lr, momentum))
        model = self.model(
            flat,
            [
                [-α * d for α, d in zip(lr, flat.direction, strict=True)],
                [μ * v for μ, v in zip(momentum, flat.velocity, strict=True)],
            ],
        )
        w = model.minimizer(fixed)
        return [w[0] * α for α in lr], [w[1] * μ for μ in momentum], model, w
