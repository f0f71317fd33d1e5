"""What an optimizer's step did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of one parameter in a step.

    Attributes:
        parameter: Of the parameter before the step.
        gradient: Of its gradient.
        direction: Of the preconditioned gradient.
        update: Of what was added to it.
    """

    parameter: float
    gradient: float
    direction: float
    update: float


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
        quadratic_change: The change of the loss that the quadratic model predicts, None where it was not needed.
        rho: `(new_loss - loss) / quadratic_change`.
        rejected: Whether the update was undone.
        left_alone: Parameters without gradient, or without curvature yet.
        norms: Of each parameter, by its name, if `optimizer.report_norms` is True.

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
    norms: dict[str, Norms] = field(default_factory=dict)
