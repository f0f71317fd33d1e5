"""What optimizers that follow the curvature of training have in common: groups, doors, state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvlinops_plus.blocks.heard_pass import HeardBatch
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.optim.kfac.move import Move
from curvlinops_plus.optim.kfac.policies import as_norm_constraint, as_weight_decay, number, plain_policy
from curvlinops_plus.optim.kfac.running_inverse import RunningInverse
from curvlinops_plus.optim.kfac.step_report import StepReport
from curvlinops_plus.optim.kfac.watch import Watch
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.wrappers import wrapped_processes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CurvatureOptimizer"]


class CurvatureOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps use the inverse of a curvature that follows training.

    Subclasses write `_step`.

    Args:
        model: The network.
        loss: The loss, or several.
        params: Parameters, or groups of them; None: all that require a gradient.
        options: Options of groups.
        schedule: Damping as a function of the number of steps before, if it is one.
        statistics: Options of `RunningInverse`.
        strict: Refuse a step for which statistics were due, and no batch was seen.
        risk_options: Options of `EmpiricalRisk`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        params: Any,
        options: dict[str, Any],
        *,
        schedule: Callable[[int], float] | None,
        statistics: dict[str, Any],
        strict: bool,
        risk_options: dict[str, Any],
    ) -> None:
        groups = _groups(model, params)
        if schedule is not None and any("damping" in group for group in groups):
            raise ValueError("A schedule sets the damping of all groups, and one of them has its own. Give one.")
        risk_options = {"processes": wrapped_processes(model), **risk_options}  # replicas must not drift apart
        risk = EmpiricalRisk(model, loss, (), [p for group in groups for p in group["params"]], **risk_options)
        #: The statistics and their inverse.
        self.curvature = RunningInverse(risk, **statistics)
        self._keys = {p: key for key, p in risk.params.items()}
        self._schedule, self._strict = schedule, strict
        super().__init__(groups, options)
        self._check_groups()
        #: What the last step did.
        self.last_step = StepReport(-1)
        losses = [one.loss for one in risk.losses]
        modules = [one for one in losses if isinstance(one, nn.Module)]
        #: Hears plain training loops; None if a loss is a function, which takes no hooks.
        self._watch = Watch(model, modules, self._begin, self._read, self._add) if modules == losses else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, in the constructor alone.

        Raises:
            ValueError: If the optimizer was made without them.
        """
        given = param_group["params"]
        for p in _as_list(given):
            if p not in self._keys:
                raise ValueError(
                    f"A parameter of shape {list(p.shape)} is not among those that the optimizer was made with, so no "
                    "layer is listened to for it. Give all of them to the constructor: those that are frozen, and have "
                    "no gradient, are left alone until they have one."
                )
        super().add_param_group(param_group)

    # --------------------------------------------------------------------------------------------------------- doors
    @contextmanager
    def listen(self, batch: Any) -> Iterator[None]:
        """Add a batch to the statistics of this step from the forward pass that happens inside.

        For losses that are functions, and models that are called inside of other code: call the model once in here, and
        go backward afterwards. Several batches before a step are one update, each weighed by its examples.

        Args:
            batch: What the model is called with, and the targets: `(X, y)`, or a mapping with "labels".

        Raises:
            ValueError: If the model was not called exactly once, or its graph is gone.
            NumericsError: If a statistic is NaN or infinite; nothing has changed then.
        """
        with self._paused(), self.curvature.listen(batch, remember=self._looks_again):
            yield

    def warmup(self, batches: Iterable[Any], steps: int | None = None, *, progressbar: bool = False) -> None:
        """Add batches to the statistics, with equal weights, without moving parameters: before the first step.

        Args:
            batches: As for `listen`; the model is run on each.
            steps: How many of them; default: all.
            progressbar: Show a bar.

        Raises:
            ValueError: If a step was taken already, or the loss is a sum, whose batches would be added up.

        Source: kfac_jax's burn-in.
        """
        steps_taken, reduction = self.curvature.steps, self.curvature.risk.losses.reduction
        if steps_taken or reduction == "sum":
            raise ValueError(
                "warmup(...) averages batches before the first step, of losses that are means. Here "
                f"{steps_taken} steps were taken, and the reduction is {reduction!r}."
            )
        for batch in tqdm(islice(batches, steps), desc="warmup", disable=not progressbar):
            self.curvature.estimator.update(batch, decay=1.0)
        self.curvature.forget_examples()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """The hooks ignore what happens in here."""
        if self._watch is not None:
            self._watch.paused = True
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.paused = False

    def _begin(self, X: Any, unpack: bool) -> HeardBatch | None:
        return self.curvature.begin(X, unpack, remember=self._looks_again)

    def _read(self, output: Any) -> Sequence[Tensor]:
        risk = self.curvature.risk
        return risk.losses.select(output, risk.options.output)[0]

    def _add(self, heard: HeardBatch, targets: Sequence[Any]) -> None:
        self.curvature.add(heard, self.curvature.risk.losses.joined(targets))

    def close(self) -> None:
        """Remove all hooks from model and losses."""
        if self._watch is not None:
            self._watch.close()
        self.curvature.drop()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"A {type(self).__name__} is bound to its model by hooks, and can't be copied or pickled. Copy the model, "
            "make an optimizer for it, and use state_dict() and load_state_dict()."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @property
    def _looks_again(self) -> bool:
        """Whether this step runs the model on its batches once more."""
        return False

    # --------------------------------------------------------------------------------------------------------- steps
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Zeroes gradients, runs the model, the loss and the backward pass, and returns the loss. Called
                once.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If statistics were due, and no batch was seen since the last step.
            NumericsError: If a gradient is NaN or infinite; parameters and velocities have not changed then.
            ValueError: If some parameters of a block have a gradient, and others have none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check_groups()
            if self._schedule is not None:
                for group in self.param_groups:
                    group["damping"] = number("damping", self._schedule(self.curvature.steps))
            if self._watch is not None:
                self._watch.drop()
            self.curvature.finish()
            self.curvature.require_batches(self._strict, self._looks_again)
            self.last_step = StepReport(self.curvature.steps, examples=self.curvature.examples)
            self.last_step.damping = [group["damping"] for group in self.param_groups]
            if any(p.grad is not None for _, _, p in self._listed()):
                self._step(self.last_step)
            else:
                self.last_step.left_alone = list(self._keys.values())
            self.curvature.advance()
        return loss

    @abstractmethod
    def _step(self, report: StepReport) -> None:
        """Do what the optimizer does, and say what it was."""

    def _move(self, gradient: dict[str, Tensor], report: StepReport) -> Move:
        """Precondition a gradient.

        Args:
            gradient: Key of a parameter to its gradient.
            report: Of this step.
        """
        dampings = {
            key: group["damping"] + as_weight_decay(group.get("weight_decay", 0.0)).curvature
            for group, key, _ in self._listed()
        }
        report.refreshed = self.curvature.refresh_if_due(dampings)
        direction = self.curvature.apply(gradient, dampings)
        report.left_alone = [key for key in self._keys.values() if key not in direction]
        groups, keys, params = zip(*(entry for entry in self._listed() if entry[1] in direction), strict=True)
        move = Move(
            keys,
            params,
            groups,
            self.state,
            [gradient[key] for key in keys],
            [direction[key] for key in keys],
            [dampings[key] for key in keys],
        )
        move.bound_direction()
        return move

    def _listed(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Group, key and tensor of every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                yield group, self._keys[p], p

    def _gradient(self) -> dict[str, Tensor]:
        """Key of a parameter to its gradient, of those that have one; in the precision of the statistics."""
        dtype = self.curvature.risk.dtype
        return {key: p.grad.to(dtype) for _, key, p in self._listed() if p.grad is not None}

    def _check_groups(self) -> None:
        """Refuse options that are out of range."""
        for group in self.param_groups:
            number("damping", group["damping"])
            constraint = as_norm_constraint(group["norm_constraint"])
            if constraint is not None and constraint.norm != "euclidean" and self.curvature.power != -1:
                raise ValueError(
                    f"A norm constraint in the {constraint.norm} norm is for inverses; with power="
                    f'{self.curvature.power:g} use NormConstraint(..., norm="euclidean"), or None.'
                )

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Everything that going on bit for bit needs, in tensors and plain Python; statistics under "curvature"."""
        state = super().state_dict()
        groups = [{name: plain_policy(value) for name, value in group.items()} for group in state["param_groups"]]
        return state | {"param_groups": groups, "curvature": self.curvature.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another optimizer with the same arguments stopped.

        Raises:
            ValueError: If the state is foreign, or of another network or other approximations.
        """
        if "curvature" not in state_dict:
            raise ValueError(
                f"This is not the state of a {type(self).__name__}: the key 'curvature' is missing. Is it "
                "another optimizer's?"
            )
        before = super().state_dict()
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "curvature"})
        try:
            self.curvature.load_state_dict(state_dict["curvature"])
        except Exception:
            super().load_state_dict(before)
            raise
        if self._watch is not None:
            self._watch.drop()
        # PyTorch casts state to the parameters' dtype, which would round what is kept for parameters in half precision.
        listed = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for p, index in zip(listed, numbers, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, copy=True)


def first_nonfinite(gradient: Mapping[str, Tensor]) -> str | None:
    """Key of a gradient with NaN or infinite numbers."""
    if gradient and not bool(torch.stack([g.sum() for g in gradient.values()]).isfinite().all()):
        return next((key for key, g in gradient.items() if not bool(g.isfinite().all())), None)
    return None


def refusal_of_nonfinite(key: str) -> NumericsError:
    """The error about a gradient that is not finite."""
    return NumericsError(
        f"The gradient of {key} is not finite; parameters have not changed. Look for a loss that diverged (a larger "
        "damping or a smaller lr helps), for NaN in the batch, or for overflow in half precision."
    )


def _groups(model: nn.Module, params: Any) -> list[dict[str, Any]]:
    """Parameter groups, as PyTorch's optimizers take them."""
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    params = list(params.values() if isinstance(params, Mapping) else params)
    if params and isinstance(params[0], dict):
        return [{**group, "params": _as_list(group["params"])} for group in params]
    return [{"params": params}]


def _as_list(params: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
