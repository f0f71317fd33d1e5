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
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule, SparseRows
from curvlinops_plus.layer.replay import NoExampleGradients, RerunError
from curvlinops_plus.layer.rule import outer_products
from curvlinops_plus.layer.squares import row_products, squared_examples, squared_gradients
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.risk.calls import OutsideReads, RecordedCall, title
from curvlinops_plus.risk.layers import Group, Layer, Role

# Per-example gradients that are only needed one after the other are formed in pieces of about this
# size.
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
        layer, role = self.layer, self.role
        if role is None and len(layer.roles) == 1:
            role = self.role = layer.roles[0]
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
        modules = [{id(use.module) for use in role.uses} for role in self.layer.roles]
        calls = [[call for call in self.calls if id(call.use.module) in own] for own in modules]
        return [
            replace(self, calls=own, role=role)
            for own, role in zip(calls, self.layer.roles, strict=True)
        ]

    def examples(self, chosen: slice | Tensor, vectors: slice | None = None) -> LayerBatch:
        """Some of the examples, and some of the vectors if these are given."""
        N, calls = self.num_examples, list[RecordedCall]()

        def take(t: Tensor, axis: int) -> Tensor:
            if isinstance(chosen, Tensor):
                return t.index_select(axis, chosen)
            return t[:, chosen] if axis else t[chosen]

        def rows_of(t: Tensor, axis: int) -> Tensor:  # there may be several for each example
            positions = t.shape[axis] // N
            t = t if positions == 1 else t.unflatten(axis, (N, positions))
            t = take(t, axis)
            return t if positions == 1 else t.flatten(axis, axis + 1)

        def gradients_of(g: Tensor) -> Tensor:
            return rows_of(g if vectors is None else g[vectors], 1)

        for call in self.calls:
            args, kwargs, grads = call.args, call.kwargs, call.grads
            if call.in_axes is None:
                args = (rows_of(args[0], 0),)
            else:
                axes, rows = (
                    iter(call.in_axes),
                    (grads if isinstance(grads, Tensor) else grads[0]).shape[1],
                )

                def taken(t: Tensor, axes: Iterator[int | None] = axes, rows: int = rows) -> Tensor:
                    return t if next(axes) is None or len(t) != rows else rows_of(t, 0)

                args, kwargs = tree_map_only(Tensor, taken, (args, dict(kwargs)))
            if isinstance(grads, list):
                grads = [gradients_of(g) for g in grads]
            elif grads is not None:
                grads = gradients_of(grads)
            part = copy(call)
            part.args, part.kwargs, part.grads = args, kwargs, grads
            calls.append(part)
        number = len(range(N)[chosen]) if isinstance(chosen, slice) else len(chosen)
        mask, weights = (
            None if t is None else take(t, 0) for t in (self.mask, self.example_weights)
        )
        return replace(self, calls=calls, num_examples=number, mask=mask, example_weights=weights)

    def pieces(self, max_bytes: int | None = None) -> Iterator[LayerBatch]:
        """The examples in pieces whose gradients, formed all at once, take about `max_bytes`, 64
        MiB by default.
        """
        numbers = self.num_vectors * sum(self.layer.params[key].numel() for key in self.keys)
        return self._cut(_PIECE_BYTES if max_bytes is None else max_bytes, numbers)

    def _cut(self, size: int, numbers: int) -> Iterator[LayerBatch]:
        """Pieces of `size` bytes if each example takes so many numbers, of one example at least."""
        step = max(1, size // max(1, numbers * self.layer.accumulation_dtype.itemsize))
        if step >= self.num_examples:
            yield self
            return
        for start in range(0, self.num_examples, step):
            yield self.examples(slice(start, start + step))

    @property
    def num_vectors(self) -> int:
        """V, the number of vectors in this piece."""
        grads = self.calls[0].grads
        return 0 if grads is None else (grads if isinstance(grads, Tensor) else grads[0]).shape[0]

    # ------------------------------------------------------------------------ rows of affine layers
    @cached_property
    def inputs(self) -> Tensor | SparseRows:
        """Rows `a`, [N, S, *b, i]; a column of ones is the bias's, masked rows are zero.

        Raises:
            UnsupportedError: If the layer has no affine rule, or multiplies with several matrices.
        """
        if self.role is None:
            raise self._no_matrix()
        found: list[Any] = []
        for k, (call, mask) in enumerate(zip(self.calls, self._masks, strict=True)):
            a: Any = self._inputs[k] if self.weight else None
            if self.sparse:
                found.append(a if mask is None else a.masked(mask))
                continue
            a = a.to_dense() if isinstance(a, SparseRows) else a
            if a is None or self.bias:
                like, read = self._grads[k][0] if a is None else a, call.rule.reads(call.use.module)
                ones = like.new_full((*like.shape[:-1], 1), float("bias" in call.use.keys))
                ones = ones if read is None else ones * read.to(ones.dtype)[:, None]
                a = ones if a is None else torch.cat([a, ones], -1)
            found.append(a if mask is None else a * _beside(mask, a.ndim))
        if len(found) == 1:
            return found[0]
        return SparseRows.cat(found) if self.sparse else torch.cat(found, 1)

    @cached_property
    def grads(self) -> Tensor:
        """Output gradients `g`, [V, N, S, *b, o]; masked rows are zero. Errors as for `inputs`."""
        if self.role is None:
            raise self._no_matrix()
        return self._grads[0] if len(self._grads) == 1 else torch.cat(self._grads, 2)

    def mean_inputs(self) -> Tensor:
        """`ā_n = mean_s a_{n,s}`, [N, *b, i] (reduce)."""
        if self.weight and (call := self._only_call) is not None:
            a = call.rule.mean_inputs(call.use.module, call.args[0])
            a = a.unflatten(0, (self.num_examples, -1)).mean(1)
            return (
                torch.cat([a, torch.full_like(a[..., :1], "bias" in call.use.keys)], -1)
                if self.bias
                else a
            )
        assert isinstance(self.inputs, Tensor)
        return self.inputs.sum(1) / self._kept.clamp(min=1)

    def bias_grads(self) -> Tensor:
        """Gradients of the bias for each example, [V, N, *b, o]: those of calls that add it, over
        all positions.
        """
        adding = [float("bias" in call.use.keys) for call in self.calls]
        if 0.0 not in adding:
            return self.grads.sum(2)
        return torch.stack(
            [g.sum(2) * adds for g, adds in zip(self._grads, adding, strict=True)]
        ).sum(0)

    def stacked_inputs(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `input_gram` as one matrix [M, i], without the bias's ones.

        None if there is another way to it, or another count of the rows than M.
        """
        call = self._only_call
        if call is None or not self.weight or self.sparse or self.example_weights is not None:
            return None
        if (self.bias and "bias" not in call.use.keys) or type(
            call.rule
        ).input_gram is not AffineRule.input_gram:
            return None
        a = self._inputs[0]
        if isinstance(a, SparseRows) or a.ndim > 3:
            return None
        return a.mean(1) if reduce else a.flatten(0, 1)

    def input_gram(
        self, reduce: bool = False, diagonal: bool = False
    ) -> tuple[Tensor, Tensor | float]:
        """`Σ_{n,s} a aᵀ` [*b, i, i] and the number of rows in the sum (expand); of sparse rows the
        diagonal [i].

        With `reduce`, `Σ_n ā āᵀ` of the means over positions, and N. With `diagonal`, the diagonals
        alone [*b, i]. An example counts as often as its weight says.
        """
        weights, by_rule = (
            self.example_weights,
            self.weight and not (reduce or diagonal or self.sparse),
        )
        by_rule = by_rule and weights is None and not any(call.rule.sparse for call in self.calls)
        if by_rule and all(mask is None for mask in self._masks):
            total, number = torch.zeros(()), 0.0
            for call in self.calls:
                part, row_sum, rows = call.rule.input_gram(call.use.module, call.args[0])
                read = call.rule.reads(call.use.module)
                count = float(rows) if read is None else rows * read.to(part.dtype)[:, None, None]
                if self.bias:
                    adds = float("bias" in call.use.keys)
                    part = F.pad(
                        part, (0, 1, 0, 1)
                    )  # one copy of what may be the largest matrix of all
                    part[..., -1, :-1] = part[..., :-1, -1] = row_sum * adds
                    part[..., -1:, -1:] = count * adds
                total, number = part if call is self.calls[0] else total + part, number + count
            return total, number
        a: Any = self.inputs if self.sparse or not reduce else self.mean_inputs()
        if weights is not None:  # sums of squares are weighted
            root = weights.sqrt().to(a.dtype)
            a = a.times(root) if self.sparse else a * _beside(root, a.ndim)
        if self.sparse:
            total = a.mean_square() if reduce else a.square_sum()
        else:
            a = a if reduce else a.flatten(0, 1)
            total = a.square().sum(0) if diagonal else gram(a)
        kept = (self._kept > 0 if reduce else self._kept).to(total.dtype)  # [N, *b, 1]
        number = (kept if weights is None else kept * _beside(weights.to(kept), kept.ndim)).sum(0)
        return total, number.sum() if number.numel() == 1 else number if diagonal else number[
            ..., None
        ]

    def stacked_grads(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `grad_gram` as one matrix [M, o]; None if there is another way to it."""
        call = self._only_call
        if call is None or self.sparse or type(call.rule).grad_gram is not AffineRule.grad_gram:
            return None
        g = self._grads[0]
        if g.ndim > 4:
            return None
        return g.sum(2).flatten(0, 1) if reduce and g.shape[2] > 1 else g.flatten(0, 2)

    def grad_gram(self, reduce: bool = False, diagonal: bool = False) -> Tensor:
        """`Σ_{v,n,s} g gᵀ` [*b, o, o]; with `reduce`, `Σ_{v,n} ĝ ĝᵀ` of `ĝ_n = Σ_s g_{n,s}`.

        With `diagonal`, the diagonals alone [*b, o].
        """
        if not (reduce or diagonal) and len(self.calls) == 1 and self._masks[0] is None:
            call = self.calls[0]
            return call.rule.grad_gram(call.use.module, call.grads)
        g = self.grads.sum(2).flatten(0, 1) if reduce else self.grads.flatten(0, 2)
        return g.square().sum(0) if diagonal else gram(g)

    def _no_matrix(self) -> UnsupportedError:
        layer, owner = self.layer, type(self.layer.uses[0].owner).__name__
        if layer.roles:
            return UnsupportedError(
                f"{layer.title}: its parameter is multiplied with in {len(layer.roles)} roles by "
                f"{[use.name for use in layer.uses]}; look at each of `batch.roles()` by itself."
            )
        return UnsupportedError(
            f"{layer.title} ({owner}) "
            f"{'is shared by several modules' if layer.tied else 'has no affine rule'}, so it has "
            "no Kronecker factors. Use DiagonalBlock or FullBlock for it, or write an AffineRule "
            f"and register it with @register_rule({owner})."
        )

    @cached_property
    def _only_call(self) -> RecordedCall | None:
        """The call, if there is one, all of its positions count and it reads all matrices."""
        if self.role is None:
            raise self._no_matrix()
        call = self.calls[0]
        every = (self.mask is None and not call.rule.sparse) or self._masks[0] is None
        return (
            call
            if len(self.calls) == 1 and every and call.rule.reads(call.use.module) is None
            else None
        )

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        """Positions of each call that count [N, S]: by the mask, and by a sparse rule; None for
        all.
        """
        found: list[Tensor | None] = [None] * len(self.calls)
        for k, call in enumerate(self.calls):
            if not isinstance(call.rule, AffineRule) or (
                self.mask is None and not call.rule.sparse
            ):
                continue
            kept = self._inputs[k].kept if call.rule.sparse else None
            if self.mask is not None and self.mask.shape[1] == self._positions(k):
                kept = self.mask if kept is None else self.mask & kept
            found[k] = kept
        return found

    def _positions(self, k: int) -> int:
        """Positions of one call: rows of the module's input per example."""
        if (call := self.calls[k]).grads is None:
            return self._inputs[k].shape[1]
        return (
            call.rule.grads(call.use.module, call.grads[:1]).shape[1:3].numel() // self.num_examples
        )

    @cached_property
    def _kept(self) -> Tensor:
        """How many rows of each example count [N, *b, 1], or the same for all matrices [N, *1,
        1].
        """
        total: Any = 0.0
        for k, (call, mask) in enumerate(zip(self.calls, self._masks, strict=True)):
            N, read = self.num_examples, call.rule.reads(call.use.module)
            kept = (
                torch.full((N,), self._positions(k), device=self.layer.device)
                if mask is None
                else mask.sum(1)
            )
            kept = _beside(kept, len(self.layer.groups[0].layout.matrix_shape))
            total = total + (kept if read is None else kept * read[:, None])
        return total

    @cached_property
    def _inputs(self) -> Any:
        """Rows of each call [N, S, *b, i], those that don't count too, without ones for a bias;
        None of other rules.
        """
        found = []
        for call in self.calls:
            a = (
                call.rule.rows(call.use.module, call.args[0])
                if isinstance(call.rule, AffineRule)
                else None
            )
            shape = () if a is None or isinstance(a, SparseRows) else (-1, *a.shape[2:])
            found.append(None if a is None else a.reshape(self.num_examples, *shape))
        return found

    @cached_property
    def _grads(self) -> list[Any]:
        """Gradients of the products of each call [V, N, S, *b, o], zero where they don't count;
        None of other rules.
        """
        found = []
        for call, mask in zip(self.calls, self._masks, strict=True):
            if not isinstance(call.rule, AffineRule):
                found.append(None)
                continue
            g = call.rule.grad_rows(call.use.module, call.grads)
            g = g.reshape(g.shape[0], self.num_examples, -1, *g.shape[3:])
            found.append(g if mask is None else g * _beside(mask, g.ndim - 1))
        return found

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
            total = outer_products(self._grads[0], self._inputs[0])
            for g, a in zip(
                self._grads[1:], self._inputs[1:], strict=True
            ):  # a cat along S would copy everything
                total = total.add_(outer_products(g, a))
            return torch.cat([total, self.bias_grads()[..., None]], -1) if self.bias else total
        (group,) = self.layer.groups if self.group is None else (self.group,)
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
        C, by_rows = C.to(self.layer.accumulation_dtype), self.whole and self.weight
        if by_rows and isinstance(self.inputs, SparseRows):
            return self.inputs.inner_products(self.grads, C)
        if not by_rows or C.ndim > 3 or self.grads.shape[2] > 1:
            return torch.cat(
                [piece.per_example_grads.flatten(2) @ C.flatten(1).T for piece in self.pieces()], 1
            )
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
        by_rows = self.whole and self.weight
        if by_rows and self.sparse and QA is None:
            assert isinstance(self.inputs, SparseRows)
            found = self.inputs.squared(self.grads, QG)
            return found if total is None else total.add_(found)
        dense = by_rows and not self.sparse
        from_rows = dense and not self._many_positions
        for piece in self._row_pieces() if dense else self.pieces():
            if from_rows:
                ones = self.bias and all(
                    "bias" in call.use.keys for call in piece.calls
                )  # else they are stored
                a: Any = (
                    piece.inputs
                    if not ones
                    else piece._inputs[0]
                    if len(piece.calls) == 1
                    else piece._inputs
                )
                a = torch.cat(a, 1) if isinstance(a, list) else a
                for g in piece.grads:
                    total = squared_gradients(g, a, QG, QA, ones, total)
                continue
            grads = piece.per_example_grads
            total = torch.zeros_like(grads[0, 0]) if total is None else total
            for J in grads:
                squared_examples(J, QG, QA, total)
        assert total is not None
        return total

    def _row_pieces(self) -> Iterator[LayerBatch]:
        columns = self.layer.groups[0].layout.matrix_shape[-1]
        size = max(_ROW_BYTES, _ROWS * columns * self.layer.accumulation_dtype.itemsize)
        return self._cut(size, self._shared_positions * columns)

    @property
    def _shared_positions(self) -> int:
        """Of all calls and matrices, per example."""
        outputs = sum(
            [call.grads.shape[1:].numel() for call in self.calls]
        )  # examples · positions · b · o
        return outputs // self.num_examples // self.layer.groups[0].layout.matrix_shape[-2]

    @property
    def _many_positions(self) -> bool:
        """Whether a gradient is smaller than the rows that it is the sum of, whether in a basis or
        not.
        """
        *batch, rows, columns = self.layer.groups[0].layout.matrix_shape
        return self._shared_positions > math.prod(batch) * max(rows, columns)

    def param_grads(self) -> dict[str, Tensor]:
        """Gradients of each example in the parameters' own shapes: key to [V, N, *shape]."""
        V, N, dtype, total = (
            self.num_vectors,
            self.num_examples,
            self.layer.accumulation_dtype,
            dict[str, Tensor](),
        )
        for k, call in enumerate(self.calls):
            for local, J in self._call_grads(k).items():
                if (key := call.use.keys.get(local)) in self.keys:
                    J = (J if J.shape[1] == N else J.unflatten(1, (N, -1)).sum(2)).to(dtype)
                    total[key] = total[key] + J if key in total else J
        for key in (
            set(self.keys) - total.keys()
        ):  # a module of a tied parameter that was not called in this batch
            p = self.layer.params[key]
            total[key] = torch.zeros(V, N, *p.shape, dtype=dtype, device=p.device)
        return total

    def _call_grads(self, k: int) -> dict[str, Tensor]:
        """Gradients of the rows of one call in its parameters' own shapes: local name to [V, N *
        positions, *shape].
        """
        call = self.calls[k]
        module, rule, g = call.use.module, call.rule, call.grads
        try:
            if isinstance(rule, AffineRule):
                g = self._grads[k]
                if call.use.keys.keys() == {"bias"}:
                    return {
                        "bias": g.sum(2).reshape(
                            *g.shape[:2], *self.layer.params[call.use.keys["bias"]].shape
                        )
                    }
                return rule.split(module, outer_products(g, self._inputs[k]), g)
            g = (
                [rule.masked(t, self.mask) for t in g]
                if isinstance(g, list)
                else rule.masked(g, self.mask)
            )
            return rule.example_grads(
                module, call.args, call.kwargs, g, call.in_axes, call.out_axes
            )
        except RerunError as error:
            raise OutsideReads(
                f"{title(call.use.name)}: {error}", call.use.keys.values()
            ) from error
        except NoExampleGradients as error:
            raise NoExampleGradients(
                f"{title(call.use.name)}: {error.fact}", error.advice
            ) from error
        except (ValueError, NotImplementedError) as error:  # UnsupportedError is both
            raise type(error)(f"{title(call.use.name)}: {error}") from error


def _beside(t: Tensor, ndim: int) -> Tensor:
    """A tensor with as many axes of size 1 behind as to have `ndim`."""
    return t.view(*t.shape, *[1] * (ndim - t.ndim))
