"""The statistics of a curvature that follows training, and the batches that its steps come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks import CurvatureEstimator
from curvlinops_plus.blocks.batch_pass import PassStart
from curvlinops_plus.blocks.heard_pass import HeardBatch
from curvlinops_plus.errors import CurvatureWarning, NumericsError, level_of_user
from curvlinops_plus.exact import GGN
from curvlinops_plus.optim.kfac.curvature_options import CurvatureOptions
from curvlinops_plus.optim.kfac.damped_inverse import DampedInverse, complete
from curvlinops_plus.optim.kfac.refusals import Noticed, naming_training_mode, no_batch
from curvlinops_plus.optim.kfac.step_batches import (
    Factor,
    StepBatches,
    listening_factors,
    mean_over,
    require_same_curvature,
    same_targets,
)
from curvlinops_plus.risk import EmpiricalRisk, MonteCarlo
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.process_state import own_calls


@dataclass(eq=False)
class HeardCall:
    """A call of the model in training.

    Attributes:
        start: What it began with, if the step looks at it once more.
        added: The batch, with the first targets that losses were called with.
    """

    heard: HeardBatch
    start: PassStart | None
    added: Batch | None = None
    key: object = field(default_factory=object)


@dataclass(eq=False)
class _Part:
    """Batches that others may take the place of."""

    data: Iterable[Batch] = ()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.data)


class RunningCurvature:
    """An estimator that is fed by training, and the inverse of its curvature.

    Attributes:
        steps: Steps that were taken.
        batches: Batches that were added since the last one.
    """

    def __init__(self, risk: EmpiricalRisk, options: CurvatureOptions) -> None:
        self.options = options
        if options.decay == 1 and risk.losses.reduction == "sum":
            raise ValueError(
                'decay=1 with reduction="sum" would add up the curvature of all steps. Give a decay below 1, which '
                "averages over steps, such as 0.999, or a loss that is a mean."
            )
        with naming_training_mode(risk):
            self.estimator = CurvatureEstimator(
                risk,
                options.approximation,
                default=options.default,
                vectors=MonteCarlo() if options.vectors is None else options.vectors,
                decay=options.decay,
                leave_out_uncalled=True,
            )
        self.risk = risk = self.estimator.risk
        self._alone = risk.alone()  # of which each process evaluates its own batches
        self._heard = self._seen = False  # whether any process has added a batch, or kept one, in this step
        self.steps = self.batches = 0
        self._before = 0  # examples before this step
        self._error: NumericsError | None = None  # of a batch that could not be added
        #: What the gradient of this step comes from.
        self.seen = StepBatches(risk)
        #: What a gradient scaler has multiplied the losses with; None if there is one, and it is not known.
        self.scale: float | None = 1.0
        #: How many times the risk's loss is what is minimised: `.grad` is that of `factor * loss`.
        self.factor = 1.0
        self.new_factor = self._factor_varies = self._factor_seen = False
        #: What a step that has seen no batch says.
        self.noticed = Noticed()
        self._part = _Part()
        #: What steps apply, which is renewed less often.
        self.inverse = DampedInverse(self.estimator, options)

    # ---------------------------------------------------------------------------------------------------- statistics
    @property
    def examples(self) -> int:
        """Examples that were added since the last step."""
        return self.estimator.examples - self._before

    @property
    def due(self) -> bool:
        """Whether this step updates the statistics."""
        return self.steps % self.options.statistics_every == 0 or not self.estimator.updates

    @contextmanager
    def listen(self, batch: Any, remember: bool = False) -> Iterator[None]:
        """Add a batch from the forward pass inside, if statistics are due; several of one step are one update.

        Args:
            batch: As for `CurvatureEstimator.listen`.
            remember: Keep it until the step, which evaluates the model on it again.
        """
        start, due = PassStart.now(self.risk.model) if remember else None, self.due
        found, factors = self.risk.read(batch), list[Factor]()

        def note(module: nn.Module, args: Any, output: Any) -> None:
            factors[:] = factors or listening_factors(self.seen, self.risk, found, output)

        def pause(paused: bool) -> None:
            for factor in factors:
                factor.paused = paused

        with ExitStack() as contexts:
            contexts.callback(pause, False)
            contexts.callback(self.risk.model.register_forward_hook(own_calls(note)).remove)
            if due:
                contexts.enter_context(naming_training_mode(self.risk))
                contexts.enter_context(self.estimator.listen(batch, decay=1.0 if self.batches else None))
            contexts.callback(pause, True)  # vectors go back through the outputs
            yield
        self.batches, self.noticed.heard = self.batches + due, True
        self.seen.note(found, start, factors)

    def begin(self, X: Any, unpack: bool, remember: bool) -> HeardCall | None:
        """Hear a call of the model whose targets come later; for `add`. Without statistics only its loss is heard."""
        if self._error is not None:  # nobody has called `step`, as after an overflow that a gradient scaler has seen
            error, self._error = self._error, None
            warn(f"A batch was left out of the statistics. {error}", CurvatureWarning, stacklevel=level_of_user())
        if not _is_in_place(self.risk):  # with other tensors it is another model
            self.noticed.calls.add("with other tensors in place of its parameters")
            return None
        self.noticed.calls.add("train")
        start = PassStart.now(self.risk.model) if remember else None
        heard = (
            self.estimator.begin(X, unpack, watch=False) if self.due else HeardBatch(self.risk.read_input(X, unpack))
        )
        return HeardCall(heard, start)

    def add(self, call: HeardCall, y: Any, factors: Sequence[Factor]) -> None:
        """Add what was heard, with these targets.

        Raises:
            UnsupportedError: If a layer can't be recorded.
        """
        call.added, self.noticed.heard = replace(call.heard.batch, y=y), True
        self.seen.note(call.added, call.start, factors, call.key)
        if not self.due:
            return
        try:
            with naming_training_mode(self.risk):
                call.heard.add(y, decay=1.0 if self.batches else None)
            self.batches += 1
        except NumericsError as error:  # which a step raises, or rejects
            self._error = error

    def repeat(self, call: HeardCall, index: int, f: Tensor, class_axis: int | None, y: Any, factor: Factor) -> None:
        """A loss was called once more on an output: for a log, or as in `a * loss(f, y) + b * loss(f, z)`.

        Args:
            class_axis: Its own, if it has one.

        Raises:
            UnsupportedError: If its curvature depends on the targets, so that it is not `a + b` times the first one.
        """
        assert call.added is not None
        losses, batch = self.risk.losses, call.added
        if not same_targets(losses.targets(batch.y)[index], y):
            batch = replace(batch, y=y)
            require_same_curvature(self.risk, self.estimator.vectors, f, class_axis, call.added, batch)
        self.seen.note(batch, call.start, [factor if i == index else None for i in range(len(losses))], call.key)

    def forget_examples(self) -> None:
        """Count examples from now on."""
        self._before = self.estimator.examples

    def finish(self) -> None:
        """Hear what other processes have seen. Collective.

        Raises:
            NumericsError: If a batch since the last step could not be added, in any process.
        """
        error, self._error = self._error, None
        own = error, self.batches, bool(self.seen), self.seen.numbers(), self.estimator.called_in_step
        told = self.risk.processes.gather("a step", own)
        errors, batches, seen, numbers, called = zip(*told, strict=True)
        if any(batches) and not self.batches:  # else the moving averages of the processes would weigh differently
            self.estimator.add_nothing()
        self.estimator.enter(set[int]().union(*called))
        for rank, found in enumerate(errors):
            if found is not None:
                raise error or type(found)(f"Process {rank} of {len(told)}: {found}")
        self._heard, self._seen = any(batches), any(seen)
        self.seen.told = numbers

    def require_batches(self, statistics: bool, again: bool) -> None:
        """Refuse a step that has not seen what it needs.

        Args:
            statistics: Refuse it if statistics are due, too.
            again: Whether the step evaluates the model on its batches again.

        Raises:
            RuntimeError: If it has not.
            ValueError: If several losses were multiplied with other numbers than their weights.
        """
        self._take_factor(self.seen.factor(self.scale))
        if (self.due and not self._heard and (statistics or not self.estimator.updates)) or (again and not self._seen):
            noticed, self.noticed = self.noticed, Noticed()
            raise no_batch(self.risk, noticed, again)

    def _take_factor(self, found: float | None) -> None:
        """Note how many times the loss makes up the gradient of this step; None if nobody saw it."""
        #: Whether it is another one than in the step before.
        self.new_factor = found is not None and found != self.factor
        if found is not None:
            self._factor_varies |= self.new_factor and self._factor_seen
            self.factor, self._factor_seen = found, True
        elif self._factor_varies:
            warn(
                f"The loss was multiplied by other numbers in other steps, by {self.factor:g} in the last one that was "
                "seen, and nobody saw the loss of this step, whose curvature is multiplied by that number, too. Call "
                "the loss that the optimizer was given, or the model inside `with optimizer.listen((X, y)):`, in every "
                "step.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
            self._factor_varies = False  # said once

    # ----------------------------------------------------------------------------------- the batches of this step again
    def loss(self) -> float:
        """What the gradient of this step is that of, at the parameters of now: the losses, times their numbers."""
        parts = self.seen.parts(self.scale, self.factor)
        own = sum(c * float(self._alone.with_data(data).loss()) for data, c in parts)
        return float(mean_over(self.risk.processes, torch.tensor(own, dtype=torch.float64)))

    def compare(self, gradient: Mapping[str, Tensor]) -> None:
        """Warn if a gradient is not that of `loss`."""
        self.seen.compare(gradient, self.scale, self.factor)

    @cached_property
    def _exact(self) -> GGN:
        """The GGN of a part of this step's batches; how the model is differentiated is found out once."""
        return GGN(self._alone.with_data(self._part), check_deterministic=False)

    def quadratic_form(self, rows: Mapping[str, Tensor], exact: bool) -> Tensor:
        """`V C Vᵀ` of several vectors, `[k, *shape]` of each parameter, `[k, k]`.

        Args:
            exact: `C` is the exact GGN of `loss`; else the statistics of now, times `factor`.
        """
        C, k = self._exact if exact else self.estimator.operator, next(iter(rows.values())).shape[:1]
        V = complete(C, rows, self.risk.params, k)
        if not exact:
            return self.factor * C.quadratic_form(V)
        own = torch.zeros(*k, *k, dtype=C.dtype, device=C.device)
        for data, c in self.seen.parts(self.scale, self.factor, merged=True):
            self._part.data = data
            own = own + c * C.quadratic_form(V)
        self._part.data = ()
        return mean_over(self.risk.processes, own)

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs; but gradients that were accumulated since the last step are the user's."""
        if self.seen.differentiated:
            warn(
                "The state is taken between a backward pass and its step: the gradients, and the numbers that the "
                "losses of these batches were multiplied with, are not in it, so resuming takes another step. Call "
                "state_dict() after step().",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
        return {
            "steps": self.steps,
            "batches": self.batches,
            "examples": self.examples,
            "dampings": self.inverse.dampings,
            "factor": self.factor,
            "estimator": self.estimator.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stopped."""
        self.estimator.load_state_dict(state["estimator"])
        self.steps = state["steps"]
        self.inverse.restore(state["dampings"])
        self._error = None
        self.factor = state.get("factor", 1.0)
        self.forget()
        self.batches = state.get("batches", 0)
        self._before -= state.get("examples", 0)

    def forget(self) -> None:
        """What was seen until now belongs to no step any more."""
        self.batches, self.scale, self.noticed = 0, 1.0, Noticed()
        self.forget_examples()
        self.seen.clear()


def _is_in_place(risk: EmpiricalRisk) -> bool:
    """Whether the model holds its own tensors."""
    try:
        risk.require_in_place()
    except ValueError:
        return False
    return True
