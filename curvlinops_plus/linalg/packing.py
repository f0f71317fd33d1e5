"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.dense import Dense, Diagonal, IdentityLinearOperator
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker, KroneckerSum
from curvlinops_plus.linalg.operator import Deferred, LinearOperator, Scaled, Shifted, Sum
from curvlinops_plus.linalg.space import Structure

#: What states of this package say that they are.
FORMAT = "curvlinops_plus"

# What a tensor is replaced by, and how it is got back.
Keep = Callable[[Tensor], Any]
Place = Callable[[Any], Tensor]

#: Of each class that has a state what it is made of: operators, tensors, and in the second place what is plain.
_PARTS: dict[type[Any], tuple[tuple[str, ...], tuple[str, ...]]] = {
    Kronecker: (("G", "A"), ()),
    KroneckerSum: (("A", "B"), ()),
    Sum: (("A", "B"), ()),
    Eigendecomposed: (("basis", "values"), ("structure", "rtol")),
    Dense: (("matrix",), ("structure", "rtol")),
    Diagonal: (("vector",), ()),
    Scaled: (("A", "c"), ()),
    Shifted: (("A", "delta"), ()),
}


def pack(operator: LinearOperator, keep: Keep | None = None) -> dict[str, Any]:
    """A structured operator as a nested dict of tensors, numbers and strings.

    Args:
        keep: What stands for a tensor in it; by default a copy.

    Raises:
        ValueError: If its type can't be saved.
    """
    if isinstance(operator, Deferred):
        return pack(operator.operator, keep)
    name = type(operator).__name__
    if isinstance(operator, IdentityLinearOperator):
        return {"type": name, "size": operator.size, "dtype": str(operator.dtype).removeprefix("torch.")}
    if type(operator) not in _PARTS:
        raise ValueError(
            f"A block of type {name} can't be saved; known are {', '.join(kind.__name__ for kind in _PARTS)}, and the "
            "identity."
        )

    def packed(part: Any) -> Any:
        if isinstance(part, LinearOperator):
            return pack(part, keep)
        return (keep or copied)(part) if isinstance(part, Tensor) and part.ndim else float(part)

    parts, plain = _PARTS[type(operator)]
    told = {key: getattr(operator, key) for key in plain if getattr(operator, key) is not None}
    return {"type": name, **{key: packed(getattr(operator, key)) for key in parts}} | {
        key: value.name if isinstance(value, Structure) else value for key, value in told.items()
    }


def unpack(state: Mapping[str, Any], device: torch.device, place: Place | None = None) -> LinearOperator:
    """The operator that `pack` described, on `device`.

    Args:
        state: What `pack` returned.
        place: Brings what stands for a tensor there; by default `taken`.

    Raises:
        ValueError: If the state is not one of `pack`.
    """
    put = partial(taken, device=device) if place is None else place

    def part(of: Any) -> Any:
        if isinstance(of, Mapping):
            return unpack(of, device, place)
        return of if isinstance(of, (int, float)) else put(of)

    try:
        if state["type"] == IdentityLinearOperator.__name__:
            return IdentityLinearOperator([(state["size"],)], device, getattr(torch, state["dtype"]))
        kinds = {kind.__name__: kind for kind in _PARTS}
        kind = kinds[state["type"]]
        parts, plain = _PARTS[kind]
        told = {key: Structure[state[key]] if key == "structure" else state[key] for key in plain if key in state}
        return kind(*(part(state[key]) for key in parts), **told)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state of a block is incomplete or of an unknown type ({error!r}); is the file cut off, or not ours?"
        ) from error


def copied(t: Tensor) -> Tensor:
    """A copy without graph, with the memory in the usual order."""
    return t.detach().clone(memory_format=torch.contiguous_format)


# Tensors that `mapped` was told of, by their identity.
_MAPPED: dict[int, weakref.ref[Tensor]] = {}


def mapped(t: Tensor) -> Tensor:
    """The tensor, which `taken` need not copy: it is mapped from a file, and nobody else writes to it."""
    key = id(t)
    _MAPPED[key] = weakref.ref(t, lambda _: _MAPPED.pop(key, None))
    return t


def taken(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of a state on a device, without graph: a copy, unless it is mapped from a file and stays where it is.

    What is mapped is read from the file when it is used.
    """
    known = _MAPPED.get(id(t))
    if known is not None and known() is t and t.is_contiguous():
        return t.detach().to(device)
    return copied(t).to(device)
