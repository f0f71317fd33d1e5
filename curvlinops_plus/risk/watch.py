"""Who reads a parameter in a forward pass: needed where parameters leave no trace in autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["ParameterReads"]


class ParameterReads(TorchFunctionMode):
    """While active, counts for each parameter the torch functions that make a tensor from it.

    Looking at its shape or dtype does not count. Costs a few microseconds per function call.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.counts = {id(p): 0 for p in params}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves(out)):
            for read in {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)} & self.counts.keys():
                self.counts[read] += 1
        return out
