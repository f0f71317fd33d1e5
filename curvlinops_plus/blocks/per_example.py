"""Blocks for any layer: exact diagonal and full blocks from per-example gradients, and a multiple of the identity."""

from __future__ import annotations

from math import isfinite

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, Needs
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import Dense, Diagonal, IdentityLinearOperator, LinearOperator, Structure
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.risk import Group, Layer, LayerBatch


def _numbers(accumulator: Accumulator) -> int:
    """How many numbers the parameters of a block have."""
    return sum(group.layout.dim for group in accumulator.groups)


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

    needs_gradients = True

    def needs(self) -> Needs:
        size = _numbers(self) * self.layer.accumulation_dtype.itemsize
        return Needs(size, size)

    def update(self, batch: LayerBatch) -> None:
        self.add("diagonal", batch.squared_grads())

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

    needs_gradients = True

    def __init__(self, layer: Layer, group: Group | None, scale: LossScale, max_bytes: int = 2 * 2**30) -> None:
        super().__init__(layer, group, scale)
        dim = _numbers(self)
        size = dim * dim * layer.accumulation_dtype.itemsize
        if size > max_bytes:
            raise UnsupportedError(
                f"{layer.title}: its full block is {dim} x {dim}, {size / 2**30:.1f} GiB, above "
                f"max_bytes={max_bytes}. Use DiagonalBlock, KFAC or EKFAC "
                f"for this layer, or FullBlock.using(max_bytes=...)."
            )

    def needs(self) -> Needs:
        size = _numbers(self) ** 2 * self.layer.accumulation_dtype.itemsize
        return Needs(2 * size, size)  # the product of one batch is added to the sum

    def update(self, batch: LayerBatch) -> None:
        self.add("matrix", gram(batch.per_example_grads.flatten(2).flatten(0, 1)))

    def finish(self) -> LinearOperator:
        return Dense(self.value("matrix"), Structure.PSD)


class ScaledIdentity(Accumulator):
    """The identity times a number, whatever the data: a layer with this block is preconditioned by nothing.

    Arguments as for `Accumulator`, and:

    Args:
        scale: The number, 1 by default. (The factor of the loss, which other blocks carry, does not enter.)

    Raises:
        ValueError: If `scale` is negative or not finite.

    Cost: none; no gradients are needed, so it works with `ForwardOnly()` for every layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.LayerNorm(2), nn.MSELoss(), [(torch.rand(3, 2), torch.zeros(3, 2))])
        >>> curvature(risk, ScaledIdentity.using(scale=0.5)).inverse(damping=0.5).diagonal()
        tensor([1., 1., 1., 1.])
    """

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        of_loss: LossScale,
        scale: float = 1.0,
    ) -> None:
        super().__init__(layer, group, of_loss)
        if not (scale >= 0 and isfinite(scale)):
            raise ValueError(f"ScaledIdentity: expected a finite scale of at least 0, got {scale}.")
        self.number = float(scale)

    def needs(self) -> Needs:
        return Needs(0, 0)

    def update(self, batch: LayerBatch) -> None:
        pass

    def finish(self) -> LinearOperator:
        assert self.group is not None
        size = (self.group.layout.dim,)
        return self.number * IdentityLinearOperator([size], self.layer.device, self.layer.accumulation_dtype)
