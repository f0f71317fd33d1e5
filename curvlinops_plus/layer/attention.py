"""Multi-head attention: projections that are function calls instead of submodules.

`nn.MultiheadAttention` calls none of its submodules: it passes their weights to a function, so no
module hook runs. A `Part` lists parameters of a module that such calls read; the calls are recorded
by intercepting the function.

The in-projection is one parameter that holds the matrices of queries, keys and values. However
attention is called (its three inputs may be one tensor, two, or three), it is treated as a batch of
three matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.functions import MatrixRule, Projection
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.rule import AffineRule, LayerRule


@dataclass(frozen=True, eq=False)
class Part:
    """Some parameters of a module that are read by calls of `torch.nn.functional.linear`.

    Attributes:
        name: Name of the part; the name of the layer is the module's, a dot, and this.
        module: A module with the `weight` and the `bias` of the part, of which one may be None.
        params: Local name, "weight" or "bias", to the parameter.
    """

    name: str
    module: nn.Module
    rule: AffineRule
    params: dict[str, nn.Parameter]


class ProjectionRule(MatrixRule):
    """Queries, keys and values: a batch of three matrices `[3, o, i]`, of which a call reads some.

    Example:
        >>> module = Projection(nn.Parameter(torch.ones(12, 5)), None)
        >>> ProjectionRule().at(slice(4, 12), 12).reads(module)
        tensor([0., 1., 1.])
    """

    def at(self, rows: slice, total: int) -> MatrixRule:
        """The rule of a call that reads some of the matrices."""
        o = total // 3
        if rows.start % o or rows.stop % o:
            raise UnsupportedError(
                f"A call reads rows {rows.start}:{rows.stop} of a projection with {total} rows."
            )
        return super().at(rows, total)

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """Three matrices, each with its bias as one more column."""
        patterns = {"weight": "(m o) i -> m o i", "bias": "(m o) -> m o 1"}
        return {name: patterns[name] for name in super().patterns(module)}

    def sizes(self, module: nn.Module) -> dict[str, int]:
        """Three matrices."""
        return {"m": 3}

    def reads(self, module: Any) -> Tensor | None:
        """Which of the three a call reads."""
        if self.read_rows is None:
            return None
        rows, total = self.read_rows
        p = module.bias if module.weight is None else module.weight
        dtype = torch.promote_types(p.dtype, torch.float32)
        read = torch.zeros(total, dtype=dtype, device=p.device)
        read[rows] = 1
        return read.view(3, -1)[:, 0]

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i] -> [B, S, 3, i]
        """The same input for each matrix that is read (a view if all three are), zero for the
        others.
        """
        # [B, S, i] -> [B, S, 3, i]
        a = super().inputs(module, x)[:, :, None].expand(-1, -1, 3, -1)
        read = self.reads(module)
        return a if read is None else a * read.to(a.dtype)[:, None]

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:
        """The output gradient `[V, B, *positions, k·o]` by matrices, `[V, B, S, 3, o]`."""
        return super().grads(module, g).unflatten(-1, (3, -1))

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """One Gram matrix, since the matrices that are read share their input."""
        total, row_sum, rows = LinearRule().input_gram(module, x)
        read = self.reads(module)
        if read is None:
            read = total.new_ones(3)
        read = read.to(total.dtype)
        return total * read[:, None, None], row_sum * read[:, None], rows


@register_rule(nn.MultiheadAttention)
class AttentionRule(LayerRule):
    """Which calls read the parameters of `nn.MultiheadAttention`, and where its inputs carry
    examples.

    `bias_k` and `bias_v` belong to the module as a whole.

    Example:
        >>> [part.name for part in AttentionRule().parts(nn.MultiheadAttention(4, 2))]
        ['in_proj', 'out_proj']
        >>> module = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
        >>> [part.name for part in AttentionRule().parts(module)]
        ['q_proj', 'k_proj', 'v_proj', 'in_proj_bias', 'out_proj']
    """

    def parts(self, module: Any) -> list[Part]:
        """In-projection, or its three matrices if they have inputs of different sizes;
        out-projection.
        """
        parts = []

        def add(name: str, reader: nn.Module, rule: AffineRule) -> None:
            params: dict[str, Any] = {
                local: getattr(reader, local)
                for local in ("weight", "bias")
                if isinstance(getattr(reader, local), nn.Parameter)
            }
            if params:
                parts.append(Part(name, reader, rule, params))

        # One weight for queries, keys and values, or three if their inputs differ in size.
        bias = module.in_proj_bias
        if module.in_proj_weight is not None:
            add("in_proj", Projection(module.in_proj_weight, bias), ProjectionRule())
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                add(name, Projection(getattr(module, f"{name}_weight"), None), LinearRule())
            add("in_proj_bias", Projection(None, bias), ProjectionRule())
        if isinstance(module.out_proj, nn.Linear):
            add("out_proj", module.out_proj, LinearRule())
        return parts

    def axes(self, module: Any, axis: int, leaves: Sequence[Tensor], inputs: bool) -> list[int]:
        """Sequences have the examples on the axis that `batch_first` sets; masks and attention
        weights on axis 0.
        """
        sequence = 0 if module.batch_first else 1
        if inputs:
            return [sequence if t.ndim == 3 and t.is_floating_point() else 0 for t in leaves]
        return [sequence, *[0] * (len(leaves) - 1)]
