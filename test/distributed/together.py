"""Processes that run tests together, and what these tests compare with."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvlinops_plus import CurvatureWarning, Processes
from test.mutants import reach
from test.nets import tanh_net

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------------------------- processes
class World:
    """Processes that run tests together, until one of these fails.

    Args:
        number: How many.
        groups: Numbers of processes of which tests are run by the first ones.
        timeout: Of waiting for each other, in seconds.
    """

    def __init__(self, number: int, groups: Sequence[int] = (), timeout: float = 60.0) -> None:
        # Imports take seconds; a server that has made them forks the processes. It reads its path
        # from the environment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["test.distributed.together", "test.cases"])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(ROOT)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(number):
            mine, theirs = context.Pipe()
            given = (rank, number, port, groups, theirs, timeout)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}

    def run(
        self, path: Path, test: str, options: dict[str, Any], world: int | None = None
    ) -> dict[int, str | None]:
        """Run a test in the first `world` processes.

        Returns:
            Rank to the words of an error or None, as far as processes have answered when one has
            failed.
        """
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world])}
        for pipe in waiting:
            pipe.send((path, test, options, world, sys.gettrace() is not None))
        found: dict[int, str | None] = {}
        while waiting and (
            ready := multiprocessing.connection.wait(waiting, 3.0 if any(found.values()) else 100.0)
        ):
            for pipe in ready:
                assert isinstance(pipe, multiprocessing.connection.Connection)
                try:
                    found[waiting[pipe]], names = pipe.recv()
                    reach.elsewhere |= names
                except EOFError:
                    found[waiting[pipe]] = "ended"
                del waiting[pipe]
        return found | dict.fromkeys(waiting.values(), "no answer")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(
    rank: int, number: int, port: int, worlds: Sequence[int], pipe: Any, timeout: float
) -> None:
    """Join the group and run tests until the end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CurvatureWarning)
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", wait, number, rank)
    groups = {world: dist.new_group(range(world), timeout=wait) for world in worlds}
    while True:
        try:
            path, test, options, world, records = pipe.recv()
        except EOFError:
            return
        error, names = None, set[str]()
        with reach.recording(names) if records else nullcontext():
            try:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                run = getattr(importlib.import_module(name), test)
                run(Processes(groups.get(world, dist.group.WORLD)), **options)
            except Exception as caught:
                error = "".join(traceback.format_exception(caught))
        pipe.send((error, names))


# -------------------------------------------------------------------------------------- comparisons
def away(found: Any, expected: Any) -> float:
    """Relative difference, also of trees."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        found, expected = (
            torch.cat([t.flatten() for t in each.values()]) for each in (found, expected)
        )
    found, expected = (torch.as_tensor(t).detach().double() for t in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).norm() / max(float(expected.norm()), 1e-12))


def close(found: Any, expected: Any, what: object = "") -> None:
    """Refuse what differs by more than rounding."""
    error = away(found, expected)
    assert error < 1e-10, f"{what}: relative difference {error:.1e}"


def by_one(processes: Processes, work: Callable[[], Any]) -> Any:
    """What the first process computes by itself, told to all."""
    found = [work() if processes.rank == 0 else None]
    dist.broadcast_object_list(found, 0, processes.group)
    return found[0]


def everywhere(processes: Processes, what: Any) -> list[Any]:
    """What each process has found."""
    return processes.gather(what)


def said(work: Callable[[], object]) -> str:
    """A number, or the error."""
    try:
        return f"{float(torch.as_tensor(work()).norm()):.12e}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def require(pairs: Mapping[str, tuple[str, str]]) -> None:
    """Words that were found, and patterns that they contain."""
    for name, (found, pattern) in pairs.items():
        assert re.search(pattern, found, re.DOTALL), f"{name}: {found}\nhas not {pattern}"


def flat(model: nn.Module) -> Tensor:
    """All parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def small() -> nn.Sequential:
    """A network of 43 parameters, the same in all processes."""
    torch.manual_seed(0)
    return tanh_net(4, 5, 3).double()


def shifted(batches: list[Any]) -> list[Any]:
    """Batches of other sizes, with the same examples in the same order."""
    X, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(zip(X.split(4), y.split(4), strict=True))
