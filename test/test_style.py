"""Lines that read: what a stranger would have to read twice does not occur in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "curvlinops_plus"
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def defined_twice(texts: dict[str, str]) -> list[str]:
    """Names that two files define; `__all__` and type variables are no names of things."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, text in texts.items():
        for name in {*top_level_names(tree_of(text))} - {"__all__", "T"}:
            places[name].append(file)
    return [f"{name}: {files}" for name, files in sorted(places.items()) if len(files) > 1]


def nested_conditionals(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            parts = (node.body, node.orelse, node.test)
            if any(isinstance(part, ast.IfExp) for part in parts):
                yield node


def tuples_of_several_values(tree: ast.Module) -> Iterator[ast.AST]:
    """Assignments `a, b, c = x, y, z`; a swap and `a, b = b, a + b` have two values."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if isinstance(node.targets[0], ast.Tuple) and len(node.value.elts) > 2:
            yield node


def tuples_within_tuples(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements `for a, (b, (c, d)) in ...`; one level is that of `enumerate` and `zip`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            inner = [part for part in node.target.elts if isinstance(part, ast.Tuple)]
            if any(isinstance(part, ast.Tuple) for t in inner for part in t.elts):
                yield node


CHECKS = {
    "nested conditional expressions": nested_conditionals,
    "assignments of more than two values": tuples_of_several_values,
    "targets of loops with nested tuples": tuples_within_tuples,
}


def test_names_are_defined_once() -> None:
    assert defined_twice({file: path.read_text() for file, path in FILES.items()}) == []


@pytest.mark.parametrize("name", CHECKS)
def test_lines_read(name: str) -> None:
    places = []
    for file, path in FILES.items():
        places += [f"{file}:{node.lineno}" for node in CHECKS[name](tree_of(path.read_text()))]  # type: ignore[attr-defined]
    assert places == []


def test_what_does_not_read_is_noticed() -> None:
    assert defined_twice({"a.py": "def f(): ...", "b.py": "f: int = 1"}) == ["f: ['a.py', 'b.py']"]
    samples = {
        "nested conditional expressions": "x = a if b else c if d else e",
        "assignments of more than two values": "a, b, c = 1, 2, 3",
        "targets of loops with nested tuples": "for a, (b, (c, d)) in e: pass",
    }
    for name, line in samples.items():
        assert len(list(CHECKS[name](tree_of(line)))) == 1
    for line in ("a, b = b, a", "a, b, c = f()", "for k, (a, b) in enumerate(c): pass"):
        assert not any(list(check(tree_of(line))) for check in CHECKS.values())


def test_tests_are_found_by_name() -> None:
    """`blocks/kfac.py` is tested in files `test/blocks/test_kfac*.py`; what a room refuses stands
    in its `test_refusals.py`, what holds for all of it in `test_laws.py`.
    """
    strays = []
    for folder in {path.parent for path in FILES.values()} - {PACKAGE}:
        stems = [path.stem for path in folder.glob("*.py")] + ["refusals", "laws"]
        tests = PACKAGE.parent / "test" / folder.relative_to(PACKAGE)
        for test in sorted(tests.glob("test_*.py")):
            if not test.stem.startswith(tuple(f"test_{stem}" for stem in stems)):
                strays.append(str(test.relative_to(tests.parent)))
    assert strays == []
