"""Preconditioned gradients for other optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from curvlinops_plus.blocks import KFAC
from curvlinops_plus.optim.kfac.curvature_optimizer import CurvatureOptimizer, Inverse
from curvlinops_plus.optim.kfac.flat import Flat
from curvlinops_plus.optim.kfac.policies import NormConstraint, StepReport
from curvlinops_plus.risk import Vectors


class KFACPreconditioner(CurvatureOptimizer):
    """Replaces gradients by `(K + λI)⁻¹ g`, for any other optimizer to use.

    `K` is a block-diagonal curvature that is updated by the batches of training, as by `CurvatureEstimator`. `step()`
    rewrites `.grad` and leaves parameters alone. Training loops are heard as by `KFACOptimizer`. Gradients of
    parameters without curvature stay as they are.

    Args:
        model: The network.
        loss: The loss, or several, as for `EmpiricalRisk`.
        damping: `λ`, or a function of the number of steps before.
        params: Parameters, or groups of them with options of their own (`damping`, `norm_constraint`); default: all
            that require a gradient. Parameters of one block belong in one group.
        approximation, default: As for `curvature`.
        vectors: What is sent back for the statistics; default: `MonteCarlo()`.
        decay: Of the statistics' moving average, per update.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now, from eigendecompositions; "factored" splits `λ`
            between the factors of each Kronecker product, with the damping of the refresh, and is cheaper.
        power: Of `K + λI`, below 0.
        norm_constraint: The largest squared norm of the result, a number or a `NormConstraint`; None: no limit. Before
            an optimizer with momentum give one, such as 1e-2 for `lr=0.1`: else steps get too long.
        strict: Refuse a step for which statistics were due, and no batch was seen; else it takes the old ones.
        risk_options: The other options of `EmpiricalRisk`, such as `output` and `mask`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.

    Cost: as for `KFACOptimizer`.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model, loss = nn.Linear(3, 2), nn.MSELoss()
        >>> preconditioner, sgd = KFACPreconditioner(model, loss), torch.optim.SGD(model.parameters(), lr=0.1)
        >>> X, y = torch.rand(8, 3), torch.rand(8, 2)
        >>> for _ in range(3):
        ...     sgd.zero_grad()
        ...     loss(model(X), y).backward()
        ...     preconditioner.step()
        ...     sgd.step()
        >>> preconditioner.last_step.examples
        8
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        damping: float | Callable[[int], float] = 1e-3,
        *,
        params: Any = None,
        approximation: Any = KFAC,
        default: Any = KFAC,
        vectors: Vectors | str | None = None,
        decay: float = 0.95,
        statistics_every: int = 1,
        inverse_every: int = 10,
        inverse: Inverse = "exact",
        power: float = -1.0,
        norm_constraint: float | NormConstraint | None = None,
        strict: bool = True,
        **risk_options: Any,
    ) -> None:
        schedule = damping if callable(damping) else None
        super().__init__(
            model,
            loss,
            params,
            {"damping": damping(0) if callable(damping) else damping, "norm_constraint": norm_constraint},
            schedule=schedule,
            approximation=approximation,
            default=default,
            vectors=vectors,
            decay=decay,
            statistics_every=statistics_every,
            inverse_every=inverse_every,
            inverse=inverse,
            power=power,
            strict=strict,
            risk_options=risk_options,
        )

    def _step(self, flat: Flat, report: StepReport) -> None:
        flat.combine([-1.0] * len(flat.groups), [0.0] * len(flat.groups))
        self._report(flat, flat.update, report)
        for p, d in zip(flat.params, flat.split(flat.update), strict=True):
            assert p.grad is not None
            if p.grad.is_sparse:
                p.grad = d.to(p.grad.dtype, copy=True)
            else:
                p.grad.copy_(d)  # in place: it may be a view of another's buffer
