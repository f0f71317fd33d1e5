"""Stacks of weights, as mixtures of experts have: each row of the input meets one of the matrices.

The rule says what one parameter `[m, o, i]` is: `m` matrices, each with factors of its own. Which
rows meet which matrix belongs to a call, not to the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.layer.linear import LinearRule


class StackRule(LinearRule):
    """A stack of matrices `[m, o, i]`, or of vectors `[m, o]` that are added.

    Args:
        transposed: Whether the parameter is `[m, i, o]`.
        columns: Whether products are `W x` of columns, `x [rows, i, positions]`.

    Example:
        >>> from curvlinops_plus.layer.functions import Projection
        >>> stack = Projection(nn.Parameter(torch.ones(8, 3, 2)), nn.Parameter(torch.ones(8, 2)))
        >>> StackRule(transposed=True).patterns(stack)
        {'weight': 'm i o -> m o i', 'bias': 'm o -> m o 1'}
    """

    stacked = True

    def __init__(self, transposed: bool = False, columns: bool = False) -> None:
        self.transposed = transposed
        self.columns = columns

    def patterns(self, module: Any) -> dict[str, str]:
        """The matrices, each with its bias as one more column."""
        patterns = {}
        if module.weight is not None:
            patterns["weight"] = "m i o -> m o i" if self.transposed else "m o i -> m o i"
        if module.bias is not None:
            patterns["bias"] = "m o -> m o 1"
        return patterns

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [rows, *positions, i]
        """The rows, each of which meets one of the matrices."""
        return super().inputs(module, x.mT if self.columns else x)

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, rows, *positions, o]
        """Their output gradients."""
        return super().grads(module, g.mT if self.columns else g)


def rows_up_to(ends: Tensor, num_rows: int) -> Tensor:  # [m] -> [num_rows]
    """Which matrix each row meets, if those of matrix `k` end before row `ends[k]`; `m` behind all
    of them.

    Example:
        >>> rows_up_to(torch.tensor([1, 1, 3]), 4)
        tensor([0, 2, 2, 3])
    """
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    return torch.bucketize(rows, ends, right=True)
