"""Poisson negative log-likelihood of rates or log-rates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.elementwise import DiagonalLikelihood
from curvlinops_plus.likelihood.likelihood import Uniform, register_likelihood
from curvlinops_plus.likelihood.sampling import counts, wide_dtype


@register_likelihood(nn.PoissonNLLLoss)
class PoissonNLL(DiagonalLikelihood):
    """Rules of `nn.PoissonNLLLoss` for outputs of any shape, with every option.

    Log-rates (`log_input=True`): `H = diag(λ)` with rates `λ = exp f`, draws `λ - k` with `k ~ Poisson(λ)`.

    Rates (`log_input=False`): the loss is that of the rates `λ = f + eps`. Its Hessian `diag(y / λ²)` depends on the
    targets and is zero where nothing was counted, so the Fisher matrix `diag(1 / λ)` replaces it; draws are
    `1 - k / λ`. `full` adds a constant.

    Raises:
        UnsupportedError: (by `canonical`) If a rate is not positive.

    Example:
        >>> poisson = PoissonNLL(nn.PoissonNLLLoss())
        >>> F, Y = poisson.canonical(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 7.0]]), num_examples=1)
        >>> poisson.hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[ 1.0000, 20.0855]]])
    """

    loss_type = nn.PoissonNLLLoss
    option_names = ("reduction", "log_input", "full", "eps")

    @property
    def no_ggn(self) -> str | None:
        if self.loss.log_input:
            return None
        return "with log_input=False has a Hessian in the rates that depends on the targets; log_input=True has not"

    def canonical_target(self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int) -> Tensor:
        if not self.loss.log_input and (F + self.loss.eps <= 0).any():
            raise UnsupportedError(
                f"{self.name}(log_input=False): the output holds the rate {F.min().item():.3g}; make rates positive, "
                "as by softplus, or predict log-rates with log_input=True."
            )
        return super().canonical_target(y, F, f_shape, class_axis)

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        options = {"log_input": self.loss.log_input, "full": self.loss.full, "eps": self.loss.eps}
        return functional.poisson_nll_loss(F, Y, reduction="none", **options).sum(-1)

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        return F.exp() - Y if self.loss.log_input else 1 - Y / (F + self.loss.eps)

    def root_diagonal(self, F: Tensor, Y: Tensor) -> Tensor:
        return (F / 2).exp() if self.loss.log_input else (F + self.loss.eps).rsqrt()

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        N, R, C = F.shape
        wide = F.to(wide_dtype(F.device))
        rates = (wide.exp() if self.loss.log_input else wide + self.loss.eps).expand(num, N, R, C)
        drawn = counts(rates, uniform(N, R, num, C).to(rates).permute(2, 0, 1, 3))
        return (rates - drawn if self.loss.log_input else 1 - drawn / rates).to(F.dtype)
