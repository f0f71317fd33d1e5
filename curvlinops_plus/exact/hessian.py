"""The Hessian of the empirical risk."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.base import ParameterCurvature
from curvlinops_plus.exact.batched import (
    checked_chunk_size,
    columns_sent_back,
    is_generic,
    join_rows,
    split_rows,
    vjp,
)
from curvlinops_plus.exact.convolution import EdgesOnly
from curvlinops_plus.exact.double_backward import (
    is_symmetric,
    kernel_shape,
    operation_context,
    refuse_asymmetry,
    refuse_once_differentiable,
)
from curvlinops_plus.exact.linear_passes import refuse_nonlinear_products
from curvlinops_plus.exact.operations import Operations, Stopped, checkpoints_in_words, replaced_again
from curvlinops_plus.linalg import Structure
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.determinism import coarsest_dtype
from curvlinops_plus.risk.graph import edge_of, kinds_of_nodes, raise_unreached
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.modules import refuse_outside_reads
from curvlinops_plus.risk.risk import made_together


class Hessian(ParameterCurvature):
    """The Hessian of the empirical risk with respect to the parameters, exact and matrix-free.

    Args:
        risk: Model, loss (any one, also without a likelihood), data and parameters.
        block_sizes: Numbers of parameters that form a block each, in their order: products with the block-diagonal
            Hessian. Default: one block.
        check_deterministic: True compares the total loss of two passes over the data first. None: two evaluations of a
            few examples have to agree, once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies, or on a
            CPU, where large results gain nothing from it, fewer.

    Raises:
        TypeError: If `block_sizes` is a number.
        ValueError: If they don't add up to the number of parameters, or `chunk_size` is less than one.
        UnsupportedError: If model or loss use an operation that PyTorch can't differentiate twice; if products are not
            linear, since a hook or a backward pass written by hand clamps gradients.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep per product, of a forward pass and two backward passes; columns of a chunk share the first two.

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

    @made_together
    def __init__(
        self,
        risk: EmpiricalRisk,
        *,
        block_sizes: Sequence[int] | None = None,
        check_deterministic: bool | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(risk, check_deterministic)
        self.chunk_size = checked_chunk_size(chunk_size)
        _ = risk.losses.reduction  # refuse now, not at first use
        self._blocks = _blocks(block_sizes, len(risk.params))
        self._checked: set[Hashable] = set()  # ways through model and kernels that were
        self._largest = 1  # numbers in the largest intermediate result of the first forward pass
        self._replaced = False  # whether operations in it were replaced
        if check_deterministic:
            self._check_loss()

    def _described(self) -> Mapping[str, Any]:
        return {"block_sizes=": [block.stop - block.start for block in self._blocks]}

    def __getstate__(self) -> dict[str, Any]:  # kinds of graph nodes can't be pickled, and are looked at anew
        return {**vars(self), "_checked": set()}

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        risk, totals = self.risk, Totals()
        free = {key: p.detach().requires_grad_() for key, p in risk.params.items()}
        edges = EdgesOnly(list(free.values()))
        X = X.clone() if X.is_inference() else X
        total, reached = None, []

        def loop(model: nn.Module) -> None:
            again = replaced_again(model, twice=True, also=edges.replaced)
            with nullcontext() if self._checked and not self._replaced else again:
                read(model)

        def read(model: nn.Module) -> None:
            nonlocal total
            for batch in self._batches():
                run = partial(self._run, model, batch, weights, edges)
                loss, way, batch_totals = run()
                if loss.requires_grad:
                    reached.append(way)
                    total = self._product(loss, edges, X, way, total, run)
                totals.add(batch_totals)
            if not reached and totals.examples:
                raise_unreached()

        with operation_context(), checkpoints_in_words():
            risk.at(free, loop)
        return (torch.zeros_like(X) if total is None else total.T), totals  # the examples may be in other processes

    def _run(
        self, model: nn.Module, batch: Batch, weights: LossWeights, edges: EdgesOnly
    ) -> tuple[Tensor, tuple[bool, Hashable, Hashable], Totals]:
        """The loss of a batch with its graph, which way the model and kernels take, and totals without a graph."""
        again = self._checked and not self._replaced
        with Stopped() if again else Operations(twice=True, also=edges.replaced) as watch:
            f, y, class_axis = self.risk.run(batch, model)
        totals = self.risk.terms(f, y, batch, class_axis).totals
        if isinstance(watch, Operations):
            self._largest, self._replaced = max(self._largest, watch.largest), watch.replaced
        loss = weights.objective(totals)
        way = watch.hooked, kinds_of_nodes(loss), kernel_shape(batch.num_examples, f)
        return loss, way, totals.detached()

    def _columns(self, params: Sequence[Tensor]) -> int:
        """How many columns are computed together."""
        # Two backward passes hold a few results of each column at a time.
        numbers = self.in_space.dim + 4 * self._largest
        return columns_sent_back(self.chunk_size, numbers, self._largest, params)

    def _product(
        self,
        loss: Tensor,
        edges: EdgesOnly,
        X: Tensor,
        way: tuple[bool, Hashable, Hashable],
        total: Tensor | None,
        again: Callable[[], tuple[Tensor, Any, Totals]],
    ) -> Tensor:  # [K, n]
        """Hessian of one batch's loss times `X` [n, K], added to `total` if there is one; `again` makes the loss."""
        new = way not in self._checked
        if new:
            refuse_once_differentiable(loss)
            refuse_outside_reads("loss", [loss], self.risk.params)
        columns = self._columns(edges.params)
        of_loss = partial(_BatchHessian, edges=edges, blocks=self._blocks, dtype=self.dtype, columns=columns)
        hessian = of_loss(loss)
        if not new:
            return hessian.products(X.T, total, last=True)
        HX = hessian.products(X.T)
        sizes = [p.numel() for p in edges.params]
        refuse_nonlinear_products(hessian.products, sizes, X, loss, way[0], coarsest_dtype(self.risk))
        dtype, some = coarsest_dtype(self.risk), X.shape[1] and is_generic(X[:, 0], edges.params)
        # The product that nearly always is the last one needs memory for a vector more, and frees the graph instead.
        if not some or not is_symmetric(partial(hessian.products, last=True), X[:, 0], HX[0], dtype):
            state = RandomState.now(self.device)
            hessian = of_loss(again()[0]) if some else hessian
            refuse_asymmetry(hessian.products, X, float(loss.detach().abs()), dtype)
            state.restore()
        self._checked.add(way)
        return HX if total is None else total.add_(HX)


class _BatchHessian:
    """The Hessian of a batch's loss, by a graph of its gradient.

    Args:
        loss: The loss.
        edges: The parameters.
        blocks: The parameters of each block.
        dtype: Of products.
        columns: How many vectors are multiplied together.
    """

    def __init__(self, loss: Tensor, edges: EdgesOnly, blocks: list[slice], dtype: torch.dtype, columns: int) -> None:
        self.params, self.blocks, self.dtype, self.columns = edges.params, blocks, dtype, columns
        # A gradient is known by where it is in the graph; its numbers are not needed.
        with edges.backward(loss):
            gradient = torch.autograd.grad(loss, edges.params, create_graph=True, allow_unused=True)
        self.gradient = [edge_of(g) if g is not None and g.requires_grad else None for g in gradient]

    def products(self, rows: Tensor, total: Tensor | None = None, last: bool = False) -> Tensor:
        """Products with vectors, [K, n] -> [K, n], added to `total` if there is one; the last free the graph."""
        if len(rows) <= self.columns:
            return self._product(rows, total, last)
        total = torch.zeros_like(rows) if total is None else total
        starts = range(0, len(rows), self.columns)
        for k in starts:
            piece = slice(k, k + self.columns)
            self._product(rows[piece], total[piece], last and k == starts[-1])
        return total

    def _product(self, rows: Tensor, total: Tensor | None, last: bool) -> Tensor:
        V, found = split_rows(rows, self.params), []
        for block in self.blocks:
            used = [(g, v) for g, v in zip(self.gradient[block], V[block]) if g is not None]
            if used:
                ends = last and block is self.blocks[-1]
                found += vjp([g for g, _ in used], self.params[block], [v for _, v in used], ends)
            else:
                found += [None] * len(self.params[block])
        return join_rows(found, self.params, len(rows), self.dtype, total)


def _blocks(sizes: Sequence[int] | None, count: int) -> list[slice]:
    """The parameters of each block."""
    if isinstance(sizes, int):
        raise TypeError(f"block_sizes={sizes} must be a list, how many parameters each block has.")
    sizes = [count] if sizes is None else list(sizes)
    if sum(sizes) != count or any(size <= 0 for size in sizes):
        raise ValueError(f"block_sizes={sizes} must be positive and add up to {count}, the parameters.")
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends)]
