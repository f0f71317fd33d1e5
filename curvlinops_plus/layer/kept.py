"""What modules keep in themselves from one call to the next: it is put back after passes of our own, and before each.

A module may keep what it computed, as a cache of eval mode does what it made of a parameter. The next pass would read a
tensor that depends on nothing any more: a gradient of zero. So tensors that came since are dropped before each pass and
each rerun, and all is as before at the end. Modules keep in attributes, in containers there, in attributes of plain
objects, and in caches of their methods (`functools.lru_cache`); what those objects hold in others is not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# What every module has, which is looked after elsewhere or does not change.
_OF_TORCH = frozenset(vars(nn.Module()))
# Types of most attributes: nothing is kept in them.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_PLAIN |= {Tensor, nn.Parameter, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type}
_METHOD_CACHE: Any = type(lru_cache(len))
_MISSING = object()


class _Kept:
    """A list, set or deque, and what was in it.

    Args:
        whole: Whether anything that changes is put back at the end, or only tensors.
    """

    def __init__(self, container: Any, whole: bool) -> None:
        self.container, self.whole, self.before = container, whole, [*container]

    def put_back(self, whole: bool) -> None:
        """Put back what was in it, all or only where tensors came into it."""
        now, before = self.container, self.before
        if len(now) == len(before) and all(map(is_, now, before)):
            return
        old = {*map(id, before)}
        if whole or any(_holds_tensors(value) for value in now if id(value) not in old):
            now.clear()
            (now.update if isinstance(now, set) else now.extend)(before)


class _KeptNames:
    """The same of a dictionary, or of attributes, which other threads may read meanwhile; `skipped` is no tensor."""

    def __init__(self, container: dict[Any, Any], whole: bool, skipped: frozenset[str] = frozenset()) -> None:
        self.container, self.whole, self.before, self.skipped = container, whole, {**container}, skipped
        self.own = [(name, value) for name, value in container.items() if name not in skipped]

    def put_back(self, whole: bool) -> None:
        now, before = self.container, self.before
        if whole:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
            return
        if len(now) == len(before) and all([now.get(name) is value for name, value in self.own]):  # noqa: C419
            return
        for name in {*now, *before} - self.skipped:
            value, old = now.get(name, _MISSING), before.get(name, _MISSING)
            if value is old or not (value is _MISSING or _holds_tensors(value)):
                continue
            if old is _MISSING:
                del now[name]
            else:
                now[name] = old


class _KeptMethod:
    """The cache of a method, which all modules of the type have in common."""

    whole = True

    def __init__(self, cache: Any) -> None:
        self.cache, self.misses = cache, cache.cache_info().misses

    def put_back(self, whole: bool) -> None:
        """Empty it if something came into it: it can't be told what."""
        if self.cache.cache_info().misses != self.misses:
            self.cache.cache_clear()
            self.misses = 0


# What is kept in contexts that are open, by module; the outermost first.
_open: list[dict[nn.Module, list[_Kept | _KeptNames | _KeptMethod]]] = []


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What modules store in themselves while they run, as activations, counters and caches, is as before at the end."""
    kept = {module: _kept_by(module) for module in modules}
    _open.append(kept)
    try:
        yield
    finally:
        _open.remove(kept)
        for parts in kept.values():
            for part in parts:
                part.put_back(part.whole)


def parts_kept(modules: Iterable[nn.Module]) -> list[Any]:
    """What the outermost `kept_attributes` that is open for some modules keeps, for `drop_new_tensors`."""
    return [part for m in modules for part in next((kept[m] for kept in _open if m in kept), ())]


def drop_new_tensors(parts: Iterable[Any]) -> None:
    """Drop tensors that modules keep since `kept_attributes` began, before they run once more."""
    for part in parts:
        part.put_back(False)


def keepers_of_graphs(model: nn.Module) -> list[str]:
    """Names and types of modules that keep tensors which were computed with a graph."""
    found = list[str]()
    for name, module in model.named_modules():
        attributes, *parts = [part for part in _kept_by(module) if not isinstance(part, _KeptMethod)]
        values = [[value for _, value in attributes.own], *[_values(part.container) for part in parts]]
        if any(isinstance(t, Tensor) and t.grad_fn is not None for t in tree_leaves(values)):
            found.append(f"{name!r} ({type(module).__name__})")
    return found


def _kept_by(module: nn.Module) -> list[Any]:
    """All that a module keeps something in, its attributes first."""
    attributes = _KeptNames(vars(module), True, _OF_TORCH)
    found = [attributes, *map(_KeptMethod, _method_caches(type(module)))]
    for _, value in attributes.own:
        if type(value) not in _PLAIN:
            _collect(value, found, {id(module)}, True)
    return found


@lru_cache(1024)
def _method_caches(kind: type[nn.Module]) -> list[Any]:
    return [value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, _METHOD_CACHE)]


def _collect(value: Any, found: list[Any], seen: set[int], of_module: bool) -> None:
    """Find containers in a value, those inside of others, and those that an object has as attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        found.append(_KeptNames(value, of_module))
    elif isinstance(value, (list, set, deque)):
        found.append(_Kept(value, of_module))
    elif of_module and not isinstance(value, (tuple, Tensor, type)) and hasattr(value, "__dict__"):
        value, of_module = vars(value), False
        found.append(_KeptNames(value, False, _OF_TORCH))
    elif not isinstance(value, tuple):
        return
    inside = _values(value)
    if not _PLAIN.issuperset(map(type, inside)):  # else a table may have a million numbers
        for part in inside:
            if type(part) not in _PLAIN:
                _collect(part, found, seen, of_module)


def _values(container: Any) -> Iterable[Any]:
    return [*container.values()] if isinstance(container, dict) else container


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or has some in it."""
    leaves = tree_leaves(value)
    return any(isinstance(t, Tensor) for leaf in leaves for t in (leaf, *getattr(leaf, "__dict__", {}).values()))
