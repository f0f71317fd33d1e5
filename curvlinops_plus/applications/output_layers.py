"""Layers whose own outputs are the outputs of the model, entry by entry: a last linear layer, also
at several positions or behind a softcap.

Their derivatives need no backward pass for each output. With `z` what such a layer returns and
`f_e = h_e(z_j(e))`, the Jacobian of entry e is `α_e a_s ⊗ e_o`, where s and o are position and row
of `z_j`, `a_s` is what the layer has read there, and `α_e = h'_e`. With a covariance
`(U ⊗ Q) diag(w) (U ⊗ Q)ᵀ` of the parameters the variance of `f_e` is
`α_e² Σ_g U[o, g]² Σ_k (Qᵀ a_s)_k² w[g, k]`: as many operations as one product with `U`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    Kronecker,
    LinearOperator,
)
from curvlinops_plus.linalg.dense import IdentityMultiple
from curvlinops_plus.risk import Draws, LayerBatch, Vectors

# Digits of an entry's number: they are told apart in any precision in which codes are verified.
_BASE = 16


class Codes(Vectors):
    """Ones, and vectors that write the number of each entry of the output in digits.

    If an entry of the output depends on one number `z_j` of a layer alone, and no other entry does,
    the gradient at `z_j` is its code times a factor `α_j`, the gradient for the vector of ones.
    Codes have random parts, which no mixture of entries has.
    """

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 1 + len(codes(F[0].numel(), F))

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        yield torch.ones_like(F)
        for code in codes(F[0].numel(), F):
            yield code.view(F.shape[1:]).expand_as(F)


def codes(entries: int, like: Tensor) -> Tensor:
    """The digits of the numbers 0, 1, … with random parts, `[digits, entries]` between 1 and 2."""
    rest = torch.arange(entries, device=like.device)
    digits = [rest % _BASE]
    while _BASE ** len(digits) < entries:
        rest = rest // _BASE
        digits.append(rest % _BASE)
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(len(digits), entries, generator=generator, dtype=torch.float64).to(like)
    return 1 + (torch.stack(digits).to(like) + 0.25 + 0.5 * random) / _BASE


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """A layer whose numbers are entries of the output.

    Attributes:
        parts: Of each of its blocks.
        alpha: The factor of each entry, `[N, R·C]`, zero where the entry is none of the layer's.
        places: Where the entry is among the layer's numbers `[S, o]`, `[R·C]`.
        fits: Whether all this is true, 0-d.
    """

    parts: list[OutputPart]
    alpha: Tensor
    places: Tensor
    fits: Tensor

    @classmethod
    def of(cls, parts: list[OutputPart], gradients: Tensor, sent: Tensor) -> OutputLayer:
        """From the gradients [V, N, S, o] of `Codes` at the layer's numbers.

        Args:
            sent: The codes `[digits, R·C]`.
        """
        entries = sent.shape[1]
        factors, *coded = gradients.flatten(2)  # [N, S·o]
        # The entry of a number is read in the example in which it counts most.
        example = factors.abs().argmax(0)[None]
        largest = factors.gather(0, example)[0]
        used = largest != 0
        entry = torch.zeros_like(example[0])
        for k, g in enumerate(coded):
            ratio = g.gather(0, example)[0] / largest.where(used, 1)
            digit = ((ratio - 1) * _BASE).floor().clamp(0, _BASE - 1)
            entry = entry + digit.nan_to_num().long() * _BASE**k
        inside = entry < entries
        entry = entry.where(inside, 0)
        tolerance = 64 * torch.finfo(factors.dtype).eps * factors.abs()
        fits = (inside | ~used).all()
        for code, g in zip(sent.to(factors), coded):
            fits = fits & ((g - factors * code[entry]).abs() <= tolerance).all()
        # Of each entry there is one number at most; the last place is for numbers without one.
        target = entry.where(used, entries)
        numbers = torch.arange(len(target), device=target.device)
        ones = torch.ones_like(target)
        count = target.new_zeros(entries + 1).index_add_(0, target, ones)[:-1]
        places = target.new_zeros(entries + 1).index_copy_(0, target, numbers)[:-1]
        return cls(parts, factors[:, places] * (count > 0), places, fits & (count <= 1).all())

    def variances(self, F: Tensor) -> Tensor:
        """Of each entry of the outputs, [N, R, C]."""
        at_numbers = sum(part.variances() for part in self.parts)  # [N, S, o]
        assert isinstance(at_numbers, Tensor)
        of_entries = at_numbers.flatten(1)[:, self.places]
        return (self.alpha.square() * of_entries).view(F.shape)

    def has_whole_terms(self, F: Tensor) -> Tensor:
        """Whether the entries of each loss term are numbers of one position, in the same rows."""
        places = self.places.view(F.shape[1:])
        size = self.parts[0].size
        same = (places // size == places[:, :1] // size) & (places % size == places[:1] % size)
        return same.all()

    def sums(self, F: Tensor) -> Tensor:
        """Sums of the covariances of each entry with all of its term, [N, R, C], if it has whole
        terms.
        """
        alpha = self.alpha.view(F.shape)
        positions, rows = self._terms(F)
        total = torch.zeros_like(alpha)
        for part in self.parts:
            weights = part.weights[:, positions]  # [N, R, g]
            if part.U is None:
                total = total + alpha.square() * weights[..., rows]
                continue
            # α_c Σ_g U[c, g] w[g] Σ_d α_d U[d, g]
            U = part.U[rows]
            total = total + alpha * ((alpha @ U * weights) @ U.T)
        return total

    def projections(self, F: Tensor) -> list[Tensor]:
        """`φ` of each block, [N, R, C, g], if it has whole terms: products of two of a term are
        covariances.
        """
        alpha = self.alpha.view(F.shape)
        positions, rows = self._terms(F)
        phis = []
        for part in self.parts:
            roots = part.weights[:, positions].sqrt()  # [N, R, g]
            U = torch.eye(part.size).to(roots) if part.U is None else part.U
            phis.append(alpha[..., None] * roots[:, :, None] * U[rows])
        return phis

    def _terms(self, F: Tensor) -> tuple[Tensor, Tensor]:
        """The position of each term [R], and the rows of its entries [C]."""
        places = self.places.view(F.shape[1:])
        size = self.parts[0].size
        return places[:, 0] // size, places[0] % size


@dataclass(frozen=True, eq=False)
class OutputPart:
    """One block of an output layer.

    Attributes:
        U: Basis of the rows [o, g]; None for the identity.
        weights: `Σ_k (Qᵀ a_s)_k² w[g, k]`, [N, S, g].
    """

    U: Tensor | None
    weights: Tensor

    @property
    def size(self) -> int:
        """How many numbers the layer returns at a position."""
        return self.weights.shape[-1] if self.U is None else len(self.U)

    def variances(self) -> Tensor:
        """Of each number of the layer, [N, S, o]."""
        if self.U is None:
            return self.weights
        # Squares of some rows at a time: the basis may be the largest matrix of all.
        rows = self.U.split(max(1, _ROW_NUMBERS // self.U.shape[1]))
        return torch.cat([self.weights @ some.square().T for some in rows], -1)


_ROW_NUMBERS = 2**22


def output_parts(batch: LayerBatch, root: BlockDiagonal) -> list[OutputPart] | None:
    """The blocks of a layer as those of an output layer; None if it can't be one.

    Args:
        root: `L` with `L Lᵀ` the covariance of the parameters.
    """
    if not batch.whole or batch.sparse or batch.grads.ndim != 4:
        return None
    parts = []
    for group in batch.layer.groups:
        part = _output_part(batch.restrict(group), root.blocks[group.name])
        if part is None:
            return None
        parts.append(part)
    return parts


def _output_part(part: LayerBatch, L: LinearOperator) -> OutputPart | None:
    """The block of a layer with the root `L` of its covariance; None if it has no such form."""
    a = part.inputs
    assert isinstance(a, Tensor)
    if a.ndim != 3:  # a layer of several matrices
        return None
    if not part.weight:
        # A bias: J = α e_o, and the covariance is L Lᵀ.
        if isinstance(L, Diagonal):
            return OutputPart(None, L.vector.square().expand(*a.shape[:2], -1) * a.square())
        if isinstance(L, Dense) and not L.batch:
            return OutputPart(L.matrix, a.square().expand(*a.shape[:2], L.size))
        if isinstance(L, Eigendecomposed) and isinstance(L.basis, Dense) and not L.basis.batch:
            return OutputPart(L.basis.matrix, a.square() * L.values.square())
        return None
    if isinstance(L, Diagonal):
        roots = L.vector.view(-1, a.shape[-1])
        return OutputPart(None, a.square() @ roots.square().T)
    basis = getattr(L, "basis", None)
    if not isinstance(L, Eigendecomposed) or not isinstance(basis, Kronecker) or basis.batch:
        return None
    # (Qᵀ a)² for rows a
    projected = basis.A.left(a.mT, True).mT.square()
    weights = projected @ L.values.view(-1, a.shape[-1]).square().T
    U = None if isinstance(basis.G, IdentityMultiple) else basis.G.matrices()
    return OutputPart(U, weights)
