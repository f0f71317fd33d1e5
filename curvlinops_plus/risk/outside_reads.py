"""The error that makes an operator look how functions read parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.module_uses import ModuleUse


class OutsideReads(UnsupportedError):
    """What a layer's calls show is not all that the model does with a parameter; `look_for_functions` finds the rest.

    Args:
        message: What to say if that does not help.
        keys: Keys of parameters whose gradients only a module around their layer can tell apart by examples.
    """

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


def not_by_example(use: ModuleUse, inputs: Any, N: int, message: str) -> UnsupportedError:
    """The error about rows of a layer that don't belong to examples.

    Of a table that the layer makes for all of them, from inputs of which none has an axis of `N`, the module around it
    has gradients of each example.
    """
    message += (
        " If its rows are gathered by index, or in an order of their own, say to which example each of them belongs: "
        f"example_of_row={{{use.name!r}: lambda X, y: model.rows}} if forward keeps that in self.rows, "
        "lambda X, y: torch.arange(len(X)).repeat(2) if first halves of all examples come before second ones; of a "
        "PackedSequence, the data of torch.arange(len(X))[:, None].expand(-1, T) packed like the inputs."
    )
    table = N > 1 and not any(isinstance(t, Tensor) and N in t.shape for t in tree_leaves(inputs))
    return OutsideReads(message, use.keys.values()) if table else UnsupportedError(message)
