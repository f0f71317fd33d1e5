"""The patches that a convolution multiplies its weight with, in one, two or three dimensions.

A patch holds the input under the kernel at one output position. Two layouts are used: *rows* in the
order of the flattened weight `(c *kernel)`, which is the public format, and *channels-last* rows
`(*kernel c)`, which are cheaper to copy and are used where the result can be permuted afterwards.
Grouped convolutions also use *columns* `[groups, c·kernel, B·S]`, for one matrix product per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Below this many examples, computing the offsets of patch entries costs more than it saves.
_FEW_EXAMPLES = 4


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
        kernel, dilation = tuple(module.kernel_size), tuple(module.dilation)
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

    def windows(
        self, x: Tensor, start: int
    ) -> Tensor:  # [*lead, *padded, *rest] -> [*lead, *out, *rest, *kernel]
        """Patches of a padded input as a view; its spatial dimensions begin at dimension
        `start`.
        """
        steps = zip(self.kernel, self.stride, self.dilation, strict=True)
        for dim, (k, stride, dilation) in enumerate(steps, start):
            x = x.unfold(dim, dilation * (k - 1) + 1, stride)[..., ::dilation]
        return x

    def rows(self, x: Tensor) -> Tensor:  # [B, c, *size] -> [B, S, c·kernel]
        """Patches in the order of the flattened weight, positions in row-major order."""
        x = self.pad(x)
        if self.pointwise:
            return self.windows(x, 2).flatten(2).mT
        if len(x) < _FEW_EXAMPLES:
            return self._ordered(x)
        # The entries of a patch have the same strided offsets in every example: compute them once.
        places = self._ordered(torch.arange(x[0].numel(), device=x.device).view(1, *x.shape[1:]))
        return x.flatten(1).index_select(1, places.flatten()).view(len(x), *places.shape[1:])

    def _ordered(self, padded: Tensor) -> Tensor:  # [B, c, *padded] -> [B, S, c·kernel]
        n = len(self.kernel)
        return self.windows(padded, 2).movedim(1, n + 1).flatten(n + 1).flatten(1, n)

    def channels_last_rows(self, x: Tensor) -> Tensor:  # [B, c, *size] -> [B·S, kernel·c]
        """Patches of all examples with columns ordered `(*kernel c)`: memory is copied in longer
        contiguous runs.
        """
        n = len(self.kernel)
        windows = self.windows(self.pad(x).movedim(1, -1).contiguous(), 1)  # [B, *out, c, *kernel]
        return windows.movedim(n + 1, -1).flatten(n + 1).flatten(0, n)

    def group_columns(
        self, x: Tensor, groups: int
    ) -> Tensor:  # [B, g·c, *size] -> [g, c·kernel, B·S]
        """Patches of each group of channels, one in each column: memory is copied in lines of the
        image.
        """
        columns = self._columns(x, groups)
        return (
            columns.movedim(0, -len(self.kernel) - 1).flatten(2 + len(self.kernel)).flatten(1, -2)
        )

    def group_rows(
        self, x: Tensor, groups: int
    ) -> Tensor:  # [B, g·c, *size] -> [B, S, g, c·kernel]
        """Patches of each group of channels: in memory the positions come last, as for output
        gradients.
        """
        columns = self._columns(x, groups).flatten(3 + len(self.kernel)).flatten(2, -2)
        return columns.contiguous().movedim(
            -1, 1
        )  # in 1-D a view of overlapping lines, with which products are slow

    def _columns(
        self, x: Tensor, groups: int
    ) -> Tensor:  # [B, g·c, *size] -> [B, g, c, *kernel, *out]
        n = len(self.kernel)
        windows = self.windows(self.pad(x), 2).unflatten(
            1, (groups, -1)
        )  # [B, g, c, *out, *kernel]
        return windows.permute(0, 1, 2, *range(n + 3, 2 * n + 3), *range(3, n + 3))

    def sum_rows(self, x: Tensor) -> Tensor:  # [B, c, *size] -> [B, c·kernel]
        """Sum of each example's patches, one dimension after the other, so that no patch is
        formed.
        """
        zeros = self.mode == "constant"
        x = x if zeros else self.pad(x)  # zeros add nothing
        steps = list(
            enumerate(zip(self.kernel, self.stride, self.dilation, self.padding, strict=True), 2)
        )
        for dim, (k, stride, dilation, padding) in reversed(steps):
            size, (before, after) = x.shape[dim], padding if zeros else (0, 0)
            taps = _taps(before + size + after, k, stride, dilation, x.dtype, x.device)
            met = taps[before : before + size]
            x = (x.movedim(dim, -1) @ met).movedim(-1, dim)
        return x.flatten(1)

    def positions(self, x: Tensor) -> int:
        """Number of patches per example."""
        count = 1
        for n, pads, k, s, d in zip(
            x.shape[2:], self.padding, self.kernel, self.stride, self.dilation, strict=True
        ):
            count *= (n + sum(pads) - d * (k - 1) - 1) // s + 1
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
