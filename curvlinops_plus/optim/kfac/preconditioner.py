"""Gradients times the inverse of a curvature that follows training, for any optimizer to use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvlinops_plus.blocks import KFAC, CurvatureEstimator
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import BlockDiagonal, HeuristicDamping
from curvlinops_plus.optim.kfac.flat import Flat, Vectors, norm
from curvlinops_plus.optim.kfac.hearing import Hearing
from curvlinops_plus.optim.kfac.policies import (
    NormConstraint,
    Norms,
    StepReport,
    as_norm_constraint,
    as_weight_decay,
    number,
    plain_policy,
)
from curvlinops_plus.optim.kfac.trust import Trust
from curvlinops_plus.risk import EmpiricalRisk, MonteCarlo
from curvlinops_plus.risk import Vectors as SentBack
from curvlinops_plus.risk.process_state import untraced
from curvlinops_plus.risk.replicas import wrapped_processes

if TYPE_CHECKING:
    from typing_extensions import Self

Inverse = Literal["exact", "factored"]

# Options that all parameters of a block have in common.
_COMMON = ("lr", "momentum", "norm_constraint")


class KFACPreconditioner(torch.optim.Optimizer):
    """Replaces gradients by `(K + λI)⁻¹ g`, for any other optimizer to use.

    `K` is a block-diagonal curvature that is updated by the batches of training, as by `CurvatureEstimator`. `step()`
    rewrites `.grad` and leaves parameters alone. Training loops are recorded as by `KFACOptimizer`. Gradients of
    parameters without curvature stay as they are.

    Args:
        model: The network.
        loss: The loss, or several, as for `EmpiricalRisk`.
        damping: `λ`, or a function of the number of steps before.
        params: Parameters, or groups of them with options of their own (`damping`, `norm_constraint`); default: all
            that require a gradient. Parameters of one block belong in one group.
        approximation, default: As for `curvature`.
        vectors: What is backpropagated for the statistics; default: `MonteCarlo()`.
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

    #: What evaluates the loss of a step's batches once more, if anything does.
    trust: Trust | None = None
    # Options of groups besides damping and norm constraint.
    _options: Mapping[str, Any] = {}

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        damping: float | Callable[[int], float] = 1e-3,
        *,
        params: Any = None,
        approximation: Any = KFAC,
        default: Any = KFAC,
        vectors: SentBack | str | None = None,
        decay: float = 0.95,
        statistics_every: int = 1,
        inverse_every: int = 10,
        inverse: Inverse = "exact",
        power: float = -1.0,
        norm_constraint: float | NormConstraint | None = None,
        strict: bool = True,
        **risk_options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"The model is a {type(model).__name__}; expected the nn.Module itself, whose layers are listened to: "
                f"{type(self).__name__}(model, loss, params=...)."
            )
        self._check_options(inverse, power, statistics_every, inverse_every, risk_options)
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad]
            if not params:
                raise ValueError(
                    f"The model, a {type(model).__name__}, has no parameters that require a gradient. The model comes "
                    "first, then the loss; for parameters that are frozen for now, say params=list(model.parameters())."
                )
        params = list(params.values() if isinstance(params, Mapping) else params)
        self._schedule = damping if callable(damping) else None
        if self._schedule is not None and any(isinstance(group, dict) and "damping" in group for group in params):
            raise ValueError("A schedule sets the damping of all groups, and one of them has its own. Give one.")
        damping = damping(0) if callable(damping) else damping
        super().__init__(params, {**self._options, "damping": damping, "norm_constraint": norm_constraint})
        risk_options = {"processes": wrapped_processes(model), **risk_options}  # replicas must not drift apart
        risk = EmpiricalRisk(
            model, loss, (), [p for group in self.param_groups for p in group["params"]], **risk_options
        )
        if decay == 1 and risk.losses.reduction == "sum":
            raise ValueError(
                'decay=1 with reduction="sum" would add up the curvature of all steps. Give a decay below 1, which '
                "averages over steps, such as 0.999, or a loss that is a mean."
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
        self._strict, self._inverse, self._power = strict, inverse, power
        self._inverse_every = inverse_every
        own = weakref.ref(self)  # no cycle: an optimizer that is dropped is gone at once, and its hooks with it
        self._hearing = Hearing(model, self.curvature, statistics_every, lambda: getattr(own(), "_looks_again", False))
        self._keys = {p: key for key, p in risk.params.items()}
        self._uncalled = set[str]()  # layers that no process has called yet
        self._refreshed: dict[str, float] | None = None  # the dampings of the last refresh
        self._P: tuple[Any, BlockDiagonal] | None = None  # the inverse, with the dampings that it belongs to
        self._flat: tuple[Any, Flat] | None = None  # with the parameters that it is of
        self._check_groups()
        #: What the last step did.
        self.last_step = StepReport(-1)
        #: Report norms of each parameter in `last_step`.
        self.report_norms = False

    def _check_options(
        self, inverse: str, power: float, statistics_every: int, inverse_every: int, risk_options: dict[str, Any]
    ) -> None:
        number("-power", -power, strict=True)
        if inverse not in ("exact", "factored"):
            raise ValueError(
                f'inverse={inverse!r}; expected "exact" or "factored". Eigenvalues of their own in the eigenbasis '
                "of the Kronecker factors (EKFAC) are another curvature, not another inverse: approximation=EKFAC."
            )
        if inverse == "factored" and power != -1:
            raise ValueError(f'inverse="factored" and power={power:g}: only inverses can be damped factor by factor.')
        number("statistics_every", statistics_every, low=1.0)
        number("inverse_every", inverse_every, low=1.0)
        if "weight" in risk_options:
            raise UnsupportedError(
                f"{type(self).__name__}(weight=...): the optimizer takes the gradient of your loss as it is, and can't "
                "see whether it has the weights of the examples. Accumulate weighted curvature by "
                "CurvatureEstimator(risk, ...).update(batch)."
            )

    def _check_groups(self) -> None:
        """Refuse options that are out of range."""
        for group in self.param_groups:
            group["damping"] = number("damping", group["damping"])
            constraint = as_norm_constraint(group["norm_constraint"])
            if constraint is not None and constraint.norm != "euclidean" and self._power != -1:
                raise ValueError(
                    f"A norm constraint in the {constraint.norm} norm is for inverses; with power="
                    f'{self._power:g} use NormConstraint(..., norm="euclidean"), or None.'
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: no layer is listened to for parameters that the optimizer was made without."""
        if hasattr(self, "curvature"):
            raise ValueError(
                "No layer is listened to for parameters that come later. Give all of them to the constructor: those "
                "that are frozen, and have no gradient, are left alone until they have one."
            )
        super().add_param_group(param_group)

    # ------------------------------------------------------------------------------------------------------- batches
    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return self._hearing.steps

    @property
    def _looks_again(self) -> bool:
        """Whether this step runs the model on its batches once more."""
        return False

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
        with self._hearing.listen(batch):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls of the model and the losses in here are none of this optimizer's training."""
        with self._hearing.pause():
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
        reduction = self.curvature.risk.losses.reduction
        if self.steps or reduction == "sum":
            raise ValueError(
                "warmup(...) averages batches before the first step, of losses that are means. Here "
                f"{self.steps} steps were taken, and the reduction is {reduction!r}."
            )
        for batch in tqdm(islice(batches, steps), desc="warmup", disable=not progressbar):
            self.curvature.update(batch, decay=1.0)
        self._hearing.forget()

    def close(self) -> None:
        """Remove all hooks from model and losses."""
        self._hearing.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"A {type(self).__name__} is bound to its model by hooks, and can't be copied or pickled. Copy the model, "
            "make an optimizer for it, and use state_dict() and load_state_dict()."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- steps
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Zeroes gradients, runs the model, the loss and the backward pass, and returns the loss. Called
                once.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If statistics were due, and no batch was seen since the last step.
            NumericsError: If a gradient or a statistic is NaN or infinite; parameters and velocities have not changed
                then.
            ValueError: If some parameters of a block have a gradient, and others have none; or the model holds other
                tensors than when the optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.curvature.risk.require_in_place()
            if self._schedule is not None:
                for group in self.param_groups:
                    group["damping"] = number("damping", self._schedule(self.steps))
            self._check_groups()
            self.last_step = report = StepReport(self.steps)
            report.damping = [group["damping"] for group in self.param_groups]
            try:
                self._finish_and_step(report)
            finally:
                self._hearing.forget()
            self._hearing.steps += 1
        return loss

    def _finish_and_step(self, report: StepReport) -> None:
        gradient = self._gradient()
        key = _first_nonfinite(gradient)
        heard, seen, error = self._finish_statistics()
        if key is not None:
            error = NumericsError(
                f"The gradient of {key} is not finite; parameters have not changed. Look for a loss that diverged (a "
                "larger damping or a smaller lr helps), for NaN in the batch, or for overflow in half precision."
            )
        if error is not None:
            return self._not_finite(error, report)
        again, due = self._looks_again and not seen, self._hearing.due
        if again or (due and not heard and (self._strict or not self.curvature.updates)):
            raise self._no_batch(again)
        if self.steps == 0 and self.curvature.risk.processes.world == 1:
            self._hearing.warn_of_factors()  # several processes multiply parts of different size with other numbers
        report.examples = self._hearing.examples
        report.left_alone = list(self._keys.values())
        if gradient and (flat := self._precondition(gradient, report)) is not None:
            report.left_alone = [key for key in report.left_alone if key not in flat.keys]
            self._step(flat, report)

    def _gradient(self) -> dict[str, Tensor]:
        """Key of a parameter to its gradient, of those that have one; in the precision of the statistics."""
        dtype = self.curvature.risk.dtype
        found = {self._keys[p]: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        for key, g in found.items():
            if g.is_sparse or g.dtype != dtype:  # those of `nn.Embedding(sparse=True)` are sparse
                found[key] = (g.to_dense() if g.is_sparse else g).to(dtype)
        return found

    def _finish_statistics(self) -> tuple[bool, bool, NumericsError | None]:
        """Hear what all processes have seen. Collective.

        Returns:
            Whether a batch was added, and whether one was kept, in any of them; the error of one that could not be.
        """
        hearing, processes = self._hearing, self.curvature.risk.processes
        self._uncalled = set(self.curvature.uncalled)
        if processes.world == 1:
            return hearing.batches > 0, bool(hearing.kept), hearing.error
        own = hearing.error, hearing.batches, bool(hearing.kept), self.curvature.called_in_step, self._uncalled
        errors, batches, kept, called, uncalled = zip(*processes.gather(own), strict=True)
        self._uncalled = set.intersection(*uncalled)
        if any(batches) and not hearing.batches:  # else the moving averages of the processes would weigh differently
            self.curvature.add_nothing()
        self.curvature.enter(set[int]().union(*called))
        found = [
            hearing.error or type(error)(f"Process {rank} of {processes.world}: {error}")
            for rank, error in enumerate(errors)
            if error is not None
        ]
        return any(batches), any(kept), found[0] if found else None

    def _no_batch(self, again: bool) -> RuntimeError:
        names = ", ".join(one.title for one in self.curvature.risk.losses)
        return RuntimeError(
            "No batch was recorded since the last step. Recorded are calls of the model, in training mode and with "
            f"gradients, and then of {names}, as the optimizer was given it, on what the model returned:\n"
            "    loss(model(X), y).backward()\n"
            "    optimizer.step()\n"
            "For losses that are functions, and for outputs that are changed before the loss:\n"
            "    with optimizer.listen((X, y)):\n"
            "        output = model(X)\n"
            "    function(output, y).backward()\n"
            "    optimizer.step()" + ("" if again else "\nstrict=False steps with the statistics of before.")
        )

    def _not_finite(self, error: NumericsError, report: StepReport) -> None:
        """Statistics or gradients are not finite."""
        raise error from None

    def _step(self, flat: Flat, report: StepReport) -> None:
        flat.combine([-1.0] * len(flat.groups), [0.0] * len(flat.groups))
        self._report(flat, flat.update, report)
        for p, d in zip(flat.params, flat.split(flat.update), strict=True):
            assert p.grad is not None
            if p.grad.is_sparse:
                p.grad = d.to(p.grad.dtype, copy=True)
            else:
                p.grad.copy_(d)  # in place: it may be a view of another's buffer

    def _precondition(self, gradient: dict[str, Tensor], report: StepReport) -> Flat | None:
        """Begin a step with `P g`; None if no parameter with a gradient has a curvature yet.

        Args:
            gradient: Key of a parameter to its gradient.
        """
        curvature = self.curvature
        groups = {self._keys[p]: group for group in self.param_groups for p in group["params"]}
        λs = {id(group): _damping(group) for group in self.param_groups}
        known = 0 if self._refreshed is None else len(curvature.refreshed.plan)
        due = known < len(curvature.plan) - len(self._uncalled) or self.steps % self._inverse_every == 0
        if due:
            blocks = {
                group.name: group.layout.names
                for entry in curvature.plan
                if entry.layer.name not in self._uncalled
                for group in entry.layer.groups
            }
            _require_common(blocks.values(), groups)
            dampings = {name: λs[id(groups[keys[0]])] for name, keys in blocks.items()}
            curvature.refresh(self._of_blocks(dampings))
            self._refreshed, self._P = dampings, None
            for kept in self.state.values():
                kept.pop("curved_velocity", None)
                kept.pop("velocity_damping", None)
        report.refreshed = due
        K = curvature.refreshed.operator
        if self._flat is not None and self._flat[1].moves and not self.state:
            self._flat = None  # somebody has cleared the state, to begin without a velocity
        of = [(id(group), key) for key, group in groups.items() if key in gradient]
        if self._flat is None or self._flat[0] != of or self._flat[1].K.layouts.keys() != K.layouts.keys():
            if self._flat is not None:
                self._flat[1].keep(self.state)
            if not any(key in gradient for layout in K.layouts.values() for key in layout.names):
                self._flat = None
                return None
            _require_common([layout.names for layout in K.layouts.values()], groups)
            params = {key: p for p, key in self._keys.items()}
            owned = {key: group for key, group in groups.items() if key in gradient}
            flat = Flat(K, owned, params, self.state, curvature.risk.dtype)
            for p in set(self.state) - set(flat.params):  # what is kept of the others is a part of larger tensors
                self.state[p] = _copied(self.state[p])
            self._flat = of, flat
        flat = self._flat[1]
        if flat.K is not K:
            flat.renew(K)
        now = {name: λs[id(groups[layout.names[0]])] for name, layout in K.layouts.items()}
        assert self._refreshed is not None
        inverted = self._refreshed if self._inverse == "factored" else now
        if self._P is None or self._P[0] != inverted:
            of_blocks = self._of_blocks(inverted)
            P = curvature.inverse(of_blocks) if self._power == -1 else curvature.refreshed.power(self._power, of_blocks)
            assert isinstance(P, BlockDiagonal)
            self._P = inverted, P
        first = [names[0] for names in flat.names]
        flat.precondition(gradient, self._P[1], [now[n] for n in first], [inverted[n] for n in first])
        return flat

    def _of_blocks(self, dampings: dict[str, float]) -> Any:
        return HeuristicDamping(dampings, min=0.0) if self._inverse == "factored" else dampings

    def _report(self, flat: Flat, update: Vectors, report: StepReport) -> None:
        """Say how long an update is, before it is added."""
        report.scale = flat.scale
        report.update_norm = norm(update)
        if self.report_norms:
            columns = (flat.params, *map(flat.split, (flat.gradient, flat.direction, update)))
            table = torch.stack([torch.stack([t.double().norm() for t in column]) for column in columns], 1)
            report.norms = {key: Norms(*row) for key, row in zip(flat.keys, table.tolist(), strict=True)}

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Everything that going on bit for bit needs, in tensors and plain Python; statistics under "curvature".

        Parameters have their names in it, so their order does not matter.
        """
        if self._flat is not None:
            self._flat[1].keep(self.state)
        names = [self._keys[p] for group in self.param_groups for p in group["params"]]
        state = super().state_dict()
        return state | {
            "state": {names[i]: _copied(kept) for i, kept in state["state"].items()},
            "param_groups": [
                {name: plain_policy(value) for name, value in group.items()}
                | {"params": [names[i] for i in group["params"]]}
                for group in state["param_groups"]
            ],
            "steps": self.steps,
            "heard": [self._hearing.batches, self._hearing.examples],
            "dampings": self._refreshed,
            "curvature": self.curvature.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another optimizer with the same arguments stopped.

        Raises:
            ValueError: If the state is foreign, or of another network, other groups or other approximations.
        """
        if "curvature" not in state_dict:
            raise ValueError(
                f"This is not the state of a {type(self).__name__}: the key 'curvature' is missing. Is it "
                "another optimizer's?"
            )
        own = [[self._keys[p] for p in group["params"]] for group in self.param_groups]
        theirs = [list(group["params"]) for group in state_dict["param_groups"]]
        if [{*keys} for keys in own] != [{*keys} for keys in theirs]:
            raise ValueError(f"The state is of groups with the parameters {theirs}, and this optimizer has {own}.")
        self.curvature.load_state_dict(state_dict["curvature"])
        places = {key: i for i, key in enumerate(key for keys in own for key in keys)}
        groups = [
            {**group, "params": [places[key] for key in keys]}
            for group, keys in zip(state_dict["param_groups"], own, strict=True)
        ]
        super().load_state_dict({"state": {}, "param_groups": groups})
        params = {key: p for p, key in self._keys.items()}
        for key, kept in state_dict["state"].items():  # PyTorch would cast it to the parameters' dtype
            for name, value in kept.items():
                p = params[key]
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
        self._hearing.load(state_dict["steps"], *state_dict["heard"])
        self._refreshed = state_dict["dampings"]
        self._flat = self._P = None


def _copied(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what is kept of a parameter, tensors and numbers."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


def _damping(group: Mapping[str, Any]) -> float:
    """`λ`, with the weight decay that is part of the curvature."""
    return group["damping"] + as_weight_decay(group.get("weight_decay", 0.0)).curvature


def _require_common(blocks: Iterable[Iterable[str]], groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse options that differ within a block.

    Args:
        blocks: Keys of the parameters of each.
        groups: Key to option group.
    """
    for keys in blocks:
        found = list({id(groups[key]): groups[key] for key in keys}.values())
        for name in ("damping", *_COMMON) if len(found) > 1 else ():
            values = [_damping(group) if name == "damping" else group.get(name) for group in found]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"The parameters {list(keys)} are one block of the curvature, and have {name} {values}, weight "
                    "decay in the curvature included. Put them in one group. Weight decay of weights alone is possible "
                    "if it is decoupled, a number."
                )


def _first_nonfinite(gradient: Mapping[str, Tensor]) -> str | None:
    """Key of a gradient with NaN or infinite numbers."""
    if gradient and not isfinite(norm(list(gradient.values()))):
        return next((key for key, g in gradient.items() if not bool(g.isfinite().all())), None)
    return None
