"""Interrupts at lines of the package, and what must be as before them."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha

import curvlinops_plus
from curvlinops_plus.risk.preserve import exclusive

HOME = str(Path(curvlinops_plus.__file__).parent)
#: Lines that neither begin nor end anything of the user's: they only read a network.
Line = tuple[str, int]


class Stop(KeyboardInterrupt):
    """Ctrl-C at a chosen line."""


class Lines:
    """Counts the lines of the package that run, and raises `Stop` before one of them.

    Args:
        stop: Number of the line, from 1 on; 0 for none.
    """

    def __init__(self, stop: int = 0) -> None:
        self.stop = stop
        self.number = 0
        self.place = ""
        self._is_ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        ours = self._is_ours.get(code)
        if ours is None:
            # Python itself goes on where `__del__` raises.
            ours = code.co_filename.startswith(HOME) and code.co_name != "__del__"
            self._is_ours[code] = ours
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line":
            return self._line
        self.number += 1
        if self.number == self.stop:
            file = frame.f_code.co_filename[len(HOME) + 1 :]
            self.place = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
            sys.settrace(None)
            raise Stop
        return self._line


def number_of_lines(work: Callable[[], object]) -> int:
    """Lines of the package that run in it."""
    with Lines() as lines:
        work()
    return lines.number


def interrupted(work: Callable[[], object], line: int) -> str:
    """Where it was interrupted, before its line of this number."""
    lines = Lines(line)
    try:
        with lines:
            work()
    except Stop:
        pass
    return lines.place


# ----------------------------------------------------------------------------- what is the user's
@dataclass
class Users:
    """What belongs to the user: everything that can be told from outside about a model and the
    process.
    """

    model: nn.Module

    def now(self) -> dict[str, Any]:
        """All of it, by names."""
        model = self.model
        return {
            "hooks": [_hooks(m) for m in model.modules()],
            "training": [m.training for m in model.modules()],
            "parameters": [id(p) for p in model.parameters()],
            "holders": [
                f"{type(m._parameters).__name__} {type(m._buffers).__name__}"
                for m in model.modules()
            ],
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "values": [p.detach().clone() for p in model.parameters()],
            "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "buffers": [b.clone() for b in model.buffers()],
            "attributes": [sorted(vars(m)) for m in model.modules()],
            "random numbers": torch.get_rng_state(),
            **modes(),
        }

    def changes(self, before: dict[str, Any]) -> list[str]:
        """Names of what differs."""
        now = self.now()
        changed = [name for name in before if not same(before[name], now[name])]
        return changed if is_free() else [*changed, "lock"]


def modes() -> dict[str, Any]:
    """The switches of the process."""
    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "function modes": torch._C._len_torch_function_stack(),
        "torch functions": torch._C._is_torch_function_enabled(),
        "fused attention": mha.get_fastpath_enabled(),
        "filters": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
    }


def _hooks(module: nn.Module) -> dict[str, int]:
    held = vars(module).items()
    return {name: len(hooks) for name, hooks in held if "hooks" in name and hooks is not None}


def same(a: Any, b: Any) -> bool:
    """Bitwise, also of trees."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def is_free() -> bool:
    """Whether another thread could compute curvature now."""
    answers = []

    def ask() -> None:
        free = exclusive.acquire(timeout=0.2)
        answers.append(free)
        if free:
            exclusive.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


def every(stride: int, number: int) -> Iterator[int]:
    """Numbers of lines, beginning within the first stride at another one for each number."""
    yield from range(1 + number % stride, number + 1, stride)
