"""The calls of one layer in one mini-batch: rows, and gradients of each example; all that an
approximation reads.

Shapes, here and in every accumulator: N examples, V vectors backpropagated, S positions at which an
affine layer's weight is used (all calls of a shared module included), i and o the columns and rows
of the layer's parameters as one matrix. A layer of several matrices (groups of a convolution) has
one more axis `b`; `[*b]` stands for none or this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule, SparseRows
from curvlinops_plus.layer.replay import NoExampleGradients, RerunError
from curvlinops_plus.layer.rule import outer_products
from curvlinops_plus.layer.squares import row_products, squared_examples, squared_gradients
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.pieces import rows_at_once
from curvlinops_plus.risk.calls import OutsideReads, RecordedCall, title
from curvlinops_plus.risk.layers import Group, Layer, Role

# Per-example gradients that are only needed one after the other are formed in pieces of about this
# size on a CPU.
_PIECE_BYTES = 2**26
# Patches of images are formed in pieces that a processor's cache can hold, but not too few at a
# time for fast products.
_ROW_BYTES = 2**20
_ROWS = 256


@dataclass(eq=False)
class LayerBatch:
    """The calls of one layer in one mini-batch, with the gradients of their outputs.

    Attributes:
        layer: The layer.
        calls: Its calls, in the order in which they happened.
        num_examples: N.
        first: Whether the inputs are new. A batch through which several vectors are sent one after
            the other is shown once per vector, with the same inputs; a statistic of inputs alone is
            counted when `first` is True.
        mask: Positions that count, [N, T] bool, or None for all. Reaches layers with T positions.
        example_weights: Weights of the examples [N], None for ones. Gradients carry their roots
            already.
        group: The parameters that the batch is restricted to, None for all of the layer's.
        role: What all calls multiply with; None if there is no matrix, or if there are several.
        whole: Whether all calls multiply with the layer's matrix.
        keys: Keys of the parameters that the batch is restricted to.
        weight: Whether the weight is among them.
        bias: Whether the bias is, as one more column of the role's matrix: a column of ones in the
            inputs.
        sparse: Whether the inputs are `SparseRows`.
    """

    layer: Layer
    calls: list[RecordedCall]
    num_examples: int
    first: bool = True
    mask: Tensor | None = None
    example_weights: Tensor | None = None
    group: Group | None = None
    role: Role | None = None
    whole: bool = field(init=False)
    keys: tuple[str, ...] = field(init=False)
    weight: bool = field(init=False)
    bias: bool = field(init=False)
    sparse: bool = field(init=False)

    def __post_init__(self) -> None:
        layer = self.layer
        if self.role is None and len(layer.roles) == 1:
            self.role = layer.roles[0]
        role = self.role
        self.sparse = role is not None and role.sparse
        self.whole = role is not None and not role.transposed
        self.keys = tuple(layer.params) if self.group is None else self.group.keys
        self.weight = layer.weight in self.keys
        self.bias = self.whole and layer.bias in self.keys

    # ----------------------------------------------------------------------------- parts of a batch
    def restrict(self, group: Group) -> LayerBatch:
        """The same batch with only the parameters of `group`."""
        return self if group is self.group else replace(self, group=group)

    def roles(self) -> list[LayerBatch]:
        """The batch restricted to each role, in the layer's order; a role that was not called has
        no calls.

        A layer whose parameters belong to one module has one role: the batch itself.
        """
        if len(self.layer.roles) <= 1:
            return [self]
        parts = []
        for role in self.layer.roles:
            modules = {use.module for use in role.uses}
            calls = [call for call in self.calls if call.use.module in modules]
            parts.append(replace(self, calls=calls, role=role))
        return parts

    def examples(self, chosen: slice, vectors: slice = slice(None)) -> LayerBatch:
        """Some of the examples, which are neighbours, and some of the vectors."""
        examples = range(self.num_examples)[chosen]
        calls = [call.of_examples(self.num_examples, examples, vectors) for call in self.calls]
        part = replace(self, calls=calls, num_examples=len(examples))
        if self.mask is not None:
            part.mask = self.mask[chosen]
        if self.example_weights is not None:
            part.example_weights = self.example_weights[chosen]
        return part

    def pieces(self) -> Iterator[LayerBatch]:
        """The examples in pieces whose gradients, formed all at once, take about 64 MiB on a CPU,
        256 MiB on a GPU.
        """
        numbers = self.num_vectors * sum(self.layer.params[key].numel() for key in self.keys)
        # Gradients of rows, where these are treated one by one.
        by_row = [call.routed for call in self.calls if not isinstance(call.rule, AffineRule)]
        numbers *= max([routed.length for routed in by_row if routed is not None], default=1)
        return self._cut(_PIECE_BYTES, numbers)

    def _cut(self, size: int, numbers: int) -> Iterator[LayerBatch]:
        """Pieces of `size` bytes on a CPU if each example takes so many numbers, of one example at
        least.
        """
        layer = self.layer
        step = rows_at_once(layer.device, size, numbers * layer.accumulation_dtype.itemsize)
        if step >= self.num_examples:
            yield self
            return
        for start in range(0, self.num_examples, step):
            yield self.examples(slice(start, start + step))

    @property
    def num_vectors(self) -> int:
        """V, the number of vectors in this piece."""
        grads = self.calls[0].grads
        if isinstance(grads, list):
            grads = grads[0]
        return 0 if grads is None else grads.shape[0]

    # ------------------------------------------------------------------------ rows of affine layers
    @cached_property
    def inputs(self) -> Tensor | SparseRows:
        """Rows `a`, [N, S, *b, i]; a column of ones is the bias's, masked rows are zero.

        Raises:
            UnsupportedError: If the layer has no affine rule, or multiplies with several matrices.
        """
        if self.role is None:
            raise self._no_matrix()
        parts = []
        for k, (call, mask) in enumerate(zip(self.calls, self._masks)):
            a: Any = self._inputs[k] if self.weight else None
            if self.sparse:
                parts.append(a if mask is None else a.masked(mask))
                continue
            if isinstance(a, SparseRows):
                a = a.to_dense()
            if a is None or self.bias:
                rows = self._grads[k][0] if a is None else a
                ones = rows.new_full((*rows.shape[:-1], 1), float("bias" in call.use.keys))
                read = call.rule.reads(call.use.module)
                if read is not None:
                    ones = ones * read.to(ones.dtype)[:, None]
                a = ones if a is None else torch.cat([a, ones], -1)
            parts.append(a if mask is None else a * _beside(mask, a.ndim))
        if len(parts) == 1:
            return parts[0]
        return SparseRows.cat(parts) if self.sparse else torch.cat(parts, 1)

    @cached_property
    def grads(self) -> Tensor:
        """Output gradients `g`, [V, N, S, *b, o]; masked rows are zero. Errors as for `inputs`."""
        if self.role is None:
            raise self._no_matrix()
        return self._grads[0] if len(self._grads) == 1 else torch.cat(self._grads, 2)

    def mean_inputs(self) -> Tensor:
        """`ā_n = mean_s a_{n,s}`, [N, *b, i] (reduce)."""
        call = self._only_call() if self.weight else None
        if call is None:
            assert isinstance(self.inputs, Tensor)
            return self.inputs.sum(1) / self._kept.clamp(min=1)
        a = call.rule.mean_inputs(call.use.module, call.args[0])
        a = a.unflatten(0, (self.num_examples, -1)).mean(1)
        if self.bias:
            a = F.pad(a, (0, 1), value=float("bias" in call.use.keys))
        return a

    def bias_grads(self) -> Tensor:
        """Gradients of the bias for each example, [V, N, *b, o]: those of calls that add it, over
        all positions.
        """
        adding = [float("bias" in call.use.keys) for call in self.calls]
        if 0.0 not in adding:
            return self.grads.sum(2)
        parts = [g.sum(2) * adds for g, adds in zip(self._grads, adding)]
        return torch.stack(parts).sum(0)

    def stacked_inputs(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `input_gram` as one matrix [M, i], without the bias's ones.

        None if there is another way to it, or another count of the rows than M.
        """
        if not self.weight or self.sparse or self.example_weights is not None:
            return None
        call = self._call_of_rows()
        if call is None:
            return None
        adds_no_bias = self.bias and "bias" not in call.use.keys
        if adds_no_bias or type(call.rule).input_gram is not AffineRule.input_gram:
            return None
        a = call.rule.rows(call.use.module, call.args[0])
        if isinstance(a, SparseRows) or a.ndim > 3:
            return None
        if not reduce:
            return a.flatten(0, 1)
        if call.routed is not None:
            return None
        return a.reshape(self.num_examples, -1, a.shape[-1]).mean(1)

    def input_gram(
        self, reduce: bool = False, diagonal: bool = False
    ) -> tuple[Tensor, Tensor | float]:
        """`Σ_{n,s} a aᵀ` [*b, i, i] and the number of rows in the sum (expand); of sparse rows the
        diagonal [i].

        With `reduce`, `Σ_n ā āᵀ` of the means over positions, and N. With `diagonal`, the diagonals
        alone [*b, i]. An example counts as often as its weight says.
        """
        is_plain = not (reduce or diagonal or self.sparse) and self.example_weights is None
        by_rule = self.weight and is_plain and not any(call.rule.sparse for call in self.calls)
        if by_rule and all(map(self._counts_all, range(len(self.calls)))):
            return self._gram_by_rule()
        if self.sparse:
            return self._square_sums(reduce)
        return self._gram_of_rows(reduce, diagonal)

    def _gram_by_rule(self) -> tuple[Tensor, Tensor | float]:
        """`Σ_{n,s} a aᵀ` and the number of rows, from the calls' rules: all rows count."""
        total: Tensor | None = None
        number: Tensor | float = 0.0
        for call in self.calls:
            module = call.use.module
            A, row_sum, rows = call.rule.input_gram(module, call.args[0])
            read = call.rule.reads(module)
            count = float(rows) if read is None else rows * read.to(A.dtype)[:, None, None]
            if self.bias:
                # [[Σ a aᵀ, Σ a], [Σ aᵀ, Σ 1]], in one copy of what may be the largest matrix.
                adds = float("bias" in call.use.keys)
                A = F.pad(A, (0, 1, 0, 1))
                A[..., -1, :-1] = A[..., :-1, -1] = row_sum * adds
                A[..., -1:, -1:] = count * adds
            total = A if total is None else total + A
            number = number + count
        assert total is not None
        return total, number

    def _square_sums(self, reduce: bool) -> tuple[Tensor, Tensor]:
        """`Σ_{n,s} a²` [i] of sparse rows, or with `reduce` `Σ_n ā²`, and the number of terms."""
        a: Any = self.inputs
        if self.example_weights is not None:
            a = a.times(self.example_weights.sqrt().to(a.dtype))
        total = a.mean_square() if reduce else a.square_sum()
        return total, self._count(reduce, total.dtype)

    def _gram_of_rows(self, reduce: bool, diagonal: bool) -> tuple[Tensor, Tensor]:
        """The sums of `input_gram` over dense rows, of which some may not count."""
        a: Any = self.mean_inputs() if reduce else self.inputs
        if self.example_weights is not None:
            root = self.example_weights.sqrt().to(a.dtype)
            a = a * _beside(root, a.ndim)
        if not reduce:
            a = a.flatten(0, 1)
        total = a.square().sum(0) if diagonal else gram(a)
        number = self._count(reduce, total.dtype)
        if number.ndim and not diagonal:
            number = number[..., None]
        return total, number

    def _count(self, reduce: bool, dtype: torch.dtype) -> Tensor:
        """How many rows count, or with `reduce` how many examples; 0-d, or [*b, 1] if matrices
        differ.
        """
        counts = (self._kept > 0 if reduce else self._kept).to(dtype)
        if self.example_weights is not None:
            counts = counts * _beside(self.example_weights.to(counts), counts.ndim)
        number = counts.sum(0)
        return number.sum() if number.numel() == 1 else number

    def stacked_grads(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `grad_gram` as one matrix [M, o]; None if there is another way to it."""
        call = self._call_of_rows()
        if call is None or self.sparse or type(call.rule).grad_gram is not AffineRule.grad_gram:
            return None
        g = call.rule.grad_rows(call.use.module, call.grads)
        if g.ndim > 4 or (reduce and call.routed is not None):
            return None
        if reduce and g.shape[1:3].numel() > self.num_examples:
            g = g.reshape(len(g) * self.num_examples, -1, g.shape[-1])
            return g.sum(1)
        return g.flatten(0, 2)

    def grad_gram(self, reduce: bool = False, diagonal: bool = False) -> Tensor:
        """`Σ_{v,n,s} g gᵀ` [*b, o, o]; with `reduce`, `Σ_{v,n} ĝ ĝᵀ` of `ĝ_n = Σ_s g_{n,s}`.

        With `diagonal`, the diagonals alone [*b, o].
        """
        if not (reduce or diagonal) and len(self.calls) == 1 and self._counts_all(0):
            call = self.calls[0]
            return call.rule.grad_gram(call.use.module, call.grads)
        g = self.grads.sum(2).flatten(0, 1) if reduce else self.grads.flatten(0, 2)
        return g.square().sum(0) if diagonal else gram(g)

    def _no_matrix(self) -> UnsupportedError:
        layer = self.layer
        if layer.roles:
            return UnsupportedError(
                f"{layer.title}: its parameter is multiplied with in {len(layer.roles)} roles by "
                f"{[use.name for use in layer.uses]}; look at each of `batch.roles()` by itself."
            )
        owner = type(layer.uses[0].owner).__name__
        fact = "is shared by several modules" if layer.tied else "has no affine rule"
        return UnsupportedError(
            f"{layer.title} ({owner}) {fact}, so it has no Kronecker factors. Use DiagonalBlock or "
            "FullBlock for it, or write an AffineRule and register it with "
            f"@register_rule({owner})."
        )

    def _only_call(self) -> RecordedCall | None:
        """The call, if there is one, all positions of all examples count and it reads all
        matrices.
        """
        call = self._call_of_rows()
        return call if call is None or call.routed is None else None

    def _call_of_rows(self) -> RecordedCall | None:
        """The call, if there is one, all of its rows count and it reads all matrices."""
        if self.role is None:
            raise self._no_matrix()
        call = self.calls[0]
        if len(self.calls) > 1 or not self._counts_all(0):
            return None
        return call if call.rule.reads(call.use.module) is None else None

    def _counts_all(self, k: int) -> bool:
        """Whether all rows of a call count; only a mask and sparse rules leave some out."""
        call = self.calls[k]
        if self.mask is None and not getattr(call.rule, "sparse", False):
            return True
        if call.routed is None:
            return self._masks[k] is None
        reaches = self.mask is not None and self.mask.shape[1] == call.routed.num_positions
        return not (call.rule.sparse or reaches)

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        """Positions of each call that count [N, S]: by the mask, by a sparse rule, and where rows
        were gathered; None for all.
        """
        masks = []
        for k, call in enumerate(self.calls):
            mask = None
            if isinstance(call.rule, AffineRule):
                if call.rule.sparse:
                    mask = self._inputs[k].kept
                if call.routed is not None:
                    kept = call.routed.kept(self.mask)
                    # Of rows that have several positions themselves, all.
                    kept = kept.repeat_interleave(self._positions(k) // kept.shape[1], 1)
                    mask = kept if mask is None else kept & mask
                elif self.mask is not None and self.mask.shape[1] == self._positions(k):
                    mask = self.mask if mask is None else self.mask & mask
            masks.append(mask)
        return masks

    def _positions(self, k: int) -> int:
        """Positions of one call: rows of the module's input per example."""
        call = self.calls[k]
        if call.grads is None:
            return self._inputs[k].shape[1]
        rows = call.rule.grads(call.use.module, call.grads[:1])
        if call.routed is not None:
            return call.routed.length * rows.shape[2]
        return rows.shape[1:3].numel() // self.num_examples

    @cached_property
    def _kept(self) -> Tensor:
        """How many rows of each example count [N, *b, 1], or the same for all matrices [N, *1,
        1].
        """
        total: Any = 0.0
        ndim = len(self.layer.groups[0].layout.matrix_shape)
        for k, (call, mask) in enumerate(zip(self.calls, self._masks)):
            if mask is None:
                shape = (self.num_examples,)
                counts = torch.full(shape, self._positions(k), device=self.layer.device)
            else:
                counts = mask.sum(1)
            counts = _beside(counts, ndim)
            read = call.rule.reads(call.use.module)
            total = total + (counts if read is None else counts * read[:, None])
        return total

    @cached_property
    def _inputs(self) -> Any:
        """Rows of each call [N, S, *b, i], those that don't count too, without ones for a bias;
        None of other rules.
        """
        rows = []
        for call in self.calls:
            if not isinstance(call.rule, AffineRule):
                rows.append(None)
                continue
            x = call.args[0] if call.routed is None else call.routed.padded(call.args[0])
            a = call.rule.rows(call.use.module, x)
            if a.shape[0] != self.num_examples:
                axes = () if isinstance(a, SparseRows) else (-1, *a.shape[2:])
                a = a.reshape(self.num_examples, *axes)
            rows.append(a)
        return rows

    @cached_property
    def _grads(self) -> list[Any]:
        """Gradients of the products of each call [V, N, S, *b, o], zero where they don't count;
        None of other rules.
        """
        rows = []
        for call, mask in zip(self.calls, self._masks):
            if not isinstance(call.rule, AffineRule):
                rows.append(None)
                continue
            g = call.grads if call.routed is None else call.routed.padded(call.grads, 1)
            g = call.rule.grad_rows(call.use.module, g)
            if g.shape[1] != self.num_examples:
                g = g.reshape(g.shape[0], self.num_examples, -1, *g.shape[3:])
            rows.append(g if mask is None else g * _beside(mask, g.ndim - 1))
        return rows

    # -------------------------------------------------------------------- gradients of each example
    @cached_property
    def per_example_grads(self) -> Tensor:
        """Gradients of each example, `J` [V, N, *b, rows, columns] in the layout of the parameters
        it is restricted to.

        Summed over positions, calls and modules that share the parameter.
        """
        if self.whole:
            if not self.weight:
                return self.bias_grads()[..., None]
            # A cat along S would copy everything.
            total = outer_products(self._grads[0], self._inputs[0])
            for g, a in zip(self._grads[1:], self._inputs[1:]):
                total = total.add_(outer_products(g, a))
            return torch.cat([total, self.bias_grads()[..., None]], -1) if self.bias else total
        group = self.layer.groups[0] if self.group is None else self.group
        grads = self.param_grads()
        J = group.layout.gather([grads[key].flatten(0, 1) for key in group.keys])
        return J.reshape(self.num_vectors, self.num_examples, *group.layout.matrix_shape)

    def inner_products(self, C: Tensor) -> Tensor:
        """Inner products of `per_example_grads` with some matrices, [V, N, K].

        Args:
            C: The matrices [K, *b, rows, columns] of the parameters that the batch is restricted
                to.

        Cost: from rows where no weight is shared by positions. Else gradients per example are
        formed in pieces, never all at once; those of sparse rows not at all. Roles of a tied
        parameter add up.
        """
        if len(self.layer.roles) > 1 and self.role is None:
            parts = [part.inner_products(C) for part in self.roles() if part.calls]
            return sum(parts[1:], parts[0])
        C = C.to(self.layer.accumulation_dtype)
        has_rows = self.whole and self.weight
        if has_rows and isinstance(self.inputs, SparseRows):
            return self.inputs.inner_products(self.grads, C)
        if not has_rows or C.ndim > 3 or self.grads.shape[2] > 1:
            columns = C.flatten(1).T
            parts = [piece.per_example_grads.flatten(2) @ columns for piece in self.pieces()]
            return torch.cat(parts, 1)
        parts = []
        for piece in self._cut(_PIECE_BYTES, sum(C.shape[1:]) + len(C) * min(C.shape[1:])):
            assert isinstance(piece.inputs, Tensor)
            parts.append(row_products(piece.grads[:, :, 0], piece.inputs[:, 0], C))
        return torch.cat(parts, 1)

    def squared_grads(
        self, QG: Tensor | None = None, QA: Tensor | None = None, total: Tensor | None = None
    ) -> Tensor:
        """`Σ_{v,n} (Q_Gᵀ J Q_A)²`, entry by entry, [*b, rows, columns]: the diagonal of the exact
        block in a basis.

        Args:
            QG: Basis of the rows [*b, rows, rows], None for the identity.
            QA: Basis of the columns [*b, columns, columns], likewise.
            total: What it is added to, if it is not the first one; it is returned then.

        Cost: rows and gradients per example are formed in pieces, never all at once; gradients of
        sparse rows not at all, unless there is a basis of the columns.
        """
        has_rows = self.whole and self.weight
        if has_rows and self.sparse and QA is None:
            assert isinstance(self.inputs, SparseRows)
            squares = self.inputs.squared(self.grads, QG)
            return squares if total is None else total.add_(squares)
        from_rows = False
        pieces = self.pieces()
        if has_rows and not self.sparse:
            *matrices, rows, columns = self.layer.groups[0].layout.matrix_shape
            # N · positions of all calls and matrices · rows
            numbers = sum([call.grads.shape[1:].numel() for call in self.calls])
            positions = numbers // self.num_examples // rows
            # Else a gradient is smaller than the rows that it is the sum of, in a basis or not.
            from_rows = positions <= math.prod(matrices) * max(rows, columns)
            size = max(_ROW_BYTES, _ROWS * columns * self.layer.accumulation_dtype.itemsize)
            pieces = self._cut(size, positions * columns)
        for piece in pieces:
            if from_rows:
                total = piece._squares_of_rows(QG, QA, total)
                continue
            grads = piece.per_example_grads
            if total is None:
                total = torch.zeros_like(grads[0, 0])
            for J in grads:
                squared_examples(J, QG, QA, total)
        assert total is not None
        return total

    def _squares_of_rows(
        self, QG: Tensor | None, QA: Tensor | None, total: Tensor | None
    ) -> Tensor | None:
        """`total + Σ_{v,n} (Σ_s Q_Gᵀ g_{v,n,s} a_{n,s}ᵀ Q_A)²`."""
        # Ones that all calls have need not be stored.
        has_ones = self.bias and all("bias" in call.use.keys for call in self.calls)
        if has_ones:
            a = self._inputs[0] if len(self.calls) == 1 else torch.cat(self._inputs, 1)
        else:
            a: Any = self.inputs
        for g in self.grads:
            total = squared_gradients(g, a, QG, QA, has_ones, total)
        return total

    def param_grads(self) -> dict[str, Tensor]:
        """Gradients of each example in the parameters' own shapes: key to [V, N, *shape]."""
        N = self.num_examples
        dtype = self.layer.accumulation_dtype
        total: dict[str, Tensor] = {}
        for k, call in enumerate(self.calls):
            for local, J in self._call_grads(k).items():
                key = call.use.keys.get(local)
                if key not in self.keys:
                    continue
                J = J.to(dtype)
                if call.routed is not None and not isinstance(call.rule, AffineRule):
                    zeros = J.new_zeros(len(J), N, *J.shape[2:])
                    J = zeros.index_add_(1, call.routed.examples, J)
                elif J.shape[1] != N:
                    J = J.unflatten(1, (N, -1)).sum(2)
                total[key] = total[key] + J if key in total else J
        # A module of a tied parameter may not be called in this batch.
        for key in self.keys:
            if key not in total:
                p = self.layer.params[key]
                shape = (self.num_vectors, N, *p.shape)
                total[key] = torch.zeros(shape, dtype=dtype, device=p.device)
        return total

    def _call_grads(self, k: int) -> dict[str, Tensor]:
        """Gradients of the rows of one call in its parameters' own shapes: local name to [V, N *
        positions, *shape].
        """
        call = self.calls[k]
        module = call.use.module
        rule = call.rule
        name = title(call.use.name)
        try:
            if isinstance(rule, AffineRule):
                g = self._grads[k]
                if call.use.keys.keys() == {"bias"}:
                    bias = self.layer.params[call.use.keys["bias"]]
                    return {"bias": g.sum(2).reshape(*g.shape[:2], *bias.shape)}
                return rule.split(module, outer_products(g, self._inputs[k]), g)
            gradients = [self._masked(call, g) for g in call.gradients]
            grads = gradients if isinstance(call.grads, list) else gradients[0]
            return rule.example_grads(
                module, call.args, call.kwargs, grads, call.in_axes, call.out_axes
            )
        except RerunError as error:
            raise OutsideReads(f"{name}: {error}", call.use.keys.values()) from error
        except NoExampleGradients as error:
            keys = call.use.keys.values()
            raise NoExampleGradients(f"{name}: {error.fact}", error.advice, keys) from error
        # UnsupportedError is both.
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{name}: {error}") from error

    def _masked(self, call: RecordedCall, g: Tensor) -> Tensor:
        """Output gradients of a call by its rule, zero where the mask says that a position does not
        count.
        """
        routed = call.routed
        if routed is None:
            return call.rule.masked(g, self.mask)
        if self.mask is None or self.mask.shape[1] != routed.num_positions:
            return g
        counted = self.mask[routed.examples, routed.positions]
        return g * counted.view(-1, *[1] * (g.ndim - 2))


def _beside(t: Tensor, ndim: int) -> Tensor:
    """A tensor with as many axes of size 1 behind as to have `ndim`."""
    return t.view(*t.shape, *[1] * (ndim - t.ndim))
