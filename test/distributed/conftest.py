"""Worker processes that run the functions of `jobs.py`, started once for all tests of this folder."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# `jobs` is found here by the tests and by workers, which begin with the same path.
sys.path.insert(0, str(HERE))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Workers:
    """Processes of one default group, and of groups of the first few of them.

    Args:
        number: How many.
        timeout: Of the group, in seconds.
    """

    def __init__(self, number: int, timeout: float = 60.0) -> None:
        # Imports take seconds; a server that has made them forks the workers. It reads its path from the environment.
        from jobs import serve

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["jobs"])
        before, port = os.environ.get("PYTHONPATH"), free_port()
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
        self.pipes, self.processes = [], []
        for rank in range(number):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, number, port, theirs, timeout), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}

    def start(self, world: int, job: str, *args: Any) -> None:
        """Let the first `world` processes begin a job."""
        for pipe in self.pipes[:world]:
            pipe.send((job, world, args))

    def answers(self, world: int, seconds: float = 50.0) -> list[Any]:
        """What they return, or the words of their errors."""
        found = []
        for rank, pipe in enumerate(self.pipes[:world]):
            if not pipe.poll(seconds):
                raise TimeoutError(f"Worker {rank} does not answer.")
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append("ended")
        return found

    def run(self, world: int, job: str, *args: Any) -> list[Any]:
        """Results of a job by the first `world` processes, in the order of ranks.

        Raises:
            RuntimeError: If one of them fails.
        """
        self.start(world, job, *args)
        found = self.answers(world)
        failed = [answer for answer in found if isinstance(answer, str)]
        if failed:
            raise RuntimeError(failed[0])
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    pool = Workers(8)
    yield pool
    pool.close()


@pytest.fixture
def three() -> Iterator[Workers]:
    """Workers of a test that ends some of them."""
    pool = Workers(3, timeout=20.0)
    yield pool
    pool.close()
