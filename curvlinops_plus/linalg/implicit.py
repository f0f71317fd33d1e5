"""Derivatives of a product in its vector, when the product itself runs outside autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError


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


class _Transformed(_Linear):
    """The same under transforms of `torch.func`, for which PyTorch looks at signatures in each call."""

    @staticmethod
    def forward(  # type: ignore[override]
        X: Tensor, product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        try:
            return product(X.detach())
        except RuntimeError as error:
            if "Nested forward mode" not in str(error):
                raise
            raise UnsupportedError(
                "Products of this operator use forward mode themselves, which PyTorch can't nest. Take "
                "torch.func.grad, vjp, jacrev or vmap instead of jvp, jacfwd and hessian (jacrev(grad(f)) is the "
                "same matrix)."
            ) from error

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.product, ctx.adjoint = inputs

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return linear_in(tangents[0], ctx.product, ctx.adjoint)

    @staticmethod
    def vmap(info: Any, in_dims: Any, X: Tensor, product: Any, adjoint: Any) -> Any:
        X = X.movedim(in_dims[0], -1)  # [n, K, B]
        found = linear_in(X.flatten(1), product, adjoint)
        return found.unflatten(1, X.shape[1:]), 2


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
    kind = _Transformed if torch._C._are_functorch_transforms_active() else _Linear
    return kind.apply(X, product, adjoint)  # type: ignore[return-value]
