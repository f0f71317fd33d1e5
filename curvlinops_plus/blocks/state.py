"""States: what operators and estimators are, in tensors and plain Python, and what can be made of
it again.

A state is `{"version", "plan", "options", "scale", "fingerprint"}`, and "blocks" of an operator or
"sums" of an estimator. The plan says what the numbers are of, and is compared with that of whoever
loads them; what was found out about functions that read parameters belongs to it. Classes are
stored as `{"kind": name, "options": {...}}`.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from io import BytesIO
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.accumulator import Approximation
from curvlinops_plus.blocks.ekfac import EKFAC
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.per_example import (
    TNT,
    DiagonalBlock,
    FullBlock,
    NearestKronecker,
    ScaledIdentity,
)
from curvlinops_plus.blocks.plan import Plan
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.linalg import OwnedBlockDiagonal, Structure
from curvlinops_plus.linalg.packing import FORMAT, copied, unpack
from curvlinops_plus.options import type_error
from curvlinops_plus.risk import (
    CurvaturePropagation,
    Empirical,
    Exact,
    ForwardOnly,
    MonteCarlo,
    Vectors,
)
from curvlinops_plus.risk.function_reads import describe_reads, rebuild_reads
from curvlinops_plus.risk.parameters import changed_parameters, fingerprint, modules_of

VERSION = 1
APPROXIMATIONS = (KFAC, EKFAC, TNT, NearestKronecker, DiagonalBlock, FullBlock, ScaledIdentity)
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


def from_data(
    data: Mapping[str, Any], known: Iterable[type], argument: str
) -> tuple[type, dict[str, Any]]:
    """The class and the options that `as_data` described.

    Raises:
        ValueError: If the class is not among the known ones, or an option was not plain data.
    """
    kinds = {kind.__name__: kind for kind in known}
    kind = data["kind"]
    options = data["options"]
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


def params_of(state: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor] | None:
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
    names = ("num_data", "num_per_example_loss_terms", "progressbar")
    return {
        "version": VERSION,
        "plan": plan_as_data(K, K.plan),
        "options": {name: getattr(K.risk.options, name) for name in names},
        "scale": K.scale,
        "fingerprint": dict(K.parameters),
        "examples": K.examples,
    }


def checked(state: Any) -> Mapping[str, Any]:
    """A state, if it is one.

    Raises:
        ValueError: If it is foreign, cut off, or of another version.
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
    if missing := {"options", "scale", "fingerprint", "examples"} - state.keys():
        raise ValueError(f"The state lacks {sorted(missing)}; is the file cut off?")
    return state


def take_state(K: Any, state: Any) -> None:
    """What `load_state_dict` of an operator does."""
    state = checked(state)
    data = state["plan"]
    plan = K.plan.of_risk(copy.copy(K.risk))  # the caller's stays as it is
    # To have looked and found nothing is not the same as not to have looked.
    if difference(data["reads"], describe_reads(plan.risk.reads)):
        plan.risk.reads = rebuild_reads(plan.risk, data["reads"])
        plan = plan.renewed()
    mine = plan_as_data(K, plan)
    if K.adopts_vectors and data["vectors"]["kind"] == mine["vectors"]["kind"]:
        mine["vectors"] = data["vectors"]
        plan.vectors = vectors_of(data["vectors"], [type(K.vectors)])
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
    if "blocks" in state:
        if missing := [name for name in plan.kept_blocks if name not in state["blocks"]]:
            raise ValueError(f"The state lacks the blocks {missing}; is the file cut off?")
        blocks = {name: unpack(state["blocks"][name], K.device) for name in plan.kept_blocks}
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


def vectors_of(data: Mapping[str, Any], own: Iterable[type[Vectors]] = ()) -> Vectors:
    """What `as_data` described, of this package or of one's own."""
    kind, options = from_data(data, [*VECTORS, *own], f"vectors={data['kind']}(...)")
    return kind(**options)


# -------------------------------------------------------------------------------------------- files
def save(state: Any, path: str | PathLike[str]) -> None:
    """Write a `state_dict` as one safetensors file; `load` reads it.

    Tensors are stored under their keys joined by "/", everything else as JSON in the file's
    metadata. A file that is there is replaced when the new one is complete.

    Of an operator whose blocks several processes keep apart (`curvature(..., owned=True)`) all
    processes have to call it. Process 0 writes the file, for which all get all blocks; `Checkpoint`
    saves them apart.

    Args:
        state: What `state_dict()` returned, or an operator or estimator that has one.
        path: The file.

    Raises:
        TypeError: If it is neither: most operators are known by their products alone.
        ProcessError: In all processes that write together, if one of them fails.
        ImportError: If the package safetensors is missing (`pip install safetensors`).

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"factors": {"fc": torch.eye(2)}, "seed": 0}, f"{folder}/K.safetensors")
        ...     load(f"{folder}/K.safetensors")["seed"]
        0
    """
    from safetensors.torch import save_file

    if not isinstance(state, Mapping) and not hasattr(state, "state_dict"):
        raise TypeError(
            "save takes a state_dict, or what has one such as the operators of `curvature`, and "
            f"then a path; a {type(state).__name__} has none."
        )
    thing: Any = state
    processes: Any = Alone()
    if isinstance(thing, OwnedBlockDiagonal) or getattr(thing, "owned", False):
        processes = getattr(thing, "risk", thing).processes

    def write() -> None:
        tensors: dict[str, Tensor] = {}
        content = state if isinstance(state, Mapping) else state.state_dict()
        tree = json.dumps(_detach(content, "", tensors))
        if processes.rank == 0:
            # An operator that was loaded from this path goes on with the old file: its tensors are
            # mapped from it.
            unfinished = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
            try:
                save_file(tensors, unfinished, metadata={"format": FORMAT, "state": tree})
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    processes.together(write)


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a `state_dict` that `save` wrote; tensors are on the CPU, and mapped from the file.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is not one of ours.
        safetensors.SafetensorError: If it is cut off, or no safetensors file.
        FileNotFoundError: If there is none.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"values": {0: torch.ones(2)}}, f"{folder}/K.safetensors")
        ...     load(f"{folder}/K.safetensors")
        {'values': {0: tensor([1., 1.])}}
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{path} is a safetensors file, but not one that curvlinops_plus wrote."
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    return _attach(json.loads(metadata["state"]), tensors)


def _detach(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors by references and keys that JSON can't carry by lists of pairs."""
    if isinstance(node, Tensor):
        tensors[path] = copied(node)
        return {"$tensor": path}
    if isinstance(node, Mapping):
        pairs: list[list[Any]] = []
        for key, item in node.items():
            name = str(key).replace("%", "%25").replace("/", "%2F")
            pairs.append([key, _detach(item, f"{path}/{name}".lstrip("/"), tensors)])
        return {"$dict": pairs}
    if isinstance(node, (list, tuple)):
        items = [_detach(value, f"{path}/{index}", tensors) for index, value in enumerate(node)]
        return {"$tuple" if isinstance(node, tuple) else "$list": items}
    return node


def _attach(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$dict":
        return {key: _attach(value, tensors) for key, value in content}
    items = [_attach(value, tensors) for value in content]
    return tuple(items) if kind == "$tuple" else items


class Checkpoint:
    """Something with a state, as `torch.distributed.checkpoint` saves and loads it, on any number
    of processes.

    That module asks what is to be loaded for its own state first, and loads what it finds there. An
    estimator without any batch has no statistics to be found, so its whole state is one entry here.
    An operator of `curvature` has one for each block: processes that keep blocks apart
    (`owned=True`) save and load their own ones only.

    Args:
        thing: A `CurvatureEstimator`, an operator, a `KFACOptimizer`.

    Cost: the state in memory once more while it is saved or loaded. All processes have to save and
    load together.

    Example:
        >>> from curvlinops_plus import CurvatureEstimator, EmpiricalRisk
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), ())
        >>> one, two = CurvatureEstimator(risk), CurvatureEstimator(risk)
        >>> one.update((torch.rand(4, 3), torch.rand(4, 2)))
        >>> saved = Checkpoint(one).state_dict()  # as dcp.save and dcp.load do
        >>> Checkpoint(two).load_state_dict(saved)
        >>> two.updates
        1
    """

    def __init__(self, thing: Any) -> None:
        if not hasattr(thing, "state_dict"):
            raise type_error("thing", thing, "what has a state_dict and a load_state_dict")
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        """The state in bytes."""
        if hasattr(self.thing, "state_parts"):
            parts = self.thing.state_parts()
        else:
            parts = {"state": self.thing.state_dict()}
        as_bytes: dict[str, Any] = {}
        for name, part in parts.items():
            buffer = BytesIO()
            torch.save(part, buffer)
            as_bytes[name] = buffer.getvalue()
        return as_bytes

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: As for that which has it.
        """
        parts = {
            name: torch.load(BytesIO(part), weights_only=True) for name, part in state_dict.items()
        }
        state = parts.pop("state")
        if "blocks" in state:
            for part in parts.values():
                state["blocks"] |= part
        self.thing.load_state_dict(state)
