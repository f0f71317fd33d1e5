"""Calls of layers that recording can't take: by what is inside their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.module_uses import ModuleUse, title
from curvlinops_plus.risk.outside_reads import OutsideReads

#: What a model does with a row for all examples that it does not do alike with a row for each.
MORE_THAN_BROADCAST = (
    "the model does more with it than broadcast it (it picks a row, or reduces over the first axis), so that its "
    "gradient can't be told apart by examples"
)


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
