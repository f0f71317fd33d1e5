"""The structure of the package: imports point down; modules are found by path."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import Counter
from pathlib import Path

from test.mutants import __main__ as mutants

PACKAGE = Path(__file__).parents[1] / "curvlinops_plus"

ROOMS = [
    ["contexts", "errors", "options", "progress", "random_state", "version"],
    ["linalg", "distributed"],
    ["estimate", "likelihood", "layer"],
    ["risk"],
    ["exact", "blocks"],
    ["classic", "optim", "applications", "integrations", "plots"],
]
FLOORS = {name: floor for floor, names in enumerate(ROOMS) for name in names}


def room(module: str) -> str | None:
    """First part of a module's name below the package: "risk" for curvlinops_plus.risk.record."""
    parts = module.split(".")
    return parts[1] if parts[0] == "curvlinops_plus" and len(parts) > 1 else None


def imports(path: Path, package: Path = PACKAGE) -> list[str]:
    """Every module of the package that a file imports: also delayed imports, and those for type
    checkers.
    """
    here = ["curvlinops_plus", *path.relative_to(package).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            found.append(".".join([*base, node.module] if node.module else base))
    return [name for name in found if name.split(".")[0] == "curvlinops_plus"]


def files(package: Path = PACKAGE) -> list[Path]:
    return sorted(p for p in package.rglob("*.py") if p != package / "__init__.py")


def offences(path: Path, imported: list[str], package: Path = PACKAGE) -> list[str]:
    """Imports of a higher floor, or of another room on the same floor."""
    mine = path.relative_to(package).parts[0].removesuffix(".py")
    bad = []
    for name in imported:
        theirs = room(name)
        if theirs is None:
            bad.append(f"{path} imports the top of the package: {name}")
        elif theirs != mine and FLOORS[theirs] >= FLOORS[mine]:
            bad.append(f"{path} (floor {FLOORS[mine]}) imports {name} (floor {FLOORS[theirs]})")
    return bad


def module_name(path: Path, package: Path = PACKAGE) -> str:
    return ".".join(["curvlinops_plus", *path.relative_to(package).with_suffix("").parts])


def test_imports_point_down() -> None:
    """So `exact` and `blocks` don't import each other, and only floor 5 could import `classic` (and
    doesn't).
    """
    assert [offence for path in files() for offence in offences(path, imports(path))] == []


def test_every_room_has_a_floor() -> None:
    rooms = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in files()}
    assert rooms <= FLOORS.keys()


def test_every_module_is_found_by_its_path() -> None:
    """No function or class of a package hides a submodule of the same name."""
    for path in files():
        name = module_name(path).removesuffix(".__init__")
        module = importlib.import_module(name)
        found: dict[str, object] = {}
        exec(f"import {name} as x", found)
        assert found["x"] is module is sys.modules[name]


def test_no_file_name_occurs_twice() -> None:
    count = Counter(p.name for p in files() if p.name != "__init__.py")
    assert [name for name, times in count.items() if times > 1] == []


def test_files_named_in_contributing_exist() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert len(named) > 20
    assert [
        name for name in named if not any((at / name).exists() for at in (PACKAGE, PACKAGE.parent))
    ] == []


def test_mutants_have_a_place() -> None:
    """Each mistake that the tests have to detect can be made in exactly one place."""
    for mutant in (mutant for room in mutants.ROOMS for mutant in mutants.read(room)):
        mutant.apply((PACKAGE / mutant.file).read_text(encoding="utf-8"))  # says so otherwise
