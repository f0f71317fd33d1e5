"""Arithmetic of lists of vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["norms", "sum_of_products", "times"]

Tensors = Sequence[Tensor]


def times(tensors: Tensors, factors: Sequence[float]) -> list[Tensor]:
    """Each tensor times its factor."""
    return [factor * t for t, factor in zip(tensors, factors, strict=True)]


def norms(tensors: Tensors) -> Tensor:
    """The Euclidean norm of each, `[number]`."""
    return torch.stack(_foreach_norm(list(tensors)))


def sum_of_products(one: Tensors, two: Tensors) -> Tensor:
    """`⟨one, two⟩` of vectors, a 0-d tensor."""
    return torch.stack([a.dot(b) for a, b in zip(one, two, strict=True)]).sum()
