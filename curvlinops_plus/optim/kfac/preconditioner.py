"""The direction of K-FAC alone, for any other optimizer to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

from curvlinops_plus.blocks import KFAC, CurvatureEstimator
from curvlinops_plus.blocks.accumulator import Choice, Choices
from curvlinops_plus.blocks.state import checked
from curvlinops_plus.blocks.users_pass import PassStart
from curvlinops_plus.contexts import Endings, GradMode
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import BlockDiagonal, HeuristicDamping, Layout
from curvlinops_plus.linalg.checksums import require_intact, sealed
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.optim.kfac.flat import StepVectors, norm_of
from curvlinops_plus.optim.kfac.hooks import Hooks
from curvlinops_plus.optim.kfac.policies import (
    LARGEST_DAMPING,
    GroupOptions,
    LevenbergMarquardt,
    NormConstraint,
    StepReport,
    WeightDecay,
)
from curvlinops_plus.optim.kfac.stored import (
    dampings_of_state,
    groups_of_state,
    velocities_of_state,
)
from curvlinops_plus.optim.kfac.trust import Trust
from curvlinops_plus.optim.tied import TiedOptimizer
from curvlinops_plus.options import flag, integer, number, one_of, type_error
from curvlinops_plus.progress import shown
from curvlinops_plus.risk import AllRiskKeywords, EmpiricalRisk, Loss, MonteCarlo
from curvlinops_plus.risk import Vectors as SentBack
from curvlinops_plus.risk.parameters import without_names, wrapped_processes
from curvlinops_plus.risk.preserve import refuse_capture, untraced

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Inverse = Literal["exact", "factored"]

# The options of a preconditioner's groups.
_PRECONDITIONER_OPTIONS = ("damping", "norm_constraint")


class _Recorded(NamedTuple):
    """What all processes have recorded for a step.

    Attributes:
        batches: Whether a batch was added to the statistics in any of them.
        kept: Whether one was kept for evaluating it once more.
        heard: Whether there was any, with examples or without.
        uncalled: Layers that none has called yet.
        error: Of a batch that could not be added.
    """

    batches: bool
    kept: bool
    heard: bool
    uncalled: set[str]
    error: NumericsError | None


class KFACPreconditioner(TiedOptimizer):
    """Replaces gradients by `(K + λI)⁻¹ g`, for any other optimizer to use.

    `K` is a block-diagonal curvature that is updated by the batches of training, as by
    `CurvatureEstimator`. `step()` rewrites `.grad` and leaves parameters alone. Training loops are
    recorded as by `KFACOptimizer`. Gradients of parameters without curvature stay as they are.

    Args:
        model: The network.
        loss: The loss, or several, as for `EmpiricalRisk`.
        damping: `λ`, or a function of the number of steps before.
        params: Parameters or names, as for `EmpiricalRisk`, or groups of them with options of their
            own (`damping`, `norm_constraint`); default: all that require a gradient. Parameters of
            one block belong in one group.
        approximation, default: As for `curvature`.
        vectors: What is backpropagated for the statistics; default: `MonteCarlo()`.
        decay: Of the statistics' moving average, per update.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now, from eigendecompositions;
            "factored" splits `λ` between the factors of each Kronecker product, with the damping of
            the refresh, and is cheaper.
        power: Of `K + λI`, below 0.
        norm_constraint: The largest squared norm of the result, a number or a `NormConstraint`;
            None: no limit. Before an optimizer with momentum give one, such as 1e-2 for `lr=0.1`:
            else steps get too long.
        strict: Refuse a step for which statistics were due, and no batch was seen; else it takes
            the old ones.
        risk_options: The other options of `EmpiricalRisk`, such as `output` and `mask`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.

    Cost: as for `KFACOptimizer`.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model, loss = nn.Linear(3, 2), nn.MSELoss()
        >>> preconditioner, sgd = (
        ...     KFACPreconditioner(model, loss),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ... )
        >>> X, y = torch.rand(8, 3), torch.rand(8, 2)
        >>> for _ in range(3):
        ...     sgd.zero_grad()
        ...     loss(model(X), y).backward()
        ...     preconditioner.step()
        ...     sgd.step()
        >>> preconditioner.last_step.examples
        8
    """

    #: What evaluates the loss of a step's batches once more, if anything does.
    trust: Trust | None = None
    # Options of groups besides damping and norm constraint.
    _group_options: Mapping[str, Any] = {}
    _sign = 1  # what gradients are multiplied with
    _moves = False  # whether there is a velocity
    # Whether the next step runs the model on its batches once more.
    _looks_again: Any = False
    _levenberg: LevenbergMarquardt | None = None
    _reject: float | None = None

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Self:
        """Look at model and loss before Python counts arguments: other optimizers take parameters,
        and no loss.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"The model is a {type(model).__name__}; expected the nn.Module itself, before the "
                f"loss: {cls.__name__}(model, loss, ...). Some of its parameters alone are params=."
            )
        if not args and "loss" not in kwargs:
            raise TypeError(
                f"{cls.__name__}(model, loss, ...) needs the loss that is minimised, such as "
                "nn.CrossEntropyLoss(): the curvature is that of the loss."
            )
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        damping: float | Callable[[int], float] = 1e-3,
        *,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        approximation: Choices = KFAC,
        default: Choice = KFAC,
        vectors: SentBack | str | None = None,
        decay: float = 0.95,
        statistics_every: int = 1,
        inverse_every: int = 10,
        inverse: Inverse = "exact",
        power: float = -1.0,
        norm_constraint: float | NormConstraint | None = None,
        strict: bool = True,
        **risk_options: Unpack[AllRiskKeywords],
    ) -> None:
        _refuse_options(inverse, power, decay, strict, risk_options)
        statistics_every = integer("statistics_every", statistics_every, low=1)
        inverse_every = integer("inverse_every", inverse_every, low=1)
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad]
        if isinstance(params, (str, Tensor, nn.Module)) or not isinstance(params, Iterable):
            raise type_error(
                "params", params, "a list of parameters or names, or of groups of them"
            )
        given = params.values() if isinstance(params, Mapping) else params
        self._schedule = damping if callable(damping) else None
        damping = damping(0) if callable(damping) else damping
        named = without_names(model, given)
        if not named:
            raise ValueError(
                "`params` is empty, or an iterator that was read before. Leave it out for all that "
                "require a gradient, or pass a list, as list(model.parameters())."
            )
        super().__init__(
            named,
            {**self._group_options, "damping": damping, "norm_constraint": norm_constraint},
        )
        for group in self._read_groups(self.param_groups):
            GroupOptions(group)  # refuses what is out of range before the model gets hooks
        # Replicas must not drift apart.
        risk_options = {"processes": wrapped_processes(model), **risk_options}
        trained = [p for group in self.param_groups for p in group["params"]]
        risk = EmpiricalRisk(model, loss, (), trained, **risk_options)
        if decay == 1 and risk.losses.reduction == "sum":
            raise ValueError(
                'decay=1 with reduction="sum" would add up the curvature of all steps; give one '
                "below 1."
            )
        #: The statistics.
        self.curvature = CurvatureEstimator(
            risk,
            approximation,
            default=default,
            vectors=MonteCarlo() if vectors is None else vectors,
            decay=decay,
            leave_out_uncalled=True,
        )
        self.curvature.draws_by_batch = True
        self.curvature._withdraws = True
        self._strict = strict
        self._inverse = inverse
        self._power = power
        self._inverse_every = inverse_every
        self._hooks = Hooks(model, self.curvature, statistics_every)
        self._keys = {p: key for key, p in risk.params.items()}
        #: Key of a parameter to the number of its group.
        self._groups = {
            self._keys[p]: k for k, group in enumerate(self.param_groups) for p in group["params"]
        }
        self._report = StepReport(-1)
        #: Numbers of this report that may be on the device still, by name.
        self._unread: dict[str, Tensor | float] = {}
        self._raw_options: Any = None  # of groups, as they are
        self._forget_inverse()
        self._read_options()

    def __repr__(self) -> str:
        trained = repr(self.curvature.risk).splitlines()[0]
        taken = f"{self.steps} steps, {self.curvature.updates} updates of the statistics"
        return f"{super().__repr__()}\nof {trained}\nafter {taken}"

    @property
    def last_step(self) -> StepReport:
        """What the last step did. On a GPU the first look at it waits for the step."""
        for name, value in self._unread.items():
            setattr(self._report, name, float(value))
        self._unread = {}
        return self._report

    def _forget_inverse(self) -> None:
        """Begin without an inverse, and without vectors for it."""
        #: The dampings of the last refresh, by block.
        self._refreshed: dict[str, float] | None = None
        self._dampings: dict[str, float] = {}  # of the inverse, by block
        self._P: BlockDiagonal | None = None
        self._P_is_current = False  # whether its options are those of now
        self._vectors: StepVectors | None = None
        self._have_gradients: list[bool] = []  # the parameters, when the vectors were made

    def _read_options(self) -> None:
        """Read the options of all groups where some have changed."""
        raw = [
            [
                float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
                for name, value in group.items()
                if name != "params"
            ]
            for group in self.param_groups
        ]
        if raw == self._raw_options:
            return
        self._check_options([GroupOptions(group) for group in self._read_groups(self.param_groups)])
        self._raw_options = raw
        self._P_is_current = False

    def _read_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups with the options that this optimizer reads."""
        if self._moves:
            return groups
        # all else is of the optimizer that takes the step
        return [{name: group[name] for name in _PRECONDITIONER_OPTIONS} for group in groups]

    def _check_options(self, options: list[GroupOptions]) -> None:
        """Refuse options that are out of range, or take all of them."""
        for c in (group.norm_constraint for group in options):
            if c is not None and c.norm != "euclidean" and self._power != -1:
                raise ValueError(
                    f"A norm constraint in the {c.norm} norm is for inverses, and not for power=."
                )
        self._options = options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: no layer is recorded for parameters that the optimizer was made without."""
        if hasattr(self, "curvature"):
            raise ValueError(
                "No layer is recorded for parameters that come later; give all to the constructor."
            )
        super().add_param_group(param_group)

    # -------------------------------------------------------------------------------------- batches
    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return self._hooks.steps

    @contextmanager
    def listen(self, batch: Any) -> Iterator[None]:
        """Record a batch for the statistics of this step from your forward pass.

        For losses that are not heard, such as those inside of models, and for models that are
        called inside of other code: call the model once in here, and go backward afterwards.
        Several batches before a step are one update, each weighed by its examples.

        Args:
            batch: What the model is called with, and the targets: `(X, y)`, or a mapping with
                "labels".

        Raises:
            ValueError: If the model was not called exactly once, or its graph is gone.
            NumericsError: If a statistic is NaN or infinite; nothing has changed then.
        """
        hooks = self._hooks
        risk = self.curvature.risk
        due = hooks.due
        start = PassStart.now(risk.model) if hooks.keeps else None
        listening = nullcontext()
        counted = nullcontext()
        if due:
            listening = self.curvature.listen(batch, 1.0 if hooks.batches else None)
            counted = hooks.counted()
        with counted, self.paused(), listening:
            yield
        hooks.has_heard = True
        if start is not None:
            hooks.keep(risk.read(batch), start)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls of the model and the losses in this context are not recorded."""
        with Endings() as endings:
            endings.callback(setattr, self._hooks, "paused", self._hooks.paused)
            self._hooks.paused = True
            yield

    def warmup(
        self, batches: Iterable[Any], steps: int | None = None, *, progressbar: bool = False
    ) -> None:
        """Add batches to the statistics, with equal weights, without moving parameters: before the
        first step.

        Args:
            batches: As for `listen`; the model is run on each.
            steps: How many of them; default: all.
            progressbar: Show a bar over them.

        Raises:
            ValueError: If a step was taken already, or the loss is a sum, whose batches would be
                added up.

        Source: kfac_jax's burn-in.
        """
        reduction = self.curvature.risk.losses.reduction
        if self.steps or reduction == "sum":
            raise ValueError(
                f"warmup(...) averages means before the first step; {self.steps} steps, "
                f"{reduction!r}."
            )
        for batch in shown(islice(batches, steps), "warmup", flag("progressbar", progressbar)):
            self.curvature.update(batch, decay=1.0)
        self._hooks.forget()

    def close(self) -> None:
        """Remove all hooks from model and losses."""
        self._hooks.forget()
        self._hooks.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------- steps
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's own, whose detours for compiler and profiler take as long as a layer."""
        if not set_to_none:
            return super().zero_grad(False)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Zeroes gradients, runs the model, the loss and the backward pass, and returns
                the loss. Called once.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If statistics were due, and no batch was recorded since the last step.
            NumericsError: If a gradient or a statistic is NaN or infinite; parameters and
                velocities have not changed then.
            ValueError: If some parameters of a block have a gradient, and others have none; or the
                model holds other tensors than when the optimizer was made.
        """
        loss = None
        if closure is not None:
            with GradMode(True):
                loss = closure()
        self._hooks.end_waiting()
        device = self.curvature.risk.device.type
        refuse_capture(device)
        with GradMode(False), full_precision(device):
            self.curvature.risk.require_in_place()
            if self._schedule is not None:
                for group in self.param_groups:
                    group["damping"] = self._schedule(self.steps)
            self._read_options()
            self._unread = {}
            self._report = StepReport(
                self._hooks.steps, damping=[options.damping for options in self._options]
            )
            try:
                self._finish_and_step(self._report)
            finally:
                self._hooks.forget()
            self._hooks.steps += 1
            self._hooks.keeps = self._looks_again
        return loss

    def _finish_and_step(self, report: StepReport) -> None:
        recorded = self._finish_statistics()
        if recorded.error is not None:
            return self._reject_step(self._named_error(recorded.error), report)
        self._require_batches(recorded)
        nothing_known = len(recorded.uncalled) == len(self.curvature.plan)
        nothing_kept = self._hooks.keeps and not recorded.kept
        if nothing_known or nothing_kept:  # batches had no examples
            report.left_alone = [*self._keys.values()]
            return
        if self._hooks.steps == 0 and self.curvature.risk.processes.world == 1:
            # several processes multiply parts of different size with other numbers
            self._hooks.warn_of_factors()
        report.examples = self._hooks.examples
        report.left_alone = [*self._keys.values()]
        have_gradients = [p.grad is not None for p in self._keys]
        if not any(have_gradients):
            return
        self._refresh(recorded.uncalled, report)
        vectors = self._vectors_of(have_gradients)
        if vectors is None:
            return
        if not vectors.load(self._sign):
            return self._reject_step(self._named_error(), report)
        report.left_alone = [*self._left_alone]
        P = self._inverse_of(vectors)
        λ = [self._dampings[names[0]] for names in vectors.blocks]
        vectors.precondition(P, λ, self._options)
        self._apply(vectors, report)

    def _named_error(self, of_statistics: NumericsError | None = None) -> NumericsError:
        """The error of gradients that are not finite, or that of statistics where all are."""
        bad = [
            key
            for p, key in self._keys.items()
            if p.grad is not None and not bool(p.grad.to_dense().isfinite().all())
        ]
        if of_statistics is not None and not bad:
            return of_statistics
        return NumericsError(
            f"The gradient of {bad[0] if bad else 'all parameters'} is not finite; parameters "
            "have not changed. Did the loss diverge (a larger damping or a smaller lr helps), "
            "or has the batch a NaN?"
        )

    def _reject_step(self, error: NumericsError, report: StepReport) -> None:
        """Raise an error, or the damping where steps may be rejected."""
        if self._reject is None:
            raise error from None
        self._raise_damping(report)

    def _require_batches(self, recorded: _Recorded) -> None:
        """Refuse a step without the batches that it needs; they may have no examples."""
        hooks = self._hooks
        if recorded.heard:
            return
        required = hooks.due and (self._strict or not self.curvature.updates)
        if not (hooks.keeps and not recorded.kept) and not (required and not recorded.batches):
            return
        if hooks.unreadable is not None:
            raise RuntimeError(
                "No batch was recorded since the last step, as a call of the model can't be "
                f"read: {hooks.unreadable}"
            ) from hooks.unreadable
        losses = self.curvature.risk.losses
        names = ", ".join(loss.title for loss in losses)
        miss = f" {hooks.miss}" if hooks.miss else ""
        if not self.curvature.risk.model.training:
            miss = " The model is in evaluation mode: call model.train() before the loop."
        functions = [loss.title for loss in losses if not isinstance(loss.loss, nn.Module)]
        if functions:
            miss = (
                f" The optimizer was given {functions[0]}, which is a function, and calls of those "
                "are only heard beside a module that holds their options: pass one, as "
                "nn.CrossEntropyLoss(), and go on calling the function."
            )
        raise RuntimeError(
            f"No batch was recorded since the last step.{miss} Recorded are calls of the model, in "
            f"training mode and with gradients, and then of {names} on what the model returned: "
            "the module that the optimizer was given, another one with the same options, or their "
            "function. For other losses, and for outputs that are changed before the loss:\n    "
            "with optimizer.listen((X, y)):\n        output = model(X)\n    function(output, "
            "y).backward()\nstrict=False steps with the statistics of before."
        )

    def _finish_statistics(self) -> _Recorded:
        """What all processes have recorded. Collective."""
        hooks = self._hooks
        hooks.add_waiting()
        processes = self.curvature.risk.processes
        own = _Recorded(
            hooks.batches > 0,
            bool(hooks.kept),
            hooks.has_heard,
            set(self.curvature.uncalled),
            hooks.error,
        )
        if processes.world == 1:
            return own
        gathered = processes.gather((own, self.curvature._called_in_step))
        records = [record for record, _ in gathered]
        batches = any(record.batches for record in records)
        if batches and not own.batches:
            # else the moving averages of the processes would weigh differently
            self.curvature._add_nothing()
        self.curvature._enter(set[int]().union(*(called for _, called in gathered)))
        errors = [
            hooks.error
            or type(record.error)(f"Process {rank} of {processes.world}: {record.error}")
            for rank, record in enumerate(records)
            if record.error is not None
        ]
        return _Recorded(
            batches,
            any(record.kept for record in records),
            any(record.heard for record in records),
            set.intersection(*(record.uncalled for record in records)),
            errors[0] if errors else None,
        )

    def _raise_damping(self, report: StepReport) -> None:
        """The step is rejected."""
        report.rejected = True
        limit = LARGEST_DAMPING
        if self._levenberg is not None:
            limit = min(self._levenberg.max, limit)
        for group in self.param_groups:
            group["damping"] = min(group["damping"] * self._reject, limit)

    def _refresh(self, uncalled: set[str], report: StepReport) -> None:
        """Make the inverse that of the statistics of now, if it is due. Collective.

        Args:
            uncalled: Layers that no batch has called yet.
        """
        curvature = self.curvature
        known = 0 if self._refreshed is None else len(curvature.refreshed.plan)
        report.refreshed = (
            known < len(curvature.plan) - len(uncalled)
            or self._hooks.steps % self._inverse_every == 0
        )
        if not report.refreshed:
            return
        called = [entry.layer for entry in curvature.plan if entry.layer.name not in uncalled]
        dampings = self._shifts({g.name: g.layout for layer in called for g in layer.groups})
        curvature.refresh(self._of_blocks(dampings))
        self._refreshed = dampings
        self._P = None
        self._P_is_current = False
        for state in self.state.values():
            state.pop("curved_velocity", None)
        if self._vectors is not None:
            self._vectors.renew(curvature.refreshed.operator)

    def _vectors_of(self, have_gradients: list[bool]) -> StepVectors | None:
        """The vectors of the parameters that have a gradient and a curvature; None if none has."""
        K = self.curvature.refreshed.operator
        vectors = self._vectors
        if self._moves and not self.state:
            vectors = None  # somebody has cleared the state, to begin without a velocity
        if (
            vectors is not None
            and vectors.known == K.layouts.keys()
            and have_gradients == self._have_gradients
        ):
            return vectors
        self._keep(vectors)
        self._vectors = None
        self._have_gradients = have_gradients
        moving = {key for key, has in zip(self._keys.values(), have_gradients, strict=True) if has}
        if not any(key in moving for layout in K.layouts.values() for key in layout.names):
            return None
        self._vectors = vectors = StepVectors(
            K,
            {key: self._groups[key] for key in moving},
            {key: p for p, key in self._keys.items()},
            self.state,
            self.curvature.risk.dtype,
        )
        moving = set(vectors.keys).difference(vectors.keys[i] for i in vectors.still)
        self._left_alone = [key for key in self._keys.values() if key not in moving]
        for p in set(self.state) - set(vectors.params):
            # what is kept of the others is a part of larger tensors
            self.state[p] = {name: t.clone() for name, t in self.state[p].items()}
        self._keep(vectors)
        return vectors

    def _inverse_of(self, vectors: StepVectors) -> BlockDiagonal:
        """The inverse, or another power, with the damping of now."""
        if self._P is not None and self._P_is_current:
            return self._P
        dampings = self._refreshed
        if self._inverse == "exact":
            dampings = self._shifts(vectors.K.layouts)
        assert dampings is not None
        if self._P is None or self._dampings != dampings:
            λ = self._of_blocks(dampings)
            if self._power == -1:
                P = self.curvature.inverse(λ)
            else:
                P = self.curvature.refreshed.power(self._power, λ)
            assert isinstance(P, BlockDiagonal)
            self._P = P
            self._dampings = dampings
        self._P_is_current = True
        return self._P

    def _shifts(self, layouts: Mapping[str, Layout]) -> dict[str, float]:
        """The damping of each block, with weight decay in the curvature; refuses options that
        differ within one.
        """
        shifts = {}
        for name, layout in layouts.items():
            numbers = dict.fromkeys(self._groups[key] for key in layout.names)
            options, *others = [self._options[k] for k in numbers]
            for other in others:
                if other.of_blocks != options.of_blocks:
                    raise ValueError(
                        f"The parameters {list(layout.names)} are one block of the curvature, and "
                        "(lr, momentum, damping with weight decay, norm constraint) are "
                        f"{options.of_blocks} and {other.of_blocks}. Put them in one group. Weight "
                        "decay of weights alone is possible if it is decoupled, a number."
                    )
            shifts[name] = options.shift
        return shifts

    def _of_blocks(self, dampings: dict[str, float]) -> Any:
        return HeuristicDamping(dampings, min=0.0) if self._inverse == "factored" else dampings

    def _keep(self, vectors: StepVectors | None) -> None:
        """Show the velocity in the state."""
        if self._moves and vectors is not None:
            vectors.keep(self.state)

    def _apply(self, vectors: StepVectors, report: StepReport) -> None:
        """Take the step along `P g`."""
        vectors.combine((-1.0, 0.0))
        self._unread = {"scale": vectors.scale, "update_norm": norm_of(vectors.displacement)}
        tensors = vectors.of_parameters(vectors.displacement)
        for p, preconditioned in zip(vectors.params, tensors, strict=True):
            if p.grad is None:  # beside others in a diagonal
                continue
            if p.grad.is_sparse:
                p.grad = preconditioned.to(p.grad.dtype, copy=True)
            else:
                p.grad.copy_(preconditioned)  # in place: it may be a view of another's buffer

    # ---------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue bit for bit, in tensors and plain Python; statistics under
        "curvature".

        Parameters have their names in it, so their order does not matter. It has checksums: to
        change it before it is loaded, such as the learning rate, delete its entry "checksums", too.
        """
        self._keep(self._vectors)
        self._hooks.add_waiting()
        names = [self._keys[p] for group in self.param_groups for p in group["params"]]
        state = super().state_dict()

        def plain(value: Any) -> Any:
            if isinstance(value, (NormConstraint, WeightDecay)):
                return asdict(value)
            return value.clone() if isinstance(value, Tensor) else value

        described = {
            "state": {
                names[i]: {name: plain(t) for name, t in kept.items()}
                for i, kept in state["state"].items()
            },
            "param_groups": [
                {name: plain(value) for name, value in group.items()}
                | {"params": [names[i] for i in group["params"]]}
                for group in state["param_groups"]
            ],
            "steps": self.steps,
            "heard": [self._hooks.batches, self._hooks.examples],
            "dampings": self._refreshed,
            "curvature": self.curvature.state_dict(),
        }
        return sealed(state | described)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where another optimizer with the same arguments stopped.

        Raises:
            ValueError: If the state is of another network, other groups or other approximations, or
                damaged; nothing has changed then.
        """
        title = "The state"
        with reading(title):
            require_intact(state_dict, title)
        state = Fields(state_dict, title)
        state.require({"state", "param_groups", "steps", "heard", "dampings", "curvature"})
        keys = [[self._keys[p] for p in group["params"]] for group in self.param_groups]
        groups = groups_of_state(state.sequence("param_groups"), keys, self.defaults)
        curvature = state.part("curvature")
        loaded = self.curvature._loaded(checked(curvature.data, curvature.title))
        blocks = loaded.blank.plan.groups
        kept = velocities_of_state(
            state.part("state"),
            {key: p for p, key in self._keys.items()},
            [group.layout.names for group in blocks],
            self.curvature.risk.dtype,
        )
        steps = state.count("steps")
        heard = state.sequence("heard", 2)
        batches = heard.count(0)
        examples = heard.count(1)
        dampings = dampings_of_state(state, loaded.snapshot)

        # From here on nothing is refused.
        self._check_options([GroupOptions(group) for group in self._read_groups(groups)])
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.curvature._take_loaded(loaded)
        self.state.update(kept)
        self._hooks.load(steps, batches, examples)
        self._forget_inverse()
        self._refreshed = dampings
        self._raw_options = None
        self._read_options()


def _refuse_options(
    inverse: Any, power: Any, decay: Any, strict: Any, risk_options: Mapping[str, Any]
) -> None:
    """Refuse options of a preconditioner that are out of range, or contradict each other."""
    one_of("inverse", inverse, "exact", "factored")
    number("power", power, below=0)
    flag("strict", strict)
    number("decay", decay)
    if inverse == "factored" and power != -1:
        raise ValueError(
            f'inverse="factored" and power={power:g}: only inverses can be damped factor by factor.'
        )
    if "weight" in risk_options:
        raise UnsupportedError(
            "weight=: an optimizer can't see whether your gradients have weights of examples."
        )
