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
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, LossScale, Needs
from curvlinops_plus.linalg import Dense, Diagonal, Kronecker, LinearOperator, Structure, nearest_kronecker
from curvlinops_plus.linalg.dense import Factor
from curvlinops_plus.risk import Group, Layer, LayerBatch

# Larger factors are diagonal.
MAX_BYTES = 2 * 2**30


@dataclass(frozen=True)
class FactorForm:
    """What is kept of a factor.

    Attributes:
        size: Its rows.
        batch: Its batch axis, () or (b,).
        bytes: Of its matrices.
        diagonal: Whether only the diagonal is kept: of sparse rows, and of matrices above `max_bytes`.
        kept: Bytes of what is kept.
    """

    size: int
    batch: tuple[int, ...]
    bytes: int
    diagonal: bool
    kept: int


def factor_forms(layer: Layer, max_bytes: int) -> dict[str, FactorForm]:
    """The form of `G`, and of `A` if there is a weight."""

    def form(size: int, batch: Sequence[int], sparse: bool) -> FactorForm:
        row = prod(batch) * layer.accumulation_dtype.itemsize * size
        diagonal = sparse or row * size > max_bytes
        return FactorForm(size, tuple(batch), row * size, diagonal, row if diagonal else row * size)

    forms: dict[str, FactorForm] = {}
    for group in layer.groups:
        *batch, o, i = group.layout.matrix_shape
        forms["G"] = form(o, batch, False)
        if layer.weight in group.keys:
            forms["A"] = form(i, batch, layer.sparse)
    return forms


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
        self.reduce, weight = kfac_approx == "reduce", layer.weight
        #: The group that has the weight: its columns are those of A. None if only the bias is tracked.
        self.weight_group = next((g for g in layer.groups if weight in g.keys), None)
        #: What is kept of each factor, by its name.
        self.forms = factor_forms(layer, max_bytes)

    @classmethod
    def remark(cls, layer: Layer, max_bytes: int = MAX_BYTES, **options: Any) -> str:
        return ", ".join(
            f"diagonal {name} ({form.bytes / 2**30:.2g} GiB as a matrix)"
            for name, form in factor_forms(layer, max_bytes).items()
            if form.bytes > max_bytes and not (name == "A" and layer.sparse)
        )

    def needs(self) -> Needs:
        factors = sum(form.kept for form in self.forms.values())
        return Needs(max(1, len(self.layer.roles)) * factors, factors)

    def update(self, batch: LayerBatch) -> None:
        for number, role in enumerate(batch.roles()):
            of_A, of_G = (self.forms.get(name) for name in ("A", "G"))
            if self.layer.roles[number].transposed:  # its factors change sides
                of_A, of_G = of_G, of_A
            assert of_G is not None
            if role.calls and batch.first and of_A is not None:
                assert self.weight_group is not None
                rows = role.restrict(self.weight_group).rows
                name = f"A{number or ''}"
                if not of_A.diagonal and (a := rows.stacked_inputs(self.reduce)) is not None:
                    self.add_rows(name, a, ones=a.shape[1] < rows.columns, count=float(a.shape[0]))
                elif not (of_A.diagonal or self.reduce) and (packed := rows.packed_inputs()) is not None:
                    self.add_packed(name, packed)
                else:
                    self.add(name, *rows.input_gram(self.reduce, of_A.diagonal))
            if role.calls and batch.num_vectors:
                rows, name = role.rows, f"G{number or ''}"
                if not of_G.diagonal and (g := rows.stacked_grads(self.reduce)) is not None:
                    self.add_rows(name, g)
                else:
                    self.add(name, rows.grad_gram(self.reduce, of_G.diagonal))

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        A, G = self.factors()
        axes = len(self.layer.groups[0].layout.matrix_shape)
        factor = as_factor(G, Structure.PSD, axes)  # one object for weight and bias: it is decomposed once
        blocks: dict[str, LinearOperator] = {group.name: factor for group in self.layer.groups}
        if self.weight_group is not None:
            assert A is not None
            blocks[self.weight_group.name] = Kronecker(factor, as_factor(A, Structure.PSD, axes))
        return blocks

    def factors(self) -> tuple[Tensor | None, Tensor]:
        """`A` (None if the weight is not tracked) and `G` (the identity if nothing was backpropagated).

        Diagonal factors are vectors. Of a weight with several roles: the nearest product to the sum over roles.
        """
        if len(self.layer.roles) == 1 or self.weight_group is None:
            return (None if self.weight_group is None else self._sum("A")), self._gradient_factor(0)
        pairs = []
        for number, role in enumerate(self.layer.roles):
            if (A := self._sum(f"A{number or ''}")) is not None:  # a module may never have been called
                G = self._gradient_factor(number)
                left, right = (A, G) if role.transposed else (G, A)
                pairs.append((_of_form(left, self.forms["G"]), _of_form(right, self.forms["A"])))
        if not pairs:
            return self.value("A"), self.value("G")  # says that nothing was added
        G, A = nearest_kronecker(pairs)
        return A, G

    def _sum(self, name: str) -> Tensor | None:
        """A factor that was added to, None for another."""
        return self.value(name) if self.has(name) else None

    def _gradient_factor(self, number: int) -> Tensor:
        """`G` of a role."""
        if (found := self._sum(f"G{number or ''}")) is not None:
            return found
        form = self.forms["A" if self.layer.roles[number].transposed else "G"]
        one = torch.ones(*form.batch, form.size, dtype=self.layer.accumulation_dtype, device=self.layer.device)
        return one if form.diagonal else torch.diag_embed(one)


def _of_form(factor: Tensor, form: FactorForm) -> Tensor:
    """A factor of a role in the form that the layer's has; columns that the role does not have are zero."""
    missing = form.size - factor.shape[-1]
    if form.diagonal:
        return torch.nn.functional.pad(factor, (0, missing))
    M = torch.diag(factor) if factor.ndim == 1 else factor
    return torch.nn.functional.pad(M, (0, missing, 0, missing)) if missing else M


def as_factor(factor: Tensor, structure: Structure, axes: int = 2) -> Factor:
    """A factor as an operator; the tensor is shared.

    Args:
        structure: Of its matrices.
        axes: Of a matrix, with those of a batch: what has fewer is a diagonal.
    """
    return Dense(factor, structure) if factor.ndim == axes else Diagonal(factor)
