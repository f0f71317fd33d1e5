"""What an optimizer's state says, read before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.optim.kfac.policies import NormConstraint, WeightDecay

# Options of groups that are stored as the fields of a class.
_POLICIES: dict[str, type] = {"norm_constraint": NormConstraint, "weight_decay": WeightDecay}


def groups_of_state(
    groups: Fields, keys: Sequence[Sequence[str]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Groups of a state, with policies in place of what they are stored as.

    Args:
        keys: Of each group of the optimizer the names of its parameters.
        defaults: The options that its groups have.
    """
    keys_of_state = [list(group["params"]) for _, group in groups.parts()]
    if [*map(sorted, keys)] != [sorted(names, key=str) for names in keys_of_state]:
        raise ValueError(
            f"The state is of groups with the parameters {keys_of_state}, and this optimizer "
            f"has {keys}."
        )
    loaded: list[dict[str, Any]] = []
    for _, group in groups.parts():
        group.require(defaults)
        policies: dict[str, Any] = {}
        for name, kind in _POLICIES.items():
            policy = group.data.get(name)
            if isinstance(policy, Mapping):
                with reading(f"{group.title}, {name!r}"):
                    policies[name] = kind(**policy)
            elif policy not in (None, inf):
                group.number(name, 0.0)
        for name in {"lr", "momentum", "damping"} & defaults.keys():
            if name == "damping" or group[name] != "adaptive":
                group.number(name, 0.0)
        loaded.append({**group.data, **policies})
    return loaded


def velocities_of_state(
    state: Fields,
    params: Mapping[str, Tensor],
    blocks: Sequence[Sequence[str]],
    dtype: torch.dtype,
) -> dict[Tensor, dict[str, Tensor]]:
    """Velocities of a state by parameters: all parameters of a block have one, or none.

    Args:
        blocks: Names of the parameters of each block.
        dtype: Of the velocities.
    """
    names = ("velocity", "curved_velocity")
    kept: dict[Tensor, dict[str, Tensor]] = {}
    for key, of_parameter in state.parts():
        if key not in params:
            raise state.error("a parameter", key, f"one of {list(params)}")
        p = params[key]
        kept[p] = {}
        for name in of_parameter.data:
            if name not in names:
                raise of_parameter.error("an entry", name, f"one of {', '.join(names)}")
            t = of_parameter.tensor(name, tuple(p.shape), dtype)
            # PyTorch would cast it to the parameters' dtype.
            kept[p][name] = t.to(p.device, copy=True)
    for keys in blocks:
        if len({frozenset(kept.get(params[key], {})) for key in keys}) > 1:
            raise ValueError(
                f"{state.title}: of {list(keys)}, which move together, some lack entries that "
                "others have; is the file cut off?"
            )
    return kept


def dampings_of_state(
    state: Fields, snapshot: BlockwiseLinearOperator | None
) -> dict[str, float] | None:
    """The dampings of the last refresh, one for each of its blocks; None before the first."""
    if state["dampings"] is None:
        return None
    dampings = state.part("dampings")
    names: set[str] = set()
    if snapshot is not None:
        names = {group.name for group in snapshot.plan.groups}
    if dampings.data.keys() != names:
        raise state.error("'dampings'", str(list(dampings.data)), f"one for each of {names}")
    return {name: float(dampings.number(name, 0.0)) for name in dampings.data}
