"""What convolutions saw: their rows are the patches of the input, in the order of the flattened weight."""

from __future__ import annotations

from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.gram import image_gram, input_gram
from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.layer.replay import at_least_float32
from curvlinops_plus.layer.rule import AffineRule, register_rule

__all__ = ["ConvRule"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _base(module: nn.Module) -> type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]:
    return next(kind for kind in _CONVOLUTIONS if isinstance(module, kind))


@register_rule(*_CONVOLUTIONS)
class ConvRule(AffineRule):
    """Convolutions in one to three dimensions with every stride, padding, padding mode and dilation.

    The output positions share the weight. A grouped convolution is not `W a` with one matrix `W`: it gets the generic
    rule, which is exact for everything that is made of per-example gradients.

    Example:
        >>> import torch
        >>> layer, x = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"), torch.rand(4, 3, 5, 5)
        >>> a = ConvRule().inputs(layer, x)
        >>> a.shape
        torch.Size([4, 25, 27])
        >>> torch.allclose(a @ layer.weight.flatten(1).T + layer.bias, layer(x).flatten(2).mT, atol=1e-5)
        True
    """

    def refuses(self, module: nn.Module) -> str | None:
        """Grouped convolutions, and subclasses that change what is convolved."""
        name = type(module).__name__
        if not isinstance(module, _CONVOLUTIONS):
            return f"{name} is no subclass of Conv1d, Conv2d or Conv3d"
        if module.groups != 1:
            return (
                f"{name}(groups={module.groups}), a grouped convolution, has no Kronecker rule: use DiagonalBlock for "
                "this layer or add a rule with @register_rule"
            )
        base = _base(module)
        if type(module)._conv_forward is not base._conv_forward:  # what the `forward` of all convolutions calls
            return f"this {name} has another `_conv_forward` than {base.__name__}: add a rule with @register_rule"
        return None

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """`W` with one column per input channel and tap, then the bias as one more column."""
        taps = {nn.Conv1d: "w", nn.Conv2d: "h w", nn.Conv3d: "d h w"}[_base(module)]
        weight = {"weight": f"o i {taps} -> o (i {taps})"}
        return weight if module.bias is None else {**weight, "bias": "o -> o 1"}

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, i, *size] -> [B, S, i·kernel]
        """The patches.

        Raises:
            UnsupportedError: If the convolution is grouped.
            ValueError: If `x` has no example dimension.
        """
        return self._geometry(module, x).rows(at_least_float32(x))

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, o, *out] -> [V, B, S, o]
        """The output gradient, positions in row-major order (a view)."""
        return at_least_float32(g).flatten(3).mT

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Sum of `a aᵀ` over all patches, which are never held all at once; sum of `a`; number of patches."""
        geometry, x = self._geometry(module, x), at_least_float32(x)
        rows_sum = geometry.sum_rows(x.sum(0, keepdim=True))[0]
        return input_gram(geometry, x), rows_sum, len(x) * geometry.positions(x)

    def mean_inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, i, *size] -> [B, i·kernel]
        """Mean patch of each example, without forming patches."""
        geometry, x = self._geometry(module, x), at_least_float32(x)
        return geometry.sum_rows(x) / geometry.positions(x)

    def grad_gram(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, o, *out] -> [o, o]
        """Sum of `g gᵀ` over vectors, examples and positions."""
        return image_gram(at_least_float32(g).flatten(3).flatten(0, 1))

    def sum_grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, o, *out] -> [V, B, o]
        """Sum of `g` over the positions of each example."""
        return at_least_float32(g).flatten(3).sum(3)

    def _geometry(self, module: nn.Module, x: Tensor) -> Geometry:
        if (reason := self.refuses(module)) is not None:
            raise UnsupportedError(reason)
        assert isinstance(module, _CONVOLUTIONS)
        if x.ndim != module.weight.ndim:
            raise ValueError(
                f"{type(module).__name__} got an input of shape {tuple(x.shape)}, expected {module.weight.ndim} "
                "dimensions, examples first. Add the example dimension with `x[None]`."
            )
        return Geometry.of(module)
