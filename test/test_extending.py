"""The code of pages of docs/ runs, block after block, and prints what the page says."""

from __future__ import annotations

import doctest
import re
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from curvlinops_plus import CurvatureWarning
from curvlinops_plus.layer import RULES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    before = dict(RULES)
    with torch.random.fork_rng():
        yield
    RULES.clear()
    RULES.update(before)


def blocks(page: str = PAGE) -> list[tuple[str, str]]:
    """Each block of code with what it prints."""
    found = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", page, flags=re.DOTALL)
    assert len(found) == page.count("```python"), "every block of code ends in a line of its own"
    return found


def run(page: str = PAGE) -> None:
    namespace: dict[str, object] = {"__name__": "extending"}
    for number, (code, expected) in enumerate(blocks(page)):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, f"block {number}", "exec"), namespace)
        same = doctest.OutputChecker().check_output(expected, printed.getvalue(), doctest.ELLIPSIS)
        assert same, f"block {number} printed\n{printed.getvalue()}\ninstead of\n{expected}"


def test_the_page_runs() -> None:
    assert len(blocks()) >= 5
    assert sum(bool(expected) for _, expected in blocks()) >= 2
    run()


@pytest.mark.parametrize("name", ["attribution", "index", "layers", "pruning"])
def test_other_pages_run(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert blocks(page)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)  # of layers without Kronecker factors
        run(page)


def test_a_page_that_says_something_else_fails() -> None:
    with pytest.raises(AssertionError, match="block 0 printed"):
        run("```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match="block 0 printed"):
        run("```python\nprint(1 + 1)\n```\n")
