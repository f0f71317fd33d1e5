"""Arithmetic of lists of tensors, such as one for each parameter, with one call for a whole list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_add_, _foreach_mul, _foreach_norm, _foreach_sub  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["add_to", "difference", "norms", "sum_of_products", "times"]

Tensors = Sequence[Tensor]


def times(tensors: Tensors, factors: Sequence[float]) -> list[Tensor]:
    """Each tensor times its factor."""
    return list(_foreach_mul(list(tensors), list(factors)))


def difference(one: Tensors, two: Tensors) -> list[Tensor]:
    """`one - two`."""
    return list(_foreach_sub(list(one), list(two)))


def add_to(targets: Tensors, tensors: Tensors) -> None:
    """Add to tensors in place, in their own precision."""
    _foreach_add_(list(targets), list(tensors))


def norms(tensors: Tensors) -> Tensor:
    """The Euclidean norm of each, `[number]`."""
    return torch.stack(_foreach_norm(list(tensors)))


def sum_of_products(one: Tensors, two: Tensors) -> Tensor:
    """`⟨one, two⟩`, a 0-d tensor."""
    return torch.stack([a.flatten().dot(b.flatten()) for a, b in zip(one, two, strict=True)]).sum()
