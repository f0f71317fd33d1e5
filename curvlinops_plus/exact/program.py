"""Whether a forward pass would compute the same again, told without computing it.

A model is Python code, which may read anything: attributes, globals, closures, modes of PyTorch. But what it computes
goes through PyTorch's functions. Their calls are written down once, as a program: functions, arguments, and modes. To
follow it, the code runs again, and each call is compared, and answered by a tensor without numbers instead of a
computation. If all calls are the same, on the same numbers, so are their results, and what the code decides by them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

Run = Callable[[], Sequence[Tensor]]  # a forward pass, which returns its outputs
_PLAIN = {bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
_SCALARS = {*_PLAIN, float, complex}
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integers of as many bytes
_PIECE = 2**15  # words that are summed at a time, within a cache
# What lets numbers be read or written unseen.
_BUILTINS = {type(torch.sin), type(Tensor.sin), type(Tensor.__getitem__), type(Tensor.shape.__get__)}  # type: ignore[attr-defined]
_UNSEEN = {Tensor.data.__get__, Tensor.data.__set__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}  # type: ignore[attr-defined]


class Unclear(Exception):
    """A forward pass does something that calls of PyTorch's functions don't tell, or not in full."""


def fingerprint(t: Tensor) -> Any:
    """Equal for two tensors of the same numbers and form.

    Raises:
        Unclear: If the tensor is of a class of its own, or part of a graph.
    """
    if type(t) not in (Tensor, nn.Parameter, nn.Buffer) or t.grad_fn is not None or t.layout != torch.strided:
        raise Unclear
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, _numbers(t)


class Program:
    """What a forward pass does, by the functions of PyTorch that it calls.

    Args:
        run: The forward pass.
        inputs: Tensors that it reads, of which the caller knows whether they are the same.
        others: Tensors that were there before it, which it may read.

    Raises:
        Unclear: If calls don't tell everything.
    """

    def __init__(self, run: Run, inputs: Sequence[Tensor], others: Iterable[Tensor]) -> None:
        with _Writing(inputs, others) as calls:
            self._outputs = [calls.place(f) for f in run()]
        if None in self._outputs or any(_version(t) != version for t, version in calls.versions):
            raise Unclear
        self._steps, self._settings = calls.steps, _settings()

    def is_repeated_by(self, run: Run, inputs: Sequence[Tensor]) -> bool:
        """Whether a forward pass makes the same calls; none of them is carried out."""
        if self._settings != _settings():
            return False
        before = self._references()
        try:
            with _Following(inputs, self._steps) as calls:
                outputs = run()
            same = calls.at == len(self._steps) and [calls.place(f) for f in outputs] == self._outputs
        except Exception:  # whatever code does that gets no numbers
            return False
        del calls, outputs
        return same and self._references() == before  # else somebody has results now, and may write to them

    def _references(self) -> list[int]:
        """How often each tensor without numbers is held."""
        places = (place for _, out in self._steps for place in tree_leaves(out) if isinstance(place, _Place))
        return [sys.getrefcount(place.empty) for place in places if place.empty is not None]


@dataclass(frozen=True)
class _Place:
    """A tensor that a call returned: its number, and one of the same form without numbers, if it is new."""

    number: int
    empty: Tensor | None


class _Calls(TorchFunctionMode):
    """Tensors have numbers, in the order in which they are seen."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.kind, self.count = inputs[0].device.type, 0
        self.places: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.versions: list[tuple[Tensor, int | None]] = []  # of what calls may not write to
        self.others: set[int] = set()  # that were there before, and are no inputs
        for t in inputs:
            self.versions.append((t, _version(t)))
            self.put(t)

    def put(self, t: Tensor) -> int:
        self.places[id(t)] = weakref.ref(t), self.count
        self.count += 1
        return self.count - 1

    def read(self, t: Tensor) -> int:
        self.versions.append((t, _version(t)))
        self.others.add(self.count)
        return self.put(t)

    def place(self, t: Tensor) -> int | None:
        found = self.places.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call in words, which are equal for equal calls."""
        cast = torch.get_autocast_dtype(self.kind) if torch.is_autocast_enabled(self.kind) else None
        modes = torch.is_grad_enabled(), cast, torch.get_default_dtype()
        return func, _parts(func), [self.words(x) for x in args], kwargs and self.words(kwargs), modes

    def words(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            number = self.place(x)
            if number is None or number in self.others:  # which may be written to behind PyTorch's back
                return fingerprint(x), x.data_ptr(), self.read(x) if number is None else number
            return number
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if kind in (float, complex):
            return repr(x)  # NaN is equal to NaN then, and -0 is not to 0
        if isinstance(x, (tuple, list)):
            return kind, [self.words(part) for part in x]
        if isinstance(x, dict):
            return [(key, self.words(value)) for key, value in x.items()]
        if isinstance(x, slice):
            return slice, self.words((x.start, x.stop, x.step))
        raise Unclear  # functions, generators, objects of a user's


def _are_saved_tensors_hooked() -> bool:
    """Whether somebody packs what graphs save."""
    try:
        with disable_saved_tensors_hooks("asked for"):  # fails where there are some
            return False
    except RuntimeError:
        return True


class _Writing(_Calls):
    """Carries calls out, and writes down what they are and what they return."""

    def __init__(self, inputs: Sequence[Tensor], others: Iterable[Tensor]) -> None:
        super().__init__(inputs)
        self.steps: list[tuple[Any, Any]] = []
        self.known = {id(t): t for t in others}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSEEN or not _is_of_pytorch(func) or _are_saved_tensors_hooked():
            raise Unclear
        call, state = self.call(func, args, kwargs), torch.default_generator.get_state()
        out = func(*args, **(kwargs or {}))
        if not torch.equal(state, torch.default_generator.get_state()):  # which may be set and restored around it
            raise Unclear
        if not all(isinstance(x, Tensor) or type(x) in _SCALARS for x in tree_leaves(out)):
            raise Unclear
        self.steps.append((call, tree_map_only(Tensor, self.returned, out)))
        return out

    def read(self, t: Tensor) -> int:
        if id(t) not in self.known:  # made by code that is no PyTorch, which can't be given tensors without numbers
            raise Unclear
        return super().read(t)

    def returned(self, t: Tensor) -> _Place:
        number = self.place(t)
        if number is not None:
            return _Place(number, None)
        if type(t) is not Tensor:
            raise Unclear
        empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad)
        return _Place(self.put(t), empty)


class _Following(_Calls):
    """Compares calls with those that were written down, and answers them."""

    def __init__(self, inputs: Sequence[Tensor], steps: Sequence[tuple[Any, Any]]) -> None:
        self.seen: list[Tensor] = []
        super().__init__(inputs)
        self.steps, self.at = steps, 0

    def put(self, t: Tensor) -> int:
        self.seen.append(t)
        return super().put(t)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, out = self.steps[self.at] if 0 <= self.at < len(self.steps) else (None, None)
        if call != self.call(func, args, kwargs):
            self.at = -1  # for ever, whatever the model catches
            raise Unclear
        self.at += 1
        if isinstance(out, _Place):
            return self.answer(out)
        return out if type(out) in _SCALARS else tree_map_only(_Place, self.answer, out)

    def answer(self, place: _Place) -> Tensor:
        if place.empty is not None:
            self.put(place.empty)
        return self.seen[place.number]


def _is_of_pytorch(func: Any) -> bool:
    """Whether a function is one of PyTorch's, and not of a user's who lets modes see it: it may read anything."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return func.__module__ in ("torch._ops.aten", "torch._ops.prims")
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return type(func) in _BUILTINS


def _parts(func: Any) -> list[Any]:
    """What a function of PyTorch's that is written in Python calls: somebody may replace it."""
    if not isinstance(func, FunctionType):
        return []
    return [func.__globals__.get(name) for name in func.__code__.co_names]


def _settings() -> tuple[Any, ...]:
    """Of PyTorch, which say how exact products are."""
    backends = (getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn"))
    precisions = [getattr(backend, "fp32_precision", None) for backend in backends]
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), precisions


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _numbers(t: Tensor) -> int:
    """The sum of a tensor's words of at most 32 bits, each times an odd number of 64: another one if a word differs.

    If several do, it is the same once in 2³² times; of words of 64 bits, changes of high bits, such as two signs, would
    cancel. A write to `t.data` tells no version counter.
    """
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    words = t.contiguous().flatten().view(_WORDS[min(t.element_size(), 4)])
    pieces = [(w.to(torch.int64) * _weights(len(w), t.device)).sum() for w in words.split(_PIECE)]
    return int((torch.stack(pieces) * _weights(len(pieces), t.device)).sum())


def _weights(n: int, device: torch.device) -> Tensor:
    return _all_weights(max(n, _PIECE), device)[:n]


@lru_cache(maxsize=8)
def _all_weights(n: int, device: torch.device) -> Tensor:
    """Products and sums of 64-bit integers are right modulo 2⁶⁴, and odd numbers have inverses there."""
    return (2 * torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(n)) + 1).to(device)
