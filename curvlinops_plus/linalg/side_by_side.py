"""Independent computations on the CPU's threads, each on its own ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_MUCH = 1e7  # operations, a few milliseconds; below, starting threads costs more than they gain


def side_by_side(function: Callable[[T], R], items: Iterable[T], work: Callable[[T], float]) -> list[R]:
    """`function` of each item, in their order, computed at the same time where PyTorch has several threads.

    An eigendecomposition hardly gains from a second thread, two of them gain a factor of two. Threads are shared out,
    so that none is used twice: a result does not depend on which others are computed beside it. Gradients and inference
    mode are on or off as for the caller.

    Args:
        function: Must not change what others read.
        work: About how many operations it takes, 0 if none of them are on the CPU. The longest come first.

    Raises:
        Exception: That of the first item that has one.

    Example:
        >>> side_by_side(abs, [-1, 2], lambda item: 1.0)
        [1, 2]
    """
    items = list(items)
    available = torch.get_num_threads()
    costs = [work(item) for item in items] if available > 1 else []
    threads = min(available, sum(cost > 0 for cost in costs))
    if threads < 2 or sum(costs) - max(costs) < _MUCH:
        return [function(item) for item in items]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(item: T) -> R:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(item)

    each = available // threads
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(each,)) as pool:
            longest_first = sorted(range(len(items)), key=lambda k: -costs[k])
            futures = {k: pool.submit(run, items[k]) for k in longest_first}
            return [futures[k].result() for k in range(len(items))]
    finally:
        torch.set_num_threads(available)  # new threads would begin with the number of the last one that was set
