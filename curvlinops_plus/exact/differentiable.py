"""Derivatives that PyTorch lacks or has wrong: by other operations, or refused by name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, embedding_bag, group_norm
from torch.overrides import TorchFunctionMode

from curvlinops_plus.contexts import Endings
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import gradients_of, postorder
from curvlinops_plus.risk.preserve import preserve_state

_NAME = "_weight_norm"
_FUSED_WEIGHT_NORM: Any = getattr(torch, _NAME)
_MISSING = re.compile(
    r"derivative for '?(?:aten::)?_*(\w+?)(?:_dense)?(?:_backward)?'? is not implemented"
)


@cache
def load_forward_mode() -> None:
    """Import PyTorch's rules of forward mode, which it does by itself in the first product, with
    warnings about itself that tell the user nothing.
    """
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        import_module("torch._decomp.decompositions_for_jvp")


@contextmanager
def differentiable(risk: EmpiricalRisk, compiled: bool = False) -> Iterator[None]:
    """Context in which passes over the data can be differentiated in every mode, whatever the
    caller's modes are.

    Afterwards the state of model and data is as before, see `preserve_state`. Attention runs by
    plain operations, whose fused kernels have neither forward mode nor second derivatives, and
    compiled modules run eagerly.

    Args:
        risk: The risk.
        compiled: Whether products run in compiled functions of this package.

    Raises:
        UnsupportedError: Naming an operation that can't be differentiated twice, in place of
            PyTorch's error.
    """
    with (
        Endings() as endings,
        preserve_state(risk.model, risk.data, compiled),
        torch.inference_mode(False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        # The compiler does not ask a mode about weight norm.
        endings.callback(setattr, torch, _NAME, getattr(torch, _NAME))
        setattr(torch, _NAME, _weight_norm if compiled else _FUSED_WEIGHT_NORM)
        try:
            yield
        except RuntimeError as error:
            missing = _MISSING.search(str(error))
            if missing is None:
                raise
            raise UnsupportedError(
                f"The model or the loss uses {missing[1]}, which PyTorch can't differentiate "
                "twice. Write it with operations that it can (cdist as (x[:, None] - "
                "y).norm(dim=-1), attention as softmax(q kᵀ) v), or use an operator that goes back "
                "once, as KFACLinearOperator."
            ) from error


class DerivativeFixes(TorchFunctionMode):
    """While active, replaces three operations by others of the same values, as PyTorch has wrong
    derivatives of them or none.

    Of weight norm's fused kernel the second derivative is wrong; forward mode ignores the
    `padding_idx` of tables, and their gradients by `scale_grad_by_freq` are no derivatives; bags
    have neither forward mode nor second derivatives.

    Attributes:
        any: Whether it has replaced an operation.
        group_norm: Whether it has seen group norm, whose second derivatives of several columns at
            once are wrong.
    """

    any = False
    group_norm = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _FUSED_WEIGHT_NORM:
            self.any = True
            return _weight_norm(*args, **kwargs)
        if func is embedding:
            return self._embedding(*args, **kwargs)
        if func is embedding_bag and kwargs.get("max_norm", (*args, *[None] * 3)[3]) is None:
            self.any = True
            return _bags(*args, **kwargs)
        self.group_norm |= func is group_norm or func is torch.group_norm
        return func(*args, **kwargs)

    def _embedding(
        self,
        index: Tensor,
        table: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """The rows of a table, of which that of `padding_idx` is constant."""
        self.any |= padding_idx is not None or scale_grad_by_freq
        rows = embedding(index, table, None, max_norm, norm_type, False, sparse)
        if padding_idx is None:
            return rows
        is_padding = index == padding_idx % len(table)
        return torch.where(is_padding[..., None], rows.detach(), rows)


def _bags(
    index: Tensor,
    table: Tensor,
    offsets: Tensor | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sums, means or maxima of rows of a table, `[bags, d]`, without those of `padding_idx`; of an
    empty bag zeros.
    """
    if offsets is None:
        offsets = torch.arange(0, index.numel(), index.shape[1], device=index.device)
        index = index.flatten()
    elif include_last_offset:
        offsets = offsets[:-1]
    if mode == "max":
        options = (False, 2, False, None, False, padding_idx)
        _, _, sizes, largest = torch.embedding_bag(table.detach(), index, offsets, *options)
        return torch.where(sizes[:, None] > 0, table.gather(0, largest.long()), 0)
    places = torch.arange(len(index), device=index.device)
    bag = torch.searchsorted(offsets.long(), places, right=True) - 1
    counts = torch.ones_like(index, dtype=table.dtype)
    if padding_idx is not None:
        counts = (index != padding_idx % len(table)).to(table.dtype)
    factors = counts if per_sample_weights is None else counts * per_sample_weights.flatten()
    zeros = table.new_zeros(len(offsets), table.shape[1])
    sums = zeros.index_add(0, bag, embedding(index, table) * factors[:, None])
    if mode == "sum":
        return sums
    return sums / zeros[:, 0].index_add(0, bag, counts).clamp(min=1)[:, None]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / |v|`, with a norm for each entry of the axis, or a single one if that is -1."""
    if dim == -1:
        return v * (g / v.square().sum().sqrt())
    summed = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    return v * (g / v.square().sum(summed, keepdim=True).sqrt())


class NotTwiceDifferentiable(UnsupportedError):
    """A model that can't be differentiated twice."""


def is_once_differentiable(error: RuntimeError) -> bool:
    """Whether an error is about a second derivative that is missing."""
    return isinstance(error, NotTwiceDifferentiable) or bool(_MISSING.search(str(error)))


def gradients_with_graph(
    outputs: Sequence[Tensor], inputs: Sequence[Any], sent: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients that are to be differentiated, of which autograd takes none for a constant that is
    none.

    It does so where an autograd function computes them without a graph, under `torch.no_grad()` as
    those that integrate by the adjoint method, and under `once_differentiable`: that leaves a node
    that raises in `backward()`, and is skipped by `torch.autograd.grad`.

    Args:
        sent: Vectors for the outputs, which require a gradient: else there is no such node.

    Raises:
        UnsupportedError: Naming the functions.

    Cost: two walks, through the graph of the outputs and that of the gradients.
    """
    without_graph: dict[str, None] = {}
    once: dict[str, None] = {}
    with Endings() as endings:
        for node in postorder(outputs):
            function = getattr(node, "_forward_cls", None)
            if function is None:
                continue
            name = function.__qualname__
            if hasattr(function.backward, "__wrapped__"):
                once[name] = None
            handle = node.register_hook(partial(_look_for_constants, without_graph, name))
            endings.callback(handle.remove)
        gradients = gradients_of(outputs, inputs, sent, True, create_graph=True)
    advice = (
        "Write its backward pass with operations of PyTorch, or use an operator that goes back "
        "once, as KFACLinearOperator."
    )
    if without_graph:
        raise NotTwiceDifferentiable(
            "The model or the loss uses a function whose backward pass computes without a graph, "
            f"as under torch.no_grad(), and has no second derivative: {', '.join(without_graph)}. "
            f"{advice} Of solvers by the adjoint method take the one that is differentiated as it "
            "is, as `odeint` instead of `odeint_adjoint`."
        )
    is_once = any(
        node.name() == "torch::autograd::Error"
        for node in postorder([g for g in gradients if g is not None])
    )
    if is_once:
        names = f": {', '.join(once)}" if once else ""
        raise NotTwiceDifferentiable(
            "The model or the loss uses a function that can be differentiated once, and has no "
            f"second derivative (`once_differentiable`){names}. {advice}"
        )
    return gradients


def _look_for_constants(
    names: dict[str, None],
    name: str,
    gradients: Sequence[Tensor | None],
    sent: Sequence[Tensor | None],
) -> None:
    """Note the name of a function whose gradients don't depend on what was sent back; zeros may be
    constants.
    """
    if any(g is not None and g.requires_grad for g in sent):
        for g in gradients:
            if g is not None and not g.requires_grad and bool(g.any()):
                names[name] = None
