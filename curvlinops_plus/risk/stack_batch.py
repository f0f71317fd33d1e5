"""Batches of stacks of matrices, as those of experts: sums for each matrix, from the rows that met
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.risk.calls import RecordedCall
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer


def batch_of(layer: Layer, calls: list[RecordedCall], num_examples: int, *args: Any) -> LayerBatch:
    """The batch of a layer; arguments as for `LayerBatch`."""
    kind = StackBatch if layer.stacked else LayerBatch
    return kind(layer, calls, num_examples, *args)


class StackBatch(LayerBatch):
    """The batch of a layer of `m` matrices, of which each row of a call meets one.

    Its sums and gradients have the axis `b` of matrices, and come from the batches that the
    matrices would have as layers by themselves. Nothing is multiplied with matrices that a row does
    not meet.
    """

    @cached_property
    def matrices(self) -> list[LayerBatch]:
        """The batch of each matrix; without calls if no row met it."""
        layer = self.layer.one_matrix
        group = None
        if self.group is not None:
            group = layer.groups[self.layer.groups.index(self.group)]
        number = self.layer.groups[0].layout.matrix_shape[0]
        calls: list[list[RecordedCall]] = [[] for _ in range(number)]
        use_of = dict(zip(self.layer.uses, layer.uses, strict=True))
        for call in self.calls:
            part = copy(call)
            part.use = use_of[call.use]
            part.rule = part.use.rule
            if call.rule.columns:
                part.args = (call.args[0].mT,)
                part.grads = None if call.grads is None else call.grads.mT
            if isinstance(call.matrices, Tensor):
                _divide(part, call.matrices, calls)
            else:
                assert call.matrices is not None
                calls[call.matrices].append(part)
        return [
            LayerBatch(
                layer, of_one, self.num_examples, self.first, self.mask, self.example_weights, group
            )
            for of_one in calls
        ]

    def _stacked(self, compute: Callable[[LayerBatch], Tensor], dim: int = 0) -> Tensor:
        """Results of all matrices, zero of those that no row met."""
        parts = [compute(batch) if batch.calls else None for batch in self.matrices]
        zeros = next(torch.zeros_like(part) for part in parts if part is not None)
        return torch.stack([zeros if part is None else part for part in parts], dim)

    # ------------------------------------------------------------------------ rows of affine layers
    @cached_property
    def inputs(self) -> Tensor:  # [N, S, m, i]
        """Rows of all matrices, with zeros where one has less than S."""
        return self._beside([batch.inputs if batch.calls else None for batch in self.matrices])

    @cached_property
    def grads(self) -> Tensor:  # [V, N, S, m, o]
        """Output gradients of all matrices, likewise."""
        return self._beside([batch.grads if batch.calls else None for batch in self.matrices])

    def _beside(self, parts: Sequence[Any]) -> Tensor:  # [.., S of its own, d] -> [.., S, m, d]
        """Rows of all matrices beside each other."""
        S = max(part.shape[-2] for part in parts if part is not None)
        padded = [
            None if part is None else F.pad(part, (0, 0, 0, S - part.shape[-2])) for part in parts
        ]
        zeros = next(torch.zeros_like(part) for part in padded if part is not None)
        return torch.stack([zeros if part is None else part for part in padded], -2)

    @cached_property
    def _kept(self) -> Tensor:  # [N, m, 1]
        """How many rows of each example count."""
        return self._stacked(lambda batch: batch._kept, 1)

    def bias_grads(self) -> Tensor:  # [V, N, m, o]
        """Gradients of the biases for each example."""
        return self._stacked(lambda batch: batch.bias_grads(), 2)

    def mean_inputs(self) -> Tensor:  # [N, m, i]
        """Means over the rows of each example."""
        return self._stacked(lambda batch: batch.mean_inputs(), 1)

    def stacked_inputs(self, reduce: bool = False) -> Tensor | None:
        """There is no one matrix of rows."""
        return None

    def stacked_grads(self, reduce: bool = False) -> Tensor | None:
        """There is no one matrix of rows."""
        return None

    def input_gram(
        self, reduce: bool = False, diagonal: bool = False
    ) -> tuple[Tensor, Tensor | float]:
        """`Σ a aᵀ` [m, i, i] of the rows of each matrix and their numbers [m, 1, 1]; of diagonals
        [m, i] and [m, 1].
        """
        numbers: list[Tensor | float] = []

        def total_of(batch: LayerBatch) -> Tensor:
            a = batch.stacked_inputs(reduce)
            if a is None or diagonal:
                total, number = batch.input_gram(reduce, diagonal)
            else:
                number = float(len(a))
                a = F.pad(a, (0, 1), value=1.0) if batch.bias else a
                total = a.T @ a
            numbers.append(number)
            return total

        totals = self._stacked(total_of)
        of_met = iter(numbers)
        counts = [next(of_met) if batch.calls else 0.0 for batch in self.matrices]
        options: Any = {"dtype": torch.float64, "device": totals.device}
        if any(isinstance(count, Tensor) for count in counts):
            number = torch.stack([torch.as_tensor(count, **options) for count in counts])
        else:
            number = torch.tensor(counts, **options)
        return totals, number.view(-1, *[1] * (totals.ndim - 1))

    def grad_gram(self, reduce: bool = False, diagonal: bool = False) -> Tensor:
        """`Σ g gᵀ` [m, o, o] of the rows of each matrix; of diagonals [m, o]."""
        return self._stacked(lambda batch: batch.grad_gram(reduce, diagonal))

    # -------------------------------------------------------------------- gradients of each example
    @cached_property
    def per_example_grads(self) -> Tensor:  # [V, N, m, rows, columns]
        """Gradients of each example."""
        return self._stacked(lambda batch: batch.per_example_grads, 2)

    def inner_products(self, C: Tensor) -> Tensor:  # [K, m, rows, columns] -> [V, N, K]
        """Inner products of `per_example_grads` with some matrices."""
        parts = []
        for batch, of_matrix in zip(self.matrices, C.unbind(1), strict=True):
            if batch.calls:
                parts.append(batch.inner_products(of_matrix))
        return torch.stack(parts).sum(0)

    def squared_grads(
        self, QG: Tensor | None = None, QA: Tensor | None = None, total: Tensor | None = None
    ) -> Tensor:
        """`Σ_{v,n} (Q_Gᵀ J Q_A)²` of each matrix, [m, rows, columns]."""
        bases = {id(batch): k for k, batch in enumerate(self.matrices)}

        def squares(batch: LayerBatch) -> Tensor:
            k = bases[id(batch)]
            basis_G = None if QG is None else QG[k]
            return batch.squared_grads(basis_G, None if QA is None else QA[k])

        found = self._stacked(squares)
        return found if total is None else total.add_(found)

    def param_grads(self) -> dict[str, Tensor]:
        """Gradients of each example in the parameters' own shapes: key to [V, N, *shape]."""
        grads: dict[str, Tensor] = {}
        for group in self.layer.groups if self.group is None else (self.group,):
            J = self.restrict(group).per_example_grads
            parts = group.layout.scatter(J.flatten(2).flatten(0, 1))
            for key, part in zip(group.keys, parts, strict=True):
                grads[key] = part.reshape(*J.shape[:2], *self.layer.params[key].shape)
        return grads


def _divide(call: RecordedCall, matrices: Tensor, calls: list[list[RecordedCall]]) -> None:
    """Append to the calls of each matrix the rows of a call that meet it."""
    order = matrices.argsort(stable=True)
    # Rows behind all matrices meet none.
    counts = torch.bincount(matrices, minlength=len(calls) + 1).tolist()
    # One after the other they are views, sorted by examples in each.
    in_order = call.of_rows(order)
    start = 0
    for number, count in enumerate(counts[: len(calls)]):
        if count:
            calls[number].append(in_order.of_rows(slice(start, start + count)))
        start += count
    if not start:
        calls[0].append(in_order.of_rows(slice(0, 0)))
