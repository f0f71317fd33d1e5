"""Normalization layers: the gradient of the scale is the output gradient times the normalized
input.

`y = weight · x̂ + bias` entry by entry, so that for each example `J_weight = Σ g x̂` and `J_bias =
Σ g`, over the positions that share an entry. There are no Kronecker factors: the blocks are the
exact diagonal or the full block. The slopes of `nn.PReLU` have gradients of the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.replay import check_repeatable
from curvlinops_plus.layer.rule import LayerRule, flat_pattern
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.linalg.precision import full_precision


class ScaleShiftRule(LayerRule):
    """Layers `weight · x̂ + bias` with `x̂` of the input's shape, which a subclass defines.

    The features, the dimensions of weight and bias, are dimension 1, or without `channels_first`
    the last ones; the others, except dimension 0, are positions.

    Example:
        >>> layer, x = nn.LayerNorm(3), torch.tensor([[1.0, 2, 3], [0, 0, 3]])
        >>> LayerNormRule().per_example_grads(layer, (x,), {}, torch.ones(1, 2, 3))["weight"]
        tensor([[[-1.2247,  0.0000,  1.2247],
                 [-0.7071, -0.7071,  1.4142]]])
    """

    channels_first: ClassVar[bool | None] = True

    def normalized(self, module: Any, x: Tensor) -> Tensor:  # [B, *in] -> [B, *in]
        """The output at weight one and bias zero."""
        raise NotImplementedError

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """Weight and bias, as far as the layer has them."""
        params = {name: getattr(module, name, None) for name in ("weight", "bias")}
        return {name: flat_pattern(p.ndim) for name, p in params.items() if p is not None}

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B, *in] -> {name: [V, B, *shape]}
        """`Σ g x̂` for the weight and `Σ g` for the bias. Cost: one pass over `g` each."""
        x = at_least_float32(next(iter([*args, *kwargs.values()])))
        g = at_least_float32(g.detach())
        gradients: dict[str, Tensor] = {}
        with GradMode(False), full_precision(x.device.type):
            x_hat = self.normalized(module, x)
            for name in self.patterns(module):
                # J_weight = Σ g x̂ and J_bias = Σ g over positions.
                p = module.get_parameter(name)
                shape = self._shape_of_sums(p, x)
                # One vector at a time needs less memory.
                products = (g_v if name == "bias" else g_v * x_hat for g_v in g)
                sums = torch.stack([product.sum_to_size(shape) for product in products])
                gradients[name] = sums.view(*g.shape[:2], *p.shape)
        return gradients

    def _shape_of_sums(self, p: Tensor, x: Tensor) -> list[int]:
        """The shape of `x` with 1 for each dimension of positions."""
        # One number is shared by all positions, whichever dimension it is in.
        if p.numel() == 1:
            features = range(0)
        elif self.channels_first is False:
            features = range(x.ndim - p.ndim, x.ndim)
        else:
            features = range(1, 2)
        shape = [len(x), *[1] * (x.ndim - 1)]
        for dim in features:
            shape[dim] = x.shape[dim]
        return shape


@register_rule(nn.LayerNorm)
class LayerNormRule(ScaleShiftRule):
    """`nn.LayerNorm`: the features are the last dimensions."""

    channels_first: ClassVar[bool | None] = False

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """Mean zero and variance one over the features."""
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


@register_rule(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """`nn.RMSNorm`: the features are the last dimensions, and there is no bias."""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """Mean square one over the features."""
        return F.rms_norm(x, module.normalized_shape, None, module.eps)


@register_rule(nn.GroupNorm)
class GroupNormRule(ScaleShiftRule):
    """`nn.GroupNorm`."""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """Mean zero and variance one over each group of channels and all positions."""
        return F.group_norm(x, module.num_groups, None, None, module.eps)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNormRule(ScaleShiftRule):
    """Batch normalization.

    In training mode `x̂` is that of the pass, with the statistics of its batch: weight and bias
    have gradients of each example then, while inner layers read all examples. Only training loops
    take curvature of that.
    """

    def check(self, module: nn.Module) -> None:
        """In evaluation mode it must not use the statistics of the batch."""
        if not module.training:
            check_repeatable(module)

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """Shifted and scaled by the running statistics, in training mode by those of the batch."""
        mean = None
        var = None
        if not module.training:
            mean = module.running_mean.to(x)
            var = module.running_var.to(x)
        return F.batch_norm(x, mean, var, training=module.training, eps=module.eps)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(ScaleShiftRule):
    """Instance normalization, of each example by itself, or by running statistics in evaluation
    mode.
    """

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """Mean zero and variance one over the positions, or shifted and scaled by the running
        statistics.
        """
        if module.training or module.running_mean is None:
            # Running statistics that it does not get are not updated.
            return F.instance_norm(x, eps=module.eps)
        mean = module.running_mean.to(x)
        var = module.running_var.to(x)
        return F.instance_norm(x, mean, var, use_input_stats=False, eps=module.eps)


@register_rule(nn.PReLU)
class PReLURule(ScaleShiftRule):
    """`max(0, x) + weight · min(0, x)`, with one slope or one for each entry of dimension 1.

    Example:
        >>> import torch
        >>> layer, x = nn.PReLU(), torch.tensor([[-1.0, 2, -3], [4, 5, -6]])
        >>> PReLURule().per_example_grads(layer, (x,), {}, torch.ones(1, 2, 3))["weight"]
        tensor([[[-4.],
                 [-6.]]])
    """

    channels_first: ClassVar[bool | None] = None

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """What the weight is multiplied with: `min(0, x)`."""
        return x.clamp(max=0)
