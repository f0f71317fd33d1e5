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

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.rule import AffineRule, LayerRule
from curvlinops_plus.linalg.numerics import at_least_float32


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


class Projection(nn.Module):
    """Queries, keys and values: a weight `[3·o, i]` and a bias `[3·o]`, of which one may be
    missing.
    """

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """All three of one input."""
        assert self.weight is not None
        return torch.nn.functional.linear(x, self.weight, self.bias)


class ProjectionRule(AffineRule):
    """A batch of three matrices `[3, o, i]`, of which a call reads some.

    Example:
        >>> ProjectionRule().at(slice(4, 12), 12).members
        (1, 2)
    """

    def __init__(self, members: tuple[int, ...] = (0, 1, 2)) -> None:
        self.members = members

    def at(self, rows: slice, total: int) -> ProjectionRule:
        """The rule of a call that reads some of the rows."""
        o = total // 3
        if rows.start % o or rows.stop % o:
            raise UnsupportedError(
                f"A call reads rows {rows.start}:{rows.stop} of a projection with {total} rows."
            )
        return ProjectionRule(tuple(range(rows.start // o, rows.stop // o)))

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """Three matrices, each with its bias as one more column."""
        every = {"weight": "(m o) i -> m o i", "bias": "(m o) -> m o 1"}
        return {
            name: pattern for name, pattern in every.items() if getattr(module, name) is not None
        }

    def sizes(self, module: nn.Module) -> dict[str, int]:
        """Three matrices."""
        return {"m": 3}

    def reads(self, module: nn.Module) -> Tensor | None:
        """Which of the three a call reads."""
        if len(self.members) == 3:
            return None
        given = module.weight if module.weight is not None else module.bias
        assert isinstance(given, Tensor)
        read = torch.zeros(
            3, dtype=torch.promote_types(given.dtype, torch.float32), device=given.device
        )
        read[list(self.members)] = 1.0
        return read

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i] -> [B, S, 3, i]
        """The same input for each matrix that is read (a view if all three are), zero for the
        others.
        """
        a = at_least_float32(x).reshape(x.shape[0], -1, 1, x.shape[-1]).expand(-1, -1, 3, -1)
        read = self.reads(module)
        return a if read is None else a * read.to(a.dtype)[:, None]

    def grads(
        self, module: nn.Module, g: Tensor
    ) -> Tensor:  # [V, B, *positions, k·o] -> [V, B, S, 3, o]
        """The output gradient by matrices."""
        g = at_least_float32(g).reshape(
            *g.shape[:2], -1, len(self.members), g.shape[-1] // len(self.members)
        )
        if len(self.members) == 3:
            return g
        every = g.new_zeros(*g.shape[:3], 3, g.shape[-1])
        every[:, :, :, list(self.members)] = g
        return every

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """One Gram matrix, since the matrices that are read share their input."""
        total, row_sum, rows = LinearRule().input_gram(module, x)
        total, row_sum = total.expand(3, -1, -1), row_sum.expand(3, -1)
        read = self.reads(module)
        if read is not None:
            read = read.to(total.dtype)
            total, row_sum = total * read[:, None, None], row_sum * read[:, None]
        return total, row_sum, rows


@register_rule(nn.MultiheadAttention)
class AttentionRule(LayerRule):
    """Which calls read the parameters of `nn.MultiheadAttention`, and where its inputs carry
    examples.

    `bias_k` and `bias_v` belong to the module as a whole.

    Example:
        >>> [part.name for part in AttentionRule().parts(nn.MultiheadAttention(4, 2))]
        ['in_proj', 'out_proj']
        >>> [part.name for part in AttentionRule().parts(nn.MultiheadAttention(4, 2, kdim=3, vdim=5))]
        ['q_proj', 'k_proj', 'v_proj', 'in_proj_bias', 'out_proj']
    """

    def parts(self, module: nn.Module) -> list[Part]:
        """In-projection, or its three matrices if they have inputs of different sizes;
        out-projection.
        """
        assert isinstance(module, nn.MultiheadAttention)
        found = []

        def add(name: str, stub: nn.Module, rule: AffineRule) -> None:
            params = {
                local: p
                for local in ("weight", "bias")
                if isinstance(p := getattr(stub, local), nn.Parameter)
            }
            if params:
                found.append(Part(name, stub, rule, params))

        bias = module.in_proj_bias
        if module.in_proj_weight is not None:
            add("in_proj", Projection(module.in_proj_weight, bias), ProjectionRule())
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                add(name, Projection(getattr(module, f"{name}_weight"), None), LinearRule())
            add("in_proj_bias", Projection(None, bias), ProjectionRule())
        if isinstance(module.out_proj, nn.Linear):
            add("out_proj", module.out_proj, LinearRule())
        return found

    def axes(
        self, module: nn.Module, axis: int, leaves: Sequence[Tensor], inputs: bool
    ) -> list[int]:
        """Sequences have the examples on the axis that `batch_first` sets; masks and attention
        weights on axis 0.
        """
        assert isinstance(module, nn.MultiheadAttention)
        sequence = 0 if module.batch_first else 1
        if inputs:
            return [sequence if t.ndim == 3 and t.is_floating_point() else 0 for t in leaves]
        return [sequence, *[0] * (len(leaves) - 1)]
