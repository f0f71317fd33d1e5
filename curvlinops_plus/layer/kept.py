"""What modules keep in themselves from one call to the next: it is put back after passes of our
own, and before each.

A module may keep what it computed, as a cache of eval mode does what it made of a parameter. The
next pass would read a tensor that depends on nothing any more: a gradient of zero. So where tensors
came in, all is put back before each pass and each rerun, and at the end. Modules keep in
attributes, in containers there, in attributes of plain objects, and in caches of their methods
(`functools.lru_cache`); what those objects hold in others is not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_PLAIN |= {Tensor, nn.Parameter, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type}
_METHOD_CACHE: Any = type(lru_cache(len))


class _Kept:
    """A list, set or deque, and what was in it."""

    def __init__(self, container: Any) -> None:
        self.container, self.before = container, [*container]

    def gained(self) -> bool:
        """Whether tensors came into it."""
        now, before = self.container, self.before
        if len(now) == len(before) and all(map(is_, now, before)):
            return False
        old = {*map(id, before)}
        return any(_holds_tensors(value) for value in now if id(value) not in old)

    def put_back(self) -> None:
        """Put back what was in it."""
        self.container.clear()
        (self.container.update if isinstance(self.container, set) else self.container.extend)(
            self.before
        )


class _KeptNames:
    """The same of a dictionary, or of attributes, which other threads may read meanwhile."""

    def __init__(self, container: dict[Any, Any], skipped: frozenset[str] = frozenset()) -> None:
        self.container, self.size, self.skipped = container, len(container), skipped
        self.before = {name: value for name, value in container.items() if name not in skipped}

    def gained(self) -> bool:
        now, before = self.container, self.before
        if len(now) == self.size and all(
            [now.get(name) is value for name, value in before.items()]
        ):
            return False
        new = [
            value
            for name, value in now.items()
            if name not in self.skipped and value is not before.get(name)
        ]
        return any(map(_holds_tensors, new))

    def put_back(self) -> None:
        for name in self.container.keys() - self.before.keys() - self.skipped:
            del self.container[name]
        self.container.update(self.before)


class _KeptMethod:
    """The cache of a method, which all modules of the type have in common; it can't be told what
    came into it.
    """

    def __init__(self, cache: Any) -> None:
        self.cache, self.misses = cache, cache.cache_info().misses

    def gained(self) -> bool:
        return self.cache.cache_info().misses != self.misses

    def put_back(self) -> None:
        if self.gained():
            self.cache.cache_clear()
            self.misses = 0


# What is kept in contexts that are open, by module; the outermost first.
_open: list[dict[nn.Module, list[Any]]] = []


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attributes of modules are as before at the end, as activations and counters; and all, where
    they kept tensors.
    """
    modules = [*modules]
    kept = {module: _kept_by(module) for module in modules if not _is_of_torch(type(module))}
    before = [(vars(module), {**vars(module)}) for module in modules]
    _open.append(kept)
    try:
        yield
    finally:
        _open.remove(kept)
        drop_new_tensors(kept.values())
        for own, attributes in before:
            for name in own.keys() - attributes.keys():
                del own[name]
            own.update(attributes)


def parts_kept(modules: Iterable[nn.Module]) -> list[Any]:
    """Of some modules what the outermost `kept_attributes` that is open keeps, for
    `drop_new_tensors`.
    """
    kept = (next((kept[module] for kept in _open if module in kept), ()) for module in modules)
    return [parts for parts in kept if parts]


def drop_new_tensors(modules: Iterable[Sequence[Any]]) -> None:
    """Put modules back that keep tensors since `kept_attributes` began, before they run once more.

    Numbers that go with a tensor, such as a flag that says that it is there, are put back, too;
    others stay.
    """
    for parts in modules:
        for part in parts:
            if part.gained():
                for each in parts:
                    each.put_back()
                break


def keepers_of_graphs(model: nn.Module) -> list[str]:
    """Names and types of modules that keep tensors which were computed with a graph."""
    found = list[str]()
    for name, module in model.named_modules():
        attributes, *parts = [
            part for part in _kept_by(module) if not isinstance(part, _KeptMethod)
        ]
        values = [attributes.before, *[_values(part.container) for part in parts]]
        if any(isinstance(t, Tensor) and t.grad_fn is not None for t in tree_leaves(values)):
            found.append(f"{name!r} ({type(module).__name__})")
    return found


def _kept_by(module: nn.Module) -> list[Any]:
    """All that a module keeps something in, its attributes first."""
    attributes = _KeptNames(vars(module), _OF_TORCH)
    found = [attributes, *map(_KeptMethod, _method_caches(type(module)))]
    for value in attributes.before.values():
        if type(value) not in _PLAIN:
            _collect(value, found, {id(module)}, True)
    return found


@lru_cache(1024)
def _is_of_torch(kind: type[nn.Module]) -> bool:
    """Whether it is one of PyTorch's own modules, which keep no tensors from one call to the
    next.
    """
    return kind.__module__.startswith("torch.nn.")


@lru_cache(1024)
def _method_caches(kind: type[nn.Module]) -> list[Any]:
    return [
        value
        for base in kind.__mro__
        for value in vars(base).values()
        if isinstance(value, _METHOD_CACHE)
    ]


def _collect(value: Any, found: list[Any], seen: set[int], of_module: bool) -> None:
    """Find containers in a value, those inside of others, and those that an object has as
    attributes.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        found.append(_KeptNames(value))
    elif isinstance(value, (list, set, deque)):
        found.append(_Kept(value))
    elif of_module and not isinstance(value, (tuple, Tensor, type)) and hasattr(value, "__dict__"):
        value, of_module = vars(value), False
        found.append(_KeptNames(value, _OF_TORCH))
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
    return any(
        isinstance(t, Tensor)
        for leaf in leaves
        for t in (leaf, *getattr(leaf, "__dict__", {}).values())
    )
