"""The patches that a convolution multiplies its weight with, in one, two or three dimensions.

A patch holds the input under the kernel at one output position, in the order of the flattened
weight `(c *kernel)`. Patches are copied as *columns* `[c·kernel, S]`, which moves whole lines of
the image; rows are a view of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride, dilation and padding of a convolution, per spatial dimension.

    Attributes:
        padding: Padding before and after, in order of the dimensions.
        mode: Padding mode of `torch.nn.functional.pad`, `"constant"` for zeros.

    Example:
        >>> Geometry.of(nn.Conv2d(3, 8, (5, 4), padding="same")).padding
        ((2, 2), (1, 2))
        >>> Geometry.of(nn.Conv1d(2, 8, 3)).rows(torch.rand(7, 2, 10)).shape
        torch.Size([7, 8, 6])
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str = "constant"

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry:
        """Read the options of a convolution layer."""
        kernel = tuple(module.kernel_size)
        dilation = tuple(module.dilation)
        if module.padding == "valid":
            padding = ((0, 0),) * len(kernel)
        elif module.padding == "same":  # of an odd total, PyTorch puts the larger half at the end
            totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            padding = tuple((t // 2, t - t // 2) for t in totals)
        else:
            padding = tuple((int(p), int(p)) for p in module.padding)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return cls(kernel, tuple(module.stride), dilation, padding, mode)

    @property
    def pointwise(self) -> bool:
        """Whether each patch is a single pixel, so that nothing overlaps."""
        return all(k == 1 for k in self.kernel)

    @property
    def plain(self) -> bool:
        """Whether the kernel moves by one, has no gaps, and sees zeros around the input."""
        return self.mode == "constant" and set(self.stride + self.dilation) == {1}

    def pad(self, x: Tensor) -> Tensor:  # [B, c, *size] -> [B, c, *padded]
        """Add the padding."""
        if not any(chain(*self.padding)):
            return x
        return F.pad(x, list(chain(*reversed(self.padding))), mode=self.mode)

    def columns(self, x: Tensor, groups: int = 1) -> Tensor:
        """Patches of each group of channels, one in each column: `[B, g·c, *size]` to
        `[B, g, c·kernel, S]`, positions in row-major order.
        """
        n = len(self.kernel)
        x = self.pad(x)
        steps = zip(self.kernel, self.stride, self.dilation, strict=True)
        for dim, (k, stride, dilation) in enumerate(steps, 2):
            x = x.unfold(dim, dilation * (k - 1) + 1, stride)[..., ::dilation]
        windows = x.unflatten(1, (groups, -1))  # [B, g, c, *out, *kernel]
        columns = windows.permute(0, 1, 2, *range(n + 3, 2 * n + 3), *range(3, n + 3))
        # In 1-D it is a view of overlapping lines, with which products are slow.
        return columns.flatten(n + 3).flatten(2, -2).contiguous()

    def rows(self, x: Tensor, groups: int = 1) -> Tensor:
        """Patches, one in each row: `[B, S, g, c·kernel]`, or `[B, S, c·kernel]` of one group.

        In memory the positions come last, as in output gradients.
        """
        rows = self.columns(x, groups).movedim(-1, 1)
        return rows[:, :, 0] if groups == 1 else rows

    def sum_rows(self, x: Tensor) -> Tensor:  # [B, c, *size] -> [B, c·kernel]
        """Sum of each example's patches, one dimension after the other, so that no patch is
        formed.
        """
        x = self.pad(x)
        steps = zip(self.kernel, self.stride, self.dilation, strict=True)
        for dim, (k, stride, dilation) in enumerate(steps, 2):
            taps = _taps(x.shape[dim], k, stride, dilation, x.dtype, x.device)
            x = (x.movedim(dim, -1) @ taps).movedim(-1, dim)
        return x.flatten(1)

    def positions(self, x: Tensor) -> int:
        """Number of patches per example."""
        count = 1
        for dim, (before, after) in enumerate(self.padding):
            padded = before + x.shape[2 + dim] + after
            reach = self.dilation[dim] * (self.kernel[dim] - 1)
            count *= (padded - reach - 1) // self.stride[dim] + 1
        return count


@lru_cache(256)
def _taps(
    padded: int, k: int, stride: int, dilation: int, dtype: torch.dtype, device: torch.device
) -> Tensor:  # -> [padded, k]
    """How often each tap of a kernel meets each pixel of a line; kept where it is used, as a copy
    there waits.
    """
    with torch.inference_mode(False):
        lines = torch.eye(padded, dtype=dtype, device=device)
        return lines.unfold(0, dilation * (k - 1) + 1, stride)[..., ::dilation].sum(0)
