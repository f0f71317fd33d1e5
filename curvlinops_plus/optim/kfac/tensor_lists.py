"""Arithmetic of lists of vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

Tensors = Sequence[Tensor]


def times(tensors: Tensors, factors: Sequence[float]) -> list[Tensor]:
    """Each tensor times its factor."""
    return [factor * t for t, factor in zip(tensors, factors, strict=True)]


def total(numbers: Tensors) -> float:
    """The sum of 0-d tensors."""
    return float(numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).sum())


def norm(tensors: Tensors) -> float:
    """The Euclidean norm of all of them."""
    found = _foreach_norm(list(tensors))
    return float(found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found)))


def products(one: Tensors, two: Tensors) -> list[Tensor]:
    """`⟨a, b⟩` of each pair of vectors, 0-d tensors."""
    return [a.dot(b) for a, b in zip(one, two, strict=True)]
