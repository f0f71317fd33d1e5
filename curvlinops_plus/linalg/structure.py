"""What is known about a matrix without looking at its entries."""

from __future__ import annotations

from enum import IntEnum


class Structure(IntEnum):
    """What is known about a matrix; each value implies the smaller ones, so that a sum has the minimum of its parts.

    Example:
        >>> min(Structure.PSD, Structure.SYMMETRIC).name
        'SYMMETRIC'
    """

    GENERAL = 0
    SYMMETRIC = 1
    PSD = 2  # symmetric, no negative eigenvalue
