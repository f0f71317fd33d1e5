"""Relative weights of several losses, and from which data they are known.

The relative weight of a loss is `s_h = w_h c_h / c`, with `c` the factor in front of all statistics. A single loss has
weight 1. If the numbers of terms that count are in the same proportion in every batch, any batch determines the
weights. Otherwise they depend on the whole data set, and its terms are counted before anything is sent back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.distributed import Alone
from curvlinops_plus.risk.losses import Losses, Terms
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.reading import Batch, is_iterator, require_rereadable
from curvlinops_plus.risk.totals import Totals

T = TypeVar("T")


class UnevenError(ValueError):
    """One batch does not determine the relative weights of losses."""


class LossWeights:
    """The relative weights of losses during a pass over data.

    Args:
        num_data: As in `EmpiricalRisk`.
        totals: Of the whole data set, if they are known; else each batch must have the weights of the first one.
        single_batch: Whether the first batch is the whole data set.
    """

    def __init__(
        self, losses: Losses, num_data: int | None = None, totals: Totals | None = None, single_batch: bool = False
    ) -> None:
        self.losses, self.num_data, self.totals, self.single_batch = losses, num_data, totals, single_batch
        self._known = self._relative(totals) if totals is not None or losses.constant_weights else None
        self._of_first_batch: tuple[float, ...] | None = None
        self._first_counts: list[float] = []

    @classmethod
    def plain(cls, losses: Losses) -> LossWeights:
        """Each loss has the weight that it was given, whatever its reduction."""
        weights = cls(losses)
        weights._known = tuple(one.weight for one in losses)
        return weights

    def _relative(self, totals: Totals | None) -> tuple[float, ...]:
        losses = self.losses
        if losses.constant_weights or totals is None:
            return tuple([one.weight for one in losses])
        scales = losses.scales(totals, self.num_data)
        return tuple(float(one.weight * c / scales[losses.reference]) for one, c in zip(losses, scales))

    def of(self, batch_totals: Totals) -> tuple[float, ...]:
        """The weights for a batch.

        Raises:
            UnevenError: If they depend on the whole data set, and it is not known.
        """
        if self._known is None and self.single_batch:
            self._known = self._relative(batch_totals)
        if self._known is not None:
            return self._known
        if len({one.reduction for one in self.losses}) > 1:
            raise UnevenError(
                f"Losses with reduction {[one.reduction for one in self.losses]} for the outputs {self.losses.keys} "
                "weigh by the size of the whole data set, which is not known from batches that are seen once. Give all "
                'losses the same reduction ("sum" is "mean" with the divisor in the weight), or use curvature(risk, '
                "...) over data that can be read twice."
            )
        counts = [float(count) for count in batch_totals.counts]
        if all(count > 0 for count in counts):
            found = self._relative(batch_totals)
            self._of_first_batch, self._first_counts = self._of_first_batch or found, self._first_counts or counts
            if _equal(found, self._of_first_batch):
                return self._of_first_batch
        before = f", and {_ratio(self._first_counts)} before" if self._first_counts else ""
        raise UnevenError(
            f"The means of the losses for {self.losses.keys} are over {_ratio(counts)} terms in this batch{before}. "
            "Their weights belong to the whole data set, which can't be known from batches that are seen once: use "
            "curvature(risk, ...) over data that can be read twice, batches with the same proportion, or "
            'reduction="sum" for all losses with the divisors in the weights. (For another stream make a new '
            "EmpiricalRisk.)"
        )

    def objective(self, batch_totals: Totals) -> Tensor:
        """What the loss of a data set is the sum of over batches, up to the factor `c`; it has a graph."""
        weighted = [s * loss if s != 1 else loss for s, loss in zip(self.of(batch_totals), batch_totals.losses)]
        total = weighted[0] if len(weighted) == 1 else sum(weighted)
        assert isinstance(total, Tensor)
        return total

    def agree(self, totals: Totals) -> bool:
        """Whether the weights that were used are those of a whole pass over the data."""
        return self.totals is None or self._known is None or _equal(self._relative(totals), self._known)

    def changing(self) -> str:
        """The error message if passes over the data don't agree."""
        return (
            f"The numbers of terms that count for the losses of {self.losses.keys} differ from pass to pass, so the "
            "data change: is there random masking or augmentation? Give data that are the same each time."
        )


class Evaluated(Protocol):
    """What a pass over the data needs of a risk."""

    losses: Losses
    data: Any
    device: torch.device
    processes: Alone

    @property
    def options(self) -> Any: ...
    def batches(self, desc: str) -> Iterator[Batch]: ...
    def run(self, batch: Batch) -> tuple[Any, Any, Any]: ...
    def terms(self, outputs: Any, targets: Any, batch: Batch, class_axes: Any) -> Terms: ...


def count_loss_terms(risk: Evaluated) -> Totals:
    """Totals of all data. Cost: one forward pass. Random state is not restored."""
    totals = Totals()
    with torch.inference_mode(False), torch.no_grad():
        for batch in risk.batches("counting loss terms"):
            with eager():
                outputs, targets, class_axes = risk.run(batch)
            with torch.autocast(risk.device.type, enabled=False):
                totals.add(risk.terms(outputs, targets, batch, class_axes).totals)
    return totals.over(risk.processes)


def loss_weights(risk: Evaluated) -> LossWeights:
    """The weights for sweeps over the data of a risk, which can't begin again when a batch shows them to be wrong.

    Cost: one forward pass over the data if they depend on it, which is never so for one loss or one batch. For an
    iterator each batch has to determine them.
    """
    constant = risk.losses.constant_weights
    single = not constant and _is_single(risk)
    if constant or single or _reads_once(risk):
        return LossWeights(risk.losses, risk.options.num_data, single_batch=single)
    return LossWeights(risk.losses, risk.options.num_data, count_loss_terms(risk))


def with_consistent_weights(
    risk: Evaluated, attempt: Callable[[LossWeights], tuple[T, Totals]], before: Totals | None = None
) -> tuple[T, Totals]:
    """Result and totals of a pass over the data, which runs again if several losses had other weights than assumed.

    The first attempt assumes the weights of the pass before, or of the first batch.

    Args:
        attempt: The pass, with the weights that it is to use.
        before: Totals of a pass over the same data, if there was one.

    Raises:
        ValueError: If passes don't agree.
    """
    if before is None and risk.processes.world > 1 and not risk.losses.constant_weights:
        _ = _reads_once(risk)
        before = count_loss_terms(risk)  # all have to assume the same
    weights = LossWeights(risk.losses, risk.options.num_data, before, _is_single(risk))
    if risk.losses.constant_weights or _reads_once(risk):
        return attempt(weights)
    for _ in range(2):
        try:
            result, totals = attempt(weights)
        except UnevenError:
            whole = count_loss_terms(risk)
        else:
            whole = totals.detached()
            if weights.agree(whole):
                return result, totals
        weights = LossWeights(risk.losses, risk.options.num_data, whole)
    raise ValueError(weights.changing())


def _is_single(risk: Evaluated) -> bool:
    """Whether one batch is the whole data set."""
    return isinstance(risk.data, Sequence) and len(risk.data) == 1 and risk.processes.world == 1


def _reads_once(risk: Evaluated) -> bool:
    """Whether the data can't be read again, so that each batch has to determine the weights.

    Raises:
        ValueError: If they are spread over processes, whose batches could determine other ones.
    """
    if risk.processes.world > 1:
        require_rereadable(risk.data, "the loss terms of all processes are counted first")
    return is_iterator(risk.data)


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other))


def _ratio(counts: Sequence[float]) -> str:
    return " : ".join(f"{count:g}" for count in counts)
