"""Batches in which each example is an entry of a list: bags, images and sequences of all sizes,
texts. Whether they are is known from how a batch counts its examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor


def has_lists(tree: Any, number: int) -> bool:
    """Whether there are lists with so many entries, and no tensor beside them that may carry as
    many examples.

    Example:
        >>> import torch
        >>> has_lists([torch.zeros(3, 4), torch.zeros(2, 4)], 2)
        True
        >>> has_lists({"x": torch.zeros(2, 4), "sizes": [3, 4]}, 2)
        False
    """
    found = False
    for part in _lists_and_leaves(tree, number):
        # On one of two axes, times positions.
        if isinstance(part, Tensor) and any(n % number == 0 for n in part.shape[:2]):
            return False
        found = found or _is_list_of(part, number)
    return found


def with_entries(tree: Any, num_examples: int, chosen: Sequence[int]) -> Any:
    """The same with some entries of each list that has one for each example.

    Example:
        >>> with_entries({"texts": ["a", "b", "c"], "size": (8, 8)}, 3, [0, 2])
        {'texts': ['a', 'c'], 'size': (8, 8)}
    """
    if _is_list_of(tree, num_examples):
        return type(tree)(tree[n] for n in chosen)
    if type(tree) in (list, tuple):
        return type(tree)(with_entries(part, num_examples, chosen) for part in tree)
    if isinstance(tree, MutableMapping):
        mapping = copy(tree)
        for key, value in tree.items():
            mapping[key] = with_entries(value, num_examples, chosen)
        return mapping
    return tree


def _is_list_of(tree: Any, number: int) -> bool:
    return type(tree) in (list, tuple) and len(tree) == number


def _lists_and_leaves(tree: Any, number: int) -> Iterator[Any]:
    """The outermost lists of so many entries, and what is in none of them."""
    if _is_list_of(tree, number) or not isinstance(tree, (list, tuple, Mapping)):
        yield tree
        return
    for part in tree.values() if isinstance(tree, Mapping) else tree:
        yield from _lists_and_leaves(part, number)
