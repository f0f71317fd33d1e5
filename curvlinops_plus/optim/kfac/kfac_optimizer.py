"""K-FAC as a PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks import KFAC
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.optim.kfac.curvature_optimizer import CurvatureOptimizer
from curvlinops_plus.optim.kfac.curvature_options import CurvatureOptions, Inverse
from curvlinops_plus.optim.kfac.move import Move
from curvlinops_plus.optim.kfac.policies import (
    Adaptive,
    LevenbergMarquardt,
    NormConstraint,
    WeightDecay,
    as_weight_decay,
    number,
    scheduled,
)
from curvlinops_plus.optim.kfac.quadratic_model import QuadraticModel
from curvlinops_plus.optim.kfac.step_report import StepReport
from curvlinops_plus.optim.kfac.tensor_lists import times
from curvlinops_plus.risk import Vectors


class KFACOptimizer(CurvatureOptimizer):
    """K-FAC: steps along the gradient, times the inverse of a curvature that follows training.

    A step is, in this order: statistics of the batch (they are added in its forward pass); a new inverse, if it is due;
    `P g = (K + λI)⁻¹ g` with the gradients in `.grad`; coefficients; `δ = -lr · P g + momentum · v`, shortened by the
    norm constraint; `θ ← θ + δ` and `v ← δ`; the damping's adaptation. The velocity `v` is the update before,
    times the learning rate of now over that of then, as in `torch.optim.SGD`: it does not go on when a schedule ends.

    Options of parameter groups, read in every step, so that schedulers and anybody may change them: `lr`, `momentum`,
    `damping`, `weight_decay`, `norm_constraint`. Parameters of one block (a layer's weight and bias) belong in one
    group.

    Nothing about a training loop changes: hooks on the model and on the loss module hear the calls, in training mode
    with gradients enabled. They are removed by `close()`, at the end of `with KFACOptimizer(...) as optimizer:`, and
    with the optimizer. For losses that are functions, or outputs that are changed before the loss, see `listen`.
    Several batches before a step are one update. `step(closure)` is PyTorch's.

    Parameters without gradient, or of layers that no batch has called yet, are left alone. Steps that don't call a
    layer leave its curvature as it is.

    Args:
        model: The network.
        loss: The loss, or several, as for `EmpiricalRisk`.
        lr: `α`, or "adaptive": the minimum of the quadratic model.
        momentum: `μ`, or "adaptive".
        damping: `λ`, a function of the number of steps before, or `LevenbergMarquardt(...)`.
        params: Parameters, or groups of them with options of their own; default: all that require a gradient.
        approximation, default: As for `curvature`.
        vectors: What is sent back for the statistics; default: `MonteCarlo()`.
        decay: Of the statistics' moving average, per update; batches weigh by their examples, or loss terms. Below 1 if
            losses are sums.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse; one comes earlier for a layer that was never called.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now, from eigendecompositions; "factored" splits `λ`
            between the factors of each Kronecker product, with the damping of the refresh, and is cheaper.
        power: Of `K + λI`, below 0.
        norm_constraint: A number bounds the whole update, `⟨δ, (K + λ) δ⟩ <= c`, with the `K` of the last refresh and
            the `λ` of the step; `NormConstraint` has other ways.
            "auto" is 1e-3, and None with adaptive coefficients.
        weight_decay: A number is decoupled, as in AdamW; `WeightDecay` has other kinds.
        quadratic_model: Curvature of the quadratic model: the "blocks", or the "exact" GGN of the step's batches.
            Default: blocks for the damping's adaptation, exact for adaptive coefficients.
        reject: Undo steps that raise the loss of their batches, and multiply the damping by this number. The loss is
            then evaluated before and after every step.
        maximize: Go up instead of down.
        strict: Refuse a step for which statistics were due, and no batch was seen; else it takes the old ones.
        risk_options: The other options of `EmpiricalRisk`, such as `output` and `mask`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.
        TypeError: If an option has another type; later, if a scheduler drives what is adaptive.

    Cost: statistics are a backward pass to the layers' outputs; a refresh is one eigendecomposition (or Cholesky
    decomposition) per factor, and a product with `K` for the norm constraint; a step multiplies every gradient by two
    or four matrices.

    Source: Martens and Grosse 2015, arXiv 1503.05671; kfac_jax, whose trajectories it reproduces.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model, loss = nn.Linear(3, 2), nn.MSELoss()
        >>> optimizer = KFACOptimizer(model, loss, lr=0.1)
        >>> X, y = torch.rand(8, 3), torch.rand(8, 2)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss(model(X), y).backward()
        ...     optimizer.step()
        >>> optimizer.last_step.step, optimizer.last_step.examples
        (2, 8)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        lr: float | Literal["adaptive"] = 0.1,
        momentum: float | Literal["adaptive"] = 0.9,
        damping: float | Callable[[int], float] | LevenbergMarquardt = 1e-3,
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
        norm_constraint: float | NormConstraint | Literal["auto"] | None = "auto",
        weight_decay: float | WeightDecay = 0.0,
        quadratic_model: Literal["blocks", "exact"] | None = None,
        reject: float | None = None,
        maximize: bool = False,
        strict: bool = True,
        **risk_options: Any,
    ) -> None:
        adaptive = "adaptive" in (lr, momentum)
        if norm_constraint == "auto":
            norm_constraint = None if adaptive else 1e-3
        if quadratic_model not in (None, "blocks", "exact"):
            raise ValueError(f'quadratic_model={quadratic_model!r}; expected "blocks", "exact" or None.')
        schedule = damping if callable(damping) else None
        if reject is not None and (number("reject", reject, low=1.0) and schedule):
            raise ValueError(
                "reject= multiplies the damping, which is a schedule here. Give a number, or LevenbergMarquardt."
            )
        self._levenberg = damping if isinstance(damping, LevenbergMarquardt) else None
        self._reject, self._maximize = reject, maximize
        self._were_adaptive: set[str] = set()  # coefficients, when groups were last looked at
        self._exact_model = (quadratic_model or ("exact" if adaptive else "blocks")) == "exact"
        start = damping.initial if isinstance(damping, LevenbergMarquardt) else damping
        options = {
            "lr": lr,
            "momentum": momentum,
            "damping": start(0) if callable(start) else start,
            "weight_decay": weight_decay,
            "norm_constraint": norm_constraint,
        }
        super().__init__(
            model,
            loss,
            params,
            options,
            schedule=schedule,
            curvature=CurvatureOptions(
                approximation, default, vectors, decay, statistics_every, inverse_every, inverse, power
            ),
            strict=strict,
            risk_options=risk_options,
        )

    @property
    def _adapts(self) -> bool:
        """Whether this step adapts the damping."""
        return self._levenberg is not None and (self.curvature.steps + 1) % self._levenberg.interval == 0

    @property
    def _adaptive(self) -> bool:
        """Whether the quadratic model gives a coefficient."""
        return any(isinstance(group[name], str) for group in self.param_groups for name in ("lr", "momentum"))

    @property
    def _looks_again(self) -> bool:
        adaptive = self._adaptive and self._exact_model
        return super()._looks_again or self._adapts or self._reject is not None or adaptive

    @property
    def _undoes(self) -> bool:
        return self._reject is not None

    # --------------------------------------------------------------------------------------------------------- a step
    def _step(self, move: Move, report: StepReport) -> None:
        known = self._combine(move, report)
        move.bound_update(lambda: self._curved(move))
        displacement = move.with_decay()
        self._report(move, displacement, report)
        if self._adapts or self._reject is not None:
            if known is None or displacement is not move.update:
                known = self._model(move, [displacement]), [1.0]
            self._add_and_look(move, displacement, known, report)
        else:
            move.vectors.add_to_params(displacement)
        if not report.rejected:
            move.remember()

    def _gradient(self) -> dict[str, Tensor]:
        """The gradient of what is minimised: with the sign of `maximize`, and with coupled weight decay."""
        found = super()._gradient()
        if self._maximize:
            found = {key: -g for key, g in found.items()}
        for group in self.param_groups:
            decay = as_weight_decay(group["weight_decay"])
            if decay.kind == "coupled" and decay.strength:
                for p in group["params"]:
                    if (g := found.get(key := self._keys[p])) is not None:
                        found[key] = g + decay.strength * p.to(g.dtype)
        return found

    def _gradient_of_losses(self) -> dict[str, Tensor]:
        found = super()._gradient_of_losses()
        for group, key, p in self._listed:
            decay = as_weight_decay(group["weight_decay"])
            if decay.kind == "in_loss" and decay.strength and key in found:
                found[key] = found[key] + (decay.strength if self._maximize else -decay.strength) * p.to(found[key])
        return found

    def _combine(self, move: Move, report: StepReport) -> tuple[QuadraticModel, list[float]] | None:
        """Set the update, with coefficients from the options or from the quadratic model.

        Returns:
            The quadratic model and the update in its coordinates, if there is one.
        """
        coefficients, known = [move.option("lr"), move.option("momentum")], None
        if self._adaptive:
            # The model chooses factors of both directions; a number of a group is part of its direction, times 1.
            fixed = [None if "adaptive" in values else 1.0 for values in coefficients]
            coefficients = [[1.0 if value == "adaptive" else value for value in values] for values in coefficients]
            directions = [times(move.direction, [-lr for lr in coefficients[0]]), times(move.velocity, coefficients[1])]
            model = self._model(move, directions)
            known = model, model.minimizer(fixed)
            coefficients = [[w * value for value in values] for w, values in zip(known[1], coefficients, strict=True)]
        lr, momentum = coefficients
        report.lr, report.momentum = sorted(set(lr)), sorted(set(momentum))
        move.combine(lr, momentum)
        return known

    def _model(self, move: Move, directions: Sequence[Sequence[Tensor]]) -> QuadraticModel:
        """The quadratic model of this step's loss along some directions."""

        def form(vectors: Sequence[Sequence[Tensor]]) -> Tensor:
            rows = move.vectors.split([torch.stack(parts) for parts in zip(*vectors, strict=True)])
            named = dict(zip(move.vectors.keys, rows, strict=True))
            return self.curvature.quadratic_form(named, self._exact_model)

        decays = [as_weight_decay(group["weight_decay"]).curvature for group in move.groups]
        return QuadraticModel.along(directions, move.gradient, form, decays, move.option("damping"))

    def _add_and_look(
        self,
        move: Move,
        displacement: Sequence[Tensor],
        known: tuple[QuadraticModel, Sequence[float]],
        report: StepReport,
    ) -> None:
        """Move, and see whether the loss changed as predicted; adapt the damping, or undo the step.

        Args:
            move: The step.
            displacement: What is added to its parameters.
            known: A quadratic model, and the displacement in its coordinates.
            report: Of the step.
        """
        include = self._levenberg is not None and self._levenberg.include_damping
        model, w = known
        report.quadratic_change = model.change(w, include)
        before, report.loss = [p.clone() for p in move.vectors.params], self._objective()
        move.vectors.add_to_params(displacement)
        report.new_loss = self._objective()
        predicted = report.quadratic_change
        report.rho = (report.new_loss - report.loss) / predicted if predicted else float("nan")
        if self._reject is not None and not report.new_loss <= report.loss:
            for p, old in zip(move.vectors.params, before, strict=True):
                p.copy_(old)
            self._reject_step(report)
        elif self._adapts and self._levenberg is not None and (report.update_norm or report.scale < 1):
            for group in self.param_groups:
                group["damping"] = self._levenberg.adapted(group["damping"], report.rho)

    def _objective(self) -> float:
        """The loss of this step's batches at the parameters of now, with weight decay that is part of it."""
        value = self.curvature.loss()
        value = -value if self._maximize else value
        for group, _, p in self._listed:
            if decay := as_weight_decay(group["weight_decay"]).curvature:
                value += decay / 2 * float(p.square().sum())
        return value

    def _not_finite(self, error: NumericsError, report: StepReport) -> None:
        if self._reject is None:
            raise error from None
        self._reject_step(report)

    def _reject_step(self, report: StepReport) -> None:
        assert self._reject is not None
        report.rejected = True
        for group in self.param_groups:
            group["damping"] *= self._reject
            if self._levenberg is not None:
                group["damping"] = min(group["damping"], self._levenberg.max)

    def _check_groups(self) -> None:
        super()._check_groups()
        for group in self.param_groups:
            as_weight_decay(group["weight_decay"])
            coefficients = [self._coefficient(group, name) for name in ("lr", "momentum")]
            if group["norm_constraint"] is not None and "adaptive" in coefficients:
                raise ValueError(
                    "An adaptive lr or momentum and a norm constraint can't both choose the length of a step; give one."
                )
        for name in ("lr", "momentum"):
            values = {group[name] for group in self.param_groups}
            if "adaptive" in values and len(values) > 1:
                raise ValueError(f"{name} is adaptive in one group and a number in another; one value serves all then.")

    def _coefficient(self, group: dict[str, Any], name: str) -> float | Adaptive:
        """The learning rate or the momentum of a group: a number, or "adaptive", which no scheduler drives."""
        value, were = group[name], self._were_adaptive
        adaptive = isinstance(value, str) and value == "adaptive"
        found = Adaptive(value) if adaptive else number(name, value)
        group[name] = value if isinstance(value, Tensor) else found  # which others may write to, as schedulers do
        if name in were and "initial_lr" in group and (name == "lr" or not adaptive):
            raise scheduled(name)
        (were.add if adaptive else were.discard)(name)
        return found
