"""EKFAC: a Kronecker product's eigenvectors with the eigenvalues that fit best.

The eigenvectors of both factors of KFAC stay, and the eigenvalues are `Λ = c Σ_{v,n} (Q_Gᵀ J_{v,n}
Q_A)²`, the diagonal of the exact block in that basis. The basis of a diagonal factor is the
identity.

Source: George et al. 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

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
from curvlinops_plus.blocks.kfac import KFAC, MAX_BYTES
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.layer.squares import multiplied, squared_gradients
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    Eigendecomposed,
    IdentityLinearOperator,
    Kronecker,
    LinearOperator,
    Structure,
)
from curvlinops_plus.linalg.dense import Factor
from curvlinops_plus.linalg.numerics import eigh
from curvlinops_plus.options import number
from curvlinops_plus.risk import Group, Layer, LayerBatch


class EKFAC(KFAC):
    """Eigenvalue-corrected KFAC: its trace is the exact block's, and it is never further from it
    than KFAC.

    Arguments as for `Accumulator`, and:

    Args:
        kfac_approx: Which factors give the eigenvectors, "expand" or "reduce". The eigenvalues are
            exact in either basis.
        max_bytes: As for `KFAC`. The eigenvectors of a diagonal factor are the identity's.
        basis_rtol: Eigenvectors of a factor are not resolved where the rest of it has no diagonal
            entry above `basis_rtol` times the largest: an arbitrary orthogonal basis is used there,
            which keeps the trace exact but increases the distance to the block. By default they are
            exact up to rounding.

    Raises:
        ValueError: If `basis_rtol` is not from 0 to 1.

    Cost: two sweeps, an eigendecomposition of each factor. Inputs and gradients of all layers over
    all data are kept for the second sweep if they take up to `max_kept_bytes` of `curvature`; model
    and data are not run again then.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), [(torch.eye(2), torch.zeros(2, 1))])
        >>> round(float(curvature(risk, EKFAC).trace), 4)
        4.0
    """

    needs_gradients = True
    sweeps = 2
    readers: ClassVar[Readers] = {
        **KFAC.readers,
        "basis_rtol": partial(number, low=0, below=1),
    }

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        kfac_approx: str = "expand",
        max_bytes: int = MAX_BYTES,
        basis_rtol: float = 0.0,
    ) -> None:
        super().__init__(layer, group, scale, kfac_approx, max_bytes)
        self.basis_rtol = basis_rtol

    def needs(self) -> Needs:
        bases = sum(form.kept for form in self.forms.values() if not form.diagonal)
        eigenvalues = sum(p.numel() for p in self.layer.params.values())
        kept = bases + self.layer.accumulation_dtype.itemsize * eigenvalues
        return Needs(super().needs().computing + kept, kept)

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        bases = self.decomposed
        self.decomposed = {}
        needed = {name for name, form in self.forms.items() if not form.diagonal}
        matrices = {} if bases.keys() >= needed else self.decompositions()
        if self.complete:  # each factor ends with its own decomposition
            self.sums = {}
        for name in list(matrices):
            M = matrices.pop(name)
            if name not in bases:
                bases[name] = self.decompose(name, M)
        return Correction(self.layer, self.scale, bases.get("G"), bases.get("A"))

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        parts = [(block.trace, J.square().sum())]
        if isinstance(block, Eigendecomposed):
            # Its diagonal in its own basis, and that this is one: Q Qᵀ J = J.
            Q = block.basis
            columns = J.flatten(2).flatten(0, 1).T
            parts = [
                (block.values, (Q.T @ columns).square().sum(1)),
                (Q @ (Q.T @ columns), columns),
            ]
        if is_one_product(J, batches) and not any(form.diagonal for form in self.forms.values()):
            parts.append(products(block, J))
        return parts

    def decompositions(self) -> dict[str, Dense]:
        return {
            name: Dense(factor, Structure.PSD)
            for name, factor in self.factors().items()
            if not self.forms[name].diagonal
        }

    def decompose(self, name: str, M: Dense) -> Tensor:
        try:
            if M.lacks("eigh"):
                Q = eigh(M.matrix, semidefinite=True, rtol=self.basis_rtol)[1]
            else:
                Q = M.eigh()[1].matrices()
            # Row by row in memory, as files keep them: products after loading round as before.
            return Q.contiguous()
        except NumericsError as error:
            raise NumericsError(f"{self.layer.title}, factor {name}: {error}") from error


class Correction(Accumulator):
    """EKFAC's second sweep: the diagonal of the exact blocks in a Kronecker basis.

    Args:
        layer: The layer.
        scale: As for every accumulator.
        QG: Eigenvectors of the gradient factor, None for the identity.
        QA: Eigenvectors of the input factor, None for the identity or if the weight is not tracked.
    """

    per_group = False
    affine = True
    changes_basis = True
    constants = ("QG", "QA")

    def __init__(
        self, layer: Layer, scale: LossScale, QG: Tensor | None, QA: Tensor | None
    ) -> None:
        super().__init__(layer, None, scale)
        self.QG = QG
        self.QA = QA

    def update(self, batch: LayerBatch) -> None:
        for group in self.layer.groups:
            # A separate bias has a single column, whose basis is trivial.
            QA = self.QA if self.layer.weight in group.keys else None
            total = self.sums.get(group.name)
            self.sums[group.name] = batch.restrict(group).squared_grads(self.QG, QA, total)

    def finish(self) -> Mapping[str, LinearOperator]:
        blocks: dict[str, LinearOperator] = {}
        for group in self.layer.groups:
            *batch, rows, columns = group.layout.matrix_shape
            if group.name not in self.sums:  # no term has counted
                like = {"dtype": self.layer.accumulation_dtype, "device": self.layer.device}
                self.sums[group.name] = torch.zeros(group.layout.matrix_shape, **like)
            values = self.value(group.name).contiguous().reshape(-1)
            basis: Any = _eigenvectors(self.QG, rows, batch, values)
            if self.layer.weight in group.keys:
                basis = Kronecker(basis, _eigenvectors(self.QA, columns, batch, values))
            blocks[group.name] = Eigendecomposed(basis, values)
        return blocks

    def change_basis(self, before: Accumulator) -> None:
        """The diagonal, in the new basis, of the block that the old basis and its eigenvalues
        make.
        """
        assert isinstance(before, Correction)
        for group in self.layer.groups:
            total = before.sums[group.name]
            if self.QG is not None and before.QG is not None:
                total = multiplied(total.mT, (before.QG.mT @ self.QG).square()).mT
            if self.QA is not None and before.QA is not None and self.layer.weight in group.keys:
                total = multiplied(total, (before.QA.mT @ self.QA).square())
            self.sums[group.name] = total
        self.counts = dict(before.counts)
        self.totals = before.totals


def _eigenvectors(Q: Tensor | None, size: int, batch: Sequence[int], like: Tensor) -> Factor:
    """A basis as a factor; without one the identity, once for each matrix of a batch."""
    if Q is not None:
        return Dense(Q, Structure.GENERAL)
    if batch:
        return Diagonal(like.new_ones(1, 1).expand(*batch, size))
    return IdentityLinearOperator([(size,)], like.device, like.dtype)


def compute_eigenvalue_correction_linear_weight_sharing(
    g: Tensor,
    ggT_eigvecs: Tensor,
    a: Tensor | None,
    aaT_eigvecs: Tensor | None,
    _force_strategy: str | None = None,
) -> Tensor:
    """Diagonal of the sum of per-example gradient outer products of a linear layer, in a Kronecker
    basis.

    Args:
        g: Output gradients [N, S, o], S positions that share the weight.
        ggT_eigvecs: Basis of the rows [o, o].
        a: Inputs [N, S, i]; not read if `aaT_eigvecs` is None.
        aaT_eigvecs: Basis of the columns [i, i], or None for a bias.
        _force_strategy: "gramian" never forms a gradient per example (S² (o + i) numbers each
            instead of o·i); "per_example_gradients" does, in pieces; None decides by memory.

    Returns:
        [o, i], or [o] for a bias.

    Raises:
        ValueError: If the strategy is unknown.

    Example:
        >>> import torch
        >>> g, a = torch.ones(1, 2, 1), torch.ones(1, 2, 3)
        >>> compute_eigenvalue_correction_linear_weight_sharing(g, torch.eye(1), a, torch.eye(3))
        tensor([[4., 4., 4.]])
    """
    strategies = ("gramian", "per_example_gradients", None)
    if _force_strategy not in strategies:
        raise ValueError(f"Invalid _force_strategy: {_force_strategy!r}. Supported: {strategies}.")
    if aaT_eigvecs is None:
        return (g.sum(1) @ ggT_eigvecs).square().sum(0)
    assert a is not None
    _, S, o = g.shape
    i = a.shape[2]
    saves_memory = S > 1 and S**2 * (o + i) < o * i
    if _force_strategy == "gramian" or (_force_strategy is None and saves_memory):
        g = g @ ggT_eigvecs
        a = a @ aaT_eigvecs
        pairs_g = (g[:, :, None] * g[:, None]).flatten(0, 2)
        pairs_a = (a[:, :, None] * a[:, None]).flatten(0, 2)
        return pairs_g.T @ pairs_a
    return squared_gradients(g, a, ggT_eigvecs, aaT_eigvecs)
