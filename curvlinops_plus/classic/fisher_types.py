"""The options of curvlinops that name a Fisher matrix and a treatment of weight sharing; strings work as well."""

from __future__ import annotations

from enum import Enum, EnumMeta


class _ContainsValues(EnumMeta):
    """Makes `"mc" in FisherType` true, as for the member itself (Python does so from 3.12 on)."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)  # type: ignore[call-arg]
        except ValueError:
            return False
        return True


class FisherType(str, Enum, metaclass=_ContainsValues):
    """Which matrix the gradient statistics estimate; members and their strings may be used alike.

    Example:
        >>> "mc" in FisherType, FisherType.MC == "mc", "forward" in FisherType
        (True, True, False)
    """

    TYPE2 = "type-2"
    MC = "mc"
    EMPIRICAL = "empirical"
    FORWARD_ONLY = "forward-only"


class KFACType(str, Enum, metaclass=_ContainsValues):
    """How positions that share a weight are treated, see `KFAC`."""

    EXPAND = "expand"
    REDUCE = "reduce"
