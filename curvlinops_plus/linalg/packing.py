"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.deferred import Formed
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.kronecker_sum import Congruent, KroneckerSum
from curvlinops_plus.linalg.operator import LinearOperator, Scaled, Shifted
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense, Diagonal, IdentityLinearOperator

__all__ = ["FORMAT", "copied", "pack", "unpack"]

#: What states of this package say that they are.
FORMAT = "curvlinops_plus"


def pack(operator: LinearOperator) -> dict[str, Any]:
    """A structured operator as a nested dict of tensors and strings.

    Raises:
        ValueError: If its type can't be saved.
    """
    if isinstance(operator, Formed):
        formed = operator.operator
        return pack(formed if _packed(formed) else Dense(formed.to_dense(), operator.structure))
    packed = _packed(operator)
    if packed is None:
        raise ValueError(
            f"A block of type {type(operator).__name__} can't be saved; known are Kronecker, sums of them, "
            "Eigendecomposed, Diagonal, Dense, their multiples and shifts, and multiples of the identity."
        )
    rtol = getattr(operator, "rtol", None)
    return {"type": type(operator).__name__, **packed, **({} if rtol is None else {"rtol": float(rtol)})}


def _packed(operator: LinearOperator) -> dict[str, Any] | None:
    if isinstance(operator, Kronecker):
        return {"G": pack(operator.G), "A": pack(operator.A)}
    if isinstance(operator, KroneckerSum):
        return {"terms": [pack(term) for term in operator.terms]}
    if isinstance(operator, Congruent):
        return {"U": pack(operator.U), "inverse_U": pack(operator.inverse_U), "values": copied(operator.values)}
    if isinstance(operator, Eigendecomposed):
        structure = {} if operator.structure == Structure.PSD else {"structure": operator.structure.name}
        return {"basis": pack(operator.basis), "values": copied(operator.values), **structure}
    if isinstance(operator, Diagonal):
        return {"vector": copied(operator.vector)}
    if isinstance(operator, Dense):
        return {"matrix": copied(operator.matrix), "structure": operator.structure.name}
    if isinstance(operator, Scaled) and isinstance(operator.A, IdentityLinearOperator):
        scale = torch.as_tensor(operator.c, dtype=operator.dtype, device=operator.device)
        return {"type": "ScaledIdentity", "scale": copied(scale), "size": operator.shape[0]}
    if isinstance(operator, Scaled):
        return {"A": pack(operator.A), "c": float(operator.c)}
    if isinstance(operator, Shifted):
        return {"A": pack(operator.A), "delta": float(operator.delta)}
    if isinstance(operator, IdentityLinearOperator):
        return {"type": "Identity", "like": torch.zeros(0, dtype=operator.dtype), "size": operator.size}
    return None


def unpack(state: Mapping[str, Any], device: torch.device) -> LinearOperator:
    """The operator that `pack` described, on `device`; it shares no memory with the state.

    Raises:
        ValueError: If the state is not one of `pack`.
    """
    try:
        operator = _unpacked(state["type"], state, device)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state of a block is incomplete ({error!r}); is the file cut off, or not ours?"
        ) from error
    if operator is None:
        raise ValueError(f"The state has a block of unknown type {state['type']!r}; is it from a newer version?")
    return operator


def _unpacked(kind: str, state: Mapping[str, Any], device: torch.device) -> LinearOperator | None:
    rtol = state.get("rtol")
    if kind == "Kronecker":
        return Kronecker(_factor(state["G"], device), _factor(state["A"], device))
    if kind == "KroneckerSum":
        return KroneckerSum([unpack(term, device) for term in state["terms"]])
    if kind == "Congruent":
        U, inverse_U = (unpack(state[name], device) for name in ("U", "inverse_U"))
        return Congruent(U, inverse_U, copied(state["values"]).to(device))
    if kind == "Eigendecomposed":
        structure = Structure[state.get("structure", "PSD")]
        return Eigendecomposed(unpack(state["basis"], device), copied(state["values"]).to(device), structure, rtol)
    if kind == "Diagonal":
        return Diagonal(copied(state["vector"]).to(device))
    if kind == "Dense":
        return Dense(copied(state["matrix"]).to(device), Structure[state["structure"]], rtol)
    if kind == "ScaledIdentity":
        scale = state["scale"]
        return Scaled(IdentityLinearOperator([(state["size"],)], device, scale.dtype), float(scale))
    if kind == "Identity":
        return IdentityLinearOperator([(state["size"],)], device, state["like"].dtype)
    if kind == "Scaled":
        return Scaled(unpack(state["A"], device), state["c"])
    return Shifted(unpack(state["A"], device), state["delta"]) if kind == "Shifted" else None


def _factor(state: Mapping[str, Any], device: torch.device) -> Factor:
    factor = unpack(state, device)
    if not isinstance(factor, Factor):
        raise TypeError(f"expected a factor of a Kronecker product, got {factor.label}")
    return factor


def copied(t: Tensor) -> Tensor:
    """A copy without graph, with the memory in the usual order."""
    return t.detach().clone(memory_format=torch.contiguous_format)
