"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.arithmetic import Scaled, Sum
from curvlinops_plus.linalg.dense import Dense, Diagonal, IdentityLinearOperator, IdentityMultiple
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker, KroneckerSum
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.space import Structure

#: Every state of this package has this as its format.
FORMAT = "curvlinops_plus"

#: Classes that are saved as the operators, tensors and numbers that they are made of.
_SAVED: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Kronecker, KroneckerSum, Sum, Eigendecomposed, Dense, Diagonal, Scaled)
}
_IDENTITY = IdentityLinearOperator.__name__


def pack(operator: LinearOperator) -> dict[str, Any]:
    """A structured operator as a nested dict of tensors, which are copied, numbers and strings.

    Raises:
        ValueError: If its type can't be saved.
    """
    if isinstance(operator, IdentityMultiple):
        dtype = str(operator.dtype).removeprefix("torch.")
        return {"type": _IDENTITY, "size": operator.size, "dtype": dtype, "c": float(operator.c)}
    name = type(operator).__name__
    if _SAVED.get(name) is not type(operator):
        raise ValueError(
            f"A block of type {name} can't be saved; known are {', '.join(_SAVED)}, and the "
            "identity."
        )
    state: dict[str, Any] = {"type": name}
    for key in operator._made_of:
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
        if state["type"] == _IDENTITY:
            shapes = [(state["size"],)]
            identity = IdentityLinearOperator(shapes, device, getattr(torch, state["dtype"]))
            return identity._scale(state["c"])
        kind = _SAVED[state["type"]]
        parts = []
        for key in kind._made_of:
            part = state.get(key) if key == "rtol" else state[key]
            if isinstance(part, Mapping):
                part = unpack(part, device)
            elif isinstance(part, Tensor):
                part = copied(part).to(device)
            elif key == "structure":
                part = Structure[str(part)]
            parts.append(part)
        return kind(*parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state of a block is incomplete or of an unknown type ({error!r}); is the file "
            "cut off, or not ours?"
        ) from error


def copied(t: Tensor) -> Tensor:
    """A copy without graph, with the memory in the usual order."""
    return t.detach().clone(memory_format=torch.contiguous_format)
