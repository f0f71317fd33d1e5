"""How much is worked on at once, where all of it would take too much memory."""

from __future__ import annotations

import torch

# What a piece may take on a GPU, where each one costs some launches of kernels.
_GPU_BYTES = 2**28


def rows_at_once(device: torch.device, cpu_bytes: int, row_bytes: int) -> int:
    """The number of rows of a piece, one at least.

    On a CPU small pieces are faster, since they fit its cache. On a GPU they are as large as memory
    allows: 256 MiB.

    Args:
        device: Where the work is done.
        cpu_bytes: What a piece takes on a CPU, and at least on a GPU.
        row_bytes: What one row takes.

    Example:
        >>> rows_at_once(torch.device("cpu"), 2**20, 2**18)
        4
        >>> rows_at_once(torch.device("cuda"), 2**20, 2**18)
        1024
    """
    size = cpu_bytes if device.type == "cpu" else max(cpu_bytes, _GPU_BYTES)
    return max(1, size // max(1, row_bytes))
