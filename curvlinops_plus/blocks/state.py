"""States: what operators and estimators are, in tensors and plain Python, and what can be made of
it again.

A state is `{"version", "plan", "options", "scale", "fingerprint"}`, and "blocks" of an operator or
"sums" of an estimator. The plan says what the numbers are of, and is compared with that of whoever
loads them; what was found out about functions that read parameters belongs to it. Classes are
stored as `{"kind": name, "options": {...}}`. States have checksums (`linalg.checksums`), and so has
each block by itself, as blocks of several processes are stored apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.accumulator import Approximation
from curvlinops_plus.blocks.approximations import APPROXIMATIONS
from curvlinops_plus.blocks.plan import Plan
from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.linalg import Diagonal, LinearOperator, Structure
from curvlinops_plus.linalg.checksums import require_intact
from curvlinops_plus.linalg.dense import IdentityMultiple
from curvlinops_plus.linalg.fields import FLOATS, Fields, reading
from curvlinops_plus.linalg.packing import copied, require_dim, unpack
from curvlinops_plus.risk import (
    CurvaturePropagation,
    Empirical,
    Exact,
    ForwardOnly,
    MonteCarlo,
    Vectors,
)
from curvlinops_plus.risk.found_reads import describe_reads, rebuild_reads
from curvlinops_plus.risk.parameters import changed_parameters, fingerprint, modules_of

VERSION = 1
# Options of a risk that a state has.
_OPTIONS = ("num_data", "num_per_example_loss_terms", "progressbar")
VECTORS = (Exact, CurvaturePropagation, MonteCarlo, Empirical, ForwardOnly)


# -------------------------------------------------------------------------------------------- plans
def as_data(choice: Approximation | Vectors) -> dict[str, Any]:
    """`{"kind": name of the class, "options": {name: value}}`, in tensors and plain Python.

    Example:
        >>> as_data(KFAC.using(kfac_approx="reduce"))
        {'kind': 'KFAC', 'options': {'kfac_approx': 'reduce'}}
        >>> as_data(MonteCarlo(3, seed=1))
        {'kind': 'MonteCarlo', 'options': {'samples': 3, 'seed': 1}}
    """
    kind: type = type(choice)
    options: Mapping[str, Any]
    if isinstance(choice, Approximation):
        kind = choice.kind
        options = choice.options
    elif is_dataclass(choice):
        # Fields that are not shown don't change the numbers.
        names = [field.name for field in fields(choice) if field.repr]
        options = {name: getattr(choice, name) for name in names}
    else:
        options = vars(choice)
    return {"kind": kind.__name__, "options": plain(options)}


def plain(option: Any) -> Any:
    """An option as a tensor or plain Python; `{"repr": text}` for what can be compared and not made
    again.
    """
    if isinstance(option, Enum):
        return plain(option.value)
    if isinstance(option, Tensor):
        return copied(option)
    if isinstance(option, Mapping):
        return {str(key): plain(item) for key, item in option.items()}
    if isinstance(option, (list, tuple)):
        return [plain(item) for item in option]
    if option is None or isinstance(option, bool):
        return option
    # Numbers of NumPy, too.
    kinds: dict[type, Any] = {str: str, Integral: int, Real: float}
    for kind, plain_kind in kinds.items():
        if isinstance(option, kind):
            return plain_kind(option)
    return {"repr": repr(option)}


def from_data(data: Fields, known: Iterable[type], argument: str) -> tuple[type, dict[str, Any]]:
    """The class and the options that `as_data` described.

    Raises:
        ValueError: If the class is not among the known ones, or an option was not plain data.
    """
    kinds = {kind.__name__: kind for kind in known}
    kind = data.word("kind")
    options = data.part("options").data
    if kind not in kinds:
        raise ValueError(
            f"{kind} is not part of curvlinops_plus. Pass it: from_state_dict(..., {argument})."
        )
    for name, option in options.items():
        if isinstance(option, Mapping) and option.keys() == {"repr"}:
            raise ValueError(
                f"The option {name}={option['repr']} of {kind} is neither a tensor nor plain "
                "Python, so the state does not hold it. Make the operator with this option, and "
                "call load_state_dict."
            )
    return kinds[kind], dict(options)


def difference(a: Any, b: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Where two nested values differ first, and both parts; tensors up to the rounding of another
    dtype.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            inside = f"{where}, {key!r}" if where else str(key)
            if mismatch := difference(a.get(key), b.get(key), inside):
                return mismatch
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape
        same = same and torch.allclose(a.cpu().double(), b.cpu().double(), rtol=1e-6)
    elif isinstance(a, list) and isinstance(b, list):
        same = len(a) == len(b) and not any(map(difference, a, b))
    else:
        same = type(a) is type(b) and a == b
    return None if same else (where, a, b)


def plan_as_data(K: Any, plan: Plan) -> dict[str, Any]:
    """What the blocks of an operator with this plan are of."""
    return {
        "class": type(K).__name__,
        "loss": plan.risk.losses.options(),
        "vectors": as_data(plan.vectors),
        "separate_weight_and_bias": plan.separate_weight_and_bias,
        "dtype": str(K.dtype).removeprefix("torch."),
        "reads": describe_reads(plan.risk.reads),
        "layers": {
            entry.layer.name: {
                "parameters": {key: list(p.shape) for key, p in entry.layer.params.items()},
                "approximation": as_data(entry.approximation),
            }
            for entry in plan
        },
    }


def keys_of(plan: Mapping[str, Any]) -> set[str]:
    """The keys of all parameters of a plan."""
    return {key for layer in plan["layers"].values() for key in layer["parameters"]}


def params_of(state: Fields, model: nn.Module) -> dict[str, Tensor] | None:
    """The model's parameters that a state is of, in the order of its vectors; None if not all keys
    are the model's own names.
    """
    named = dict(modules_of(model)[""].named_parameters())
    keys = keys_of(state["plan"])
    if not keys <= named.keys():
        return None
    return {key: named[key] for key in state["fingerprint"] if key in keys}


# ---------------------------------------------------------------------------------------- operators
def description_of(K: Any) -> dict[str, Any]:
    """The state of an operator without its blocks."""
    return {
        "version": VERSION,
        "plan": plan_as_data(K, K.plan),
        "options": {name: plain(getattr(K.risk.options, name)) for name in _OPTIONS},
        "scale": K.scale,
        "fingerprint": dict(K.parameters),
        "examples": K.examples,
    }


def checked(state: Any, title: str = "The state") -> Fields:
    """The fields of a state, if it is one, and is what was saved.

    Raises:
        ValueError: If it is foreign, cut off, damaged, or of another version.
    """
    if not isinstance(state, Mapping) or "plan" not in state:
        raise ValueError(
            "This is not a state of `curvature` or of a CurvatureEstimator: expected what their "
            f"state_dict() returns, as load(path) reads it, got a {type(state).__name__}."
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"The state has version {state.get('version')}; this package reads version {VERSION}."
        )
    fields = Fields(state, title)
    fields.require({"options", "scale", "fingerprint", "examples"})
    with reading(title):
        require_intact(state, title)
    return _of_right_types(fields)


def _of_right_types(state: Fields) -> Fields:
    """Refuse a state with fields of other types than `description_of` makes.

    What the fields say is compared with whoever loads them, in `take_state`.
    """
    plan = state.part("plan")
    plan.word("class")
    plan.word("dtype", FLOATS)
    plan.flag("separate_weight_and_bias")
    plan.require({"loss", "reads"})
    plan.part("loss").word("loss")
    for kind in (plan.part("vectors"), *(x.part("approximation") for x in layers_in(plan))):
        kind.word("kind")
        kind.part("options")
    for layer in layers_in(plan):
        shapes = layer.part("parameters")
        for key in shapes.data:
            sizes = shapes.sequence(key)
            for axis in sizes.data:
                sizes.count(axis)
    options = state.part("options")
    for name in options.data:
        if name == "progressbar":
            options.flag(name)
        elif name not in _OPTIONS:
            raise options.error("an entry", name, f"one of {', '.join(_OPTIONS)}")
        elif options[name] is not None:
            options.count(name)
    state.number("scale")
    if state["examples"] is not None:
        state.count("examples")
    fingerprint_of = state.part("fingerprint")
    fingerprint_of.require(keys_of(plan.data))
    for key in fingerprint_of.data:
        numbers = fingerprint_of.sequence(key, 2).data.values()
        if not all(type(number) is float for number in numbers):
            raise fingerprint_of.error(repr(key), fingerprint_of[key], "two floats")
    return state


def layers_in(plan: Fields) -> list[Fields]:
    """The descriptions of a plan's layers."""
    return [layer for _, layer in plan.part("layers").parts()]


def take_state(K: Any, state: Fields) -> None:
    """What `load_state_dict` of an operator does with a checked state."""
    data = state["plan"]
    plan = K.plan.of_risk(copy.copy(K.risk))  # the caller's stays as it is
    # To have looked and found nothing is not the same as not to have looked.
    if difference(data["reads"], describe_reads(plan.risk.reads)):
        with reading(f"{state.title}, 'reads'"):
            plan.risk.reads = rebuild_reads(plan.risk.params, data["reads"])
        plan = plan.renewed()
    mine = plan_as_data(K, plan)
    if K._adopts_vectors and data["vectors"]["kind"] == mine["vectors"]["kind"]:
        mine["vectors"] = data["vectors"]
        plan.vectors = vectors_of(state.part("plan").part("vectors"), [type(K.vectors)])
    if keys_of(data) != keys_of(mine):
        more = sorted(keys_of(data) - keys_of(mine))
        fewer = sorted(keys_of(mine) - keys_of(data))
        raise ValueError(
            f"State mismatch in the parameters: only the state has {more[:5]}, only this operator "
            f"{fewer[:5]}. Both have to be of the same model and parameters: say params=, in "
            "EmpiricalRisk or from_state_dict, as a dict if the names were yours."
        )
    if mismatch := difference(data, mine):
        where, theirs, ours = mismatch
        raise ValueError(
            f"State mismatch in {where}: the state has {theirs!r}, this operator {ours!r}."
        )
    blocks = None
    if "blocks" in state.data:
        blocks = _unpacked_blocks(state, plan, K.device, K.dtype)
    rounding = 1e-5  # of another dtype
    if changed_parameters(state["fingerprint"], fingerprint(K.risk), rounding):
        warn(
            "The model's parameters differ from those that this state was computed at; its blocks "
            "describe the old ones.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )
    plan.risk.options = replace(K.risk.options, **state["options"])
    K.plan = plan
    K.risk = plan.risk
    K.vectors = plan.vectors
    if blocks is None:
        K._compute_later()
        return
    K._adopt(blocks, state["examples"], state["fingerprint"])
    K.scale = state["scale"]
    K.structure = Structure.PSD if K.scale >= 0 else Structure.SYMMETRIC


def _unpacked_blocks(
    state: Fields, plan: Plan, device: torch.device, dtype: torch.dtype
) -> dict[str, LinearOperator]:
    """The blocks that this process keeps, each of the size that the plan says."""
    packed = state.part("blocks")
    if missing := [name for name in plan.kept_blocks if name not in packed.data]:
        raise ValueError(f"The state lacks the blocks {missing}; is the file cut off?")
    layouts = {group.name: group.layout for group in plan.groups}
    ours = [entry for entry in plan if entry.approximation.kind in APPROXIMATIONS]
    never_negative = {group.name for entry in ours for group in entry.layer.groups}
    blocks: dict[str, LinearOperator] = {}
    for name in plan.kept_blocks:
        title = f"{state.title}, block {name!r}"
        blocks[name] = unpack(packed[name], device, title, dtype)
        require_dim(blocks[name], layouts[name].dim, title)
        # A diagonal does not say what it is; a matrix that was negated twice says less than it is.
        tells = isinstance(blocks[name], (Diagonal, IdentityMultiple)) and state["scale"] >= 0
        least = Structure.PSD if tells else Structure.SYMMETRIC
        if name in never_negative and blocks[name].structure < least:
            raise ValueError(f"{title} is not {least.name}, as it must be. Is the file damaged?")
    return blocks


def vectors_of(data: Fields, own: Iterable[type[Vectors]] = ()) -> Vectors:
    """What `as_data` described, of this package or of one's own."""
    kind, options = from_data(data, [*VECTORS, *own], f"vectors={data['kind']}(...)")
    with reading(data.title):
        return kind(**options)
