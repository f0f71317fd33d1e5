"""What the steps of an optimizer have in common, until somebody changes its groups or other parameters move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg import Layout
from curvlinops_plus.optim.kfac.block_vectors import BlockVectors
from curvlinops_plus.optim.kfac.policies import as_weight_decay
from curvlinops_plus.optim.kfac.refusals import require_common

__all__ = ["StepPlan"]

Groups = Sequence[MutableMapping[str, Any]]


class StepPlan:
    """Dampings and vectors of a step, which are made anew when what they follow from has changed.

    Args:
        keys: Parameter to its key.
        dtype: Of the vectors.
    """

    def __init__(self, keys: Mapping[Tensor, str], dtype: torch.dtype) -> None:
        self._keys, self._dtype = keys, dtype
        self._read: Any = None  # what the dampings belong to
        self._moving: Any = None  # what the vectors belong to
        self._dampings: dict[str, float] = {}
        self._vectors: BlockVectors | None = None

    def dampings(self, groups: Groups, blocks: Iterable[Iterable[str]]) -> dict[str, float]:
        """Key of a parameter to its damping, with the weight decay that is part of the curvature.

        Args:
            groups: The option groups.
            blocks: Keys of the parameters of each block.

        Raises:
            ValueError: If options differ within a block.
        """
        read = [[group.get(name) for name in _OPTIONS] + [self._keys[p] for p in group["params"]] for group in groups]
        if read != self._read:
            options: dict[str, dict[str, Any]] = {name: {} for name in ("lr", "momentum", "norm_constraint", _COUPLED)}
            dampings: dict[str, float] = {}
            for group in groups:
                decay = as_weight_decay(group.get("weight_decay", 0.0)).curvature
                for key in (self._keys[p] for p in group["params"]):
                    dampings[key] = group["damping"] + decay
                    for name, values in options.items():
                        values[key] = decay if name == _COUPLED else group.get(name)
            require_common(blocks, options, dampings)
            self._read, self._dampings = read, dampings
        return self._dampings

    def vectors(
        self,
        groups: Groups,
        gradient: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        state: MutableMapping[Any, dict[str, Any]],
    ) -> BlockVectors:
        """The parameters that have gradient and curvature.

        Args:
            groups: The option groups.
            gradient: Key of a parameter to its gradient.
            layouts: Name of a block that has a curvature to its layout.
            state: The optimizer's, of its parameters.

        Raises:
            ValueError: If some parameters of a block have a gradient, and others have none.
        """
        of_keys = {self._keys[p]: group for group in groups for p in group["params"]}
        moving = list(gradient), list(layouts.values()), list(map(id, of_keys.values()))
        if self._vectors is None or moving != self._moving:
            found = {name: layout for name, layout in layouts.items() if _has_gradient(layout, gradient)}
            params = {key: p for p, key in self._keys.items()}
            self._vectors, self._moving = BlockVectors(found, params, of_keys, self._dtype), moving
            for p in set(state) - set(self._vectors.params):  # what is kept of the others is a part of larger tensors
                state[p] = {name: t.clone() for name, t in state[p].items()}
        return self._vectors


_OPTIONS = ("damping", "lr", "momentum", "norm_constraint", "weight_decay")
_COUPLED = "a weight decay in the curvature of"


def _has_gradient(layout: Layout, gradient: Mapping[str, Tensor]) -> bool:
    """Whether a block has a gradient.

    Raises:
        ValueError: If a part of it has one.
    """
    found = [key for key in layout.names if key in gradient]
    if 0 < len(found) < len(layout.names):
        raise ValueError(
            f"Of the parameters {layout.names}, which are one block of the curvature, only {found} have a gradient. "
            "Freeze the others before the optimizer is made, or leave them out of its `params`."
        )
    return bool(found)
