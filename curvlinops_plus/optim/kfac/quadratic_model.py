"""The quadratic model of the loss along a few directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Vectors = Sequence[Sequence[Tensor]]  # directions, each a list of tensors like the parameters


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

    @classmethod
    def along(
        cls,
        directions: Vectors,
        gradient: Sequence[Tensor],
        form: Callable[[Vectors], Tensor],
        decays: Sequence[float],
        dampings: Sequence[float],
    ) -> QuadraticModel:
        """The model along some directions.

        Args:
            directions: The `v_i`; tensors like the parameters.
            gradient: `g`.
            form: `⟨v_i, C v_j⟩`, `[k, k]`.
            decays: `η` of each parameter.
            dampings: `λ` of each parameter.
        """
        A, k = form(directions).double().cpu(), len(directions)
        inner = []
        for *v, g in zip(*directions, gradient, strict=True):
            rows = torch.stack([t.flatten() for t in (*v, g)])
            inner.append(rows[:k] @ rows.mT)
        table = torch.stack(inner).double().cpu()  # [parameters, k, k + 1]
        R, D = (torch.tensor(factors, dtype=table.dtype) @ table[..., :k].flatten(1) for factors in (decays, dampings))
        return cls((A + A.T) / 2, R.view(k, k), D.view(k, k), table[..., k].sum(0))

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
