"""Kronecker blocks made of per-example gradients: what they have in common, and the one that keeps the trace.

With `J [o, i]` the gradient of one example for one vector backpropagated, as a matrix, the exact block of an affine
layer is `F = c Σ vec(J) vec(J)ᵀ`. Everything here is made of its two contractions, `c Σ J A Jᵀ` and `c Σ Jᵀ G J`;
`[*b]` stands for the matrices of a layer that has several (groups of a convolution).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, Needs
from curvlinops_plus.blocks.kfac import check_factor_sizes
from curvlinops_plus.layer import SparseRows
from curvlinops_plus.linalg import Dense, Diagonal, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.kronecker_approximation import balanced
from curvlinops_plus.risk import Group, Layer, LayerBatch

# Per-example gradients are formed in pieces of about this many bytes.
_PIECE_BYTES = 2**26


class KroneckerBlock(Accumulator):
    """A base for approximations with one Kronecker product per block. Arguments as for `Accumulator`, and:

    Args:
        max_bytes: The largest factor that is built.
        option: Name of that option in the subclass, for messages.

    Raises:
        UnsupportedError: If a factor would be larger than `max_bytes`.

    A separate bias block is one matrix, which is kept exactly: `c Σ ĝ ĝᵀ` of the gradients summed over positions.
    Subclasses define the block of the weight.
    """

    affine = True
    needs_gradients = True

    def __init__(
        self, layer: Layer, group: Group | None, scale: LossScale, max_bytes: int, option: str = "max_bytes"
    ) -> None:
        super().__init__(layer, group, scale)
        assert group is not None
        self.shape = group.layout.matrix_shape
        self.has_weight = layer.weight in group.keys
        check_factor_sizes(self, max_bytes, option)

    def update(self, batch: LayerBatch) -> None:
        if self.has_weight:
            self.add_weight(batch)
        else:
            self.add("G", batch.rows.grad_gram(reduce=True))

    def needs(self) -> Needs:
        *batch, o, i = self.shape
        of_A = (i if self.layer.sparse else i**2) if self.has_weight else 0
        size = (batch[0] if batch else 1) * (o**2 + of_A) * self.layer.accumulation_dtype.itemsize
        return Needs(2 * size, size)

    def finish(self) -> LinearOperator | Accumulator:
        return self.finish_weight() if self.has_weight else Dense(self.value("G"), Structure.PSD)

    @abstractmethod
    def add_weight(self, batch: LayerBatch) -> None:
        """`update` for a block with a weight."""

    @abstractmethod
    def finish_weight(self) -> LinearOperator | Accumulator:
        """`finish` for a block with a weight."""


class TNT(KroneckerBlock):
    """The trace-normalised Kronecker block `G ⊗ A / tr(F)` with `G = c Σ J Jᵀ` and `A = c Σ Jᵀ J`.

    Its trace is the exact block's, since `tr G = tr A = tr F`. Without weight sharing `A` is the mean of
    `‖g‖² a aᵀ`: each input is weighted by its squared gradient norm. Arguments as for `Accumulator`, and:

    Args:
        max_bytes: The largest factor that is built, 2 GiB by default.

    Raises:
        UnsupportedError: If a factor would be larger than `max_bytes`, or nothing is backpropagated.

    Cost: one sweep; for layers with many positions per-example gradients in pieces of a few megabytes.

    Source: Ren and Goldfarb 2021, "Tensor Normal Training for Deep Learning Models". Of an embedding's `A` only the
    diagonal is kept, and the trace with it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, FullBlock, curvature
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), [(torch.rand(4, 3), torch.zeros(4, 2))])
        >>> bool(torch.isclose(curvature(risk, TNT).trace, curvature(risk, FullBlock).trace))
        True
    """

    def __init__(self, layer: Layer, group: Group | None, scale: LossScale, max_bytes: int = 2 * 2**30) -> None:
        super().__init__(layer, group, scale, max_bytes)

    def add_weight(self, batch: LayerBatch) -> None:
        for piece in pieces(batch):
            self.add("G", row_gram(piece))
            self.add("A", column_gram(piece))

    def finish_weight(self) -> LinearOperator:
        G, A = self.value("G"), self.value("A")
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        return kronecker(*balanced(G / torch.where(trace > 0, trace, torch.ones_like(trace)), A))


def kronecker(G: Tensor, A: Tensor) -> Kronecker:  # [*b, o, o], [*b, i, i] or diagonals [*b, i]
    """The block of two positive semi-definite factors."""
    return Kronecker(Dense(G, Structure.PSD), Diagonal(A) if A.ndim < G.ndim else Dense(A, Structure.PSD))


# --------------------------------------------------------------------------------------------------------- contractions


def row_gram(batch: LayerBatch, A: Tensor | None = None) -> Tensor:
    """`Σ_{v,n} J A Jᵀ`, [*b, o, o], for a symmetric `A` [*b, i, i] (sparse rows: its diagonal [i]); None: the identity.

    Cost: without weight sharing that of two Gram matrices, otherwise `o i (o + i)` operations per example and vector,
    or those of the rows where these are fewer.
    """
    if _sparse(batch):
        total = None
        for J, places in columns(batch):
            weighted = J if A is None else J * A[places][:, None]
            part = torch.einsum("nok,npk->op", weighted, J)
            total = part if total is None else total + part
        assert total is not None
    elif _by_rows(batch):
        a, g = _dense_inputs(batch), batch.rows.grads
        left = a if A is None else torch.einsum("ns...i,...ij->ns...j", a, A)
        between = torch.einsum("ns...i,nt...i->n...st", left, a)  # positions that share the weight
        total = torch.einsum("vns...o,vns...p->...op", torch.einsum("n...st,vnt...o->vns...o", between, g), g)
    else:
        J = batch.per_example_grads
        left = J if A is None else torch.einsum("vn...oi,...ij->vn...oj", J, A)
        total = torch.einsum("vn...oi,vn...pi->...op", left, J)
    return (total + total.mT) / 2


def column_gram(batch: LayerBatch, G: Tensor | None = None) -> Tensor:
    """`Σ_{v,n} Jᵀ G J`, [*b, i, i] (sparse rows: its diagonal [i]), for a symmetric `G` [*b, o, o]; None: the identity.

    Cost: as for `row_gram`.
    """
    if _sparse(batch):
        diagonal = None
        for J, places in columns(batch):
            weighted = J if G is None else torch.einsum("op,npk->nok", G, J)
            part = J.new_zeros(_shape(batch)[-1])
            part.index_add_(0, places.flatten(), (weighted * J).sum(1).flatten())
            diagonal = part if diagonal is None else diagonal + part
        assert diagonal is not None
        return diagonal.clamp(min=0)  # rounding
    if _by_rows(batch):
        a, g = _dense_inputs(batch), batch.rows.grads
        left = g if G is None else torch.einsum("vns...o,...op->vns...p", g, G)
        between = torch.einsum("vns...o,vnt...o->n...st", left, g)
        total = torch.einsum("ns...i,ns...j->...ij", torch.einsum("n...st,nt...i->ns...i", between, a), a)
    else:
        J = batch.per_example_grads
        left = J if G is None else torch.einsum("...op,vn...pi->vn...oi", G, J)
        total = torch.einsum("vn...oi,vn...oj->...ij", left, J)
    return (total + total.mT) / 2


def pieces(batch: LayerBatch) -> Iterator[LayerBatch]:
    """Examples of which the contractions form at most a few megabytes of gradients at once."""
    N = batch.num_examples
    if _sparse(batch) or _by_rows(batch):
        yield batch
        return
    numbers = batch.num_vectors * sum(batch.layer.params[key].numel() for key in batch.keys)
    step = max(1, _PIECE_BYTES // (numbers * batch.layer.accumulation_dtype.itemsize))
    for start in range(0, N, step):
        yield batch if step >= N else batch.examples(slice(start, start + step))


def _shape(batch: LayerBatch) -> tuple[int, ...]:
    return (batch.group or batch.layer.groups[0]).layout.matrix_shape


def _sparse(batch: LayerBatch) -> bool:
    return batch.layer.sparse


def _by_rows(batch: LayerBatch) -> bool:
    """Whether rows of inputs and gradients are fewer numbers than gradients per example."""
    if len(batch.layer.roles) > 1:
        return False
    S, (o, i) = batch.rows.grads.shape[2], _shape(batch)[-2:]
    return S * (o + i) <= max(o * i, o + i)


def _dense_inputs(batch: LayerBatch) -> Tensor:
    a = batch.rows.inputs
    assert isinstance(a, Tensor)
    return a


def columns(batch: LayerBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Per-example gradients of sparse rows, vector by vector: columns `[N, o, K]` that occur, their places `[N, K]`."""
    rows = batch.rows.inputs
    assert isinstance(rows, SparseRows)
    index = rows.index.flatten(1)  # [N, S·L]
    ordered, order = index.sort(1)
    new = torch.zeros_like(ordered)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    slot = torch.empty_like(index).scatter_(1, order, new.cumsum(1))
    places = torch.zeros_like(index).scatter_(1, slot, index)
    local = SparseRows(slot.view_as(rows.index), rows.weight, index.shape[1], rows.kept, rows.dtype)
    for g in batch.rows.grads:
        yield local.outer(g[None])[0], places
