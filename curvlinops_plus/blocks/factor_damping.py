"""Damping that is added to the Kronecker factors of the blocks instead of to their products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.linalg import BlockDiagonal, Kronecker, heuristic_damping


def pair_damping(K: BlockDiagonal, pair: tuple[Any, Any], scale: float | Tensor) -> dict[str, Any]:
    """Block name to `(λ_A, λ_G / scale)` for Kronecker products, to the second of these for others.

    A separate bias block is a factor `G`. Rules are asked for each factor, and need no scaling.
    """
    of_A, of_G = pair
    of_G = of_G if callable(of_G) else of_G / scale
    return {name: (of_A, of_G) if isinstance(block, Kronecker) else of_G for name, block in K.blocks.items()}


def heuristic_factor_damping(
    K: BlockDiagonal, plan: Iterable[LayerPlan], damping: dict[str, float | Tensor], min_damping: float
) -> dict[str, Any]:
    """Each block's damping split over its factors (Martens & Grosse 2015, section 6.3).

    Args:
        plan: The layers. A separate bias block is damped like the gradient factor of its weight.
        min_damping: Lower bound of each side.

    Returns:
        Block name to a pair for Kronecker products, to a number for others.
    """
    result: dict[str, Any] = dict(damping)
    for entry in plan:
        names = [group.name for group in entry.layer.groups]
        for name in names:
            block = K.blocks.get(name)  # others may be kept by other processes
            if isinstance(block, Kronecker):
                pair = heuristic_damping(block.A, block.G, damping[name], min_damping)
                result |= {**dict.fromkeys(names, pair[1]), name: pair}
    return result
