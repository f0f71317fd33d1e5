"""In which precision products are computed: not under the caller's autocast, and not with TF32.

A matrix does not depend on where it is asked for. So what this package computes by itself is in
`plain_mode`, or in `full_precision` where derivatives are taken; passes of the user's model inside
of these are in `users_tf32`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from curvlinops_plus.contexts import Endings, GradMode, entered


def plain_mode(device: str) -> AbstractContextManager[Any]:
    """Context without autograd, autocast and TF32, whatever the modes around it: sums are the same
    wherever they are made.

    Args:
        device: Type of the device.
    """
    # Each context costs as much as a small product does.
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device):
        return _plain_mode(device)
    if device in _GPUS and _tf32.is_on():
        return _plain_mode(device)
    return GradMode(False) if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _plain_mode(device: str) -> Iterator[None]:
    with torch.inference_mode(False), GradMode(False), full_precision(device):
        yield


def full_precision(device: str) -> AbstractContextManager[Any]:
    """Context in which products keep their precision, whatever the caller's autocast says, and on
    a GPU whatever PyTorch's switches of TF32 say.

    Args:
        device: Type of the device.
    """
    if torch.compiler.is_compiling():
        enabled = torch.is_autocast_enabled(device)
        return torch.autocast(device, enabled=False) if enabled else nullcontext()
    if device in _GPUS and _tf32.is_on():
        return _without_tf32(device)
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return entered(torch.autocast(device, enabled=False))


@contextmanager
def _without_tf32(device: str) -> Iterator[None]:
    with Endings() as endings:
        switch = _users_switch()
        endings.surely(_tf32.turn, switch.on, _tf32.users)
        _tf32.turn(switch.off, switch)
        if torch.is_autocast_enabled(device):
            endings.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def users_tf32() -> Iterator[None]:
    """Context for passes of the user's model: TF32 as the user wants it, also inside of
    `full_precision`.
    """
    switch = _tf32.users
    if switch is None:
        yield
        return
    with Endings() as endings:
        endings.surely(_tf32.turn, switch.off, switch)
        _tf32.turn(switch.on, None)
        yield


def has_short_products(device: str) -> bool:
    """Whether the user lets products or convolutions of float32 numbers round their operands, to
    TF32 or bfloat16.
    """
    if device not in _GPUS:
        if not _HAS_PRECISIONS:
            return torch.get_float32_matmul_precision() != "highest"
        return torch.backends.mkldnn.matmul.fp32_precision not in _FULL  # pyright: ignore
    if _tf32.users is not None or _tf32.is_on():
        return True
    if not _HAS_PRECISIONS:
        return torch.backends.cudnn.allow_tf32
    return torch.backends.cudnn.conv.fp32_precision not in _FULL  # pyright: ignore


# Since PyTorch 2.9 each kind of operation has a switch. Older ones can't be read where somebody has
# set these to something else.
_HAS_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")
_FULL = ("ieee", "none")
_GPUS = ("cuda",)


class _Switch(NamedTuple):
    """How TF32 is turned off, and on again as the user has it."""

    off: Callable[[], None]
    on: Callable[[], None]


class _TF32(threading.local):
    """TF32 in products of matrices, which PyTorch has one switch for in all threads.

    Attributes:
        users: While this thread has turned it off.
    """

    users: _Switch | None = None

    def is_on(self) -> bool:
        """Whether products of float32 matrices may use TF32 now."""
        if _HAS_PRECISIONS:
            return torch.backends.cuda.matmul.fp32_precision not in _FULL  # pyright: ignore
        return torch.get_float32_matmul_precision() != "highest"

    def turn(self, switch: Callable[[], None], users: _Switch | None) -> None:
        """Turn it on or off."""
        self.users = users
        switch()


_tf32 = _TF32()


def _users_switch() -> _Switch:
    """The switch that the user has turned on."""
    products: Any = torch.backends.cuda.matmul
    older = "highest"
    with suppress(RuntimeError):  # set to something else than the newer switch
        older = torch.get_float32_matmul_precision()
    if older != "highest":
        # The one of all products would turn on those of the CPU, too.
        allow = partial(setattr, products, "allow_tf32")
        turn_on = partial(allow, True)
        if older == "medium":
            turn_on = partial(torch.set_float32_matmul_precision, older)
        return _Switch(partial(allow, False), turn_on)
    precision = products.fp32_precision
    # Where nobody has set it, a more general switch decides, also afterwards.
    if precision == torch.backends.cudnn.fp32_precision:  # pyright: ignore
        precision = "none"
    set_newer = partial(setattr, products, "fp32_precision")
    return _Switch(partial(set_newer, "ieee"), partial(set_newer, precision))
