"""The house stands: a file imports only from its own floor or lower ones, and no circle of imports exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "curvlinops_plus"

FLOORS = {
    "errors": 0,
    "version": 0,
    "linalg": 1,
    "distributed": 1,
    "estimate": 2,
    "likelihood": 2,
    "layer": 2,
    "risk": 3,
    "exact": 4,
    "blocks": 4,
    "classic": 4,
    "optim": 5,
    "integrations": 5,
}
# Rooms of floor 2 know nothing of each other.
SEPARATE = {"estimate", "likelihood", "layer"}


def room(module: str) -> str | None:
    """First part of a module's name below the package: "risk" for curvlinops_plus.risk.record."""
    parts = module.split(".")
    return parts[1] if parts[0] == "curvlinops_plus" and len(parts) > 1 else None


def imports(path: Path, package: Path = PACKAGE) -> list[str]:
    """Every module of the package that a file imports, delayed imports included, imports for type checkers excluded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = []
    here = ["curvlinops_plus", *path.relative_to(package).parts[:-1]]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            found.append(".".join([*base, node.module] if node.module else base))
    return [name for name in found if name.split(".")[0] == "curvlinops_plus"]


def files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def offences(path: Path, imported: list[str], package: Path = PACKAGE) -> list[str]:
    mine = path.relative_to(package).parts[0].removesuffix(".py")
    bad = []
    for name in imported:
        theirs = room(name)
        if theirs is None:
            bad.append(f"{path} imports the top of the package: {name}")
        elif FLOORS[theirs] > FLOORS[mine] or (theirs != mine and {theirs, mine} <= SEPARATE):
            bad.append(f"{path} (floor {FLOORS[mine]}) imports {name} (floor {FLOORS[theirs]})")
    return bad


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    assert offences(path, imports(path)) == []


def test_every_room_has_a_floor() -> None:
    rooms = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in files()}
    assert rooms <= FLOORS.keys()


def test_no_circles() -> None:
    """Files and the packages they import form a graph without circles (an `__init__` re-exports its own room)."""
    graph: dict[str, set[str]] = {}
    names = {".".join(["curvlinops_plus", *p.relative_to(PACKAGE).with_suffix("").parts]): p for p in files()}
    for name, path in names.items():
        graph[name] = {i if i in names else f"{i}.__init__" for i in imports(path)} & names.keys()
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"circle: {' -> '.join((*trail, name))}"
        if name not in state:
            state[name] = 1
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            state[name] = 2

    for name in graph:
        visit(name, ())


def test_the_checker_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "curvlinops_plus"
    (package / "linalg").mkdir(parents=True)
    path = package / "linalg" / "bad.py"
    path.write_text("def f():\n    from curvlinops_plus.risk import EmpiricalRisk\n    import curvlinops_plus\n")
    found = imports(path, package)
    assert len(found) == 2
    assert len(offences(path, found, package)) == 2
