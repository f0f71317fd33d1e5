"""Which network an operator is of: the risks that it was computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.blocks.fingerprint import changed_parameters, fingerprint
from curvlinops_plus.exact.base import RiskOperator
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.risk import EmpiricalRisk


def risks_of(K: LinearOperator) -> list[EmpiricalRisk]:
    """The risks of an operator and of all that it is made of, such as the terms of a sum; empty if it has none."""
    return list({id(risk): risk for part in _parts(K, set()) if (risk := _risk(part)) is not None}.values())


def require_fixed(K: LinearOperator) -> None:
    """Refuse an operator that is computed anew in each product, from parameters that training changes."""
    for part in _parts(K, set()):
        risk = part.risk if isinstance(part, RiskOperator) else None
        if risk is not None and any(risk.params[key] is p for key, p in risk.own_params.items()):
            raise TypeError(
                f"{part.label} is computed in each product from the parameters that the network has then, so it would "
                "change in training. Take one that stays: curvature(risk, ...), A.materialize(), or the same of "
                "EmpiricalRisk(model, loss, data, {name: p.detach().clone() for name, p in model.named_parameters()})."
            )


def require_own_values(K: LinearOperator, model: nn.Module, what: str) -> None:
    """Refuse an operator that was computed from a network, but at other values of the parameters than it has now."""
    require_present(K, what, model)
    for risk in risks_of(K):
        own = risk.own_params if risk.model is model else {}
        if other := [key for key, p in own.items() if not torch.equal(risk.params[key], p)]:
            raise ValueError(
                f"{what} was computed at other values of {other[:3]} than the network's own. Load them into it first, "
                "or compute the curvature of a risk without `params` of other values."
            )


def require_present(K: LinearOperator, what: str, model: nn.Module | None = None) -> None:
    """Refuse an operator whose network (any, or the one given) was trained further since it was computed.

    Cost: one pass over the memory of the parameters.
    """
    for part in _parts(K, set()):
        if not isinstance(part, BlockwiseLinearOperator) or (model is not None and part.risk.model is not model):
            continue
        if changed := changed_parameters(part.parameters, fingerprint(part.risk), 1e-12):
            raise ValueError(
                f"The parameters {changed[:3]} have changed since {what} was computed, so it is the curvature at "
                "another point. Compute it anew from the parameters of now."
            )


def _risk(part: LinearOperator) -> EmpiricalRisk | None:
    risk = getattr(part, "risk", None)
    return risk if isinstance(risk, EmpiricalRisk) else None


def _parts(thing: Any, seen: set[int]) -> Iterator[LinearOperator]:
    """An operator and those that its attributes hold, at any depth."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, LinearOperator):
        yield thing
        thing = vars(thing)
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _parts(part, seen)
