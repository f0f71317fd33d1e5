"""KFAC and EKFAC: one Kronecker product per affine layer.

For a layer with rows `a_{n,s}` and gradients `g_{v,n,s}` of the un-reduced loss:

* expand: `A = 1/(N·S) Σ_{n,s} a aᵀ`, `G = c Σ_{v,n,s} g gᵀ`;
* reduce: `A = 1/N Σ_n ā āᵀ` with `ā_n = mean_s a`, `G = c Σ_{v,n} ĝ ĝᵀ` with `ĝ_n = Σ_s g`;

the block is `G ⊗ A` on the row-major vector of the weight, `W ↦ G W A`. EKFAC keeps the eigenvectors of both factors
and replaces the eigenvalues by `Λ = c Σ_{v,n} (Q_Gᵀ J_{v,n} Q_A)²`, the diagonal of the exact block in that basis.

Sources: Martens & Grosse 2015 (KFAC), Grosse & Martens 2016 (convolutions), Eschenhagen et al. 2023 (expand and
reduce), George et al. 2018 (EKFAC).

Beyond one matrix per layer: groups of a convolution have a pair of factors each; the input factor of an embedding is a
diagonal matrix of relative frequencies, since its rows are one-hot; of a factor that would be larger than `max_bytes`,
such as `G` of a head with a large vocabulary, only the diagonal is kept, and the identity is its basis; and for a
weight that is read in two roles (an embedding and the head tied to it) the block is the Kronecker product nearest to
the sum over roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.layer.squares import squared_gradients
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    Eigendecomposed,
    IdentityLinearOperator,
    Kronecker,
    LinearOperator,
    Structure,
    nearest_kronecker,
)
from curvlinops_plus.linalg.eigendecomposition import eigenbasis
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.risk import Group, Layer, LayerBatch

__all__ = ["EKFAC", "KFAC", "compute_eigenvalue_correction_linear_weight_sharing"]

# Larger factors are diagonal.
MAX_BYTES = 2 * 2**30


class KFAC(Accumulator):
    """Kronecker-factored approximate curvature of an affine layer. Arguments as for `Accumulator`, and:

    Args:
        kfac_approx: "expand" treats positions that share the weight as examples of their own; "reduce" averages inputs
            and sums gradients over them first. Of an embedding's input factor only the diagonal is kept in both.
        max_bytes: The largest factor that is built, 2 GiB by default. Larger ones, such as `G` of a head with 50 000
            rows, are diagonal: the diagonal of the block stays the same. `print(K)` says where.

    Raises:
        ValueError: If `kfac_approx` is neither.

    Cost: one sweep, two small Gram matrices per layer and batch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.Linear(2, 1, bias=False), nn.MSELoss(), [(torch.eye(2), torch.zeros(2, 1))])
        >>> curvature(risk, KFAC).to_dense().round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """

    per_group = False
    affine = True
    symmetric = True

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        kfac_approx: str = "expand",
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(layer, group, scale)
        if kfac_approx not in ("expand", "reduce"):
            raise ValueError(f"kfac_approx={kfac_approx!r} is unknown; expected 'expand' or 'reduce'.")
        self.reduce = kfac_approx == "reduce"
        #: The group that has the weight: its columns are those of A. None if only the bias is tracked.
        self.weight_group = next((g for g in layer.groups if layer.weight in g.keys), None)
        #: The names of the factors that are diagonal.
        self.diagonal = diagonal_factors(layer, max_bytes)

    @classmethod
    def remark(cls, layer: Layer, max_bytes: int = MAX_BYTES, **options: Any) -> str:
        large = {name: needed for name, (_, needed) in factor_sizes(layer).items() if needed > max_bytes}
        return ", ".join(f"diagonal {name} ({needed / 2**30:.2g} GiB as a matrix)" for name, needed in large.items())

    @property
    def block_size(self) -> int:
        return kronecker_size(self.layer, self.groups, self.diagonal)

    def update(self, batch: LayerBatch) -> None:
        for number, role in enumerate(batch.roles()):
            diagonal_A, diagonal_G = diagonal_in_role(self.layer, number, self.diagonal)
            if role.calls and batch.first and self.weight_group is not None:
                part = role if len(self.layer.groups) == 1 else role.restrict(self.weight_group)
                rows, name = part.rows, f"A{number or ''}"
                if not diagonal_A and (a := rows.stacked_inputs(self.reduce)) is not None:
                    self.add_rows(name, a, ones=a.shape[1] < rows.columns, count=float(len(a)))
                else:
                    self.add(name, *rows.input_gram(self.reduce, diagonal_A))
            if role.calls and batch.num_vectors:
                rows, name = role.rows, f"G{number or ''}"
                if not diagonal_G and (g := rows.stacked_grads(self.reduce)) is not None:
                    self.add_rows(name, g)
                else:
                    self.add(name, rows.grad_gram(self.reduce, diagonal_G))

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        return kfac_blocks(self.layer, *self.factors())

    def factors(self) -> tuple[Tensor | None, Tensor]:
        """`A` (None if the weight is not tracked) and `G` (the identity if nothing was sent back).

        Diagonal factors are vectors. Of a weight with several roles: the nearest product to the sum over roles.
        """
        if len(self.layer.roles) == 1 or self.weight_group is None:
            return (None if self.weight_group is None else self.value("A")), self._gradient_factor(0)
        *_, rows, columns = self.weight_group.layout.matrix_shape
        pairs = []
        for number, role in enumerate(self.layer.roles):
            if f"A{number or ''}" in self.sums:  # a module may never have been called
                A, G = self.value(f"A{number or ''}"), self._gradient_factor(number)
                left, right = (A, G) if role.transposed else (G, A)
                pairs.append((_sized(left, rows, "G" in self.diagonal), _sized(right, columns, "A" in self.diagonal)))
        G, A = nearest_kronecker(pairs) if pairs else (self.value("G"), self.value("A"))
        return A, G

    def _gradient_factor(self, number: int) -> Tensor:
        if f"G{number or ''}" in self.sums:
            return self.value(f"G{number or ''}")
        group = self.weight_group or self.layer.groups[0]
        *batch, o, i = group.layout.matrix_shape
        size = i if self.layer.roles[number].transposed else o
        one = torch.eye(size, dtype=self.layer.accumulation_dtype, device=self.layer.device)
        one = one.diagonal() if diagonal_in_role(self.layer, number, self.diagonal)[1] else one
        return one.expand(*batch, *one.shape).clone()


def factor_sizes(layer: Layer) -> dict[str, tuple[int, int]]:
    """Rows and bytes of the factors of a layer as matrices; of `A` only if there is a weight whose inputs have any."""
    sizes: dict[str, tuple[int, int]] = {}
    for group in layer.groups:
        *batch, o, i = group.layout.matrix_shape
        unit = prod(batch) * layer.accumulation_dtype.itemsize
        sizes["G"] = o, unit * o**2
        if layer.weight in group.keys and not layer.sparse:
            sizes["A"] = i, unit * i**2
    return sizes


def kronecker_size(layer: Layer, groups: Sequence[Group], diagonal: set[str]) -> int:
    """How many numbers the factors take of the blocks of a layer, some of which are diagonal; `G` is shared."""
    numbers = 0
    for group in groups:
        *batch, o, i = group.layout.matrix_shape
        if group is groups[0]:
            numbers += prod(batch) * (o if "G" in diagonal else o**2)
        if layer.weight in group.keys:
            numbers += prod(batch) * (i if "A" in diagonal else i**2)
    return numbers


def diagonal_factors(layer: Layer, max_bytes: int = MAX_BYTES) -> set[str]:
    """Which factors of a layer are diagonal: `A` of sparse rows, and those that would be larger than `max_bytes`."""
    large = {name for name, (_, needed) in factor_sizes(layer).items() if needed > max_bytes}
    return large | {"A"} if layer.sparse else large


def diagonal_in_role(layer: Layer, role: int, diagonal: set[str]) -> tuple[bool, bool]:
    """Whether the input and the gradient factor of a role are diagonal: in a transposed one they change sides."""
    A, G = "A" in diagonal, "G" in diagonal
    return (G, A) if layer.roles[role].transposed else (A, G)


def check_factor_sizes(accumulator: Accumulator, limit: int, option: str) -> None:
    """Refuse Kronecker factors that are larger than the option of that name allows.

    Raises:
        UnsupportedError: If a factor has more than `limit` bytes.
    """
    layer = accumulator.layer
    for name, (size, needed) in factor_sizes(layer).items():
        if needed > limit:
            raise UnsupportedError(
                f"{layer.title}: its factor {name} is {size} x {size}, {needed / 2**30:.1f} GiB, above "
                f"{option}={limit}. Use KFAC or EKFAC, which take its diagonal, or DiagonalBlock for this layer, leave "
                f"its parameters {list(layer.params)} out of `params`, or say "
                f"{type(accumulator).__name__}.using({option}=...)."
            )


def _sized(factor: Tensor, size: int, diagonal: bool) -> Tensor:
    """A factor of the layer's size, a vector if it is diagonal; columns that its role does not have are zero."""
    if factor.ndim == 1 and not diagonal:
        factor = torch.diag(factor)
    missing = size - len(factor)
    return torch.nn.functional.pad(factor, (0, missing) * factor.ndim) if missing else factor


def kfac_blocks(layer: Layer, A: Tensor | None, G: Tensor) -> dict[str, LinearOperator]:
    """Blocks of a layer from its factors: `G ⊗ A` of the weight, `G` of a separate bias. The tensors are shared."""
    axes = len(layer.groups[0].layout.matrix_shape)
    # One object for weight and bias: it is decomposed once.
    factor = Dense(G, Structure.PSD) if G.ndim == axes else Diagonal(G)
    blocks: dict[str, LinearOperator] = {}
    for group in layer.groups:
        if layer.weight in group.keys:
            assert A is not None
            blocks[group.name] = Kronecker(factor, A if A.ndim == axes else Diagonal(A))
        else:
            blocks[group.name] = factor
    return blocks


class EKFAC(KFAC):
    """Eigenvalue-corrected KFAC: its trace is the exact block's, and it is never further from it than KFAC.

    Arguments as for `Accumulator`, and:

    Args:
        kfac_approx: Which factors give the eigenvectors, "expand" or "reduce". The eigenvalues are exact in either
            basis.
        max_bytes: As for `KFAC`. The eigenvectors of a diagonal factor are the identity's.
        basis_rtol: Eigenvectors of a factor need not be told apart where what is left of it has no diagonal entry above
            `basis_rtol` times the largest. The basis is orthogonal all the same, so that the trace stays exact; the
            distance to the block in the Frobenius norm grows, at most to that of the exact diagonal in a basis that is
            arbitrary there. By default they are exact up to rounding.

    Raises:
        ValueError: If `basis_rtol` is not from 0 to 1.

    Cost: two sweeps, an eigendecomposition of each factor. Inputs and gradients of all layers over all data are kept
    for the second sweep if they take up to `max_kept_bytes` of `curvature`; model and data are not run again then.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), [(torch.eye(2), torch.zeros(2, 1))])
        >>> round(float(curvature(risk, EKFAC).trace), 4)
        4.0
    """

    needs_gradients = True
    finishes_side_by_side = True
    finishes_decomposed = True

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        kfac_approx: str = "expand",
        max_bytes: int = 2 * 2**30,
        basis_rtol: float = 0.0,
    ) -> None:
        super().__init__(layer, group, scale, kfac_approx, max_bytes)
        if not 0 <= basis_rtol < 1:
            raise ValueError(f"Expected basis_rtol to be at least 0 and below 1, got {basis_rtol}.")
        self.basis_rtol = basis_rtol

    @property
    def block_size(self) -> int:
        return super().block_size + sum(group.layout.dim for group in self.groups)

    @property
    def needs_another_sweep(self) -> bool:
        return True

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        bases = self.decomposed or {name: self.decompose(name, M) for name, M in self.decompositions().items()}
        return Correction(self.layer, self.scale, bases.get("G"), bases.get("A"))

    def decompositions(self) -> dict[str, Tensor]:
        A, G = self.factors()
        factors = {"G": G} if A is None else {"G": G, "A": A}
        return {name: factor for name, factor in factors.items() if name not in self.diagonal}

    def decompose(self, name: str, M: Tensor) -> Tensor:
        return eigenvectors(self.layer, name, M, self.basis_rtol)


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

    def __init__(self, layer: Layer, scale: LossScale, QG: Tensor | None, QA: Tensor | None) -> None:
        super().__init__(layer, None, scale)
        self.QG, self.QA = QG, QA

    def update(self, batch: LayerBatch) -> None:
        for group in self.layer.groups:
            # A separate bias has a single column, whose basis is trivial.
            QA = self.QA if self.layer.weight in group.keys else None
            self.add(group.name, batch.restrict(group).squared_grads(self.QG, QA))

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        values = {group.name: self.value(group.name).contiguous() for group in self.layer.groups}
        return ekfac_blocks(self.layer, self.QG, self.QA, values)

    def mismatch(self, other: Accumulator) -> str | None:
        """Corrected eigenvalues belong to one basis."""
        assert isinstance(other, Correction)
        pairs = [(self.QG, other.QG), (self.QA, other.QA)]
        if all(
            mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
            for mine, theirs in pairs
        ):
            return None
        return (
            "corrected eigenvalues of EKFAC can only be added in the same basis, and these have different ones: those "
            "of each estimator's own first batch or last refresh. Call `other.adopt_bases(this)`, before its first "
            "update if it shall lose nothing. Or merge KFAC, or compute EKFAC on the union of the data."
        )

    def change_basis(self, before: Accumulator) -> None:
        """The diagonal, in the new basis, of the block that the old basis and its eigenvalues make."""
        assert isinstance(before, Correction)
        for group in self.layer.groups:
            total = before.sums[group.name]
            if self.QG is not None and before.QG is not None:
                total = (self.QG.mT @ before.QG).square() @ total
            if self.QA is not None and before.QA is not None and self.layer.weight in group.keys:
                total = total @ (before.QA.mT @ self.QA).square()
            self.sums[group.name] = total
        self.counts, self.totals = dict(before.counts), replace(before.totals)


def ekfac_blocks(
    layer: Layer, QG: Tensor | None, QA: Tensor | None, values: Mapping[str, Tensor]
) -> dict[str, LinearOperator]:
    """Blocks of a layer from eigenvectors and corrected eigenvalues. The tensors are shared, not copied."""
    blocks: dict[str, LinearOperator] = {}
    for group in layer.groups:
        flat = values[group.name].reshape(-1)
        *batch, rows, columns = group.layout.matrix_shape
        left = _identity(rows, batch, flat) if QG is None else Dense(QG)
        if layer.weight in group.keys:
            right = _identity(columns, batch, flat) if QA is None else Dense(QA)
            blocks[group.name] = Eigendecomposed(Kronecker(left, right), flat)
        else:
            blocks[group.name] = Eigendecomposed(left, flat)
    return blocks


def _identity(size: int, batch: Sequence[int], like: Tensor) -> Factor:
    """The identity as a factor, once for each matrix of a batch."""
    if batch:
        return Diagonal(like.new_ones(1, 1).expand(*batch, size))
    return IdentityLinearOperator([(size,)], like.device, like.dtype)


def eigenvectors(layer: Layer, name: str, factor: Tensor, rtol: float) -> Tensor:
    """Eigenvectors of one factor; failures name the layer."""
    try:
        # Row by row in memory, as files keep them: products after loading round as before.
        return eigenbasis(factor, rtol=rtol).contiguous()
    except NumericsError as error:
        raise NumericsError(f"{layer.title}, factor {name}: {error}") from error


def compute_eigenvalue_correction_linear_weight_sharing(
    g: Tensor, ggT_eigvecs: Tensor, a: Tensor | None, aaT_eigvecs: Tensor | None, _force_strategy: str | None = None
) -> Tensor:
    """Diagonal of the sum of per-example gradient outer products of a linear layer, in a Kronecker basis.

    Args:
        g: Output gradients [N, S, o], S positions that share the weight.
        ggT_eigvecs: Basis of the rows [o, o].
        a: Inputs [N, S, i]; not read if `aaT_eigvecs` is None.
        aaT_eigvecs: Basis of the columns [i, i], or None for a bias.
        _force_strategy: "gramian" never forms a gradient per example (S² (o + i) numbers each instead of o·i);
            "per_example_gradients" does, in pieces; None decides by memory.

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
    (_, S, o), i = g.shape, a.shape[2]
    if _force_strategy == "gramian" or (_force_strategy is None and S > 1 and S**2 * (o + i) < o * i):
        g, a = g @ ggT_eigvecs, a @ aaT_eigvecs
        pairs_g = (g[:, :, None] * g[:, None]).flatten(0, 2)
        pairs_a = (a[:, :, None] * a[:, None]).flatten(0, 2)
        return pairs_g.T @ pairs_a
    return squared_gradients(g, a, ggT_eigvecs, aaT_eigvecs)
