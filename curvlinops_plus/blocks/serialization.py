"""Files of states: one safetensors file holds what `torch.save` with `weights_only=True` can carry."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import OwnedBlockDiagonal
from curvlinops_plus.linalg.packing import FORMAT, copied, mapped

_MISSING = "save and load need the package safetensors: pip install safetensors. torch.save carries a state_dict, too."


def save(state: Any, path: str | PathLike[str]) -> None:
    """Write a `state_dict` as one safetensors file; `load` reads it.

    Tensors are stored under their keys joined by "/", everything else as JSON in the file's metadata. A file that is
    there is replaced when the new one is complete.

    Of an operator whose blocks several processes keep apart (`curvature(..., owned=True)`) all processes have to
    call it. Process 0 writes the file, for which all get all blocks; `Checkpoint` saves them apart.

    Args:
        state: What `state_dict()` returned, or an operator or estimator that has one.
        path: The file.

    Raises:
        TypeError: If it is neither: most operators are known by their products alone.
        ProcessError: In all processes that write together, if one of them fails.
        FileNotFoundError: If the path is a folder, or in one that does not exist.
        ImportError: If the package safetensors is missing (`pip install safetensors`).

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"factors": {"fc": torch.eye(2)}, "seed": 0}, f"{folder}/K.safetensors")
        ...     load(f"{folder}/K.safetensors")["seed"]
        0
    """
    try:
        import safetensors.torch  # noqa: F401 (before all else: it may be missing)
    except ImportError as error:
        raise ImportError(_MISSING) from error

    if isinstance(state, (str, PathLike)):
        raise TypeError(f"save takes what is saved first, then the path: save(K, {str(state)!r}).")
    if not isinstance(state, Mapping) and not callable(getattr(state, "state_dict", None)):
        raise TypeError(
            f"save takes a state_dict, or what has one such as the operators of `curvature`; a {type(state).__name__} "
            "has none. Save the operator that an inverse was made from; what computes its products with model and "
            "data, such as GGN, is made again from these."
        )
    processes = _keepers(state)
    processes.together(partial(_write, state, Path(path), processes))


def _keepers(state: Any) -> Alone:
    """The processes that keep the blocks of an operator apart; one alone for everything else."""
    own = state if isinstance(state, OwnedBlockDiagonal) else state.risk if getattr(state, "owned", False) else None
    return Alone() if own is None else own.processes  # type: ignore[return-value] (what made it)


def _write(state: Any, path: Path, processes: Alone) -> None:
    tensors: dict[str, Tensor] = {}
    tree = _detach(state if isinstance(state, Mapping) else state.state_dict(), "", tensors)
    if processes.rank == 0:
        _write_file(path, tensors, tree)


def _write_file(path: Path, tensors: dict[str, Tensor], tree: Any) -> None:
    from safetensors.torch import save_file

    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder; add the name of a file" if path.is_dir() else "is in a folder that does not exist"
        raise FileNotFoundError(f"Can't save to {path}: it {why}.")
    # An operator that was loaded from this path goes on with the old file: its tensors are mapped from it.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, unfinished, metadata={"format": FORMAT, "state": json.dumps(tree)})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | PathLike[str], *more: Any) -> dict[str, Any]:
    """Read a `state_dict` that `save` wrote; tensors are on the CPU.

    Args:
        path: The file.

    Raises:
        TypeError: If the path is none, or something else is given, too: a model is for `from_state_dict`.
        ValueError: If the file is cut off, or not one of ours; nothing is returned then.
        FileNotFoundError: If there is none.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"values": {0: torch.ones(2)}}, f"{folder}/K.safetensors")
        ...     load(f"{folder}/K.safetensors")
        {'values': {0: tensor([1., 1.])}}
    """
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise ImportError(_MISSING) from error

    if more or not isinstance(path, (str, PathLike)):
        came = f"{1 + len(more)} arguments" if more else f"a {type(path).__name__}"
        raise TypeError(
            f"load takes the path of a file, got {came}. It returns the state, of which "
            "BlockwiseLinearOperator.from_state_dict(load(path), model, data) makes the operator."
        )
    if Path(path).is_dir():
        raise FileNotFoundError(f"{path} is a folder; expected a file that `save` wrote.")
    try:
        tensors, metadata = _read_file(Path(path))
        tree = json.loads(metadata["state"])
        return _attach(tree, tensors)
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"{path} can't be read ({error}): it is cut off or no safetensors file. What torch.save wrote is read by "
            "torch.load."
        ) from error


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT or "state" not in metadata:
            raise ValueError(f"{path} is a safetensors file, but not one that curvlinops_plus wrote.")
        tensors = {name: mapped(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (no dict)
    return tensors, metadata


def _detach(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors by references and keys that JSON can't carry by lists of pairs."""
    if isinstance(node, Tensor):
        tensors[path] = copied(node)
        return {"$tensor": path}
    if isinstance(node, Mapping):
        pairs = [
            [key, _detach(value, f"{path}/{_escape(key)}" if path else _escape(key), tensors)]
            for key, value in node.items()
        ]
        return {"$dict": pairs}
    if isinstance(node, (list, tuple)):
        items = [_detach(value, f"{path}/{index}", tensors) for index, value in enumerate(node)]
        return {"$tuple" if isinstance(node, tuple) else "$list": items}
    return node


def _attach(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$dict":
        return {key: _attach(value, tensors) for key, value in content}
    items = [_attach(value, tensors) for value in content]
    return tuple(items) if kind == "$tuple" else items


def _escape(key: Any) -> str:
    return str(key).replace("%", "%25").replace("/", "%2F")
