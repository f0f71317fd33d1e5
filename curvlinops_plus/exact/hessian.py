"""The Hessian of the empirical risk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.base import RiskOperator
from curvlinops_plus.exact.passes import Outputs, Passes, require_differentiable
from curvlinops_plus.linalg import Structure
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch, gradients_of, refuse_outside_reads
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.risk import takes_risk


class Hessian(RiskOperator):
    """The Hessian of the empirical risk with respect to the parameters, exact and matrix-free.

    Args:
        risk: Model, loss (any one, also without a likelihood), data and parameters.
        block_sizes: Numbers of parameters that form a block each, in their order: products with the
            block-diagonal Hessian. Default: one block.
        check_deterministic: True compares the total loss of two passes over the data first. None:
            two evaluations of a few examples have to agree, once per risk. False: not even these.

    Raises:
        ValueError: If they don't add up to the number of parameters.
        UnsupportedError: If model or loss use an operation that PyTorch can't differentiate twice.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep per product, of a forward pass and two backward passes; columns share the first
    two. Second derivatives are PyTorch's: functions with a backward pass of their own have to be
    twice differentiable, and hooks must not change gradients (`torch.autograd.gradgradcheck`).

    Source: Pearlmutter 1994, "Fast exact multiplication by the Hessian".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> H = Hessian(EmpiricalRisk(nn.Linear(1, 1, bias=False), nn.MSELoss(), data))
        >>> H.to_dense()
        tensor([[18.]])
    """

    structure = Structure.SYMMETRIC

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        *,
        block_sizes: Sequence[int] | None = None,
        check_deterministic: bool | None = None,
    ) -> None:
        super().__init__(risk, Passes(risk, self._read, twice=True), check_deterministic)
        self.in_space = self.out_space = risk.space
        self._blocks = _blocks(block_sizes, [p.numel() for p in risk.params.values()])
        self._looked_at = (
            risk.losses.have_likelihoods
        )  # whether the loss was seen to read no parameters by itself
        self._seen_twice = False  # whether all was seen to be differentiable twice
        if check_deterministic:
            self._check_loss()

    def _read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Totals]:
        totals = self.risk.losses.terms(self.risk.run(batch, model), batch).totals
        return totals.losses, totals  # type: ignore[return-value]

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        totals, rows, passes = Totals(), X.T.contiguous(), self._passes
        total = torch.zeros_like(rows)
        for batch in self._batches():
            with passes.run(batch) as (_, batch_totals, free, _):
                loss = weights.objective(batch_totals)
                totals.add(batch_totals)
                if not loss.requires_grad:
                    continue
                if not self._looked_at:
                    refuse_outside_reads("loss", [loss], self.risk.params)
                    self._looked_at = True
                sent = torch.ones_like(loss).requires_grad_(not self._seen_twice)
                gradient = gradients_of([loss], free, [sent], True, create_graph=True)
                if not self._seen_twice:
                    require_differentiable([g for g in gradient if g is not None], [loss])
                    self._seen_twice = True
                V = passes.split(rows)
                for block, columns in self._blocks:
                    last = block == self._blocks[-1][0]
                    passes.back(gradient[block], free[block], V[block], total[:, columns], last)
        return total.T, totals


def _blocks(given: Sequence[int] | None, numbers: list[int]) -> list[tuple[slice, slice]]:
    """The parameters of each block, and their entries of a vector."""
    sizes, blocks, start = [len(numbers)] if given is None else list(given), [], 0
    if sum(sizes) != len(numbers) or any(size <= 0 for size in sizes):
        raise ValueError(
            f"block_sizes={sizes} must be positive and add up to {len(numbers)}, the parameters."
        )
    for size in sizes:
        before, inside = sum(numbers[:start]), sum(numbers[start : start + size])
        blocks.append((slice(start, start + size), slice(before, before + inside)))
        start += size
    return blocks
