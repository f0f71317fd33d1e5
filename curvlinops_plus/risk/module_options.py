"""Options that are said of modules, by their names or globs of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def example_axes(modules: Mapping[str, nn.Module], given: Mapping[str, int] | None) -> dict[str, int]:
    """Axis of the examples by module name: 1 inside `batch_first=False` modules, then what the user says.

    Raises:
        TypeError: If one is no integer, or they are not in a dict.
        ValueError: If a glob matches no module.
    """
    axes: dict[str, int] = {}
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for name, module in modules.items():
        holder = module.self_attn if module._modules and isinstance(module, layers) else module
        flag = getattr(holder, "batch_first", None)
        if flag is False:
            for inner, _ in module.named_modules(prefix=name):
                axes[inner] = 1
    for glob, axis in _items("example_axis", given, "1"):
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise TypeError(f"example_axis={{{glob!r}: {axis!r}}} is a {type(axis).__name__}; expected an int.")
        axes |= dict.fromkeys(_matching(modules, glob, f"example_axis={{{glob!r}: {axis}}}"), axis)
    return axes


def _items(option: str, given: Any, value: str) -> Iterable[tuple[str, Any]]:
    """Names of modules, or globs, and what is said of them."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"{option} is a {type(given).__name__}; expected a dict from names of modules to what is true of them: "
            f'{option}={{"name": {value}}}, with "" for the model itself.'
        )
    return (given or {}).items()


def _matching(modules: Mapping[str, nn.Module], glob: str, option: str) -> list[str]:
    """The modules that an option is about; `option` is how the user wrote it."""
    matching = [name for name in modules if fnmatchcase(name, glob)]
    if not matching:
        raise ValueError(f"{option} matches no module of the model; its modules are {[*modules][1:]}.")
    return matching
