"""The state of a streaming estimator in tensors and plain Python."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.running_sums import RunningSums
from curvlinops_plus.blocks.step import Step
from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.risk import EmpiricalRisk, Totals, Vectors

FORMAT = "curvlinops_plus.estimator"


class Streaming(Protocol):
    """What the state of an estimator is read from, and written to."""

    risk: EmpiricalRisk
    decay: float
    damping: Any
    updates: int
    examples: int
    weight: float
    begun: float
    vectors: Vectors
    _blank: BlockwiseLinearOperator
    _sums: RunningSums
    _drawn: tuple[int, int]
    step: Step
    _snapshot: BlockwiseLinearOperator | None
    _inverse: LinearOperator | None

    def _scale(self, totals: Totals) -> Tensor | float: ...


def write_estimator(estimator: Streaming) -> dict[str, Any]:
    """The state; see `CurvatureEstimator.state_dict`."""
    damping, snapshot, processes = estimator.damping, estimator._snapshot, estimator.risk.processes
    step, drawn = estimator._drawn
    own = estimator.updates, estimator.examples, drawn, estimator.step.totals.plain()
    told = processes.gather("counting updates and examples", own)
    updates, examples, drawn, totals = (tuple(numbers) for numbers in zip(*told))
    return {
        "format": FORMAT,
        "about": estimator._blank.state_dict(),
        "decay": estimator.decay,
        "updates": max(updates),
        "examples": sum(examples),
        "weight": estimator.weight,
        "begun": estimator.begun,
        "draws": [step, sum(drawn)],
        "damping": damping if isinstance(damping, (int, float, Tensor)) else None,
        "sums": estimator._sums.over(processes).state_dict(),
        "step": replace(estimator.step, totals=Totals.union(totals)).state_dict(),
        "refreshed": None if snapshot is None else snapshot.state_dict(),
    }


def read_estimator(estimator: Streaming, state: Mapping[str, Any]) -> None:
    """Take over a state; see `CurvatureEstimator.load_state_dict`."""
    _require_state(state, estimator.decay)
    with warnings.catch_warnings():  # in training, parameters are meant to change
        warnings.simplefilter("ignore", CurvatureWarning)
        blank, snapshot = copy.copy(estimator._blank), None
        blank.load_state_dict(state["about"])
        if state["refreshed"] is not None:
            snapshot = with_layers(blank, state["refreshed"].get("layers", {}))
            snapshot.load_state_dict(state["refreshed"])
    own = estimator._blank
    estimator.risk.reads, own.plan, own._reads = blank.risk.reads, blank.plan, blank._reads
    sums = RunningSums.from_state_dict(state["sums"], own.plan, estimator._scale, state["begun"])
    first = estimator.risk.processes.rank == 0  # what was summed before belongs to it; others go on from zero
    estimator._sums = sums if first else sums.emptied()
    estimator.step = Step.from_state_dict(state["step"])
    if not first:
        estimator.step.totals = Totals()
    estimator._snapshot, estimator._inverse = snapshot, None
    step, drawn = state["draws"]
    estimator._drawn = step, -(-drawn // estimator.risk.processes.world)
    estimator.updates, estimator.weight = state["updates"], state["weight"]
    estimator.examples = state["examples"] if first else 0
    estimator.begun = state["begun"]
    estimator.damping = estimator.damping if state["damping"] is None else state["damping"]


def with_layers(blank: BlockwiseLinearOperator, names: Collection[str]) -> BlockwiseLinearOperator:
    """A copy that has only these layers (all of them, if it has none of these), without blocks."""
    K, plan = copy.copy(blank), [entry for entry in blank.plan if entry.layer.name in names]
    if 0 < len(plan) < len(blank.plan):
        K.plan, K.risk = plan, K.risk.restricted([key for entry in plan for key in entry.layer.params])
        K.in_space = K.risk.space
    return K


def _require_state(state: Any, decay: float) -> None:
    keys = {"about", "decay", "updates", "examples", "weight", "draws", "damping", "sums", "refreshed"}
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError("This is not the state of a CurvatureEstimator: the key 'format' is missing or foreign.")
    if missing := keys - set(state):
        raise ValueError(f"The state lacks {sorted(missing)}; is the file cut off?")
    sums = state["sums"]
    first = [one for key in sums if key != "called" for one in sums[key]["0"].values()]
    if state["updates"] and not any(one["sums"] or one.get("rows") for one in first):
        raise ValueError(
            "The state has updates, and no statistics of them. Was it loaded by torch.distributed.checkpoint? Save and "
            "load Checkpoint(estimator) there."
        )
    if state["decay"] != decay:
        raise ValueError(f"State mismatch in the decay: the state has {state['decay']}, this one {decay}.")
