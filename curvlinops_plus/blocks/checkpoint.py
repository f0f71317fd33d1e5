"""Estimators, operators and optimizers in checkpoints of `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, Protocol, runtime_checkable

import torch


class Stateful(Protocol):
    """What has a state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


@runtime_checkable
class InParts(Protocol):
    """What has a state in parts."""

    def state_parts(self) -> Mapping[str, Mapping[str, Any]]: ...


class Checkpoint:
    """Something with a state, as `torch.distributed.checkpoint` saves and loads it, on any number of processes.

    That module asks what is to be loaded for its own state first, and loads what it finds there. An estimator without
    any batch has no statistics to be found, so its whole state is one entry here. An operator of `curvature` has one
    for each layer or block: processes that keep blocks apart (`owned=True`) save and load their own ones only.

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
        parts = self.thing.state_parts() if isinstance(self.thing, InParts) else {"state": self.thing.state_dict()}
        return {name: _to_bytes(part) for name, part in parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: As for that which has it.
        """
        parts = {name: torch.load(BytesIO(part), weights_only=True) for name, part in state_dict.items()}
        state = dict(parts.pop("state"))
        for part in parts.values():
            for name, content in part.items():
                state[name] = state.get(name, {}) | content
        self.thing.load_state_dict(state)


def _to_bytes(state: Mapping[str, Any]) -> bytes:
    buffer = BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
