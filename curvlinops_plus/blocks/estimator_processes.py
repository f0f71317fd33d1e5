"""What the processes of a streaming estimator do together: each sums its own batches in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from curvlinops_plus.blocks.accumulation import take_reads
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.running_sums import RunningSums
from curvlinops_plus.blocks.step import Step
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import ProcessError, UnsupportedError
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.function_reads import describe_reads
from curvlinops_plus.risk.record import OutsideReads
from curvlinops_plus.risk.vectors import Draws

T = TypeVar("T")


class Streaming(Protocol):
    """What the processes have to know of their estimators."""

    risk: EmpiricalRisk
    updates: int
    begun: float
    _sums: RunningSums
    step: Step

    _blank: BlockwiseLinearOperator

    def _scale(self, totals: Totals) -> Tensor | float: ...
    def _add(self, show: Callable[[Consumer, Draws], Totals], decay: float | None) -> None: ...


def together(estimator: Streaming, what: str, work: Callable[[], T]) -> T:
    """Work by all processes on their estimators, whose moving averages must have the same weights. Collective.

    A process without any batch has nothing to weigh, as long as the others have not forgotten anything either.

    Raises:
        ProcessError: If they have not; says how many updates each has made.
    """

    def agreed() -> T:
        _agree_on_reads(estimator)
        own = estimator.updates, estimator.begun, estimator.step.untold
        told = estimator.risk.processes.gather("comparing numbers of updates", own)
        forgets = any(begun > 1 for _, begun, _ in told)
        weights = [begun for _, begun, _ in told if begun or forgets]
        if len(set(weights)) > 1:
            updates = {f"process {rank}": number for rank, (number, _, _) in enumerate(told)}
            raise ProcessError(
                f"The estimators have made other numbers of steps, so that batches weigh {weights} in their moving "
                f"averages; updates until now: {updates}. All have to make the same number of steps; further "
                "micro-batches of a step are added with decay=1."
            )
        agree(estimator, [untold for _, _, untold in told])
        return work()

    return estimator.risk.together(what, agreed, over_data=False, same=estimator._blank.described)


def add_nothing(estimator: Streaming) -> None:
    """Take a step to which this process has nothing to add, while others have."""
    estimator._add(lambda consume, draws: Totals(), None)


def add_to_step(estimator: Streaming, batch: RunningSums, totals: Totals, decay: float) -> None:
    """Add the sums of one batch to the step that an estimator is in, or to the next one if `decay` is not 1.

    Raises:
        ValueError: If several losses had other weights before; nothing has changed then.
    """
    sums, step, alone = estimator._sums, estimator.step, estimator.risk.processes.world == 1
    sums.require_fitting(totals)
    if decay != 1:
        if step.untold and not step.untold[-1][1]:  # this process has added nothing, and others call what they did
            sums.enter(set(step.ever), step)
            step.untold[-1] = set(step.called), False
        estimator.step = step = step.following(decay)
    late = totals.called - step.called
    sums.add(batch, totals, step)
    if not alone and (decay != 1 or (late and not step.untold)):
        step.untold.append((set(), False))
    if step.untold:
        called, adds = step.untold[-1]
        step.untold[-1] = called | late, adds or totals.examples > 0


def agree(estimator: Streaming, told: Sequence[Sequence[tuple[set[int], bool]]]) -> None:
    """Let the step call all layers that it has called in any process.

    Args:
        told: What the steps have called, in each of them.

    Raises:
        ProcessError: If an earlier step has called other layers in other processes, which is too late to know.
    """
    told = [steps for steps in told if steps]
    for each in zip(*[steps[:-1] for steps in told]):
        called = set[int]().union(*[here for here, adds in each if adds])
        if away := {index for here, adds in each for index in (here ^ called if adds else here - called)}:
            layer = estimator._blank.plan[min(away)].layer
            raise ProcessError(
                f"{layer.title} was called by some of the processes only, and further steps "
                "were taken since, so its batches weigh differently in the moving averages of others. Call "
                "estimator.settle() in all processes after each step."
            )
    estimator._sums.enter(set[int]().union(*[steps[-1][0] for steps in told]), estimator.step)
    estimator.step.untold = []


def sums_of_batch(estimator: Streaming, show: Callable[[Consumer], Totals]) -> tuple[RunningSums, Totals]:
    """The sums of one batch. Bases, as of EKFAC, follow from the first batches of all processes that have terms.

    Raises:
        UnsupportedError: If a layer that needs a basis is called for the first time in a later batch.
    """
    sums, processes = estimator._sums, estimator.risk.processes
    if processes.world == 1 or not sums.need_bases:
        return sums.of_batch(show, Alone())
    if not estimator.updates or not sums.have_bases:
        work, same = partial(_first_sums, estimator, show), estimator._blank.described
        found = estimator.risk.together("the first update", work, over_data=False, same=same)
        if isinstance(found, OutsideReads):  # no failure: all look for functions, and begin anew
            raise found
        return found
    batch, totals = sums.of_batch(show, Alone())
    for layer, stages in batch.stages.items():
        if len(stages) > len(sums.stages[layer]):
            raise UnsupportedError(
                f"{layer.title} was called by no process in the first update with terms, and is called in "
                f"process {processes.rank} now. EKFAC's eigenvectors have to be the same in all processes, and these "
                "agree on them in that update only. Use KFAC for this layer, or begin with batches that call it."
            )
    return batch, totals


def _first_sums(estimator: Streaming, show: Callable[[Consumer], Totals]) -> tuple[RunningSums, Totals] | OutsideReads:
    _agree_on_reads(estimator)
    try:
        return estimator._sums.of_batch(show, estimator.risk.processes)
    except OutsideReads as error:
        return error


def _agree_on_reads(estimator: Streaming) -> None:
    """Let a process that has had no examples take over how functions read parameters. Collective.

    Raises:
        UnsupportedError: If others have summed statistics of other layers.
    """
    if estimator.risk.processes.world == 1:
        return
    blank = estimator._blank
    own, plan = describe_reads(estimator.risk.reads), blank.plan
    told = estimator.risk.processes.gather("what functions read", own)
    layers = {repr((one["products"], one["enclosing"])) for one in told if one is not None}
    if len(layers) > 1:
        raise UnsupportedError(
            "Functions that read parameters were found in other places by other processes, whose batches call other "
            f"parts of the model: {told}. Statistics of other layers don't add up. Begin with batches that call all."
        )
    if own is None:
        take_reads(blank, told)
    if blank.plan is not plan:
        estimator._sums = RunningSums.of_plan(blank.plan, estimator._scale)
