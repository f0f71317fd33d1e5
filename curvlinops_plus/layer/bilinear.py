"""Rule of `nn.Bilinear`, which is linear in the products of the entries of its two inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.layer.rule import AffineRule
from curvlinops_plus.layer.rule_registry import register_rule
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.numerics import at_least_float32

# Work memory for rows, which have i1·i2 entries.
_ROW_BYTES = 8 * 2**20


@register_rule(nn.Bilinear)
class BilinearRule(AffineRule):
    """`nn.Bilinear` on `x1 [B, *positions, i1]` and `x2 [B, *positions, i2]`: its rows are `x1 ⊗ x2`.

    Both inputs are one tensor here, side by side on the last axis.

    Example:
        >>> layer, x1, x2 = nn.Bilinear(3, 4, 2), torch.rand(5, 3), torch.rand(5, 4)
        >>> x = BilinearRule().input_of(layer, (x1, x2), {})
        >>> a = BilinearRule().inputs(layer, x)
        >>> x.shape, a.shape
        (torch.Size([5, 7]), torch.Size([5, 1, 12]))
        >>> torch.allclose(a[:, 0] @ layer.weight.flatten(1).T + layer.bias, layer(x1, x2), atol=1e-5)
        True
    """

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """`W` with one column for each pair of inputs, then the bias as one more column."""
        weight = {"weight": "o i j -> o (i j)"}
        return weight if module.bias is None else {**weight, "bias": "o -> o 1"}

    def input_of(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Both inputs side by side, `[B, *positions, i1 + i2]`; that tensor alone is returned unchanged.

        Raises:
            ValueError: If the inputs are no tensors.
        """
        named = {**dict(zip(("input1", "input2"), args)), **kwargs}
        if len(named) == 1:
            return super().input_of(module, tuple(named.values()), {})
        return torch.cat(
            [super(BilinearRule, self).input_of(module, (named[k],), {}) for k in ("input1", "input2")], -1
        )

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i1 + i2] -> [B, S, i1·i2]
        """The products of all entries of the first input with all of the second.

        Raises:
            ValueError: If `x` is not what `input_of` returns.
        """
        x1, x2 = self._parts(module, x)
        return (x1[..., None] * x2[..., None, :]).flatten(-2)

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *positions, o] -> [V, B, S, o]
        """The output gradient, positions in one dimension."""
        return at_least_float32(g)[:, :, None].flatten(2, -2)

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Sum of `a aᵀ`, sum of `a`, number of rows; rows are formed a few megabytes at a time."""
        x1, x2 = (part.flatten(0, 1) for part in self._parts(module, x))
        d = x1.shape[1] * x2.shape[1]
        total = x1.new_zeros(d, d)
        step = max(1, max(_ROW_BYTES // x1.element_size(), d * d) // max(1, d))  # with less, adding up would dominate
        for some1, some2 in zip(x1.split(step), x2.split(step)):
            total += gram((some1[:, :, None] * some2[:, None]).flatten(1))
        return total, (x1.T @ x2).flatten(), float(len(x1))

    def mean_inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i1 + i2] -> [B, i1·i2]
        """Mean product of each example, without forming rows."""
        x1, x2 = self._parts(module, x)
        return (x1.mT @ x2).flatten(1) / x1.shape[1]

    def _parts(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two inputs, `[B, S, i1]` and `[B, S, i2]`."""
        assert isinstance(module, nn.Bilinear)
        i1, i2 = module.in1_features, module.in2_features
        if x.ndim < 2 or x.shape[-1] != i1 + i2:
            raise ValueError(
                f"{module} got an input of shape {tuple(x.shape)}, expected both inputs side by side, [examples, ..., "
                f"{i1 + i2}], as `input_of` returns them. Add a missing example dimension with `x[None]`."
            )
        x = at_least_float32(x)[:, None].flatten(1, -2)
        return x[..., :i1], x[..., i1:]
