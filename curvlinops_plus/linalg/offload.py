"""Blocks whose tensors live elsewhere, in the memory of the CPU or in files, and are fetched when they are used."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.linalg.damping import Damping
from curvlinops_plus.linalg.deferred import Deferred
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.packing import pack, unpack
from curvlinops_plus.linalg.structure import Structure
from curvlinops_plus.linalg.structured import Dense


class Stored:
    """A tensor that was put elsewhere.

    Args:
        device: The device on which it is kept; None for a file.
        folder: Where the file is made. It is removed together with this object.
        dtype: What the columns of an orthogonal matrix are rounded to; None for any other tensor.
    """

    def __init__(self, t: Tensor, device: torch.device | None, folder: Path | None, dtype: torch.dtype | None) -> None:
        self.shape, self.dtype = t.shape, t.dtype
        self._rounded = dtype is not None and dtype != t.dtype
        self._path: str | None = None
        self._kept: Tensor | None = None
        self._fetched: tuple[weakref.ref[Tensor], int] | None = None  # the last one, and its version
        t = t.detach().to(dtype)
        self._kept_in = t.dtype
        if folder is None:
            kept = t.to(device)
            self._kept = kept.pin_memory() if t.is_cuda and kept.device.type == "cpu" else kept
            return
        with NamedTemporaryFile(dir=folder, suffix=".tensor", delete=False) as file:
            self._path = file.name
            weakref.finalize(self, _remove, file.name)
            file.write(t.cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def fetch(self, device: torch.device) -> Tensor:
        """The tensor, where it is used. What is there already is not copied, also if another block has fetched it."""
        t = None if self._fetched is None else self._fetched[0]()
        if self._fetched is None or t is None or t.device != device or _version(t) != self._fetched[1]:
            t = self._read(device)
            self._fetched = weakref.ref(t), _version(t)
        return t

    def _read(self, device: torch.device) -> Tensor:
        t = self._kept
        if t is None:
            # Mapped anew each time: pages that were read leave the memory together with this tensor.
            size = self.shape.numel()
            t = torch.empty(0, dtype=self._kept_in)
            t = torch.from_file(str(self._path), shared=False, size=size, dtype=self._kept_in) if size else t
            t = t.view(self.shape)
        t = t.to(device, self.dtype, non_blocking=device.type == "cuda" and t.is_pinned())
        # Rounding changes the lengths of columns; with those of length one, traces stay sums of eigenvalues.
        return t / torch.linalg.vector_norm(t, dim=-2, keepdim=True) if self._rounded else t

    def soon(self) -> None:
        """Let the system read the file meanwhile."""
        if self._path is not None and hasattr(os, "posix_fadvise"):
            number = os.open(self._path, os.O_RDONLY)
            try:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(number)


class Store:
    """Where tensors are put; arguments and errors are those of `offloaded`."""

    def __init__(self, where: str | torch.device | None, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"Expected a dtype in floating point for eigenvectors, got {dtype!r}.")
        self.dtype = dtype
        self.folder: Path | None = None
        self.device: torch.device | None = None
        if isinstance(where, str) and where.startswith("disk:"):
            self.folder = _folder(where)
        elif where is not None:
            try:
                self.device = torch.device(where)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f'Expected "cpu", another device, or "disk:folder" as the place of blocks, got {where!r}.'
                ) from error
        # Tensors that are here already, by their identity.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Stored]] = {}

    def __deepcopy__(self, memo: Any) -> Store:
        return self

    def put(self, t: Tensor, dtype: torch.dtype | None = None) -> Stored:
        """Keep a tensor here; one that several blocks share is kept once."""
        ref, version, stored = self._known.get(id(t), (None, None, None))
        if stored is None or ref is None or ref() is not t or version != _version(t):
            stored = Stored(t, None if self.folder else self.device or t.device, self.folder, dtype)
            self._remember(t, stored)
        return stored

    def fetch(self, stored: Stored, device: torch.device) -> Tensor:
        """A tensor, which is not put here once more with another block that it becomes part of."""
        t = stored.fetch(device)
        self._remember(t, stored)
        return t

    def _remember(self, t: Tensor, stored: Stored) -> None:
        key, known = id(t), self._known
        known[key] = weakref.ref(t, lambda _: known.pop(key, None)), _version(t), stored

    def offload(self, block: LinearOperator) -> LinearOperator:
        """The block with its tensors here; itself if they are."""
        block = resident(block)
        here = self.folder is None and self.device in (None, block.device)
        if here and (self.dtype in (None, block.dtype) or not isinstance(block, Eigendecomposed)):
            return block
        return Offloaded(block, self)


class Offloaded(Deferred):
    """A block whose tensors are kept elsewhere; they are fetched whenever it is used, and not kept.

    Inverses and powers are kept where the block is, and share with it what both have, such as eigenvectors.
    Decompositions are not remembered.

    Raises:
        ValueError: If it is of a kind whose tensors are not known.

    Example:
        >>> from curvlinops_plus.linalg import Kronecker
        >>> block = Offloaded(Kronecker(torch.eye(2), 2 * torch.eye(3)), Store("cpu"))
        >>> block.inverse(2.0).trace
        tensor(1.5000)
    """

    def __init__(self, block: LinearOperator, store: Store) -> None:
        super().__init__(block.in_space, block.dtype, block.device, block.structure, out_space=block.out_space)
        self.store = store
        rounded: set[int] = set()
        if store.dtype is not None and isinstance(block, Eigendecomposed):
            rounded = {id(factor.matrix) for factor in _dense_factors(block.basis)}
        self._state = pack(block, lambda t: store.put(t, store.dtype if id(t) in rounded else None))

    @property
    def operator(self) -> LinearOperator:
        """The block, fetched."""
        return self.ahead()()

    def ahead(self) -> Callable[[], LinearOperator]:
        """Begin to fetch the block; the function that is returned waits for it."""
        if self.device.type != "cuda":
            for stored in tree_leaves(self._state):
                if isinstance(stored, Stored):
                    stored.soon()
            return self._fetched
        stream, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            operator = self._fetched()
        done = stream.record_event()

        def wait() -> LinearOperator:
            current.wait_event(done)
            # Their memory belongs to the other stream: it must not be used again before this one is done.
            pack(operator, lambda t: t.record_stream(current))
            return operator

        return wait

    def _fetched(self) -> LinearOperator:
        return unpack(self._state, self.device, lambda stored: self.store.fetch(stored, self.device))

    def inverse(self, damping: Damping = 0.0, *, retry_double_precision: bool = True) -> LinearOperator:
        return self._here(self.operator.inverse(damping, retry_double_precision=retry_double_precision))

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> LinearOperator:
        return self._here(self.operator.power(p, damping, exact=exact))

    def _here(self, result: LinearOperator) -> LinearOperator:
        try:
            return Offloaded(result, self.store)
        except ValueError:  # it is known by its products
            return result

    # Multiples and shifts are made of this operator, not of what it fetches.
    shift = LinearOperator.shift
    _shift = LinearOperator._shift
    _scale = LinearOperator._scale

    def adjoint(self) -> LinearOperator:
        return self if self.structure >= Structure.SYMMETRIC else Offloaded(self.operator.adjoint(), self.store)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> LinearOperator:
        return Offloaded(self.operator.to(device, dtype), self.store)

    def __reduce__(self) -> Any:  # copies and pickles have the tensors themselves
        return resident, (self.operator,)


def resident(block: LinearOperator) -> LinearOperator:
    """A block with its tensors at hand: one that is offloaded is fetched."""
    return block.operator if isinstance(block, Offloaded) else block


def in_turn(blocks: Mapping[str, LinearOperator]) -> Iterable[tuple[str, LinearOperator]]:
    """Names and blocks with their tensors at hand; those of the next block are on their way meanwhile."""
    for block in blocks.values():
        if isinstance(block, Offloaded):
            return _in_turn(blocks)
    return blocks.items()


def _in_turn(blocks: Mapping[str, LinearOperator]) -> Iterator[tuple[str, LinearOperator]]:
    begin = [block.ahead if isinstance(block, Offloaded) else None for block in blocks.values()]
    coming = begin[0] and begin[0]()
    for (name, block), following in zip(blocks.items(), [*begin[1:], None], strict=True):
        here = coming() if coming else block
        coming = following and following()
        yield name, here
        del here


def _dense_factors(basis: Any) -> Iterator[Dense]:
    """The matrices of an eigenbasis."""
    if isinstance(basis, Kronecker):
        yield from _dense_factors(basis.G)
        yield from _dense_factors(basis.A)
    elif isinstance(basis, Dense):
        yield basis


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _folder(where: str) -> Path:
    name = where.removeprefix("disk:")
    if not name:
        raise ValueError('"disk:" names no folder for blocks; expected "disk:folder".')
    folder = Path(name).expanduser()
    folder.mkdir(exist_ok=True)
    return folder


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version
