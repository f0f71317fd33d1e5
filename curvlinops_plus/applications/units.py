"""Parameters that are dropped together, as those of an expert: where they are in the vector."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.layout import Layout


def units_of(
    K: LinearOperator, units: Any, candidates: Collection[str], holders: Mapping[str, Any]
) -> list[Tensor]:
    """Positions of the parameters of each unit.

    Args:
        K: A block-diagonal operator.
        units: "experts", or lists of names or globs of parameters.
        candidates: Names of the parameters that may be dropped.
        holders: Name of each parameter to the modules that hold it.

    Raises:
        ValueError: If they overlap, or there are none.
    """
    blocks: Any = getattr(K, "operator", K)
    layouts: Mapping[str, Layout] = getattr(blocks, "layouts", {})
    positions = K.in_space.unflatten(torch.arange(K.shape[0], device=K.device))
    if units == "experts":
        return _experts(layouts, positions, candidates, holders)
    if isinstance(units, str):
        raise ValueError(f"units={units!r}; expected 'experts', or lists of names of parameters.")
    found = []
    used: set[str] = set()
    for globs in units:
        keys = _matching(globs, candidates)
        if not keys.isdisjoint(used):
            raise ValueError(f"Several units have the parameters {sorted(keys & used)}.")
        used |= keys
        found.append(torch.cat([positions[key].flatten() for key in sorted(keys)]))
    if not found:
        raise ValueError("units is empty; expected 'experts', or lists of names of parameters.")
    return found


def _experts(
    layouts: Mapping[str, Layout],
    positions: Mapping[str, Tensor],
    candidates: Collection[str],
    holders: Mapping[str, Any],
) -> list[Tensor]:
    """Those of each expert: its part of all stacks that one module holds."""
    stacks: dict[Any, list[str]] = {}
    for layout in layouts.values():
        if is_stack(layout) and set(layout.names) <= {*candidates}:
            for key in layout.names:
                number = len(positions[key])
                stacks.setdefault((holders[key][0].module, number), []).append(key)
    if not stacks:
        raise ValueError(
            "K has no stacks of experts among the candidates. Of experts that are modules say "
            "which parameters go together: units=[[f'experts.{e}.*'] for e in range(8)]."
        )
    return [
        torch.cat([positions[key][e].flatten() for key in keys])
        for (_, number), keys in stacks.items()
        for e in range(number)
    ]


def is_stack(layout: Layout) -> bool:
    """Whether a block is of stacks of matrices, between which it is zero.

    Example:
        >>> is_stack(Layout({"W": "m o i -> m o i"}, {"W": (4, 3, 2)}))
        True
        >>> is_stack(Layout({"W": "(g o) i -> g o i"}, {"W": (6, 2)}, {"g": 3}))
        False
    """
    if len(layout.matrix_shape) < 3:
        return False
    parts = [text.split("->") for text in layout.patterns.values()]
    return all(parameter.split()[0] == matrix.split()[0] for parameter, matrix in parts)


def _matching(globs: Iterable[str], candidates: Collection[str]) -> set[str]:
    """The parameters of one unit."""
    keys = {key for key in candidates if any(fnmatchcase(key, glob) for glob in globs)}
    if not keys:
        raise ValueError(f"units has {globs!r}, which names none of {[*candidates][:5]}.")
    return keys


def require_uncoupled(
    H: LinearOperator, units: list[Tensor], theta: Tensor, H_theta: Tensor
) -> None:
    """Refuse units that `H` couples with other parameters, which would have to be adjusted.

    Where nothing is coupled, `H (r * θ) = r * (H θ)` for all factors r of units.
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.ones_like(theta)
    for unit, factor in zip(units, torch.rand(len(units), generator=generator, device="cpu")):
        factors[unit] = 1 + float(factor)
    difference = H @ (factors * theta) - factors * H_theta
    tolerance = 1e3 * torch.finfo(theta.dtype).eps
    if not bool(difference.norm() <= tolerance * H_theta.norm()):
        raise ValueError(
            "K couples units with other parameters, which would have to be adjusted. Take whole "
            "blocks, and for experts in stacks KFAC, EKFAC or DiagonalBlock."
        )
