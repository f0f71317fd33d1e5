"""Errors and warnings tell people what to write: what they name can be imported from where they
say.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

import curvlinops_plus
from curvlinops_plus import (
    BlockwiseLinearOperator,
    CurvatureEstimator,
    EmpiricalRisk,
    KFACOptimizer,
)
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.kronecker import KroneckerSum
from curvlinops_plus.risk import AllRiskKeywords

PACKAGE = Path(curvlinops_plus.__file__).parent
#: Of other libraries, or made up for an example.
OTHERS = {"DataLoader", "StateDictOptions", "MyLayer", "MyLayerRule", "MyLoss"}


def sentences() -> Iterator[tuple[str, str]]:
    """Where, and texts of all errors and warnings."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_warning = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn"
            if is_warning or isinstance(node, ast.Raise):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield f"{path.relative_to(PACKAGE)}:{part.lineno}", part.value


def test_classes_in_messages_are_public() -> None:
    texts = list(sentences())
    assert len(texts) > 1000
    wrong = [
        (place, name)
        for place, text in texts
        for name in re.findall(r"(?<![\w.])([A-Z][a-z]+[A-Za-z]*)\(", text)
        if name not in OTHERS and not hasattr(curvlinops_plus, name)
    ]
    assert wrong == []


def test_full_names_in_messages_exist() -> None:
    names = {
        name
        for _, text in sentences()
        for name in re.findall(r"curvlinops_plus\.((?:\w+\.)*\w+)\(", text)
    }
    assert {"linalg.Dense", "from_scipy"} <= names
    for name in names:
        thing: object = curvlinops_plus
        for part in name.split("."):
            thing = getattr(thing, part)


# ------------------------------------------------------------------------------- names of arguments
#: Floors of the package from which arguments may be named: a room knows its own and those below.
ROOMS = (
    ("linalg", "distributed"),
    ("estimate", "likelihood", "layer"),
    ("risk",),
    ("exact", "blocks"),
    ("classic", "optim", "applications", "integrations", "plots"),
)
#: Of PyTorch and the like.
OF_OTHERS = {
    "assign",
    "batch_size",
    "create_graph",
    "decoder_input_ids",
    "drop_last",
    "full_state_dict",
    "gradient_checkpointing_kwargs",
    "label_smoothing_factor",
    "max_norm",
    "mode",
    "dropout",
    "optimizers",
    "shuffle",
    "track_running_stats",
    "use_cache",
    "use_reentrant",
}


#: What results print of themselves.
PRINTED = {"eigenvalues", "residuals", "sparse", "style"}


@cache
def messages() -> list[tuple[str, str]]:
    """Where, and texts of all strings but docstrings, with `{}` for what is filled in."""
    texts: list[tuple[str, str]] = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        parts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts |= {*map(id, node.values)}
                constants = [part for part in node.values if isinstance(part, ast.Constant)]
                text = "".join(
                    str(part.value) if part in constants else "{}" for part in node.values
                )
                texts.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", text))
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in parts:
                texts.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value))
    return texts


def arguments(thing: Any) -> set[str]:
    """Names that a function or class takes, and methods of the class."""
    things = [thing]
    if isinstance(thing, type):
        things += [value for kind in thing.__mro__ for value in vars(kind).values()]
    names: set[str] = set()
    for each in things:
        function = each.__func__ if isinstance(each, classmethod) else each
        if not callable(function):
            continue
        with suppress(ValueError, TypeError):
            parameters = inspect.signature(function).parameters
            names |= parameters.keys()
            if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                names |= AllRiskKeywords.__annotations__.keys()
    return names


def arguments_by_room() -> dict[str, set[str]]:
    """For each room the arguments of all that its public names and those of lower rooms take."""
    known: set[str] = set()
    by_room: dict[str, set[str]] = {}
    for floor in ROOMS:
        for room in floor:
            module = importlib.import_module(f"curvlinops_plus.{room}")
            for thing in vars(module).values():
                if getattr(thing, "__module__", "").startswith(f"curvlinops_plus.{room}"):
                    known |= arguments(thing)
        by_room |= {room: set(known) for room in floor}
    return by_room


def test_arguments_in_messages_are_of_what_the_message_says() -> None:
    """`Owner(..., name=)` is an argument of the owner. Without one, it is of something that the
    reader has called for sure: of this room or a lower one, or of another library.
    """
    by_room = arguments_by_room()
    wrong = []
    for place, text in messages():
        room = place.split("/")[0].removesuffix(".py")
        for match in re.finditer(r"(?<![\w.{])([a-z]\w*)=(?!=)", text):
            name = match[1]
            before = text[: match.start()]
            owner = re.search(r"(?<![\w.])(\w+)(?:\.\w+)?\((?:[^()]|\([^()]*\))*$", before)
            thing = getattr(curvlinops_plus, owner[1], None) if owner else None
            allowed = by_room.get(room, set.union(*by_room.values())) | OF_OTHERS | PRINTED
            if thing is not None:
                allowed = arguments(thing)
            elif before.endswith("operator's "):
                allowed = by_room["exact"]
            if name not in allowed:
                wrong.append((place, name, text))
    assert wrong == []


#: What letters and words stand for in messages.
STAND_FOR: dict[str, tuple[type, ...]] = {
    "A": (LinearOperator, KroneckerSum),
    "operator": (LinearOperator,),
    "risk": (EmpiricalRisk,),
    "train": (EmpiricalRisk,),
    "optimizer": (KFACOptimizer,),
    "estimator": (CurvatureEstimator,),
    "K": (BlockwiseLinearOperator,),
    "X": (Tensor,),
}


def test_methods_in_messages_exist() -> None:
    calls = {
        call
        for _, text in messages()
        for call in re.findall(r"(?<![\w.])(\w+)\.(\w+)\(", text)
        if call[0] in STAND_FOR or hasattr(curvlinops_plus, call[0])
    }
    assert {("A", "shift"), ("risk", "with_data"), ("optimizer", "listen")} <= calls
    for owner, method in calls:
        kinds = STAND_FOR.get(owner) or (getattr(curvlinops_plus, owner),)
        assert any(hasattr(kind, method) for kind in kinds), (owner, method)
