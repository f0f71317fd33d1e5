"""Networks with a function in the middle that forward mode and backward passes may differentiate
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class _Square(Function):
    """x², without a rule for forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Once(Function):
    """x², which can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Net(nn.Module):
    """A network with a function in the middle."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(3, 4), nn.Linear(4, 2), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self, self.a(x)))


def without_tangents(net: nn.Module, h: Tensor) -> Tensor:
    return _Square.apply(h)  # type: ignore[no-any-return]


def stopped(net: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = h.sigmoid()
    return gate * h


def reversed_by_hook(net: nn.Module, h: Tensor) -> Tensor:
    h = h.tanh()
    if h.requires_grad:
        h.register_hook(lambda g: -g)
    return h


def clipped(net: nn.Module, h: Tensor) -> Tensor:
    h = h.tanh()
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return h
