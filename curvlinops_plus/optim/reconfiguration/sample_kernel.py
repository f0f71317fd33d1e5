"""The kernel `J Jᵀ` between samples, from the inputs and output gradients of layers: no Jacobian is stored.

For a layer `W a + b` without weight sharing, the derivative of sample n is the outer product `g_n (a_n, 1)ᵀ` of its
output gradient and its input. The inner product of two such is `(g_n·g_m)(a_n·a_m + 1)`, so that the layer adds
`(a aᵀ) ∘ (g gᵀ)` to the kernel, at the memory of inputs and gradients. Both come from the same recording as those of
KFAC. Other layers add the inner products of the derivatives that their rules give.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import gram
from curvlinops_plus.optim.reconfiguration.ensemble import Ensemble
from curvlinops_plus.risk import Draws, EmpiricalRisk, LayerBatch, Vectors, find_layers
from curvlinops_plus.risk.sweep import sweep


class _Ones(Vectors):
    """Backpropagates ones: the output gradients of each layer are then those of each sample."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 1

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        yield torch.ones_like(F)


def recorded_sample_kernel(ensemble: Ensemble) -> Tensor | None:
    """`J Jᵀ` [n, n] of a real module, neither centred nor weighted; None if its layers can't be recorded.

    Cost: one forward and one backward pass, without gradients of weights, and n² products per input and output of each
    layer. Kept in memory: inputs and output gradients of layers without weight sharing, derivatives of the others
    (of all samples if there are several chunks, else of one layer at a time).
    """
    psi = ensemble.psi
    if psi.module is None or ensemble.components > 1 or any(p.is_complex() for p in psi.params.values()):
        return None
    like = {"dtype": psi.dtype, "device": psi.device}
    data = [(chunk, torch.zeros(len(tree_leaves(chunk)[0]), **like)) for chunk in ensemble.chunks]
    total = torch.zeros(ensemble.n, ensemble.n, **like)
    held: dict[str, list[tuple[Tensor, ...]]] = {}

    def consume(batch: LayerBatch) -> None:
        pieces = held.setdefault(batch.layer.name, [])
        pieces.append(_pieces(batch))
        if len(pieces) == len(data):
            parts = [torch.cat(part) for part in zip(*held.pop(batch.layer.name), strict=True)]
            total.add_(_product(parts).to(psi.dtype))

    try:
        risk = EmpiricalRisk(
            psi.module,
            nn.MSELoss(reduction="sum"),  # without effect: the vectors are ones
            data,
            psi.params,
            output=lambda out: (out.real if out.is_complex() else out).reshape(-1),
            batch_size_fn=lambda X: len(tree_leaves(X)[0]),
            check=False,  # whoever uses the kernel compares it with autograd, at each step
        )
        layers = find_layers(risk.model, risk.params, False)
        with ensemble.running():
            totals = sweep(risk, layers, _Ones(), consume)
    except (NotImplementedError, ValueError):  # not supported by recording; per-sample differentiation is exact too
        return None
    complete = totals.reached == set(range(len(layers))) and not held
    return total if complete else None


def _pieces(batch: LayerBatch) -> tuple[Tensor, ...]:
    """Inputs [m, *b, i] and output gradients [m, *b, o] of an affine layer, or derivatives [m, p] of any other."""
    if batch.layer.affine and len(batch.layer.roles) == 1 and not batch.rows.sparse:
        a, g = batch.rows.inputs, batch.rows.grads
        if isinstance(a, Tensor) and a.shape[1] == 1:
            return a[:, 0], g[0, :, 0]
    return (torch.cat([J[0].reshape(batch.num_examples, -1) for J in batch.param_grads().values()], 1),)


def _product(parts: list[Tensor]) -> Tensor:  # -> [n, n]
    if len(parts) == 1:
        return gram(parts[0].T)
    inputs, grads = (gram(t.transpose(0, -1)) for t in parts)  # [n, *b, i] -> [i, *b, n] -> [*b, n, n]
    product = inputs * grads
    return product if product.ndim == 2 else product.sum(0)
