"""Squared error: a normal distribution around the output, with variance 1/2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.likelihood.elementwise import DiagonalLikelihood
from curvlinops_plus.likelihood.likelihood import Uniform, register_likelihood
from curvlinops_plus.likelihood.sampling import normals


@register_likelihood(nn.MSELoss)
class MSE(DiagonalLikelihood):
    """Rules of `nn.MSELoss`: `H = 2·I`, `B = √2·I`, draws `√2·ε` with `ε ~ N(0, I)`. Outputs of any shape.

    Example:
        >>> mse = MSE(nn.MSELoss())
        >>> F, Y = mse.canonical(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 2.0]]), num_examples=1)
        >>> mse.nll(F, Y), mse.grad(F, Y), mse.count(F, Y)
        (tensor([[1.]]), tensor([[[2., 0.]]]), tensor(2., dtype=torch.float64))
    """

    loss_type = nn.MSELoss

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return functional.mse_loss(F, Y, reduction="none").sum(-1)

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        return 2 * (F - Y)

    def hessian_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        return 2 * V

    def root_diagonal(self, F: Tensor, Y: Tensor) -> Tensor:
        return torch.full_like(F, 2**0.5)

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        N, R, C = F.shape
        return 2**0.5 * normals(uniform(N, R, num, C)).to(F).permute(2, 0, 1, 3)
