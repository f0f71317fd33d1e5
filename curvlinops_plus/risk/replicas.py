"""Whether processes evaluate the same model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from curvlinops_plus.distributed import Alone
from curvlinops_plus.risk.losses import Losses

__all__ = ["require_replicas"]


class Shared(Protocol):
    """What is the same in all processes."""

    losses: Losses
    params: dict[str, Tensor]
    processes: Alone


def require_replicas(risk: Shared) -> None:
    """Refuse processes whose models, losses or parameters differ.

    Cost: for several processes, one pass over the memory of the parameters.

    Raises:
        ProcessError: In all processes, saying what differs.
    """

    def describe() -> dict[str, Any]:
        losses = [(type(one.loss).__name__, one.weight, one.reduction) for one in risk.losses]
        values = [p.detach() for p in risk.params.values()]
        sums = [t for p in values for t in (torch.linalg.vector_norm(p.double()), p.double().sum())]
        numbers = torch.stack(sums).view(-1, 2).tolist()
        parameters = {
            f"the parameter {key!r}": [list(p.shape), str(p.dtype), *sizes]
            for (key, p), sizes in zip(risk.params.items(), numbers, strict=True)
        }
        return {"the loss": losses, **parameters}

    risk.processes.same("model and loss (shapes, dtypes, norms and sums of parameters)", describe)
