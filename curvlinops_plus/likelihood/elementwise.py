"""Losses that are a sum over the numbers of the output, so that the Hessian of every term is
diagonal.

Squared errors, a normal distribution with variance 1/2; normal distributions with a predicted
variance; and Poisson distributions of rates or log-rates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.draws import counts, normals
from curvlinops_plus.likelihood.likelihood import (
    Likelihood,
    Uniform,
    any_is,
    count_tensor,
    register_likelihood,
)


class DiagonalLikelihood(Likelihood):
    """A likelihood whose Hessian `diag(b²)` has the root `diag(b)`; a subclass defines `nll` and
    `root_diagonal`.

    Example:
        >>> class Scaled(DiagonalLikelihood):
        ...     def nll(self, F, Y):
        ...         return (2 * (F - Y) ** 2).sum(-1)
        ...
        ...     def root_diagonal(self, F, Y):
        ...         return torch.full_like(F, 2.0)
        >>> F = torch.zeros(1, 1, 2)
        >>> Scaled().hessian_product(F, F, torch.ones(1, 1, 2))
        tensor([[[4., 4.]]])
    """

    @abstractmethod
    def root_diagonal(self, F: Tensor, Y: Tensor) -> Tensor:
        """Diagonal `b [N, R, C]` of the root."""

    def hessian_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        return self.root_diagonal(F, Y).square() * V

    def hessian_root(self, F: Tensor, Y: Tensor) -> Tensor:
        return torch.diag_embed(self.root_diagonal(F, Y)).movedim(-1, 0)

    def hessian_root_columns(self, F: Tensor, Y: Tensor) -> Iterator[Tensor]:
        diagonal = self.root_diagonal(F, Y)
        for k in range(F.shape[-1]):
            column = torch.zeros_like(F)
            column[..., k] = diagonal[..., k]
            yield column

    def hessian_root_product(self, F: Tensor, Y: Tensor, U: Tensor) -> Tensor:
        return self.root_diagonal(F, Y) * U

    def hessian_root_transpose_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        return self.root_diagonal(F, Y) * V


@register_likelihood(nn.MSELoss)
class MSE(DiagonalLikelihood):
    """Rules of `nn.MSELoss`: `H = 2·I`, `B = √2·I`, draws `√2·ε` with `ε ~ N(0, I)`. Outputs of any
    shape.

    Example:
        >>> mse = MSE(nn.MSELoss())
        >>> F, Y = mse.canonical(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 2.0]]), 1)
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


_SIDE_BY_SIDE = (
    "The output holds means, then variances, side by side on the last axis: for a model that "
    "returns (mean, variance), of one shape, output=lambda o: torch.cat(o, -1)."
)


@register_likelihood(nn.GaussianNLLLoss)
class GaussianNLL(DiagonalLikelihood):
    """Rules of `nn.GaussianNLLLoss` for an output that holds C means and then C variances along its
    last axis.

    The Hessian is indefinite and depends on the targets, so `hessian_product` and `hessian_root`
    are those of the Fisher matrix, `diag(1/s, 1/(2s²))` for variance `s` (at least the loss's
    `eps`). Draws are gradients at `y ~ N(m, s)`.

    Example:
        >>> gaussian = GaussianNLL(nn.GaussianNLLLoss())
        >>> F, Y = gaussian.canonical(torch.tensor([[0.0, 0.25]]), torch.tensor([[1.0]]), 1)
        >>> gaussian.hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[4.0000, 8.0000]]])
    """

    loss_type = nn.GaussianNLLLoss
    option_names = ("reduction", "full", "eps")

    @property
    def no_ggn(self) -> str | None:
        return "has a Hessian in mean and variance that is indefinite and depends on the targets"

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        if F.shape[-1] % 2:
            raise ValueError(
                f"{self.name} needs an output with C means and C variances along axis "
                f"{class_axis}, an even number; got shape {list(f_shape)}. {_SIDE_BY_SIDE}"
            )
        shape = torch.Size([*f_shape[:class_axis], F.shape[-1] // 2, *f_shape[class_axis + 1 :]])
        if y.shape != shape:
            raise ValueError(
                f"{self.name} needs a target of half the output along axis {class_axis}, "
                f"{list(shape)} for the output {list(f_shape)}, got {list(y.shape)}. "
                f"{_SIDE_BY_SIDE}"
            )
        Y = super().canonical_target(y, F, shape, class_axis)
        if any_is(F[..., Y.shape[-1] :] < 0, self.name):
            raise UnsupportedError(
                f"{self.name}: the output holds a negative variance; make it positive, as by exp."
            )
        return Y

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        mean, variance = F.chunk(2, -1)
        options = {"full": self.loss.full, "eps": self.loss.eps}
        return functional.gaussian_nll_loss(mean, Y, variance, reduction="none", **options).sum(-1)

    def count(self, F: Tensor, Y: Tensor) -> Tensor:
        """One for every mean."""
        return count_tensor(Y.numel(), Y.device)

    def root_diagonal(self, F: Tensor, Y: Tensor) -> Tensor:
        """Diagonal [N, R, 2C] of the root of the Fisher matrix."""
        variance = F.chunk(2, -1)[1].clamp(min=self.loss.eps)
        return torch.cat([variance.rsqrt(), variance.reciprocal() / 2**0.5], -1)

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        noise = normals(uniform(*Y.shape[:2], num, Y.shape[-1])).to(F).permute(2, 0, 1, 3)
        # Gradients (m - y)/s and (1 - (y - m)²/s)/(2s) at y = m + √s ε.
        return self.root_diagonal(F, Y) * torch.cat([-noise, (1 - noise.square()) / 2**0.5], -1)


@register_likelihood(nn.PoissonNLLLoss)
class PoissonNLL(DiagonalLikelihood):
    """Rules of `nn.PoissonNLLLoss` for outputs of any shape, with every option.

    Log-rates (`log_input=True`): `H = diag(λ)` with rates `λ = exp f`, draws `λ - k` with `k ~
    Poisson(λ)`.

    Rates (`log_input=False`): the loss is that of the rates `λ = f + eps`. Its Hessian `diag(y /
    λ²)` depends on the targets and is zero where nothing was counted, so the Fisher matrix `diag(1
    / λ)` replaces it; draws are `1 - k / λ`. `full` adds a constant.

    Raises:
        UnsupportedError: (by `canonical`) If a rate is not positive.

    Example:
        >>> poisson = PoissonNLL(nn.PoissonNLLLoss())
        >>> F, Y = poisson.canonical(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 7.0]]), 1)
        >>> poisson.hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[ 1.0000, 20.0855]]])
    """

    loss_type = nn.PoissonNLLLoss
    option_names = ("reduction", "log_input", "full", "eps")

    @property
    def no_ggn(self) -> str | None:
        if self.loss.log_input:
            return None
        return (
            "with log_input=False has a Hessian in the rates that depends on the targets; "
            "log_input=True has not"
        )

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        if not self.loss.log_input and any_is(F + self.loss.eps <= 0, self.name):
            raise UnsupportedError(
                f"{self.name}(log_input=False): the output holds the rate {F.min().item():.3g}; "
                "make rates positive, as by softplus, or predict log-rates with log_input=True."
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
        rates = F.double()
        rates = rates.exp() if self.loss.log_input else rates + self.loss.eps
        rates = rates.expand(num, N, R, C)
        drawn = counts(rates, uniform(N, R, num, C).to(rates).permute(2, 0, 1, 3))
        gradients = rates - drawn if self.loss.log_input else 1 - drawn / rates
        return gradients.to(F.dtype)
