"""All data are shown to sums, as often as approximations need it: they are read, or what layers
received in the sweep before is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.blocks.plan import groups_within
from curvlinops_plus.blocks.sums import Sums
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.progress import shown
from curvlinops_plus.risk import ForwardOnly, Layer, LayerBatch, Totals
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.batches import require_rereadable
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.function_reads import is_expert
from curvlinops_plus.risk.loss_passes import LossWeights, loss_weights, require_same
from curvlinops_plus.risk.preserve import preserve_state, untraced
from curvlinops_plus.risk.record import sweep

# The default memory for what stays between sweeps. On small networks the second sweep is what costs
# time, on large ones eigendecompositions and memory count.
KEPT_BYTES = 2**24


class Sweeps:
    """Sweeps over the data, for one group of layers after the other, and the blocks that are
    finished so far.

    Args:
        K: The `BlockwiseLinearOperator` whose blocks they are, with its plan and options.
        max_kept_bytes: Memory for what layers receive that is kept for the next sweep, all or
            nothing. Model and data must not change until then.

    Attributes:
        groups: The sums of each group of layers; those of finished layers are given up.
        totals: Of each pass over the data.

    Raises:
        UnsupportedError: If a layer alone needs more than the operator's `max_bytes`.
    """

    def __init__(self, K: Any, max_kept_bytes: int = 0) -> None:
        self.K = K
        self.risk = K.risk
        self.layers = [entry.layer for entry in K.plan]
        self.blocks: dict[str, LinearOperator] = {}
        self.totals: list[Totals] = []
        self._max_bytes = max_kept_bytes
        groups = [K.plan]
        if K.max_bytes is not None:
            groups, spare = groups_within(K.plan, K.max_bytes)
            self._max_bytes = min(max_kept_bytes, spare)
        self.groups = [Sums(group, K.risk.scale) for group in groups]
        self._kept: Kept | None = None  # what was kept in the sweep before
        self._unvisited: list[Layer] = []
        self._number = 0
        self._weights: LossWeights | None = None

    @untraced
    def run(self, max_sweeps: int | None = None) -> None:
        """Sweep until all blocks are finished.

        With the operator's `check_deterministic` the total loss of the first two passes over the
        data is compared; unless `max_sweeps` is given, a single one is followed by a forward pass
        for that. None: two evaluations of a few examples have to agree. False: not even these.

        Args:
            max_sweeps: Stop after this number of sweeps.

        Raises:
            ValueError: If a layer never ran, a second pass sees another number of examples, or the
                data can be read only once and are needed again.
            NumericsError: If a statistic is not finite; names layer and statistic.
            RuntimeError: If two passes disagree.
        """
        last = None if max_sweeps is None else self._number + max_sweeps
        with preserve_state(self.risk.model, self.risk.data):
            for number, sums in enumerate(self.groups):
                while sums.stages and self._number != last:
                    self._sweep(sums, number)
                if self._number == last:
                    return
                self._kept = None
            if self.K.check_deterministic and last is None and len(self.totals) == 1:
                advice = ", or check_deterministic=False"
                require_rereadable(self.risk.data, "the determinism check reads it again", advice)
                again = sweep(
                    self.risk, [], ForwardOnly(), lambda batch: None, desc="determinism check"
                )
                require_same(self.risk, self.totals[0], again)

    def _sweep(self, sums: Sums, group: int) -> None:
        """Show all data to the sums of a group, and finish them: blocks, or their next stage.
        Collective.
        """
        self._number += 1
        desc = f"{type(self.K).__name__} sweep {self._number}"
        if len(self.groups) > 1:
            desc += f", group {group + 1} of {len(self.groups)}"
        processes = self.risk.processes
        if self.totals:
            require_rereadable(self.risk.data, "another sweep over it is needed")
        if self._kept is not None and all(processes.gather(self._kept.has(sums.stages))):
            self._kept.replay(sums.consume, f"{desc} (kept)", self.risk.options.progressbar)
        else:
            self._read(sums, desc)
        owners = self.K.plan.owners
        mine = None
        if owners is not None:
            mine = {name for name, rank in owners.items() if rank == processes.rank}
        blocks = sums.finish(self.totals[-1], processes, mine, self._unvisited)
        if (device := self.K._kept_on) is not None:
            blocks = {name: block.to(device, self.risk.dtype) for name, block in blocks.items()}
        self.blocks |= blocks

    def _read(self, sums: Sums, desc: str) -> None:
        """Read all data, and keep what layers receive that need another sweep."""
        risk = self.risk
        vectors = self.K.vectors
        waiting = sums.waiting
        self._kept = None
        if self._max_bytes and waiting and isinstance(risk.data, (list, tuple)):
            self._kept = Kept(self._max_bytes, waiting)
        consume: Consumer = sums.consume
        if self._kept is not None:
            consume = partial(self._kept.add, consume=sums.consume)
        if self._weights is None and vectors.backward:
            self._weights = loss_weights(risk)
        # All layers, also those that are finished or come later: so vectors are sent in the same
        # pieces, and numbers do not depend on groups and on what is kept.
        totals = sweep(
            risk,
            self.layers,
            vectors,
            consume,
            desc=desc,
            weights=self._weights,
            repeatable=self.K.check_deterministic is not False,
        )
        gathers = risk.reads is not None and risk.reads.gathered
        for index, layer in enumerate(self.layers):
            if index in totals.reached:
                continue
            problem = "was never called"
            if index in totals.called:
                problem = "does not reach the output"
            elif layer.affine and (gathers or is_expert(risk, layer)):
                continue
            message = (
                f"{layer.title} ({layer.type_name}) {problem} in any batch, "
                f"so its parameters {list(layer.params)} have no curvature here. Leave them "
                "out of `params`, or check the model's forward."
            )
            # Functions may read them, with gradients of zero.
            if risk.reads is None and not isinstance(risk.data, Iterator):
                raise OutsideReads(message)
            raise ValueError(message)
        self._unvisited = [
            layer for index, layer in enumerate(self.layers) if index not in totals.reached
        ]
        if self.totals and totals.examples != self.totals[0].examples:
            raise ValueError(
                f"`data` gave {self.totals[0].examples} examples in one sweep and "
                f"{totals.examples} in the next; every sweep must see the same data."
            )
        self.totals.append(totals)
        if self.K.check_deterministic and len(self.totals) == 2:
            require_same(risk, *self.totals)


class Kept:
    """What layers received in a sweep, which the next one sends them again: cheaper than running
    the model once more.

    All of it is dropped when it becomes too large. For data in lists, which stay where they are: a
    loader may fill one memory for all batches.

    Args:
        max_bytes: The largest memory that it may hold. A tensor that several layers read counts
            once.
        layers: The layers whose batches are kept.
    """

    def __init__(self, max_bytes: int, layers: set[Layer]) -> None:
        self._left = max_bytes
        self._layers = layers
        self.batches: list[LayerBatch] = []
        self._storages: set[int] = set()  # their addresses
        self._versions: list[tuple[Tensor, int]] = []

    def add(self, batch: LayerBatch, consume: Consumer | None = None) -> None:
        """Keep a batch if it is of one of the layers, after it was shown to `consume`."""
        if consume is not None:
            consume(batch)
        if self._left < 0 or batch.layer not in self._layers:
            return
        copy = _copied(batch)
        parts = [(call.args, dict(call.kwargs), call.grads) for call in copy.calls]
        for tensor in tree_leaves([parts, copy.mask, copy.example_weights]):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._left -= storage.nbytes()
                self._versions.append((tensor, tensor._version))
        self.batches.append(copy)
        if self._left < 0:
            self.batches = []
            self._versions = []

    def replay(self, consume: Consumer, desc: str, progressbar: bool) -> None:
        """Show what was kept once more, perhaps under a progress bar of this name."""
        for batch in shown(self.batches, desc, progressbar):
            with plain_mode(batch.layer.device.type):
                consume(_copied(batch))

    def has(self, layers: Iterable[Layer]) -> bool:
        """Whether everything that these layers received is here, unmodified."""
        unmodified = all(t._version == version for t, version in self._versions)
        return self._left >= 0 and unmodified and set(layers) <= self._layers


def _copied(batch: LayerBatch) -> LayerBatch:
    """A batch of its own calls, as a sweep removes the gradients from its own ones."""
    return replace(batch, calls=[replace(call) for call in batch.calls])
