"""Binary cross-entropy: independent Bernoulli distributions, with every option of PyTorch's losses.

A number `f` with target `y` costs `-weight (pos_weight y log p + (1 - y) log (1 - p))`, where `p =
sigmoid(f)`. The two weights broadcast with the target's own shape, which the canonical format does
not keep, so `canonical` includes them: its target is the pair `(weight pos_weight y, weight (1 -
y))`, called `(yes, no)` here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.elementwise import DiagonalLikelihood
from curvlinops_plus.likelihood.likelihood import Uniform, any_is, register_likelihood


@register_likelihood(nn.BCEWithLogitsLoss)
class BCEWithLogits(DiagonalLikelihood):
    """Rules of `nn.BCEWithLogitsLoss`, with hard or soft targets of the output's shape.

    `H = diag(h p (1-p))`, `B` its root, draws `√h (p - ŷ)` with `ŷ ~ Bernoulli(p)`, `p =
    sigmoid(f)`, and `h = weight (pos_weight y + 1 - y)`. The canonical target is `Y [N, R, C, 2]`,
    see above.

    Raises:
        UnsupportedError: (by `canonical`) If `weight` or `pos_weight` has one entry per example of
            one certain batch.

    Example:
        >>> bce = BCEWithLogits(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1.0])))
        >>> F, Y = bce.canonical(torch.zeros(1, 2), torch.ones(1, 2), num_examples=1)
        >>> bce.hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[0.7500, 0.2500]]])
    """

    loss_type = nn.BCEWithLogitsLoss
    option_names = ("reduction", "weight", "pos_weight")

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        target = super().canonical_target  # checks the shape
        no = target(1 - y.to(F.dtype), F, f_shape, class_axis)
        yes = target(y, F, f_shape, class_axis)
        pos_weight = self._expanded("pos_weight", y, F)
        if pos_weight is not None:
            yes = yes * target(pos_weight, F, f_shape, class_axis)
        Y = torch.stack([yes, no], -1)
        weight = self._expanded("weight", y, F)
        return Y if weight is None else Y * target(weight, F, f_shape, class_axis)[..., None]

    def _expanded(self, option: str, y: Tensor, F: Tensor) -> Tensor | None:
        """The option `weight` or `pos_weight` of the loss, expanded to the shape of the target."""
        value = getattr(self.loss, option, None)
        if value is None:
            return None
        shape = f"{self.name}({option}=...) of shape {list(value.shape)}"
        try:
            expanded = value.detach().to(F).expand(y.shape)
        except RuntimeError as error:
            raise ValueError(
                f"{shape} can't be broadcast to the target's shape {list(y.shape)}."
            ) from error
        if value.ndim == y.ndim and value.shape[0] > 1:
            raise UnsupportedError(
                f"{shape} has one entry per example of a certain batch, so it means something else "
                "in every other one; use entries per output (trailing axes), or EmpiricalRisk(..., "
                "weight=...) for weights of examples."
            )
        return expanded

    # ------------------------------------------------------------------------------------- the loss

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        yes, no = Y.unbind(-1)
        return -(yes * functional.logsigmoid(F) + no * functional.logsigmoid(-F)).sum(-1)

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        yes, no = Y.unbind(-1)
        return no * F.sigmoid() - yes * (-F).sigmoid()

    # ---------------------------------------------------------------------------------- its Hessian

    def scale(self, F: Tensor, Y: Tensor) -> Tensor:
        """`h [N, R, C]`."""
        return Y.sum(-1)

    def hessian_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        return self.scale(F, Y) * self._fisher(F) * V

    def root_diagonal(self, F: Tensor, Y: Tensor) -> Tensor:
        return self._root_scale(F, Y) * self._fisher(F).sqrt()

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        N, R, C = F.shape
        p = self._probabilities(F)
        drawn = uniform(N, R, num, C).to(F.device).permute(2, 0, 1, 3) < p
        return self._root_scale(F, Y) * (p - drawn.to(F.dtype))

    def _root_scale(self, F: Tensor, Y: Tensor) -> Tensor:
        h = self.scale(F, Y)
        if any_is(h < 0, self.name):
            raise UnsupportedError(
                f"{self.name}: weight · (pos_weight · y + 1 - y) is {h.min().item():.3g} for some "
                "target y; below 0 the loss is not convex and its Hessian has no root. Targets "
                "must be between 0 and 1, and weights >= 0."
            )
        return h.sqrt()

    def _probabilities(self, F: Tensor) -> Tensor:
        return F.sigmoid()

    def _fisher(self, F: Tensor) -> Tensor:
        """Of one Bernoulli distribution, `p (1 - p)` in its logit, without the cancellation of `1 -
        p`.
        """
        return F.sigmoid() * (-F).sigmoid()


@register_likelihood(nn.BCELoss)
class BCE(BCEWithLogits):
    """Rules of `nn.BCELoss`, for a model that ends in a sigmoid: its output holds probabilities
    `p`.

    The Hessian in `p` depends on the target, so the Fisher matrix `diag(h / p (1-p))` replaces it:
    in the logits it is the Hessian `diag(h p (1-p))`, and all matrices are those of
    `nn.BCEWithLogitsLoss` without the sigmoid. That loss is the better choice: a sigmoid that
    rounds to 0 or 1 loses its gradient. As in PyTorch, `p (1-p)` is at least 1e-12 where it
    divides, and logarithms are at least -100.

    Raises:
        UnsupportedError: (by `canonical`) If outputs are not probabilities, or as for
            `BCEWithLogits`.

    Example:
        >>> bce = BCE(nn.BCELoss())
        >>> F, Y = bce.canonical(torch.tensor([[0.5, 0.2]]), torch.tensor([[1.0, 0.0]]), 1)
        >>> bce.hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[4.0000, 6.2500]]])
    """

    loss_type = nn.BCELoss
    option_names = ("reduction", "weight")

    @property
    def no_ggn(self) -> str | None:
        return (
            "has a Hessian in the probabilities that depends on the target; nn.BCEWithLogitsLoss "
            "(on logits) has not"
        )

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        if any_is((F < 0) | (F > 1), self.name):
            raise UnsupportedError(
                f"{self.name}: the output holds numbers from {F.min().item():.3g} to "
                f"{F.max().item():.3g}; probabilities are between 0 and 1. Are these logits? Use "
                "nn.BCEWithLogitsLoss."
            )
        return super().canonical_target(y, F, f_shape, class_axis)

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        yes, no = Y.unbind(-1)
        ones = torch.ones_like(F)
        of_yes, of_no = (
            functional.binary_cross_entropy(F, y, reduction="none") for y in (ones, 0 * ones)
        )
        return (yes * of_yes + no * of_no).sum(-1)

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        yes, no = Y.unbind(-1)
        return (no * F - yes * (1 - F)) * self._fisher(F)

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        return super().draw(F, Y, num, uniform) * self._fisher(F)

    def _probabilities(self, F: Tensor) -> Tensor:
        return F

    def _fisher(self, F: Tensor) -> Tensor:
        return (F * (1 - F)).clamp(min=1e-12).reciprocal()
