"""Intercepting function calls inside modules: attention passes its weights to a function, where no hook runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlinops_plus.errors import UnsupportedError

__all__ = ["FunctionCalls", "rows_of"]

Receive = Callable[[Tensor, Tensor, "Tensor | None", Tensor, "int | None"], Tensor]


@cache
def _attention() -> Callable[..., Any]:
    """`F.multi_head_attention_forward` that runs its body even while a mode is active.

    The original hands itself to the mode instead, which then sees one call and none of the products inside.
    """
    original = F.multi_head_attention_forward
    private = {**vars(F), "has_torch_function": lambda *_: False}
    body = FunctionType(original.__code__, private, "attention", original.__defaults__, original.__closure__)
    body.__kwdefaults__ = original.__kwdefaults__
    return body


class FunctionCalls(TorchFunctionMode):
    """While active, shows the products with a weight inside `F.multi_head_attention_forward`.

    It also keeps attention and transformer layers off their fused inference path, which calls no submodule at all.

    Args:
        receive: Called with input, weight, bias, output and, if examples and positions lie on one axis of these, the
            number of examples; returns the output that the model goes on with. Else the examples are on axis 1.
    """

    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self.receive = receive
        self.examples: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            if query.ndim != 3:
                raise UnsupportedError(
                    f"Multi-head attention got a query of shape {list(query.shape)}, expected three dimensions with "
                    "the examples on one of them. Add the example dimension with `x[None]`."
                )
            outer, self.examples = self.examples, query.shape[1]
            try:
                with self:
                    return _attention()(*args, **kwargs)
            finally:
                self.examples = outer
        out = func(*args, **kwargs)
        if func is F.linear and self.examples is not None:
            x, weight, *rest = [*args, *kwargs.values()]
            return self.receive(x, weight, rest[0] if rest else None, out, None if x.ndim == 3 else self.examples)
        return out


def rows_of(t: Tensor | None, params: Iterable[Tensor]) -> tuple[Tensor, slice] | None:
    """The parameter that a tensor is, or is some rows of."""
    if t is None:
        return None
    for p in params:
        if t is p:
            return p, slice(0, len(p))
        # A chunk of the parameter: same columns, somewhere inside its memory.
        same = t._base is p and t.shape[1:] == p.shape[1:] and t.stride() == p.stride() and len(p)
        if same:
            start = int(t.storage_offset() - p.storage_offset()) // max(1, p[0].numel())
            return p, slice(start, start + len(t))
    return None
