"""States in files: a file is replaced when the new one is complete, and read whole or refused.

A file has the format of safetensors: the size of the header in 8 bytes; the header, in JSON, with
dtype, shape and place of each tensor; the tensors. What is no tensor stands as JSON in the header's
metadata, with the checksums of it and of each tensor. Reading and writing take one descriptor, so
that nothing of two files is ever mixed.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from math import prod
from os import PathLike
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import torch
from torch import Tensor

from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import OwnedBlockDiagonal
from curvlinops_plus.linalg.checksums import bytes_of, checksum_of, detached
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.linalg.packing import FORMAT
from curvlinops_plus.options import type_error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Names of dtypes in the header.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def save(state: Any, path: str | PathLike[str]) -> None:
    """Write a `state_dict` as one safetensors file; `load` reads it.

    Tensors are stored under their keys joined by "/", everything else as JSON in the file's
    metadata, with checksums. A file that is there is replaced when the new one is complete and on
    the disk, whatever happens before; it keeps its mode, and links to it stay links. Several
    threads and processes may save to one path: the last one counts.

    Until then the new file has a name that begins with ".unfinished-", beside the old one. What a
    process leaves of it that was killed is removed by the next `save` to the same path.

    Of an operator whose blocks several processes keep apart (`curvature(..., owned=True)`) all
    processes have to call it. Process 0 writes the file, for which all get all blocks; `Checkpoint`
    saves them apart.

    Args:
        state: What `state_dict()` returned, or an operator or estimator that has one.
        path: The file.

    Raises:
        TypeError: If it is neither: most operators are known by their products alone.
        ValueError: If something is at the path that is no regular file.
        OSError: If it can't be written; a file that was there is as it was.
        ProcessError: In all processes that write together, if one of them fails.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"factors": {"fc": torch.eye(2)}, "seed": 0}, f"{folder}/K.safetensors")
        ...     load(f"{folder}/K.safetensors")["seed"]
        0
    """
    if not isinstance(state, Mapping) and not hasattr(state, "state_dict"):
        raise TypeError(
            "save takes a state_dict, or what has one such as the operators of `curvature`, and "
            f"then a path; a {type(state).__name__} has none."
        )
    thing: Any = state
    processes: Any = Alone()
    if isinstance(thing, OwnedBlockDiagonal) or getattr(thing, "owned", False):
        processes = getattr(thing, "risk", thing).processes

    def write() -> None:
        if processes.rank == 0:
            _require_regular(path)
        content = state if isinstance(state, Mapping) else state.state_dict()
        if processes.rank == 0:
            tensors: dict[str, Tensor] = {}
            tree = json.dumps(detached(content, "", tensors))
            header, tensors = _header_of(tree, tensors)
            # An operator that was loaded from this path goes on with the old file: its tensors are
            # mapped from it.
            with _replacing(path) as file:
                file.write(header)
                for t in tensors.values():
                    file.write(bytes_of(t))

    processes.together(write)


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a `state_dict` that `save` wrote; tensors are on the CPU, and mapped from the file.

    The file is read once, to compare its checksums. It may be replaced by another one meanwhile, or
    later. Files of before that have no checksums are read as they are.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is damaged or cut off, naming a tensor where only this is wrong; or
            is not one of ours.
        FileNotFoundError: If there is none.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"values": {0: torch.ones(2)}}, f"{folder}/K.safetensors")
        ...     load(f"{folder}/K.safetensors")
        {'values': {0: tensor([1., 1.])}}
    """
    os.stat(path)  # it is there
    _require_regular(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{path} is cut off: it has {size} bytes.")
        # Pages are read at first use, and copied when somebody writes to a tensor.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    begin = 8 + int.from_bytes(content[:8], "little")
    if begin > size:
        raise ValueError(f"{path} is cut off, damaged, or no safetensors file.")
    with reading(str(path)):
        header = _parsed(content[8:begin], path)
        metadata = header.pop("__metadata__", {})
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{path} is a safetensors file, but not one that curvlinops_plus wrote."
            )
        return _content_of(Fields(header, str(path)), metadata, memoryview(content)[begin:])


# ---------------------------------------------------------------------------------- what a file has
def _header_of(tree: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, Tensor]]:
    """The header with the size before it, and the tensors in their order in the file."""
    if foreign := [name for name, t in tensors.items() if t.dtype not in _NAMES]:
        raise ValueError(
            f"{foreign[0]!r} is of {tensors[foreign[0]].dtype}, which safetensors files don't "
            "have; use torch.save."
        )
    # Large entries first: then all begin at multiples of their size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "state": tree,
            "checksum of the state": str(crc32(tree.encode())),
            "checksums": json.dumps({name: checksum_of(t) for name, t in ordered.items()}),
        }
    }
    end = 0
    for name, t in ordered.items():
        begin = end
        end += t.numel() * t.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered


def _content_of(header: Fields, metadata: Mapping[str, str], data: memoryview) -> dict[str, Any]:
    """The state in a file, compared with its checksums.

    Args:
        header: The tensors' places.
        metadata: The state's JSON and checksums.
        data: The bytes after the header.
    """
    tree = metadata["state"].encode()
    path = header.title
    checksum = str(crc32(tree))
    if metadata.get("checksum of the state", checksum) != checksum:
        raise ValueError(f"{path} is damaged: the plan of its state is not what was saved.")
    tensors = {name: _tensor_at(place, data) for name, place in header.parts()}
    if "checksums" in metadata:
        checksums = Fields(_parsed(metadata["checksums"], path), f"{path}, checksums")
        checksums.require(tensors)
        for name, t in tensors.items():
            if checksum_of(t) != checksums[name]:
                raise ValueError(f"{path} is damaged: its tensor {name!r} is not what was saved.")
    state = _attach(_parsed(tree, path), tensors)
    if not isinstance(state, dict):
        raise ValueError(f"{path} has a {type(state).__name__}; expected a dict.")
    return state


def _parsed(text: str | bytes, path: str | PathLike[str]) -> Any:
    """JSON of a file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error


def _tensor_at(place: Fields, data: memoryview) -> Tensor:
    """A tensor of a file, mapped from it."""
    dtype = _DTYPES[place.word("dtype", _DTYPES)]
    sizes = place.sequence("shape")
    shape = [sizes.count(axis) for axis in sizes.data]
    offsets = place.sequence("data_offsets", 2)
    begin = offsets.count(0)
    end = offsets.count(1)
    count = prod(shape)
    if end > len(data):
        raise ValueError(f"{place.title} is cut off.")
    if end - begin != count * dtype.itemsize or begin % dtype.itemsize:
        raise place.error("its place", str([begin, end]), f"{count * dtype.itemsize} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(shape)


def _attach(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `detached`."""
    if not isinstance(node, (dict, list)):
        return node
    kinds = list(node)
    if isinstance(node, list) or kinds not in (["$tensor"], ["$dict"], ["$list"], ["$tuple"]):
        raise ValueError(
            f"A state has a part {str(kinds)[:100]} of no known kind; is the file damaged?"
        )
    kind = kinds[0]
    content = node[kind]
    if kind == "$tensor":
        return tensors[content]
    if kind == "$dict":
        return {key: _attach(value, tensors) for key, value in content}
    items = [_attach(value, tensors) for value in content]
    return tuple(items) if kind == "$tuple" else items


# ------------------------------------------------------------------------------------ replacing one
def _require_regular(path: str | PathLike[str]) -> None:
    """Refuse a path at which something is that is no regular file."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise ValueError(f"{path} is {what}; expected the path of a file.")


@contextmanager
def _replacing(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to be written, which is at the path afterwards; if anything fails, what was there
    stays.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} to write {target.name} into.")
    mode = None
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(target.stat().st_mode)
    # Of a fixed length, whatever the name of the target is.
    prefix = f".unfinished-{crc32(os.fsencode(target.name)):08x}-"
    _remove_abandoned(target.parent, prefix)
    file, unfinished = _locked_file(target.parent, prefix)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                unfinished.chmod(mode)
            if fcntl is None:
                file.close()  # Windows replaces closed files only
            # While it is locked, so that nobody takes it for an abandoned one.
            unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _locked_file(folder: Path, prefix: str) -> tuple[IO[bytes], Path]:
    """A new file of this process, and its path; the lock on it ends with whoever holds it."""
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        file = open(path, "xb")  # noqa: SIM115 (the caller closes it)
        if fcntl is None:
            return file, path
        with suppress(OSError):  # a file system without locks, where nothing is abandoned
            fcntl.flock(file, fcntl.LOCK_EX)
        # Before it was locked somebody may have removed it as abandoned.
        if path.exists():
            return file, path
        file.close()


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove files that nobody holds a lock on: who wrote to them was killed."""
    if fcntl is None:
        return
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError), open(path, "rb") as file:  # others have locks, or have moved it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


# -------------------------------------------------------------------------------------- checkpoints
class Checkpoint:
    """Something with a state, as `torch.distributed.checkpoint` saves and loads it, on any number
    of processes.

    That module asks what is to be loaded for its own state first, and loads what it finds there. An
    estimator without any batch has no statistics to be found, so its whole state is one entry here.
    An operator of `curvature` has one for each block: processes that keep blocks apart
    (`owned=True`) save and load their own ones only.

    Args:
        thing: A `CurvatureEstimator`, an operator, a `KFACOptimizer`.

    Cost: the state in memory once more while it is saved or loaded. All processes have to save and
    load together.

    Example:
        >>> from curvlinops_plus import CurvatureEstimator, EmpiricalRisk
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), ())
        >>> one, two = CurvatureEstimator(risk), CurvatureEstimator(risk)
        >>> one.update((torch.rand(4, 3), torch.rand(4, 2)))
        >>> saved = Checkpoint(one).state_dict()  # as dcp.save and dcp.load do
        >>> Checkpoint(two).load_state_dict(saved)
        >>> two.updates
        1
    """

    def __init__(self, thing: Any) -> None:
        if not hasattr(thing, "state_dict"):
            raise type_error("thing", thing, "what has a state_dict and a load_state_dict")
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        """The state in bytes."""
        if hasattr(self.thing, "_state_parts"):
            parts = self.thing._state_parts()
        else:
            parts = {"state": self.thing.state_dict()}
        as_bytes: dict[str, Any] = {}
        for name, part in parts.items():
            buffer = BytesIO()
            torch.save(part, buffer)
            as_bytes[name] = buffer.getvalue()
        return as_bytes

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: As for that which has it; if an entry can't be read.
        """
        parts: dict[str, Any] = {}
        for name, part in state_dict.items():
            try:
                # No code of a file runs.
                parts[name] = torch.load(BytesIO(part), weights_only=True)
            except Exception as error:  # whatever PyTorch says of bytes that are no state
                raise ValueError(
                    f"The entry {name!r} of the checkpoint can't be read: {error}"
                ) from error
        Fields(parts, "The checkpoint").require(["state"])
        state = parts.pop("state")
        blocks: dict[str, Any] = {}
        for name, part in parts.items():
            blocks |= Fields(part, f"The entry {name!r} of the checkpoint").data
        if blocks:
            Fields(state, "The entry 'state' of the checkpoint").part("blocks")
            state["blocks"] = blocks
        self.thing.load_state_dict(state)
