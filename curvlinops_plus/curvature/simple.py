"""Blocks made of per-example gradients alone: exact diagonal and exact full blocks, for any layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from curvlinops_plus.curvature.accumulate import Accumulator, needs_gradients
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import Dense, Diagonal, LinearOperator, Structure
from curvlinops_plus.linalg.numerics import gram
from curvlinops_plus.risk import Group, Layer, LayerBatch, Totals

__all__ = ["DiagonalBlock", "FullBlock"]


class DiagonalBlock(Accumulator):
    """The exact diagonal of a layer's block: `c Σ_v Σ_n J²`, entry by entry. Arguments as for `Accumulator`.

    Cost: one sweep; per-example gradients in pieces of a few megabytes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.Linear(1, 1), nn.MSELoss(), [(torch.tensor([[2.0]]), torch.zeros(1, 1))])
        >>> curvature(risk, DiagonalBlock).diagonal().round(decimals=3)  # 2 x², 2
        tensor([8., 2.])
    """

    def update(self, seen: LayerBatch) -> None:
        if seen.num_vectors == 0:
            raise needs_gradients(self)
        self.add("diagonal", seen.squared_grads())

    def finish(self) -> LinearOperator:
        return Diagonal(self.value("diagonal").flatten())


class FullBlock(Accumulator):
    """The exact block of a layer: `c Σ_v Σ_n vec(J) vec(J)ᵀ`. Arguments as for `Accumulator`, and:

    Args:
        max_bytes: The largest block that is built, 2 GiB by default.

    Raises:
        UnsupportedError: If the block would be larger.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.Linear(1, 1), nn.MSELoss(), [(torch.tensor([[2.0]]), torch.zeros(1, 1))])
        >>> curvature(risk, FullBlock).to_dense().round(decimals=3)
        tensor([[8., 4.],
                [4., 2.]])
    """

    def __init__(
        self, layer: Layer, group: Group | None, scale: Callable[[Totals], Tensor | float], max_bytes: int = 2 * 2**30
    ) -> None:
        super().__init__(layer, group, scale)
        keys = layer.params if group is None else group.keys
        dim = sum(layer.params[key].numel() for key in keys)
        size = dim * dim * layer.accumulation_dtype.itemsize
        if size > max_bytes:
            raise UnsupportedError(
                f"{layer.title}: its full block is {dim} x {dim}, {size / 2**30:.1f} GiB, above "
                f"max_bytes={max_bytes}. Use DiagonalBlock, KFAC or EKFAC "
                f"for this layer, or FullBlock.using(max_bytes=...)."
            )

    def update(self, seen: LayerBatch) -> None:
        if seen.num_vectors == 0:
            raise needs_gradients(self)
        self.add("matrix", gram(seen.per_example_grads.flatten(2).flatten(0, 1)))

    def finish(self) -> LinearOperator:
        return Dense(self.value("matrix"), Structure.PSD)
