"""Rules of convolutions: their rows are the patches of the input, in the order of the flattened
weight.

A transposed convolution adds `W[:, :, t] x[q]` to the output at `p = q·stride - padding +
t·dilation`, for every pixel `q` and tap `t`. With zeros between the pixels and around them it is a
convolution with stride 1, taps in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from curvlinops_plus.layer.convolution_gram import image_gram, input_gram
from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.rule import AffineRule
from curvlinops_plus.linalg.numerics import at_least_float32


class GroupedRule(AffineRule):
    """What convolutions and transposed ones share: positions behind the channels, and groups as a
    batch of matrices.
    """

    #: The first two axes of the weight.
    stored: ClassVar[tuple[str, str]]

    def patterns(self, module: Any) -> dict[str, str]:
        """`W` with one column per input channel and tap, then the bias as one more column."""
        first_axis, second_axis = self.stored
        taps = ("w", "h w", "d h w")[module.weight.ndim - 3]
        patterns = {"weight": f"{first_axis} {second_axis} {taps} -> o (i {taps})"}
        if module.groups > 1:
            patterns["weight"] = f"(g {first_axis}) {second_axis} {taps} -> g o (i {taps})"
        if module.bias is not None:
            patterns["bias"] = "o -> o 1" if module.groups == 1 else "(g o) -> g o 1"
        return patterns

    def sizes(self, module: Any) -> dict[str, int]:
        """The number of groups, if there are several."""
        return {} if module.groups == 1 else {"g": module.groups}

    def grads(self, module: Any, g: Tensor) -> Tensor:  # [V, B, b·o, *out] -> [V, B, S, *b, o]
        """The output gradient, positions in row-major order (a view)."""
        return self.grouped(module, g.flatten(3).mT)

    def grad_gram(self, module: Any, g: Tensor) -> Tensor:  # [V, B, b·o, *out] -> [*b, o, o]
        """Sum of `g gᵀ` over vectors, examples and positions."""
        images = at_least_float32(g).flatten(3).flatten(0, 1)
        return image_gram(self.grouped(module, images, dim=1))

    def grouped(self, module: Any, t: Tensor, dim: int = -1) -> Tensor:
        """Channels split into groups, if there are several."""
        return t if module.groups == 1 else t.unflatten(dim, (module.groups, -1))


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(GroupedRule):
    """Convolutions in one to three dimensions with every stride, padding, padding mode, dilation
    and number of groups.

    The output positions share the weight. A convolution with `b > 1` groups (a depthwise one has a
    group per channel) is a batch of `b` matrices: rows and gradients get one more axis, and each
    group has Kronecker factors of its own.

    Example:
        >>> import torch
        >>> layer = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect")
        >>> x = torch.rand(4, 3, 5, 5)
        >>> a = ConvRule().inputs(layer, x)
        >>> a.shape
        torch.Size([4, 25, 27])
        >>> y = a @ layer.weight.flatten(1).T + layer.bias
        >>> torch.allclose(y, layer(x).flatten(2).mT, atol=1e-5)
        True
        >>> depthwise = nn.Conv2d(3, 6, 3, groups=3)
        >>> ConvRule().inputs(depthwise, x).shape, ConvRule().patterns(depthwise)["weight"]
        (torch.Size([4, 9, 3, 9]), '(g o) i h w -> g o (i h w)')
    """

    stored = ("o", "i")

    def refuses(self, module: nn.Module) -> str | None:
        """Subclasses that change what is convolved."""
        convolve = getattr(type(module), "_conv_forward", None)
        if convolve in (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward):
            return None
        return (
            f"this {type(module).__name__} has another `_conv_forward` than Conv1d, Conv2d and "
            "Conv3d"
        )

    def inputs(self, module: Any, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, S, *b, i·kernel]
        """The patches.

        Raises:
            ValueError: If `x` has no example dimension.
        """
        _require_examples(module, x)
        return Geometry.of(module).rows(x, module.groups)

    def input_gram(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Sum of `a aᵀ` over all patches, formed a few at a time; sum of `a`; number of patches."""
        _require_examples(module, x)
        x = at_least_float32(x)
        geometry = Geometry.of(module)
        total = input_gram(geometry, x, module.groups)
        row_sum = geometry.sum_rows(x.sum(0, keepdim=True))[0]
        return total, self.grouped(module, row_sum), float(len(x) * geometry.positions(x))

    def mean_inputs(self, module: Any, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, *b, i·kernel]
        """Mean patch of each example, without forming patches."""
        _require_examples(module, x)
        geometry = Geometry.of(module)
        row_sums = geometry.sum_rows(at_least_float32(x))
        return self.grouped(module, row_sums / geometry.positions(x))


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class TransposedConvRule(GroupedRule):
    """Transposed convolutions in one to three dimensions, with every option and with `output_size`
    in the call.

    The positions that share the weight are those of the output: their rows hold the input pixels
    that contribute, or zeros. As for `ConvRule`, groups are a batch of matrices.

    If a call passes an `output_size` other than that of `output_padding`, the shape of the input
    encodes its output padding: `input_of` returns `x` expanded along `n` more dimensions, whose
    sizes are the padding plus one.

    Example:
        >>> import torch
        >>> layer, x = nn.ConvTranspose2d(3, 8, 4, stride=2, padding=1), torch.rand(5, 3, 6, 6)
        >>> a = TransposedConvRule().inputs(layer, x)
        >>> a.shape
        torch.Size([5, 144, 48])
        >>> W = layer.weight.transpose(0, 1).flatten(1)
        >>> torch.allclose(a @ W.T + layer.bias, layer(x).flatten(2).mT, atol=1e-5)
        True
    """

    stored = ("i", "o")

    def input_of(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The input; if the call passes another `output_size`, expanded to encode its output
        padding.
        """
        x = super().input_of(module, args, kwargs)
        n = len(module.kernel_size)
        output_size = args[1] if len(args) > 1 else kwargs.get("output_size")
        if output_size is None or x.ndim != n + 2:
            return x
        dimensions = zip(
            list(output_size)[-n:],
            x.shape[2:],
            module.stride,
            module.padding,
            _reach(module),
            strict=True,
        )
        # The output has (size - 1)·stride - 2·padding + reach + 1 positions, plus its padding.
        output_padding = tuple(
            int(out) - ((size - 1) * stride - 2 * int(padding) + reach + 1)
            for out, size, stride, padding, reach in dimensions
        )
        if output_padding == tuple(module.output_padding):
            return x
        return x[(...,) + (None,) * n].expand(*x.shape, *[size + 1 for size in output_padding])

    def inputs(self, module: Any, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, S, *b, i·kernel]
        """The input pixels that contribute to each output position; zero where a tap has none.

        Raises:
            ValueError: If `x` has no example dimension.
        """
        n = len(module.kernel_size)
        output_padding = tuple(module.output_padding)
        if x.ndim == 2 + 2 * n:
            output_padding = tuple(size - 1 for size in x.shape[2 + n :])
            x = x[(...,) + (0,) * n]
        _require_examples(module, x)
        # Zeros between the pixels, and at the end of the image.
        sizes = [(size - 1) * stride + 1 for size, stride in zip(x.shape[2:], module.stride)]
        padded = [size + extra for size, extra in zip(sizes, output_padding)]
        spread = x.new_zeros(*x.shape[:2], *padded)
        pixels = [slice(0, size, stride) for size, stride in zip(sizes, module.stride)]
        spread[(..., *pixels)] = x
        # Zeros on both sides; a negative number crops.
        sides = [reach - int(padding) for reach, padding in zip(_reach(module), module.padding)]
        # A convolution with stride 1 whose taps are in reverse.
        kernel = tuple(module.kernel_size)
        geometry = Geometry(kernel, (1,) * n, tuple(module.dilation), tuple(zip(sides, sides)))
        a = geometry.rows(spread, module.groups).unflatten(-1, (-1, *kernel))
        return a.flip(tuple(range(-n, 0))).flatten(-n - 1)


def _reach(module: Any) -> list[int]:
    """How far apart the outermost taps are, in each dimension."""
    return [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]


def _require_examples(module: Any, x: Tensor) -> None:
    if x.ndim != module.weight.ndim:
        raise ValueError(
            f"{type(module).__name__} got an input of shape {tuple(x.shape)}, expected "
            f"{module.weight.ndim} dimensions, examples first. Add the example dimension with "
            "`x[None]`."
        )
