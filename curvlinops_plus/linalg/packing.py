"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.deferred import Deferred, Formed
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import Congruent, KroneckerSum
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator

#: What states of this package say that they are.
FORMAT = "curvlinops_plus"


# What a tensor is replaced by, and how it is got back.
Keep = Callable[[Tensor], Any]
Place = Callable[[Any], Tensor]

# Of each class that has a state what it is made of: attributes, and arguments in their order.
_PARTS: dict[type[Any], tuple[str, ...]] = {
    Kronecker: ("G", "A"),
    KroneckerSum: ("terms",),
    Congruent: ("U", "inverse_U", "values"),
    Eigendecomposed: ("basis", "values"),
    Diagonal: ("vector",),
    Dense: ("matrix",),
    Scaled: ("A", "c"),
    Shifted: ("A", "delta"),
}


def pack(operator: LinearOperator, keep: Keep | None = None) -> dict[str, Any]:
    """A structured operator as a nested dict of tensors and strings.

    Args:
        keep: What stands for a tensor in it; by default a copy.

    Raises:
        ValueError: If its type can't be saved.
    """
    keep = copied if keep is None else keep
    if isinstance(operator, Deferred):
        formed = operator.operator
        if not isinstance(operator, Formed) or _packed(formed, keep):
            return pack(formed, keep)
        return pack(Dense(formed.to_dense(), operator.structure), keep)
    packed = _packed(operator, keep)
    if packed is None:
        raise ValueError(
            f"A block of type {type(operator).__name__} can't be saved; known are Kronecker, sums of them, "
            "Eigendecomposed, Diagonal, Dense, their multiples and shifts, and multiples of the identity."
        )
    rtol = getattr(operator, "rtol", None)
    return {"type": type(operator).__name__, **packed, **({} if rtol is None else {"rtol": float(rtol)})}


def _packed(operator: LinearOperator, keep: Keep) -> dict[str, Any] | None:
    if isinstance(operator, Scaled) and isinstance(operator.A, IdentityLinearOperator):
        scale = torch.as_tensor(operator.c, dtype=operator.dtype, device=operator.device)
        return {"type": "ScaledIdentity", "scale": copied(scale), "size": operator.shape[0]}
    if isinstance(operator, IdentityLinearOperator):
        return {"type": "Identity", "like": torch.zeros(0, dtype=operator.dtype), "size": operator.size}
    kind = next((kind for kind in _PARTS if isinstance(operator, kind)), None)
    if kind is None:
        return None
    found = {name: _packed_part(getattr(operator, name), keep) for name in _PARTS[kind]}
    told = kind is Dense or (kind is Eigendecomposed and operator.structure != Structure.PSD)  # what others know
    return found | {"structure": operator.structure.name} if told else found


def _packed_part(part: Any, keep: Keep) -> Any:
    if isinstance(part, LinearOperator):
        return pack(part, keep)
    if isinstance(part, (list, tuple)):
        return [pack(one, keep) for one in part]
    return keep(part) if isinstance(part, Tensor) and part.ndim else float(part)


def unpack(state: Mapping[str, Any], device: torch.device, place: Place | None = None) -> LinearOperator:
    """The operator that `pack` described, on `device`.

    Args:
        state: What `pack` returned.
        place: Brings what stands for a tensor there; by default `taken`.

    Raises:
        ValueError: If the state is not one of `pack`.
    """
    place = partial(taken, device=device) if place is None else place
    try:
        operator = _unpacked(state["type"], state, device, place)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state of a block is incomplete ({error!r}); is the file cut off, or not ours?"
        ) from error
    if operator is None:
        raise ValueError(f"The state has a block of unknown type {state['type']!r}; is it from a newer version?")
    return operator


def _unpacked(name: str, state: Mapping[str, Any], device: torch.device, place: Place) -> LinearOperator | None:
    if name == "ScaledIdentity":
        scale = state["scale"]
        return Scaled(IdentityLinearOperator([(state["size"],)], device, scale.dtype), float(scale))
    if name == "Identity":
        return IdentityLinearOperator([(state["size"],)], device, state["like"].dtype)
    kind = next((kind for kind in _PARTS if kind.__name__ == name), None)
    if kind is None:
        return None

    def part(of: Any) -> Any:
        if isinstance(of, Mapping):
            return unpack(of, device, place)
        if isinstance(of, list):
            return [part(one) for one in of]
        return of if isinstance(of, (int, float)) else place(of)

    options: dict[str, Any] = {"rtol": state["rtol"]} if "rtol" in state else {}
    if kind is Dense or "structure" in state:
        options["structure"] = Structure[state["structure"]]
    return kind(*(part(state[name]) for name in _PARTS[kind]), **options)


def tensors_of(*parts: Any) -> list[Tensor] | None:
    """All tensors that operators and numbers are made of; None if one is of a kind that is not known."""
    tensors: list[Tensor] = []
    for part in parts:
        inner: list[Tensor] | None = []
        if isinstance(part, Tensor):
            inner = [part]
        elif isinstance(part, (list, tuple)):
            inner = tensors_of(*part)
        elif isinstance(part, Formed):
            inner = part.tensors
        elif isinstance(part, LinearOperator) and not isinstance(part, IdentityLinearOperator):
            kind = next((kind for kind in _PARTS if isinstance(part, kind)), None)
            inner = None if kind is None else tensors_of(*(getattr(part, name) for name in _PARTS[kind]))
        if inner is None:
            return None
        tensors += inner
    return tensors


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
