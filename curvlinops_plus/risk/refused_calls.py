"""Calls of layers that recording can't take: by what is inside their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.module_uses import ModuleUse, title

__all__ = ["refuse_call"]


def refuse_call(use: ModuleUse, leaves: Iterable[Any]) -> None:
    """Refuse a call by its inputs and outputs.

    Args:
        use: The module that was called.
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
