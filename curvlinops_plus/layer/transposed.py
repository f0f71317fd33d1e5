"""Rule of transposed convolutions: the row at an output position holds the input pixels that contribute to it.

A transposed convolution adds `W[:, :, t] x[q]` to the output at `p = q·stride - padding + t·dilation`, for every pixel
`q` and tap `t`. At an output position, `y[p] = W a[p] + b` with one entry of `a[p]` for each channel and tap: the pixel
`q` that contributes to `p` through tap `t`, or zero if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.conv import GroupedRule
from curvlinops_plus.layer.convolution_gram import grouped_gram, input_gram
from curvlinops_plus.layer.patches import Geometry
from curvlinops_plus.layer.rule_registry import register_rule
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

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Sum of `a aᵀ`, sum of `a`, number of output positions; zeros between pixels are not multiplied.

        With stride `s`, output positions that differ by a multiple of `s` use the same taps. Each of these classes is a
        convolution with stride 1 on the input itself with only those taps.
        """
        module = _checked(module)
        x, out = _input_and_output_size(module, x)
        groups, taps = module.groups, prod(module.kernel_size)
        c = x.shape[1] // groups
        total = x.new_zeros(groups, c, taps, c, taps)
        for geometry, sides, used in _tap_classes(module, x, out):
            pixels, places = _padded_or_cropped(x, sides), torch.tensor(used, device=x.device)
            part = input_gram(geometry, pixels) if groups == 1 else grouped_gram(geometry, pixels, groups)
            part = part.view(groups, c, len(used), c, len(used))
            # Indexed dimensions come first: [used, used, groups, c, c].
            total[:, :, places[:, None], :, places] = part.permute(2, 4, 0, 1, 3)
        total = total.view(groups, c * taps, c * taps)
        row_sum = self._sum_rows(module, x.sum(0, keepdim=True), out)[0]
        return total if groups > 1 else total[0], row_sum, float(len(x) * prod(out))

    def mean_inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, b·i, *size] -> [B, *b, i·kernel]
        """Mean row of each example, without forming rows."""
        module = _checked(module)
        x, out = _input_and_output_size(module, x)
        return self._sum_rows(module, x, out) / prod(out)

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

    def _sum_rows(self, module: _Transposed, x: Tensor, out: Sequence[int]) -> Tensor:
        """Sum of each example's rows, one dimension after the other: [B, b·i, *size] -> [B, *b, i·kernel]."""
        for dim in reversed(range(len(out))):
            q, t = (torch.arange(n, device=x.device) for n in (x.shape[dim + 2], module.kernel_size[dim]))
            p = q[:, None] * module.stride[dim] - int(module.padding[dim]) + t * module.dilation[dim]
            reached = ((p >= 0) & (p < out[dim])).to(x.dtype)  # [size, kernel]: a pixel contributes through a tap
            x = (x.movedim(dim + 2, -1) @ reached).movedim(-1, dim + 2)
        return self.grouped(module, x.flatten(1))


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


def _tap_classes(
    module: _Transposed, x: Tensor, out: Sequence[int]
) -> Iterator[tuple[Geometry, list[tuple[int, int]], list[int]]]:
    """Output positions that use the same taps, as convolutions on the input.

    Yields:
        The convolution, with taps in the order of the module's; the padding of the input, negative to crop it; and the
        indices of the taps in the flattened kernel.
    """
    per_dimension = [list(_tap_classes_1d(module, dim, x.shape[dim + 2], size)) for dim, size in enumerate(out)]
    for lines in product(*per_dimension):
        kernel, dilation = tuple(len(line[0]) for line in lines), tuple(line[1] for line in lines)
        padding, sides = [], []
        for _, _, before, after in lines:  # the convolution itself handles padding that is not negative
            adds = before >= 0 and after >= 0
            padding.append((before, after) if adds else (0, 0))
            sides.append((0, 0) if adds else (before, after))
        used = [0]
        for (taps, *_), size in zip(lines, module.kernel_size, strict=True):
            used = [place * size + t for place in used for t in taps]
        yield Geometry(kernel, (1,) * len(out), dilation, tuple(padding)), sides, used


def _tap_classes_1d(
    module: _Transposed, dim: int, pixels: int, positions: int
) -> Iterator[tuple[list[int], int, int, int]]:
    """The same in one dimension: taps in reverse order, dilation, padding before and after."""
    stride, padding, dilation = module.stride[dim], int(module.padding[dim]), module.dilation[dim]
    kernel, common = module.kernel_size[dim], gcd(module.stride[dim], module.dilation[dim])
    for phase in range(min(stride, positions)):
        # Through tap t, pixel m + (phase + padding - t·dilation) / stride contributes to position m·stride + phase.
        taps = [t for t in reversed(range(kernel)) if (phase + padding - t * dilation) % stride == 0]
        if taps:
            count = (positions - phase + stride - 1) // stride
            first, last = ((phase + padding - t * dilation) // stride for t in (taps[0], taps[-1]))
            yield taps, dilation // common if len(taps) > 1 else 1, -first, last + count - pixels
