"""Passes over all data of a risk: its loss, its gradient, and the relative weights of its losses.

With several losses, what multiplies each in statistics and gradients depends on counts of the whole
data set: `LossWeights` has these numbers, or finds them batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.risk.batches import raise_unreached, refuse_outside_reads, require_rereadable
from curvlinops_plus.risk.losses import Totals
from curvlinops_plus.risk.preserve import preserve_state, training_modules

if TYPE_CHECKING:
    from curvlinops_plus.risk.risk import EmpiricalRisk


def loss_pass(risk: EmpiricalRisk, desc: str = "loss") -> Totals:
    """Totals of all data. Cost: one forward pass. Inside of `preserve_state`."""
    totals = Totals()
    with torch.inference_mode(False), GradMode(False):
        for batch in risk.batches(desc):
            totals.add(risk.losses.terms(risk.run(batch), batch).totals)
    return totals.over(risk.processes)


def gradient_pass(risk: EmpiricalRisk) -> tuple[dict[str, Tensor], Totals]:
    """Gradient of the sum of all loss terms, each loss times its relative weight, and totals.

    Inside of `preserve_state`.
    """
    totals = Totals()
    reached = False
    with torch.inference_mode(False):
        free = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
        sums = {key: torch.zeros_like(p) for key, p in free.items()}
        weights = loss_weights(risk)
        # A loss that has a likelihood reads nothing but output and target.
        is_loss_clean = risk.losses.have_likelihoods
        with risk.placed(free):
            for batch in risk.batches("gradient"):
                batch_totals = risk.losses.terms(risk.run(batch, risk.model), batch).totals
                objective = weights.objective(batch_totals)
                totals.add(batch_totals)
                if not objective.requires_grad:
                    continue
                if not is_loss_clean:
                    refuse_outside_reads("loss", [objective], risk.params)
                    is_loss_clean = True
                reached = True
                gradients = torch.autograd.grad(objective, list(free.values()), allow_unused=True)
                for total, g in zip(sums.values(), gradients):
                    if g is not None:
                        total += g
        if not reached and totals.examples:
            raise_unreached()
    risk.processes.sum_(list(sums.values()))
    totals = totals.over(risk.processes)
    weights.require(totals)
    return sums, totals


def require_same(risk: EmpiricalRisk, before: Totals, after: Totals) -> None:
    """Compare the totals of two passes: the order of the examples does not matter, everything else
    does.

    Raises:
        NumericsError: If a loss is not finite.
        RuntimeError: If the passes disagree; names modules in training mode.
    """
    losses = [
        sum(loss.weight * float(number) for loss, number in zip(risk.losses, totals.losses))
        for totals in (before, after)
    ]
    if not math.isfinite(sum(losses)):
        raise NumericsError(
            f"The total loss is {losses[0]}: an output or a target has NaN or infinite entries."
        )
    tolerance = 1e-8 if coarsest_dtype(risk) == torch.float64 else 5e-5
    same = math.isclose(*losses, rel_tol=tolerance, abs_tol=1e-6)
    if same and before.examples == after.examples:
        return
    cause = (
        "Does the data change from pass to pass (random augmentation, drop_last with shuffling), "
        "or the model?"
    )
    if random := training_modules(risk.model):
        cause = f"These modules are in training mode: {random}; call model.eval()."
    raise RuntimeError(
        f"Two passes over the data disagree: total loss {losses[0]:.8g} over {before.examples} "
        f"examples and {losses[1]:.8g} over {after.examples}. {cause} The operator's "
        "check_deterministic=False turns this check off."
    )


def coarsest_dtype(risk: EmpiricalRisk) -> torch.dtype:
    """The dtype of the parameters that rounds most: what the digits of results are limited by."""
    return max((p.dtype for p in risk.params.values()), key=lambda dtype: torch.finfo(dtype).eps)


# --------------------------------------------------------------------------------- relative weights
def loss_weights(risk: EmpiricalRisk, totals: Totals | None = None) -> LossWeights:
    """The weights for passes over the data of a risk.

    Args:
        totals: Those of a pass before, if there was one.

    Raises:
        ValueError: If they depend on the data, and these are spread over processes and can be read
            only once.

    Cost: one forward pass over the data if they depend on it, which is never so for one loss. For
    an iterator each batch has to determine them.
    """
    weights = LossWeights(risk, totals)
    if weights.fixed is not None:
        return weights
    if risk.processes.world > 1:
        require_rereadable(risk.data, "the loss terms of all processes are counted first")
    if isinstance(risk.data, Iterator):
        return weights
    with preserve_state(risk.model, risk.data):
        return LossWeights(risk, loss_pass(risk, "counting loss terms"))


class LossWeights:
    """The relative weights of losses during a pass over the data of a risk.

    Args:
        risk: The risk.
        totals: Of the whole data set, if they are known; else each batch has the weights of its own
            counts, which have to be the same in all of them.
        plain: Each loss has the weight that it was given, whatever its reduction.
    """

    def __init__(
        self, risk: EmpiricalRisk, totals: Totals | None = None, plain: bool = False
    ) -> None:
        self.risk = risk
        self.losses = risk.losses
        #: Whether the weights come from counts of the whole data set.
        self.counted = False
        #: The weights in each batch; None if they are those of its own counts.
        self.fixed: tuple[float, ...] | None = None
        if plain or len(self.losses) == 1 or self.losses.reduction == "sum":
            self.fixed = tuple([loss.weight for loss in self.losses])
        elif totals is not None:
            self.counted = True
            self.fixed = self._relative(totals)

    def _relative(self, totals: Totals) -> tuple[float, ...]:
        """`w_h c_h / c` of each loss, where `c` is that of the reference loss."""
        factors = [self.risk.scale(totals, k) for k in range(len(self.losses))]
        c = factors[self.losses.reference]
        return tuple([loss.weight * factor / c for loss, factor in zip(self.losses, factors)])

    def of(self, batch: Totals) -> tuple[float, ...]:
        """The weights for a batch with these totals.

        Raises:
            ValueError: If they depend on the whole data set, and it is not known.
        """
        if self.fixed is not None:
            return self.fixed
        reductions = {loss.reduction for loss in self.losses}
        if len(reductions) > 1:
            raise ValueError(
                f"The losses for {self.losses.output_keys} weigh by their numbers of terms in the "
                "whole data set, which can't be known from batches that are seen once, as their "
                f"reductions are {sorted(reductions)}. Give data that can be read twice, or use "
                'reduction="sum" for all losses, with the divisors in their weights.'
            )
        return self._relative(batch)

    def require(self, totals: Totals) -> None:
        """Refuse a pass over the data to which other weights belong than those that were used: the
        data change.
        """
        if not self.counted or self.fixed is None:
            return
        weights = zip(self._relative(totals), self.fixed)
        if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in weights):
            raise ValueError(
                f"The numbers of terms that count for the losses of {self.losses.output_keys} "
                "differ from pass to pass, so the data change: is there random masking or "
                "augmentation? Give data that are the same each time."
            )

    def factors(self, batch: Totals, linear: bool) -> list[float]:
        """What vectors of each loss are multiplied by in this batch, which gets its weights.

        Args:
            linear: Whether a vector is linear in its loss, like a gradient. The empirical Fisher is
                that of the weighted loss: with `c*` the largest `c_h` it is `c* Σ_n g_n g_nᵀ`, with
                `g_n = Σ_h (w_h c_h / c*) Σ_r ∇ℓ_{h,n,r}`. Else the square of a vector is linear in
                its loss, and the factor is the root of the weight.
        """
        batch.weights = self.of(batch)
        if not linear:
            return [math.sqrt(weight) for weight in batch.weights]
        largest = max(weight / loss.weight for weight, loss in zip(batch.weights, self.losses))
        return [weight / math.sqrt(largest) for weight in batch.weights]

    def objective(self, batch: Totals) -> Tensor:
        """What the loss of a data set is the sum of over batches, up to the factor `c`; it has a
        graph.
        """
        batch.weights = self.of(batch)
        weighted = [
            loss if weight == 1 else weight * loss
            for weight, loss in zip(batch.weights, batch.losses)
        ]
        total = sum(weighted[1:], weighted[0])
        assert isinstance(total, Tensor)
        return total
