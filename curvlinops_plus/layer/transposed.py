"""Rule of transposed convolutions: the row at an output position holds the input pixels that contribute to it.

A transposed convolution adds `W[:, :, t] x[q]` to the output at `p = q·stride - padding + t·dilation`, for every pixel
`q` and tap `t`. At an output position, `y[p] = W a[p] + b` with one entry of `a[p]` for each channel and tap: the pixel
`q` that contributes to `p` through tap `t`, or zero if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.conv import GroupedRule
from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.layer.rule import register_rule
from curvlinops_plus.linalg.numerics import at_least_float32

_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@register_rule(*_TRANSPOSED)
class TransposedConvRule(GroupedRule):
    """Transposed convolutions in one to three dimensions, with every option and with `output_size` in the call.

    The positions that share the weight are those of the output. As for `ConvRule`, groups are a batch of matrices.

    If a call passes an `output_size` other than that of `output_padding`, the shape of the input encodes its output
    padding: `input_of` returns `x` expanded along `n` more dimensions, whose sizes are the padding plus one.

    Example:
        >>> layer, x = nn.ConvTranspose2d(3, 8, 4, stride=2, padding=1), torch.rand(5, 3, 6, 6)
        >>> a = TransposedConvRule().inputs(layer, x)
        >>> a.shape
        torch.Size([5, 144, 48])
        >>> W = layer.weight.transpose(0, 1).flatten(1)
        >>> torch.allclose(a @ W.T + layer.bias, layer(x).flatten(2).mT, atol=1e-5)
        True
    """

    stored = ("i", "o")

    def convolution(self, module: nn.Module) -> _Transposed:
        return _checked(module)

    def input_of(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The input; if the call passes another `output_size`, expanded to encode its output padding."""
        module = _checked(module)
        x = super().input_of(module, args, kwargs)
        output_size = args[1] if len(args) > 1 else kwargs.get("output_size")
        n = module.weight.ndim - 2
        if output_size is None or x.ndim != n + 2:
            return x
        smallest = [_output_size(module, dim, size, 0) for dim, size in enumerate(x.shape[2:])]
        extra = [int(wanted) - least for wanted, least in zip(list(output_size)[-n:], smallest, strict=True)]
        if tuple(extra) == tuple(module.output_padding):
            return x
        return x[(...,) + (None,) * n].expand(*x.shape, *(e + 1 for e in extra))

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, S, *b, i·kernel]
        """The input pixels that contribute to each output position; zero where a tap has none.

        Raises:
            ValueError: If `x` has no example dimension.
        """
        module = _checked(module)
        x, out = _input_and_output_size(module, x)
        a = x.new_zeros(*x.shape[:2], *module.kernel_size, *out)
        for tap in product(*map(range, module.kernel_size)):
            pixels, places = zip(
                *(_pixels_of_tap(module, dim, t, x, size) for dim, (t, size) in enumerate(zip(tap, out)))
            )
            a[(slice(None), slice(None), *tap, *places)] = x[(slice(None), slice(None), *pixels)]
        # Positions are contiguous in memory, as in output gradients.
        columns = a.flatten(len(out) + 2).flatten(1, -2)
        return self.grouped(module, columns.mT)

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:
        """Gradients of each example: input pixels times the patches of the output gradient that they contribute to."""
        module = _checked(module)
        x, out = _input_and_output_size(module, self.input_of(module, args, kwargs))
        if g.shape[1] != len(x) or tuple(g.shape[3:]) != tuple(out):
            return super().per_example_grads(module, args, kwargs, g)  # raises with the shapes
        g, groups, n = at_least_float32(g), module.groups, len(out)
        strides = tuple(module.stride)
        geometry = Geometry(tuple(module.kernel_size), strides, tuple(module.dilation), ((0, 0),) * n)
        sides = []  # padding with one patch per pixel
        for dim, size in enumerate(x.shape[2:]):
            reach, before = module.dilation[dim] * (module.kernel_size[dim] - 1), int(module.padding[dim])
            sides.append((before, (size - 1) * strides[dim] + reach + 1 - before - out[dim]))
        dtype = torch.promote_types(x.dtype, g.dtype)
        pixels = x.to(dtype).unflatten(1, (groups, -1)).flatten(3)  # [B, b, i, pixels]
        J = x.new_empty(len(g), len(x), *module.weight.shape, dtype=dtype)
        for one, result in zip(g.to(dtype), J, strict=True):
            patches = geometry.group_rows(_padded_or_cropped(one, sides), groups)  # [B, pixels, b, o·kernel]
            result.copy_((pixels @ patches.movedim(1, 2)).reshape(result.shape))
        named = {"weight": J}
        return named if module.bias is None else {**named, "bias": g.flatten(3).sum(3)}


def _checked(module: nn.Module) -> _Transposed:
    if not isinstance(module, _TRANSPOSED):
        raise UnsupportedError(
            f"{type(module).__name__} is no subclass of ConvTranspose1d, ConvTranspose2d or ConvTranspose3d: its rows "
            "need a rule of their own, registered with @register_rule."
        )
    return module


def _output_size(module: _Transposed, dim: int, size: int, output_padding: int) -> int:
    reach = module.dilation[dim] * (module.kernel_size[dim] - 1)
    return (size - 1) * module.stride[dim] - 2 * int(module.padding[dim]) + reach + output_padding + 1


def _input_and_output_size(module: _Transposed, x: Tensor) -> tuple[Tensor, list[int]]:
    """The input itself and the sizes of the output, decoded from the result of `input_of`."""
    n = module.weight.ndim - 2
    extra: Sequence[int] = tuple(int(p) for p in module.output_padding)
    if x.ndim == 2 + 2 * n:
        extra, x = [size - 1 for size in x.shape[2 + n :]], x[(...,) + (0,) * n]
    if x.ndim != n + 2:
        raise ValueError(
            f"{type(module).__name__} got an input of shape {tuple(x.shape)}, expected {n + 2} dimensions, examples "
            "first. Add the example dimension with `x[None]`."
        )
    out = [_output_size(module, dim, size, extra[dim]) for dim, size in enumerate(x.shape[2:])]
    return at_least_float32(x), out


def _pixels_of_tap(module: _Transposed, dim: int, tap: int, x: Tensor, positions: int) -> tuple[slice, slice]:
    """Pixels that contribute to the output through a tap in one dimension, and their output positions."""
    stride = module.stride[dim]
    shift = tap * module.dilation[dim] - int(module.padding[dim])
    start = max(0, -(shift // stride))
    stop = max(start, min(x.shape[dim + 2], (positions - 1 - shift) // stride + 1))
    first = start * stride + shift
    return slice(start, stop), slice(first, first + (stop - start) * stride, stride) if stop > start else slice(0, 0)


def _padded_or_cropped(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros added at sides with a positive number, pixels removed at sides with a negative one."""
    if any(side > 0 for pair in sides for side in pair):
        x = F.pad(x, [max(0, side) for pair in reversed(sides) for side in pair])
    for dim, (before, after) in enumerate(sides, 2):
        start, stop = max(0, -before), x.shape[dim] - max(0, -after)
        x = x.narrow(dim, start, stop - start)
    return x
