"""Checksums of states: a state is what was saved, or it is refused.

A sealed state has one entry more, "checksums": of each of its tensors by its path, and of
everything else under each of its keys. Parts with checksums of their own (the blocks of an
operator, the last refresh of an estimator) are left out of those around them. States without
checksums are older, and are read as they are.

Checksums are CRC-32, the fastest of Python's standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

CHECKSUMS = "checksums"


def bytes_of(t: Tensor) -> memoryview:
    """The entries of a tensor in the usual order; without a copy if they are in the CPU's memory
    in this order.
    """
    flat = t.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    if flat.dtype == torch.bfloat16:  # which NumPy does not have
        flat = flat.view(torch.int16)
    return flat.numpy().view(np.uint8).data


def checksum_of(t: Tensor) -> int:
    """Of dtype, shape and entries of a tensor."""
    return crc32(bytes_of(t), crc32(f"{t.dtype} {list(t.shape)}".encode()))


def key_in_path(key: Any) -> str:
    """A key as a part of a path: parts are joined by "/"."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def detached(node: Any, path: str, tensors: dict[str, Tensor], apart: bool = False) -> Any:
    """Nested data for JSON, with tensors replaced by their paths, and dicts by lists of pairs.

    Args:
        node: Dicts, lists, tuples, tensors and plain Python.
        path: Of this node.
        tensors: To which tensors are added, by their paths.
        apart: Leave out dicts with checksums of their own.

    Raises:
        ValueError: If two tensors have one path, as those under the keys 1 and "1".
    """
    if isinstance(node, Tensor):
        if path in tensors:
            raise ValueError(f"Two keys of the state are {path!r} as text; give one another name.")
        tensors[path] = node
        return {"$tensor": path}
    if isinstance(node, Mapping):
        if apart and CHECKSUMS in node:
            return {"$apart": path}
        pairs: list[list[Any]] = []
        for key, item in node.items():
            inside = f"{path}/{key_in_path(key)}".lstrip("/")
            pairs.append([key, detached(item, inside, tensors, apart)])
        return {"$dict": pairs}
    if isinstance(node, (list, tuple)):
        items = [detached(x, f"{path}/{k}", tensors, apart) for k, x in enumerate(node)]
        return {"$tuple" if isinstance(node, tuple) else "$list": items}
    return node


def checksums_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Paths of tensors, and keys, to checksums."""
    checksums: dict[str, int] = {}
    for key, item in state.items():
        if key == CHECKSUMS:
            continue
        tensors: dict[str, Tensor] = {}
        tree = json.dumps(detached(item, key_in_path(key), tensors, apart=True), default=repr)
        checksums[key_in_path(key)] = crc32(tree.encode())
        checksums |= {path: checksum_of(t) for path, t in tensors.items()}
    return checksums


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with checksums.

    Example:
        >>> state = sealed({"seed": 3, "A": {"matrix": torch.ones(2)}})
        >>> list(state["checksums"])
        ['seed', 'A', 'A/matrix']
        >>> state["A"]["matrix"][1] = 7
        >>> require_intact(state, "The state")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: The state: 'A/matrix' is not what was saved, by its checksum. The file is ...
    """
    return {**state, CHECKSUMS: checksums_of(state)}


def require_intact(state: Any, title: str) -> None:
    """Refuse a state whose checksums, or those of a part of it, are not those of what it holds.

    Entries that were added to it are not looked at.

    Raises:
        ValueError: Naming a tensor, or a key.
    """
    if isinstance(state, (list, tuple)):
        for item in state:
            require_intact(item, title)
    if not isinstance(state, Mapping):
        return
    for key, item in state.items():
        require_intact(item, f"{title}, {key!r}")
    if CHECKSUMS not in state:
        return
    expected = state[CHECKSUMS]
    if not isinstance(expected, Mapping):
        raise ValueError(f"{title}: the checksums can't be read; is the file damaged?")
    checksums = checksums_of(state)
    if missing := [path for path in expected if path not in checksums]:
        raise ValueError(f"{title} lacks {missing[:5]}; is the file cut off?")
    changed = [path for path in expected if expected[path] != checksums[path]]
    if changed:
        # The deepest path says most.
        path = max(changed, key=lambda path: path.count("/"))
        raise ValueError(
            f"{title}: {path!r} is not what was saved, by its checksum. The file is damaged, or "
            "the state was changed after it was made: if by you, delete its entry "
            f"{CHECKSUMS!r} of before."
        )
