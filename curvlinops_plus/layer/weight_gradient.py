"""The gradient of a convolution's weight, by the faster of two ways, and with digits for many positions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

#: PyTorch adds up all positions one after the other on CPUs; of more than these too many digits get lost.
ADDED = 2**14


def weight_gradient(
    x: Tensor,
    g: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:  # [B, b·i, *size], [B, b·o, *out] -> [b·o, i, *kernel]
    """Sum over examples of how a convolution `⟨g, convolution(x, w)⟩` depends on its weight `w`.

    Args:
        x: The input.
        g: A vector for each output.
        shape: That of the weight.
        stride: One number for each dimension; as are the padding and the dilation.
        padding: Zeros before and after.
        dilation: Steps between taps.
        groups: Number of groups.
    """
    n, positions = g.ndim - 2, prod(g.shape[2:])
    if n > 1 and groups == 1 and positions <= shape[0] and x.device.type == "cpu":
        # Small images as weights are put in order for a kernel sooner than weights from many channels to many.
        found = (F.conv2d, F.conv3d)[n - 2](x.transpose(0, 1), g.transpose(0, 1), None, dilation, padding, stride)
        for dim, k in enumerate(shape[2:], 2):  # strides may leave pixels over
            found = found.narrow(dim, 0, k)
        return found.transpose(0, 1)
    examples = max(1, ADDED // positions) if x.device.type == "cpu" else len(x)
    options, total = (None, stride, padding, dilation, False, (0,) * n, groups, (False, True, False)), None
    for some, vectors in zip(x.split(examples), g.split(examples), strict=True):
        _, part, _ = torch.ops.aten.convolution_backward(vectors, some, x.new_empty(1).expand(shape), *options)
        total = part if total is None else total + part
    assert total is not None
    return total
