"""Roots `B` of a matrix `M = B Bᵀ` over the outputs of one batch: the loss Hessian, or an estimate.

Shapes: N examples, R loss terms of each, C numbers per term, K columns of the root. `B` is block-diagonal over examples
and multiplies `[N, R', K]`: R' = R where every loss term has columns of its own, R' = 1 where a column belongs to all
terms of an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.likelihood import Likelihood


class Root(ABC):
    """A root of a matrix over the outputs `[N, R, C]` of one loss on one batch.

    Attributes:
        per_term: Whether the matrix has no entries between the loss terms of an example, or between losses.
    """

    per_term: bool

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """What it multiplies, `[N, R', K]`."""

    @abstractmethod
    def product(self, U: Tensor) -> Tensor:  # [*lead, N, R', K] -> [*lead, N, R, C]
        """`B u`."""

    @abstractmethod
    def transpose_product(self, V: Tensor) -> Tensor:  # [*lead, N, R, C] -> [*lead, N, R', K]
        """`Bᵀ v`."""

    def outer_product(self, V: Tensor) -> Tensor:  # [*lead, N, R, C] -> [*lead, N, R, C]
        """`B Bᵀ v`."""
        return self.product(self.transpose_product(V))


class ColumnsRoot(Root):
    """A root given by its columns.

    Args:
        columns: The columns, `[K, N, R, C]`.
        per_term: Whether each loss term has columns of its own, which are the parts of these.

    Example:
        >>> root = ColumnsRoot(torch.tensor([[[[1.0], [2.0]]]]), per_term=False)  # N = 1, R = 2, C = 1
        >>> root.outer_product(torch.tensor([[[1.0], [1.0]]]))  # [1, 2] ([1, 2] · [1, 1])
        tensor([[[3.],
                 [6.]]])
    """

    def __init__(self, columns: Tensor, per_term: bool) -> None:
        self.columns, self.per_term = columns, per_term
        self._axes = (-1,) if per_term else (-2, -1)

    @property
    def shape(self) -> torch.Size:
        K, N, R, _ = self.columns.shape
        return torch.Size((N, R if self.per_term else 1, K))

    def product(self, U: Tensor) -> Tensor:
        total = torch.zeros(*U.shape[:-3], *self.columns.shape[1:], dtype=self.columns.dtype, device=U.device)
        for k, column in enumerate(self.columns):
            total += U[..., k : k + 1] * column
        return total

    def transpose_product(self, V: Tensor) -> Tensor:
        return torch.cat([(column * V).sum(self._axes, keepdim=True) for column in self.columns], -1)


class HessianRoot(Root):
    """The root of the loss Hessian that a likelihood knows; nothing is computed before it multiplies."""

    per_term = True

    def __init__(self, likelihood: Likelihood, F: Tensor, Y: Any) -> None:
        self.likelihood, self.F, self.Y = likelihood, F, Y

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.F.shape[:2], self.likelihood.num_columns(self.F)))

    def product(self, U: Tensor) -> Tensor:
        return self.likelihood.hessian_root_product(self.F, self.Y, U)

    def transpose_product(self, V: Tensor) -> Tensor:
        return self.likelihood.hessian_root_transpose_product(self.F, self.Y, V)

    def outer_product(self, V: Tensor) -> Tensor:
        return self.likelihood.hessian_product(self.F, self.Y, V)


class WeightedRoot(Root):
    """The root of a matrix whose part for each example is multiplied by a weight.

    Args:
        root: That of the matrix without weights.
    """

    def __init__(self, root: Root, weight: Tensor) -> None:
        self.root, self.factors, self.per_term = root, weight.sqrt()[:, None, None], root.per_term

    @property
    def shape(self) -> torch.Size:
        return self.root.shape

    def product(self, U: Tensor) -> Tensor:
        return self.factors * self.root.product(U)

    def transpose_product(self, V: Tensor) -> Tensor:
        return self.root.transpose_product(self.factors * V)

    def outer_product(self, V: Tensor) -> Tensor:
        return self.factors * self.root.outer_product(self.factors * V)
