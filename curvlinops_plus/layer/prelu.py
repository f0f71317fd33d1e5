"""`nn.PReLU`: the slope's gradient is the output gradient times the negative part of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from curvlinops_plus.layer.normalization import sum_of_products
from curvlinops_plus.layer.replay import why_computed
from curvlinops_plus.layer.rule import LayerRule
from curvlinops_plus.layer.rule_registry import register_rule
from curvlinops_plus.linalg.numerics import at_least_float32


@register_rule(nn.PReLU)
class PReLURule(LayerRule):
    """`max(0, x) + weight · min(0, x)`, with one slope or one for each entry of dimension 1.

    Example:
        >>> import torch
        >>> layer, x = nn.PReLU(), torch.tensor([[-1.0, 2, -3], [4, 5, -6]])
        >>> PReLURule().per_example_grads(layer, (x,), {}, torch.ones(1, 2, 3))["weight"]
        tensor([[[-4.],
                 [-6.]]])
    """

    def refuses(self, module: nn.Module) -> str | None:
        """Layers whose slopes are computed from other parameters (a parametrization)."""
        return why_computed(module, ("weight",))

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B, *in] -> {"weight": [V, B, slopes]}
        """`Σ g min(0, x)` over the positions that share a slope (nothing at x = 0). Cost: one pass over `g`."""
        x, slopes = at_least_float32(next(iter([*args, *kwargs.values()]))), module.get_parameter("weight").numel()
        # [B, slopes, positions], for one number per example [B] as well as for images.
        x = x.reshape(len(x), slopes, -1)
        rows = at_least_float32(g).reshape(len(g), *x.shape)
        return {"weight": sum_of_products(rows, x, lambda some: some.clamp(max=0), [2])}

    def masked(self, g: Tensor, mask: Tensor | None) -> Tensor:
        """Positions come before the features or after the channels, whichever has the mask's size."""
        if mask is not None and g.ndim > 3 and g.shape[2] != mask.shape[1]:
            return _ChannelsFirst().masked(g, mask)
        return super().masked(g, mask)


class _ChannelsFirst(LayerRule):
    channels_first: ClassVar[bool] = True
