"""What optimizers that follow the curvature of training have in common: groups, doors, state."""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.optim.kfac.block_vectors import copied
from curvlinops_plus.optim.kfac.curvature_options import CurvatureOptions
from curvlinops_plus.optim.kfac.move import Move
from curvlinops_plus.optim.kfac.policies import as_norm_constraint, number, plain_policy
from curvlinops_plus.optim.kfac.refusals import naming_training_mode, require_order, require_same_loss
from curvlinops_plus.optim.kfac.running_curvature import RunningCurvature
from curvlinops_plus.optim.kfac.step_plan import StepPlan
from curvlinops_plus.optim.kfac.step_report import Norms, StepReport
from curvlinops_plus.optim.kfac.tensor_lists import norm
from curvlinops_plus.optim.kfac.watch import Watch
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.process_state import untraced
from curvlinops_plus.risk.replicas import wrapped_processes

if TYPE_CHECKING:
    from typing_extensions import Self


class CurvatureOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps use the inverse of a curvature that follows training.

    Subclasses write `_step`.

    Args:
        params: Parameters, or groups of them; None: all that require a gradient.
        schedule: Damping as a function of the number of steps before, if it is one.
        strict: Refuse a step for which statistics were due, and no batch was seen.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        params: Any,
        options: dict[str, Any],
        *,
        schedule: Callable[[int], float] | None,
        curvature: CurvatureOptions,
        strict: bool,
        risk_options: dict[str, Any],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"The model is a {type(model).__name__}; expected the nn.Module itself, whose layers are listened to: "
                f"{type(self).__name__}(model, loss, params=...)."
            )
        _check_risk_options(type(self).__name__, risk_options)
        groups = _groups(model, params)
        if schedule is not None and any("damping" in group for group in groups):
            raise ValueError("A schedule sets the damping of all groups, and one of them has its own. Give one.")
        risk_options = {"processes": wrapped_processes(model), **risk_options}  # replicas must not drift apart
        risk = EmpiricalRisk(model, loss, (), [p for group in groups for p in _tensors(group)], **risk_options)
        #: The statistics and their inverse.
        self.curvature = RunningCurvature(risk, curvature)
        self._keys = {p: key for key, p in risk.params.items()}
        self._plan = StepPlan(self._keys, risk.dtype)
        self._schedule, self._strict = schedule, strict
        super().__init__(groups, options)
        self._check_groups()
        #: What the last step did.
        self.last_step = StepReport(-1)
        #: Compare the loss that `step`'s closure returns with that of the statistics, in a pass of its own.
        self.check_loss = False
        #: Report norms of each parameter in `last_step`.
        self.report_norms = False
        losses = [one.loss for one in risk.losses]
        modules = [one for one in losses if isinstance(one, nn.Module)]
        #: Hears plain training loops; None if a loss is a function, which takes no hooks.
        self._watch: Watch | None = None
        if modules == losses:
            own = weakref.ref(self)  # no cycle: an optimizer that is dropped is gone at once, and its hooks with it
            self._watch = Watch(model, modules, self.curvature, lambda: getattr(own(), "_looks_again", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, in the constructor alone.

        Raises:
            ValueError: If the optimizer was made without them.
        """
        for p in _tensors(param_group):
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
            with naming_training_mode(self.curvature.risk):
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

    def close(self) -> None:
        """Remove all hooks from model and losses."""
        if self._watch is not None:
            self._watch.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"A {type(self).__name__} is bound to its model by hooks, and can't be copied or pickled. Copy the model, "
            "make an optimizer for it, and use state_dict() and load_state_dict()."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients: batches that these came from belong to no step any more."""
        super().zero_grad(set_to_none)
        self.curvature.seen.forget_differentiated()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """No; a gradient scaler asks before it takes a step, so that it is known that there is one."""
        self.curvature.scale = None
        return False

    @property
    def _looks_again(self) -> bool:
        """Whether this step runs the model on its batches once more."""
        return self.check_loss

    @property
    def _undoes(self) -> bool:
        """Whether this step may be undone."""
        return False

    # --------------------------------------------------------------------------------------------------------- steps
    @untraced
    def step(self, closure: Callable[[], Any] | None = None, scaler: Any = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Zeroes gradients, runs the model, the loss and the backward pass, and returns the loss. Called
                once. With `check_loss`, and a loss that was computed before, `lambda: value` will do.
            scaler: The `GradScaler` whose scale was divided out of the gradients. Needed where it is not the scaler
                that takes the step, and where the losses were multiplied with other numbers besides.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If statistics were due, and no batch was seen since the last step.
            NumericsError: If a gradient or a statistic is NaN or infinite; parameters and velocities have not changed
                then.
            ValueError: If some parameters of a block have a gradient, and others have none; with `check_loss`, if the
                closure's loss is another one than that of the statistics; or the model holds other tensors than when
                the optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.curvature.risk.require_in_place()
            self._plan.check(self.param_groups, self._check_groups)
            if scaler is not None:
                self.curvature.scale = float(scaler.get_scale())
            if self._schedule is not None:
                for group in self.param_groups:
                    group["damping"] = number("damping", self._schedule(self.curvature.steps))
            if self._watch is not None:
                self._watch.drop()
            self.last_step = StepReport(self.curvature.steps)
            self.last_step.damping = [group["damping"] for group in self.param_groups]
            try:
                self._finish_and_step(self.last_step, loss)
            except Exception:
                self.curvature.forget()  # the next step has batches of its own
                raise
            self.curvature.steps += 1
            self.curvature.forget()
        return loss

    def _finish_and_step(self, report: StepReport, loss: Any) -> None:
        """Finish the statistics of this step, and take it; `loss` is what a closure returned."""
        gradient = self._gradient()
        try:
            self.curvature.finish()
        except (NumericsError, UnsupportedError) as error:
            key = first_nonfinite(gradient)
            found = error if key is None else refusal_of_nonfinite(key)
            if isinstance(found, UnsupportedError):
                raise
            self._not_finite(found, report)
            return
        self.curvature.require_batches(self._strict, self._looks_again)
        if self.check_loss:
            require_same_loss(self.curvature.risk, loss, self.curvature.loss)
        report.examples = self.curvature.examples
        if (key := first_nonfinite(gradient)) is not None:
            self._not_finite(refusal_of_nonfinite(key), report)
        elif gradient:
            self.curvature.seen.warn_of_other_losses()
            if self._looks_again:
                self.curvature.compare(self._gradient_of_losses())
            if (move := self._move(gradient, report)) is not None:
                self._step(move, report)
        else:
            report.left_alone = list(self._keys.values())

    def _not_finite(self, error: NumericsError, report: StepReport) -> None:
        """Statistics or gradients are not finite."""
        raise error from None

    @abstractmethod
    def _step(self, move: Move, report: StepReport) -> None:
        """Do what the optimizer does with a preconditioned gradient, and say what it was."""

    def _move(self, gradient: dict[str, Tensor], report: StepReport) -> Move | None:
        """Precondition a gradient; None if none of its parameters has a curvature yet.

        Args:
            gradient: Key of a parameter to its gradient.
        """
        blocks = (group.layout.names for layer in self.curvature.estimator.plan for group in layer.layer.groups)
        dampings = self._plan.dampings(self.param_groups, blocks)
        inverse, factor = self.curvature.inverse, self.curvature.factor
        report.refreshed = inverse.refresh_if_due(self.curvature.steps, dampings, factor)
        if report.refreshed or self.curvature.new_factor:
            for kept in self.state.values():  # it belongs to another curvature
                kept.pop("curved_velocity", None)
        vectors = self._plan.vectors(self.param_groups, gradient, inverse.layouts, self.state)
        report.left_alone = [key for key in self._keys.values() if key not in vectors.keys]
        if not vectors.keys:
            return None
        g = vectors.join([gradient[key] for key in vectors.keys])
        direction = vectors.join_parts(inverse.apply(vectors.parts(g), dampings, factor))
        now, inverted = ([of[key] for key in vectors.first_keys] for of in (dampings, inverse.inverted(dampings)))
        move = Move(vectors, self.state, g, direction, now, inverted, self._undoes)
        move.bound_direction()
        return move

    def _curved(self, move: Move) -> list[Tensor]:
        """The curvature of this step's loss times the update."""
        parts = move.vectors.parts(move.update)
        return move.vectors.join_parts(self.curvature.inverse.product(parts, self.curvature.factor))

    def _report(self, move: Move, update: list[Tensor], report: StepReport) -> None:
        """Say how long an update is, before it is added."""
        report.scale = move.scale
        report.update_norm = norm(update)
        if self.report_norms:
            columns = (move.vectors.params, *map(move.vectors.split, (move.gradient, move.direction, update)))
            table = torch.stack([torch.stack([t.double().norm() for t in column]) for column in columns], 1)
            report.norms = {key: Norms(*row) for key, row in zip(move.vectors.keys, table.tolist(), strict=True)}

    @property
    def _listed(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Group, key and tensor of every parameter."""
        return self._plan.listed(self.param_groups)

    def _gradient(self) -> dict[str, Tensor]:
        """Key of a parameter to its gradient, of those that have one; in the precision of the statistics."""
        dtype = self.curvature.risk.dtype
        return {key: _strided(g, dtype) for _, key, p in self._listed if (g := p.grad) is not None}

    def _gradient_of_losses(self) -> dict[str, Tensor]:
        """What is in `.grad`, without terms besides the losses that are known."""
        return CurvatureOptimizer._gradient(self)

    def _check_groups(self) -> None:
        """Refuse options that are out of range."""
        for group in self.param_groups:
            group["damping"] = number("damping", group["damping"])
            constraint = as_norm_constraint(group["norm_constraint"])
            if constraint is not None and constraint.norm != "euclidean" and self.curvature.options.power != -1:
                raise ValueError(
                    f"A norm constraint in the {constraint.norm} norm is for inverses; with power="
                    f'{self.curvature.options.power:g} use NormConstraint(..., norm="euclidean"), or None.'
                )

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Everything that going on bit for bit needs, in tensors and plain Python; statistics under "curvature"."""
        state = super().state_dict()
        groups = [{name: plain_policy(value) for name, value in group.items()} for group in state["param_groups"]]
        kept = {n: copied(entries) for n, entries in state["state"].items()}
        state |= {"state": kept, "param_groups": groups, "curvature": self.curvature.state_dict()}
        return state | {"parameters": [key for _, key, _ in self._listed]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another optimizer with the same arguments stopped.

        Raises:
            ValueError: If the state is foreign, or of another network or other approximations, or if parameters had
                another order.
        """
        if "curvature" not in state_dict:
            raise ValueError(
                f"This is not the state of a {type(self).__name__}: the key 'curvature' is missing. Is it "
                "another optimizer's?"
            )
        require_order(state_dict, [key for _, key, _ in self._listed])
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
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value


def _strided(g: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that vectors are made from; those of `nn.Embedding(sparse=True)` are sparse."""
    g = g.to_dense() if g.is_sparse else g
    return g if g.dtype == dtype else g.to(dtype)


def first_nonfinite(gradient: Mapping[str, Tensor]) -> str | None:
    """Key of a gradient with NaN or infinite numbers."""
    if gradient and not isfinite(norm(list(gradient.values()))):
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
        if not params:
            raise ValueError(
                f"The model, a {type(model).__name__}, has no parameters that require a gradient. The model comes "
                "first, then the loss; for parameters that are frozen for now, say params=list(model.parameters())."
            )
    params = list(params.values() if isinstance(params, Mapping) else params)
    if params and isinstance(params[0], dict):
        return [{**group, "params": _as_list(group["params"])} for group in params]
    return [{"params": params}]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _tensors(group: Mapping[str, Any]) -> list[Tensor]:
    """The parameters of a group, which may come with their names."""
    return [entry[1] if isinstance(entry, tuple) else entry for entry in _as_list(group["params"])]


def _check_risk_options(optimizer: str, options: dict[str, Any]) -> None:
    """Refuse options that a risk does not have, or an optimizer can't."""
    known = inspect.signature(EmpiricalRisk).parameters
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{optimizer} has no option {', '.join(map(repr, unknown))}.")
    if "weight" in options:
        raise UnsupportedError(
            f"{optimizer}(weight=...): the optimizer takes the gradient of your loss as it is, and can't see whether "
            "it has the weights of the examples. Accumulate weighted curvature by CurvatureEstimator(risk, "
            "...).update(batch)."
        )
