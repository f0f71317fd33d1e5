"""Derivatives of a product in its vector, when the product itself runs outside autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, X: Tensor, product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.product, ctx.adjoint = product, adjoint
        return product(X.detach())  # which may turn gradients on

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return linear_in(grads[0], ctx.adjoint, ctx.product), None, None


def linear_in(X: Tensor, product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """`product(X)`, whose derivative in `X` is what `adjoint` multiplies with, to any order.

    Args:
        X: [n, K].
        product: Linear in its argument; its own graph is not used.

    Example:
        >>> x = torch.ones(2, 1, requires_grad=True)
        >>> linear_in(x, lambda X: 3 * X, lambda Y: 3 * Y).sum().backward()
        >>> x.grad
        tensor([[3.],
                [3.]])
    """
    return _Linear.apply(X, product, adjoint)  # type: ignore[return-value]
