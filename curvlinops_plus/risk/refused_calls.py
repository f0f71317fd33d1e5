"""Calls of layers that recording can't take, and the error after which operators look how functions read parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.module_uses import ModuleUse, title

#: What a model does with a row for all examples that it does not do alike with a row for each.
MORE_THAN_BROADCAST = (
    "the model does more with it than broadcast it (it picks a row, or reduces over the first axis), so that its "
    "gradient can't be told apart by examples"
)


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


def refuse_call(use: ModuleUse, leaves: Iterable[Any]) -> None:
    """Refuse a call by its inputs and outputs.

    Args:
        leaves: What it got and returned.

    Raises:
        UnsupportedError: If they are inside a transform of functions or forward-mode differentiation, sparse, or have
            no numbers.
    """
    for t in leaves:
        if isinstance(t, Tensor) and (reason := _reason(t)):
            raise UnsupportedError(
                f"{title(use.name)} ({type(use.module).__name__}) {reason} Or leave its parameters "
                f"{list(use.keys.values())} out of `params`. Matrix-free operators (GGN, Hessian, Jacobian) take it."
            )


def refusal_of_one_row(use: ModuleUse, num_examples: int, why: str) -> OutsideReads:
    """What to raise for a layer that returned one row for all examples, which can't stand for one row for each."""
    return OutsideReads(
        f"{title(use.name)} ({type(use.owner).__name__}) returned one row for all {num_examples} examples, which was "
        f"expanded to one row for each, so that each has a gradient of its own; {why}. If the layer makes weights or a "
        f"table for all examples, leave its parameters {list(use.keys.values())} out of `params`; if a row, expand it "
        "to the batch in the model; if it is the row of one example, as of an expert that got one, say whose: "
        f"example_of_row={{{use.name!r}: lambda X, y: model.rows}} if forward keeps that in self.rows.",
        use.keys.values(),
    )


def _reason(t: Tensor) -> str | None:
    if torch._C._functorch.is_functorch_wrapped_tensor(t):  # pyright: ignore[reportAttributeAccessIssue]
        return (
            "is called inside a transform of torch.func (vmap, grad, jvp), where its inputs and gradients can't be "
            "recorded. Call it on the whole batch."
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:  # pyright: ignore
        return "is called inside forward-mode differentiation, whose tangents recording does not follow. Call it apart."
    if t.layout != torch.strided and t.layout != torch.jagged:
        return f"got or returned a sparse tensor ({t.layout}); recording needs dense ones. Convert it: x.to_dense()."
    if 0 in t.shape[1:]:  # without rows at all it may be an expert that nobody asked
        return f"got or returned a tensor of shape {list(t.shape)}, which has no numbers. Drop layers of width zero."
    return None
