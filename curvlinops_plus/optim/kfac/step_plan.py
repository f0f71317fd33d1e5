"""What steps have in common until somebody changes the option groups, or other parameters have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg import Layout
from curvlinops_plus.optim.kfac.block_vectors import BlockVectors, copied
from curvlinops_plus.optim.kfac.policies import as_weight_decay
from curvlinops_plus.optim.kfac.refusals import require_common

Groups = Sequence[dict[str, Any]]
Entry = tuple[dict[str, Any], str, Tensor]


class StepPlan:
    """What a step finds out of option groups, found out anew when they have changed.

    Args:
        dtype: Of the vectors.
    """

    def __init__(self, keys: Mapping[Tensor, str], dtype: torch.dtype) -> None:
        self._keys, self._dtype = keys, dtype
        self._listed: list[Entry] = []
        self._options: list[Any] = []  # that were looked at
        self._dampings: tuple[Any, dict[str, float]] = None, {}  # with what they belong to
        self._vectors: tuple[Any, BlockVectors | None] = None, None  # likewise

    def listed(self, groups: Groups) -> list[Entry]:
        """Group, key and tensor of every parameter; the same list as long as there are no others."""
        now = [(group, p) for group in groups for p in group["params"]]
        same = len(now) == len(self._listed) and all(
            group is of and p is known for (group, p), (of, _, known) in zip(now, self._listed, strict=True)
        )
        if not same:
            self._listed = [(group, self._keys[p], p) for group, p in now]
        return self._listed

    def check(self, groups: Groups, look: Callable[[], None]) -> None:
        """Have a look at the groups if an option may have changed since they were last looked at."""

        def options() -> list[Any]:
            return [group.get(name) for group in groups for name in _OPTIONS]

        now = options()
        same = len(now) == len(self._options) and all(map(is_, now, self._options))
        if not same or any(isinstance(value, Tensor) for value in now):
            self._options = []
            look()
            self._options = options()

    def dampings(self, groups: Groups, blocks: Iterable[Iterable[str]]) -> dict[str, float]:
        """Key of a parameter to its damping, with the weight decay that is part of the curvature.

        Args:
            blocks: Keys of the parameters of each block.
        """
        listed = self.listed(groups)
        now = listed, [group.get(name) for group in groups for name in _OPTIONS]
        if self._dampings[0] is None or listed is not self._dampings[0][0] or now[1] != self._dampings[0][1]:
            coupled = {id(group): as_weight_decay(group.get("weight_decay", 0.0)).curvature for group in groups}
            dampings = {key: group["damping"] + coupled[id(group)] for group, key, _ in listed}
            common = {name: {key: group.get(name) for group, key, _ in listed} for name in _COMMON}
            common["weight decay in the curvature"] = {key: coupled[id(group)] for group, key, _ in listed}
            require_common(blocks, common, dampings)
            self._dampings = now, dampings
        return self._dampings[1]

    def vectors(
        self,
        groups: Groups,
        gradient: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        state: MutableMapping[Any, dict[str, Any]],
    ) -> BlockVectors:
        """The parameters that have gradient and curvature.

        Args:
            gradient: Key of a parameter to its gradient.
            layouts: Name of a block that has a curvature to its layout.

        Raises:
            ValueError: If some parameters of a block have a gradient, and others have none.
        """
        listed = self.listed(groups)
        now, (before, vectors) = (list(gradient), list(layouts.values())), self._vectors
        if vectors is None or listed is not before[0] or now != before[1]:
            found = {name: layout for name, layout in layouts.items() if _has_gradient(layout, gradient)}
            params, of_keys = {key: p for _, key, p in listed}, {key: group for group, key, _ in listed}
            vectors = BlockVectors(found, params, of_keys, self._dtype)
            for p in set(state) - set(vectors.params):  # what is kept of the others is a part of larger tensors
                state[p] = copied(state[p])
            self._vectors = (listed, now), vectors
        return vectors


_COMMON = ("lr", "momentum", "norm_constraint")
_OPTIONS = ("damping", *_COMMON, "weight_decay", "initial_lr")


def _has_gradient(layout: Layout, gradient: Mapping[str, Tensor]) -> bool:
    """Whether a block has a gradient."""
    found = [key for key in layout.names if key in gradient]
    if 0 < len(found) < len(layout.names):
        raise ValueError(
            f"Of the parameters {layout.names}, which are one block of the curvature, only {found} have a gradient. "
            "Freeze the others before the optimizer is made, or leave them out of its `params`."
        )
    return bool(found)
