"""Blocks made of per-example gradients: the exact diagonal, the whole block, and Kronecker products
near to it.

With `J [o, i]` the gradient of one example for one vector backpropagated, as a matrix, the exact
block of an affine layer is `F = c Σ vec(J) vec(J)ᵀ`. The Kronecker products that keep its trace
(`TNT`) or are nearest to it are made of its two contractions, `c Σ J A Jᵀ` and `c Σ Jᵀ G J`; `[*b]`
stands for the matrices of a layer that has several (groups of a convolution). A multiple of the
identity needs no gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import (
    Accumulator,
    LossScale,
    Needs,
    Parts,
    Readers,
    is_one_product,
    products,
)
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    IdentityLinearOperator,
    Kronecker,
    LinearOperator,
    Structure,
)
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.nearest import balanced, nearest_to_matrix
from curvlinops_plus.options import integer, number
from curvlinops_plus.risk import Group, Layer, LayerBatch


def _numbers(accumulator: Accumulator) -> int:
    """How many numbers the parameters of a block have."""
    return sum(group.layout.dim for group in accumulator.groups)


class DiagonalBlock(Accumulator):
    """The exact diagonal of a layer's block: `c Σ_v Σ_n J²`, entry by entry. Arguments as for
    `Accumulator`.

    Cost: one sweep; per-example gradients in pieces of a few megabytes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(
        ...     nn.Linear(1, 1), nn.MSELoss(), [(torch.tensor([[2.0]]), torch.zeros(1, 1))]
        ... )
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

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        return [(block.diagonal(), J.square().sum((0, 1)).flatten())]


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
        >>> risk = EmpiricalRisk(
        ...     nn.Linear(1, 1), nn.MSELoss(), [(torch.tensor([[2.0]]), torch.zeros(1, 1))]
        ... )
        >>> curvature(risk, FullBlock).to_dense().round(decimals=3)
        tensor([[8., 4.],
                [4., 2.]])
    """

    needs_gradients = True
    readers: ClassVar[Readers] = {"max_bytes": partial(integer, low=0)}

    def __init__(
        self, layer: Layer, group: Group | None, scale: LossScale, max_bytes: int = 2 * 2**30
    ) -> None:
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
        # The product of one batch is added to the sum.
        return Needs(2 * size, size)

    def update(self, batch: LayerBatch) -> None:
        self.add("matrix", gram(batch.per_example_grads.flatten(2).flatten(0, 1)))

    def finish(self) -> LinearOperator:
        return Dense(self.value("matrix"), Structure.PSD)

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        # One matrix [o·i, 1], also of a layer with several matrices [*b, o, i].
        return [products(block, J.flatten(2).unsqueeze(-1))]


class ScaledIdentity(Accumulator):
    """The identity times a number, whatever the data: a layer with this block is not
    preconditioned.

    Arguments as for `Accumulator`, and:

    Args:
        scale: The number, 1 by default. (The factor of the loss, which other blocks carry, does not
            enter.)

    Raises:
        ValueError: If `scale` is negative or not finite.

    Cost: none; no gradients are needed, so it works with `ForwardOnly()` for every layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> data = [(torch.rand(3, 2), torch.zeros(3, 2))]
        >>> risk = EmpiricalRisk(nn.LayerNorm(2), nn.MSELoss(), data)
        >>> curvature(risk, ScaledIdentity.using(scale=0.5)).inverse(damping=0.5).diagonal()
        tensor([1., 1., 1., 1.])
    """

    readers: ClassVar[Readers] = {"scale": partial(number, low=0)}

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        of_loss: LossScale,
        scale: float = 1.0,
    ) -> None:
        super().__init__(layer, group, of_loss)
        self.number = float(scale)

    def needs(self) -> Needs:
        return Needs(0, 0)

    def update(self, batch: LayerBatch) -> None:
        pass

    def finish(self) -> LinearOperator:
        assert self.group is not None
        size = (self.group.layout.dim,)
        return self.number * IdentityLinearOperator(
            [size], self.layer.device, self.layer.accumulation_dtype
        )

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        return [(block.diagonal(), J.new_full((block.shape[0],), self.number))]


# ------------------------------------------------------------------------------- Kronecker products


class KroneckerBlock(Accumulator):
    """A base for approximations with one Kronecker product per block. Arguments as for
    `Accumulator`, and:

    Args:
        max_factor_bytes: The largest factor that is built.

    Raises:
        UnsupportedError: If a factor would be larger.

    A separate bias block is one matrix, which is kept exactly: `c Σ ĝ ĝᵀ` of the gradients summed
    over positions. Subclasses define the block of the weight.
    """

    affine = True
    needs_gradients = True

    def __init__(
        self, layer: Layer, group: Group | None, scale: LossScale, max_factor_bytes: int
    ) -> None:
        super().__init__(layer, group, scale)
        assert group is not None
        self.shape = group.layout.matrix_shape
        self.has_weight = layer.weight in group.keys
        *batch, o, i = self.shape
        itemsize = prod(batch) * layer.accumulation_dtype.itemsize
        self.factor_bytes = {"G": itemsize * o**2}
        if self.has_weight:
            self.factor_bytes["A"] = itemsize * i**2
        for name, size in self.factor_bytes.items():
            if size > max_factor_bytes:
                raise UnsupportedError(
                    f"{layer.title}: its factor {name} takes {size / 2**30:.1f} GiB, above the "
                    f"limit of {max_factor_bytes} bytes. Use KFAC, EKFAC or DiagonalBlock for this "
                    f"layer, which take diagonals, or give {type(self).__name__} a larger limit."
                )

    def update(self, batch: LayerBatch) -> None:
        if self.has_weight:
            self.add_weight(batch)
        else:
            self.add("G", batch.grad_gram(reduce=True))

    def needs(self) -> Needs:
        size = sum(self.factor_bytes.values())
        return Needs(2 * size, size)

    def finish(self) -> LinearOperator | Accumulator:
        if self.has_weight:
            return self.finish_weight()
        return Dense(self.value("G"), Structure.PSD)

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        if not self.has_weight or is_one_product(J, batches):
            return [products(block, J)]
        return self.exact_parts_of_weight(block, J)

    @abstractmethod
    def add_weight(self, batch: LayerBatch) -> None:
        """`update` for a block with a weight."""

    @abstractmethod
    def finish_weight(self) -> LinearOperator | Accumulator:
        """`finish` for a block with a weight."""

    def exact_parts_of_weight(self, block: LinearOperator, J: Tensor) -> Parts:
        """`exact_parts` for a block with a weight; none by default."""
        return []


class TNT(KroneckerBlock):
    """The trace-normalised Kronecker block `G ⊗ A / tr(F)` with `G = c Σ J Jᵀ` and `A = c Σ Jᵀ J`.

    Its trace is the exact block's, since `tr G = tr A = tr F`. Without weight sharing `A` is the
    mean of `‖g‖² a aᵀ`: each input is weighted by its squared gradient norm. Arguments as for
    `Accumulator`, and:

    Args:
        max_bytes: The largest factor that is built, 2 GiB by default.

    Raises:
        UnsupportedError: If a factor would be larger than `max_bytes`, or nothing is
            backpropagated.

    Cost: one sweep; for layers with many positions per-example gradients in pieces of a few
    megabytes.

    Source: Ren and Goldfarb 2021, "Tensor Normal Training for Deep Learning Models".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, FullBlock, curvature
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.rand(4, 3), torch.zeros(4, 2))]
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), data)
        >>> bool(torch.isclose(curvature(risk, TNT).trace, curvature(risk, FullBlock).trace))
        True
    """

    readers: ClassVar[Readers] = {"max_bytes": partial(integer, low=0)}

    def __init__(
        self, layer: Layer, group: Group | None, scale: LossScale, max_bytes: int = 2 * 2**30
    ) -> None:
        super().__init__(layer, group, scale, max_bytes)

    def add_weight(self, batch: LayerBatch) -> None:
        self.add("G", contraction(batch, "G"))
        self.add("A", contraction(batch, "A"))

    def finish_weight(self) -> LinearOperator:
        G = self.value("G")
        A = self.value("A")
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        return kronecker(G / torch.where(trace > 0, trace, torch.ones_like(trace)), A)

    def exact_parts_of_weight(self, block: LinearOperator, J: Tensor) -> Parts:
        if not isinstance(block, Kronecker):
            return [(block.trace, J.square().sum())]
        # Partial traces: tr(A) G = Σ J Jᵀ and tr(G) A = Σ Jᵀ J.
        G = block.G
        A = block.A
        J = J.flatten(0, 1)
        return [
            (A.traces()[..., None, None] * G.matrices(), (J @ J.mT).sum(0)),
            (G.traces()[..., None, None] * A.matrices(), (J.mT @ J).sum(0)),
        ]


class NearestKronecker(KroneckerBlock):
    """The Kronecker product `G ⊗ A` nearest to a layer's exact block: no KFAC is nearer. Also known
    as KFOC.

    Rearranged, with pairs of rows against pairs of columns, a Kronecker product has rank one, and
    the best one is the leading singular pair of that matrix `R(F)`, whose products are the two
    contractions. Blocks up to `max_bytes` are formed and decomposed. For larger ones the data is
    read again: the first sweep computes KFAC's `A`, and each one after it the best factor for the
    other one given, `G`, `A`, `G`, …. Both factors are symmetric and positive semi-definite, with
    equal mean eigenvalues. Arguments as for `Accumulator`, and:

    Args:
        power_iterations: Sweeps after KFAC's for blocks that are not formed. The distance to `F`
            never grows; what it has above the least shrinks by `(σ₂/σ₁)²` per sweep, with `σ` the
            singular values of `R(F)`. With one it is at most KFAC's already.
        max_bytes: The largest block that is formed, 64 MiB by default; 0 for none. The
            decomposition takes seconds at that size.
        max_factor_bytes: The largest factor that is built, 2 GiB by default.

    Raises:
        ValueError: If `power_iterations` is less than one.
        UnsupportedError: If a factor would be larger than `max_factor_bytes`, or nothing is
            backpropagated.

    Cost: one sweep and `o² i²` numbers, or `1 + power_iterations` sweeps and no more memory than
    KFAC.

    Sources: Van Loan and Pitsianis 1993, "Approximation with Kronecker products"; Schnaus et al.
    2021, "Kronecker- factored optimal curvature"; Koroko et al. 2022 (arXiv 2201.10285).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import KFAC, EmpiricalRisk, FullBlock, curvature
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.rand(9, 3), torch.zeros(9, 2))])
        >>> exact, kfac, nearest = (
        ...     curvature(risk, kind).to_dense() for kind in (FullBlock, KFAC, NearestKronecker)
        ... )
        >>> bool((nearest - exact).norm() < (kfac - exact).norm())
        True
    """

    readers: ClassVar[Readers] = {
        "power_iterations": partial(integer, low=1),
        "max_bytes": partial(integer, low=0),
        "max_factor_bytes": partial(integer, low=0),
    }

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        power_iterations: int = 3,
        max_bytes: int = 2**26,
        max_factor_bytes: int = 2 * 2**30,
    ) -> None:
        super().__init__(layer, group, scale, max_factor_bytes)
        self.power_iterations = power_iterations
        *batch, o, i = self.shape
        self.block_bytes = prod(batch) * (o * i) ** 2 * layer.accumulation_dtype.itemsize
        #: Whether the block is formed.
        self.formed = self.block_bytes <= max_bytes
        self.sweeps = 1 if self.formed or not self.has_weight else 1 + power_iterations

    def needs(self) -> Needs:
        factors = super().needs().kept
        # KFAC's factors and those of a sweep, or the block in two forms and its decomposition.
        computing = 2 * factors
        if self.formed and self.has_weight:
            computing += 3 * self.block_bytes
        return Needs(computing, factors)

    def add_weight(self, batch: LayerBatch) -> None:
        if self.formed:
            self.add("F", gram(batch.per_example_grads.flatten(-2).flatten(0, 1)))
        elif len(self.layer.roles) > 1:  # TNT's
            self.add("A", contraction(batch, "A"))
        elif batch.first:
            self.add("A", *batch.input_gram())

    def finish_weight(self) -> LinearOperator | Accumulator:
        if self.formed:
            # F [*b, o, i, p, j] with pairs of rows (o, p) and of columns (i, j)
            matrix_shape = self.shape[-2:]
            F = self.value("F").unflatten(-1, matrix_shape).unflatten(-3, matrix_shape)
            return kronecker(*nearest_to_matrix(F.transpose(-3, -2)))
        A = self.value("A")
        if A.ndim < len(self.shape):  # of sparse rows
            A = torch.diag_embed(A)
        return PowerStep(self.layer, self.group, self.scale, A, "A", self.power_iterations)

    def exact_parts_of_weight(self, block: LinearOperator, J: Tensor) -> Parts:
        # No multiple of it is nearer: it is at a right angle to what is missing. So after any
        # number of sweeps.
        columns = J.flatten(2).flatten(0, 1).T
        return [(block.frobenius_norm.square(), (columns * (block @ columns)).sum())]


class PowerStep(Accumulator):
    """One of `NearestKronecker`'s sweeps: the best factor for the other one given.

    `argmin_G |F - G ⊗ A| = c Σ J A Jᵀ / |A|²`, and likewise for `A`: half a step of the power
    iteration on `R(F)`.

    Args:
        factor: That factor.
        side: Which one it is, "G" or "A".
        sweeps: The number of remaining sweeps, this one included.
    """

    affine = True

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        factor: Tensor,
        side: str,
        sweeps: int,
    ) -> None:
        super().__init__(layer, group, scale)
        self.factor = factor
        self.side = side
        self.best_side = "G" if side == "A" else "A"
        self.sweeps = sweeps

    def update(self, batch: LayerBatch) -> None:
        self.add(self.best_side, contraction(batch, self.best_side, self.factor))

    def finish(self) -> LinearOperator | Accumulator:
        square = self.factor.square().sum((-2, -1), keepdim=True)
        best = self.value(self.best_side) / torch.where(square > 0, square, torch.ones_like(square))
        if self.sweeps == 1:
            factors = {self.side: self.factor, self.best_side: best}
            return kronecker(factors["G"], factors["A"])
        best, _ = balanced(best, self.factor)
        options = (best, self.best_side, self.sweeps - 1)
        return PowerStep(self.layer, self.group, self.scale, *options)


def kronecker(G: Tensor, A: Tensor) -> Kronecker:
    """The block of two positive semi-definite factors [*b, o, o] and [*b, i, i]."""
    G, A = balanced(G, A)
    return Kronecker(Dense(G, Structure.PSD), Dense(A, Structure.PSD))


def contraction(batch: LayerBatch, name: str, between: Tensor | None = None) -> Tensor:
    """`Σ_{v,n} J A Jᵀ`, [*b, o, o], for `name` "G", or `Σ_{v,n} Jᵀ G J`, [*b, i, i], for "A".

    Args:
        between: The symmetric matrix between them; default: the identity.

    Cost: without weight sharing that of two Gram matrices, otherwise `o i (o + i)` operations per
    example and vector, or those of the rows where these are fewer.
    """
    if _by_rows(batch):
        # J = Σ_s g_s a_sᵀ, so that J A Jᵀ = Σ_{s,t} (a_sᵀ A a_t) g_s g_tᵀ.
        assert isinstance(batch.inputs, Tensor)
        outer = batch.inputs[None]  # [1, N, S, *b, i]
        inner = batch.grads  # [V, N, S, *b, o]
        if name == "G":
            outer, inner = inner, outer
        left = inner
        if between is not None:
            left = torch.einsum("vns...i,...ij->vns...j", inner, between)
        # Inner products of positions that share the weight, over all vectors if g is inside.
        pairs = torch.einsum("vns...i,vnt...i->vn...st", left, inner).sum(0)
        left = torch.einsum("n...st,vnt...o->vns...o", pairs, outer)
        total = torch.einsum("vns...o,vns...p->...op", left, outer)
        return (total + total.mT) / 2
    total = None
    for piece in batch.pieces():
        J = piece.per_example_grads if name == "G" else piece.per_example_grads.mT
        left = J if between is None else torch.einsum("vn...oi,...ij->vn...oj", J, between)
        part = torch.einsum("vn...oi,vn...pi->...op", left, J)
        total = part if total is None else total + part
    assert total is not None
    return (total + total.mT) / 2


def _by_rows(batch: LayerBatch) -> bool:
    """Whether rows of inputs and gradients are fewer numbers than gradients per example."""
    if len(batch.layer.roles) > 1 or batch.layer.sparse:
        return False
    S = batch.grads.shape[2]
    group = batch.group or batch.layer.groups[0]
    o, i = group.layout.matrix_shape[-2:]
    return S * (o + i) <= max(o * i, o + i)
