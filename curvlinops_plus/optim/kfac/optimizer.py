"""K-FAC as a PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks import KFAC
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.optim.kfac.move import Move
from curvlinops_plus.optim.kfac.policies import (
    LevenbergMarquardt,
    NormConstraint,
    WeightDecay,
    as_norm_constraint,
    as_weight_decay,
    number,
)
from curvlinops_plus.optim.kfac.quadratic_model import QuadraticModel
from curvlinops_plus.optim.kfac.running_inverse import Inverse, RunningInverse
from curvlinops_plus.optim.kfac.step_report import StepReport
from curvlinops_plus.risk import EmpiricalRisk, MonteCarlo, Vectors

__all__ = ["KFACOptimizer"]


class KFACOptimizer(torch.optim.Optimizer):
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
        if reject is not None:
            number("reject", reject, low=1.0)
            if callable(damping):
                raise ValueError(
                    "reject= multiplies the damping, which is a schedule here. Give a number, or LevenbergMarquardt."
                )
        self._policy, self._reject, self._maximize, self._strict = damping, reject, maximize, strict
        self._exact_model = (quadratic_model or ("exact" if adaptive else "blocks")) == "exact"
        groups = _groups(model, params)
        risk = EmpiricalRisk(model, loss, (), [p for group in groups for p in group["params"]], **risk_options)
        #: The statistics and their inverse.
        self.curvature = RunningInverse(
            risk,
            approximation,
            default=default,
            vectors=MonteCarlo() if vectors is None else vectors,
            decay=decay,
            statistics_every=statistics_every,
            inverse_every=inverse_every,
            inverse=inverse,
            power=power,
        )
        self._keys = {p: key for key, p in risk.params.items()}
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "damping": damping.initial
            if isinstance(damping, LevenbergMarquardt)
            else damping(0)
            if callable(damping)
            else damping,
            "weight_decay": weight_decay,
            "norm_constraint": norm_constraint,
        }
        super().__init__(groups, defaults)
        self._check_groups()
        #: What the last step did.
        self.last_step = StepReport(-1)

    # --------------------------------------------------------------------------------------------------------- doors
    @contextmanager
    def listen(self, batch: Any) -> Iterator[None]:
        """Add a batch from the forward pass inside."""
        with self.curvature.listen(batch, remember=self._looks_again):
            yield

    @property
    def _adapts(self) -> bool:
        """Whether this step adapts the damping."""
        policy = self._policy
        return isinstance(policy, LevenbergMarquardt) and (self.curvature.steps + 1) % policy.interval == 0

    @property
    def _adaptive(self) -> bool:
        """Whether the quadratic model gives a coefficient."""
        return any("adaptive" in (group["lr"], group["momentum"]) for group in self.param_groups)

    @property
    def _looks_again(self) -> bool:
        """Whether this step runs the model on its batches once more."""
        return self._adapts or self._reject is not None or (self._adaptive and self._exact_model)

    # --------------------------------------------------------------------------------------------------------- a step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Zeroes gradients, runs the model, the loss and the backward pass, and returns the loss.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check_groups()
            self.last_step = self._step()
        return loss

    def _step(self) -> StepReport:
        curvature = self.curvature
        self._set_damping()
        curvature.require_batches(self._strict, self._looks_again)
        report = StepReport(curvature.steps, examples=curvature.examples)
        report.damping = [group["damping"] for group in self.param_groups]
        gradient = self._gradient()
        if (name := _first_nonfinite(gradient)) is not None:
            return self._refused(report, f"The gradient of {name} is not finite; nothing has changed.")
        dampings = {
            key: group["damping"] + as_weight_decay(group["weight_decay"]).curvature for group, key, _ in self._listed()
        }
        report.refreshed = curvature.refresh_if_due(dampings)
        direction = curvature.apply(gradient, dampings)
        listed = [(group, key, p) for group, key, p in self._listed() if key in direction]
        groups, keys, params = zip(*listed, strict=True)
        states = [self.state[p] for p in params]
        report.left_alone = [key for key in self._keys.values() if key not in direction]
        move = Move(
            keys, groups, states, [gradient[k] for k in keys], [direction[k] for k in keys], [dampings[k] for k in keys]
        )

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            found = curvature.product(dict(zip(keys, v, strict=True)))
            return [found[key] for key in keys]

        move.bound_direction()
        self._combine(move, report)
        move.bound_update(product)
        displacement = move.decayed(params)
        report.scale = move.scale
        report.update_norm = float(torch.stack(torch._foreach_norm(displacement)).norm())
        if self._adapts or self._reject is not None:
            self._step_and_look(move, displacement, params, report)
        else:
            _add(params, displacement)
        if not report.rejected:
            move.remember(states)
        curvature.advance()
        return report

    def _set_damping(self) -> None:
        if callable(self._policy):
            for group in self.param_groups:
                group["damping"] = number("damping", self._policy(self.curvature.steps))

    def _listed(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Group, key and tensor of every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                yield group, self._keys[p], p

    def _gradient(self) -> dict[str, Tensor]:
        """The gradient of what is minimised, of the parameters that have one."""
        dtype, found = self.curvature.risk.dtype, {}
        for group, key, p in self._listed():
            if p.grad is not None:
                g = p.grad.to(dtype)
                g = -g if self._maximize else g
                decay = as_weight_decay(group["weight_decay"])
                found[key] = g + decay.strength * p.to(dtype) if decay.kind == "coupled" and decay.strength else g
        return found

    def _combine(self, move: Move, report: StepReport) -> None:
        """Set the update, with coefficients from the options or from the quadratic model."""
        lr, momentum = move.option("lr"), move.option("momentum")
        if self._adaptive:
            model = self._model(move, [[-t for t in move.direction], move.velocity])
            fixed = [None if "adaptive" in values else values[0] for values in (lr, momentum)]
            found = model.minimizer(fixed)
            lr, momentum = [found[0]] * len(lr), [found[1]] * len(momentum)
        report.lr, report.momentum = sorted(set(lr)), sorted(set(momentum))
        move.combine(lr, momentum)

    def _model(self, move: Move, directions: list[list[Tensor]]) -> QuadraticModel:
        """The quadratic model of this step's loss along some directions."""
        decays = [as_weight_decay(group["weight_decay"]).curvature for group in move.groups]
        dampings = move.option("damping")

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            found = self.curvature.model_product(dict(zip(move.keys, v, strict=True)), self._exact_model)
            return [found[key] for key in move.keys]

        return QuadraticModel.along(directions, move.gradient, product, decays, dampings)

    def _step_and_look(
        self, move: Move, displacement: list[Tensor], params: Sequence[Tensor], report: StepReport
    ) -> None:
        """Move, and see whether the loss changed as predicted; adapt the damping, or undo the step."""
        before = [p.clone() for p in params]
        policy = self._policy if isinstance(self._policy, LevenbergMarquardt) else None
        model = self._model(move, [displacement])
        report.quadratic_change = model.change([1.0], policy is not None and policy.include_damping)
        report.loss = self._objective()
        _add(params, displacement)
        report.new_loss = self._objective()
        report.rho = (
            (report.new_loss - report.loss) / report.quadratic_change if report.quadratic_change else float("nan")
        )
        report.rejected = self._reject is not None and not report.new_loss <= report.loss
        if report.rejected:
            for p, old in zip(params, before, strict=True):
                p.copy_(old)
            self._raise_damping()
        elif self._adapts:
            assert policy is not None
            for group in self.param_groups:
                group["damping"] = policy.adapted(group["damping"], report.rho)

    def _objective(self) -> float:
        """The loss of this step's batches at the parameters of now, with weight decay that is part of it."""
        value = self.curvature.loss()
        value = -value if self._maximize else value
        for group, _, p in self._listed():
            if decay := as_weight_decay(group["weight_decay"]).curvature:
                value += decay / 2 * float(p.square().sum())
        return value

    def _raise_damping(self) -> None:
        assert self._reject is not None
        for group in self.param_groups:
            group["damping"] *= self._reject
            if isinstance(self._policy, LevenbergMarquardt):
                group["damping"] = min(group["damping"], self._policy.max)

    def _refused(self, report: StepReport, why: str) -> StepReport:
        """A step that can't be taken: an error, or one rejection."""
        if self._reject is None:
            raise NumericsError(why)
        report.rejected = True
        self._raise_damping()
        self.curvature.advance()
        return report

    def _check_groups(self) -> None:
        for group in self.param_groups:
            for name in ("lr", "momentum"):
                if group[name] != "adaptive":
                    number(name, group[name])
            number("damping", group["damping"])
            as_weight_decay(group["weight_decay"])
            as_norm_constraint(group["norm_constraint"])
            if group["norm_constraint"] is not None and "adaptive" in (group["lr"], group["momentum"]):
                raise ValueError(
                    "An adaptive lr or momentum and a norm constraint can't both choose the length of a step."
                )
        for name in ("lr", "momentum"):
            values = {group[name] for group in self.param_groups}
            if "adaptive" in values and len(values) > 1:
                raise ValueError(
                    f"{name} is adaptive in one group and a number in another; one number serves all groups."
                )


def _groups(model: nn.Module, params: Any) -> list[dict[str, Any]]:
    """Parameter groups, as PyTorch's optimizers take them."""
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    params = list(params.values() if isinstance(params, dict) else params)
    if params and isinstance(params[0], dict):
        return [{**group, "params": list(group["params"])} for group in params]
    return [{"params": params}]


def _add(params: Sequence[Tensor], displacement: Sequence[Tensor]) -> None:
    torch._foreach_add_(list(params), [d.to(p.dtype) for p, d in zip(params, displacement, strict=True)])


def _first_nonfinite(gradient: dict[str, Tensor]) -> str | None:
    if gradient and not bool(torch.stack([g.sum() for g in gradient.values()]).isfinite().all()):
        return next((key for key, g in gradient.items() if not bool(g.isfinite().all())), None)
    return None
