"""A test with `processes` runs in each of several processes, which are started once for all of
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from test.distributed.together import World

SLOW = [pytest.param(world, marks=pytest.mark.slow) for world in (3, 8)]
WORLDS = {
    2: (2, ()),
    3: (8, (3,)),
    8: (8, (3,)),
}  # how many are started, and groups of the first ones


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """A number of processes to those that run its tests; others are started where a test has
    failed.
    """
    open_worlds: dict[Any, World] = {}

    def world(number: int) -> World:
        key = WORLDS[number]
        if key in open_worlds and not all(
            process.is_alive() for process in open_worlds[key].processes
        ):
            open_worlds.pop(key).close()
        if key not in open_worlds:
            open_worlds[key] = World(*key)
        return open_worlds[key]

    yield world
    for each in open_worlds.values():
        each.close()


@pytest.fixture(params=[2, *SLOW])
def processes(request: pytest.FixtureRequest, worlds: Callable[[int], World]) -> tuple[int, World]:
    """How many run the test, and those that do."""
    return request.param, worlds(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in its processes; here, too, its argument is called `processes`."""
    names = list(inspect.signature(pyfuncitem.obj).parameters)
    if "processes" not in names:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in names}
    number, world = given.pop("processes")
    found = world.run(pyfuncitem.path, pyfuncitem.originalname, given, number)
    errors = {rank: error for rank, error in found.items() if error is not None}
    if errors:
        world.close()
        pytest.fail(
            "\n".join(f"Process {rank}: {error}" for rank, error in sorted(errors.items())),
            pytrace=False,
        )
    return True
