"""Gaussian negative log-likelihood with a predicted variance: the Fisher matrix replaces its indefinite Hessian."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.elementwise import DiagonalLikelihood
from curvlinops_plus.likelihood.likelihood import Uniform, register_likelihood
from curvlinops_plus.likelihood.sampling import normals, scalar

_SIDE_BY_SIDE = (
    "The output holds means, then variances, side by side on the last axis: for a model that returns (mean, variance), "
    "of one shape, output=lambda o: torch.cat(o, -1)."
)


@register_likelihood(nn.GaussianNLLLoss)
class GaussianNLL(DiagonalLikelihood):
    """Rules of `nn.GaussianNLLLoss` for an output that holds C means and then C variances along its last axis.

    The Hessian is indefinite and depends on the targets, so `hessian_product` and `hessian_root` are those of the
    Fisher matrix, `diag(1/s, 1/(2s²))` for variance `s` (at least the loss's `eps`). Draws are gradients at
    `y ~ N(m, s)`.

    Example:
        >>> gaussian = GaussianNLL(nn.GaussianNLLLoss())
        >>> F, Y = gaussian.canonical(torch.tensor([[0.0, 0.25]]), torch.tensor([[1.0]]), num_examples=1)
        >>> gaussian.hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[4.0000, 8.0000]]])
    """

    loss_type = nn.GaussianNLLLoss
    option_names = ("reduction", "full", "eps")

    @property
    def no_ggn(self) -> str | None:
        return "has a Hessian in mean and variance that is indefinite and depends on the targets"

    def canonical_target(self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int) -> Tensor:
        if F.shape[-1] % 2:
            raise ValueError(
                f"{self.name} needs an output with C means and C variances along axis {class_axis}, an even number; "
                f"got shape {list(f_shape)}. {_SIDE_BY_SIDE}"
            )
        shape = torch.Size([*f_shape[:class_axis], F.shape[-1] // 2, *f_shape[class_axis + 1 :]])
        if y.shape != shape:
            raise ValueError(
                f"{self.name} needs a target of half the output along axis {class_axis}, {list(shape)} for the output "
                f"{list(f_shape)}, got {list(y.shape)}. {_SIDE_BY_SIDE}"
            )
        Y = super().canonical_target(y, F, shape, class_axis)
        if (F[..., Y.shape[-1] :] < 0).any():
            raise UnsupportedError(f"{self.name}: the output holds a negative variance; make it positive, as by exp.")
        return Y

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        mean, variance = F.chunk(2, -1)
        options = {"full": self.loss.full, "eps": self.loss.eps}
        return functional.gaussian_nll_loss(mean, Y, variance, reduction="none", **options).sum(-1)

    def count(self, F: Tensor, Y: Tensor) -> Tensor:
        """One for every mean."""
        return scalar(Y.numel(), Y.device)

    def root_diagonal(self, F: Tensor, Y: Tensor) -> Tensor:
        """Diagonal [N, R, 2C] of the root of the Fisher matrix."""
        variance = F.chunk(2, -1)[1].clamp(min=self.loss.eps)
        return torch.cat([variance.rsqrt(), variance.reciprocal() / 2**0.5], -1)

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        noise = normals(uniform(*Y.shape[:2], num, Y.shape[-1])).to(F).permute(2, 0, 1, 3)
        # Gradients (m - y)/s and (1 - (y - m)²/s)/(2s) at y = m + √s ε.
        return self.root_diagonal(F, Y) * torch.cat([-noise, (1 - noise.square()) / 2**0.5], -1)
