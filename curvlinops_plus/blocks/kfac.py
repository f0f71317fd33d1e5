"""KFAC: one Kronecker product per affine layer.

For a layer with rows `a_{n,s}` and gradients `g_{v,n,s}` of the un-reduced loss:

* expand: `A = 1/(N·S) Σ_{n,s} a aᵀ`, `G = c Σ_{v,n,s} g gᵀ`;
* reduce: `A = 1/N Σ_n ā āᵀ` with `ā_n = mean_s a`, `G = c Σ_{v,n} ĝ ĝᵀ` with `ĝ_n = Σ_s g`;

the block is `G ⊗ A` on the row-major vector of the weight, `W ↦ G W A`.

Sources: Martens & Grosse 2015, Grosse & Martens 2016 (convolutions), Eschenhagen et al. 2023 (expand and reduce).

Beyond one matrix per layer: groups of a convolution have a pair of factors each; the input factor of an embedding is a
diagonal matrix of relative frequencies, since its rows are one-hot; of a factor that would be larger than `max_bytes`,
such as `G` of a head with a large vocabulary, only the diagonal is kept; and for a
weight that is read in two roles (an embedding and the head tied to it) the block is the Kronecker product nearest to
the sum over roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from curvlinops_plus.linalg import (
    Kronecker,
    LinearOperator,
    Structure,
    nearest_kronecker,
)
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.risk import Group, Layer, LayerBatch
from curvlinops_plus.risk.affine_rows import AffineRows

if TYPE_CHECKING:
    from typing_extensions import Self

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
        self.reduce, weight = kfac_approx == "reduce", layer.weight
        #: The group that has the weight: its columns are those of A. None if only the bias is tracked.
        self.weight_group = next((g for g in layer.groups if weight in g.keys), None)
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
        factors = sum(form.kept for form in self.forms.values())
        return Needs(max(1, len(self.layer.roles)) * factors, factors)

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
            self.add_rows(name, a, ones=a.shape[1] < rows.columns, count=float(a.shape[0]))
        elif not (form.diagonal or self.reduce) and (packed := rows.packed_inputs()) is not None:
            self.add_packed(name, packed)
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
        if name in self._sums or name in self._rows:
            return self.value(name)
        return tuple(self.value(part) for part in numbered(self.names, name)) or None

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
