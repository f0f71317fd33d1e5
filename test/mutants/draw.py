"""Random mutants of a room, to choose from: `python -m test.mutants.draw ROOM COUNT [SEED]` prints them."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "curvlinops_plus"
SWAPS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "@": "*", "**": "*", "//": "*", "%": "//",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
    "in": "not in", "not in": "in", "and": "or", "or": "and",
}  # fmt: skip


def _between(line: str, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Where an operator stands between two operands, and what it becomes."""
    text = line[start:end]
    if (operator := text.strip(" ()")) in SWAPS:
        at = start + text.index(operator)
        yield at, at + len(operator), SWAPS[operator]


def changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Line, first and last column, and the text instead, of each mistake that a node invites."""
    if not isinstance(node, (ast.expr, ast.stmt)) or node.lineno != node.end_lineno:
        return
    row, column, last = node.lineno - 1, node.col_offset, node.end_col_offset or 0
    line = lines[row]
    if not line.isascii():  # columns of the syntax tree are bytes
        return
    pairs: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        pairs = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        pairs = [node.left, node.comparators[0]]
    elif isinstance(node, ast.BoolOp):
        pairs = node.values[:2]
    elif isinstance(node, ast.UnaryOp):
        yield row, column, node.operand.col_offset, ""
    elif isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        yield row, node.value.end_col_offset or 0, last, ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)) and not isinstance(node.value, str):
        yield row, column, last, str(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.AugAssign, ast.Expr)):
        yield row, column, last, "pass"
    elif isinstance(node, ast.IfExp):
        yield row, column, last, f"({line[node.body.col_offset : node.body.end_col_offset]})"
    for left, right in pairwise(pairs):
        yield from ((row, *found) for found in _between(line, left.end_col_offset or 0, right.col_offset))


def candidates(path: Path) -> Iterator[str]:
    """All mutants of a file, with as many lines before as make their place clear."""
    text = path.read_text(encoding="utf-8")
    lines, found = text.split("\n"), []
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):  # no annotations, defaults or docstrings
            left += node.body[1 if ast.get_docstring(node) is not None else 0 :]
        elif not isinstance(node, (ast.Raise, ast.JoinedStr, ast.arguments, ast.Import, ast.ImportFrom)):
            annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
            left += [child for child in ast.iter_child_nodes(node) if child is not annotation]
            found += changes(node, lines)
    for row, column, last, instead in found:
        first = row
        while f"\n{text}".count("\n" + "\n".join(lines[first : row + 1]) + "\n") > 1 and first:
            first -= 1
        if row - first > 3 or not all(lines[first:row]):
            continue
        before = [f" {line}" for line in lines[first:row]]
        changed = lines[row][:column] + instead + lines[row][last:]
        name = path.relative_to(PACKAGE).as_posix()
        yield "\n".join([name, *before, f"-{lines[row]}", f"+{changed}"])


if __name__ == "__main__":
    room, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0
    every = [mutant for path in sorted((PACKAGE / room).rglob("*.py")) for mutant in candidates(path)]
    print("\n\n".join(random.Random(seed).sample(every, min(count, len(every)))))
