"""Models of which types alone say that each example is computed by itself: chains of PyTorch's own modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.modules.module as module_code
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from curvlinops_plus.layer.rule_registry import RULES
from curvlinops_plus.risk.process_state import Uncopied
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk


def known_chain(risk: EmpiricalRisk, recorder: Recorder, batch: Batch) -> Sequence[Any] | None:
    """The hooked modules of a model made of PyTorch's own, one after the other, with examples in front; else None.

    If their calls were recorded, see `are_calls_of`, nothing is left to compare with autograd: no module mixes examples
    or draws numbers, each is called once, and the rules of those with parameters are this package's. Nor has its graph
    to be walked through: nothing but the layers reads their parameters, and all that is above the first one's output is
    below the model's. Nothing is remembered either: types, methods, hooks and options of all modules are looked at in
    every batch; a pass doesn't change them. Any doubt is None, as a module of another type, or an axis of examples or
    an output that the user names.

    Args:
        risk: Model and options.
        recorder: Which records the pass.
        batch: The batch.
    """
    X, options = batch.X, risk.options
    if type(X) is not Tensor or X.layout != torch.strided or not X.ndim or X.shape[0] != batch.num_examples:
        return None
    if X.grad_fn is not None:  # the batch itself may be computed from the parameters
        return None
    if options.output or options.example_axis or options.example_of_row or _is_watched():
        return None
    return _hooked_in_chain(risk.model, X.ndim, recorder)


def _hooked_in_chain(model: Any, axes: int, recorder: Recorder) -> list[Any] | None:
    """The modules of a chain on which the recorder has hooks, in the order in which they run; None if it is no chain.

    Args:
        model: The model.
        axes: How many axes its input has.
        recorder: The recorder.
    """
    hooked: list[Any] = []
    kinds: dict[type, type] = {}
    waiting = [model]  # of nested sequences a sequence before its parts, in their order
    while waiting:
        module = waiting.pop()
        kind = type(module) if type(module) in _AXES else _kind(module)
        if kind not in _AXES or not _is_plain(module, kind, recorder):
            return None
        axes = _AXES[kind](module, axes)
        if not axes:
            return None
        kinds[type(module)] = kind
        if kind is nn.Sequential:
            waiting.extend(reversed(module._modules.values()))
        if module._forward_hooks and Uncopied in map(type, module._forward_hooks.values()):
            hooked.append(module)
    return hooked if _have_own_methods(kinds) else None


def _have_own_methods(kinds: Mapping[type, type]) -> bool:
    """Whether types have the methods of PyTorch's types that they are, or are taken for."""
    for kind, known in kinds.items():
        get, methods = _METHODS[known]
        if get(kind) != methods:
            return False
    return True


def are_calls_of(hooked: Sequence[Any] | None, recorder: Recorder) -> bool:
    """Whether recorded calls are those of a chain's hooked modules, one of each layer, which shares nothing then."""
    calls = recorder.calls
    if hooked is None or not len(recorder.layers) == len(calls) == len(hooked):
        return False
    for module, recorded in zip(hooked, calls):
        use = recorded.call.use
        if use.module is not module or use.function is not None or use.rule is not _OWN_RULES.get(type(module)):
            return False
    return True


def _kind(module: Any) -> type:
    """The type of a module: `nn.Sequential` also for a subclass that has nothing but a constructor of its own."""
    kind = type(module)
    if kind.__base__ is not nn.Sequential:
        return kind
    own = {name for name, value in vars(kind).items() if callable(value) or hasattr(value, "__get__")}
    return nn.Sequential if own <= {"__init__"} else kind


def _is_watched() -> bool:
    """Whether somebody else's code sees the calls of all modules or functions, and may change their results."""
    return bool(
        module_code._global_forward_hooks
        or module_code._global_forward_pre_hooks
        or module_code._global_backward_hooks
        or module_code._global_backward_pre_hooks
        or _get_current_function_mode()
        or _get_current_dispatch_mode()
    )


def _is_plain(module: Any, kind: type, recorder: Recorder) -> bool:
    """Whether a module does what PyTorch's type does: no hooks but the recorder's and those that only read, no methods
    or tensors of its own.
    """
    others = module._backward_hooks, module._backward_pre_hooks, module._compiled_call_impl
    if any(others) or not _hidden(kind).isdisjoint(module.__dict__):
        return False
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        records = type(hook) is Uncopied and getattr(hook.func, "__self__", None) is recorder
        if not records and not hasattr(hook, "only_reads"):
            return False
    for held in (module._parameters, module._buffers):
        for t in held.values() if held else ():
            # A subclass, a hook that changes its gradient, or a tensor that is computed, as from parameters.
            if t is not None and (type(t) not in _TENSORS or t._backward_hooks or t.grad_fn is not None):
                return False
    return True


@cache
def _hidden(kind: type[nn.Module]) -> frozenset[str]:
    """What attributes of a module would hide: methods, parameters and buffers."""
    methods = (name for base in kind.__mro__ for name, value in vars(base).items() if callable(value))
    return frozenset({*methods, "weight", "bias", "running_mean", "running_var"})


def _same(module: Any, axes: int) -> int:
    return axes


def _linear(module: Any, axes: int) -> int:
    return axes if axes > 1 and module.weight.ndim == 2 else 0


def _on_places(number: int, module: Any, axes: int) -> int:
    """Convolutions and pools; without an axis of examples the first one is that of channels."""
    known = axes == number + 2 and not getattr(module, "return_indices", False)
    weight = module._parameters.get("weight")
    return axes if known and (weight is None or weight.ndim == axes) else 0


def _norm_of_batch(module: Any, axes: int) -> int:
    return axes if axes > 1 and not module.training and module.running_mean is not None else 0


def _norm_of_example(module: Any, axes: int) -> int:
    return axes if axes > len(getattr(module, "normalized_shape", (1,))) else 0


def _dropout(module: Any, axes: int) -> int:
    return 0 if module.training and module.p else axes


def _flatten(module: Any, axes: int) -> int:
    first, last = module.start_dim, module.end_dim % axes if -axes <= module.end_dim < axes else 0
    return axes - (last - first) if 1 <= first <= last else 0


#: Of each type how many axes come out of how many; 0 if examples may not be on the first one, or not by themselves.
_AXES: dict[type, Callable[[Any, int], int]] = {
    nn.Sequential: _same,
    nn.Linear: _linear,
    nn.Flatten: _flatten,
    nn.Dropout: _dropout,
    nn.LayerNorm: _norm_of_example,
    nn.GroupNorm: _norm_of_example,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _norm_of_batch),
    **dict.fromkeys((nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU), _same),
    **dict.fromkeys((nn.Mish, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink), _same),
    **dict.fromkeys((nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Threshold), _same),
}
for _number, _kinds in {
    1: (nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    2: (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    3: (nn.Conv3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}.items():
    _AXES |= dict.fromkeys(_kinds, partial(_on_places, _number))

_CALLED = ("forward", "__call__", "_call_impl", "__getattr__", "__iter__", "_conv_forward", "_check_input_dim")
_GETTERS = {kind: attrgetter(*(name for name in _CALLED if hasattr(kind, name))) for kind in _AXES}
_METHODS = {kind: (get, get(kind)) for kind, get in _GETTERS.items()}
_OWN_RULES = {kind: RULES[kind] for kind in _AXES if kind in RULES}
_TENSORS = {Tensor, nn.Parameter}
