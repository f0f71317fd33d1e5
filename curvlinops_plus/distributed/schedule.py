"""Which process does which job."""

from __future__ import annotations

from collections.abc import Sequence


def schedule(costs: Sequence[float], workers: int) -> list[int]:
    """The worker of each job: the longest job first, to the worker with the least work so far.

    Deterministic: of equal jobs the first one comes first, of equal workers the first one is taken.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the shortest time.

    Example:
        >>> schedule([1.0, 8.0, 3.0, 4.0], 2)
        [1, 0, 1, 1]
    """
    load, owners = [0.0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        owners[job] = min(range(workers), key=lambda worker: (load[worker], worker))
        load[owners[job]] += costs[job]
    return owners
