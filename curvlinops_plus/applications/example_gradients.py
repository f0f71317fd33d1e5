"""Gradients of each example's un-reduced loss, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import Draws, Empirical, EmpiricalRisk, Layer, LayerBatch, Totals, Vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.function_reads import layers_of, look_for_functions
from curvlinops_plus.risk.losses import LossWeights, loss_weights
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import untraced
from curvlinops_plus.risk.record import OutsideReads
from curvlinops_plus.risk.risk import takes_risk
from curvlinops_plus.risk.sweep import RecordedPasses

#: Takes a layer's batch, and the number of the vector that its first one is.
Add = Callable[[LayerBatch, int], None]


@takes_risk
def per_example_gradients(risk: EmpiricalRisk, *, per_term: bool = False) -> Iterator[dict[str, Tensor]]:
    """Gradients of the un-reduced loss of each example, one batch of the data after the other.

    The loss of example n is `ℓ_n = Σ_r ℓ(f(x_n)_r, y_{n,r})`, the sum over its terms (tokens, pixels, outputs) of what
    `reduction="none"` returns, with class weights, ignored targets and so on: nothing is divided by a number of
    examples or terms. The gradient of the risk is `c Σ_n ∇ℓ_n`, with the factor `c` of its reduction. Of several losses
    `ℓ_n` is the sum, in which each has its weight relative to the first one under "mean".

    Modes, buffers and random numbers are restored when the iteration ends.

    Args:
        risk: Model, loss, data and parameters. A mask of the risk is about statistics of layers, and weights of
            examples are about their mean: neither matters.
        per_term: The gradient of each loss term by itself, `∇ℓ_{n,r}`: for each token instead of each sequence.

    Yields:
        For each batch the name of each parameter to `[N, *shape]`, or `[N, R, *shape]` with `per_term`, in the
        parameters' precision, float32 at least. Parameters that a batch does not use have gradients of zero.

    Raises:
        UnsupportedError: If the loss has no likelihood, examples depend on each other, a layer has no gradients of each
            example, or the risk has several processes; with `per_term`, of several losses.
        ValueError: If there are no data.

    Cost: one forward and one backward pass, with `per_term` R backward passes; memory for the gradients of a batch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, per_example_gradients
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> X, y = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(X[:2], y[:2]), (X[2:], y[2:])])
        >>> for gradients in per_example_gradients(risk):  # -2 x y
        ...     print(gradients["weight"])
        tensor([[[-2., -4.]],
        <BLANKLINE>
                [[ 0.,  0.]]])
        tensor([[[10., 12.]]])
    """
    refuse(risk, per_term)
    return _gradients(risk, per_term)


def _gradients(risk: EmpiricalRisk, per_term: bool) -> Iterator[dict[str, Tensor]]:
    found = Gradients(risk)
    for _, _, factor in show_batches(risk, per_term, "gradients of examples", found.begin):
        J = found.pop(factor)
        yield {key: t.transpose(0, 1) if per_term else t[0] for key, t in J.items()}


class Gradients:
    """What layers give for each vector that was backpropagated, together."""

    def __init__(self, risk: EmpiricalRisk) -> None:
        self.risk, self._parts = risk, {}

    def begin(self, batch: Batch, layers: Sequence[Layer]) -> Add:
        """Forget what there was, and take a batch."""
        self._parts: dict[str, list[Tensor]] = {}
        self._num_examples = batch.num_examples
        return self._add

    def _add(self, seen: LayerBatch, vector: int) -> None:
        (group,) = seen.layer.groups
        J = seen.per_example_grads  # [V, N, *b, o, i]
        for key, t in zip(group.keys, group.layout.scatter(J.flatten(2).flatten(0, 1)), strict=True):
            self._parts.setdefault(key, []).append(t.view(*J.shape[:2], *seen.layer.params[key].shape))

    def pop(self, factor: float = 1.0) -> dict[str, Tensor]:
        """Key of each parameter to `[V, N, *shape]`, times a factor; zero for those that the batch does not use."""
        found = {key: torch.cat(parts) for key, parts in self._parts.items()}
        V, parts = max((len(J) for J in found.values()), default=1), {}
        for key, p in self.risk.params.items():
            J = found.pop(key, None)
            J = p.new_zeros(V, self._num_examples, *p.shape, dtype=self.risk.dtype) if J is None else J
            parts[key] = J if factor == 1 else J * factor
        return parts


def show_batches(
    risk: EmpiricalRisk, per_term: bool, desc: str, begin: Callable[[Batch, Sequence[Layer]], Add]
) -> Iterator[tuple[Batch, int, float]]:
    """Show each batch of a risk with the gradients of its examples' un-reduced losses, layer by layer.

    Args:
        per_term: Send the gradient of each loss term by itself.
        begin: Called with each batch and the layers of the model; it returns what takes the layers' batches.

    Yields:
        Each batch when all of it was shown; the number of terms R, or 1; and what gradients have to be multiplied by.
    """
    risk = copy(risk)
    risk.options = replace(risk.options, mask=None)
    with preserve_state(risk.model, risk.data):
        weights, layers = loss_weights(risk), layers_of(risk)
        for batch in risk.batches(desc):
            batch = replace(batch, weight=None)  # a weight is about the mean over examples, as the mask is
            totals = show(risk, Empirical(per_term=per_term), weights, batch, begin, layers)
            of_loss = max(weight / one.weight for weight, one in zip(totals.weights, risk.losses, strict=True))
            yield batch, totals.terms // totals.examples if per_term else 1, of_loss**0.5


def show(
    risk: EmpiricalRisk,
    vectors: Vectors,
    weights: LossWeights,
    batch: Batch,
    begin: Callable[[Batch, Sequence[Layer]], Add],
    layers: list[Layer],
) -> Totals:
    """Send vectors back through the model for one batch; again, and with other layers, if functions read parameters."""
    while True:
        try:
            return _shown(risk, layers, vectors, weights, batch, begin(batch, layers))
        except OutsideReads as error:
            look_for_functions(risk, batch, error)
            layers[:] = layers_of(risk)


@untraced
def _shown(
    risk: EmpiricalRisk, layers: Sequence[Layer], vectors: Vectors, weights: LossWeights, batch: Batch, add: Add
) -> Totals:
    sent = dict.fromkeys(layers, 0)

    def consume(seen: LayerBatch) -> None:
        add(seen, sent[seen.layer])
        sent[seen.layer] += seen.num_vectors

    passes = RecordedPasses(risk, layers, vectors, weights)
    with passes.hooked():
        return passes.observe(batch, Draws(0), consume)


def refuse(risk: EmpiricalRisk, per_term: bool) -> None:
    """Refuse what has no gradients of single examples.

    Raises:
        UnsupportedError: If the loss has no likelihood, or the risk has several processes; with `per_term`, of several
            losses.
    """
    risk.losses.require_likelihoods()
    if risk.processes.world > 1:
        raise UnsupportedError(
            f"Gradients of each example stay where the example is, and this risk is shared by {risk.processes.world} "
            "processes. Make an EmpiricalRisk without `processes` of the data of each of them."
        )
    if per_term and len(risk.losses) > 1:
        raise UnsupportedError(
            f"per_term=True is about the terms of one loss, and there are losses for the outputs {risk.losses.keys}. "
            "Make an EmpiricalRisk of one of them."
        )
