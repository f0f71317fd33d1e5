"""The Kronecker product that is nearest to the exact block of a layer, in the Frobenius norm.

The block is `F = c Σ vec(J) vec(J)ᵀ`, with `J [o, i]` the gradient of one example for one vector backpropagated.
Rearranged, with pairs of rows against pairs of columns, `G ⊗ A` has rank one, and the best one is the leading singular
pair of `R(F)` (Van Loan and Pitsianis 1993). `R(F)` has `o² i²` entries, but its products need none of them: `R(F)
vec(A)` is `c Σ J A Jᵀ`, and `R(F)ᵀ vec(G)` is `c Σ Jᵀ G J`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, Needs
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.tnt import KroneckerBlock, column_gram, columns, kronecker, pieces, row_gram
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.kronecker_approximation import balanced, nearest_to_matrix
from curvlinops_plus.risk import Group, Layer, LayerBatch

# Outer products of sparse rows' gradients are formed in pieces of about this many bytes.
_WORK_BYTES = 2**24


class NearestKronecker(KroneckerBlock):
    """The Kronecker product `G ⊗ A` nearest to a layer's exact block: no KFAC is nearer. Also known as KFOC.

    Blocks up to `max_bytes` are formed and decomposed. For larger ones the data is read again: the first sweep
    computes KFAC's `A`, and each one after it the best factor for the other one given, `G`, `A`, `G`, …. Both factors
    are symmetric and positive semi-definite, with equal mean eigenvalues. Arguments as for `Accumulator`, and:

    Args:
        power_iterations: Sweeps after KFAC's for blocks that are not formed. The distance to `F` never grows; what it
            has above the least shrinks by `(σ₂/σ₁)²` per sweep, with `σ` the singular values of `R(F)`. With one it is
            at most KFAC's already.
        max_bytes: The largest block that is formed, 64 MiB by default; 0 for none. The decomposition takes seconds at
            that size.
        max_factor_bytes: The largest factor that is built, 2 GiB by default.

    Raises:
        ValueError: If `power_iterations` is less than one.
        UnsupportedError: If a factor would be larger than `max_factor_bytes`, or nothing is backpropagated.

    Cost: one sweep and `o² i²` numbers, or `1 + power_iterations` sweeps and no more memory than KFAC. Of an
    embedding's `A` only the diagonal is kept; the product is then the nearest one of this form.

    Sources: Van Loan and Pitsianis 1993, "Approximation with Kronecker products"; Schnaus et al. 2021, "Kronecker-
    factored optimal curvature"; Koroko et al. 2022 (arXiv 2201.10285).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import KFAC, EmpiricalRisk, FullBlock, curvature
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.rand(9, 3), torch.zeros(9, 2))])
        >>> exact, kfac, nearest = (curvature(risk, kind).to_dense() for kind in (FullBlock, KFAC, NearestKronecker))
        >>> bool((nearest - exact).norm() < (kfac - exact).norm())
        True
    """

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        power_iterations: int = 3,
        max_bytes: int = 2**26,
        max_factor_bytes: int = 2 * 2**30,
    ) -> None:
        if power_iterations < 1:
            raise ValueError(
                f"power_iterations={power_iterations}: expected at least 1; without any the block is KFAC's, so say "
                "KFAC."
            )
        super().__init__(layer, group, scale, max_factor_bytes, "max_factor_bytes")
        self.max_factor_bytes = max_factor_bytes
        self.power_iterations = power_iterations
        *batch, o, i = self.shape
        self.entries = o**2 * i if layer.sparse else (batch[0] if batch else 1) * (o * i) ** 2
        #: Whether the block is formed.
        self.formed = self.entries * layer.accumulation_dtype.itemsize <= max_bytes

    @property
    def sweeps(self) -> int:
        return 1 if self.formed or not self.has_weight else 1 + self.power_iterations

    def needs(self) -> Needs:
        factors, itemsize = super().needs().kept, self.layer.accumulation_dtype.itemsize
        # The block in two forms and its decomposition, or KFAC's factors and those of a sweep.
        formed = 3 * self.entries * itemsize if self.formed and self.has_weight else 0
        return Needs(formed + 2 * factors, factors)

    def add_weight(self, batch: LayerBatch) -> None:
        if not self.formed:
            self._kfac().update(batch)
        elif self.layer.sparse:
            self.add("R", _row_grams(batch))
        else:
            self.add("F", gram(batch.per_example_grads.flatten(-2).flatten(0, 1)))

    def finish_weight(self) -> LinearOperator | Accumulator:
        if not self.formed:
            A, _ = self._kfac().factors()
            assert A is not None
            return PowerStep(self.layer, self.group, self.scale, A, "A", self.power_iterations)
        if self.layer.sparse:
            return kronecker(*nearest_to_matrix(self.value("R"), diagonal=True))
        *_, o, i = self.shape
        F = self.value("F").unflatten(-1, (o, i)).unflatten(-3, (o, i))  # [*b, o, i, p, j]
        return kronecker(*nearest_to_matrix(F.transpose(-3, -2)))

    def _kfac(self) -> KFAC:
        """KFAC of the same layer, which adds to these sums."""
        kfac = KFAC(self.layer, None, self.scale, max_bytes=self.max_factor_bytes)
        kfac.share_sums(self)
        return kfac


class PowerStep(Accumulator):
    """One of `NearestKronecker`'s sweeps: the best factor for the other one given.

    `argmin_G |F - G ⊗ A| = c Σ J A Jᵀ / |A|²`, and likewise for `A`: half a step of the power iteration on `R(F)`.

    Args:
        side: Which one it is, "G" or "A".
        left: The number of remaining sweeps, this one included.
    """

    affine = True
    constants = ("given",)

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        given: Tensor,
        side: str,
        left: int,
    ) -> None:
        super().__init__(layer, group, scale)
        self.given, self.side, self.left = given, side, left

    @property
    def sweeps(self) -> int:
        return self.left

    def update(self, batch: LayerBatch) -> None:
        contract = row_gram if self.side == "A" else column_gram
        for piece in pieces(batch):
            self.add("found", contract(piece, self.given))

    def finish(self) -> LinearOperator | Accumulator:
        axes = 1 if self.side == "A" and self.layer.sparse else 2
        square = self.given.square().sum(tuple(range(-axes, 0)))  # [*b]
        square = torch.where(square > 0, square, torch.ones_like(square))
        found = self.value("found")
        found = found / square.reshape(*square.shape, *[1] * (found.ndim - square.ndim))
        G, A = (found, self.given) if self.side == "A" else (self.given, found)
        G, A = balanced(G, A)
        if self.left == 1:
            return kronecker(G, A)
        known, side = (G, "G") if self.side == "A" else (A, "A")
        return PowerStep(self.layer, self.group, self.scale, known, side, self.left - 1)

    def streaming_error(self) -> UnsupportedError:
        """The contribution of a batch depends on a factor that is only known after all of them."""
        return UnsupportedError(
            f"{self.layer.title}: its block is too large to be formed, so NearestKronecker makes several sweeps over "
            "the same data and can't be updated batch by batch. Raise NearestKronecker.using(max_bytes=...), use TNT "
            "or KFAC for this layer, or curvature(risk, ...) over a whole data set."
        )


def _row_grams(batch: LayerBatch) -> Tensor:
    """`Σ_{v,n} J_i J_iᵀ` of every column `J_i` of sparse rows, [o, o, i]."""
    assert batch.group is not None
    o, i = batch.group.layout.matrix_shape
    total = torch.zeros(i, o, o, dtype=batch.layer.accumulation_dtype, device=batch.layer.device)
    for J, places in columns(batch):
        step = max(1, _WORK_BYTES // max(1, places.shape[1] * o**2 * total.element_size()))
        for J_n, places_n in zip(J.split(step), places.split(step), strict=True):
            total.index_add_(0, places_n.flatten(), torch.einsum("nok,npk->nkop", J_n, J_n).flatten(0, 1))
    return total.permute(1, 2, 0)
