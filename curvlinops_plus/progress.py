"""Bars over what is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def shown(items: Iterable[T], desc: str, progressbar: bool = True) -> Iterable[T]:
    """The items, with a bar if one is asked for. Whoever reads them begins once: given the items
    themselves, tqdm begins twice, and a `DataLoader` draws random numbers and starts its workers
    whenever it begins.

    Example:
        >>> list(shown([1, 2], "numbers", progressbar=False))
        [1, 2]
    """
    if not progressbar:
        return items
    return tqdm(iter(items), desc, total=known_length(items))


def known_length(items: Iterable[object]) -> int | None:
    """How many there are; None if only reading them tells, as for a stream."""
    try:
        return len(items)  # type: ignore[arg-type]
    except (TypeError, AttributeError, NotImplementedError):
        return None
