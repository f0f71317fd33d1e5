"""Rule of convolutions: their rows are the patches of the input, in the order of the flattened weight."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.convolution_gram import (
    Correlations,
    grouped_gram,
    image_gram,
    input_gram,
    packed_gram,
)
from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.layer.rule import AffineRule, register_rule
from curvlinops_plus.linalg.gram_sum import PackedForm, PackedGram
from curvlinops_plus.linalg.numerics import at_least_float32

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class GroupedRule(AffineRule):
    """What convolutions and transposed ones share: positions behind the channels, and groups as a batch of matrices."""

    stored: ClassVar[tuple[str, str]]  # the first two axes of the weight

    def convolution(self, module: nn.Module) -> _ConvNd:
        """The module, if it is of the types of this rule.

        Raises:
            UnsupportedError: If it is another one.
        """
        raise NotImplementedError

    def grouped(self, module: nn.Module, t: Tensor, dim: int = -1) -> Tensor:
        """Channels split into groups, if there are several."""
        groups = self.convolution(module).groups
        return t if groups == 1 else t.unflatten(dim, (groups, -1))

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """`W` with one column per input channel and tap, then the bias as one more column."""
        (first, second), module = self.stored, self.convolution(module)
        taps = ("w", "h w", "d h w")[module.weight.ndim - 3]
        if module.groups == 1:
            weight, bias = f"{first} {second} {taps} -> o (i {taps})", "o -> o 1"
        else:
            weight, bias = f"(g {first}) {second} {taps} -> g o (i {taps})", "(g o) -> g o 1"
        return {"weight": weight} if module.bias is None else {"weight": weight, "bias": bias}

    def sizes(self, module: nn.Module) -> dict[str, int]:
        """The number of groups, if there are several."""
        groups = self.convolution(module).groups
        return {} if groups == 1 else {"g": groups}

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, b·o, *out] -> [V, B, S, *b, o]
        """The output gradient, positions in row-major order (a view)."""
        return self.grouped(module, at_least_float32(g).flatten(3).mT)

    def grad_gram(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, b·o, *out] -> [*b, o, o]
        """Sum of `g gᵀ` over vectors, examples and positions."""
        return image_gram(self.grouped(module, at_least_float32(g).flatten(3).flatten(0, 1), dim=1))

    def sum_grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, b·o, *out] -> [V, B, *b, o]
        """Sum of `g` over the positions of each example."""
        return self.grouped(module, at_least_float32(g).flatten(3).sum(3))


@register_rule(*_CONVOLUTIONS)
class ConvRule(GroupedRule):
    """Convolutions in one to three dimensions with every stride, padding, padding mode, dilation and number of groups.

    The output positions share the weight. A convolution with `b > 1` groups (a depthwise one has a group per channel)
    is a batch of `b` matrices: rows and gradients get one more axis, and each group has Kronecker factors of its own.

    Example:
        >>> import torch
        >>> layer, x = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"), torch.rand(4, 3, 5, 5)
        >>> a = ConvRule().inputs(layer, x)
        >>> a.shape
        torch.Size([4, 25, 27])
        >>> torch.allclose(a @ layer.weight.flatten(1).T + layer.bias, layer(x).flatten(2).mT, atol=1e-5)
        True
        >>> depthwise = nn.Conv2d(3, 6, 3, groups=3)
        >>> ConvRule().inputs(depthwise, x).shape, ConvRule().patterns(depthwise)["weight"]
        (torch.Size([4, 9, 3, 9]), '(g o) i h w -> g o (i h w)')
    """

    stored = ("o", "i")

    def convolution(self, module: nn.Module) -> _ConvNd:
        if (reason := self.refuses(module)) is not None:
            raise UnsupportedError(reason)
        assert isinstance(module, _CONVOLUTIONS)
        return module

    def refuses(self, module: nn.Module) -> str | None:
        """Subclasses that change what is convolved."""
        name = type(module).__name__
        if not isinstance(module, _CONVOLUTIONS):
            return f"{name} is no subclass of Conv1d, Conv2d or Conv3d"
        base = next(kind for kind in _CONVOLUTIONS if isinstance(module, kind))
        if type(module)._conv_forward is not base._conv_forward:  # what the `forward` of all convolutions calls
            return f"this {name} has another `_conv_forward` than {base.__name__}: add a rule with @register_rule"
        return None

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, S, *b, i·kernel]
        """The patches.

        Raises:
            UnsupportedError: If a subclass changes what is convolved.
            ValueError: If `x` has no example dimension.
        """
        groups, geometry, x = self.convolution(module).groups, self._geometry(module, x), at_least_float32(x)
        return geometry.rows(x) if groups == 1 else geometry.group_rows(x, groups)

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Sum of `a aᵀ` over all patches, formed a few at a time; sum of `a`; number of patches."""
        groups, geometry, x = self.convolution(module).groups, self._geometry(module, x), at_least_float32(x)
        total = input_gram(geometry, x) if groups == 1 else grouped_gram(geometry, x, groups)
        row_sum = geometry.sum_rows(x.sum(0, keepdim=True))[0]
        return total, self.grouped(module, row_sum), float(len(x) * geometry.positions(x))

    def packed_forms(self, module: nn.Module) -> tuple[PackedForm, ...]:
        """Correlations of images, of a convolution without groups."""
        assert isinstance(module, _CONVOLUTIONS)
        return (Correlations(Geometry.of(module), module.weight.shape[1]),)

    def packed_gram(self, module: nn.Module, x: Tensor, ones: bool) -> PackedGram | None:
        """What takes less work than the patches, of a convolution without groups."""
        geometry = self._geometry(module, x)
        return packed_gram(geometry, at_least_float32(x), ones) if self.convolution(module).groups == 1 else None

    def mean_inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, *b, i·kernel]
        """Mean patch of each example, without forming patches."""
        geometry, x = self._geometry(module, x), at_least_float32(x)
        return self.grouped(module, geometry.sum_rows(x) / geometry.positions(x))

    def _geometry(self, module: nn.Module, x: Tensor) -> Geometry:
        weight = self.convolution(module).weight
        if x.ndim != weight.ndim:
            raise ValueError(
                f"{type(module).__name__} got an input of shape {tuple(x.shape)}, expected {weight.ndim} "
                "dimensions, examples first. Add the example dimension with `x[None]`."
            )
        assert isinstance(module, _CONVOLUTIONS)
        return Geometry.of(module)
