"""Structured operators as tensors and plain Python, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.arithmetic import Scaled, Sum
from curvlinops_plus.linalg.dense import Dense, Diagonal, IdentityLinearOperator, IdentityMultiple
from curvlinops_plus.linalg.fields import FLOATS, Fields, reading, require_finite_entries
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


def unpack(
    state: Any,
    device: torch.device,
    title: str = "The state of a block",
    dtype: torch.dtype | None = None,
) -> LinearOperator:
    """The operator that `pack` described, on `device`.

    Args:
        state: What `pack` returned.
        device: Where its tensors shall be.
        title: What messages call it.
        dtype: Of all its tensors; default: that of the first one.

    Raises:
        ValueError: If the state is not one of `pack`: if a part is missing or of another kind, has
            entries that are NaN or infinite or another dtype than the rest, or contradicts what
            the state says of it (symmetric, positive semi-definite).
    """
    with reading(title):
        operator = _unpacked(Fields(state, title), device)
    require_sound(operator, title, dtype)
    return operator


def _unpacked(fields: Fields, device: torch.device) -> Any:
    name = fields.word("type", (*_SAVED, _IDENTITY))
    if name == _IDENTITY:
        dtype = FLOATS[fields.word("dtype", FLOATS)]
        identity = IdentityLinearOperator([(fields.count("size"),)], device, dtype)
        return identity._scale(fields.number("c"))
    kind = _SAVED[name]
    parts: list[Any] = []
    for key in kind._made_of:
        if key == "rtol" and key not in fields.data:
            parts.append(None)
        elif key in ("rtol", "c", "delta"):
            number = fields[key]  # or one for each matrix of a batch
            if isinstance(number, Tensor):
                parts.append(copied(number).to(device))
            else:
                parts.append(fields.number(key))
        elif key in ("matrix", "vector", "values"):
            if not isinstance(fields[key], Tensor):
                raise fields.error(repr(key), fields[key], "a tensor")
            parts.append(copied(fields[key]).to(device))
        elif key == "structure":
            parts.append(Structure[fields.word(key, Structure.__members__)])
        else:
            parts.append(_unpacked(fields.part(key), device))
    return kind(*parts)


def require_sound(operator: LinearOperator, title: str, dtype: torch.dtype | None = None) -> None:
    """Refuse an operator that is not what it says of itself, as far as this is cheap: dtype, no NaN
    or infinite entries, symmetry, and no negative diagonal of a positive semi-definite matrix.

    Args:
        operator: Made of `pack`'s classes; of others nothing is looked at.
        title: What messages call it.
        dtype: Of all its tensors; default: that of the operator.

    Raises:
        ValueError: Naming the part.
    """
    dtype = dtype or operator.dtype
    if not dtype.is_floating_point or operator.dtype != dtype:
        raise ValueError(f"{title} is of {operator.dtype}; expected {dtype}. Is the file damaged?")
    if isinstance(operator, (Dense, Eigendecomposed)):
        require_structure(operator, title)
    if isinstance(operator, IdentityMultiple):
        require_finite_entries(torch.as_tensor(operator.c), title)
    if _SAVED.get(type(operator).__name__) is not type(operator):
        return
    for key in operator._made_of:
        part = getattr(operator, key)
        if isinstance(part, LinearOperator):
            require_sound(part, f"{title}, {key!r}", dtype)
        elif isinstance(part, Tensor):
            require_finite_entries(part, f"{title}, {key!r}")


def require_dim(block: LinearOperator, dim: int, title: str) -> None:
    """Refuse a block of another size than its parameters have."""
    if block.shape != (dim, dim):
        raise ValueError(
            f"{title} is a {block.shape[0]} x {block.shape[1]} matrix; expected {dim} x {dim} for "
            "its parameters. Is the file damaged?"
        )


def require_structure(operator: Dense | Eigendecomposed, title: str) -> None:
    """Refuse a matrix that is not symmetric, or whose diagonal or eigenvalues are negative, and
    that says otherwise.
    """
    if operator.structure == Structure.GENERAL:
        return
    entries = operator.matrix if isinstance(operator, Dense) else operator.values
    if not entries.numel():
        return
    # Inverses and powers round, relative to their largest entry.
    rounding = torch.finfo(entries.dtype).eps ** 0.5 * entries.abs().max()
    diagonal = entries
    if isinstance(operator, Dense):
        diagonal = entries.diagonal(dim1=-2, dim2=-1)
        if bool(((entries - entries.mT).abs() > rounding).any()):
            raise ValueError(
                f"{title} is not symmetric, though it is {operator.structure.name}. Is the file "
                "damaged?"
            )
    if operator.structure == Structure.PSD and bool((diagonal < -rounding).any()):
        raise ValueError(
            f"{title} has the negative entry or eigenvalue {float(diagonal.min()):.3g}, though it "
            "is PSD. Is the file damaged?"
        )


def copied(t: Tensor) -> Tensor:
    """A copy without graph, with the memory in the usual order."""
    return t.detach().clone(memory_format=torch.contiguous_format)
