"""Covariances `J Σ Jᵀ` of a model's outputs, for a covariance `Σ` of its parameters that has structure.

For each example `n` and number `c` of its output, `φ_{n,c} = Lᵀ J_{n,c}` with `Σ = L Lᵀ`, and covariances are products
of these vectors. Unit vectors are backpropagated through a recorded forward pass, and each layer forms its part of `φ`
from what it receives: variances are added up, and only one layer's derivatives are held at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.applications.example_gradients import Gradients, show
from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import BlockDiagonal, Diagonal, Eigendecomposed, Kronecker, LinearOperator, Scaled
from curvlinops_plus.risk import Draws, EmpiricalRisk, LayerBatch, Vectors
from curvlinops_plus.risk.batches import Batch, count_examples, to_device
from curvlinops_plus.risk.function_reads import layers_of
from curvlinops_plus.risk.losses import Losses, LossWeights
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import eager, untraced
from curvlinops_plus.risk.risk import Checked

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
        self.risk = _without_targets(K.risk)
        self._blockwise = isinstance(K, BlockwiseLinearOperator)
        #: What an example of the last chunk held, of covariances and of variances: the first chunk is of one example.
        self._held = {True: max_bytes, False: max_bytes}

    @untraced
    def __call__(self, root: BlockDiagonal, X: Any, full: bool, then: Then | None = None) -> Outputs:
        """The outputs for inputs `X`, and their variances, or (`full`) the covariances within each loss term.

        Args:
            root: `L` with `L Lᵀ` the covariance of the parameters.
            X: What the model is called with.
            then: What is made of mean and spread, in place of them: covariances of a chunk need not stay.

        Raises:
            ValueError: If there are no inputs.
            NumericsError: If the derivatives of a single example take more than `max_bytes`.
        """
        risk = self.risk
        X = to_device(X, risk.device)
        # The model is called as `model(**X)` where the data's batches are mappings.
        unpack = isinstance(X, Mapping) and isinstance(next(iter(self.K.risk.data), None), Mapping)
        X = {key: x for key, x in X.items() if key != "labels"} if unpack else X
        N = count_examples(X, None, 0, risk.options.batch_size_fn, unpack)
        if not N:
            raise ValueError("There are no inputs to predict for.")
        no_targets, found = risk.losses.joined([None]), []

        def part(start: int, stop: int) -> Batch:
            return Batch(_examples(X, N, start, stop), no_targets, stop - start, unpack, start)

        with preserve_state(risk.model, risk.data), torch.autocast(risk.device.type, enabled=False):
            start = 0
            while start < N:
                step = max(1, self.max_bytes // self._held[full]) if isinstance(X, (Tensor, Mapping)) else N
                batch = part(start, min(start + step, N))
                outputs = self._plain(batch)
                spread = self._of_batch(root, batch, outputs.mean.shape, full)
                mean, spread = (outputs.mean, spread) if then is None else then(outputs.mean, spread)
                found.append(replace(outputs, mean=mean, spread=spread))
                start += step
        mean, spread = (torch.cat([getattr(one, name) for one in found]) for name in ("mean", "spread"))
        shape = torch.Size([found[0].f_shape[0] * N // len(found[0].mean), *found[0].f_shape[1:]])
        return replace(found[0], mean=mean, spread=spread, f_shape=shape)

    def _plain(self, batch: Batch) -> Outputs:
        """The outputs alone."""
        with torch.inference_mode(False), torch.no_grad(), eager():
            (f,), _, (axis,) = self.risk.run(batch)
        F = self.risk.losses[0].likelihood.canonical(f, f, batch.num_examples, axis)[0]
        return Outputs(F, F, f.shape, axis)

    def _of_batch(self, root: BlockDiagonal, batch: Batch, shape: torch.Size, full: bool) -> Tensor:
        """Variances `[N, R, C]`, or covariances `[N, R, C, C]`, of outputs of this shape."""
        N, R, C = shape
        parts: dict[str, list[Tensor]] = defaultdict(list)  # [V, N, k] of each block, for covariances
        held, inside, sizes = 1, _positions_inside(self.K.operator, self.picked) if self._blockwise else {}, {}
        variances = torch.zeros(R * C, N, dtype=self.risk.dtype, device=self.risk.device)

        def take(name: str, vector: int, phi: Tensor) -> None:  # [V, N, k]
            nonlocal held
            size = 2 * phi.numel() * phi.element_size()
            held = held + size if full else max(held, size)
            if full and N == 1 and held > self.max_bytes:
                raise NumericsError(
                    "Covariances between the outputs of a single example need derivatives of more than "
                    f"max_bytes={self.max_bytes}. Take link='probit', which needs variances alone, the parameters of "
                    "the last layer alone, or a larger max_bytes."
                )
            if full:
                parts[name].append(phi)
            else:
                variances[vector : vector + len(phi)] += phi.square().sum(-1)

        def add(seen: LayerBatch, vector: int) -> None:
            for group in seen.layer.groups:
                if group.name in root.blocks:
                    own, at, L = seen.restrict(group), inside[group.name], root.blocks[group.name]
                    phi = _of_rows(L, own, sizes) if at is None else None
                    if phi is None:
                        J = own.per_example_grads.flatten(2)  # [V, N, k]
                        phi = _of_gradients(L, J if at is None else J.index_select(2, at))
                    take(group.name, vector, phi)

        weights = LossWeights(self.risk.losses)
        if self._blockwise:
            layers = [entry.layer for entry in self.K.plan]
            show(self.risk, _Units(), weights, batch, lambda batch, layers: add, layers)
        else:  # one dense matrix
            found = Gradients(self.risk)
            show(self.risk, _Units(), weights, batch, found.begin, layers_of(self.risk))
            J = self.risk.space.flatten_rows(found.pop())  # [V, N, P]
            take("all", 0, _of_gradients(root, J if self.picked is None else J[..., self.picked]))
        self._held[full] = held // N + 1
        if not full:
            return variances.view(R, C, N).permute(2, 0, 1)
        phis = [torch.cat(part).view(R, C, N, -1).permute(2, 0, 1, 3) for part in parts.values()]
        return torch.stack([phi @ phi.mT for phi in phis]).sum(0)


def _of_gradients(root: LinearOperator, J: Tensor) -> Tensor:  # [V, N, k]
    return (root.T @ J.flatten(0, 1).T).T.reshape(J.shape)


def _of_rows(root: LinearOperator, batch: LayerBatch, sizes: dict[Any, Tensor]) -> Tensor | None:  # [V, N, o]
    """`φ` of a layer that reads one row `a` for each example, up to a rotation: `(Q_Gᵀ g) √(Λ (Q_Aᵀ a)²)`.

    None where a layer reads more, or `L` is no `(Q_G ⊗ Q_A) √Λ (Q_G ⊗ Q_A)ᵀ`. As many numbers as the layer has outputs
    and not as it has parameters: on wide perceptrons a thousand times faster. `sizes` keeps the root for all vectors.
    """
    if not batch.layer.affine or len(batch.calls) != 1 or len(batch.layer.roles) != 1:
        return None
    rows = batch.rows
    if not rows.weight or not isinstance(rows.inputs, Tensor) or rows.grads.ndim != 4 or rows.grads.shape[2] != 1:
        return None
    a, g = rows.inputs[:, 0], rows.grads[:, :, 0]
    c = 1.0
    while isinstance(root, Scaled):
        root, c = root.A, c * float(root.c)
    if isinstance(root, Diagonal):
        values = root.vector
    elif isinstance(root, Eigendecomposed) and isinstance(root.basis, Kronecker):
        values, g = root.values, (root.basis.G.T @ g.flatten(0, 1).T).T.view(g.shape)
        a = (root.basis.A.T @ a.T).T if batch.first else a
    else:
        return None
    if batch.first:
        sizes[batch.layer] = c * (a.square() @ values.view(-1, a.shape[1]).square().T).sqrt()
    return g * sizes[batch.layer]


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
