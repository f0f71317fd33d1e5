"""Intercepting function calls: functions may read weights where no module hook runs, as inside attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlinops_plus.errors import UnsupportedError

Receive = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]", Any, "int | None"], Any]


@cache
def _body(original: Any) -> Callable[..., Any]:
    """A function of PyTorch that runs its body even while a mode is active.

    The original hands itself to the mode instead, which then sees one call and nothing of what happens inside.
    """
    private = {**original.__globals__, "has_torch_function": lambda *_: False}
    body = FunctionType(original.__code__, private, original.__name__, original.__defaults__, original.__closure__)
    body.__kwdefaults__ = original.__kwdefaults__
    return body


class FunctionCalls(TorchFunctionMode):
    """While active, shows every call of a torch function, those inside `F.multi_head_attention_forward` included.

    It also keeps attention and transformer layers off their fused inference path, which calls no submodule at all.
    Costs a few microseconds per call.

    Args:
        receive: Called with function, arguments, keywords, result and, inside attention, where examples are on axis 1,
            the number of examples; returns the result that the model goes on with.
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
                    return _body(func)(*args, **kwargs)
            finally:
                self.examples = outer
        if func is torch.autograd.grad:  # activation checkpointing runs the model again, and must see the same graph
            with self:
                return _body(func)(*args, **kwargs)
        return self.receive(func, args, kwargs, func(*args, **kwargs), self.examples)


@dataclass(frozen=True)
class View:
    """Rows of a parameter, transposed or not.

    Attributes:
        rows: Its rows.
        transposed: Whether the view is the transpose of these rows.
    """

    key: str
    rows: slice
    transposed: bool


class ParameterViews:
    """Finds the parameter that a tensor is, or is a view of.

    Args:
        params: Key to parameter, in the tensors that the model reads.

    Example:
        >>> import torch
        >>> W = torch.ones(4, 3)
        >>> views = ParameterViews({"W": W})
        >>> views.find(W[1:3].T)
        View(key='W', rows=slice(1, 3, None), transposed=True)
        >>> views.find(W[::2]), views.keys(W[::2]), views.keys(2 * W)
        (None, ['W'], [])
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._by_memory: dict[int, list[tuple[str, Tensor]]] = {}
        for key, p in params.items():
            self._by_memory.setdefault(id(_base(p)), []).append((key, p))

    def keys(self, t: Tensor) -> list[str]:
        """Keys of the parameters that a tensor shows numbers of."""
        near = self._by_memory.get(id(_base(t)), [])
        if len(near) > 1:  # parameters that are views of one tensor themselves
            found = self.find(t)
            return [key for key, _ in near] if found is None else [found.key]
        return [key for key, _ in near]

    def find(self, t: Tensor | None) -> View | None:
        """The parameter whose rows a tensor is; None if it is none, or any other view."""
        if t is None:
            return None
        for key, p in self._by_memory.get(id(_base(t)), []):
            if t is not p and p.requires_grad and t.grad_fn is None and torch.is_grad_enabled():
                continue  # made under `no_grad`: nothing comes back to the parameter, though it requires a gradient
            for transposed in (False, True) if t.ndim == 2 else (False,):
                rows = _rows(t.T if transposed else t, p)
                if rows is not None:
                    return View(key, rows, transposed)
        return None


def _base(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


def _rows(t: Tensor, p: Tensor) -> slice | None:
    """Which rows of `p` a view of the same memory shows, if it shows whole rows."""
    if t is p:
        return slice(0, len(p)) if p.ndim else None
    if t.dtype != p.dtype or t.ndim != p.ndim or t.ndim == 0 or t.shape[1:] != p.shape[1:] or p.stride(0) == 0:
        return None
    if any(a != b for a, b, size in zip(t.stride(), p.stride(), t.shape) if size > 1):
        return None
    start, rest = divmod(int(t.storage_offset() - p.storage_offset()), p.stride(0))
    return slice(start, start + len(t)) if rest == 0 and 0 <= start <= len(p) - len(t) else None
