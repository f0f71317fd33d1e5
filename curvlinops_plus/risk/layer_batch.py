"""What one layer saw in one mini-batch: the only thing an approximation ever looks at.

Shapes, here and in every accumulator: N examples, S positions at which the layer's weight is used (all calls of a
shared module included), V vectors sent back, i and o the columns and rows of the layer's parameters as one matrix. A
layer of several matrices (groups of a convolution) has one more axis `b`; `[*b]` stands for none or this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule, SparseRows
from curvlinops_plus.layer.rule import outer_products
from curvlinops_plus.layer.squares import rotate, squared_gradients
from curvlinops_plus.linalg.numerics import gram
from curvlinops_plus.risk.layers import Group, Layer, Role, title

__all__ = ["Call", "LayerBatch"]

# Per-example gradients that are only needed one after the other are formed in pieces of about this size.
_PIECE_BYTES = 2**26
# Patches of an image are formed in pieces that a processor's cache can hold.
_ROW_BYTES = 2**22


@dataclass(eq=False)
class Call:
    """One call of one module.

    Attributes:
        use: The module and its rule.
        args: Positional inputs, detached; per-example tensors carry the examples (times positions) on axis 0.
        kwargs: Keyword inputs, likewise.
        grads: Output gradients [V, N * positions, *out], None before they are known; a list of them for a module that
            returns several tensors.
        in_axes: Where the module itself has the examples, for each tensor among its inputs.
        out_axes: The same for its outputs.
    """

    use: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grads: Any = None
    in_axes: Sequence[int] | None = None
    out_axes: Sequence[int] | None = None

    @property
    def rule(self) -> AffineRule:
        """The rule of an affine layer."""
        assert isinstance(self.use.rule, AffineRule)
        return self.use.rule

    @property
    def input(self) -> Tensor:
        """What an affine layer multiplies."""
        return self.rule.input_of(self.use.module, self.args, self.kwargs)


@dataclass(eq=False)
class LayerBatch:
    """What a layer saw in one mini-batch.

    Attributes:
        layer: The layer.
        calls: Its calls, in the order in which they happened.
        num_examples: N.
        first: Whether the inputs are new. A batch through which several vectors are sent one after the other is seen
            once per vector, with the same inputs; a statistic of inputs alone is counted when `first` is True.
        mask: Positions that count, [N, T] bool, or None for all. Reaches layers with T positions.
        group: The parameters that are looked at, None for all of the layer's.
        role: The role that is looked at, None for all of the layer's.
    """

    layer: Layer
    calls: list[Call]
    num_examples: int
    first: bool = True
    mask: Tensor | None = None
    group: Group | None = None
    role: Role | None = None
    _shared: dict[Any, Any] = field(default_factory=dict)

    def restrict(self, group: Group) -> LayerBatch:
        """The same batch with only the parameters of `group`; what was computed is shared."""
        return replace(self, group=group)

    def roles(self) -> list[LayerBatch]:
        """The batch as each role saw it, in the layer's order; one that was not called has no calls.

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

    # ------------------------------------------------------------------------------------------------ affine layers
    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the parameters that are looked at."""
        return tuple(self.layer.params) if self.group is None else self.group.keys

    @cached_property
    def inputs(self) -> Tensor | SparseRows:
        """Rows `a`, [N, S, *b, i]; a column of ones is the bias's, masked rows are zero.

        Raises:
            UnsupportedError: If the layer has no affine rule.
        """
        weight, bias = self._affine_parts()
        rows = [self._rows(call, weight, bias) for call in self.calls]
        if len(rows) == 1:
            return rows[0]
        if isinstance(rows[0], SparseRows):
            return SparseRows.cat([row for row in rows if isinstance(row, SparseRows)])
        return torch.cat([row for row in rows if isinstance(row, Tensor)], 1)

    @property
    def grads(self) -> Tensor:
        """Output gradients `g`, [V, N, S, *b, o]; masked rows are zero.

        Raises:
            UnsupportedError: If the layer has no affine rule.
        """
        self._affine_parts()
        if "grads" not in self._shared:
            g = [self._grad_rows(call) for call in self.calls]
            self._shared["grads"] = g[0] if len(g) == 1 else torch.cat(g, 2)
        return self._shared["grads"]

    def input_gram(self, reduce: bool = False) -> tuple[Tensor, Tensor | float]:
        """`Σ_{n,s} a aᵀ` [*b, i, i] and the number of rows in the sum (expand); of sparse rows the diagonal [i].

        With `reduce`, `Σ_n ā āᵀ` of the means over positions, and N.
        """
        if reduce:
            masks = [mask for call in self.calls if (mask := self._mask_of(call)) is not None]
            count: Tensor | float = float(self.num_examples)
            if len(masks) == len(self.calls):  # examples of which nothing counts
                count = torch.stack([mask.any(1) for mask in masks]).any(0).sum()
            if self.layer_sparse:
                assert isinstance(self.inputs, SparseRows)
                return self.inputs.mean_square(), count
            return gram(self.mean_inputs()), count
        weight, bias = self._affine_parts()
        total, rows = None, 0.0
        for call in self.calls:
            part, count = self._input_gram(call, weight, bias)
            total = part if total is None else total + part
            rows = rows + count
        assert total is not None
        return total, rows

    @property
    def columns(self) -> int:
        """Columns of the parameters looked at, as one matrix: the size of `input_gram`."""
        return self._only_group.layout.matrix_shape[-1]

    def input_rows(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `input_gram` [M, columns], or, without the bias's ones, [M, columns - 1].

        None if the layer has another way to the Gram matrix than the product of all rows.
        """
        call = self._plain_call()
        if call is None or call.rule.direct_input_gram or self.layer.weight not in self.keys:
            return None
        if reduce:
            rows = self.mean_inputs()
            return rows if rows.ndim == 2 else None
        a = call.rule.rows(call.use.module, self._upcast(call.input))
        assert isinstance(a, Tensor)
        return a.flatten(0, 1) if a.ndim == 3 else None

    def grad_rows(self, reduce: bool = False) -> Tensor | None:
        """The rows behind `grad_gram` [M, o]; None as for `input_rows`."""
        call = self._plain_call()
        if call is None or call.rule.direct_grad_gram:
            return None
        g = self.summed_grads() if reduce else call.rule.grad_rows(call.use.module, self._upcast(call.grads))
        return g.flatten(0, -2) if g.ndim == 4 - reduce else None

    def _plain_call(self) -> Call | None:
        """The only call of an affine layer of one dense matrix, if all its positions count."""
        self._affine_parts()
        call = self.calls[0]
        if len(self.calls) > 1 or self.layer_sparse or self._mask_of(call) is not None:
            return None
        return call if call.rule.reads(call.use.module) is None else None

    def mean_inputs(self) -> Tensor:
        """`ā_n = mean_s a_{n,s}`, [N, *b, i] (reduce)."""
        weight, bias = self._affine_parts()
        masks = [self._mask_of(call) for call in self.calls]
        if len(self.calls) == 1 and weight and masks[0] is None and self.calls[0].rule.reads(self._module) is None:
            call = self.calls[0]
            a = call.rule.mean_inputs(call.use.module, self._upcast(call.input))
            a = a.unflatten(0, (self.num_examples, -1)).mean(1)
            return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1) if bias else a
        a = self.inputs
        assert isinstance(a, Tensor)
        kept: Tensor | float = 0.0
        for call, mask in zip(self.calls, masks, strict=True):
            positions = self._positions(call) if mask is None else mask.sum(1)
            here = torch.as_tensor(positions, dtype=a.dtype, device=a.device).reshape(-1, *[1] * (a.ndim - 2))
            read = call.rule.reads(call.use.module)
            kept = kept + (here if read is None else here * read.to(a.dtype)[:, None])
        return a.sum(1) / torch.as_tensor(kept).clamp(min=1)

    def grad_gram(self, reduce: bool = False) -> Tensor:
        """`Σ_{v,n,s} g gᵀ` [*b, o, o]; with `reduce`, `Σ_{v,n} ĝ ĝᵀ` of `ĝ_n = Σ_s g_{n,s}`."""
        key = ("grad_gram", reduce)
        if key not in self._shared:
            if reduce:
                total = gram(self.summed_grads().flatten(0, 1))
            elif len(self.calls) == 1 and self._mask_of(self.calls[0]) is None:
                call = self.calls[0]
                total = call.rule.grad_gram(call.use.module, self._upcast(call.grads))
            else:
                total = gram(self.grads.flatten(0, 2))
            self._shared[key] = total
        return self._shared[key]

    def summed_grads(self) -> Tensor:
        """`ĝ_n = Σ_s g_{n,s}`, [V, N, *b, o]: also the per-example gradient of the bias."""
        if "summed" not in self._shared:
            total: Tensor | None = None
            for call in self.calls:
                if self._mask_of(call) is None:
                    g = call.rule.sum_grads(call.use.module, self._upcast(call.grads))
                    g = g.unflatten(1, (self.num_examples, -1)).sum(2)
                else:
                    g = self._grad_rows(call).sum(2)
                total = g if total is None else total + g
            assert total is not None
            self._shared["summed"] = total
        return self._shared["summed"]

    # --------------------------------------------------------------------------------------------------- any layer
    @property
    def num_vectors(self) -> int:
        """V, the number of vectors in this piece."""
        grads = self.calls[0].grads
        return 0 if grads is None else (grads if isinstance(grads, Tensor) else grads[0]).shape[0]

    @cached_property
    def per_example_grads(self) -> Tensor:
        """Gradients of each example, `J` [V, N, *b, rows, columns] in the layout of the parameters looked at.

        Summed over positions, calls and modules that share the parameter.
        """
        if self._one_matrix:
            weight, bias = self._affine_parts()
            if not weight:
                return self.summed_grads()[..., None]
            if self._faster_than_rows:
                return self._join(self.param_grads(), self._only_group)
            total = None
            for call in self.calls:  # one call at a time: a cat along S would copy everything
                # Masked rows have no gradient: their inputs don't matter.
                part = outer_products(self._grad_rows(call), self._plain_rows(call))
                total = part if total is None else total.add_(part)
            assert total is not None
            return torch.cat([total, self.summed_grads()[..., None]], -1) if bias else total
        return self._join(self.param_grads(), self._only_group)

    def squared_grads(self, QG: Tensor | None = None, QA: Tensor | None = None) -> Tensor:
        """`Σ_{v,n} (Q_Gᵀ J Q_A)²`, entry by entry, [*b, rows, columns]: the diagonal of the exact block in a basis.

        Args:
            QG: Basis of the rows [*b, rows, rows], None for the identity.
            QA: Basis of the columns [*b, columns, columns], None for the identity.

        Cost: rows and gradients per example are formed in pieces, never all at once; gradients of sparse rows not at
        all.
        """
        if self._one_matrix:
            weight, bias = self._affine_parts()
            if not weight:
                g = self.summed_grads()
                g = g if QG is None else (g[..., None, :] @ QG)[..., 0, :]
                return g.square().sum((0, 1))[..., None]
            if self.layer_sparse:
                assert isinstance(self.inputs, SparseRows)
                squares = self.inputs.squared(self.grads, QG)
                return squares if QA is None else rotate(self.per_example_grads, QG, QA).square().sum((0, 1))
            if not self._faster_than_rows:
                return self._squared_rows(QG, QA, bias)
        total = None
        for piece in self._pieces():
            part = rotate(piece.per_example_grads, QG, QA).square().sum((0, 1))
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _squared_rows(self, QG: Tensor | None, QA: Tensor | None, bias: bool) -> Tensor:
        total = None
        for piece in self._row_pieces():
            rows = [piece._plain_rows(call) for call in piece.calls]
            a = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            for g in piece.grads:  # zero at masked rows, whose inputs don't matter then
                part = squared_gradients(g, a, QG, QA, bias)
                total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def param_grads(self) -> dict[str, Tensor]:
        """Gradients of each example in the parameters' own shapes: key to [V, N, *shape]."""
        keys, total = set(self.keys), {}
        for call in self.calls:
            use, module = call.use, call.use.module
            g = self._masked(call)
            try:
                if isinstance(use.rule, AffineRule):
                    found = self._affine_grads(call)
                else:
                    found = use.rule.example_grads(module, call.args, call.kwargs, g, call.in_axes, call.out_axes)
            except (ValueError, NotImplementedError) as error:  # UnsupportedError is both
                raise type(error)(f"{title(use.name)}: {error}") from error
            for local, J in found.items():
                key = use.keys.get(local)
                if key in keys:
                    J = J.unflatten(1, (self.num_examples, -1)).sum(2).to(self.layer.accumulation_dtype)
                    total[key] = total[key].add_(J) if key in total else J
        V, N = self.num_vectors, self.num_examples
        for key in keys - total.keys():  # a module of a tied parameter that was not called in this batch
            p = self.layer.params[key]
            total[key] = torch.zeros(V, N, *p.shape, dtype=self.layer.accumulation_dtype, device=p.device)
        return total

    def examples(self, start: int, stop: int) -> LayerBatch:
        """Some of the examples."""
        N = self.num_examples
        calls = []
        for call in self.calls:
            g = call.grads if isinstance(call.grads, Tensor) or call.grads is None else call.grads[0]
            rows = N if g is None else g.shape[1]
            p = rows // N

            def take(t: Tensor, rows: int = rows, p: int = p) -> Tensor:
                return t[start * p : stop * p] if t.ndim and t.shape[0] == rows else t

            args, kwargs = tree_map_only(Tensor, take, (call.args, dict(call.kwargs)))
            grads = tree_map_only(Tensor, lambda t, p=p: t[:, start * p : stop * p], call.grads)
            calls.append(replace(call, args=args, kwargs=kwargs, grads=grads))
        mask = None if self.mask is None else self.mask[start:stop]
        return replace(self, calls=calls, num_examples=min(stop, N) - start, mask=mask, _shared={})

    def _pieces(self) -> Iterator[LayerBatch]:
        """Examples whose gradients are formed at once."""
        numbers = sum(self.layer.params[key].numel() for key in self.keys)
        return self._cut(_PIECE_BYTES, self.num_vectors * numbers)

    def _row_pieces(self) -> Iterator[LayerBatch]:
        """Examples whose rows are formed at once."""
        numbers = 0
        for call in self.calls:
            outputs = call.grads.shape[1:].numel() // self.num_examples  # positions · b · o
            rows, columns = self.layer.groups[0].layout.matrix_shape[-2:]
            numbers += outputs * columns // rows
        return self._cut(_ROW_BYTES, numbers)

    def _cut(self, size: int, numbers: int) -> Iterator[LayerBatch]:
        """Pieces of `size` bytes if each example takes so many numbers, of one example at least."""
        step = max(1, size // max(1, numbers * self.layer.accumulation_dtype.itemsize))
        if step >= self.num_examples:
            yield self
            return
        for start in range(0, self.num_examples, step):
            yield self.examples(start, start + step)

    def _join(self, grads: dict[str, Tensor], group: Group) -> Tensor:
        V, N = self.num_vectors, self.num_examples
        tree = {key: grads[key].flatten(0, 1).movedim(0, -1) for key in group.keys}
        return group.layout.join(tree).T.reshape(V, N, *group.layout.matrix_shape)

    # --------------------------------------------------------------------------------------------------- internals
    @property
    def _one_matrix(self) -> bool:
        """Whether all calls multiply with the layer's matrix."""
        return len(self.layer.roles) == 1 or (self.role is not None and not self.role.transposed)

    @property
    def _faster_than_rows(self) -> bool:
        """Whether the rule has a way of its own to gradients of each example."""
        return all(
            call.rule.direct_grads and self._mask_of(call) is None and call.rule.reads(call.use.module) is None
            for call in self.calls
        )

    @property
    def _only_group(self) -> Group:
        """The parameters that make up the one matrix looked at.

        Raises:
            ValueError: If there are several matrices.
        """
        groups = self.layer.groups if self.group is None else (self.group,)
        if len(groups) != 1:
            raise ValueError(f"{self.layer.title} has {len(groups)} blocks: restrict the batch to one of them first.")
        return groups[0]

    @property
    def layer_sparse(self) -> bool:
        """Whether the rows of this role are sparse."""
        role = self.role or self.layer.roles[0]
        return all(isinstance(use.rule, AffineRule) and use.rule.sparse for use in role.uses)

    @property
    def _module(self) -> Any:
        return self.calls[0].use.module

    def _affine_parts(self) -> tuple[bool, bool]:
        """Whether weight and bias are looked at."""
        if not self.layer.affine:
            kind = "is shared by several modules" if self.layer.tied else "has no affine rule"
            use = self.layer.uses[0]
            raise UnsupportedError(
                f"{self.layer.title} ({type(use.owner).__name__}) {kind}, so it has no Kronecker factors. "
                "Use DiagonalBlock or FullBlock for "
                f"it, or write an AffineRule and register it with @register_rule({type(use.owner).__name__})."
            )
        if len(self.layer.roles) > 1 and self.role is None:
            raise UnsupportedError(
                f"{self.layer.title}: its parameter is multiplied with in {len(self.layer.roles)} roles by "
                f"{[use.name for use in self.layer.uses]}; look at each of `seen.roles()` by itself."
            )
        keys = self.keys
        bias = self.layer.bias in keys and not (self.role is not None and self.role.transposed)
        return self.layer.weight in keys, bias

    def _upcast(self, t: Tensor | None) -> Tensor:
        assert t is not None
        if not t.is_floating_point():
            return t
        return t.to(torch.promote_types(t.dtype, self.layer.accumulation_dtype))

    def _masked(self, call: Call) -> Any:
        """The output gradients of a layer without rows, zero at masked positions."""
        if isinstance(call.grads, Tensor):
            return call.use.rule.masked(self._upcast(call.grads), self.mask)
        return [call.use.rule.masked(self._upcast(g), self.mask) for g in call.grads]

    def _affine_grads(self, call: Call) -> dict[str, Tensor]:
        mask = self._mask_of(call)
        if mask is None or self.mask is None:
            return call.rule.per_example_grads(call.use.module, call.args, call.kwargs, self._upcast(call.grads))
        # Masked positions: from the rows themselves, `[V, N, *b, o, i]`.
        a, g = self._plain_rows(call), self._grad_rows(call)
        return call.rule.split(call.use.module, outer_products(g, a), g)

    def _positions(self, call: Call) -> int:
        """Positions of one call: rows of the module's input per example."""
        if call.grads is not None:
            g = call.rule.grads(call.use.module, call.grads[:1])
            return g.shape[1] * g.shape[2] // self.num_examples
        return self._plain_rows(call).shape[1]

    def _mask_of(self, call: Call) -> Tensor | None:
        """Positions that count, [N, S], None for all: those of the user's mask, and those that a sparse rule keeps."""
        key = ("mask", id(call))
        if key not in self._shared:
            mask = None
            if self.mask is not None and self.mask.shape[1] == self._positions(call):
                mask = self.mask
            if call.rule.sparse:
                kept = self._plain_rows(call).kept
                mask = kept if mask is None else mask if kept is None else mask & kept
            self._shared[key] = mask
        return self._shared[key]

    def _plain_rows(self, call: Call) -> Any:
        a = call.rule.rows(call.use.module, self._upcast(call.input))
        if isinstance(a, SparseRows):
            return a.reshape(self.num_examples)
        return a.reshape(self.num_examples, -1, *a.shape[2:])

    def _rows(self, call: Call, weight: bool, bias: bool) -> Tensor | SparseRows:
        mask = self._mask_of(call)
        if weight:
            a = self._plain_rows(call)
            if isinstance(a, SparseRows):
                return a if mask is None else a.masked(mask)
            a = torch.cat([a, self._ones(call, a)], -1) if bias else a
        else:
            a = self._ones(call, self._grad_rows(call)[0])
        return a if mask is None else a * mask.view(*mask.shape, *[1] * (a.ndim - 2))

    def _ones(self, call: Call, rows: Tensor) -> Tensor:  # [N, S, *b, .] -> [N, S, *b, 1]
        read = call.rule.reads(call.use.module)
        ones = rows.new_ones(*rows.shape[:-1], 1)
        return ones if read is None else ones * read.to(rows.dtype)[:, None]

    def _grad_rows(self, call: Call) -> Tensor:
        g = call.rule.grad_rows(call.use.module, self._upcast(call.grads))
        g = g.reshape(g.shape[0], self.num_examples, -1, *g.shape[3:])
        mask = self._mask_of(call)
        return g if mask is None else g * mask.view(*mask.shape, *[1] * (g.ndim - 3))

    def _input_gram(self, call: Call, weight: bool, bias: bool) -> tuple[Tensor, Tensor | float]:
        mask, read = self._mask_of(call), call.rule.reads(call.use.module)
        if mask is not None or not weight:
            a = self._rows(call, weight, bias)
            if isinstance(a, SparseRows):
                return a.square_sum(), a.count()
            rows = float(a.shape[0] * a.shape[1]) if mask is None else mask.sum().to(a.dtype)
            return gram(a.flatten(0, 1)), rows if read is None else rows * read.to(a.dtype)[:, None, None]
        total, row_sum, rows = call.rule.input_gram(call.use.module, self._upcast(call.input))
        count = float(rows) if read is None else rows * read.to(total.dtype)[:, None, None]
        if bias:
            corner = row_sum.new_ones(*row_sum.shape[:-1], 1, 1) * count
            side = row_sum[..., None]
            total = torch.cat([torch.cat([total, side], -1), torch.cat([side.mT, corner], -1)], -2)
        return total, count
