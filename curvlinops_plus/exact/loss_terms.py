"""The losses of a risk on one batch: outputs, targets, and the root of their matrix over the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.passes import naming_operations, vjp
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals, Vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import gradients_of
from curvlinops_plus.risk.vectors import Root, WeightedRoot


@dataclass(frozen=True, eq=False)
class LossTerms:
    """One loss on one batch.

    Attributes:
        F: The output, attached to its graph: [N, R, C], or as the model returned it for a loss without likelihood.
        Y: The target.
        likelihood: The loss as a likelihood, None if it has none.
        loss: The value of a loss without likelihood, times N for "mean"; of others it is not needed.
        weight: Weights of the examples [N], None for ones.
    """

    F: Tensor
    Y: Any
    likelihood: Likelihood | None
    loss: Any = None
    weight: Tensor | None = None

    def root(self, vectors: Vectors, draws: Draws) -> Root:
        """The root of its matrix over the outputs."""
        assert self.likelihood is not None
        root = vectors.root(self.likelihood, self.F.detach(), self.Y, draws)
        return root if self.weight is None else WeightedRoot(root, self.weight.to(self.F))


def run_losses(
    risk: EmpiricalRisk, model: nn.Module, batch: Batch
) -> tuple[tuple[Tensor, ...], tuple[list[LossTerms], Totals]]:
    """Run the model: the outputs that are differentiated; the terms of each loss, and the totals of the batch.

    Values of losses with a likelihood are not computed.
    """
    read = risk.losses.terms(risk.run(batch, model), batch, values=False)
    given = zip(risk.losses, read.outputs, read.targets, read.totals.losses, strict=True)
    terms = [LossTerms(F, Y, one.likelihood if one.known else None, loss, batch.weight) for one, F, Y, loss in given]
    read.totals.losses = (0.0,) * len(terms)
    return read.outputs, (terms, read.totals)


def hessian_product(loss: Tensor, F: Tensor) -> Callable[[Tensor], Tensor]:
    """The product `[K, *F.shape] -> [K, *F.shape]` with the Hessian of a loss with respect to `F`, below it in a graph.

    Cost: one backward pass, and one for each product.
    """
    gradient = None
    if loss.requires_grad and F.requires_grad:
        with naming_operations():
            (gradient,) = gradients_of([loss], [F], [torch.ones_like(loss)], True, create_graph=True)
    if gradient is None or not gradient.requires_grad:
        return torch.zeros_like

    def product(V: Tensor) -> Tensor:
        with naming_operations():
            (found,) = vjp([gradient], [F], [V])
        return torch.zeros_like(V) if found is None else found

    return product


# -------------------------------------------------------------------------------------------------------------- roots
class LossRoots:
    """The root `B` of the matrix of all losses over the outputs of one batch.

    Losses whose vectors are sent together have columns in common, and so cross terms; else each has its own columns,
    side by side.

    Args:
        roots: The root of each loss.
        weights: What each is multiplied with.
        together: Whether vectors of all losses are sent together.
    """

    def __init__(self, roots: Sequence[Root], weights: Sequence[float], together: bool) -> None:
        self.roots, self.weights = roots, weights
        same = together and len(roots) > 1 and len({root.shape for root in roots}) == 1
        self.joint = same and not any(root.per_term for root in roots)

    @property
    def shapes(self) -> list[torch.Size]:
        """What it multiplies: `[N, R', K]`, for each loss where they have columns of their own."""
        return [root.shape for root in (self.roots[:1] if self.joint else self.roots)]

    def product(self, U: Sequence[Tensor]) -> list[Tensor]:
        """`B u`: [*lead, N, R', K] for each of `shapes` -> [*lead, N, R, C] for each output."""
        U = [U[0]] * len(self.roots) if self.joint else U
        return _scaled(self.weights, [root.product(u) for root, u in zip(self.roots, U, strict=True)])

    def transpose_product(self, V: Sequence[Tensor]) -> list[Tensor]:
        """`Bᵀ v`: [*lead, N, R, C] for each output -> [*lead, N, R', K] for each of `shapes`."""
        U = _scaled(self.weights, [root.transpose_product(v) for root, v in zip(self.roots, V, strict=True)])
        return [sum(U[1:], U[0])] if self.joint else U

    def outer_product(self, V: Sequence[Tensor]) -> list[Tensor]:
        """`B Bᵀ v`: [*lead, N, R, C] for each output, in and out."""
        if self.joint:
            return self.product(self.transpose_product(V))
        found = [root.outer_product(v) for root, v in zip(self.roots, V, strict=True)]
        return _scaled([w**2 for w in self.weights], found)


def _scaled(weights: Sequence[float], tensors: list[Tensor]) -> list[Tensor]:
    return tensors if weights == [1.0] else [w * t for w, t in zip(weights, tensors, strict=True)]


def loss_roots(
    risk: EmpiricalRisk, vectors: Vectors, terms: Sequence[LossTerms], weights: Sequence[float], draws: Draws
) -> LossRoots:
    """The root of all losses, which have likelihoods."""
    streams = [draws.of_loss(k) for k in range(len(terms))]
    return LossRoots([term.root(vectors, own) for term, own in zip(terms, streams)], weights, vectors.together)


def check_vectors(name: str, risk: EmpiricalRisk, vectors: Vectors, any_loss: bool) -> None:
    """Refuse, before anything is computed, vectors without a matrix and losses that have none.

    Args:
        name: Of the operator.
        risk: Its risk.
        vectors: Its mode.
        any_loss: Whether losses without a likelihood are taken, if the mode takes them.

    Raises:
        ValueError: If no vectors are sent.
        UnsupportedError: If a loss has no likelihood that is needed, or not this matrix.
    """
    if not vectors.backward:
        raise ValueError(
            f"{name} needs vectors that are backpropagated through the network; {vectors!r} sends none. Take Exact(), "
            "MonteCarlo(samples, seed), CurvaturePropagation(samples, seed) or Empirical()."
        )
    _ = risk.losses.reduction  # refuses "none"
    if not any_loss or vectors.needs_likelihood or risk.losses.known:
        for one in risk.losses:
            vectors.check(one.likelihood)
