"""What the processes of a streaming estimator do together: each sums its own batches in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from curvlinops_plus.blocks.running_sums import RunningSums
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import ProcessError, UnsupportedError
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.draws import Draws

__all__ = ["add_nothing", "sums_of_batch", "together"]

T = TypeVar("T")


class Streaming(Protocol):
    """What the processes have to know of their estimators."""

    risk: EmpiricalRisk
    updates: int
    begun: float
    _sums: RunningSums

    def _add(self, show: Callable[[Consumer, Draws], Totals], decay: float | None) -> None: ...


def together(estimator: Streaming, what: str, work: Callable[[], T]) -> T:
    """Work by all processes on their estimators, whose moving averages must have the same weights. Collective.

    A process without any batch has nothing to weigh, as long as the others have not forgotten anything either.

    Raises:
        ProcessError: If they have not; says how many updates each has made.
    """

    def agreed() -> T:
        told = estimator.risk.processes.gather("comparing numbers of updates", (estimator.updates, estimator.begun))
        forgets = any(begun > 1 for _, begun in told)
        weights = [begun for _, begun in told if begun or forgets]
        if len(set(weights)) > 1:
            updates = {f"process {rank}": number for rank, (number, _) in enumerate(told)}
            raise ProcessError(
                f"The estimators have made other numbers of steps, so that batches weigh {weights} in their moving "
                f"averages; updates until now: {updates}. All have to make the same number of steps; further "
                "micro-batches of a step are added with decay=1."
            )
        return work()

    return estimator.risk.processes.together(what, agreed)


def add_nothing(estimator: Streaming) -> None:
    """Take a step to which this process has nothing to add, while others have."""
    estimator._add(lambda consume, draws: Totals(), None)


def sums_of_batch(estimator: Streaming, show: Callable[[Consumer], Totals]) -> tuple[RunningSums, Totals]:
    """The sums of one batch. Bases, as of EKFAC, follow from the first batches of all processes together.

    Raises:
        UnsupportedError: If a layer that needs a basis is called for the first time in a later batch.
    """
    sums, processes = estimator._sums, estimator.risk.processes
    if processes.world == 1 or not sums.need_bases:
        return sums.of_batch(show, Alone())
    if not estimator.updates:
        return estimator.risk.together("the first update", lambda: sums.of_batch(show, processes), over_data=False)
    batch, totals = sums.of_batch(show, Alone())
    for layer, stages in batch.stages.items():
        if len(stages) > len(sums.stages[layer]):
            raise UnsupportedError(
                f"{layer.title} was called by no process in the first update, and is called in process "
                f"{processes.rank} now. EKFAC's eigenvectors have to be the same in all processes, and these agree on "
                "them in the first update only. Use KFAC for this layer, or begin with batches that call it."
            )
    return batch, totals
