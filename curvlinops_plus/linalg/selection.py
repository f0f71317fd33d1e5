"""Some entries of a vector: what may be picked, and where it is.

For rows and columns alike these are

* positions: a list, range, tensor or array of different integers from 0, in any order,
* a boolean mask with one entry per row (or column),
* a slice; `:` picks everything and keeps names and shapes,
* parameters: a name, or a list of names of the operator's space. The result keeps their names and shapes, and
  multiplies lists and dictionaries of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.linalg.space import Space


@dataclass(frozen=True, eq=False)
class Selection:
    """Some entries of a vector of size `dim`: their positions, and the space that they make."""

    space: Space
    positions: Tensor  # [k], on the operator's device
    dim: int
    names: tuple[str, ...] | None = None  # if whole parameters were picked

    def gather(self, V: Tensor) -> Tensor:  # [dim, *K] -> [k, *K]
        """The picked entries."""
        return V.index_select(0, self.positions)

    def scatter(self, X: Tensor) -> Tensor:  # [k, *K] -> [dim, *K]
        """A vector that is zero elsewhere."""
        return X.new_zeros(self.dim, *X.shape[1:]).index_copy_(0, self.positions, X)

    def same(self, other: Selection) -> bool:
        """Whether both pick the same entries in the same order."""
        return self is other or (self.dim == other.dim and torch.equal(self.positions, other.positions))


def select(which: Any, space: Space, device: torch.device, axis: str) -> Selection:
    """Read what was picked from a vector of `space`, or take a selection that was read before.

    Args:
        device: Where positions are wanted.
        axis: "row" or "column", for messages.

    Raises:
        ValueError: If it is of no known kind, out of bounds, or has duplicates.
    """
    if isinstance(which, Selection):
        return replace(which, positions=which.positions.to(device))
    if isinstance(which, slice):
        whole = torch.arange(space.dim, device=device)
        if which == slice(None):
            return Selection(space, whole, space.dim, tuple(space.names))
        return _of_positions(whole[list(range(space.dim)[which])], space.dim)
    if isinstance(which, str):
        which = [which]
    if isinstance(which, Sequence) and len(which) and all(isinstance(name, str) for name in which):
        return _of_names(list(which), space, device, axis)
    picked = _integers_or_mask(which)
    if picked is None or picked.ndim != 1:
        raise ValueError(
            f"Expected {axis}s as a list of integers, a boolean mask, a slice, or names of parameters out of "
            f"{space.names}; got {which!r}."
        )
    return _of_positions(_checked_positions(picked, space.dim, axis).to(device), space.dim)


def _integers_or_mask(which: Any) -> Tensor | None:
    """A tensor, array or sequence as a tensor of integers or booleans; None if it is neither."""
    if isinstance(which, (Tensor, np.ndarray)):
        picked = which if isinstance(which, Tensor) else torch.from_numpy(np.array(which))
        return None if picked.is_floating_point() or picked.is_complex() else picked
    if not isinstance(which, Sequence):
        return None
    masks = [isinstance(value, (bool, np.bool_)) for value in which]
    if masks and all(masks):
        return torch.tensor(which, dtype=torch.bool)
    if any(masks) or not all(isinstance(value, (int, np.integer)) for value in which):
        return None
    return torch.tensor(which, dtype=torch.long)


def _checked_positions(picked: Tensor, n: int, axis: str) -> Tensor:
    """The positions that integers or a mask pick out of `n`."""
    if picked.dtype == torch.bool:
        if len(picked) != n:
            raise ValueError(f"Expected a mask of {n} entries, one per {axis}, got {len(picked)}.")
        return picked.nonzero()[:, 0]
    picked = picked.long().cpu()
    if len(picked) and (int(picked.min()) < 0 or int(picked.max()) >= n):
        raise ValueError(
            f"Expected {axis} numbers between 0 and {n - 1}, got numbers between {int(picked.min())} and "
            f"{int(picked.max())}."
        )
    if len(picked.unique()) != len(picked):
        raise ValueError(f"Expected different {axis}s, got {len(picked) - len(picked.unique())} duplicates.")
    return picked


def _of_positions(positions: Tensor, dim: int) -> Selection:
    return Selection(Space.flat(len(positions)), positions, dim)


def _of_names(names: list[str], space: Space, device: torch.device, axis: str) -> Selection:
    unknown = [name for name in names if name not in space.shapes]
    if unknown or len(set(names)) != len(names):
        raise ValueError(f"Expected different names of {axis}s out of {space.names}, got {names}.")
    at = space.unflatten(torch.arange(space.dim, device=device))
    positions = torch.cat([at[name].flatten() for name in names])
    return Selection(Space({name: space.shapes[name] for name in names}), positions, space.dim, tuple(names))
