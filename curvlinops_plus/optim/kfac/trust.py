"""What looks at the loss of a step's batches again: coefficients of a quadratic model, and how far
to trust it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvlinops_plus.blocks import CurvatureEstimator
from curvlinops_plus.blocks.users_pass import PassStart
from curvlinops_plus.exact import GGN
from curvlinops_plus.optim.kfac.flat import GroupVectors, StepVectors
from curvlinops_plus.risk.batches import Batch


@dataclass(frozen=True)
class QuadraticModel:
    """`q(w) = ½ wᵀ (A + R + D) w + bᵀ w`, the change of the loss along `Σ w_i v_i`; all matrices
    `[k, k]` in float64.

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
        w = M.new_tensor([value or 0.0 for value in fixed])
        if free:
            at = torch.tensor(free, device=M.device)
            w[at] = torch.linalg.lstsq(
                M[at][:, at], -(self.slope + M @ w)[at, None], driver="gelsd"
            ).solution[:, 0]
        return w.tolist()

    def change(self, w: Sequence[float], include_damping: bool = False) -> float:
        """`q(w)`; with or without the term of the damping."""
        M = self.curvature + self.decay + (self.damping if include_damping else 0)
        coefficients = M.new_tensor(w)
        return float(coefficients @ M @ coefficients / 2 + self.slope @ coefficients)


class Trust:
    """The batches of a step, evaluated once more from the random state and buffers that they were
    first seen with.

    Args:
        estimator: The statistics.
        batches: Of the step of now, with what their forward passes began with.
        exact: Whether the quadratic model has the exact GGN of the batches instead of the
            statistics.
    """

    def __init__(
        self, estimator: CurvatureEstimator, batches: Sequence[tuple[Batch, PassStart]], exact: bool
    ) -> None:
        self._estimator = estimator
        self._batches = batches
        self._exact = exact
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

    def model(self, vectors: StepVectors, directions: Sequence[GroupVectors]) -> QuadraticModel:
        """The quadratic model of this step's loss along some directions."""
        k = len(directions)
        C = self._ggn if self._exact else self._estimator.operator
        tensors = zip(*(vectors.of_parameters(direction) for direction in directions), strict=True)
        by_key = dict(zip(vectors.keys, map(torch.stack, tensors), strict=True))
        params = self._estimator.risk.params
        for key in C.in_space.names:
            if key not in by_key:
                by_key[key] = params[key].new_zeros((k, *params[key].shape))
        A = C.quadratic_form({key: by_key[key] for key in C.in_space.names}).double().cpu()
        # of each group ⟨v_i, v_j⟩, and ⟨v_i, g⟩ behind: [groups, k, k + 1]
        tables = []
        for *parts, gradient in zip(*directions, vectors.gradient, strict=True):
            rows = torch.stack((*parts, gradient))
            tables.append(rows[:k] @ rows.mT)
        table = torch.stack(tables).double().cpu()

        def weighted(factors: list[float]) -> Tensor:
            return torch.tensordot(table.new_tensor(factors), table[..., :k], 1)

        R = weighted([o.in_curvature for o in vectors.options])
        D = weighted([o.damping for o in vectors.options])
        return QuadraticModel((A + A.T) / 2, R, D, table[..., k].sum(0))
