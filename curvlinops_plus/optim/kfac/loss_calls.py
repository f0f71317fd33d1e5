"""Calls of loss functions in training loops: `F.cross_entropy(output, y)`, and what PyTorch's loss
modules call.

They are heard by a function mode. It begins in one hook and ends in another, between which users
enter and leave modes of their own, always at the top of the thread's stack. So it lies at the
bottom of it, above PyTorch's mode of a default device, where nobody else takes it away: who leaves
a mode takes their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.nn._reduction import legacy_get_string
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext

from curvlinops_plus.contexts import Endings

#: Losses whose forward calls a function with output, target and the attributes of these names.
_FUNCTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.HuberLoss: F.huber_loss,
    nn.KLDivLoss: F.kl_div,
    nn.L1Loss: F.l1_loss,
    nn.MSELoss: F.mse_loss,
    nn.NLLLoss: F.nll_loss,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
}
_HEARD = tuple(_FUNCTIONS.values())  # which the compiler of PyTorch 2.6 reads, unlike sets


def function_of_loss(loss: Any) -> Callable[..., Any] | None:
    """The function that a loss calls with its attributes as options; None of losses of the user's.

    Example:
        >>> function_of_loss(nn.MSELoss()) is F.mse_loss
        True
    """
    for kind in type(loss).__mro__:
        if kind in _FUNCTIONS:
            is_its_own = type(loss).forward is kind.forward and "forward" not in vars(loss)
            return _FUNCTIONS[kind] if is_its_own else None
    return None


class LossCall(NamedTuple):
    """A call of a loss function."""

    function: Callable[..., Any]
    f: Any
    y: Any
    options: Mapping[str, Any]

    @classmethod
    def read(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LossCall:
        """A call with these arguments, which the function has taken."""
        bound = _signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        f, y, *_ = bound.arguments.values()
        options = {**bound.arguments}
        del options["input"], options["target"]
        averages = options.pop("size_average", None)
        reduces = options.pop("reduce", None)
        if averages is not None or reduces is not None:
            options["reduction"] = legacy_get_string(averages, reduces, emit_warning=False)
        return cls(function, f, y, options)

    def problem(self, loss: Any) -> str:
        """In what the call differs from one by a loss, as the beginning of a sentence; "" if in
        nothing.

        Example:
            >>> x = torch.zeros(2, 3)
            >>> call = LossCall.read(F.huber_loss, (x, x), {"delta": 2.0})
            >>> call.problem(nn.HuberLoss())
            'huber_loss was called with delta=2.0, and not as HuberLoss with delta=1.0'
            >>> call.problem(nn.HuberLoss(delta=2.0))
            ''
        """
        name = self.function.__name__
        title = type(loss).__name__
        if function_of_loss(loss) is not self.function:
            return f"{name} was called, and not {title}"
        defaults = _signature(self.function).parameters
        came = []
        expected = []
        for option, value in self.options.items():
            of_loss = getattr(loss, option, defaults[option].default)
            if not _are_equal(value, of_loss):
                came.append(f"{option}={_option_in_words(value)}")
                expected.append(f"{option}={_option_in_words(of_loss)}")
        if not came:
            return ""
        as_loss = f"{title} with {', '.join(expected)}"
        return f"{name} was called with {', '.join(came)}, and not as {as_loss}"


@lru_cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _are_equal(one: Any, two: Any) -> bool:
    """Whether two options are; tensors that are not the same object are compared by their
    numbers.
    """
    if isinstance(one, Tensor) and isinstance(two, Tensor) and one is not two:
        return (one.shape, one.device) == (two.shape, two.device) and torch.equal(one, two)
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return one is two
    return bool(one == two)


def _option_in_words(option: Any) -> str:
    """An option in a message."""
    return f"a tensor {list(option.shape)}" if isinstance(option, Tensor) else repr(option)


class LossFunctions(TorchFunctionMode):
    """While watching, shows the calls of loss functions of a thread. Other functions take two to
    four microseconds longer meanwhile.

    Args:
        hear: A method, whose object is held weakly, that is called with function, arguments,
            keywords and result, and says whether the watch is over.

    Example:
        >>> class Listener:
        ...     def hear(self, function, args, kwargs, value):
        ...         self.heard = function, value
        ...         return True
        >>> listener = Listener()
        >>> LossFunctions(listener.hear).begin()
        >>> value = nn.MSELoss()(torch.ones(2), torch.zeros(2))
        >>> listener.heard[0] is F.mse_loss, listener.heard[1] is value
        (True, True)
        >>> _len_torch_function_stack()
        0
    """

    def __init__(self, hear: Callable[..., bool]) -> None:
        super().__init__()
        self._hear = WeakMethod(hear)
        self._modes: list[Any] = []  # under which the model has run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        value = func(*args, **kwargs)
        # What is compiled has no calls. (The compiler is asked of losses only: in a mode its
        # answer to that may take the place of another result, as PyTorch 2.6 to 2.14 have it.)
        is_heard = func in _HEARD and not torch.compiler.is_compiling()
        if is_heard and self._is_over(func, args, kwargs, value):
            # PyTorch has taken this mode off the stack for the call, and puts it back afterwards:
            # it can't leave yet. The keywords of the call are dropped after that, and with them
            # what they hold ends.
            kwargs["watch"] = endings = Endings()
            endings.callback(self.end)
        return value

    def _is_over(self, *call: Any) -> bool:
        """Show a call; says whether the watch is over.

        In it PyTorch has taken the modes above this one off the stack. Passes of our own run under
        those of the user's pass, such as a default device.
        """
        hear = self._hear()
        if hear is None:
            return True
        modes = _get_current_function_mode_stack()
        _replace_stack(self._modes)
        try:
            return hear(*call)
        finally:
            _replace_stack(modes)

    def begin(self) -> None:
        """Watch the functions of this thread."""
        self.end()
        modes = _get_current_function_mode_stack()
        self._modes = modes
        # `torch.set_default_device` wants its mode at the bottom; `with torch.device(...)` has one
        # that is as any other, and was never entered.
        lowest = modes and isinstance(modes[0], DeviceContext) and hasattr(modes[0], "old_device")
        place = 1 if lowest else 0
        _replace_stack([*modes[:place], self, *modes[place:]])

    def end(self) -> None:
        """Watch them no more, if it did."""
        if _len_torch_function_stack():
            modes = _get_current_function_mode_stack()
            _replace_stack([mode for mode in modes if mode is not self])
        self._modes = []


def _replace_stack(modes: list[Any]) -> None:
    """Make these the modes of this thread, the lowest first."""
    while _len_torch_function_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
