"""Cross-entropy: a categorical distribution with the output as logits, with every option of
PyTorch's losses.

With weights `w`, smoothing `ε` and predictions `p = softmax(f)`, every kind of target makes a term
`-Σ_c q_c log p_c` with target weights `q` that need not sum to one. So its gradient is `h p - q`
and its Hessian `h (diag p - p pᵀ)`, where `h = Σ_c q_c`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.draws import categories
from curvlinops_plus.likelihood.likelihood import (
    Likelihood,
    Uniform,
    any_is,
    count_tensor,
    register_likelihood,
)


@register_likelihood(nn.CrossEntropyLoss)
class CrossEntropy(Likelihood):
    """Rules of `nn.CrossEntropyLoss`, with class indices [N, *d] or class probabilities [N, C, *d]
    as targets.

    `H = h (diag p - p pᵀ)`, draws `√h (p - ŷ)` with `ŷ` a one-hot draw from `p`. Here `h` is `(1-ε)
    w_y + ε mean(w)` for a class index (0 where it is `ignore_index`), and `Σ_c w_c ((1-ε) y_c +
    ε/C)` for probabilities.

    `B = √h L` with a column less than there are classes, as in a Cholesky decomposition: with `r_k
    = Σ_(c>k) p_c`, `L_kk = √(p_k r_k / (p_k + r_k))` and `L_ck = -L_kk p_c / r_k` for `c > k`.

    Raises:
        UnsupportedError: For weights that are negative, where the Hessian has no root.

    Example:
        >>> cross_entropy = CrossEntropy(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
        >>> F, Y = cross_entropy.canonical(torch.zeros(2, 2), torch.tensor([1, -100]), 2)
        >>> cross_entropy.scale(F, Y).flatten(), cross_entropy.count(F, Y)
        (tensor([3., 0.]), tensor(3., dtype=torch.float64))
    """

    loss_type = nn.CrossEntropyLoss
    class_axis = 1
    option_names = ("reduction", "weight", "ignore_index", "label_smoothing")
    _has_compared = False  # class indices of one batch with the number of classes

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        if loss.weight is not None and (loss.weight < 0).any():
            raise UnsupportedError(
                f"{self.name}(weight=...) has the negative weight {loss.weight.min().item():.3g}; "
                "weights must be >= 0."
            )

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        C = F.shape[-1]
        if self.loss.weight is not None and self.loss.weight.shape != (C,):
            raise ValueError(
                f"{self.name}(weight=...) has shape {list(self.loss.weight.shape)}, but the output "
                f"of shape {list(f_shape)} has {C} classes along axis {class_axis}."
            )
        index_shape = f_shape[:class_axis] + f_shape[class_axis + 1 :]
        if y.shape == f_shape and y.is_floating_point() and self.loss.ignore_index < 0:
            return super().canonical_target(y, F, f_shape, class_axis)
        if (
            y.shape != index_shape
            or y.is_floating_point()
            or y.is_complex()
            or y.dtype == torch.bool
        ):
            raise ValueError(
                f"{self.name}: an output of shape {list(f_shape)} with classes along axis "
                f"{class_axis} needs class indices of shape {list(index_shape)}, integers, or, "
                f"without ignore_index, class probabilities of shape {list(f_shape)}, "
                f"floating-point; got a target of shape {list(y.shape)}, {y.dtype}. {_LAST}"
            )
        y = y.long()
        wrong = ((y < 0) | (y >= C)) & (y != self.loss.ignore_index)
        # After the first batch the GPU asserts it, as in PyTorch's own loss: to read it is to wait.
        if y.is_cuda and self._has_compared:
            torch.ops.aten._assert_async.msg(
                ~wrong.any(), f"{self.name}: a target is no class index"
            )
        elif any_is(wrong, self.name):
            raise ValueError(
                f"{self.name}: the target holds the class index {y[wrong][0].item()}, but the "
                f"output has C = {C} classes, 0 to {C - 1} (ignore_index is "
                f"{self.loss.ignore_index})."
            )
        self._has_compared = True
        return y.reshape(F.shape[0], -1)

    # ------------------------------------------------------------------------------------- the loss

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return functional.cross_entropy(
            F.flatten(0, 1),
            Y.flatten(0, 1),
            weight=self._weight(F),
            ignore_index=self.loss.ignore_index,
            label_smoothing=self.loss.label_smoothing,
            reduction="none",
        ).view(F.shape[:2])

    def count(self, F: Tensor, Y: Tensor) -> Tensor:
        """Kept terms, or their summed class weights; every term, also with weights, for class
        probabilities.
        """
        if Y.ndim == 3:
            return count_tensor(F.shape[0] * F.shape[1], F.device)
        return self._class_weights(Y, torch.float64)[0].sum()

    def counts(self, F: Tensor, Y: Tensor) -> Tensor:
        if Y.ndim == 3:
            return count_tensor(F.shape[1], F.device).expand(len(F))
        return self._class_weights(Y, torch.float64)[0].sum(1)

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        smoothing = self.loss.label_smoothing
        weight = self._weight(F)
        C = F.shape[-1]
        g = self.scale(F, Y) * F.softmax(-1)
        if Y.ndim == 3:
            q = (1 - smoothing) * Y + smoothing / C
            return g - (q if weight is None else weight * q)
        term_weights, index = self._class_weights(Y, F.dtype)
        g = g.scatter_add(-1, index[..., None], -(1 - smoothing) * term_weights[..., None])
        if smoothing:
            q = smoothing / C if weight is None else smoothing / C * weight
            g = g - Y.ne(self.loss.ignore_index)[..., None].to(F.dtype) * q
        return g

    # ---------------------------------------------------------------------------------- its Hessian

    def scale(self, F: Tensor, Y: Tensor) -> Tensor:
        """`h [N, R, 1]`, computed without anything of size C for class indices."""
        smoothing = getattr(self.loss, "label_smoothing", 0.0)
        weight = self._weight(F)
        if Y.ndim == 3:
            q = (1 - smoothing) * Y + smoothing / F.shape[-1]
            return (q.sum(-1) if weight is None else q @ weight)[..., None]
        h = self._class_weights(Y, F.dtype)[0]
        if smoothing and weight is not None:
            h = (1 - smoothing) * h + smoothing * weight.mean() * Y.ne(self.loss.ignore_index)
        return h[..., None]

    def hessian_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        p = F.softmax(-1)
        # A constant is in the null space. Without the entry of the largest probability, nothing
        # cancels where that is nearly 1: of a fitted network a product would lose all the digits
        # that 1 - p has lost.
        top = p.argmax(-1, keepdim=True)
        V = V - V.gather(-1, top.expand(*V.shape[:-1], 1))
        hpV = self.scale(F, Y) * p * V
        return torch.addcmul(hpV, p, hpV.sum(-1, keepdim=True), value=-1)

    def num_columns(self, F: Tensor) -> int:
        """One less than there are classes: a constant is in the null space."""
        return max(F.shape[-1] - 1, 1)

    def hessian_root(self, F: Tensor, Y: Tensor) -> Tensor:
        return torch.stack([*self.hessian_root_columns(F, Y)])

    def hessian_root_columns(self, F: Tensor, Y: Tensor) -> Iterator[Tensor]:
        p, diagonal, rest = self._root_parts(F, Y)
        for k in range(self.num_columns(F)):
            column = torch.zeros_like(p)
            column[..., k] = diagonal[..., k]
            column[..., k + 1 :] = (
                p[..., k + 1 :] / rest[..., k : k + 1] * -diagonal[..., k : k + 1]
            )
            yield column

    def hessian_root_product(self, F: Tensor, Y: Tensor, U: Tensor) -> Tensor:
        p, diagonal, rest = self._root_parts(F, Y)
        above = functional.pad(_cumsum(diagonal / rest * U), (1, 0))[..., : p.shape[-1]]
        return functional.pad(diagonal * U, (0, p.shape[-1] - U.shape[-1])) - p * above

    def hessian_root_transpose_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        p, diagonal, rest = self._root_parts(F, Y)
        below = (
            _cumsum((p * V)[..., 1:].flip(-1)).flip(-1) if p.shape[-1] > 1 else torch.zeros_like(p)
        )
        return diagonal * V[..., : diagonal.shape[-1]] - diagonal / rest * below

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        N, R, _ = F.shape
        p = F.softmax(-1)
        root_h = self._root_scale(F, Y)
        labels = categories(p, uniform(N, R, num).to(F.device))
        drawn = labels.permute(2, 0, 1)[..., None]  # [num, N, R, 1]
        # A single draw is no copy: large vocabularies.
        mean = (root_h * p).expand(num, -1, -1, -1).contiguous()
        return mean.scatter_add_(-1, drawn, -root_h.expand(drawn.shape))

    # ---------------------------------------------------------------------------------------- parts

    def _weight(self, F: Tensor) -> Tensor | None:
        return None if self.loss.weight is None else self.loss.weight.detach().to(F)

    def _class_weights(self, Y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of class indices `Y [N, R]`: the weight of each term's own class, and indices; 0 where it
        is ignored.
        """
        keep = Y.ne(self.loss.ignore_index)
        index = Y.where(keep, 0)
        if self.loss.weight is None:
            return keep.to(dtype), index
        weight = self.loss.weight.detach().to(Y.device, dtype)
        return weight[index] * keep, index

    def _root_parts(self, F: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities `p`, the diagonal of the root, and the probabilities `r_k` of all classes
        after `k`.

        Where these are 0 they are 1, to be divided by: what is divided is 0.
        """
        p = F.softmax(-1)
        K = self.num_columns(F)
        if p.shape[-1] == 1:
            return p, torch.zeros_like(p), torch.ones_like(p)
        # From the last class on: what is small comes first.
        rest = _cumsum(p[..., 1:].flip(-1)).flip(-1)
        # Ratios before products: of a saturated output numbers are as small as numbers can be.
        ratio = (p[..., :K] / (p[..., :K] + rest)).nan_to_num(0.0)
        diagonal = self._root_scale(F, Y) * ratio.sqrt() * rest.sqrt()
        return p, diagonal, rest.where(rest > 0, 1.0)

    def _root_scale(self, F: Tensor, Y: Tensor) -> Tensor:
        """`√h [N, R, 1]`."""
        h = self.scale(F, Y)
        if Y.ndim == 3 and any_is(h < 0, self.name):
            raise UnsupportedError(
                f"{self.name}: a row of class probabilities sums (with weights and smoothing) to "
                f"{h.min().item():.3g}; below 0 the loss is not convex and its Hessian has no "
                "root. Are these logits? Give probabilities."
            )
        return h.sqrt()


_LAST = "For classes along the last axis, pass `output=lambda out: out.movedim(-1, 1)`."


def _cumsum(t: Tensor) -> Tensor:
    """Running sums along the last axis, which may be thousands of classes long."""
    return t.cumsum(-1, dtype=torch.float64).to(t.dtype)


@register_likelihood(nn.NLLLoss)
class NLL(CrossEntropy):
    """Rules of `nn.NLLLoss`, for a model that ends in a log-softmax: its output holds
    log-probabilities.

    The loss is linear in them, so its Hessian is zero, and the Fisher matrix `h (diag p - p pᵀ)`
    replaces it. In the logits it is the same matrix: all matrices are those of
    `nn.CrossEntropyLoss` without the log-softmax.

    Raises:
        UnsupportedError: (by `canonical`) If outputs are not log-probabilities.

    Example:
        >>> nll = NLL(nn.NLLLoss())
        >>> F, Y = nll.canonical(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]), 1)
        >>> nll.nll(F, Y), nll.hessian_product(F, Y, torch.tensor([[[1.0, 0.0]]]))
        (tensor([[0.6931]]), tensor([[[ 0.2500, -0.2500]]]))
    """

    loss_type = nn.NLLLoss
    option_names = ("reduction", "weight", "ignore_index")

    @property
    def no_ggn(self) -> str | None:
        return (
            "is linear in the log-probabilities, so its Hessian is 0; nn.CrossEntropyLoss (on "
            "logits) has another"
        )

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        total = F.logsumexp(-1)
        wrong = total.abs() > 0.05  # half precision rounds a logarithm by 2⁻⁸ of it
        if any_is(wrong, self.name):
            raise UnsupportedError(
                f"{self.name}: the exponentials of an output's {F.shape[-1]} numbers sum to "
                f"{total[wrong][0].exp().item():.3g} along axis {class_axis}; those of "
                f"log-probabilities sum to 1. Are these logits? Use nn.CrossEntropyLoss. {_LAST}"
            )
        if y.shape == f_shape:
            raise ValueError(
                f"{self.name} needs class indices without axis {class_axis}, got shape "
                f"{list(y.shape)}."
            )
        return super().canonical_target(y, F, f_shape, class_axis)

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        weight, index = self._class_weights(Y, F.dtype)
        return -weight * F.gather(-1, index[..., None])[..., 0]

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        weight, index = self._class_weights(Y, F.dtype)
        return torch.zeros_like(F).scatter(-1, index[..., None], -weight[..., None])
