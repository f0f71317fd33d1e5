"""Calls of torch functions as they are made, and the parameters among their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from curvlinops_plus.contexts import entered
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.functions import AffineCall, Function

Receive = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]", "int | None"], Any]


@cache
def _body(original: Any) -> Callable[..., Any]:
    """A function of PyTorch that runs its body even while a mode is active.

    The original hands itself to the mode instead, which then sees one call and nothing of what
    happens inside.
    """
    private = {**original.__globals__, "has_torch_function": lambda *_: False}
    body = FunctionType(
        original.__code__, private, original.__name__, original.__defaults__, original.__closure__
    )
    body.__kwdefaults__ = original.__kwdefaults__
    return body


class FunctionCalls(TorchFunctionMode):
    """While active, shows every call of a torch function, those inside
    `F.multi_head_attention_forward` included.

    Costs a few microseconds per call.

    Args:
        receive: Called with function, arguments, keywords and, inside attention, where examples are
            on axis 1, the number of examples; calls the function, and returns the result that the
            model goes on with.
    """

    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self.receive = receive
        self.examples: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outer = self.examples
        # Activation checkpointing runs the model again inside of `grad`, and must see the same
        # graph.
        if func not in (F.multi_head_attention_forward, torch.autograd.grad):
            return self.receive(func, args, kwargs, self.examples)
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            if query.ndim != 3:
                raise UnsupportedError(
                    f"Multi-head attention got a query of shape {list(query.shape)}, expected "
                    "three dimensions with the examples on one of them. Add the example dimension "
                    "with `x[None]`."
                )
            self.examples = query.shape[1]
        try:
            with entered(self):
                return _body(func)(*args, **kwargs)
        finally:
            self.examples = outer


class View(NamedTuple):
    """Rows of a parameter, transposed or not.

    Attributes:
        matrices: Of a stack: the number of the matrix or vector that it is, or one for each row of
            what it meets; None for all of the stack.
    """

    key: str
    rows: slice
    transposed: bool
    matrices: int | Tensor | None = None


def function_of(product: AffineCall, weight: View | None, bias: View | None) -> Function | None:
    """What a product is of the parameters that it reads; None if it is no product with a matrix."""
    function: Function | None = product.function
    if weight is None:
        if bias is not None and bias.matrices is not None:
            return replace(function, stacked=True)
        # One vector for each row is none for all of them.
        return function if product.bias is None or product.bias.ndim == 1 else None
    if weight.transposed:
        function = function.transpose()
    is_stack = weight.matrices is not None or product.of_stack
    if function is None or not is_stack:
        return function
    return replace(function, stacked=True)


class ParameterViews:
    """Finds the parameter that a tensor is, or is a view of.

    Args:
        params: Key to parameter, in the tensors that the model reads.

    Example:
        >>> import torch
        >>> W = torch.ones(4, 3)
        >>> views = ParameterViews({"W": W})
        >>> views.find(W[1:3].T)
        View(key='W', rows=slice(1, 3, None), transposed=True, matrices=None)
        >>> views.find(W[::2]), views.key(W[::2]), views.key(2 * W)
        (None, 'W', None)
        >>> stack = torch.ones(4, 3, 2)
        >>> ParameterViews({"W": stack}).find(stack[1].T)
        View(key='W', rows=slice(0, 3, None), transposed=True, matrices=1)
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._keys = {id(p): key for key, p in params.items()}
        #: What was selected from stacks, `W[index]`: keys and indices.
        self._selected = WeakTensorKeyDictionary()

    def select(self, function: Any, args: Sequence[Any], out: Any) -> None:
        """Notice a selection `W[index]` of matrices or vectors of a stack, one for each row."""
        if function not in _SELECT or len(args) < 2 or not isinstance(args[0], Tensor):
            return
        key = self._keys.get(id(args[0]))
        index = args[-1]
        if key is None or not isinstance(index, Tensor) or index.dtype == torch.bool:
            return
        on_first_axis = args[1] is index or (isinstance(args[1], int) and args[1] == 0)
        if index.ndim == 1 and args[0].ndim in (2, 3) and on_first_axis:
            self._selected[out] = (key, index)

    def selects(self, index: Any) -> bool:
        """Whether matrices are selected by this index."""
        selected = self._selected.values()
        return any(index is i for key, i in selected if self._params[key].ndim == 3)

    def key(self, t: Tensor) -> str | None:
        """Key of the parameter that a tensor shows numbers of."""
        if id(t) in self._keys:
            return self._keys[id(t)]
        if len(self._selected):
            selected = self._selected.get(t if t._base is None else t._base)
            if selected is not None:
                return selected[0]
        return None if t._base is None else self._keys.get(id(t._base))

    def whole(self, t: Tensor) -> str | None:
        """Key of the parameter that a tensor is; None of views, too."""
        return self._keys.get(id(t))

    def find(self, t: Tensor | None) -> View | None:
        """The parameter whose rows a tensor is; None if it is none, or any other view."""
        key = None if t is None else self.key(t)
        if t is None or key is None:
            return None
        p = self._params[key]
        if len(self._selected) and (selection := self._selection(t)) is not None:
            return selection
        if t is p:
            return View(key, slice(0, len(p)), False) if p.ndim else None
        if p.requires_grad and t.grad_fn is None and torch.is_grad_enabled():
            # Made under `no_grad`: nothing comes back to the parameter, though it requires a
            # gradient.
            return None
        rows = _rows_of(t, p)
        if rows is not None:
            return View(key, rows, False)
        if t.ndim == p.ndim == 3:
            rows = _rows_of(t.mT, p)
            return None if rows is None else View(key, rows, True)
        if t.ndim == p.ndim - 1:
            return self._matrix(key, t, p)
        rows = _rows_of(t.T, p) if t.ndim == 2 else None
        return None if rows is None else View(key, rows, True)

    def _matrix(self, key: str, t: Tensor, p: Tensor) -> View | None:
        """The matrix of a stack that a tensor is, or the vector."""
        offset = int(t.storage_offset() - p.storage_offset())
        number = offset // max(1, p.stride(0))
        if p.ndim not in (2, 3) or not 0 <= number < len(p):
            return None
        matrix = p.detach()[number]
        rows = _rows_of(t, matrix)
        if rows is not None:
            return View(key, rows, False, number)
        rows = _rows_of(t.T, matrix) if t.ndim == 2 else None
        return None if rows is None else View(key, rows, True, number)

    def _selection(self, t: Tensor) -> View | None:
        """What was selected from a stack, or its transpose."""
        base = t if t._base is None else t._base
        selected = self._selected.get(base)
        if selected is None:
            return None
        key, index = selected
        whole = slice(0, len(index))
        transposed = base.ndim == 3 and _rows_of(t, base) is None
        if _rows_of(t.mT if transposed else t, base) != whole:
            return None
        return View(key, slice(0, self._params[key].shape[1]), transposed, index)


_SELECT = {Tensor.__getitem__, torch.index_select, Tensor.index_select}


def _rows_of(view: Tensor, p: Tensor) -> slice | None:
    """The rows of a parameter that a view of it shows, None if it shows something else."""
    if view.dtype != p.dtype or not view.ndim == p.ndim > 0 or view.shape[1:] != p.shape[1:]:
        return None
    strides = zip(view.stride(), p.stride(), view.shape)
    if any(stride != of_parameter for stride, of_parameter, size in strides if size > 1):
        return None
    offset = int(view.storage_offset() - p.storage_offset())
    start, remainder = divmod(offset, max(1, p.stride(0)))
    if remainder or not 0 <= start <= len(p) - len(view):
        return None
    return slice(start, start + len(view))
