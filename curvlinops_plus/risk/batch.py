"""What one layer saw in one mini-batch: the only thing an approximation ever looks at.

Shapes, here and in every accumulator: N examples, S positions at which the layer's weight is used (all calls of a
shared module included), V vectors sent back, i and o the columns and rows of the layer's parameters as one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.linalg.numerics import gram
from curvlinops_plus.risk.layers import Group, Layer, Use, title

__all__ = ["Call", "LayerBatch"]


@dataclass(eq=False)
class Call:
    """One call of one module.

    Attributes:
        use: The module and its rule.
        args: Positional inputs, detached; per-example tensors carry the examples (times positions) on axis 0.
        kwargs: Keyword inputs, likewise.
        grads: Output gradients [V, N * positions, *out], None before they are known.
    """

    use: Use
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grads: Tensor | None = None

    @property
    def input(self) -> Tensor:
        """What an affine layer multiplies."""
        assert isinstance(self.use.rule, AffineRule)
        return self.use.rule.input_of(self.args, self.kwargs)


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
    """

    layer: Layer
    calls: list[Call]
    num_examples: int
    first: bool = True
    mask: Tensor | None = None
    group: Group | None = None
    _shared: dict[Any, Any] = field(default_factory=dict)

    def restrict(self, group: Group) -> LayerBatch:
        """The same batch with only the parameters of `group`; what was computed is shared."""
        return LayerBatch(self.layer, self.calls, self.num_examples, self.first, self.mask, group, self._shared)

    # ------------------------------------------------------------------------------------------------ affine layers
    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the parameters that are looked at."""
        return tuple(self.layer.params) if self.group is None else self.group.keys

    @cached_property
    def inputs(self) -> Tensor:
        """Rows `a`, [N, S, i]; a column of ones is the bias's, masked rows are zero.

        Raises:
            UnsupportedError: If the layer has no affine rule.
        """
        weight, bias = self._affine_parts()
        rows = [self._rows(call, weight, bias) for call in self.calls]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    @property
    def grads(self) -> Tensor:
        """Output gradients `g`, [V, N, S, o]; masked rows are zero.

        Raises:
            UnsupportedError: If the layer has no affine rule.
        """
        self._affine_parts()
        if "grads" not in self._shared:
            g = [self._grad_rows(call) for call in self.calls]
            self._shared["grads"] = g[0] if len(g) == 1 else torch.cat(g, 2)
        return self._shared["grads"]

    def input_gram(self) -> tuple[Tensor, Tensor | float]:
        """`Σ_{n,s} a aᵀ` [i, i] and the number of rows in the sum (expand)."""
        weight, bias = self._affine_parts()
        total, rows = None, 0.0
        for call in self.calls:
            part, count = self._input_gram(call, weight, bias)
            total = part if total is None else total + part
            rows = rows + count
        assert total is not None
        return total, rows

    def mean_inputs(self) -> Tensor:
        """`ā_n = mean_s a_{n,s}`, [N, i] (reduce)."""
        weight, bias = self._affine_parts()
        if self.mask is None and len(self.calls) == 1 and weight:
            call = self.calls[0]
            rule, x = self._rule(call), self._upcast(call.input)
            a = rule.mean_inputs(call.use.module, x).unflatten(0, (self.num_examples, -1)).mean(1)
            return torch.cat([a, a.new_ones(len(a), 1)], 1) if bias else a
        a = self.inputs
        masks = [self._mask_for(self._positions(call)) for call in self.calls]
        if all(m is None for m in masks):
            return a.mean(1)
        kept = sum(
            float(self._positions(call)) if m is None else m.sum(1, keepdim=True) for call, m in zip(self.calls, masks)
        )
        return a.sum(1) / torch.as_tensor(kept, dtype=a.dtype, device=a.device).clamp(min=1)

    def grad_gram(self, reduce: bool = False) -> Tensor:
        """`Σ_{v,n,s} g gᵀ` [o, o]; with `reduce`, `Σ_{v,n} ĝ ĝᵀ` of `ĝ_n = Σ_s g_{n,s}`."""
        key = ("grad_gram", reduce)
        if key not in self._shared:
            if reduce:
                total = gram(self.summed_grads().flatten(0, 1))
            elif len(self.calls) == 1 and self._mask_for(self._positions(self.calls[0])) is None:
                call = self.calls[0]
                total = self._rule(call).grad_gram(call.use.module, self._upcast(call.grads))
            else:
                total = gram(self.grads.flatten(0, 2))
            self._shared[key] = total
        return self._shared[key]

    def summed_grads(self) -> Tensor:
        """`ĝ_n = Σ_s g_{n,s}`, [V, N, o]: also the per-example gradient of the bias."""
        if "summed" not in self._shared:
            total: Tensor | None = None
            for call in self.calls:
                if self._mask_for(self._positions(call)) is None:
                    g = self._rule(call).sum_grads(call.use.module, self._upcast(call.grads))
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
        return 0 if grads is None else grads.shape[0]

    @cached_property
    def per_example_grads(self) -> Tensor:
        """Gradients of each example, `J` [V, N, rows, columns] in the layout of the parameters looked at.

        Summed over positions, calls and modules that share the parameter. For batched layouts [V, N, batch, rows,
        columns].
        """
        if self.layer.affine:
            weight, bias = self._affine_parts()
            if not weight:
                return self.summed_grads()[..., None]
            total = None
            for call in self.calls:  # one call at a time: a cat along S would copy everything
                g, a = self._grad_rows(call), self._rows(call, weight, bias)
                part = g.mT @ a
                total = part if total is None else total.add_(part)
            assert total is not None
            return total
        layouts = self.layer.groups if self.group is None else (self.group,)
        if len(layouts) != 1:
            raise ValueError(f"{self.layer.title} has {len(layouts)} blocks: restrict the batch to one of them first.")
        return self._join(self.param_grads(), layouts[0])

    def param_grads(self) -> dict[str, Tensor]:
        """Gradients of each example in the parameters' own shapes: key to [V, N, *shape]."""
        keys, total = set(self.keys), {}
        for call in self.calls:
            use, module = call.use, call.use.module
            assert call.grads is not None
            try:
                found = use.rule.per_example_grads(module, call.args, call.kwargs, self._upcast(call.grads))
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

    def _join(self, grads: dict[str, Tensor], group: Group) -> Tensor:
        V, N = self.num_vectors, self.num_examples
        tree = {key: grads[key].flatten(0, 1).movedim(0, -1) for key in group.keys}
        return group.layout.join(tree).T.reshape(V, N, *group.layout.matrix_shape)

    # --------------------------------------------------------------------------------------------------- internals
    def _affine_parts(self) -> tuple[bool, bool]:
        if not self.layer.affine:
            kind = "is shared by several modules" if self.layer.tied else "has no affine rule"
            use = self.layer.uses[0]
            raise UnsupportedError(
                f"{self.layer.title} ({type(use.module).__name__}) {kind}, so it has no Kronecker factors. "
                "Use DiagonalBlock or FullBlock for "
                f"it, or write an AffineRule and register it with @register_rule({type(use.module).__name__})."
            )
        keys = self.keys
        return self.layer.weight in keys, self.layer.bias in keys

    def _rule(self, call: Call) -> AffineRule:
        rule = call.use.rule
        assert isinstance(rule, AffineRule)
        return rule

    def _upcast(self, t: Tensor | None) -> Tensor:
        assert t is not None
        if not t.is_floating_point():
            return t
        return t.to(torch.promote_types(t.dtype, self.layer.accumulation_dtype))

    def _positions(self, call: Call) -> int:
        """Positions of one call: rows of the module's input per example."""
        if self.mask is None:
            return -1
        if call.grads is not None:
            g = self._rule(call).grads(call.use.module, call.grads[:1])
            return g.shape[1] * g.shape[2] // self.num_examples
        return self._plain_rows(call).shape[1]

    def _mask_for(self, positions: int) -> Tensor | None:
        return self.mask if self.mask is not None and self.mask.shape[1] == positions else None

    def _plain_rows(self, call: Call) -> Tensor:
        a = self._rule(call).inputs(call.use.module, self._upcast(call.input))
        return a.reshape(self.num_examples, -1, a.shape[-1])

    def _rows(self, call: Call, weight: bool, bias: bool) -> Tensor:
        if weight:
            a = self._plain_rows(call)
            a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2) if bias else a
        else:
            g = self._grad_rows(call)
            a = g.new_ones(*g.shape[1:3], 1)
        mask = self._mask_for(a.shape[1])
        return a if mask is None else a * mask[:, :, None]

    def _grad_rows(self, call: Call) -> Tensor:
        g = self._rule(call).grads(call.use.module, self._upcast(call.grads))
        g = g.reshape(g.shape[0], self.num_examples, -1, g.shape[-1])
        mask = self._mask_for(g.shape[2])
        return g if mask is None else g * mask[:, :, None]

    def _input_gram(self, call: Call, weight: bool, bias: bool) -> tuple[Tensor, Tensor | float]:
        mask = self._mask_for(self._positions(call))
        if mask is not None or not weight:
            a = self._rows(call, weight, bias)
            return gram(a.flatten(0, 1)), float(a.shape[0] * a.shape[1]) if mask is None else mask.sum().to(a.dtype)
        total, row_sum, rows = self._rule(call).input_gram(call.use.module, self._upcast(call.input))
        if bias:
            corner = row_sum.new_full((1,), rows)
            total = torch.cat([torch.cat([total, row_sum[:, None]], 1), torch.cat([row_sum, corner])[None]], 0)
        return total, float(rows)
