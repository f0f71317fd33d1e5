"""What is the user's stays while a risk is evaluated: modules, buffers, random numbers, and
switches of the process.

The random generators, the options of compilers and kernels, the filters of warnings and the modules
themselves are seen by every thread. So one thread at a time evaluates risks; others wait, and each
finds everything as it left it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.backends import mha

from curvlinops_plus.contexts import Endings
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.embedding import refuse_renormalization
from curvlinops_plus.layer.kept import (
    drop_new_tensors,
    keepers_of_graphs,
    kept_attributes,
    parts_kept,
)
from curvlinops_plus.layer.replay import as_parameters
from curvlinops_plus.linalg.precision import has_short_products, users_tf32
from curvlinops_plus.random_state import RandomState

Inputs = ParamSpec("Inputs")
T = TypeVar("T")

# Options of embeddings that say nothing about the function they compute.
_AS_FUNCTION = {"sparse": False, "scale_grad_by_freq": False}


@contextmanager
def preserve_state(model: nn.Module, data: Any, compiled: bool = False) -> Iterator[None]:
    """Keep the global random state, the model's buffers and attributes and the data's generators,
    also on error.

    Even iterating a `DataLoader` draws from the global generator, and a forward pass in training
    mode moves running statistics. Cost: a copy of the buffers.

    Meanwhile embeddings run without `sparse` and `scale_grad_by_freq`, which only change `.grad`
    (the latter to what is no derivative), and `max_norm` is refused. Compiled modules run eagerly.
    And nothing runs under the caller's autocast: a matrix does not depend on where it is asked for.
    Autocast inside the model's forward is part of the model, and so is TF32.

    Recurrent layers run without cuDNN, which has no backward pass in evaluation mode and no forward
    mode for them; so does the rest of such a model.

    Tensors that modules keep from one pass, as caches do, are dropped before the next one.

    One thread at a time is in here; others wait.

    Args:
        model: The model.
        data: The data.
        compiled: Whether the model only runs in compiled functions, which take copies of buffers
            and leave nothing behind: it is neither hooked nor given other buffers.

    Raises:
        UnsupportedError: If an embedding has a `max_norm`, or a module has kept a tensor whose
            graph is gone, or a CUDA graph is being captured.
    """
    modules = [*model.modules()]
    kinds = [
        p.device.type for module in modules for p in module._parameters.values() if p is not None
    ]
    for kind in {*kinds}:
        refuse_capture(kind)
    with Endings() as endings:
        endings.enter_context(exclusive)
        (unfused if compiled else eager).enter(endings)
        own_passes.enter(endings)
        for kind in filter(torch.is_autocast_enabled, {"cpu", *kinds}):
            endings.enter_context(torch.autocast(kind, enabled=False))
        endings.enter_context(users_tf32())
        if any(map(_is_fused, modules)):
            endings.surely(torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled())
            torch._C._set_cudnn_enabled(False)
        # Neither a list of batches nor a compiled function draws from other generators.
        fixed = compiled and type(data) in (list, tuple)
        state = RandomState.now(torch.device("cpu")) if fixed else RandomState.now()
        endings.surely(_Once(state.restore))
        sampler = getattr(data, "sampler", None)
        inner_sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None)
        for holder in (data, sampler, inner_sampler):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                endings.callback(generator.set_state, generator.get_state())
        with kept_attributes(modules) if compiled else kept_modules(modules):
            parts = [] if compiled else parts_kept(modules)
            if parts and not isinstance(model, torch.jit.ScriptModule):  # takes no hooks
                begin = own_calls(lambda module, args: drop_new_tensors(parts))
                endings.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
            for module in modules:
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                    refuse_renormalization(module)
                    vars(module).update(_AS_FUNCTION)
            try:
                yield
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                keepers = ", ".join(keepers_of_graphs(model)) or "A module or a cache of a method"
                raise UnsupportedError(
                    "The model reads a tensor with the graph of an earlier call, which is gone. "
                    f"{keepers} kept one, as a cache of eval mode does. Empty it before curvature "
                    "is computed: often model.train() and then model.eval() does."
                ) from error


def _is_fused(module: nn.Module) -> bool:
    """Whether cuDNN runs all steps of this layer at once."""
    if not isinstance(module, nn.RNNBase):
        return False
    return any(p.device.type in _CUDA for p in module.parameters())


_CUDA = ("cuda",)


def refuse_capture(device: str) -> None:
    """Refuse to compute while a CUDA graph is captured.

    Args:
        device: Type of the device.

    Raises:
        UnsupportedError: If one is.
    """
    if device in _CUDA and _is_capturing():
        raise UnsupportedError(
            "A CUDA graph is being captured. Replayed, a pass of curvature would draw the same "
            "random numbers each time and count its examples once. Capture forward and backward "
            "passes without it; call it, and the optimizer's step, outside of the capture."
        )


def _is_capturing() -> bool:
    runs = torch.backends.cuda.is_built() and torch.cuda.is_initialized()
    return runs and torch.cuda.is_current_stream_capturing()


class _Once:
    """A function that is called until it has ended once."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._has_ended = False

    def __call__(self) -> None:
        if not self._has_ended:
            self._function()
            self._has_ended = True


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Let all global generators go on afterwards from where they are now."""
    with Endings() as endings:
        endings.surely(RandomState.now().restore)
        yield


# -------------------------------------------------------------------------------------- the process
#: Lock of the thread that evaluates risks, as often as it likes.
exclusive = threading.RLock()


class _OwnPasses(threading.local):
    """Whether this thread's calls of models are this package's own, not the user's.

    Attributes:
        depth: How many contexts are open.
    """

    depth = 0

    def enter(self, endings: ExitStack) -> None:
        """They are, until the stack is left; then as before, whatever was left open inside."""
        endings.callback(setattr, self, "depth", self.depth)
        self.depth += 1


own_passes = _OwnPasses()


class _ProcessSwitch:
    """A switch of the process, which is off as long as anybody needs it, in any thread, and as
    before afterwards: the contexts need not be left in the opposite order.

    Args:
        turn_off: Called with a stack that turns it on again.
    """

    def __init__(self, turn_off: Callable[[ExitStack], None]) -> None:
        self._turn_off = turn_off
        self._users: set[Any] = set()
        self.is_on = False
        self._lock = threading.RLock()
        self._endings = ExitStack()

    def enter(self, endings: ExitStack) -> None:
        """Until the stack is left."""
        user = object()
        # Twice, since an interrupt may fall into the first.
        endings.callback(self.leave, user)
        endings.callback(self.leave, user)
        self.start(user)

    def start(self, user: Any) -> None:
        """Until this user leaves."""
        self._users.add(user)
        self._settle()

    def leave(self, user: Any) -> None:
        """A user needs it no more; one who has left may say so again."""
        self._users.discard(user)
        self._settle()

    def _settle(self) -> None:
        with Endings() as lock:
            lock.enter_context(self._lock)
            if self.is_on and not self._users:
                self._endings.close()
                self.is_on = False
            elif self._users and not self.is_on:
                self.is_on = True
                self._turn_off(self._endings)


def _unfuse(endings: ExitStack) -> None:
    endings.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
    mha.set_fastpath_enabled(False)


def _force_eager(endings: ExitStack) -> None:
    unfused.enter(endings)
    if "torch._dynamo" in sys.modules:
        endings.enter_context(torch.compiler.set_stance("force_eager"))


#: Transformers run without fused inference, which has no derivatives and calls no hooks.
unfused = _ProcessSwitch(_unfuse)
#: And compiled modules run eagerly: else no hooks fire.
eager = _ProcessSwitch(_force_eager)


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the warnings of `vmap` about operations that it takes in a loop: slower, and
    right.
    """
    with Endings() as endings:
        endings.enter_context(exclusive)  # all threads see the filters
        endings.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        yield


def untraced(function: Callable[Inputs, T]) -> Callable[Inputs, T]:
    """A function that `torch.compile` does not look into: around it, the graph of its caller is
    divided.

    PyTorch's own `torch.compiler.disable`, which loads the compiler: that takes a second. It is
    left out where nothing is compiled; the wrapper is part of what is compiled, or not, itself.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def called(*args: Inputs.args, **kwargs: Inputs.kwargs) -> T:
        call = disabled if torch.compiler.is_compiling() else function
        return call(*args, **kwargs)

    return called


# ------------------------------------------------------------------------------------------ modules
_forks = 0  # from the process that imported this one to the process of now


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def this_thread() -> int:
    """A number of the thread of now, which a forked process, such as a loader's worker, has not."""
    return threading.get_ident() | _forks << 64


def runs_for(thread: int) -> bool:
    """Whether code runs for a thread: in it, or in a backward pass.

    Autograd has threads of its own, where activation checkpointing calls modules once more.
    """
    return this_thread() == thread or torch._C._current_graph_task_id() != -1


class Uncopied(partial[Any]):
    """A hook of a module that copies and pickles of the module don't carry, and that changes no
    output.
    """

    only_reads = True

    def __reduce__(self) -> tuple[type[Uncopied], tuple[Callable[..., None]]]:
        return Uncopied, (_nothing,)


def _nothing(*args: Any) -> None:
    """What copies have in place of such a hook."""


def weak_hook(method: Callable[..., None], *first: Any) -> Uncopied:
    """A hook that holds its owner weakly, and does nothing when that is gone."""
    return Uncopied(_call_weakly, WeakMethod(method), *first)


@untraced  # what it does is not part of the model
def _call_weakly(method: WeakMethod[Any], *args: Any) -> None:
    if (function := method()) is not None:
        function(*args)


def own_calls(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that ignores calls of other threads, which may evaluate the model
    meanwhile.
    """
    thread = this_thread()
    return Uncopied(lambda *args, **kwargs: hook(*args, **kwargs) if runs_for(thread) else None)


class ReplacedTensors(dict[str, Any]):
    """The parameters or buffers of one module: those given to this thread, its own ones to all
    others.

    Args:
        replaced: What this thread sees.
        held: What the module has, which may have been replaced itself.
    """

    def __init__(self, replaced: Mapping[str, Any], held: dict[str, Any]) -> None:
        super().__init__(replaced)
        self.own: dict[str, Any] = getattr(held, "own", held)
        self.thread = this_thread()

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) if runs_for(self.thread) else self.own[name]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if runs_for(self.thread) else self.own.get(name, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return super().items() if runs_for(self.thread) else self.own.items()  # pyright: ignore[reportReturnType]

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return super().values() if runs_for(self.thread) else self.own.values()  # pyright: ignore[reportReturnType]

    # As `torch.func.functional_call` writes to them, in another thread.
    def __setitem__(self, name: str, t: Any) -> None:
        if runs_for(self.thread):
            super().__setitem__(name, t)
        else:
            self.own[name] = t

    def __delitem__(self, name: str) -> None:
        if runs_for(self.thread):
            super().__delitem__(name)
        else:
            del self.own[name]


#: Every module that holds a parameter, and the names in it and keys of those it holds.
Places = Sequence[tuple[nn.Module, Sequence[tuple[str, str]]]]


def parameter_places(modules: Iterable[nn.Module], params: Mapping[str, Tensor]) -> Places:
    """Where parameters are: a module may have two names, a parameter two modules."""
    key_of = {id(p): key for key, p in params.items()}
    places = []
    for module in modules:
        held = module._parameters.items()
        names = [(name, key_of[id(p)]) for name, p in held if id(p) in key_of]
        if names:
            places.append((module, names))
    return places


@contextmanager
def replaced_parameters(places: Places, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the modules have other parameters, by key; other threads see their own
    ones.
    """
    as_parameters(values.values())
    with Endings() as endings:
        for module, names in places:
            held = module._parameters
            replaced = {**held, **{name: values[key] for name, key in names}}
            endings.callback(vars(module).__setitem__, "_parameters", held)
            vars(module)["_parameters"] = ReplacedTensors(replaced, held)
        yield


@contextmanager
def kept_modules(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which modules have copies of their buffers; at the end they are, with attributes,
    as before.
    """
    copies = dict[int | None, Tensor | None]()  # a buffer may have two places
    with kept_attributes(modules):
        for module in modules:
            held = module._buffers
            # Scripted modules hold theirs in something else.
            if held and type(held) in (dict, ReplacedTensors):
                for b in held.values():
                    if b is not None and id(b) not in copies:
                        copies[id(b)] = b.detach().clone()
                replaced = {name: copies.get(id(b)) for name, b in held.items()}
                vars(module)["_buffers"] = ReplacedTensors(replaced, held)
        yield


# ------------------------------------------------------------------------------- equal but rounding
#: Largest relative difference that passes as rounding, by bytes of a number. Models in float64 may
#: have norms that compute in float32 whatever they get.
TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}
# What passes where products of float32 numbers may be computed from their first ten bits (TF32), or
# seven (bfloat16).
_SHORT_PRODUCTS = {"cuda": 5e-3, "cpu": 5e-2}


def with_short_products(tolerance: float, itemsize: int, device: torch.device) -> float:
    """A tolerance for numbers of so many bytes, or a larger one where the global switches shorten
    products.
    """
    if itemsize == 4 and has_short_products(device.type):
        return max(tolerance, _SHORT_PRODUCTS.get(device.type, tolerance))
    return tolerance


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Relative difference; 0 where it can't be told because a number is not finite."""
    # Without copies where it goes: large numbers have squares beyond float32.
    widest = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    for dtype in (widest, torch.float64):
        reference = b.to(dtype)
        norms = map(torch.linalg.vector_norm, (reference, a.to(dtype) - reference))
        size, difference = torch.stack([*norms]).tolist()
        if math.isfinite(size) and math.isfinite(difference):
            return difference / (size or 1.0)
    return 0.0


def training_modules(model: nn.Module) -> str:
    """Names of modules whose forward pass in training mode is random or depends on the batch, "" if
    there are none.

    Recurrent networks and attention drop out by themselves, without a module inside.

    Example:
        >>> lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.1)
        >>> training_modules(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), lstm))
        "'1' (Dropout), '2' (LSTM)"
    """

    def differs(m: Any) -> bool:
        if isinstance(m, nn.modules.dropout._DropoutNd):
            return m.p > 0
        drops_between_layers = isinstance(m, nn.RNNBase) and m.num_layers > 1
        if drops_between_layers or isinstance(m, nn.MultiheadAttention):
            return m.dropout > 0
        return isinstance(m, (nn.modules.batchnorm._BatchNorm, nn.RReLU))

    modules = [(name, m) for name, m in model.named_modules() if m.training and differs(m)]
    return ", ".join(f"{name!r} ({type(m).__name__})" for name, m in modules)
