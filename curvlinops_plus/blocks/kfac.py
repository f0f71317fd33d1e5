"""KFAC: one Kronecker product per affine layer.

For a layer with rows `a_{n,s}` and gradients `g_{v,n,s}` of the un-reduced loss:

* expand: `A = 1/(N·S) Σ_{n,s} a aᵀ`, `G = c Σ_{v,n,s} g gᵀ`;
* reduce: `A = 1/N Σ_n ā āᵀ` with `ā_n = mean_s a`, `G = c Σ_{v,n} ĝ ĝᵀ` with `ĝ_n = Σ_s g`;

the block is `G ⊗ A` on the row-major vector of the weight, `W ↦ G W A`.

Sources: Martens & Grosse 2015, Grosse & Martens 2016 (convolutions), Eschenhagen et al. 2023
(expand and reduce).

Beyond one matrix per layer: groups of a convolution have a pair of factors each; the input factor
of an embedding is a diagonal matrix of relative frequencies, since its rows are one-hot; of a
factor that would be larger than `max_bytes`, such as `G` of a head with a large vocabulary, only
the diagonal is kept; and for a weight that is read in two roles (an embedding and the head tied to
it) the block is the Kronecker product nearest to the sum over roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
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
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    Kronecker,
    LinearOperator,
    Structure,
    nearest_kronecker,
)
from curvlinops_plus.linalg.dense import Factor
from curvlinops_plus.options import integer, one_of
from curvlinops_plus.risk import Group, Layer, LayerBatch

# Larger factors are diagonal.
MAX_BYTES = 2 * 2**30


@dataclass(frozen=True)
class FactorForm:
    """What is kept of a factor.

    Attributes:
        shape: Of its matrices, `[*b, d, d]`.
        diagonal: Whether only the diagonal is kept: of sparse rows, and of matrices above
            `max_bytes`.
        bytes: Of its matrices.
        kept: Bytes of what is kept.
    """

    shape: tuple[int, ...]
    diagonal: bool
    bytes: int
    kept: int


def factor_forms(layer: Layer, max_bytes: int) -> dict[str, FactorForm]:
    """The form of `G`, and of `A` if there is a weight."""
    forms: dict[str, FactorForm] = {}
    for group in layer.groups:
        *batch, o, i = group.layout.matrix_shape
        for name, d in {"G": o, "A": i}.items() if layer.weight in group.keys else [("G", o)]:
            diagonal_bytes = prod(batch) * layer.accumulation_dtype.itemsize * d
            matrix_bytes = diagonal_bytes * d
            diagonal = (name == "A" and layer.sparse) or matrix_bytes > max_bytes
            kept = diagonal_bytes if diagonal else matrix_bytes
            forms[name] = FactorForm((*batch, d, d), diagonal, matrix_bytes, kept)
    return forms


class KFAC(Accumulator):
    """Kronecker-factored approximate curvature of an affine layer. Arguments as for `Accumulator`,
    and:

    Args:
        kfac_approx: "expand" treats positions that share the weight as separate examples; "reduce"
            averages inputs and sums gradients over them first. An embedding's input factor is
            diagonal in both.
        max_bytes: The largest factor that is built, 2 GiB by default. Larger ones, such as `G` of a
            head with 50 000 rows, are diagonal: the diagonal of the block stays the same.
            `print(K)` says where.

    Raises:
        ValueError: If `kfac_approx` is neither.

    Cost: one sweep, two small Gram matrices per layer and batch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(
        ...     nn.Linear(2, 1, bias=False), nn.MSELoss(), [(torch.eye(2), torch.zeros(2, 1))]
        ... )
        >>> curvature(risk, KFAC).to_dense().round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """

    per_group = False
    affine = True
    readers: ClassVar[Readers] = {
        "kfac_approx": lambda name, value: one_of(name, value, "expand", "reduce"),
        "max_bytes": partial(integer, low=0),
    }

    def __init__(
        self,
        layer: Layer,
        group: Group | None,
        scale: LossScale,
        kfac_approx: str = "expand",
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(layer, group, scale)
        self.reduce = kfac_approx == "reduce"
        #: The group that has the weight: its columns are those of A. None if only the bias is
        #: tracked.
        self.weight_group = next((g for g in layer.groups if layer.weight in g.keys), None)
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
            if not role.calls:
                continue
            # The sums are "A" and "G" of the first role, "A1" and "G1" of the second one.
            suffix = number or ""
            input_form = self.forms.get("A")
            gradient_form = self.forms.get("G")
            if self.layer.roles[number].transposed:  # its factors change sides
                input_form, gradient_form = gradient_form, input_form
            if batch.first and input_form is not None and self.weight_group is not None:
                # Σ a aᵀ: of rows [M, i], or as the rule of the layer makes it.
                weight = role.restrict(self.weight_group)
                a = None if input_form.diagonal else weight.stacked_inputs(self.reduce)
                if a is None:
                    A, number = weight.input_gram(self.reduce, input_form.diagonal)
                    self.add(f"A{suffix}", A, number, is_shared=False)
                else:
                    self.add_rows(f"A{suffix}", a, ones=weight.bias, count=float(len(a)))
            if batch.num_vectors and gradient_form is not None:
                # Σ g gᵀ
                g = None if gradient_form.diagonal else role.stacked_grads(self.reduce)
                if g is None:
                    self.add(f"G{suffix}", role.grad_gram(self.reduce, gradient_form.diagonal))
                else:
                    self.add_rows(f"G{suffix}", g)

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        factors: dict[str, Factor] = {
            name: Diagonal(factor) if self.forms[name].diagonal else Dense(factor, Structure.PSD)
            for name, factor in self.factors().items()
        }
        G = factors["G"]  # one object for weight and bias: it is decomposed once
        blocks: dict[str, LinearOperator] = {group.name: G for group in self.layer.groups}
        if self.weight_group is not None:
            blocks[self.weight_group.name] = Kronecker(G, factors["A"])
        return blocks

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        # Of several positions the factors, by their definition, from rows whose products check (a)
        # compares.
        pairs = []
        for same_role in zip(*[batch.roles() for batch in batches]):
            called = [role for role in same_role if role.calls]
            if called:
                pairs.append(self._plain_factors(called, J.shape[2:]))
        if len(self.layer.roles) == 1:
            ((G, A),) = pairs
            shape = J.shape[2:]
            X = torch.linspace(-1, 2, shape.numel(), dtype=J.dtype, device=J.device)
            X = X.view(shape).sin()
            parts = [(block @ X.flatten(), (G @ X @ A).flatten())]
            has_diagonals = any(form.diagonal for form in self.forms.values())
            if is_one_product(J, batches) and not has_diagonals:
                parts.append(products(block, J))
            return parts
        if not isinstance(block, Kronecker):  # of a bias, made for the weight
            return []
        # The nearest product to a sum of products is at a right angle to what is missing.
        left = block.G.matrices()
        right = block.A.matrices()
        inner = [(left * G).sum() * (right * A).sum() for G, A in pairs]
        return [(block.frobenius_norm.square(), torch.stack(inner).sum())]

    def _plain_factors(
        self, batches: Sequence[LayerBatch], shape: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The factors of one role for a block of matrices `[*b, rows, columns]`: of all rows, by
        plain products.
        """
        batch = batches[0]
        *matrices, rows, columns = shape
        transposed = batch.role is not None and batch.role.transposed
        options: Any = {"dtype": self.layer.accumulation_dtype, "device": self.layer.device}
        G = torch.diag_embed(torch.ones(*matrices, columns if transposed else rows, **options))
        if batch.num_vectors:
            # G = c Σ g gᵀ
            g = torch.cat([part.grads for part in batches])  # [V, N, S, *b, o]
            if self.reduce:
                g = g.sum(2, keepdim=True)
            g = g.flatten(0, 2)
            G = self.scale(self.totals) * torch.einsum("m...i,m...j->...ij", g, g)
        A = torch.diag_embed(torch.ones(*matrices, 1, **options))
        if batch.weight:
            # A is the mean of a aᵀ over the rows that count.
            counted = batch._kept
            a = batch.inputs  # [N, S, *b, i]
            if not isinstance(a, Tensor):
                a = a.to_dense()
            if self.reduce:
                a = a.sum(1) / counted.clamp(min=1)
                counted = counted > 0
            else:
                a = a.flatten(0, 1)
            A = torch.einsum("m...i,m...j->...ij", a, a) / counted.sum(0)[..., None].clamp(min=1)
            if batch.sparse:  # of an embedding by definition
                A = torch.diag(A.diagonal())
        if transposed:
            G, A = A, G
        return _of_size(G, rows, self.forms["G"]), _of_size(A, columns, self.forms.get("A"))

    def factors(self) -> dict[str, Tensor]:
        """`G` (the identity if nothing was backpropagated), and `A` if the weight is tracked.

        Diagonal factors are vectors. Of a weight with several roles: the nearest product to the sum
        over roles.
        """
        if self.weight_group is None:
            return {"G": self._gradient_factor(0)}
        if len(self.layer.roles) == 1:
            return {"G": self._gradient_factor(0), "A": self.value("A")}
        pairs: list[tuple[Tensor, Tensor]] = []
        for number, role in enumerate(self.layer.roles):
            name = f"A{number or ''}"
            if name in self.raw:  # a module may never have been called
                A = self.value(name)
                G = self._gradient_factor(number)
                left, right = (A, G) if role.transposed else (G, A)
                pairs.append((_of_form(left, self.forms["G"]), _of_form(right, self.forms["A"])))
        return dict(zip("GA", nearest_kronecker(pairs), strict=True))

    def _gradient_factor(self, number: int) -> Tensor:
        """`G` of a role."""
        name = f"G{number or ''}"
        if name in self.raw:
            return self.value(name)
        form = self.forms["A" if self.layer.roles[number].transposed else "G"]
        layer = self.layer
        ones = torch.ones(form.shape[:-1], dtype=layer.accumulation_dtype, device=layer.device)
        return ones if form.diagonal else torch.diag_embed(ones)


def _of_form(factor: Tensor, form: FactorForm) -> Tensor:
    """A factor of a role in the form that the layer's has; columns that the role does not have are
    zero.
    """
    missing = form.shape[-1] - factor.shape[-1]
    if form.diagonal:
        return torch.nn.functional.pad(factor, (0, missing))
    M = torch.diag(factor) if factor.ndim == 1 else factor
    return torch.nn.functional.pad(M, (0, missing, 0, missing)) if missing else M


def _of_size(M: Tensor, size: int, form: FactorForm | None) -> Tensor:
    """A factor with zeros for columns that a role does not have, and where the layer keeps only a
    diagonal.
    """
    M = torch.nn.functional.pad(M, (0, size - M.shape[-1]) * 2)  # [*b, size, size]
    if form is None or not form.diagonal:
        return M
    return M * torch.eye(size, dtype=M.dtype, device=M.device)
