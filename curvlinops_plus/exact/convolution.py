"""Convolutions that take less work than PyTorch's own to differentiate twice by their weights.

The first of two backward passes is there for its graph: nobody reads the gradients of the weights, and each costs what
the layer does. In the second one PyTorch takes whole images for kernels, which is slow unless they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from curvlinops_plus.layer.weight_gradient import weight_gradient

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class EdgesOnly:
    """A backward pass of which only the graph is needed, and the convolutions whose weights it is taken by.

    Args:
        params: Leaves of the graph, by which it is taken.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self._leaves = params, {id(p) for p in params}
        self._task: int | None = None

    @property
    def replaced(self) -> dict[Any, Callable[..., Tensor | None]]:
        """What stands for PyTorch's functions, as in `Operations`."""
        return dict.fromkeys(_CONVOLUTIONS, self._convolution)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Context of that backward pass, from the loss: gradients of weights may be any numbers in it."""

        def begins(gradient: Tensor) -> None:
            self._task = torch._C._current_graph_task_id()

        handle = loss.register_hook(begins)
        try:
            yield
        finally:
            handle.remove()
            self._task = None

    def is_read(self, weight: Tensor) -> bool:
        """Whether anything reads the numbers of a weight's gradient in the backward pass that is running."""
        # Backward passes inside of it, or inside of the model, have other numbers.
        if self._task is None or torch._C._current_graph_task_id() != self._task:
            return True
        return bool(weight._backward_hooks) or torch.is_anomaly_enabled()

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor | None:
        """A convolution with a parameter as weight; None for what is left to PyTorch."""
        n = weight.ndim - 2
        plain = type(input) is Tensor and input.layout == torch.strided and not forward_ad._current_level >= 0
        if not plain or id(weight) not in self._leaves or not torch.is_grad_enabled():
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(input):  # pyright: ignore[reportAttributeAccessIssue]
            return None
        fits = input.ndim == n + 2 and input.numel() and input.dtype == weight.dtype and weight.is_floating_point()
        if not fits or isinstance(padding, str) or torch.is_autocast_enabled(input.device.type):
            return None
        strides, pads, gaps = ((a,) * n if isinstance(a, int) else tuple(a) for a in (stride, padding, dilation))
        return _Convolution.apply(_Options(self, strides, pads, gaps, groups), input, weight, bias)


def is_own_node(node: Any) -> bool:
    """Whether a node of a graph was made by these convolutions, which are linear as PyTorch's are."""
    return getattr(node, "_forward_cls", None) in (_Convolution, _Backward)


class _Options(NamedTuple):
    edges: EdgesOnly
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        _, stride, padding, dilation, groups = self
        return torch.convolution(x, w, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    def to_input(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        _, stride, padding, dilation, groups = self
        options = (None, stride, padding, dilation, False, (0,) * len(stride), groups, (True, False, False))
        return torch.ops.aten.convolution_backward(g, x, w, *options)[0]

    def to_weight(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return weight_gradient(x, g, w.shape, self.stride, self.padding, self.dilation, self.groups)


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(x, w)
        return options.output(x, w, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (_, of_input, _, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        to_bias = g.sum((0, *range(2, g.ndim))) if of_bias else None
        if torch.is_grad_enabled():
            return None, *_Backward.apply(ctx.options, g, x, w, of_input), to_bias
        return None, *_gradients(ctx.options, g, x, w, of_input, True), to_bias


class _Backward(Function):
    """What goes back to input and weight, as a function of `g`, the input and the weight."""

    @staticmethod
    def forward(ctx: Any, options: _Options, g: Tensor, x: Tensor, w: Tensor, of_input: bool) -> Any:
        ctx.options = options
        ctx.save_for_backward(g, x, w)
        ctx.set_materialize_grads(False)
        return _gradients(options, g, x, w, of_input, options.edges.is_read(w))

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, ...]:
        (g, x, w), options = ctx.saved_tensors, ctx.options
        to_g = to_x = to_w = None
        if u is not None:
            to_g, to_w = options.output(u, w), options.to_weight(g, u, w)
        if v is not None:
            to_g = options.output(x, v) if to_g is None else to_g + options.output(x, v)
            to_x = options.to_input(g, x, v) if ctx.needs_input_grad[2] else None
        return None, to_g, to_x, to_w, None


def _gradients(
    options: _Options, g: Tensor, x: Tensor, w: Tensor, of_input: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients of input and weight; that of the weight is NaN where nobody reads it."""
    to_w = options.to_weight(g, x, w) if of_weight else w.new_full((), torch.nan).expand(w.shape)
    return options.to_input(g, x, w) if of_input else None, to_w
