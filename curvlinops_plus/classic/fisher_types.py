"""The options of curvlinops that name a Fisher matrix and a treatment of weight sharing; strings work as well."""

from __future__ import annotations

from enum import Enum


class FisherType(str, Enum):
    """Which matrix the gradient statistics estimate; members and their strings may be used alike.

    Example:
        >>> FisherType("mc") is FisherType.MC, FisherType.MC == "mc"
        (True, True)
    """

    TYPE2 = "type-2"
    MC = "mc"
    EMPIRICAL = "empirical"
    FORWARD_ONLY = "forward-only"


class KFACType(str, Enum):
    """How positions that share a weight are treated, see `KFAC`."""

    EXPAND = "expand"
    REDUCE = "reduce"
