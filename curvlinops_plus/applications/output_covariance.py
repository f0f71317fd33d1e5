"""Covariances `J Σ Jᵀ` of a model's outputs, for a covariance `Σ` of its parameters that has structure.

For each example `n` and number `c` of its output, `φ_{n,c} = Lᵀ J_{n,c}` with `Σ = L Lᵀ`, and covariances are products
of these vectors. Unit vectors are sent back through a recorded forward pass, and each layer forms its part of `φ` from
what it receives: the Jacobian of all layers is never formed.

Where a layer reads one row `a` for each example, its part of the Jacobian is `g aᵀ`, and in an eigenbasis of a
Kronecker product `φ = (Q_Gᵀ g) √(Λ (Q_Aᵀ a)²)`: as many numbers as the layer has outputs, not as many as it has
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.exact import Jacobian
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import BlockDiagonal, Diagonal, Eigendecomposed, Kronecker, LinearOperator
from curvlinops_plus.linalg.operator import Scaled
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.risk import Draws, EmpiricalRisk, LayerBatch, Vectors
from curvlinops_plus.risk.batches import Batch, count_examples, to_device
from curvlinops_plus.risk.losses import Losses, LossWeights
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import eager, untraced
from curvlinops_plus.risk.risk import Checked
from curvlinops_plus.risk.sweep import RecordedPasses

Then = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Outputs:
    """Outputs of some examples, and how uncertain they are.

    Attributes:
        mean: What the model returns, in canonical form [N, R, C].
        spread: Variances [N, R, C], or covariances [N, R, C, C] of the numbers of each loss term.
        f_shape: The shape in which the model returns them.
        class_axis: The axis of these that holds the C numbers, where it is not the loss's own.
    """

    mean: Tensor
    spread: Tensor
    f_shape: torch.Size
    class_axis: int | None


class OutputCovariance:
    """Covariances of outputs, for a root of the covariance of parameters.

    Args:
        K: The curvature that the covariance was made of: it knows model, layers and parameters.
        picked: Positions of the parameters that the covariance is about; None for all.
        max_bytes: Memory for derivatives of outputs that are held at a time.
    """

    def __init__(self, K: Any, picked: Tensor | None, max_bytes: int) -> None:
        self.K, self.picked, self.max_bytes = K, picked, max_bytes
        self.likelihood: Likelihood = K.risk.losses[0].likelihood
        self.risk = _without_targets(K.risk)

    @untraced
    def __call__(self, root: BlockDiagonal, X: Any, full: bool, then: Then | None = None) -> Outputs:
        """The outputs for inputs `X`, and their variances, or (`full`) the covariances within each loss term.

        Args:
            root: `L`, symmetric or not, with `L Lᵀ` the covariance of the parameters.
            X: What the model is called with.
            then: What is made of mean and spread, in place of them: covariances of a chunk need not stay.

        Raises:
            ValueError: If there are no inputs.
            NumericsError: If the derivatives of a single example take more than `max_bytes`.
        """
        with preserve_state(self.risk.model, self.risk.data), outside_autocast(self.risk.device):
            return self._in_chunks(root, X, full, then)

    def _in_chunks(self, root: BlockDiagonal, X: Any, full: bool, then: Then | None) -> Outputs:
        risk, found = self.risk, []
        X = to_device(X, risk.device)
        # The model is called as `model(**X)` where the data's batches are mappings.
        unpack = isinstance(X, Mapping) and isinstance(next(iter(self.K.risk.data), None), Mapping)
        X = {key: x for key, x in X.items() if key != "labels"} if unpack else X
        N = count_examples(X, None, 0, risk.options.batch_size_fn, unpack)
        if not N:
            raise ValueError("There are no inputs to predict for.")
        no_targets, start, step = risk.losses.joined([None]), 0, N
        while start < N:
            batch = Batch(_examples(X, N, start, start + step), no_targets, min(step, N - start), unpack, start)
            part = self._plain(batch)
            numbers = part.mean[0].numel() * risk.space.dim * risk.dtype.itemsize  # of one example, at most
            if not start and step == N and N > 1 and N * numbers > self.max_bytes and isinstance(X, (Tensor, Mapping)):
                step = 1  # tells how many there are
                continue
            spread, held = self._of_batch(root, batch, part, full)
            held += spread.numel() * spread.element_size()
            mean, spread = (part.mean, spread) if then is None else then(part.mean, spread)
            found.append(replace(part, mean=mean, spread=spread))
            start += step
            step = max(1, int(self.max_bytes // max(held / batch.num_examples, 1)))
        mean, spread = (torch.cat([getattr(part, name) for part in found]) for name in ("mean", "spread"))
        shape = torch.Size([found[0].f_shape[0] * N // len(found[0].mean), *found[0].f_shape[1:]])
        return replace(found[0], mean=mean, spread=spread, f_shape=shape)

    def _plain(self, batch: Batch) -> Outputs:
        """The outputs alone."""
        with torch.inference_mode(False), torch.no_grad(), eager():
            (f,), _, (axis,) = self.risk.run(batch)
        F = self.likelihood_terms(f, batch.num_examples, axis)
        return Outputs(F, F, f.shape, axis)

    def likelihood_terms(self, f: Tensor, N: int, axis: int | None) -> Tensor:
        """An output of the model in canonical form [N, R, C]."""
        return self.risk.losses[0].likelihood.canonical(f, f, N, axis)[0]

    def _of_batch(self, root: BlockDiagonal, batch: Batch, part: Outputs, full: bool) -> tuple[Tensor, float]:
        """Variances or covariances of a batch, and how many bytes were held."""
        if isinstance(self.K, BlockwiseLinearOperator):
            parts = _LayerParts(self.K.operator, root, self.picked, full, self.max_bytes, batch.num_examples)
            layers = [entry.layer for entry in self.K.plan]
            passes = RecordedPasses(self.risk, layers, _Units(), LossWeights(self.risk.losses))
            with passes.hooked():
                passes.observe(batch, Draws(0), parts)
            return parts.spread(part.mean.shape), parts.most
        rows = Jacobian(self.risk.with_data([batch]), check_deterministic=False).to_dense()
        order = torch.arange(len(rows), dtype=torch.float64, device=rows.device).reshape(part.f_shape)
        order = self.likelihood_terms(order, batch.num_examples, part.class_axis).long()
        J = rows[order.flatten()] if self.picked is None else rows[order.flatten()][:, self.picked]
        phi = (root @ J.T).T.reshape(*order.shape, -1)
        return phi @ phi.mT if full else phi.square().sum(-1), rows.numel() * rows.element_size()


class _LayerParts:
    """Receives the derivatives of each layer, and holds its part of `φ`, or of the variances.

    Attributes:
        most: Bytes that were held at most.
    """

    def __init__(
        self, K: BlockDiagonal, root: BlockDiagonal, picked: Tensor | None, full: bool, max_bytes: int, N: int
    ) -> None:
        self.root, self.full, self.max_bytes, self.N, self.most = root, full, max_bytes, N, 0.0
        self._inside = _positions_inside(K, picked)
        self._parts: dict[str, list[Tensor]] = defaultdict(list)  # [V, N] or [V, N, k], for the vectors until now
        self._factors: dict[str, Tensor] = {}  # √(Λ (Q_Aᵀ a)²) of each block, [N, o]
        self._held = 0

    def __call__(self, batch: LayerBatch) -> None:
        for group in batch.layer.groups:
            if group.name in self.root.blocks:
                phi = self._phi(group.name, batch.restrict(group))
                self.most = max(self.most, float(self._held + phi.numel() * phi.element_size()))
                part = phi if self.full else phi.square().sum(-1)
                self._held += part.numel() * part.element_size()
                self._parts[group.name].append(part)
        if self.N == 1 and self._held > self.max_bytes:
            raise NumericsError(
                f"Covariances between the outputs of a single example need derivatives of more than "
                f"max_bytes={self.max_bytes}. Take link='probit', which needs variances alone, the parameters of the "
                "last layer alone, or a larger max_bytes."
            )

    def _phi(self, name: str, batch: LayerBatch) -> Tensor:  # [V, N, k]
        root, inside = self.root.blocks[name], self._inside[name]
        c = 1.0
        while isinstance(root, Scaled):
            root, c = root.A, c * float(root.c)
        known = isinstance(root, Diagonal) or (isinstance(root, Eigendecomposed) and isinstance(root.basis, Kronecker))
        if inside is None and known and (g := _single_rows(batch)) is not None:
            if batch.first:
                self._factors[name] = c * _row_factors(root, batch)
            return (g if isinstance(root, Diagonal) else _rotated(g, _factors_of(root).G)) * self._factors[name]
        J = batch.per_example_grads.flatten(2)
        self.most = max(self.most, float(self._held + 2 * J.numel() * J.element_size()))
        J = J if inside is None else J.index_select(2, inside)
        columns = J.flatten(0, 1).T
        if isinstance(root, Eigendecomposed):  # a rotation is left out: products of φ are the same
            phi = root.values[:, None] * root.basis._rmatmat(columns)
        else:
            phi = root._rmatmat(columns)
        return c * phi.T.reshape(J.shape)

    def spread(self, shape: torch.Size) -> Tensor:
        """Variances [N, R, C], or covariances [N, R, C, C]."""
        N, R, C = shape
        total: Tensor | float = 0.0
        for name in list(self._parts):
            part = torch.cat(self._parts.pop(name))
            if not self.full:
                total = total + part.view(R, C, N).permute(2, 0, 1)
                continue
            phi = part.view(R, C, N, -1).permute(2, 0, 1, 3)
            total = total + phi @ phi.mT
        assert isinstance(total, Tensor)
        return total


def _single_rows(batch: LayerBatch) -> Tensor | None:
    """Output gradients [V, N, o] of a layer that multiplies its weight with one row per example, else None."""
    if not batch.layer.affine or len(batch.calls) != 1 or len(batch.layer.roles) != 1:
        return None
    rows = batch.rows
    if not rows.weight or rows.sparse:
        return None
    g = rows.grads
    return g[:, :, 0] if g.ndim == 4 and g.shape[2] == 1 else None


def _row_factors(root: Any, batch: LayerBatch) -> Tensor:  # [N, o]
    """`√(Λ (Q_Aᵀ a)²)`, with `Λ [o, i]` the squared values of a root."""
    a = batch.rows.inputs
    assert isinstance(a, Tensor)
    a = a[:, 0]
    if isinstance(root, Diagonal):
        values = root.vector
    else:
        values, a = root.values, _rotated(a, _factors_of(root).A)
    return (a.square() @ values.view(-1, a.shape[1]).square().T).sqrt()


def _factors_of(root: Any) -> Kronecker:
    basis = root.basis
    assert isinstance(basis, Kronecker)
    return basis


def _rotated(rows: Tensor, Q: LinearOperator) -> Tensor:
    """`rows Q`."""
    return (Q._rmatmat(rows.flatten(0, -2).T)).T.reshape(rows.shape)


def _positions_inside(K: BlockDiagonal, picked: Tensor | None) -> dict[str, Tensor | None]:
    """Block name to the positions in the block that were picked; None if all of it was."""
    if picked is None:
        return dict.fromkeys(K.blocks)
    chosen = torch.zeros(K.shape[0], dtype=torch.bool, device=picked.device)
    chosen[picked] = True
    found = {name: chosen[at].nonzero()[:, 0] for name, at in K.positions().items()}
    return {name: None if len(inside) == K.blocks[name].shape[0] else inside for name, inside in found.items()}


class _Targetless(Likelihood):
    """Outputs in the form in which a loss reads them, where there are no targets."""

    def __init__(self, like: Likelihood) -> None:
        super().__init__(None, "sum")
        self.class_axis = like.class_axis

    def canonical(self, f: Tensor, y: Any, num_examples: int, class_axis: int | None = None) -> tuple[Tensor, Tensor]:
        return super().canonical(f, f, num_examples, class_axis)

    def canonical_target(self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int) -> Tensor:
        return F

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return torch.zeros_like(F[..., 0])


class _Units(Vectors):
    """A unit vector for each number of an example's output, the same for all examples."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return F.shape[1] * F.shape[2]

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        for r in range(F.shape[1]):
            for c in range(F.shape[2]):
                unit = torch.zeros_like(F)
                unit[:, r, c] = 1
                yield unit


def _without_targets(risk: EmpiricalRisk) -> EmpiricalRisk:
    """The same model, parameters and layers for inputs alone, in this process."""
    other = copy(risk)
    (one,) = risk.losses
    loss = _Targetless(one.likelihood)
    other.losses = Losses({"dict": {one.key: loss}, "tuple": (loss,)}.get(risk.losses.form, loss))
    other.checked, other.processes = Checked(), Alone()
    other.options = replace(risk.options, mask=None, shift_labels=False, progressbar=False)
    return other


def _examples(X: Any, N: int, start: int, stop: int) -> Any:
    """Some of the examples of an input."""
    if isinstance(X, Tensor):
        return X[start:stop]
    if not isinstance(X, Mapping) or (start == 0 and stop >= N):
        return X
    return {key: x[start:stop] if isinstance(x, Tensor) and x.ndim and len(x) == N else x for key, x in X.items()}
