"""What a module looks like when it is called: attributes, hooks, and what its tensors stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.risk.process_state import hookable_modules

__all__ = ["ModuleState"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
# Longer sequences are told apart by their lengths.
_LONG = 16


@dataclass(frozen=True, eq=False)
class ModuleState:
    """What a module looks like when it is called.

    Attributes:
        options: Its attributes and hooks, and those of the modules in it, as far as they can be compared.
        tensors: Its parameters and buffers, each with version and address.
    """

    options: tuple[Any, ...]
    tensors: tuple[tuple[Tensor, int, int], ...]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """The state of a module."""
        modules = [m for _, m in hookable_modules(module)] if module._modules else [module]
        held = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        return cls(
            (type(module), *(_options(m) for m in modules)),
            tuple((t, *_place(t)) for t in held if not t.is_inference()),
        )

    def changes(self) -> tuple[Any, ...]:
        """What was written to its tensors since then: the number of writes, and whether the numbers stand elsewhere."""
        now = [_place(t) for t, _, _ in self.tensors]
        return tuple(
            (index, version - before, place == at)
            for index, ((_, before, at), (version, place)) in enumerate(zip(self.tensors, now))
            if version != before or place != at
        )


def _options(module: nn.Module) -> tuple[Any, ...]:
    attributes = vars(module)
    hooks = tuple(tuple(map(_code, attributes[name].values())) for name in _HOOKS if attributes.get(name))
    return (*((name, _value(value)) for name, value in attributes.items() if name[0] != "_"), hooks)


def _value(value: Any) -> Any:
    """Something that can be compared and takes no memory."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return len(value) if len(value) > _LONG else tuple(map(_value, value))
    if isinstance(value, Mapping):
        return len(value)
    return _code(value)


def _code(function: Any) -> Any:
    """What a function or a hook runs: those that are made anew for each pass run the same code."""
    if isinstance(function, partial):
        return _code(function.func)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else type(function)


def _place(t: Tensor) -> tuple[int, int]:
    """Version and address of a tensor; subclasses may have no memory of their own."""
    return t._version, t.data_ptr() if type(t) in (Tensor, nn.Parameter) else 0
