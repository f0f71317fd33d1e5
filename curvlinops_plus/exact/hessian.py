"""The Hessian of the empirical risk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.exact.base import RiskOperator
from curvlinops_plus.exact.compiled import Compiled, ProductForms
from curvlinops_plus.exact.differentiable import gradients_with_graph
from curvlinops_plus.exact.passes import Passes, read_losses
from curvlinops_plus.exact.reading import Reading
from curvlinops_plus.exact.traced_batch import Trace, each, pullback, rows_joined
from curvlinops_plus.linalg import Structure
from curvlinops_plus.options import instance, integer
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch, gradients_of, refuse_outside_reads
from curvlinops_plus.risk.risk import takes_risk


class Hessian(RiskOperator):
    """The Hessian of the empirical risk with respect to the parameters, exact and matrix-free.

    Args:
        risk: Model, loss (any one, also without a likelihood), data and parameters.
        block_sizes: Numbers of parameters that form a block each, in their order: products with the
            block-diagonal Hessian. Default: one block.
        check_deterministic: True compares the total loss of two passes over the data first. None:
            two evaluations of a few examples have to agree, once per risk. False: not even these.
        compile: Whether products and `gradient_and_loss()` are computed by compiled functions
            (`torch.compile`), after a comparison with the eager product on the first batch of each
            shape. What can't be compiled, or has other numbers, or takes longer, stays eager, with
            a warning. It takes seconds to minutes in the first products, see docs/performance.md.

    Raises:
        ValueError: If `block_sizes` don't add up to the number of parameters, or there are several
            blocks and `compile`.
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
        compile: bool = False,
    ) -> None:
        passes = Passes(risk, partial(read_losses, risk), twice=True)
        super().__init__(risk, passes, check_deterministic)
        self.in_space = self.out_space = risk.space
        self._blocks = _blocks_of(block_sizes, self._passes.sizes)
        # Whether the loss was seen to read no parameters by itself, and all to be differentiable
        # twice.
        self._reads_nothing = risk.losses.have_likelihoods
        self._is_twice = False
        if compile:
            if len(self._blocks) > 1:
                raise ValueError(
                    "compile=True is for the whole Hessian: leave out block_sizes, or compile."
                )
            product = ProductForms(self._products, self._of_batch, self._traced, self._sum)
            self._compiled = Compiled(
                type(self).__name__, self._passes, product, self._compares_few
            )
        if check_deterministic:
            self._compare_losses()

    def _products(self, X: Tensor, reading: Reading) -> Tensor:
        rows = X.T.contiguous()
        total = torch.zeros_like(rows)
        for batch in self._batches(reading):
            self._add(batch, rows, reading, total)
        return total.T

    def _of_batch(self, batch: Batch, rows: Tensor, reading: Reading) -> Tensor:
        total = torch.zeros_like(rows)
        self._add(batch, rows, reading, total)
        return total

    def _add(self, batch: Batch, rows: Tensor, reading: Reading, total: Tensor) -> None:
        """Add products of one batch [K, n] to a total."""
        passes = self._passes
        with passes.run(batch) as run:
            loss = reading.weights.objective(run.extra)
            reading.totals.add(run.extra)
            if not loss.requires_grad:
                return
            if not self._reads_nothing:
                refuse_outside_reads("loss", [loss], self.risk.params)
                self._reads_nothing = True
            gradient = self._gradient(loss, run.parameters)
            V = passes.split(rows)
            for block in self._blocks:
                where = block.parameters
                entries = total[:, block.entries]
                last = block is self._blocks[-1]
                passes.back(gradient[where], run.parameters[where], V[where], entries, last)

    def _traced(self, trace: Trace, rows: Tensor, reading: Reading) -> Tensor:
        """Products of one batch in a compiled function."""
        pull = pullback(trace.gradient(reading.weights), *trace.parameters)[1]
        products = rows_joined(each(lambda *v: pull(v), trace.split(rows)), rows.dtype)
        reading.totals.add(trace.extra)
        return products

    def _gradient(self, loss: Tensor, parameters: list[Tensor]) -> Sequence[Tensor | None]:
        """With a graph, which is found once to have derivatives."""
        sent = torch.ones_like(loss)
        if self._is_twice:
            return gradients_of([loss], parameters, [sent], True, create_graph=True)
        gradient = gradients_with_graph([loss], parameters, [sent.requires_grad_()])
        self._is_twice = True
        return gradient


class _Block(NamedTuple):
    parameters: slice
    """Their positions among all parameters."""
    entries: slice
    """Their entries of a vector."""


def _blocks_of(block_sizes: Sequence[int] | None, sizes: list[int]) -> list[_Block]:
    """The blocks of so many parameters each.

    Args:
        sizes: Numbers of entries of the parameters.
    """
    counts = [len(sizes)]
    if block_sizes is not None:
        instance("block_sizes", block_sizes, Iterable, "a list of integers")
        counts = [integer("block_sizes", count) for count in block_sizes]
    if sum(counts) != len(sizes) or any(count <= 0 for count in counts):
        raise ValueError(
            f"block_sizes={counts} must be positive and add up to {len(sizes)}, the parameters."
        )
    ends = list(accumulate(sizes, initial=0))
    borders = pairwise(accumulate(counts, initial=0))
    return [_Block(slice(a, b), slice(ends[a], ends[b])) for a, b in borders]
