"""KFAC and EKFAC: one Kronecker product per affine layer.

For a layer with rows `a_{n,s}` and gradients `g_{v,n,s}` of the un-reduced loss:

* expand: `A = 1/(N·S) Σ_{n,s} a aᵀ`, `G = c Σ_{v,n,s} g gᵀ`;
* reduce: `A = 1/N Σ_n ā āᵀ` with `ā_n = mean_s a`, `G = c Σ_{v,n} ĝ ĝᵀ` with `ĝ_n = Σ_s g`;

the block is `G ⊗ A` on the row-major vector of the weight, `W ↦ G W A`. EKFAC keeps the eigenvectors of both factors
and replaces the eigenvalues by `Λ = c Σ_{v,n} (Q_Gᵀ J_{v,n} Q_A)²`, the diagonal of the exact block in that basis.

Sources: Martens & Grosse 2015 (KFAC), Grosse & Martens 2016 (convolutions), Eschenhagen et al. 2023 (expand and
reduce), George et al. 2018 (EKFAC).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvlinops_plus.curvature.accumulate import Accumulator, needs_gradients
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import Dense, Eigendecomposed, Kronecker, LinearOperator, Structure
from curvlinops_plus.linalg.numerics import eigh, gram
from curvlinops_plus.risk import Group, Layer, LayerBatch, Totals

__all__ = ["EKFAC", "KFAC", "compute_eigenvalue_correction_linear_weight_sharing", "squared_gradients"]

# Products per example are formed in pieces of about this many bytes, which stay in a processor's cache.
_CHUNK_BYTES = 2**23


class KFAC(Accumulator):
    """Kronecker-factored approximate curvature of an affine layer. Arguments as for `Accumulator`, and:

    Args:
        kfac_approx: "expand" treats positions that share the weight as examples of their own; "reduce" averages inputs
            and sums gradients over them first.

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
        scale: Callable[[Totals], Tensor | float],
        kfac_approx: str = "expand",
    ) -> None:
        super().__init__(layer, group, scale)
        if kfac_approx not in ("expand", "reduce"):
            raise ValueError(f"kfac_approx={kfac_approx!r} is unknown; expected 'expand' or 'reduce'.")
        self.reduce = kfac_approx == "reduce"
        #: The group that has the weight: its columns are those of A. None if only the bias is tracked.
        self.weight_group = next((g for g in layer.groups if layer.weight in g.keys), None)

    def update(self, seen: LayerBatch) -> None:
        if seen.first and self.weight_group is not None:
            weight = seen.restrict(self.weight_group)
            if self.reduce:
                a = weight.mean_inputs()
                self.add("A", gram(a), float(len(a)))
            else:
                total, rows = weight.input_gram()
                self.add("A", total, rows)
        if seen.num_vectors:
            self.add("G", seen.grad_gram(self.reduce))

    def factors(self) -> tuple[Tensor | None, Tensor]:
        """`A` (None if the weight is not tracked) and `G` (the identity if nothing was sent back)."""
        A = None if self.weight_group is None else self.value("A")
        if "G" in self.sums:
            return A, self.value("G")
        key = self.layer.weight or self.layer.bias
        assert key is not None
        group = next(g for g in self.layer.groups if key in g.keys)
        return A, torch.eye(
            group.layout.matrix_shape[-2], dtype=self.layer.accumulation_dtype, device=self.layer.device
        )

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        A, G = self.factors()
        return kfac_blocks(self.layer, A, G)


def kfac_blocks(layer: Layer, A: Tensor | None, G: Tensor) -> dict[str, LinearOperator]:
    """Blocks of a layer from its factors: `G ⊗ A` where the weight is, `G` for a bias apart. The tensors are shared."""
    factor = Dense(G, Structure.PSD)  # one object for weight and bias: it is decomposed once
    blocks: dict[str, LinearOperator] = {}
    for group in layer.groups:
        if layer.weight in group.keys:
            assert A is not None
            blocks[group.name] = Kronecker(factor, A)
        else:
            blocks[group.name] = factor
    return blocks


class EKFAC(KFAC):
    """Eigenvalue-corrected KFAC: its trace is the exact block's, and it is never further from it than KFAC.

    Arguments as for `Accumulator`, and:

    Args:
        kfac_approx: Which factors give the eigenvectors, "expand" or "reduce". The eigenvalues are exact in either
            basis.

    Cost: two sweeps, an eigendecomposition of each factor.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> risk = EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), [(torch.eye(2), torch.zeros(2, 1))])
        >>> round(float(curvature(risk, EKFAC).trace), 4)
        4.0
    """

    def update(self, seen: LayerBatch) -> None:
        if seen.num_vectors == 0:
            raise needs_gradients(self)
        super().update(seen)

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        A, G = self.factors()
        return Correction(
            self.layer,
            self.scale,
            eigenvectors(self.layer, "G", G),
            None if A is None else eigenvectors(self.layer, "A", A),
        )


class Correction(Accumulator):
    """EKFAC's second sweep: the diagonal of the exact blocks in a Kronecker basis.

    Args:
        layer: The layer.
        scale: As for every accumulator.
        QG: Eigenvectors of the gradient factor.
        QA: Eigenvectors of the input factor, None if the weight is not tracked.
    """

    per_group = False
    affine = True

    def __init__(self, layer: Layer, scale: Callable[[Totals], Tensor | float], QG: Tensor, QA: Tensor | None) -> None:
        super().__init__(layer, None, scale)
        self.QG, self.QA = QG, QA

    def update(self, seen: LayerBatch) -> None:
        for group in self.layer.groups:
            if self.layer.weight in group.keys:
                part = seen.restrict(group)
                for g in seen.grads:
                    self.add(group.name, squared_gradients(g, part.inputs, self.QG, self.QA))
            else:
                self.add(group.name, (seen.summed_grads() @ self.QG).square().sum((0, 1)))

    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        values = {group.name: self.value(group.name) for group in self.layer.groups}
        return ekfac_blocks(self.layer, self.QG, self.QA, values)


def ekfac_blocks(
    layer: Layer, QG: Tensor, QA: Tensor | None, values: Mapping[str, Tensor]
) -> dict[str, LinearOperator]:
    """Blocks of a layer from eigenvectors and corrected eigenvalues. The tensors are shared, not copied."""
    blocks: dict[str, LinearOperator] = {}
    for group in layer.groups:
        flat = values[group.name].view(-1)
        if layer.weight in group.keys:
            assert QA is not None
            blocks[group.name] = Eigendecomposed(Kronecker(QG, QA, Structure.GENERAL), flat)
        else:
            blocks[group.name] = Eigendecomposed(Dense(QG), flat)
    return blocks


def eigenvectors(layer: Layer, name: str, factor: Tensor) -> Tensor:
    """Eigenvectors of one factor; failures name the layer."""
    try:
        return eigh(factor)[1]
    except NumericsError as error:
        raise NumericsError(f"{layer.title}, factor {name}: {error}") from error


def squared_gradients(g: Tensor, a: Tensor, QG: Tensor | None = None, QA: Tensor | None = None) -> Tensor:
    """`Σ_n (Q_Gᵀ (Σ_s g_{n,s} a_{n,s}ᵀ) Q_A)²`, entry by entry.

    Args:
        g: Output gradients [N, S, o].
        a: Inputs [N, S, i].
        QG: Basis of the rows [o, o], None for the identity.
        QA: Basis of the columns [i, i], None for the identity.

    Returns:
        [o, i].

    Cost: products per example are formed in pieces of a few megabytes, and rotated before or after, whichever takes
    fewer operations. Without weight sharing (S = 1) nothing per example is formed at all.
    """
    (N, S, o), i = g.shape, a.shape[2]
    if S == 1:
        g, a = g[:, 0], a[:, 0]
        g = g if QG is None else g @ QG
        a = a if QA is None else a @ QA
        return g.square().T @ a.square()
    rotate_first = S * (o * o + i * i) <= o * i * (o + i)
    if rotate_first:
        g = g if QG is None else g @ QG
        a = a if QA is None else a @ QA
    total = g.new_zeros(o, i)
    step = max(1, _CHUNK_BYTES // (o * i * g.element_size()))
    for start in range(0, N, step):
        J = g[start : start + step].mT @ a[start : start + step]
        if not rotate_first:
            J = J if QG is None else QG.T @ J
            J = J if QA is None else J @ QA
        total += J.square_().sum(0)
    return total


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
