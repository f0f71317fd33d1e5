"""Normalization layers: the gradient of the scale is the output gradient times the normalized input.

`y = weight · x̂ + bias` entry by entry, so that for each example `J_weight = Σ g x̂` and `J_bias = Σ g`, over the
positions that share an entry. There are no Kronecker factors: the blocks are the exact diagonal or the full block. The
slopes of `nn.PReLU` have gradients of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus.layer.replay import check_repeatable, why_computed
from curvlinops_plus.layer.rule import LayerRule, register_rule
from curvlinops_plus.linalg.numerics import at_least_float32

# Work memory on CPUs, about what a cache holds.
_WORK_BYTES = 2**20


class ScaleShiftRule(LayerRule):
    """Layers `weight · x̂ + bias` with `x̂` of the input's shape: a subclass defines `x̂` and the axes of the features.

    Example:
        >>> layer, x = nn.LayerNorm(3), torch.tensor([[1.0, 2, 3], [0, 0, 3]])
        >>> LayerNormRule().per_example_grads(layer, (x,), {}, torch.ones(1, 2, 3))["weight"]
        tensor([[[-1.2247,  0.0000,  1.2247],
                 [-0.7071, -0.7071,  1.4142]]])
    """

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *in] -> [B, *in]
        """The output at weight one and bias zero."""
        raise NotImplementedError

    def refuses(self, module: nn.Module) -> str | None:
        """Layers whose weight is computed from other parameters (weight normalization, pruning)."""
        return why_computed(module, ("weight", "bias"))

    def features(self, module: nn.Module, x: Tensor) -> range:
        """Dimensions of `x` that weight and bias have; the others, except dimension 0, are positions. Default: 1."""
        return range(1, 2)

    def check(self, module: nn.Module) -> None:
        """Batch normalization must not use the statistics of the batch."""
        check_repeatable(module)

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B, *in] -> {name: [V, B, *shape]}
        """`Σ g x̂` for the weight and `Σ g` for the bias. Cost: one pass over `g` each.

        Raises:
            UnsupportedError: If the module normalizes with the statistics of the batch.
        """
        self.check(module)
        x, g = at_least_float32(next(iter([*args, *kwargs.values()]))), at_least_float32(g)
        kept = self.features(module, x)
        positions = [dim for dim in range(1, x.ndim) if dim not in kept]
        found: dict[str, Tensor] = {}
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            for name in self.patterns(module):
                if name == "bias":
                    found[name] = g.sum([dim + 1 for dim in positions]) if positions else g.clone()
                else:
                    found[name] = sum_of_products(g, *self.whole(module, x), positions)
        return found

    def whole(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """A tensor [B, *in], and the function of its examples that gives `x̂`."""
        return x, lambda some: self.normalized(module, some)


def sum_of_products(
    g: Tensor, x: Tensor, of: Callable[[Tensor], Tensor], over: Sequence[int]
) -> Tensor:  # [V, B, *in], [B, *in]
    """`Σ g f(x)` over some dimensions of `x`, for a function `f` of each example."""
    g, x, over = g.detach(), x.detach(), list(over)
    if not over:
        return g * of(x)
    # A few examples at a time, with products in the same memory: page faults can cost more than the products.
    num = max(1, _WORK_BYTES // max(1, x[0].nbytes)) if x.device.type == "cpu" else len(x)
    parts: list[Tensor] = []
    for some, of_some in zip(x.split(num), g.split(num, 1)):
        values = of(some)
        work = torch.empty_like(values, dtype=torch.promote_types(g.dtype, values.dtype))
        parts.append(torch.stack([torch.mul(row, values, out=work).sum(over) for row in of_some]))
    return torch.cat(parts, 1)


@register_rule(nn.LayerNorm)
class LayerNormRule(ScaleShiftRule):
    """`nn.LayerNorm`: the features are the last dimensions."""

    def features(self, module: nn.Module, x: Tensor) -> range:
        """The normalized dimensions, which come last."""
        assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        return range(x.ndim - len(module.normalized_shape), x.ndim)

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """Mean zero and variance one over the features."""
        assert isinstance(module, nn.LayerNorm)
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


@register_rule(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """`nn.RMSNorm`: the features are the last dimensions, and there is no bias."""

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """Mean square one over the features."""
        assert isinstance(module, nn.RMSNorm)
        return F.rms_norm(x, module.normalized_shape, None, module.eps)


@register_rule(nn.GroupNorm)
class GroupNormRule(ScaleShiftRule):
    """`nn.GroupNorm`: the features are dimension 1."""

    channels_first: ClassVar[bool] = True

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """Mean zero and variance one over each group of channels and all positions."""
        assert isinstance(module, nn.GroupNorm)
        return F.group_norm(x, module.num_groups, None, None, module.eps)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNormRule(ScaleShiftRule):
    """Batch normalization: the features are dimension 1.

    In training mode `x̂` is that of the pass, with the statistics of its batch: weight and bias have gradients of each
    example then, while inner layers read all examples. Only training loops take curvature of that. In evaluation mode
    without running statistics it is refused.
    """

    channels_first: ClassVar[bool] = True

    def check(self, module: nn.Module) -> None:
        """In evaluation mode it must not use the statistics of the batch."""
        if not module.training:
            check_repeatable(module)

    def whole(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """In training mode all examples are normalized at once."""
        if not module.training:
            return super().whole(module, x)
        assert isinstance(module.eps, float)
        return F.batch_norm(x.detach(), None, None, training=True, eps=module.eps), lambda some: some

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """Shifted and scaled by the running statistics."""
        mean, var = module.running_mean, module.running_var
        assert isinstance(mean, Tensor)
        assert isinstance(var, Tensor)
        assert isinstance(module.eps, float)
        return F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), eps=module.eps)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(ScaleShiftRule):
    """Instance normalization: the features are dimension 1.

    Each example is normalized by itself, or with running statistics in evaluation mode of layers that track them.
    """

    channels_first: ClassVar[bool] = True

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """Mean zero and variance one over the positions, or shifted and scaled by the running statistics."""
        mean, var, eps = module.running_mean, module.running_var, module.eps
        assert isinstance(eps, float)
        if module.training or not isinstance(mean, Tensor) or not isinstance(var, Tensor):
            return F.instance_norm(x, eps=eps)  # not given to it, the running statistics are not updated
        return F.instance_norm(x, mean.to(x.dtype), var.to(x.dtype), use_input_stats=False, eps=eps)


def _hugging_face(*names: str) -> list[str]:
    return [f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}RMSNorm" for name in names]


@register_rule(
    *_hugging_face("Gemma", "Gemma2", "Gemma3", "Llama", "Mistral", "Mixtral", "Olmo2", "Phi3", "Qwen2", "Qwen3"),
    "transformers.models.t5.modeling_t5.T5LayerNorm",
)
class ScaledRMSNormRule(ScaleShiftRule):
    """Root mean square normalization of Hugging Face models: the feature is the last dimension.

    They differ in precision and in whether the weight is added to one. All are `x̂ · (weight + constant)`, so that `x̂`
    is the output at weight one minus the output at weight zero.
    """

    def features(self, module: nn.Module, x: Tensor) -> range:
        """The last dimension."""
        return range(x.ndim - 1, x.ndim)

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """Output at weight one minus output at weight zero."""
        weight = module.get_parameter("weight").detach().to(x.dtype)
        at_one, at_zero = (
            functional_call(module, {"weight": torch.full_like(weight, value)}, (x,)) for value in (1.0, 0.0)
        )
        return at_one - at_zero


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
