"""What modules keep in themselves from one call to the next: it is put back after passes of our
own, and before each.

A module may keep what it computed, as a cache of eval mode does what it made of a parameter. The
next pass would read a tensor that depends on nothing any more: a gradient of zero. So where tensors
came in, all is put back before each pass and each rerun, and at the end. Modules keep in
attributes, in containers there, in attributes of plain objects, and in caches of their methods
(`functools.lru_cache`); what those objects hold in others is not looked at.

Caches that models make for themselves where their configuration says so, `config.use_cache`, are
turned off meanwhile: a layer that runs again would find what it has left there. So is the cache of
weights that `torch.nn.utils.parametrize.cached()` opens around the caller's code; one that the
model opens itself is a part of it.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from curvlinops_plus.contexts import Endings

_Module = TypeVar("_Module", bound=nn.Module)
# Attributes of every module, which are looked after elsewhere or do not change.
_OF_TORCH = frozenset(vars(nn.Module()))
# Types of most attributes: nothing is kept in them.
_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_PLAIN |= {Tensor, nn.Parameter, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type}
_METHOD_CACHE: Any = type(lru_cache(len))


class _Open(threading.local):
    """Places where modules keep something, of each context that this thread is in; the outermost
    first.
    """

    def __init__(self) -> None:
        self.places: list[dict[nn.Module, list[Any]]] = []


_open = _Open()


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attributes of modules are as before at the end, as activations and counters; and all, where
    they kept tensors. Meanwhile models make no caches for generating text, and find no weights that
    the caller's `parametrize.cached()` has kept.
    """
    modules = [*modules]
    with Endings() as endings:
        _turn_caches_off(modules, endings)
        if parametrize._cache_enabled:
            _turn_callers_cache_off(endings)
        with _kept(modules):
            yield


def _turn_caches_off(modules: Iterable[nn.Module], endings: Endings) -> None:
    """No module's configuration asks for a cache, until the endings."""
    for module in modules:
        config = vars(module).get("config")
        if getattr(config, "use_cache", None) is True:
            endings.surely(setattr, config, "use_cache", True)
            with suppress(AttributeError):  # one that can't be changed
                config.use_cache = False  # type: ignore[union-attr]


def _turn_callers_cache_off(endings: Endings) -> None:
    """No `parametrize.cached()` is open, until the endings."""
    cache = parametrize._cache
    open_contexts = [parametrize._cache_enabled]

    def restore() -> None:
        if open_contexts:
            parametrize._cache = cache
            parametrize._cache_enabled += open_contexts.pop()

    endings.surely(restore)
    # Other threads may open and close theirs meanwhile, which count up and down.
    parametrize._cache_enabled -= open_contexts[0]
    parametrize._cache = {}


@contextmanager
def _kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    places = {module: _places_of(module) for module in modules if not _is_of_torch(type(module))}

    def restore() -> None:
        depth = next((k for k, others in enumerate(_open.places) if others is places), None)
        if depth is None:  # one around it has ended before, as after an interrupt
            return
        drop_new_tensors(places.values())
        for now, before in attributes:
            _restore(now, before)
        del _open.places[depth:]

    with Endings() as endings:
        endings.surely(restore)
        _open.places.append(places)
        yield


def parts_kept(modules: Iterable[nn.Module]) -> list[Any]:
    """What the outermost open `kept_attributes` puts back in modules, for `drop_new_tensors`."""
    by_module = []
    for module in modules:
        places = next((places[module] for places in _open.places if module in places), None)
        if places:
            by_module.append(places)
    return by_module


def drop_new_tensors(by_module: Iterable[Sequence[Any]]) -> None:
    """Put modules back that keep tensors since `kept_attributes` began, before they run once more.

    Numbers that go with a tensor, such as a flag that says that it is there, are put back, too;
    others stay.
    """
    for places in by_module:
        if any(place.gained() for place in places):
            for place in places:
                place.put_back()


class Snapshot:
    """What the modules of a model hold in attributes and containers now."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (name, _Container(vars(module)), _places_of(module))
            for name, module in model.named_modules()
        ]

    def changed(self) -> list[str]:
        """Names of modules that have other attributes since, or keep more tensors."""
        return [
            name
            for name, attributes, places in self._held
            if attributes.differs() or any(place.gained() for place in places)
        ]


def keepers_of_graphs(model: nn.Module) -> list[str]:
    """Names and types of modules that keep tensors which were computed with a graph."""
    keepers = []
    for name, module in model.named_modules():
        containers = [place for place in _places_of(module) if isinstance(place, _Container)]
        leaves = tree_leaves([_values(container.before) for container in containers])
        if any(isinstance(t, Tensor) and t.grad_fn is not None for t in leaves):
            keepers.append(f"{name!r} ({type(module).__name__})")
    return keepers


class CallStart:
    """What a module, and those inside of it, held when a call began: buffers and attributes, which
    the call may change, as power iterations, observers and counters do.

    Attributes:
        buffers: Name of each place to a copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._attributes: list[_Container] = []
        for prefix, m in module.named_modules():
            is_of_torch = _is_of_torch(type(m))
            if not is_of_torch:
                self._attributes.append(_Container(vars(m), _OF_TORCH))
            if is_of_torch and not m.training:
                continue
            for name, b in m._buffers.items():
                if b is not None:
                    self.buffers[f"{prefix}.{name}" if prefix else name] = b.detach().clone()

    def put_attributes_back(self) -> None:
        """Let the modules have these attributes again."""
        for attributes in self._attributes:
            attributes.put_back()


def may_change(module: nn.Module) -> bool:
    """Whether a call may change what the module, or one inside of it, computes in the next one."""
    return any(m._buffers or not _is_of_torch(type(m)) for m in module.modules())


def module_copy(module: _Module, change: Callable[[Tensor], Tensor] = Tensor.clone) -> _Module:
    """A deep copy. What modules keep that was computed, such as the weight of the older weight
    normalization, is copied without its graph, which Python's own copy refuses.

    Args:
        change: What becomes of these tensors.
    """
    kept = {
        id(t): change(t.detach())
        for m in module.modules()
        for name, value in vars(m).items()
        if name not in _OF_TORCH
        for t in tree_leaves(value)
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)
    }
    return copy.deepcopy(module, kept)


class _Container:
    """A dictionary, list, set or deque, and what was in it.

    Args:
        skipped: Names of attributes that are left alone.
    """

    def __init__(self, container: Any, skipped: frozenset[str] = frozenset()) -> None:
        self.container = container
        self.skipped = skipped
        self.before = self._contents()

    def _contents(self) -> Any:
        if not isinstance(self.container, dict):
            return [*self.container]
        return {name: x for name, x in self.container.items() if name not in self.skipped}

    def gained(self) -> bool:
        """Whether tensors came into it."""
        if not self.differs():
            return False
        old = {*map(id, _values(self.before))}
        now = _values(self._contents())
        return any(_holds_tensors(value) for value in now if id(value) not in old)

    def differs(self) -> bool:
        """Whether other objects are in it."""
        now = _values(self._contents())
        before = _values(self.before)
        return len(now) != len(before) or not all(map(is_, now, before))

    def put_back(self) -> None:
        """Put back what was in it."""
        if isinstance(self.container, dict):
            _restore(self.container, self.before, self.skipped)
            return
        self.container.clear()
        if isinstance(self.container, set):
            self.container.update(self.before)
        else:
            self.container.extend(self.before)


def _restore(
    now: dict[Any, Any], before: Mapping[Any, Any], skipped: frozenset[str] = frozenset()
) -> None:
    """Put a dictionary back, which other threads may read meanwhile."""
    for name in now.keys() - before.keys() - skipped:
        del now[name]
    now.update(before)


class _MethodCache:
    """The cache of a method, which all modules of the type have in common; it can't be told what
    came into it.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.misses = cache.cache_info().misses

    def gained(self) -> bool:
        return self.cache.cache_info().misses != self.misses

    def put_back(self) -> None:
        if self.gained():
            self.cache.cache_clear()
            self.misses = 0


def _places_of(module: nn.Module) -> list[Any]:
    """All that a module keeps something in."""
    attributes = _Container(vars(module), _OF_TORCH)
    places = [attributes, *map(_MethodCache, _method_caches(type(module)))]
    visited = {id(module)}
    for value in attributes.before.values():
        _collect(value, places, visited, objects=True)
    return places


def _collect(value: Any, places: list[Any], visited: set[int], objects: bool) -> None:
    """Find containers in a value, those inside of others, and with `objects` those that an object
    has as attributes.
    """
    if type(value) in _PLAIN or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, tuple):
        inside: Any = value
    elif isinstance(value, (dict, list, set, deque)):
        places.append(_Container(value))
        inside = _values(value)
    elif objects and hasattr(value, "__dict__") and not isinstance(value, (Tensor, type)):
        places.append(_Container(vars(value), _OF_TORCH))
        inside = vars(value).values()
        objects = False
    else:
        return
    # A table may have a million numbers.
    if not _PLAIN.issuperset(map(type, inside)):
        for part in [*inside]:
            _collect(part, places, visited, objects)


def _values(container: Any) -> Sequence[Any]:
    return [*container.values()] if isinstance(container, dict) else container


@lru_cache(1024)
def _is_of_torch(kind: type[nn.Module]) -> bool:
    """Whether it is one of PyTorch's own modules, which keep no tensors from one call to the
    next.
    """
    return kind.__module__.startswith("torch.nn.")


@lru_cache(1024)
def _method_caches(kind: type[nn.Module]) -> list[Any]:
    members = [member for base in kind.__mro__ for member in vars(base).values()]
    return [member for member in members if isinstance(member, _METHOD_CACHE)]


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or has some in it or among its attributes."""
    for leaf in tree_leaves(value):
        attributes = getattr(leaf, "__dict__", {}).values()
        if isinstance(leaf, Tensor) or any(isinstance(t, Tensor) for t in attributes):
            return True
    return False
