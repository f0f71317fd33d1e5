"""Errors and warnings tell people what to write: what they name can be imported from where they
say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import curvlinops_plus

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
