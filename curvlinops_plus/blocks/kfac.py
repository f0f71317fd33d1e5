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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, Needs
from curvlinops_plus.blocks.factors import (
    FactorForm,
    Parts,
    as_factor,
    factor_forms,
    form_in_role,
    numbered,
    of_form,
    slices,
    stacked,
    unstacked,
)
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.layer.squares import multiplied, squared_gradients
from curvlinops_plus.linalg import (
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
from curvlinops_plus.linalg.numerics import gram
from curvlinops_plus.risk import Group, Layer, LayerBatch
from curvlinops_plus.risk.affine_rows import AffineRows

if TYPE_CHECKING:
    from typing_extensions import Self

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
        split: Factors with more rows are block-diagonal: the matrices on their diagonal are kept, as few of equal size
            (up to one row) as possible, and nothing between them. With 4096, `G` of a head with 50 257 rows takes .72
            GiB instead of 9.4. By default none is.

    Raises:
        ValueError: If `kfac_approx` is neither, or `split` is no integer of at least 1.

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
        split: int | None = None,
    ) -> None:
        super().__init__(layer, group, scale)
        if kfac_approx not in ("expand", "reduce"):
            raise ValueError(f"kfac_approx={kfac_approx!r} is unknown; expected 'expand' or 'reduce'.")
        if split is not None and (not isinstance(split, int) or isinstance(split, bool) or split < 1):
            raise ValueError(
                f"split={split!r}: expected the most rows that a factor may have, an integer of at least 1."
            )
        self.reduce = kfac_approx == "reduce"
        #: The group that has the weight: its columns are those of A. None if only the bias is tracked.
        self.weight_group = next((g for g in layer.groups if layer.weight in g.keys), None)
        #: What is kept of each factor, by its name.
        self.forms = factor_forms(layer, max_bytes, split)
        #: Another accumulator whose layer reads the same inputs: the input factor is its.
        self.leader: KFAC | None = None
        self._input_factor: Factor | None = None

    # --------------------------------------------------------------------------------------------------- shared inputs
    @property
    def may_share_inputs(self) -> bool:
        """Whether the input factor may be that of another layer which reads the same."""
        plain = type(self).update is KFAC.update and type(self).factors is KFAC.factors
        return plain and "A" in self.forms and not self.forms["A"].diagonal and len(self.layer.roles) == 1

    @property
    def input_kind(self) -> tuple[Any, ...]:
        """What input factors, and what is made of them, depend on besides the inputs."""
        bias = self.weight_group is not None and self.layer.bias in self.weight_group.keys
        return type(self), self.reduce, self.forms["A"], bias, self.layer.accumulation_dtype

    def part_from_leader(self) -> None:
        """Go on with a copy of the leader's sums."""
        leader, self.leader = self.leader, None
        assert leader is not None
        for name in ["A", *numbered(leader.sums, "A")]:
            if name in leader.sums:
                self.sums[name], self.counts[name] = leader.sums[name].clone(), leader.counts[name]

    def empty(self) -> Self:
        other = super().empty()
        other.leader = other._input_factor = None
        return other

    def _factor_of_inputs(self, A: Parts | None) -> Factor | None:
        """The input factor as an operator, one for all that share it: it is decomposed once."""
        owner = self.leader or self
        if A is None or owner._input_factor is not None:
            return owner._input_factor
        factor = as_factor(A, Structure.PSD, len(self.layer.groups[0].layout.matrix_shape))
        owner._input_factor = factor if owner._for_good else None
        return factor

    @classmethod
    def remark(cls, layer: Layer, max_bytes: int = MAX_BYTES, split: int | None = None, **options: Any) -> str:
        said = []
        for name, form in factor_forms(layer, max_bytes, split).items():
            if form.split:
                said.append(f"{name} in {len(form.pieces)} pieces of {max(form.pieces)} rows")
            elif form.diagonal and form.bytes > max_bytes and not (name == "A" and layer.sparse):
                said.append(f"diagonal {name} ({form.bytes / 2**30:.2g} GiB as a matrix)")
        return ", ".join(said)

    def needs(self) -> Needs:
        itemsize = self.layer.accumulation_dtype.itemsize
        factors = sum(form.needed(itemsize) for form in self.forms.values())
        waiting = sum(form.waiting(itemsize) for form in self.forms.values())
        return Needs(max(1, len(self.layer.roles)) * (factors + waiting), factors)

    def update(self, batch: LayerBatch) -> None:
        for number, role in enumerate(batch.roles()):
            of_A, of_G = form_in_role(self.layer, number, self.forms)
            if role.calls and batch.first and of_A is not None and self.leader is None:
                assert self.weight_group is not None
                part = role if len(self.layer.groups) == 1 else role.restrict(self.weight_group)
                self._add_inputs(f"A{number or ''}", of_A, part.rows)
            if role.calls and batch.num_vectors:
                self._add_grads(f"G{number or ''}", of_G, role.rows)

    def _add_inputs(self, name: str, form: FactorForm, rows: AffineRows) -> None:
        if form.split and not rows.sparse:
            self._add_pieces(name, form, *rows.split_inputs(self.reduce))
        elif not form.diagonal and (a := rows.stacked_inputs(self.reduce)) is not None:
            self.add_rows(name, a, ones=a.shape[1] < rows.columns, count=float(len(a)))
        else:
            self.add(name, *rows.input_gram(self.reduce, form.diagonal))

    def _add_grads(self, name: str, form: FactorForm, rows: AffineRows) -> None:
        if form.split:
            self._add_pieces(name, form, rows.split_grads(self.reduce))
        elif not form.diagonal and (g := rows.stacked_grads(self.reduce)) is not None:
            self.add_rows(name, g)
        else:
            self.add(name, rows.grad_gram(self.reduce, form.diagonal))

    def _add_pieces(self, name: str, form: FactorForm, rows: Tensor, count: Tensor | float | None = None) -> None:
        """Add the matrices on the diagonal of `rowsᵀ rows`, of rows `[M, *b, d]`."""
        for k, at in enumerate(slices(form, rows.shape[-1])):
            if rows.ndim == 2:
                self.add_rows(f"{name}.{k}", rows[:, at], count=count)
            else:
                self.add(f"{name}.{k}", gram(rows[..., at]), count)

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        A, G = self.factors()
        return kfac_blocks(self.layer, self._factor_of_inputs(A), G)

    def factors(self) -> tuple[Parts | None, Parts]:
        """`A` (None if the weight is not tracked) and `G` (the identity if nothing was sent back).

        Diagonal factors are vectors. Of a weight with several roles: the nearest product to the sum over roles.
        """
        if len(self.layer.roles) == 1 or self.weight_group is None:
            owner = self.leader or self
            return (None if self.weight_group is None else owner._sum("A")), self._gradient_factor(0)
        pairs = []
        for number, role in enumerate(self.layer.roles):
            if (A := self._sum(f"A{number or ''}")) is not None:  # a module may never have been called
                G = self._gradient_factor(number)
                left, right = (A, G) if role.transposed else (G, A)
                pairs.append((of_form(left, self.forms["G"]), of_form(right, self.forms["A"])))
        if not pairs:
            return self.value("A"), self.value("G")  # says that nothing was added
        G, A = nearest_of_parts(pairs)
        return A, G

    def _sum(self, name: str) -> Parts | None:
        """A factor that was added to, None for another."""
        if name in self.sums:
            return self.value(name)
        return tuple(self.value(part) for part in numbered(self.sums, name)) or None

    def _gradient_factor(self, number: int) -> Parts:
        if (found := self._sum(f"G{number or ''}")) is not None:
            return found
        form = form_in_role(self.layer, number, self.forms)[1]

        def identity(size: int) -> Tensor:
            one = torch.eye(size, dtype=self.layer.accumulation_dtype, device=self.layer.device)
            one = one.diagonal() if form.diagonal else one
            return one.expand(*form.batch, *one.shape).clone()

        return tuple(map(identity, form.pieces)) if form.split else identity(form.size)


def nearest_of_parts(pairs: Sequence[tuple[Parts, Parts]]) -> tuple[Parts, Parts]:
    """`nearest_kronecker` of factors of equal forms."""
    like = pairs[0]

    def as_one(factor: Parts) -> Tensor:
        return factor if isinstance(factor, Tensor) else stacked(factor)

    found = nearest_kronecker([(as_one(G), as_one(A)) for G, A in pairs])
    G, A = (one if isinstance(old, Tensor) else unstacked(one, old) for one, old in zip(found, like, strict=True))
    return G, A


def kfac_blocks(layer: Layer, A: Factor | Parts | None, G: Parts) -> dict[str, LinearOperator]:
    """Blocks of a layer from its factors: `G ⊗ A` of the weight, `G` of a separate bias. The tensors are shared."""
    axes = len(layer.groups[0].layout.matrix_shape)
    # One object for weight and bias: it is decomposed once.
    factor = as_factor(G, Structure.PSD, axes)
    blocks: dict[str, LinearOperator] = {}
    for group in layer.groups:
        if layer.weight in group.keys:
            assert A is not None
            blocks[group.name] = Kronecker(factor, A if isinstance(A, Factor) else as_factor(A, Structure.PSD, axes))
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
        split: As for `KFAC`. Eigenvectors are those of the matrices on the diagonal, and eigenvalues are exact.
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
        max_bytes: int = MAX_BYTES,
        basis_rtol: float = 0.0,
        split: int | None = None,
    ) -> None:
        super().__init__(layer, group, scale, kfac_approx, max_bytes, split)
        if not 0 <= basis_rtol < 1:
            raise ValueError(f"Expected basis_rtol to be at least 0 and below 1, got {basis_rtol}.")
        self.basis_rtol = basis_rtol

    @property
    def sweeps(self) -> int:
        return 2

    def needs(self) -> Needs:
        first, itemsize = super().needs(), self.layer.accumulation_dtype.itemsize
        bases = sum(form.needed(itemsize) for form in self.forms.values() if not form.diagonal)
        kept = bases + itemsize * sum(p.numel() for p in self.layer.params.values())
        return Needs(first.computing + kept, kept)

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        found = self._bases()
        if self.leader is not None:
            assert isinstance(self.leader, EKFAC)  # as of its kind
            found = {**found, **{name: Q for name, Q in self.leader._bases().items() if name.startswith("A")}}

        def basis(side: str) -> Parts | None:
            return found[side] if side in found else tuple(found[part] for part in numbered(found, side)) or None

        return Correction(self.layer, self.scale, basis("G"), basis("A"))

    def _bases(self) -> dict[str, Tensor]:
        """Its decompositions, computed once if nothing is added any more."""
        found = self.decomposed or {name: self.decompose(name, M) for name, M in self.decompositions().items()}
        if self._for_good:
            self.decomposed = found
        return found

    def decompositions(self) -> dict[str, Tensor]:
        A, G = self.factors()
        A = A if self.leader is None else None  # it has the leader's basis
        matrices: dict[str, Tensor] = {}
        for name, factor in (("G", G), ("A", A)):
            if factor is None or self.forms[name].diagonal:
                continue
            if isinstance(factor, Tensor):
                matrices[name] = factor
            else:
                matrices |= {f"{name}.{k}": part for k, part in enumerate(factor)}
        return matrices

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

    def __init__(self, layer: Layer, scale: LossScale, QG: Parts | None, QA: Parts | None) -> None:
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
        if _same_basis(self.QG, other.QG) and _same_basis(self.QA, other.QA):
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
                total = multiplied(total.mT, _turn(before.QG, self.QG)).mT
            if self.QA is not None and before.QA is not None and self.layer.weight in group.keys:
                total = multiplied(total, _turn(before.QA, self.QA))
            self.sums[group.name] = total
        self.counts, self.totals = dict(before.counts), replace(before.totals)


def _same_basis(mine: Parts | None, theirs: Parts | None) -> bool:
    if mine is theirs or mine is None or theirs is None:
        return mine is theirs
    if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
        return isinstance(mine, Tensor) and isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def _turn(before: Parts, now: Parts) -> Parts:
    """Squares of the entries of `before.mT @ now`."""
    if isinstance(before, Tensor):
        assert isinstance(now, Tensor)
        return (before.mT @ now).square()
    return tuple((P.mT @ Q).square() for P, Q in zip(before, now, strict=True))


def ekfac_blocks(
    layer: Layer, QG: Parts | None, QA: Parts | None, values: Mapping[str, Tensor]
) -> dict[str, LinearOperator]:
    """Blocks of a layer from eigenvectors and corrected eigenvalues. The tensors are shared, not copied."""
    blocks: dict[str, LinearOperator] = {}
    axes = len(layer.groups[0].layout.matrix_shape)
    for group in layer.groups:
        flat = values[group.name].reshape(-1)
        *batch, rows, columns = group.layout.matrix_shape
        left = _identity(rows, batch, flat) if QG is None else as_factor(QG, Structure.GENERAL, axes)
        if layer.weight in group.keys:
            right = _identity(columns, batch, flat) if QA is None else as_factor(QA, Structure.GENERAL, axes)
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
