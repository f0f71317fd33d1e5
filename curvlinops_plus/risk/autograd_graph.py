"""Walking through autograd's graph of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["children", "postorder"]


def children(node: Any) -> list[Any]:
    """The nodes that a node sends gradients to, towards the inputs; one entry per edge."""
    return [child for child, _ in node.next_functions if child is not None]


def postorder(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node below some roots once, each after all of its children.

    Args:
        roots: Nodes, as `tensor.grad_fn` gives them; None is skipped.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [type(node).__name__ for node in postorder([(2 * x).sum().grad_fn])]
        ['AccumulateGrad', 'MulBackward0', 'SumBackward0']
    """
    found: set[Any] = set()
    stack = [(root, False) for root in roots if root is not None]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in found:
            found.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in children(node) if child not in found]
