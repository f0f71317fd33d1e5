"""The calls of one layer in one mini-batch, and gradients of each example: all that an approximation reads.

Shapes, here and in every accumulator: N examples, V vectors backpropagated, i and o the columns and rows of the layer's
parameters as one matrix; see `AffineRows` for more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule, SparseRows
from curvlinops_plus.layer.squares import row_products, squared_examples, squared_gradients
from curvlinops_plus.risk.affine_rows import AffineRows
from curvlinops_plus.risk.layers import Call, Group, Layer, Role, title

# Per-example gradients that are only needed one after the other are formed in pieces of about this size.
_PIECE_BYTES = 2**26
# Patches of images are formed in pieces that a processor's cache can hold, but not too few at a time for fast products.
_ROW_BYTES = 2**20
_ROWS = 256


@dataclass(eq=False)
class LayerBatch:
    """The calls of one layer in one mini-batch, with the gradients of their outputs.

    Attributes:
        layer: The layer.
        calls: Its calls, in the order in which they happened.
        num_examples: N.
        first: Whether the inputs are new. A batch through which several vectors are sent one after the other is shown
            once per vector, with the same inputs; a statistic of inputs alone is counted when `first` is True.
        mask: Positions that count, [N, T] bool, or None for all. Reaches layers with T positions.
        example_weights: Weights of the examples [N], None for ones. Gradients carry their roots already.
        group: The parameters that the batch is restricted to, None for all of the layer's.
        role: The role that it is restricted to, None for all of the layer's.
        summed: Gradients of each example in place of the calls, see `for_squares`.
    """

    layer: Layer
    calls: list[Call]
    num_examples: int
    first: bool = True
    mask: Tensor | None = None
    example_weights: Tensor | None = None
    group: Group | None = None
    role: Role | None = None
    _shared: dict[Any, Any] = field(default_factory=dict)
    summed: Tensor | None = None

    def restrict(self, group: Group) -> LayerBatch:
        """The same batch with only the parameters of `group`; what was computed is shared."""
        return self if group is self.group else replace(self, group=group)

    def roles(self) -> list[LayerBatch]:
        """The batch restricted to each role, in the layer's order; a role that was not called has no calls.

        A layer whose parameters belong to one module has one role: the batch itself.
        """
        if len(self.layer.roles) <= 1:
            return [self]
        parts = []
        for role in self.layer.roles:
            modules = {id(use.module) for use in role.uses}
            calls = [call for call in self.calls if id(call.use.module) in modules]
            shared = self._shared.setdefault(("role", id(role)), {})
            parts.append(replace(self, calls=calls, role=role, _shared=shared))
        return parts

    def examples(self, chosen: slice | Sequence[int], vectors: slice | None = None) -> LayerBatch:
        """Some of the examples, and some of the vectors if these are given."""
        N, calls = self.num_examples, list[Call]()
        if isinstance(chosen, slice):
            at, number = chosen, len(range(N)[chosen])
        else:
            at, number = torch.tensor(chosen, device=self.layer.device), len(chosen)
        for call in self.calls:
            args, kwargs, grads = call.args, call.kwargs, call.grads
            if call.in_axes is None:
                args = (_rows_of(args[0], 0, at, N),)
            else:
                axes, rows = iter(call.in_axes), (grads if isinstance(grads, Tensor) else grads[0]).shape[1]

                def take(t: Tensor, axes: Iterator[int | None] = axes, rows: int = rows) -> Tensor:
                    return t if next(axes) is None or len(t) != rows else _rows_of(t, 0, at, N)

                args, kwargs = tree_map_only(Tensor, take, (args, dict(kwargs)))
            several = grads if isinstance(grads, list) else [] if grads is None else [grads]
            kept = []
            for g in several:
                kept.append(_rows_of(g if vectors is None else g[vectors], 1, at, N))
            calls.append(replace(call, args=args, kwargs=kwargs, grads=kept if several is grads else (*kept, None)[0]))
        mask = None if self.mask is None else self.mask[at]
        weights = None if self.example_weights is None else self.example_weights[at]
        return replace(self, calls=calls, num_examples=number, mask=mask, example_weights=weights, _shared={})

    def pieces(self, max_bytes: int | None = None) -> Iterator[LayerBatch]:
        """The examples in pieces whose gradients, formed all at once, take about `max_bytes`, 64 MiB by default."""
        numbers = self.num_vectors * sum(self.layer.params[key].numel() for key in self.keys)
        return self._cut(_PIECE_BYTES if max_bytes is None else max_bytes, numbers)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the parameters that the batch is restricted to."""
        return tuple(self.layer.params) if self.group is None else self.group.keys

    @property
    def num_vectors(self) -> int:
        """V, the number of vectors in this piece."""
        grads = self.calls[0].grads
        return 0 if grads is None else (grads if isinstance(grads, Tensor) else grads[0]).shape[0]

    @cached_property
    def rows(self) -> AffineRows:
        """The rows of an affine layer.

        Raises:
            UnsupportedError: If the layer has no affine rule, or multiplies with several matrices.
        """
        layer = self.layer
        if not layer.affine:
            kind = "is shared by several modules" if layer.tied else "has no affine rule"
            owner = type(layer.uses[0].owner).__name__
            raise UnsupportedError(
                f"{layer.title} ({owner}) {kind}, so it has no Kronecker factors. Use DiagonalBlock or FullBlock for "
                f"it, or write an AffineRule and register it with @register_rule({owner})."
            )
        several = len(layer.roles) > 1  # else what is known of the role is known of the layer
        if several and self.role is None:
            raise UnsupportedError(
                f"{layer.title}: its parameter is multiplied with in {len(layer.roles)} roles by "
                f"{[use.name for use in layer.uses]}; look at each of `batch.roles()` by itself."
            )
        keys = layer.params if self.group is None else self.group.keys
        role = self.role or layer.roles[0]
        bias = layer.bias in keys and not (self.role is not None and self.role.transposed)
        sparse = layer.sparse or (
            several and all(isinstance(use.rule, AffineRule) and use.rule.sparse for use in role.uses)
        )
        columns = (self.group or layer.groups[0]).layout.matrix_shape[-1]
        return AffineRows(
            layer,
            self.calls,
            self.num_examples,
            self.mask,
            layer.weight in keys,
            bias,
            sparse,
            columns,
            self._shared,
            self.example_weights,
        )

    # ---------------------------------------------------------------------------------------- gradients of each example
    @cached_property
    def per_example_grads(self) -> Tensor:
        """Gradients of each example, `J` [V, N, *b, rows, columns] in the layout of the parameters it is restricted to.

        Summed over positions, calls and modules that share the parameter.
        """
        if self.summed is not None:
            return self.summed
        if self._one_matrix:
            return self.rows.outer_products() if self.rows.weight else self.rows.bias_grads()[..., None]
        (group,) = self.layer.groups if self.group is None else (self.group,)
        grads = self.param_grads()
        tree = {key: grads[key].flatten(0, 1).movedim(0, -1) for key in group.keys}
        return group.layout.join(tree).T.reshape(self.num_vectors, self.num_examples, *group.layout.matrix_shape)

    def inner_products(self, C: Tensor, right: Tensor | None = None) -> Tensor:
        """Inner products of `per_example_grads` with some matrices, [V, N, K].

        Args:
            C: The matrices [K, *b, rows, columns] of the parameters that the batch is restricted to; with `right`
                their left factors.
            right: The matrices are `Cᵀ right`, with `C` [K, r, rows] and `right` [K, r, columns].

        Cost: from rows where no weight is shared by positions, or matrices have factors. Else gradients per example are
        formed in pieces, never all at once; those of sparse rows not at all. Roles of a tied parameter add up.
        """
        if len(self.layer.roles) > 1 and self.role is None:
            parts = [part.inner_products(C, right) for part in self.roles() if part.calls]
            return sum(parts[1:], parts[0])
        C = C.to(self.layer.accumulation_dtype)
        right = None if right is None else right.to(C.dtype)
        rows = self.rows if self._one_matrix and self.rows.weight else None
        if rows is not None and rows.sparse:
            assert isinstance(rows.inputs, SparseRows)
            return rows.inputs.inner_products(rows.grads, C, right)
        parts = []
        if rows is not None and (right is not None or (C.ndim == 3 and rows.grads.shape[2] == 1)):
            products = len(C) * (min(C.shape[1:]) if right is None else 2 * right.shape[1])
            for piece in self._cut(_PIECE_BYTES, rows.grads.shape[2] * (sum(C.shape[-2:]) + products)):
                a = piece.rows.inputs
                assert isinstance(a, Tensor)
                parts.append(row_products(piece.rows.grads, a, C, right))
        else:
            columns = (C if right is None else C.mT @ right).flatten(1).T
            for piece in self.pieces():
                parts.append(piece.per_example_grads.flatten(2) @ columns)
        return torch.cat(parts, 1)

    def squared_grads(self, QG: Tensor | None = None, QA: Tensor | None = None, total: Tensor | None = None) -> Tensor:
        """`Σ_{v,n} (Q_Gᵀ J Q_A)²`, entry by entry, [*b, rows, columns]: the diagonal of the exact block in a basis.

        Args:
            QG: Basis of the rows [*b, rows, rows], None for the identity.
            QA: Basis of the columns [*b, columns, columns], likewise.
            total: What it is added to, if it is not the first one; it is returned then.

        Cost: rows and gradients per example are formed in pieces, never all at once; gradients of sparse rows not at
        all, unless there is a basis of the columns.
        """
        rows = self.rows if self._one_matrix and self.summed is None and self.rows.weight else None
        if rows is not None and rows.sparse and QA is None:
            assert isinstance(rows.inputs, SparseRows)
            found = rows.inputs.squared(rows.grads, QG)
            return found if total is None else total.add_(found)
        dense = rows is not None and not rows.sparse
        from_rows = dense and not self._many_positions
        for piece in (self,) if self.summed is not None else self._row_pieces() if dense else self.pieces():
            if from_rows:
                rows = piece.rows
                ones = rows.bias and all(map(rows.adds_bias, piece.calls))  # else they are stored as a column
                a = rows.plain_inputs() if ones or not rows.bias else rows.inputs
                assert isinstance(a, Tensor)
                for g in rows.grads:
                    total = squared_gradients(g, a, QG, QA, ones, total)
                continue
            grads = piece.per_example_grads
            total = torch.zeros_like(grads[0, 0]) if total is None else total
            for J in grads:
                squared_examples(J, QG, QA, total)
        assert total is not None
        return total

    def for_squares(self) -> Iterator[LayerBatch]:
        """Batches with all that `squared_grads` reads: gradients where these are smaller than the rows, else itself."""
        rows = self.rows if self._one_matrix and len(self.layer.groups) == 1 else None
        if rows is None or not rows.weight or rows.sparse or not self._many_positions:
            yield self
            return
        for part in self._row_pieces():
            grads = part.per_example_grads
            yield replace(part, calls=[], mask=None, example_weights=None, _shared={}, summed=grads)

    def _row_pieces(self) -> Iterator[LayerBatch]:
        columns = self.layer.groups[0].layout.matrix_shape[-1]
        size = max(_ROW_BYTES, _ROWS * columns * self.layer.accumulation_dtype.itemsize)
        return self._cut(size, self._positions * columns)

    @property
    def _positions(self) -> int:
        """Of all calls and matrices, per example."""
        outputs = sum([call.grads.shape[1:].numel() for call in self.calls])  # examples · positions · b · o
        return outputs // self.num_examples // self.layer.groups[0].layout.matrix_shape[-2]

    @property
    def _many_positions(self) -> bool:
        """Whether a gradient is smaller than the rows that it is the sum of, whether in a basis or not."""
        *batch, rows, columns = self.layer.groups[0].layout.matrix_shape
        return self._positions > math.prod(batch) * max(rows, columns)

    def param_grads(self) -> dict[str, Tensor]:
        """Gradients of each example in the parameters' own shapes: key to [V, N, *shape]."""
        keys, total = set(self.keys), {}
        for call in self.calls:
            for local, J in self._call_grads(call).items():
                key = call.use.keys.get(local)
                if key in keys:
                    J = J.unflatten(1, (self.num_examples, -1)).sum(2).to(self.layer.accumulation_dtype)
                    total[key] = total[key].add_(J) if key in total else J
        V, N = self.num_vectors, self.num_examples
        for key in keys - total.keys():  # a module of a tied parameter that was not called in this batch
            p = self.layer.params[key]
            total[key] = torch.zeros(V, N, *p.shape, dtype=self.layer.accumulation_dtype, device=p.device)
        return total

    def _call_grads(self, call: Call) -> dict[str, Tensor]:
        use = call.use
        try:
            if isinstance(call.rule, AffineRule):
                # By itself: others may multiply with a different matrix.
                rows = AffineRows(self.layer, [call], self.num_examples, self.mask, True, False, False, 0, {})
                return rows.call_grads(call)
            several = not isinstance(call.grads, Tensor)
            masked = [call.rule.masked(self._upcast(g), self.mask) for g in (call.grads if several else [call.grads])]
            g = masked if several else masked[0]
            return call.rule.example_grads(use.module, call.args, call.kwargs, g, call.in_axes, call.out_axes)
        except (ValueError, NotImplementedError) as error:  # UnsupportedError is both
            raise type(error)(f"{title(use.name)}: {error}") from error

    # ------------------------------------------------------------------------------------------------------- internals
    def _upcast(self, t: Tensor) -> Tensor:
        return t.to(torch.promote_types(t.dtype, self.layer.accumulation_dtype)) if t.is_floating_point() else t

    def _cut(self, size: int, numbers: int) -> Iterator[LayerBatch]:
        """Pieces of `size` bytes if each example takes so many numbers, of one example at least."""
        step = max(1, size // max(1, numbers * self.layer.accumulation_dtype.itemsize))
        if step >= self.num_examples:
            yield self
            return
        for start in range(0, self.num_examples, step):
            yield self.examples(slice(start, start + step))

    @property
    def _one_matrix(self) -> bool:
        """Whether all calls multiply with the layer's matrix."""
        return len(self.layer.roles) == 1 or (self.role is not None and not self.role.transposed)


def _rows_of(t: Tensor, axis: int, at: slice | Tensor, N: int) -> Tensor:
    """The rows of some examples on an axis with as many rows for each of N."""
    positions = t.shape[axis] // N
    t = t if positions == 1 else t.unflatten(axis, (N, positions))
    t = t[:, at] if axis else t[at]
    return t if positions == 1 else t.flatten(axis, axis + 1)
