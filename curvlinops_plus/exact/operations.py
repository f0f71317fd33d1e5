"""Operations of a forward pass that are replaced by others, which have all derivatives, of the same values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import embedding, embedding_bag, group_norm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.modules import hookable_modules
from curvlinops_plus.risk.process_state import own_calls

Replaced = dict[Any, Callable[..., Tensor | None]]

#: How many forward passes of this thread are watched at the moment.
_watched = threading.local()


class Operations(TorchFunctionMode):
    """While active, observes every operation, and replaces those whose derivatives are missing or wrong.

    These are weight norm, of whose fused kernel the second derivative is wrong; bags of embeddings, which have neither
    forward mode nor a second derivative; and tables with `padding_idx`, which forward mode ignores. Of two more only
    the second derivative is wrong: of group norm, for several vectors at once, and of PReLU at zero.

    Args:
        twice: Whether what comes out is differentiated twice.
        also: More functions, and what stands for them; None where they return it.

    Attributes:
        largest: Numbers in the largest result.
        numbers: Numbers in all results.
        replaced: Whether an operation was replaced: then all forward passes must be watched.
        stopped: Whether a tangent came out of an operation that keeps no gradient: forward mode ignores `no_grad`.
        hooked: Whether a hook was registered on a tensor, or may have been on a node of the graph.
    """

    def __init__(self, twice: bool = False, also: Replaced | None = None) -> None:
        super().__init__()
        self._table = (_REPLACED | _REPLACED_TWICE if twice else _REPLACED) | (also or {})
        self.largest, self.numbers, self.replaced, self.stopped, self.hooked = 1, 0, False, False, False

    def __enter__(self) -> Operations:
        _watched.depth = getattr(_watched, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _watched.depth -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._table[func](*args, **kwargs) if func in self._table else None
        self.replaced |= found is not None
        self.hooked |= func in _OF_HOOKS
        out = func(*args, **kwargs) if found is None else found
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.largest, self.numbers = max(self.largest, t.numel()), self.numbers + t.numel()
                if not torch.is_grad_enabled() and forward_ad.unpack_dual(t).tangent is not None:
                    self.stopped = True
        return out


class Stopped(TorchFunctionMode):
    """What forward mode takes no notice of. Cost: about a microsecond for each operation.

    Attributes:
        found: Whether an operation keeps no gradient of an input that has one, as under `torch.no_grad()`.
        hooked: Whether a hook was registered on a tensor, or may have been on a node of the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found, self.hooked = False, False
        self._off = False  # by the model's code; inside of autograd's own functions gradients are off, too

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch._C._set_grad_enabled:
            self._off = not args[0]
        elif func in _OF_HOOKS:
            self.hooked = True
        elif self._off and not self.found and not torch.is_grad_enabled():
            self.found = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
        return out


@contextmanager
def replaced_again(model: nn.Module, twice: bool = False, also: Replaced | None = None) -> Iterator[None]:
    """Context in which modules that run in a backward pass, as activation checkpointing does, replace the same.

    Args:
        model: The model.
        twice: As for `Operations`; as is `also`.
    """
    running: list[tuple[nn.Module, Operations]] = []

    def start(module: nn.Module, args: Any) -> None:
        if not getattr(_watched, "depth", 0):
            running.append((module, Operations(twice, also).__enter__()))

    def end(module: nn.Module, args: Any, out: Any) -> None:
        if running and running[-1][0] is module:
            running.pop()[1].__exit__(None, None, None)

    ours, over = own_calls(start), own_calls(end)  # modes belong to a thread
    handles = []
    for _, module in hookable_modules(model):
        handles.append(module.register_forward_pre_hook(ours, prepend=True))
        handles.append(module.register_forward_hook(over, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def checkpoints_in_words() -> Iterator[None]:
    """Context that says why activation checkpointing found other tensors when it ran a part of the model again.

    Raises:
        UnsupportedError: Instead of PyTorch's error.
    """
    try:
        yield
    except CheckpointError as error:
        raise UnsupportedError(
            "Activation checkpointing ran a part of the model again in the backward pass, and did not find the same: "
            f"{str(error).splitlines()[0]} Does it checkpoint a function that calls embedding, embedding_bag, "
            "group_norm or prelu itself? Their derivatives are computed by other operations; make them modules, or "
            "call that part without checkpointing."
        ) from error


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / |v|`, with a norm for each entry of the axis, or a single one if that is -1."""
    others = [axis for axis in range(v.ndim) if dim == -1 or axis != dim % v.ndim]
    return v * (g / v.square().sum(others, keepdim=dim != -1).sqrt())


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """A table whose row `padding_idx` is constant, and whose gradients are derivatives; None if they are anyway."""
    if padding_idx is None and not scale_grad_by_freq:
        return None
    out = embedding(input, weight, None, max_norm, norm_type, False, sparse)
    if padding_idx is None:
        return out
    return torch.where((input == padding_idx % len(weight))[..., None], out.detach(), out)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """Rows of a table, summed or averaged over each bag, or their largest entries; None for what is no tensor."""
    if input.is_nested or (input.ndim == 2 and offsets is not None):
        return None
    given = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx}
    values = embedding_bag(input, weight.detach(), offsets, **given) if mode == "max" else None  # refuses what is wrong
    if input.ndim == 2:
        B, L = input.shape
        bag = torch.arange(B, device=input.device).repeat_interleave(L)
    else:
        assert offsets is not None
        starts = offsets[:-1] if include_last_offset else offsets
        B = len(starts)
        place = torch.arange(len(input), device=input.device)
        bag = torch.bucketize(place, starts, right=True) - 1
    tokens = input.flatten()
    kept = torch.ones_like(tokens, dtype=torch.bool)
    if padding_idx is not None:
        kept = tokens != padding_idx % len(weight)
    tokens, bag = tokens[kept], bag[kept]
    rows = weight[tokens]  # [L, d]
    out = rows.new_zeros(B, weight.shape[1])
    if values is not None:
        # The first row of a bag that has the largest entry, in each column.
        order = torch.arange(len(tokens), device=input.device)[:, None]
        hit = rows.detach() == values[bag]
        first = torch.full((B, weight.shape[1]), len(tokens), device=input.device)
        first = first.scatter_reduce(0, bag[:, None].expand_as(hit), torch.where(hit, order, len(tokens)), "amin")
        chosen = rows * (order == first[bag])
        return out.index_add(0, bag, chosen)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.flatten()[kept][:, None]
    out = out.index_add(0, bag, rows)
    if mode == "mean":
        out = out / torch.bincount(bag, minlength=B).clamp(min=1)[:, None]
    return out


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor | None:
    """Channels in groups, each of mean zero and variance one; None for what PyTorch refuses."""
    if input.ndim < 2 or not input.numel() or num_groups < 1 or input.shape[1] % num_groups:
        return None
    of_channels = (1, -1, *[1] * (input.ndim - 2))
    wide = torch.promote_types(input.dtype, torch.float32)  # as the kernel computes
    rows = input.to(wide).reshape(len(input), num_groups, -1)
    rows = rows - rows.mean(-1, keepdim=True)
    out = (rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(input.shape)
    out = out if weight is None else out * weight.view(of_channels)
    out = out if bias is None else out + bias.view(of_channels)
    cast = torch.is_autocast_enabled(input.device.type)  # to what, depends on the device
    return out.to(group_norm(input.detach()[:1], num_groups, weight, bias).dtype if cast else input.dtype)


def _prelu(input: Tensor, weight: Tensor) -> Tensor | None:
    """A slope for negative numbers, which is that at zero, too; None for what PyTorch refuses or casts."""
    if weight.numel() not in (1, *input.shape[1:2]) or weight.dtype != input.dtype:
        return None
    slope = weight.view(1, -1, *[1] * (input.ndim - 2)) if input.ndim > 1 else weight.view([1] * input.ndim)
    return torch.where(input > 0, input, slope * input)


#: Without them nobody has a hook in a graph: its nodes are found by tensors.
_OF_HOOKS = frozenset({Tensor.register_hook, vars(torch._C.TensorBase)["grad_fn"].__get__})
_REPLACED: Replaced = {
    torch._weight_norm: _weight_norm,  # pyright: ignore[reportPrivateImportUsage]
    embedding: _embedding,
    embedding_bag: _embedding_bag,
}
_REPLACED_TWICE: Replaced = {
    group_norm: _group_norm,
    torch.group_norm: _group_norm,
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
}
