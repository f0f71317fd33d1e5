"""Several processes that work on one thing, and one process that works alone, with the same verbs.

Each process runs the same program on its own part of the data. Those verbs that communicate say so: all processes have
to call them in the same order. Each begins with an agreement, a reduction of four integers, by which all learn whether
one of them has failed or is somewhere else; so nobody waits for one that will not come.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from curvlinops_plus.distributed.buckets import Bucket, buckets
from curvlinops_plus.distributed.share import number_of_examples, share
from curvlinops_plus.errors import ProcessError, UnsupportedError

T = TypeVar("T")

_IN_FLIGHT = 2  # buckets


class Alone:
    """One process, which has all data: each verb of `Processes`, at no cost.

    Attributes:
        rank: 0.
        world: 1.

    Example:
        >>> alone = Alone()
        >>> alone.together("adding", lambda: 1 + 1), alone.gather("numbers", 5), alone.numbers(10, 2)
        (2, [5], range(10, 12))
    """

    rank = 0
    world = 1

    def together(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work()`, if it fails in no process. Collective.

        Args:
            what: Names the work in errors.
            work: May communicate by the other verbs.

        Raises:
            ProcessError: In all processes, if it fails in one of them.
        """
        return work()

    def gather(self, what: str, part: T) -> list[T]:
        """What each process has, in the order of their ranks: small objects without tensors of a GPU. Collective."""
        return [part]

    def every(self, what: str, holds: bool) -> bool:
        """Whether it holds in all processes. Collective."""
        return all(self.gather(what, holds))

    def sum_(
        self,
        what: str,
        tensors: Sequence[Tensor],
        symmetric: Sequence[bool] = (),
        owners: Sequence[int | None] | None = None,
    ) -> None:
        """Write the sums over all processes into tensors, which have the same shapes and dtypes in all. Collective.

        Args:
            what: Names it in errors.
            tensors: The tensors.
            symmetric: Which of them are symmetric matrices, of which one triangle is sent; none by default.
            owners: The rank that gets the sum of each, while tensors of other processes stay as they are; None for all
                of them, the default. Half of the bytes of a sum for all are sent then.
        """

    def hand_out(self, what: str, tensors: Sequence[Tensor], owners: Sequence[int], to: int | None = None) -> None:
        """Write the tensors of their owners into those of all processes. Collective.

        Args:
            what: Names it in errors.
            tensors: Of the same shapes and dtypes in all processes that get them.
            owners: The rank that has the numbers of each.
            to: The rank of the only process that gets them; default: all. Those of the others stay as they are, and
                may be of the meta device where a process neither has nor gets the numbers.
        """

    def same(
        self, what: str, describe: Callable[[], Mapping[str, Any]], advise: Callable[[str], str] = lambda name: ""
    ) -> None:
        """Refuse processes that differ in what has to be the same. Collective.

        Args:
            what: Names it in errors.
            describe: Name to what can be sent and compared. Plain numbers in floating point may differ by rounding.
            advise: What to do if that of a name differs.

        Raises:
            ProcessError: In all processes, saying what differs.
        """

    def numbers(self, first: int, count: int) -> Sequence[int]:
        """The numbers in the whole data set of `count` examples, the first of which is number `first` of this part."""
        return range(first, first + count)

    def numbering(self, data: Any) -> AbstractContextManager[Any]:
        """Context in which examples of this part of the data are numbered, whose sizes tell. Collective.

        Args:
            data: What will be read.
        """
        return nullcontext()

    def share(self, data: Any) -> Any:
        """The part of the data that belongs to this process, see `Processes.share`."""
        return data

    def require_alone(self, what: str, advice: str) -> None:
        """Refuse what several processes can't do together.

        Raises:
            UnsupportedError: If there are several.
        """


class Processes(Alone):
    """The processes of a group, such as `torchrun` starts, each with its part of the data.

    An argument of `EmpiricalRisk`, whose data are then the part of this process: all that is made of the risk is that
    of the whole data, and equal in all processes.

    Args:
        group: The group of `torch.distributed`; default: the one of all processes.
        shard: How data are dealt out, and examples numbered: "strided", every `world`-th one to each process, or
            "contiguous", a piece to each. Random numbers are those of one process then, if the parts are lists of
            batches, or loaders, whose sizes are known beforehand.
        bucket_bytes: Tensors are sent in pieces of at most about this many bytes, 64 MiB by default.

    Attributes:
        rank: The number of this process.
        world: How many there are.

    Raises:
        ValueError: If `torch.distributed` is not initialised, this process is not in the group, or `shard` is neither.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> processes = Processes()
        >>> processes.rank, processes.world, processes.numbers(10, 2)
        (0, 1, range(10, 12))
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, shard: str = "strided", bucket_bytes: int = 2**26
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "Processes() needs torch.distributed: start the program by torchrun, and call "
                "torch.distributed.init_process_group() first."
            )
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes!r} must be an integer of at least 1.")
        if shard not in ("strided", "contiguous"):
            raise ValueError(f"shard={shard!r} is unknown; expected 'strided' or 'contiguous'.")
        group = dist.group.WORLD if group is None else group
        assert group is not None  # it is initialised
        self.group = group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("This process is not in the group that was given to Processes.")
        self.shard, self.bucket_bytes = shard, bucket_bytes
        self._before: int | None = None  # how many examples the processes before have, as long as it is known
        self._inside = ""  # what is done together
        self._calls = 0  # how often something was done together: who has left a call half-way is in another one
        cuda = "nccl" in dist.get_backend(self.group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def __deepcopy__(self, memo: Any) -> Processes:
        return self  # a group can't be copied

    def __repr__(self) -> str:
        return f"Processes, {self.rank} of {self.world}"

    # ------------------------------------------------------------------------------------------------------- agreement
    def together(self, what: str, work: Callable[[], T]) -> T:
        if self._inside:  # whoever began raises for all
            return work()
        self._inside, self._calls = what, self._calls + 1
        try:
            try:
                result = work()
            except ProcessError:  # everybody knows
                raise
            except Exception as error:
                self._agree(what, error)
                raise
            self._agree(what)
            return result
        finally:
            self._inside = ""

    def _agree(self, what: str, error: Exception | None = None, size: int = 0) -> int:
        """Find out whether a process has failed, or is somewhere else.

        Returns:
            The largest `size` of all.

        Raises:
            ProcessError: In all processes.
        """
        self._calls += not self._inside
        what = what if what == self._inside or not self._inside else f"{self._inside}, {what}"
        code = crc32(f"{self._calls} {what}".encode())
        with _in_contact(self, what):
            flags = torch.tensor([error is not None, code, -code, size], device=self._device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
            failed, most, least, largest = flags.tolist()
            if not failed and most == -least:
                return largest
            told: list[Any] = [None] * self.world
            words = (
                None
                if error is None
                else (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
            )
            dist.all_gather_object(told, (what, self._calls, words), self.group)
        places, calls, errors = ([*column] for column in zip(*told, strict=True))
        self._calls = max(calls)  # all begin anew
        for rank, words in enumerate(errors):
            if words is not None:
                kind, message, trace = words
                raise ProcessError(
                    f"Process {rank} of {self.world} failed in {places[rank]}, and all have stopped there, unchanged. "
                    f"{kind}: {message}\n\nIts traceback:\n{trace}"
                ) from error
        raise ProcessError(
            f"The processes are in different places: {dict(enumerate(places))}, in collective calls number {calls}. "
            "All have to make the same collective calls in the same order; see the list in the documentation of "
            "several processes."
        )

    # ------------------------------------------------------------------------------------------------------------ verbs
    def gather(self, what: str, part: T) -> list[T]:
        own = pickle.dumps(part)  # the agreement tells how much room all need; behind its end nothing is read
        own = own.ljust(self._agree(what, size=len(own)))
        with _in_contact(self, what):
            sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self._device)
            found = [torch.empty_like(sent) for _ in range(self.world)]
            dist.all_gather(found, sent, self.group)
        return [pickle.loads(t.cpu().numpy().tobytes()) for t in found]

    def sum_(
        self,
        what: str,
        tensors: Sequence[Tensor],
        symmetric: Sequence[bool] = (),
        owners: Sequence[int | None] | None = None,
    ) -> None:
        self._agree(what)
        found = self._buckets_of(tensors, symmetric or [False] * len(tensors), owners or [None] * len(tensors))

        def start(flat: Tensor, owner: int | None) -> Any:
            if owner is None:
                return dist.all_reduce(flat, group=self.group, async_op=True)
            return dist.reduce(flat, self._global(owner), group=self.group, async_op=True)

        self._send(what, found, start, lambda owner: owner in (None, self.rank))

    def hand_out(self, what: str, tensors: Sequence[Tensor], owners: Sequence[int], to: int | None = None) -> None:
        self._agree(what)
        found = self._buckets_of(tensors, [False] * len(tensors), owners)
        if to is not None:  # only two processes have to do with each
            concerned = [(bucket, owner) for bucket, owner in found if self.rank in (owner, to) and owner != to]
            return self._send(what, concerned, partial(self._pass_on, to), lambda owner: self.rank == to)

        def start(flat: Tensor, owner: int | None) -> Any:
            assert owner is not None
            return dist.broadcast(flat, self._global(owner), group=self.group, async_op=True)

        self._send(what, found, start, lambda owner: True)

    def _pass_on(self, to: int, flat: Tensor, owner: int | None) -> Any:
        assert owner is not None
        if self.rank == to:
            return dist.irecv(flat, self._global(owner), self.group)
        return dist.isend(flat, self._global(to), self.group)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def _buckets_of(
        self, tensors: Sequence[Tensor], symmetric: Sequence[bool], owners: Sequence[int | None]
    ) -> list[tuple[Bucket, int | None]]:
        """Buckets of tensors with one owner each, in the same order in all processes."""
        found: list[tuple[Bucket, int | None]] = []
        for owner in (None, *range(self.world)):
            own = [k for k, one in enumerate(owners) if one == owner]
            parts = buckets([tensors[k] for k in own], [symmetric[k] for k in own], self.bucket_bytes)
            found += [(bucket, owner) for bucket in parts]
        return found

    def _send(
        self,
        what: str,
        found: Sequence[tuple[Bucket, int | None]],
        start: Callable[[Tensor, int | None], Any],
        receives: Callable[[int | None], bool],
    ) -> None:
        """Pack buckets, start their communication, and unpack what has come, a few of them at a time."""
        flying: list[tuple[Bucket, Tensor, bool, Any]] = []

        def land() -> None:
            bucket, flat, receive, handle = flying.pop(0)
            handle.wait()
            if receive:
                bucket.unpack_(flat)

        with _in_contact(self, what), torch.no_grad():
            for bucket, owner in found:
                if len(flying) == _IN_FLIGHT:
                    land()
                flat = bucket.pack().detach()
                flat = flat.to(self._device) if self._device.type == "cuda" else flat
                flying.append((bucket, flat, receives(owner), start(flat, owner)))
            while flying:
                land()

    def same(
        self, what: str, describe: Callable[[], Mapping[str, Any]], advise: Callable[[str], str] = lambda name: ""
    ) -> None:
        if self.world == 1:
            return
        facts = dict(describe())
        # Most of the time they agree, and a digest is all that has to be sent, whatever the depth of a model.
        if len({*self.gather(what, sha256(pickle.dumps(facts)).digest())}) == 1:
            return
        found = self.gather(what, facts)
        for name in dict.fromkeys(name for facts in found for name in facts):
            values = [facts.get(name) for facts in found]
            if other := next((rank for rank, value in enumerate(values) if not _equal(values[0], value)), None):
                title, here, there = _difference(name, values[0], values[other])
                raise ProcessError(
                    f"The processes differ in {what}: {title} is {here!r} in process 0, and {there!r} in "
                    f"process {other}. Everything but the data has to be the same in all.{advise(name)}"
                )

    def numbers(self, first: int, count: int) -> Sequence[int]:
        if self.shard == "contiguous":
            return (
                _Unknown(count) if self._before is None else range(self._before + first, self._before + first + count)
            )
        start = self.rank + self.world * first
        return range(start, start + self.world * count, self.world)

    @contextmanager
    def numbering(self, data: Any) -> Iterator[None]:
        if self.shard == "strided":
            yield
            return
        sizes = self.gather("numbering examples", number_of_examples(data))
        known = [size for size in sizes[: self.rank] if size is not None]
        try:
            self._before = sum(known) if len(known) == self.rank else None
            yield
        finally:
            self._before = None

    def share(self, data: Any) -> Any:
        """The part of the data that belongs to this process: each example is in exactly one part.

        Args:
            data: A list of batches `(X, y)`, or of mappings of tensors, whose examples are dealt out: of all examples
                in their order those of number `rank`, `rank + world`, and so on; or with `shard="contiguous"` the
                first ones to process 0, the next ones to process 1. Of other sequences the items are dealt out. Of a
                `Dataset` a `Subset`. A `DataLoader` in order, or with `shuffle=True`, becomes one over a subset of its
                data set, with batches of the same size.

        Returns:
            The same kind of thing; of a list with copies of its tensors' own part, in batches of about the same sizes.
            Parts may differ in size by an example, and be empty.

        Raises:
            ValueError: If a loader has a sampler of its own, such as `DistributedSampler`, which repeats examples to
                make parts even so that they count twice, or leaves out a last batch.
            TypeError: If it can't be dealt out, as an iterator.
        """
        return share(data, self.rank, self.world, self.shard == "contiguous")

    def require_alone(self, what: str, advice: str) -> None:
        if self.world > 1:
            raise UnsupportedError(f"{what} can't be computed by several processes together. {advice}")


class _Unknown(Sequence[int]):
    """Numbers of examples that nobody knows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedError(
            'Random numbers belong to examples, and with Processes(shard="contiguous") their numbers follow from the '
            "numbers of examples of the processes before, which are not known here: data are neither a list of "
            "batches nor a DataLoader over a sized data set, or come batch by batch. Use shard='strided'."
        )


@contextmanager
def _in_contact(processes: Processes, what: str) -> Iterator[None]:
    """Say in words that others are gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ProcessError):
            raise
        inside = processes._inside
        what = what if what == inside or not inside or what.startswith(f"{inside}, ") else f"{inside}, {what}"
        raise ProcessError(
            f"Process {processes.rank} of {processes.world} has lost contact with others in {what}: one of them has "
            f"ended, or did not come within the timeout of the group. {type(error).__name__}: {error}"
        ) from error


def _difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """The first parts of two plain values that differ, and where in them they are."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        pairs = [(f"{name}, {key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = [(name, a, b) for a, b in zip(one, other, strict=True)]
    found = next((pair for pair in pairs if not _equal(*pair[1:])), None)
    return (name, one, other) if found is None else _difference(*found)


def _equal(one: Any, other: Any) -> bool:
    """Whether two plain values are the same; numbers in floating point up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= 1e-9 * max(abs(one), abs(other)) or (one != one and other != other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)
