"""Several processes that work on one thing, and one process that works alone, with the same verbs.

Each process runs the same program on its own part of the data. All have to call the verbs that
communicate, in the same order. Each begins with a flag by which all learn whether one of them has
failed, so that none waits for it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.distributed.share import share
from curvlinops_plus.errors import ProcessError

T = TypeVar("T")

_LARGE = 2**24  # bytes of a tensor that is sent by itself, without a copy of it


class Alone:
    """One process, which has all data: each verb of `Processes`, at no cost.

    Attributes:
        rank: 0.
        world: 1.

    Example:
        >>> alone = Alone()
        >>> alone.together(lambda: 1 + 1), alone.gather(5), alone.numbers(10, 2)
        (2, [5], range(10, 12))
    """

    rank = 0
    world = 1

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work()`, which may use the other verbs, if it fails in no process.
        Collective.

        Raises:
            ProcessError: In all processes, if it fails in one of them.
        """
        return work()

    def gather(self, part: T) -> list[T]:
        """What each process has, in the order of their ranks: small objects without tensors of a
        GPU. Collective.
        """
        return [part]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Write the sums over all processes into tensors of the same shapes and dtypes in all.
        Collective.
        """

    def spread(
        self,
        costs: Sequence[float],
        compute: Callable[[list[int]], Iterable[Sequence[Tensor]]],
        like: Callable[[int], Sequence[Tensor]],
    ) -> list[Sequence[Tensor]]:
        """Results of jobs, each done by one process and sent to all: the longest first, to the
        process with the least work. Collective.

        Args:
            costs: One number per job.
            compute: Called with the numbers of some jobs; returns the results of each.
            like: Called with the number of a job; returns tensors of the shapes and dtypes of its
                results.
        """
        return list(compute(list(range(len(costs)))))

    def same(self, facts: Mapping[str, Any]) -> None:
        """Refuse processes that differ in what has to be the same. Collective.

        Args:
            facts: Name to what is compared: lists of numbers up to rounding, everything else as it
                is printed.

        Raises:
            ProcessError: In all processes, naming the first fact that differs.
        """

    def numbers(self, first: int, count: int) -> Sequence[int]:
        """The numbers in the whole data set of `count` examples, the first of which is number
        `first` of this part.
        """
        # Examples were dealt out in turns: those of this process are `world` apart.
        start = self.rank + self.world * first
        return range(start, start + self.world * count, self.world)

    def share(self, data: Any) -> Any:
        """The part of the data that belongs to this process: each example is in exactly one part.

        Args:
            data: A list of batches `(X, y)`, or of mappings of tensors, whose examples are dealt
                out: of all examples in their order those of number `rank`, `rank + world`, and so
                on. Items of other sequences are dealt out. A `Dataset` becomes a `Subset`. A
                `DataLoader` in order, or with `shuffle=True`, becomes one over a subset of its data
                set, with batches of the same size.

        Returns:
            The same kind of thing; of a list with copies of its tensors' own part, in batches of
            about the same sizes. Parts may differ in size by an example, and be empty.

        Raises:
            ValueError: If a loader has a sampler of its own, such as `DistributedSampler`, which
                repeats examples to make parts even so that they count twice, or leaves out a last
                batch.
            TypeError: If it can't be dealt out, as an iterator.
        """
        return data if self.world == 1 else share(data, self.rank, self.world)


class Processes(Alone):
    """The processes of a group, such as `torchrun` starts, each with its part of the data.

    An argument of `EmpiricalRisk`, whose data are then the part of this process: all results are
    those of the whole data, and equal in all processes.

    Args:
        group: The group of `torch.distributed`; default: the one of all processes.

    Attributes:
        rank: The number of this process.
        world: How many there are.

    Raises:
        ValueError: If `torch.distributed` is not initialised, or this process is not in the group.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> processes = Processes()
        >>> processes.rank, processes.world, processes.numbers(10, 2)
        (0, 1, range(10, 12))
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "Processes() needs torch.distributed: start the program by torchrun, and call "
                "torch.distributed.init_process_group() first."
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.world = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("This process is not in the group that was given to Processes.")
        self._inside = False  # whether something is done together
        self._device = torch.device("cpu")
        if "nccl" in dist.get_backend(self.group):
            self._device = torch.device("cuda", torch.cuda.current_device())

    def __deepcopy__(self, memo: Any) -> Processes:
        return self  # a group can't be copied

    def __repr__(self) -> str:
        return f"Processes, {self.rank} of {self.world}"

    def together(self, work: Callable[[], T]) -> T:
        if self._inside:  # the call around this one raises for all
            return work()
        self._inside = True
        try:
            result = work()
        except ProcessError:  # all know
            raise
        except BaseException as error:  # also Ctrl-C, which would leave the others waiting
            self._agree("ends what is done together", error)
            raise
        finally:
            self._inside = False
        self._agree("ends what is done together")
        return result

    def _agree(self, step: str, error: BaseException | None = None) -> None:
        """Raise the first error of any process in all, or that they are at different steps.
        Collective.

        Every verb begins with this, so that no tensor is sent to a process that expects another
        one, or another verb: libraries of communication end the program there, or hang.

        Args:
            step: What comes next, in words that are the same in all processes; where it was called
                is added.
            error: Why this process can't go on. What is no `Exception`, such as an interrupt, is
                raised in the others only.
        """
        step = f"{step} in {_place()}"
        number = crc32(step.encode())
        agreed = torch.tensor([error is not None, number, -number], device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, self.group)
        failed, largest, smallest = agreed.tolist()
        if not failed and largest == -smallest:
            return
        # Only after a failure are texts sent, which is slow.
        text = None
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            text = f"{type(error).__name__}: {error}\n\nIts traceback:\n{trace}"
        reports = self._gather((text, step))
        for rank, (message, _) in enumerate(reports):
            if message is not None:
                if error is not None and not isinstance(error, Exception):
                    return
                raise ProcessError(
                    f"Process {rank} of {self.world} failed, and all have stopped, unchanged. "
                    f"{message}"
                ) from error
        _, first = reports[0]
        for rank, (_, other) in enumerate(reports):
            if other != first:
                raise ProcessError(
                    f"The processes are at different steps: process 0 {first}, process {rank} "
                    f"{other}. All have to call the same functions in the same order, with the "
                    "same model and options."
                )

    def _gather(self, part: Any) -> list[Any]:
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, part, self.group)
        return parts

    def gather(self, part: T) -> list[T]:
        self._agree("gathers")
        return self._gather(part)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._agree(f"adds up {_kinds(tensors)}")
        self._send(tensors, partial(dist.all_reduce, group=self.group))

    def spread(
        self,
        costs: Sequence[float],
        compute: Callable[[list[int]], Iterable[Sequence[Tensor]]],
        like: Callable[[int], Sequence[Tensor]],
    ) -> list[Sequence[Tensor]]:
        # Who does what follows from the costs alone: all processes know it without talking.
        jobs_of: list[list[int]] = [[] for _ in range(self.world)]
        for job, owner in enumerate(schedule(costs, self.world)):
            jobs_of[owner].append(job)
        results: list[Any] = []
        for job in range(len(costs)):
            results.append(
                [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like(job)]
            )
        jobs = jobs_of[self.rank]
        for job, computed in zip(jobs, compute(jobs), strict=True):
            for result, t in zip(results[job], computed, strict=True):
                result.copy_(t)
        self._agree(f"sends {_kinds([t for tensors in results for t in tensors])}")
        # Each process sends the results of its jobs to all others.
        for rank, jobs in enumerate(jobs_of):
            source = dist.get_global_rank(self.group, rank)
            tensors = [t for job in jobs for t in results[job]]
            self._send(tensors, partial(dist.broadcast, src=source, group=self.group))
        return results

    def _send(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any]) -> None:
        """Run a collective in place, on large tensors one by one and on the others in one flat
        tensor per dtype.
        """
        with GradMode(False):
            small: dict[torch.dtype, list[Tensor]] = {}
            for t in tensors:
                if t.nbytes >= _LARGE and t.is_contiguous() and t.device == self._device:
                    collective(t.detach())
                else:
                    small.setdefault(t.dtype, []).append(t)
            for parts in small.values():
                flat = torch.cat([t.reshape(-1) for t in parts]).to(self._device)
                collective(flat)
                for t, piece in zip(parts, flat.split([t.numel() for t in parts]), strict=True):
                    t.copy_(piece.view(t.shape))

    def same(self, facts: Mapping[str, Any]) -> None:
        comparable = {}
        for name, fact in facts.items():
            # Addresses differ from process to process.
            text = re.sub(" at 0x[0-9a-f]+", "", repr(fact))
            comparable[name] = fact if isinstance(fact, list) else text
        facts_of = self.gather(comparable)
        for rank, theirs in enumerate(facts_of):
            for name in facts_of[0] | theirs:
                expected = facts_of[0].get(name)
                fact = theirs.get(name)
                if fact != expected and not _within_rounding(fact, expected):
                    raise ProcessError(
                        f"The processes differ in {name}: {expected} in process 0, and {fact} in "
                        f"process {rank}. Everything but the data has to be the same in all."
                    )


def schedule(costs: Sequence[float], workers: int) -> list[int]:
    """The worker of each job: the longest job first, to the worker with the least work so far.

    Deterministic: of equal jobs the first one comes first, of equal workers the first one is taken.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the shortest
    time.

    Example:
        >>> schedule([1.0, 8.0, 3.0, 4.0], 2)
        [1, 0, 1, 1]
    """
    load = [0.0] * workers
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        owners[job] = min(range(workers), key=load.__getitem__)
        load[owners[job]] += costs[job]
    return owners


def _place() -> str:
    """The line that called a verb of this file."""
    frame: Any = sys._getframe()
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    folder, _, file = frame.f_code.co_filename.rpartition("/")
    return f"{frame.f_code.co_name} ({folder.rpartition('/')[2]}/{file}:{frame.f_lineno})"


def _kinds(tensors: Sequence[Tensor]) -> str:
    """Dtypes and shapes in words."""
    kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors]
    return ", ".join(kinds) or "nothing"


def _within_rounding(numbers: Any, expected: Any) -> bool:
    lists = isinstance(numbers, list) and isinstance(expected, list)
    if not lists or len(numbers) != len(expected):
        return False
    tolerance = 1e-6 * max(map(abs, expected))
    return all(abs(a - b) <= tolerance for a, b in zip(numbers, expected))
