"""Timing in turns: contestants run A B C A B C …, and every figure is a ratio of medians of one
such run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Task = Callable[[], object]
Clock = Callable[[Task], float]


def cpu_time(task: Task) -> float:
    """Seconds that all threads of this process worked: other processes on the machine hardly change
    it.
    """
    start = time.process_time()
    task()
    return time.process_time() - start


def wall_time(task: Task) -> float:
    """Seconds on the clock."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def event_time(task: Task) -> float:
    """Seconds between two events of the GPU, which was idle before and is idle after."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    task()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


CLOCKS: dict[str, Clock] = {"cpu": cpu_time, "wall": wall_time, "events": event_time}


def interleaved(
    contestants: Mapping[str, Task], repeats: int, clock: Clock = wall_time, warm_up: bool = True
) -> dict[str, float]:
    """Median time of each, taken in turns, after one turn that does not count unless all are warm
    already.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-warm_up, repeats):
        for name, task in contestants.items():
            seconds = clock(task)
            if turn >= 0:
                times[name].append(seconds)
    return {name: statistics.median(t) for name, t in times.items()}


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def figure(number: float | None) -> str:
    """Three digits, a dash for none."""
    return "–" if number is None else f"{number:.3g}"


def ratio(one: float | None, other: float | None) -> str:
    """Two decimals, a dash where one of them is missing."""
    return "–" if one is None or not other else f"{one / other:.2f}"
