"""The rows of an affine layer in one mini-batch: what its weight is multiplied by, and the gradients of the products.

Shapes: N examples, S positions at which the layer's weight is used (all calls of a shared module included), V vectors
backpropagated, i and o the columns and rows of the layer's parameters as one matrix. A layer of several matrices
(groups of a convolution) has one more axis `b`; `[*b]` stands for none or this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.layer import SparseRows
from curvlinops_plus.layer.rule import outer_products
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.risk.layers import Call, Layer


@dataclass(eq=False)
class AffineRows:
    """Rows `a` of inputs and `g` of output gradients, and sums of them, for the parameters of one block.

    Attributes:
        layer: The layer.
        calls: Its calls, all of which multiply with the same matrix.
        num_examples: N.
        mask: Positions that count, [N, T] bool, or None for all. Reaches calls with T positions.
        weight: Whether the weight is among the parameters of the block.
        bias: Whether the bias is, as one more column: a column of ones in the inputs.
        sparse: Whether the inputs are `SparseRows`.
        columns: Columns of the matrix of these parameters: the size of `input_gram`.
        example_weights: Weights of the examples [N] in `input_gram`, None for ones. Gradients carry their roots.
    """

    layer: Layer
    calls: list[Call]
    num_examples: int
    mask: Tensor | None
    weight: bool
    bias: bool
    sparse: bool
    columns: int
    _shared: dict[Any, Any]
    example_weights: Tensor | None = None

    # ------------------------------------------------------------------------------------------------------------ rows
    @cached_property
    def inputs(self) -> Tensor | SparseRows:
        """Rows `a`, [N, S, *b, i]; a column of ones is the bias's, masked rows are zero."""
        rows = [self._rows(call) for call in self.calls]
        if len(rows) == 1:
            return rows[0]
        if isinstance(rows[0], SparseRows):
            return SparseRows.cat([row for row in rows if isinstance(row, SparseRows)])
        return torch.cat([row for row in rows if isinstance(row, Tensor)], 1)

    @property
    def grads(self) -> Tensor:
        """Output gradients `g`, [V, N, S, *b, o]; masked rows are zero."""
        if "grads" not in self._shared:
            g = [self._grad_rows(call) for call in self.calls]
            self._shared["grads"] = g[0] if len(g) == 1 else torch.cat(g, 2)
        return self._shared["grads"]

    def mean_inputs(self) -> Tensor:
        """`ā_n = mean_s a_{n,s}`, [N, *b, i] (reduce)."""
        if self.weight and (call := self._only_call) is not None:
            a = call.rule.mean_inputs(call.use.module, self._upcast(call.args[0]))
            a = a.unflatten(0, (self.num_examples, -1)).mean(1)
            return torch.cat([a, torch.full_like(a[..., :1], self.adds_bias(call))], -1) if self.bias else a
        a = self.inputs
        assert isinstance(a, Tensor)
        kept: Tensor | float = 0.0
        for call in self.calls:
            mask, read = self._mask_of(call), call.rule.reads(call.use.module)
            positions = self._positions(call) if mask is None else mask.sum(1)
            here = torch.as_tensor(positions, dtype=a.dtype, device=a.device).reshape(-1, *[1] * (a.ndim - 2))
            kept = kept + (here if read is None else here * read.to(a.dtype)[:, None])
        return a.sum(1) / torch.as_tensor(kept).clamp(min=1)

    def bias_grads(self) -> Tensor:
        """Gradients of the bias for each example, [V, N, *b, o]: `ĝ_n` of the calls that add it."""
        calls = [call for call in self.calls if self.adds_bias(call)]
        if len(calls) == len(self.calls):
            return self.summed_grads()
        return replace(self, calls=calls, _shared={}).summed_grads() if calls else self.summed_grads().mul(0)

    def adds_bias(self, call: Call) -> bool:
        """Whether a call adds the bias of the layer: of two that share a weight, one may have none."""
        return "bias" in call.use.keys

    def summed_grads(self) -> Tensor:
        """`ĝ_n = Σ_s g_{n,s}`, [V, N, *b, o]."""
        if "summed" not in self._shared:
            parts = []
            for call in self.calls:
                if self._mask_of(call) is None:
                    g = call.rule.sum_grads(call.use.module, self._upcast(call.grads))
                    g = g.unflatten(1, (self.num_examples, -1)).sum(2)
                else:
                    g = self._grad_rows(call).sum(2)
                parts.append(g)
            self._shared["summed"] = sum(parts[1:], parts[0])
        return self._shared["summed"]

    # ---------------------------------------------------------------------------------------------------- Gram matrices
    def stacked_inputs(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `input_gram` as one matrix [M, columns], or, without the bias's ones, [M, columns - 1].

        None if there is another way to the Gram matrix than the product of all rows.
        """
        call = self._only_input
        if call is None:
            return None
        a = call.rule.stacked_inputs(call.use.module, self._upcast(call.args[0]))
        if not reduce or a is None or len(a) == self.num_examples:
            return a
        return a.unflatten(0, (self.num_examples, -1)).mean(1)

    def stacked_grads(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `grad_gram` as one matrix [M, o]; None as for `stacked_inputs`."""
        call = self._only_call
        if call is None or self.sparse:
            return None
        g = call.rule.stacked_grads(call.use.module, self._upcast(call.grads))
        rows = len(call.grads) * self.num_examples
        return g if not reduce or g is None or len(g) == rows else g.unflatten(0, (rows, -1)).sum(1)

    def input_gram(self, reduce: bool = False, diagonal: bool = False) -> tuple[Tensor, Tensor | float]:
        """`Σ_{n,s} a aᵀ` [*b, i, i] and the number of rows in the sum (expand); of sparse rows the diagonal [i].

        With `reduce`, `Σ_n ā āᵀ` of the means over positions, and N. With `diagonal`, the diagonals alone [*b, i].
        An example counts as often as its weight says.
        """
        if reduce:
            masks = [mask for call in self.calls if (mask := self._mask_of(call)) is not None]
            kept = None
            if len(masks) == len(self.calls):  # examples of which nothing counts
                kept = torch.stack([mask.any(1) for mask in masks]).any(0)[:, None]
            count = self._count(kept, 1)
            if self.sparse:
                assert isinstance(self.inputs, SparseRows)
                return self._rooted(self.inputs).mean_square(), count
            return (_squares if diagonal else gram)(self._rooted(self.mean_inputs())), count
        total, rows = self._input_gram(self.calls[0], diagonal)
        for call in self.calls[1:]:
            part, count = self._input_gram(call, diagonal)
            total, rows = total + part, rows + count
        return total, rows

    def grad_gram(self, reduce: bool = False, diagonal: bool = False) -> Tensor:
        """`Σ_{v,n,s} g gᵀ` [*b, o, o]; with `reduce`, `Σ_{v,n} ĝ ĝᵀ` of `ĝ_n = Σ_s g_{n,s}`.

        With `diagonal`, the diagonals alone [*b, o].
        """
        key = ("grad_gram", reduce, diagonal)
        if key not in self._shared:
            if diagonal:
                total = _squares(self.summed_grads().flatten(0, 1) if reduce else self.grads.flatten(0, 2))
            elif reduce:
                total = gram(self.summed_grads().flatten(0, 1))
            elif len(self.calls) == 1 and self._mask_of(self.calls[0]) is None:
                call = self.calls[0]
                total = call.rule.grad_gram(call.use.module, self._upcast(call.grads))
            else:
                total = gram(self.grads.flatten(0, 2))
            self._shared[key] = total
        return self._shared[key]

    # ------------------------------------------------------------------------------------------- gradients per example
    def plain_inputs(self) -> Tensor | SparseRows:
        """Rows without the column of ones, masked ones included: where their gradients are zero they don't matter."""
        rows = [self._plain_rows(call) for call in self.calls]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def outer_products(self) -> Tensor:
        """`Σ_s g aᵀ` of each example, [V, N, *b, o, i], with the bias as last column."""
        total: Tensor | None = None
        for call in self.calls:  # one call at a time: a cat along S would copy everything
            part = outer_products(self._grad_rows(call), self._plain_rows(call))
            total = part if total is None else total.add_(part)
        assert total is not None
        return torch.cat([total, self.bias_grads()[..., None]], -1) if self.bias else total

    def call_grads(self, call: Call) -> dict[str, Tensor]:
        """Gradients of the rows of one call in the parameters' own shapes: local name to [V, N * positions, *shape]."""
        module = call.use.module
        if self._mask_of(call) is None or self.mask is None:
            return call.rule.per_example_grads(module, call.args, call.kwargs, self._upcast(call.grads))
        a, g = self._plain_rows(call), self._grad_rows(call)
        return call.rule.split(module, outer_products(g, a), g)

    # ------------------------------------------------------------------------------------------------------- internals
    @property
    def _only_call(self) -> Call | None:
        """The call, if there is one, all of its positions count and it reads all matrices."""
        call = self.calls[0]
        masked = (self.mask is not None or call.rule.sparse) and self._mask_of(call) is not None
        return None if len(self.calls) > 1 or masked or call.rule.reads(call.use.module) is not None else call

    @property
    def _only_input(self) -> Call | None:
        """The same, if besides all rows count alike, and each is extended by a 1 if the bias is tracked."""
        if not self.weight or self.sparse or self.example_weights is not None:
            return None
        call = self._only_call
        return call if call is None or not self.bias or "bias" in call.use.keys else None

    def _upcast(self, t: Tensor) -> Tensor:
        if t.dtype == self.layer.accumulation_dtype or not t.is_floating_point():
            return t
        return t.to(torch.promote_types(t.dtype, self.layer.accumulation_dtype))

    def _positions(self, call: Call) -> int:
        """Positions of one call: rows of the module's input per example."""
        if call.grads is not None:
            g = call.rule.grads(call.use.module, call.grads[:1])
            return g.shape[1] * g.shape[2] // self.num_examples
        return self._plain_rows(call).shape[1]

    def _mask_of(self, call: Call) -> Tensor | None:
        """Positions that count, [N, S], None for all: those of the user's mask, and those that a sparse rule keeps."""
        if self.mask is None and not call.rule.sparse:
            return None
        key = ("mask", id(call))
        if key not in self._shared:
            mask = self.mask if self.mask is not None and self.mask.shape[1] == self._positions(call) else None
            if call.rule.sparse:
                kept = self._plain_rows(call).kept
                mask = kept if mask is None else mask if kept is None else mask & kept
            self._shared[key] = mask
        return self._shared[key]

    def _plain_rows(self, call: Call) -> Any:
        a = call.rule.rows(call.use.module, self._upcast(call.args[0]))
        if isinstance(a, SparseRows):
            return a.reshape(self.num_examples)
        return a.reshape(self.num_examples, -1, *a.shape[2:])

    def _rows(self, call: Call) -> Tensor | SparseRows:
        mask = self._mask_of(call)
        if self.weight:
            a = self._plain_rows(call)
            if isinstance(a, SparseRows):
                return a if mask is None else a.masked(mask)
            a = torch.cat([a, self._ones(call, a)], -1) if self.bias else a
        else:
            a = self._ones(call, self._grad_rows(call)[0])
        return a if mask is None else a * mask.view(*mask.shape, *[1] * (a.ndim - 2))

    def _ones(self, call: Call, rows: Tensor) -> Tensor:  # [N, S, *b, .] -> [N, S, *b, 1]
        read = call.rule.reads(call.use.module)
        ones = rows.new_full((*rows.shape[:-1], 1), float(self.adds_bias(call)))
        return ones if read is None else ones * read.to(rows.dtype)[:, None]

    def _grad_rows(self, call: Call) -> Tensor:
        g = call.rule.grad_rows(call.use.module, self._upcast(call.grads))
        g = g.reshape(g.shape[0], self.num_examples, -1, *g.shape[3:])
        mask = self._mask_of(call)
        return g if mask is None else g * mask.view(*mask.shape, *[1] * (g.ndim - 3))

    def _rooted(self, a: Any) -> Any:  # [N, ...] -> [N, ...]
        """Rows times the roots of the weights of their examples: sums of their squares are weighted."""
        if self.example_weights is None:
            return a
        root = self.example_weights.sqrt().to(a.dtype)
        return a.times(root) if isinstance(a, SparseRows) else a * root.view(-1, *[1] * (a.ndim - 1))

    def _count(self, mask: Tensor | None, positions: int) -> Tensor | float:  # mask [N, S]
        """How many rows count, each as often as the weight of its example says."""
        w = self.example_weights
        if w is None:
            return float(self.num_examples * positions) if mask is None else mask.sum()
        return w.sum() * positions if mask is None else w @ mask.sum(1).to(w)

    def _input_gram(self, call: Call, diagonal: bool) -> tuple[Tensor, Tensor | float]:
        """`Σ a aᵀ` of one call, or its diagonal, and the number of the call's rows."""
        mask, read = self._mask_of(call), call.rule.reads(call.use.module)
        if mask is not None or not self.weight or diagonal or self.example_weights is not None:
            a = self._rooted(self._rows(call))
            if isinstance(a, SparseRows):
                return a.square_sum(), self._count(mask, a.shape[1])
            rows = self._count(mask, a.shape[1])
            rows = rows.to(a.dtype) if isinstance(rows, Tensor) else rows
            total = _squares(a.flatten(0, 1)) if diagonal else gram(a.flatten(0, 1))
            return total, rows if read is None else rows * read.to(a.dtype).view(-1, *[1] * (total.ndim - 1))
        total, row_sum, rows = call.rule.input_gram(call.use.module, self._upcast(call.args[0]))
        count = float(rows) if read is None else rows * read.to(total.dtype)[:, None, None]
        if self.bias:
            adds = float(self.adds_bias(call))
            total = F.pad(total, (0, 1, 0, 1))  # one copy of what may be the largest matrix of all
            total[..., -1, :-1] = total[..., :-1, -1] = row_sum * adds
            total[..., -1:, -1:] = count * adds
        return total, count


def _squares(rows: Tensor) -> Tensor:  # [M, *b, d] -> [*b, d]
    """The diagonal of `gram(rows)`."""
    return rows.square().sum(0)
