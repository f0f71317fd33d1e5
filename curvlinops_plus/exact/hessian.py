"""The Hessian of the empirical risk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.base import ParameterCurvature
from curvlinops_plus.exact.passes import Passes, add_rows, naming_operations, split_rows, vjp
from curvlinops_plus.linalg import Structure
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import gradients_of, raise_unreached, refuse_outside_reads
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.risk import takes_risk


class Hessian(ParameterCurvature):
    """The Hessian of the empirical risk with respect to the parameters, exact and matrix-free.

    Args:
        risk: Model, loss (any one, also without a likelihood), data and parameters.
        block_sizes: Numbers of parameters that form a block each, in their order: products with the block-diagonal
            Hessian. Default: one block.
        check_deterministic: True compares the total loss of two passes over the data first. None: two evaluations of a
            few examples have to agree, once per risk. False: not even these.

    Raises:
        TypeError: If `block_sizes` is a number.
        ValueError: If they don't add up to the number of parameters.
        UnsupportedError: If model or loss use an operation that PyTorch can't differentiate twice.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep per product, of a forward pass and two backward passes; columns share the first two. Second
    derivatives are PyTorch's: functions with a backward pass of their own have to be twice differentiable, and hooks
    must not change gradients (`torch.autograd.gradgradcheck`).

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
        super().__init__(risk, check_deterministic)
        _ = risk.losses.reduction  # refuse now, not at first use
        self._blocks = _blocks(block_sizes, len(risk.params))
        self._passes = Passes(risk, self._read)
        self._looked_at = False  # whether the loss was seen to read no parameters by itself
        if check_deterministic:
            self._check_loss()

    def _read(self, model: nn.Module, batch: Batch) -> tuple[tuple[()], Totals]:
        return (), self.risk.losses.terms(self.risk.run(batch, model), batch).totals

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        risk, totals, reached = self.risk, Totals(), False
        total = torch.zeros(X.shape[1], X.shape[0], dtype=self.dtype, device=self.device)

        def product(F: Any, batch_totals: Totals, free: list[Tensor]) -> bool:
            loss = weights.objective(batch_totals)
            totals.add(batch_totals)
            if not loss.requires_grad:
                return False
            if not self._looked_at:
                refuse_outside_reads("loss", [loss], risk.params)
                self._looked_at = True
            gradient = gradients_of([loss], free, [torch.ones_like(loss)], True, create_graph=True)
            rows, size = X.T.contiguous(), self._passes.sent_together(X.shape[1], ())
            for start in range(0, len(rows), size):
                V, own = split_rows(rows[start : start + size], free), total[start : start + size]
                found: list[Tensor | None] = []
                for block in self._blocks:
                    pairs = [(g, v) for g, v in zip(gradient[block], V[block]) if g is not None and g.requires_grad]
                    last = start + size >= len(rows) and block is self._blocks[-1]
                    gs, vs = zip(*pairs, strict=True) if pairs else ((), ())
                    found += vjp(gs, free[block], vs, last) if pairs else [None] * len(free[block])
                add_rows(own, found, free)
            return True

        with naming_operations():
            for batch in self._batches():
                reached |= self._passes.graph(batch, product)
        if not reached and totals.examples:
            raise_unreached()
        return total.T, totals


def _blocks(sizes: Sequence[int] | None, count: int) -> list[slice]:
    """The parameters of each block."""
    if isinstance(sizes, int):
        raise TypeError(f"block_sizes={sizes} must be a list, how many parameters each block has.")
    sizes = [count] if sizes is None else list(sizes)
    if sum(sizes) != count or any(size <= 0 for size in sizes):
        raise ValueError(f"block_sizes={sizes} must be positive and add up to {count}, the parameters.")
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends)]
