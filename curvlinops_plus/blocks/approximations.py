"""The approximations of this package, by class and by name."""

from __future__ import annotations

from typing import Any

from curvlinops_plus.blocks.accumulator import Accumulator, Approximation
from curvlinops_plus.blocks.ekfac import EKFAC
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.per_example import (
    TNT,
    DiagonalBlock,
    FullBlock,
    NearestKronecker,
    ScaledIdentity,
)

APPROXIMATIONS = (KFAC, EKFAC, TNT, NearestKronecker, DiagonalBlock, FullBlock, ScaledIdentity)


def approximation_of(choice: Any) -> Approximation:
    """An approximation from an `Approximation`, an `Accumulator` class, or the name of one of ours.

    In names neither capitals nor `_` and `-` count, and "Block" may be left out.

    Raises:
        ValueError: For anything else; of an unknown name, lists those that there are.

    Example:
        >>> approximation_of("ekfac"), approximation_of("nearest_kronecker")
        (EKFAC, NearestKronecker)
        >>> approximation_of("diagonal"), approximation_of(KFAC.using(kfac_approx="reduce"))
        (DiagonalBlock, KFAC(kfac_approx='reduce'))
    """
    if isinstance(choice, Approximation):
        return choice
    if isinstance(choice, type) and issubclass(choice, Accumulator):
        return Approximation(choice)
    if isinstance(choice, str):
        for kind in APPROXIMATIONS:
            if _plain(choice) == _plain(kind.__name__):
                return Approximation(kind)
        names = ", ".join(repr(kind.__name__) for kind in APPROXIMATIONS)
        raise ValueError(f"{choice!r} is no approximation. Expected one of {names}, or its class.")
    name = choice.__name__ if isinstance(choice, type) else repr(choice)
    raise ValueError(
        f"{name} is no approximation. Expected an Accumulator class such as KFAC, EKFAC, "
        "DiagonalBlock, FullBlock, the name of one, or one with options such as "
        "KFAC.using(kfac_approx='reduce')."
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").removesuffix("block")
