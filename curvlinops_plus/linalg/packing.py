"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.deferred import Deferred, Formed
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import Congruent, KroneckerSum
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted
from curvlinops_plus.linalg.split_factor import SplitFactor
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator

__all__ = ["FORMAT", "copied", "mapped", "pack", "taken", "unpack"]

#: What states of this package say that they are.
FORMAT = "curvlinops_plus"


# What a tensor is replaced by, and how it is got back.
Keep = Callable[[Tensor], Any]
Place = Callable[[Any], Tensor]


def pack(operator: LinearOperator, keep: Keep | None = None) -> dict[str, Any]:
    """A structured operator as a nested dict of tensors and strings.

    Args:
        operator: The operator.
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
    if isinstance(operator, Kronecker):
        return {"G": pack(operator.G, keep), "A": pack(operator.A, keep)}
    if isinstance(operator, KroneckerSum):
        return {"terms": [pack(term, keep) for term in operator.terms]}
    if isinstance(operator, Congruent):
        U, inverse_U = pack(operator.U, keep), pack(operator.inverse_U, keep)
        return {"U": U, "inverse_U": inverse_U, "values": keep(operator.values)}
    if isinstance(operator, Eigendecomposed):
        structure = {} if operator.structure == Structure.PSD else {"structure": operator.structure.name}
        return {"basis": pack(operator.basis, keep), "values": keep(operator.values), **structure}
    if isinstance(operator, Diagonal):
        return {"vector": keep(operator.vector)}
    if isinstance(operator, Dense):
        return {"matrix": keep(operator.matrix), "structure": operator.structure.name}
    if isinstance(operator, SplitFactor):
        return {"pieces": [pack(piece, keep) for piece in operator.pieces]}
    return _packed_multiple(operator, keep)


def _packed_multiple(operator: LinearOperator, keep: Keep) -> dict[str, Any] | None:
    """The same of the identity, of multiples and shifts."""
    if isinstance(operator, Scaled) and isinstance(operator.A, IdentityLinearOperator):
        scale = torch.as_tensor(operator.c, dtype=operator.dtype, device=operator.device)
        return {"type": "ScaledIdentity", "scale": copied(scale), "size": operator.shape[0]}
    if isinstance(operator, Scaled):
        return {"A": pack(operator.A, keep), "c": float(operator.c)}
    if isinstance(operator, Shifted):
        return {"A": pack(operator.A, keep), "delta": float(operator.delta)}
    if isinstance(operator, IdentityLinearOperator):
        return {"type": "Identity", "like": torch.zeros(0, dtype=operator.dtype), "size": operator.size}
    return None


def unpack(state: Mapping[str, Any], device: torch.device, place: Place | None = None) -> LinearOperator:
    """The operator that `pack` described, on `device`.

    Args:
        state: What `pack` returned.
        device: Where its tensors shall be.
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


def _unpacked(kind: str, state: Mapping[str, Any], device: torch.device, place: Place) -> LinearOperator | None:
    rtol = state.get("rtol")

    def part(of: Mapping[str, Any]) -> LinearOperator:
        return unpack(of, device, place)

    if kind == "Kronecker":
        return Kronecker(_factor(part(state["G"])), _factor(part(state["A"])))
    if kind == "KroneckerSum":
        return KroneckerSum([part(term) for term in state["terms"]])
    if kind == "Congruent":
        return Congruent(part(state["U"]), part(state["inverse_U"]), place(state["values"]))
    if kind == "Eigendecomposed":
        structure = Structure[state.get("structure", "PSD")]
        return Eigendecomposed(part(state["basis"]), place(state["values"]), structure, rtol)
    if kind == "Diagonal":
        return Diagonal(place(state["vector"]))
    if kind == "Dense":
        return Dense(place(state["matrix"]), Structure[state["structure"]], rtol)
    if kind == "SplitFactor":
        return SplitFactor([_factor(part(piece)) for piece in state["pieces"]])
    return _unpacked_multiple(kind, state, device, place)


def _unpacked_multiple(
    kind: str, state: Mapping[str, Any], device: torch.device, place: Place
) -> LinearOperator | None:
    if kind == "ScaledIdentity":
        scale = state["scale"]
        return Scaled(IdentityLinearOperator([(state["size"],)], device, scale.dtype), float(scale))
    if kind == "Identity":
        return IdentityLinearOperator([(state["size"],)], device, state["like"].dtype)
    if kind == "Scaled":
        return Scaled(unpack(state["A"], device, place), state["c"])
    return Shifted(unpack(state["A"], device, place), state["delta"]) if kind == "Shifted" else None


def _factor(factor: LinearOperator) -> Factor:
    if not isinstance(factor, Factor):
        raise TypeError(f"expected a factor of a Kronecker product, got {factor.label}")
    return factor


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
