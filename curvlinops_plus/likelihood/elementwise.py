"""Losses that are a sum over the numbers of the output: the Hessian of every term is diagonal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from curvlinops_plus.likelihood.likelihood import Likelihood


class DiagonalLikelihood(Likelihood):
    """A likelihood whose Hessian `diag(b²)` has the root `diag(b)`; a subclass defines `nll` and `root_diagonal`.

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
