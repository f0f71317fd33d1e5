"""What a module looks like when it is called: attributes, hooks, and what its tensors stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.risk.process_state import Uncopied, hookable_modules

# What PyTorch keeps in every module.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype}
# Longer sequences are told apart by their lengths.
_LONG = 16


@dataclass(frozen=True, eq=False)
class ModuleState:
    """What a module looks like when it is called.

    Attributes:
        options: Its attributes and hooks, and those of the modules in it, as far as they can be compared.
        tensors: Where its parameters and buffers are held and under which name, each with version and address.
    """

    options: tuple[Any, ...]
    tensors: tuple[tuple[Mapping[str, Any], str, Tensor, int, int], ...]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """The state of a module."""
        modules = [m for _, m in hookable_modules(module)] if module._modules else [module]
        options: list[Any] = [type(module)]
        tensors: list[tuple[Mapping[str, Any], str, Tensor, int, int]] = []
        for m in modules:
            options.append(_options(m))
            for held in (m._parameters, m._buffers):
                for name, t in held.items() if held else ():
                    if t is not None and not t.is_inference():
                        tensors.append((held, name, t, *_place(t)))
        return cls(tuple(options), tuple(tensors))

    def changes(self) -> tuple[Any, ...]:
        """Which tensors are others by now, have been written to since then, and how often, or have other memory."""
        found = []
        for index, (held, name, t, version, address) in enumerate(self.tensors):
            now, place = _place(t)
            if now != version or place != address or held.get(name) is not t:
                found.append((index, now - version, place == address, held.get(name) is t))
        return tuple(found)


def _options(module: nn.Module) -> tuple[Any, ...]:
    found: list[Any] = []
    for name, value in vars(module).items():
        if name not in _INTERNAL:
            found += name, value if type(value) in _PLAIN else _value(value)
        elif value and name in _HOOKS:
            # A list, since finalizers of what is collected meanwhile remove hooks. Our own tell nothing of the module.
            found.append(tuple([Uncopied if type(hook) is Uncopied else _code(hook) for hook in [*value.values()]]))
    return tuple(found)


def _value(value: Any) -> Any:
    """Something that can be compared and takes no memory."""
    if isinstance(value, (tuple, list)):
        if len(value) > _LONG:
            return len(value)
        return tuple(value) if _PLAIN.issuperset(map(type, value)) else tuple(map(_value, value))
    if isinstance(value, Mapping):
        return len(value) if len(value) > _LONG else tuple((_value(key), _value(held)) for key, held in value.items())
    if isinstance(value, Tensor):
        return _tensor(value)
    return value if type(value) in _PLAIN else _object(value)


def _object(value: Any) -> Any:
    """An array or number of NumPy, an object with its attributes, or code."""
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.tobytes() if value.nbytes <= 8 * _LONG else (value.shape, id(value))
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and not isinstance(value, (type, nn.Module, FunctionType, partial)):
        plain = held.items() if len(held) <= _LONG else ()
        return type(value), tuple((name, _plain(attribute)) for name, attribute in plain)
    return _code(value)


def _plain(value: Any) -> Any:
    """An attribute of an object that a module holds: of objects in it, the type."""
    return _tensor(value) if isinstance(value, Tensor) else value if type(value) in _PLAIN else type(value)


def _tensor(t: Tensor) -> Any:
    """Up to 16 of its numbers, or which tensor it is: without waiting for a GPU."""
    if t.grad_fn is not None or type(t) not in (Tensor, nn.Parameter):
        return type(t)  # a result of this pass
    place = t.shape[1:], None if t.is_inference() else t._version
    if t.device.type == "cpu" and t.layout == torch.strided and t.is_contiguous():
        # Identities and addresses come again; NaN is not equal to itself.
        return *place, str(t.detach().view(-1)[:: max(1, t.numel() // _LONG)][:_LONG].tolist())
    return *place, id(t), 0 if t.layout != torch.strided else t.data_ptr()


def _code(function: Any) -> Any:
    """What a function or a hook runs: those that are made anew for each pass run the same code."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return hash(code) if isinstance(code, CodeType) else type(function)


def _place(t: Tensor) -> tuple[int, int]:
    """Version and address of a tensor; subclasses may have no memory of their own."""
    return t._version, t.data_ptr() if type(t) in (Tensor, nn.Parameter) else 0
