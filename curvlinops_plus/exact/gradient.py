"""The gradient of an empirical risk as a matrix of one column, whose products can be compiled."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from curvlinops_plus.exact.base import RiskOperator
from curvlinops_plus.exact.compiled import Compiled, ProductForms
from curvlinops_plus.exact.passes import Passes, read_losses
from curvlinops_plus.exact.reading import Reading
from curvlinops_plus.exact.traced_batch import Trace, rows_joined
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch, gradients_of, refuse_outside_reads


class Gradient(RiskOperator):  # [n, 1]
    """The gradient by compiled functions of the batches, and the loss.

    Args:
        risk: Model, loss, data and parameters.
    """

    def __init__(self, risk: EmpiricalRisk) -> None:
        super().__init__(risk, Passes(risk, partial(read_losses, risk), twice=True), None)
        self.in_space = Space.flat(1)
        self.out_space = risk.space
        # Whether the loss was seen to read no parameters by itself.
        self._reads_nothing = risk.losses.have_likelihoods
        product = ProductForms(self._products, self._of_batch, self._traced, self._sum)
        self._compiled = Compiled("Gradient", self._passes, product, compares_few=True)

    def with_loss(self) -> tuple[dict[str, Tensor], Tensor]:
        """Gradient, key to tensor, and loss over all data. Collective."""
        column = self @ torch.ones(1, dtype=self.dtype, device=self.device)
        assert self._totals is not None
        parts = self.out_space.unflatten(column)
        gradient = {key: parts[key].to(p.dtype) for key, p in self.risk.params.items()}
        return gradient, self.risk.value(self._totals)

    def _products(self, X: Tensor, reading: Reading) -> Tensor:
        return self._sum(self._of_batch, X, reading)

    def _of_batch(self, batch: Batch, rows: Tensor, reading: Reading) -> Tensor:
        with self._passes.run(batch) as run:
            objective = reading.weights.objective(run.extra)
            reading.totals.add(run.extra)
            if not objective.requires_grad:
                return rows.new_zeros(len(rows), self.shape[0])
            if not self._reads_nothing:
                refuse_outside_reads("loss", [objective], self.risk.params)
                self._reads_nothing = True
            sent = [torch.ones_like(objective)]
            gradients = gradients_of([objective], run.parameters, sent, False)
            parts = [
                torch.zeros_like(p) if g is None else g.to_dense()
                for p, g in zip(run.parameters, gradients, strict=True)
            ]
        return rows @ rows_joined([part[None] for part in parts], rows.dtype)

    def _traced(self, trace: Trace, rows: Tensor, reading: Reading) -> Tensor:
        parts = trace.gradient(reading.weights)(*trace.parameters)
        reading.totals.add(trace.extra)
        return rows @ rows_joined([part[None] for part in parts], rows.dtype)
