"""Walking through autograd's graph of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["postorder"]


def postorder(roots: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Every node below some roots once, with its children towards the inputs, each after all of them.

    Args:
        roots: Nodes, as `tensor.grad_fn` gives them; None is skipped.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [type(node).__name__ for node, _ in postorder([(2 * x).sum().grad_fn])]
        ['AccumulateGrad', 'MulBackward0', 'SumBackward0']
    """
    below: dict[Any, list[Any]] = {}
    stack = [(root, False) for root in roots if root is not None]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node, below[node]
        elif node not in below:
            below[node] = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, True))
            stack += [(child, False) for child in below[node] if child not in below]
