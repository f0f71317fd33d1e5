"""A plugin of pytest that records which functions of the package each test calls, and how long the
test takes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

PACKAGE = "curvlinops_plus/"


def function(code: CodeType) -> str | None:
    """`room/file.py:qualified.name` of a function of the package, where a closure is part of what
    defines it.
    """
    _, found, path = code.co_filename.rpartition(PACKAGE)
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 tells no more
    return f"{path}:{name.split('.<locals>')[0]}" if found else None


#: What other processes of the test that runs have called.
elsewhere: set[str] = set()


@contextmanager
def recording(names: set[str]) -> Iterator[None]:
    """Add the functions of the package that are called inside."""
    codes: set[CodeType] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        codes.add(frame.f_code)

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        names |= {name for name in map(function, codes) if name}


class Reach:
    """The recording of a run, written to a JSON file when it ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tests: dict[str, tuple[float, list[str]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test with its fixtures."""
        names, start = set[str](), time.perf_counter()
        try:
            with recording(names):
                return (yield)
        finally:
            self.tests[item.nodeid] = time.perf_counter() - start, sorted(names | elsewhere)
            elsewhere.clear()

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded, with numbers for names."""
        names = {
            name: k
            for k, name in enumerate(
                sorted({name for _, own in self.tests.values() for name in own})
            )
        }
        tests = {
            test: (seconds, [names[name] for name in own])
            for test, (seconds, own) in self.tests.items()
        }
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump({"functions": list(names), "tests": tests}, file)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file to write."""
    parser.addoption(
        "--reach", help="write which functions of the package each test calls to this JSON file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record if the option is given."""
    if path := config.getoption("--reach"):
        config.pluginmanager.register(Reach(path))
