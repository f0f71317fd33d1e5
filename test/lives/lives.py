"""What happens to a model in its life, in one process or in several: what tests and worker
processes share.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    EmpiricalRisk,
    KFACOptimizer,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.linalg import Eigendecomposed
from test.lives.models import MODELS, Ordinary

KINDS: dict[str, Any] = {"KFAC": KFAC, "EKFAC": EKFAC}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trained(model)])


def risk_of(ordinary: Ordinary, model: nn.Module, data: Any = (), **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(
        model, ordinary.loss(), data, trained(model), **ordinary.options(model), **options
    )


def through_a_file(state: Any) -> Any:
    """The state as another program reads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def estimator_of(
    ordinary: Ordinary, model: nn.Module, kind: str, **options: Any
) -> CurvatureEstimator:
    return CurvatureEstimator(
        risk_of(ordinary, model, **options),
        KINDS[kind],
        vectors=MonteCarlo(seed=1),
        decay=0.8,
        damping=0.1,
    )


def loss_of(loss: Any, output: Any, y: Any) -> Tensor:
    """The loss as a loop computes it."""
    if not isinstance(loss, Mapping):
        return loss(output, y)
    pairs = {name: one if isinstance(one, tuple) else (one, 1.0) for name, one in loss.items()}
    return sum(
        (weight * one(output[name], y[name]) for name, (one, weight) in pairs.items()),
        torch.zeros(()),
    )


class Training:
    """A model in training by K-FAC, with a schedule and clipped gradients.

    Args:
        ordinary: The model.
        wrap: Makes what is called in place of the model, such as `DistributedDataParallel`.
    """

    def __init__(
        self, ordinary: Ordinary, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    ) -> None:
        self.ordinary, self.model, self.loss = ordinary, ordinary.make(), ordinary.loss()
        self.called, params = wrap(self.model), trained(self.model)
        self.optimizer = KFACOptimizer(
            self.called,
            self.loss,
            lr=0.5,
            damping=0.1,
            params=params,
            inverse_every=2,
            **ordinary.options(self.model),
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self, micro_batches: Sequence[Sequence[Any]]) -> None:
        """A step on the mean loss of micro-batches."""
        self.optimizer.zero_grad()
        for examples in micro_batches:
            X, y = self.ordinary.batch(examples)
            part = len(examples) / sum(map(len, micro_batches))
            (loss_of(self.loss, self.called(X), y) * part).backward()
        nn.utils.clip_grad_norm_(trained(self.model), 0.5)
        self.optimizer.step()
        self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in state:
            getattr(self, name).load_state_dict(state[name])


def determined(K: BlockwiseLinearOperator) -> Tensor:
    """The entries of its blocks; of EKFAC's whose factors have repeated eigenvalues the trace
    alone.

    Where stride and kernel of a transposed convolution are equal, its input factor is the same
    matrix for each tap; an expert may see less rows than it has columns. Eigenvectors of repeated
    eigenvalues depend on rounding, and so do EKFAC's corrected eigenvalues, but not their sum.
    """
    modules = dict(K.risk.model.named_modules())
    repeated = {name for name, module in modules.items() if isinstance(module, nn.ConvTranspose2d)}
    repeated |= {name for name in K.blocks if "experts" in name}
    repeated = {
        name for name in repeated & K.blocks.keys() if isinstance(K.blocks[name], Eigendecomposed)
    }
    return torch.cat(
        [(b.trace if n in repeated else b.to_dense()).flatten() for n, b in K.blocks.items()]
    )


def in_parts(ordinary: Ordinary, processes: Any = None) -> dict[str, Tensor]:
    """Operators, estimates and the parameters after training, by processes that have each its part
    of all batches.
    """
    model, batches = ordinary.make(), [ordinary.examples(10, seed) for seed in range(3)]
    if processes is not None:
        batches = [batch[processes.rank :: processes.world] for batch in batches]
    data, found = [ordinary.batch(batch) for batch in batches], {}
    for kind, approximation in KINDS.items():
        found[kind] = determined(
            curvature(risk_of(ordinary, model, data, processes=processes), approximation)
        )
        estimator = estimator_of(ordinary, model, kind, processes=processes)
        for batch in data:
            estimator.update(batch)
        found[f"estimated {kind}"] = determined(estimator.operator)
    training = (
        Training(ordinary) if processes is None else Training(ordinary, DistributedDataParallel)
    )
    training.optimizer.curvature.draws_by_batch = False
    for batch in batches:
        training.step([batch])
    return {**found, "trained": vector(training.model)}


@cache
def operator_of(name: str, kind: str) -> BlockwiseLinearOperator:
    """The operator of a model."""
    ordinary = MODELS[name]
    data = [ordinary.batch(ordinary.examples(n, n)) for n in (3, 4)]
    return curvature(risk_of(ordinary, ordinary.make(), data), KINDS[kind])
