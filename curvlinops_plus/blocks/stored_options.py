"""Options of approximations and vectors as data: `{"kind": name of the class, "options": {name: value}}`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator, Approximation
from curvlinops_plus.blocks.ekfac import EKFAC
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.nearest import NearestKronecker
from curvlinops_plus.blocks.per_example import DiagonalBlock, FullBlock, ScaledIdentity
from curvlinops_plus.blocks.tnt import TNT
from curvlinops_plus.linalg.packing import copied
from curvlinops_plus.risk import CurvaturePropagation, Empirical, Exact, ForwardOnly, MonteCarlo, Vectors

APPROXIMATIONS: tuple[type[Accumulator], ...] = (
    KFAC,
    EKFAC,
    TNT,
    NearestKronecker,
    DiagonalBlock,
    FullBlock,
    ScaledIdentity,
)
VECTORS: tuple[type[Vectors], ...] = (Exact, CurvaturePropagation, MonteCarlo, Empirical, ForwardOnly)


def as_data(given: Approximation | Vectors) -> dict[str, Any]:
    """`{"kind": name of the class, "options": {name: value}}`, in tensors and plain Python.

    Example:
        >>> as_data(KFAC.using(kfac_approx="reduce"))
        {'kind': 'KFAC', 'options': {'kfac_approx': 'reduce'}}
        >>> as_data(MonteCarlo(3, seed=1))
        {'kind': 'MonteCarlo', 'options': {'samples': 3, 'seed': 1}}
    """
    if isinstance(given, Approximation):
        kind, options = given.kind, given.options
    elif is_dataclass(given):  # fields that are not shown don't change the numbers
        kind, options = type(given), {field.name: getattr(given, field.name) for field in fields(given) if field.repr}
    else:
        kind, options = type(given), vars(given)
    return {"kind": kind.__name__, "options": {name: plain(option) for name, option in options.items()}}


def plain(option: Any) -> Any:
    """An option as a tensor or plain Python; `{"repr": text}` for what can be compared and not made again."""
    if isinstance(option, Enum):
        return plain(option.value)
    if option is None or isinstance(option, (bool, str)):
        return str(option) if isinstance(option, str) else option
    if isinstance(option, (Integral, Real)):
        return int(option) if isinstance(option, Integral) else float(option)
    if isinstance(option, Tensor):
        return copied(option)
    if isinstance(option, (list, tuple)):
        return [plain(item) for item in option]
    if isinstance(option, Mapping):
        return {str(key): plain(item) for key, item in option.items()}
    return {"repr": repr(option)}


def same_data(one: Any, other: Any) -> bool:
    """Whether two options, or nested dicts of them, are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.cpu().double(), other.cpu().double(), rtol=1e-6)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_data(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_data, one, other))
    return type(one) is type(other) and one == other


def rebuild_approximations(state: Mapping[str, Any], own: Iterable[type[Accumulator]]) -> dict[str, Approximation]:
    """Layer name to approximation.

    Raises:
        ValueError: If a class is none of the package's and not among `own`, or an option was not plain data.
    """
    kinds = {kind.__name__: kind for kind in (*APPROXIMATIONS, *own)}
    found: dict[str, Approximation] = {}
    for name, layer in state["layers"].items():
        kind, options = layer["approximation"]["kind"], layer["approximation"]["options"]
        if kind not in kinds:
            raise ValueError(
                f"The approximation {kind} of layer {name!r} is not part of curvlinops_plus. Pass its class: "
                f"from_state_dict(..., approximations=[{kind}])."
            )
        _require_plain(options, f"the approximation {kind} of layer {name!r}")
        found[name] = Approximation(kinds[kind], options)
    return found


def rebuild_vectors(data: Mapping[str, Any], own: Sequence[type[Vectors]] = ()) -> Vectors:
    """The vectors that `as_data` described.

    Raises:
        ValueError: If their class is none of the package's and not among `own`, or an option was not plain data.
    """
    kinds = {kind.__name__: kind for kind in (*VECTORS, *own)}
    kind, options = data["kind"], data["options"]
    if kind not in kinds:
        raise ValueError(
            f"The vectors {kind} are not part of curvlinops_plus. Pass them: from_state_dict(..., vectors={kind}(...))."
        )
    _require_plain(options, f"the vectors {kind}")
    return kinds[kind](**options)


def _require_plain(options: Mapping[str, Any], whose: str) -> None:
    for name, option in options.items():
        if isinstance(option, Mapping) and option.keys() == {"repr"}:
            raise ValueError(
                f"The option {name}={option['repr']} of {whose} is neither a tensor nor plain Python, so the state "
                "does not hold it. Make the operator with this option, and call load_state_dict."
            )
