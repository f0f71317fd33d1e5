"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.dense import Dense, Diagonal, IdentityLinearOperator
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker, KroneckerSum
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Sum
from curvlinops_plus.linalg.space import Structure

#: What states of this package say that they are.
FORMAT = "curvlinops_plus"

#: Of each class that has a state the arguments that it is made of: operators, tensors and numbers,
#: and plain ones.
_PARTS: dict[type[Any], tuple[str, ...]] = {
    Kronecker: ("G", "A"),
    KroneckerSum: ("A", "B"),
    Sum: ("A", "B"),
    Eigendecomposed: ("basis", "values", "structure", "rtol"),
    Dense: ("matrix", "structure", "rtol"),
    Diagonal: ("vector",),
    Scaled: ("A", "c", "delta"),
}


def pack(operator: LinearOperator) -> dict[str, Any]:
    """A structured operator as a nested dict of tensors, which are copied, numbers and strings.

    Raises:
        ValueError: If its type can't be saved.
    """
    name = type(operator).__name__
    if isinstance(operator, IdentityLinearOperator):
        dtype = str(operator.dtype).removeprefix("torch.")
        return {"type": name, "size": operator.size, "dtype": dtype, "c": float(operator.c)}
    if type(operator) not in _PARTS:
        known = ", ".join(kind.__name__ for kind in _PARTS)
        raise ValueError(
            f"A block of type {name} can't be saved; known are {known}, and the identity."
        )
    state: dict[str, Any] = {"type": name}
    for key in _PARTS[type(operator)]:
        part = getattr(operator, key)
        if isinstance(part, LinearOperator):
            state[key] = pack(part)
        elif isinstance(part, Structure):
            state[key] = part.name
        elif isinstance(part, Tensor) and part.ndim:
            state[key] = copied(part)
        elif part is not None:
            state[key] = float(part)
    return state


def unpack(state: Mapping[str, Any], device: torch.device) -> LinearOperator:
    """The operator that `pack` described, on `device`.

    Raises:
        ValueError: If the state is not one of `pack`.
    """
    try:
        if state["type"] == IdentityLinearOperator.__name__:
            return IdentityLinearOperator(
                [(state["size"],)], device, getattr(torch, state["dtype"])
            )._scale(state["c"])
        kind = next(kind for kind in _PARTS if kind.__name__ == state["type"])
        parts = []
        for key in _PARTS[kind]:
            part = state.get(key) if key == "rtol" else state[key]
            if isinstance(part, Mapping):
                part = unpack(part, device)
            elif key == "structure":
                part = Structure[str(part)]
            parts.append(copied(part).to(device) if isinstance(part, Tensor) else part)
        return kind(*parts)
    except (KeyError, StopIteration, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state of a block is incomplete or of an unknown type ({error!r}); is the file "
            "cut off, or not ours?"
        ) from error


def copied(t: Tensor) -> Tensor:
    """A copy without graph, with the memory in the usual order."""
    return t.detach().clone(memory_format=torch.contiguous_format)
