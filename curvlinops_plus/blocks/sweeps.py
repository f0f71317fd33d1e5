"""The sweeps over the data that turn a plan into blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from curvlinops_plus.blocks.layer_sums import Sums
from curvlinops_plus.blocks.plan import groups_within
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.gram_sum import plain_mode
from curvlinops_plus.risk import EmpiricalRisk, ForwardOnly, Layer, LayerBatch, Totals, Vectors
from curvlinops_plus.risk.batches import require_rereadable
from curvlinops_plus.risk.losses import LossWeights, loss_weights, require_same
from curvlinops_plus.risk.preserve import preserve_state, untraced
from curvlinops_plus.risk.sweep import sweep

# The default memory for what stays between sweeps. On small networks the second sweep is what costs time, on large ones
# eigendecompositions and memory count.
KEPT_BYTES = 2**24


class Sweeps:
    """Sweeps over the data, for one group of layers after the other, and the blocks that are finished so far.

    Args:
        K: The `BlockwiseLinearOperator` whose blocks they are, with its plan and options.
        max_kept_bytes: Memory for what layers receive that is kept for the next sweep, all or nothing. Model and data
            must not change until then.

    Attributes:
        sums: Of the present group.
        totals: Of each pass over the data.

    Raises:
        UnsupportedError: If a layer alone needs more than the operator's `max_bytes`.
    """

    def __init__(self, K: Any, max_kept_bytes: int = 0) -> None:
        self.K = K
        self.risk: EmpiricalRisk = K.risk
        self.vectors: Vectors = K.vectors
        self.layers = [entry.layer for entry in K.plan]
        groups, left = groups_within(K.plan, K.max_bytes)
        self._groups = [Sums(group, K.risk.scale) for group in groups]
        self.sums, self._number = self._groups[0], 0
        self.blocks: dict[str, LinearOperator] = {}
        self.totals: list[Totals] = []
        self._max_bytes = max_kept_bytes if left is None else min(max_kept_bytes, left)
        self._kept: Kept | None = None  # what this sweep keeps, or the one before has kept
        self._weights: LossWeights | None = None

    @untraced
    def run(self, max_sweeps: int | None = None) -> None:
        """Sweep until all blocks are finished.

        With the operator's `check_deterministic` the total loss of the first two passes over the data is compared;
        unless `max_sweeps` is given, a single one is followed by a forward pass for that. None: two evaluations of a
        few examples have to agree. False: not even these.

        Args:
            max_sweeps: Stop after this number of sweeps.

        Raises:
            ValueError: If a layer never ran, a second pass sees another number of examples, or the data can be read
                only once and are needed again.
            NumericsError: If a statistic is not finite; names layer and statistic.
            RuntimeError: If two passes disagree.
        """
        last, check = None if max_sweeps is None else self._number + max_sweeps, self.K.check_deterministic
        with preserve_state(self.risk.model, self.risk.data):
            while self._number != last:
                if not self.sums.pending:
                    if self.sums is self._groups[-1]:
                        break
                    self.sums, self._kept = self._groups[self._groups.index(self.sums) + 1], None
                self._sweep()
                if check and len(self.totals) == 2:
                    require_same(self.risk, *self.totals)
                finished = self.sums.finish(self.totals[-1], self.risk.processes, self.K.owners)
                if self.K.kept_on is not None:
                    finished = {name: block.to(self.K.kept_on, self.risk.dtype) for name, block in finished.items()}
                self.blocks |= finished
            if check and last is None and len(self.totals) == 1:
                advice = ", or check_deterministic=False"
                require_rereadable(self.risk.data, "the determinism check reads it again", advice)
                again = sweep(self.risk, [], ForwardOnly(), lambda batch: None, desc="determinism check")
                require_same(self.risk, self.totals[0], again)

    def _sweep(self) -> None:
        """Show all data to the sums: read them, or replay what was kept of the sweep before."""
        sums, risk = self.sums, self.risk
        if self.totals:
            require_rereadable(risk.data, "another sweep over it is needed")
        self._number += 1
        desc = f"{type(self.K).__name__} sweep {self._number}"
        if len(self._groups) > 1:
            desc += f", group {self._groups.index(sums) + 1} of {len(self._groups)}"
        if self._kept is not None and all(risk.processes.gather(self._kept.has(sums.pending))):
            bar = f"{desc} (kept)" if risk.options.progressbar else None
            for batch in tqdm(self._kept.batches, desc=bar, disable=bar is None):
                with plain_mode(batch.layer.device.type):
                    sums.consume(_copied(batch))
            return
        pending = sums.pending
        again = {layer for layer in pending if any(a.sweeps > 1 for a in sums.stages[layer][-1].values())}
        keeps = self._max_bytes and again and isinstance(risk.data, (list, tuple))
        self._kept = kept = Kept(self._max_bytes, again) if keeps else None

        def consume(batch: LayerBatch) -> None:
            if batch.layer in pending:
                sums.consume(batch)
                if kept is not None:
                    kept.add(batch)

        if self._weights is None and self.vectors.backward:
            self._weights = loss_weights(risk)
        # All layers, also those that are finished or come later: so vectors are sent in the same pieces, and numbers
        # do not depend on groups and on what is kept.
        repeatable = self.K.check_deterministic is not False
        totals = sweep(
            risk, self.layers, self.vectors, consume, desc=desc, weights=self._weights, repeatable=repeatable
        )
        for problem, reached in (("was never called", totals.called), ("does not reach the output", totals.reached)):
            layer = next((layer for index, layer in enumerate(self.layers) if index not in reached), None)
            if layer is not None:
                raise ValueError(
                    f"{layer.title} ({type(layer.uses[0].owner).__name__}) {problem} in any batch, so its parameters "
                    f"{list(layer.params)} have no curvature here. Leave "
                    "them out of `params`, or check the model's forward."
                )
        if self.totals and totals.examples != self.totals[0].examples:
            raise ValueError(
                f"`data` gave {self.totals[0].examples} examples in one sweep and {totals.examples} in the next; "
                "every sweep must see the same data."
            )
        self.totals.append(totals)


class Kept:
    """What layers received in a sweep, which the next one sends them again: cheaper than running the model once more.

    All of it is dropped when it becomes too large. For data in lists, which stay where they are: a loader may fill one
    memory for all batches.

    Args:
        max_bytes: The largest memory that it may hold. A tensor that several layers read counts once.
        layers: The layers whose batches are kept.
    """

    def __init__(self, max_bytes: int, layers: set[Layer]) -> None:
        self._left, self._layers = max_bytes, layers
        self.batches: list[LayerBatch] = []
        self._storages: set[int] = set()  # their addresses
        self._versions: list[tuple[Tensor, int]] = []

    def add(self, batch: LayerBatch) -> None:
        """Keep a batch, if it is of one of the layers."""
        if self._left < 0 or batch.layer not in self._layers:
            return
        own = _copied(batch)
        parts = [(call.args, dict(call.kwargs), call.grads) for call in own.calls]
        for t in tree_leaves([parts, own.mask, own.example_weights]):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._left -= storage.nbytes()
                self._versions.append((t, t._version))
        self.batches.append(own)
        if self._left < 0:
            self.batches, self._versions = [], []

    def has(self, layers: Iterable[Layer]) -> bool:
        """Whether everything that these layers received is here, unmodified."""
        unmodified = all(t._version == version for t, version in self._versions)
        return self._left >= 0 and unmodified and set(layers) <= self._layers


def _copied(batch: LayerBatch) -> LayerBatch:
    """A batch of its own calls, as a sweep removes the gradients from its own ones."""
    return replace(batch, calls=[replace(call) for call in batch.calls])
