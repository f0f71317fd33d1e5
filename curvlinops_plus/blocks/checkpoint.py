"""Estimators, operators and optimizers in checkpoints of `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, Protocol

import torch

__all__ = ["Checkpoint"]


class Stateful(Protocol):
    """What has a state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class Checkpoint:
    """Something with a state, as `torch.distributed.checkpoint` saves and loads it, on any number of processes.

    That module asks what is to be loaded for its own state first, and loads what it finds there. An estimator without
    any batch has no statistics to be found, so its whole state is one entry here.

    Args:
        thing: A `CurvatureEstimator`, an operator, a `KFACOptimizer`.

    Cost: the state in memory once more while it is saved or loaded. All processes have to save and load together.

    Example:
        >>> from curvlinops_plus import CurvatureEstimator, EmpiricalRisk
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), ())
        >>> one, two = CurvatureEstimator(risk), CurvatureEstimator(risk)
        >>> one.update((torch.rand(4, 3), torch.rand(4, 2)))
        >>> Checkpoint(two).load_state_dict(Checkpoint(one).state_dict())  # as dcp.save and dcp.load do
        >>> two.updates
        1
    """

    def __init__(self, thing: Stateful) -> None:
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        """The state in bytes."""
        buffer = BytesIO()
        torch.save(self.thing.state_dict(), buffer)
        return {"state": buffer.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: As for that which has it.
        """
        self.thing.load_state_dict(torch.load(BytesIO(state_dict["state"]), weights_only=True))
