"""Losses that no likelihood is registered for: the loss of each example, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.likelihood.likelihood import Likelihood
from curvlinops_plus.likelihood.sampling import scalar


class OfExamples(Likelihood):
    """Any loss as a sum over examples, all that an empirical Fisher needs: one term for each example.

    An example's loss is what the loss returns for the example alone, so that "mean" is the mean of these. The target
    `Y` is the batch's, with the shape of the output.

    Example:
        >>> loss = OfExamples(torch.nn.SmoothL1Loss())
        >>> F, Y = loss.canonical(torch.tensor([[0.0, 2.0]]), torch.zeros(1, 2), 1)
        >>> loss.grad(F, Y)
        tensor([[[0.0000, 0.5000]]])
    """

    def canonical(self, f: Tensor, y: Any, num_examples: int, class_axis: int | None = None) -> Any:
        return f.reshape(num_examples, 1, -1), (y, f.shape)

    def restore(self, v: Tensor, f_shape: Any, num_examples: int, class_axis: int | None = None) -> Tensor:
        return v.reshape(*v.shape[:-3], *f_shape)

    def nll(self, F: Tensor, Y: Any) -> Tensor:
        """The loss of each example [N, 1]. Cost: a call of the loss for each."""
        y, f_shape = Y
        f, rows = F.reshape(f_shape), f_shape[0] // len(F)
        parts = zip(f.split(rows), y.split(len(y) // len(F)), strict=True)
        return torch.stack([self.loss(*part) for part in parts]).view(-1, 1)

    def count(self, F: Tensor, Y: Any) -> Tensor:
        return scalar(len(F), F.device)

    def counts(self, F: Tensor, Y: Any) -> Tensor:
        return scalar(1, F.device).expand(len(F))

    def grad(self, F: Tensor, Y: Any) -> Tensor:
        with torch.enable_grad():
            F = F.detach().requires_grad_()
            return torch.autograd.grad(self.nll(F, Y).sum(), F)[0]
