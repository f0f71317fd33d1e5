"""Loss and gradient: passes over all data with plain forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import raise_unreached
from curvlinops_plus.risk.losses import Evaluated, LossWeights
from curvlinops_plus.risk.modules import refuse_outside_reads
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.totals import Totals

T = TypeVar("T")


class Differentiated(Evaluated, Protocol):
    """What a backward pass needs of a risk."""

    params: dict[str, Tensor]

    def run(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Any, Any, Any]: ...
    def at(self, values: Mapping[str, Tensor], function: Callable[[nn.Module], T]) -> T: ...


def loss_pass(risk: Evaluated) -> Totals:
    """Totals of all data. Random state is not restored."""
    totals = Totals()
    with torch.inference_mode(False), torch.no_grad():
        for batch in risk.batches("loss"):
            with eager():
                outputs, targets, class_axes = risk.run(batch)
                totals.add(risk.terms(outputs, targets, batch, class_axes).totals)
    return totals.over(risk.processes)


def gradient_pass(risk: Differentiated, weights: LossWeights) -> tuple[dict[str, Tensor], Totals]:
    """Gradient of the sum of all loss terms, each loss times its relative weight, and totals.

    Random state is not restored.
    """
    with torch.inference_mode(False):
        free = {key: nn.Parameter(p.detach()) for key, p in risk.params.items()}
        totals, grads = Totals(), {key: torch.zeros_like(p) for key, p in free.items()}

    def add_batches(model: nn.Module) -> None:
        looked_at = risk.losses.known  # a loss that we know reads nothing but output and target
        reached = False
        for batch in risk.batches("gradient"):
            with eager():
                outputs, targets, class_axes = risk.run(batch, model)
                batch_totals = risk.terms(outputs, targets, batch, class_axes).totals
            objective = weights.objective(batch_totals)
            totals.add(batch_totals.detached())
            if not objective.requires_grad:
                continue
            reached = True
            if not looked_at:
                refuse_outside_reads("loss", [objective], risk.params)
                looked_at = True
            found = torch.autograd.grad(objective, list(free.values()), allow_unused=True)
            for total, g in zip(grads.values(), found):
                if g is not None:
                    total += g
        if not reached and totals.examples:
            raise_unreached()

    with torch.inference_mode(False), torch.enable_grad():
        risk.at(free, add_batches)
    risk.processes.sum_("adding gradients", list(grads.values()))
    return grads, totals.over(risk.processes)
