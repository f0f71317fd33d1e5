"""Backward passes through code of the user, which are linear only if that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.convolution import is_own_node
from curvlinops_plus.risk.autograd_graph import postorder


def is_by_hand(outputs: Sequence[Tensor], hooked: bool) -> bool:
    """Whether something else than PyTorch's own functions, which are linear, takes part in backward passes.

    Args:
        outputs: Tensors, with a graph.
        hooked: Whether a hook was registered on a tensor on the way to them.

    Cost: a walk through the graph.
    """
    return hooked or any(_is_python(node) and not is_own_node(node) for node, _ in _nodes(outputs))


def refuse_nonlinear(send: Callable[[float], Tensor], expected: Tensor, outputs: Sequence[Tensor], eps: float) -> None:
    """Refuse backward passes that leave something else of longer and shorter vectors than as much more and less.

    Args:
        send: What is left of a vector of so many times its length.
        expected: What should be left of the vector itself.
        outputs: Through whose graph it is sent.
        eps: Of the coarsest numbers among outputs and parameters.

    Raises:
        UnsupportedError: If they do; with float16 on the way, if somewhat longer ones do.
    """
    allowed, lengths = min(10 * eps**0.5, 0.1) * expected.norm(), (1.0, 2.0**30, 2.0**-30)
    if _meets_float16(outputs):  # which has no digits for shorter ones, and few for small numbers
        allowed = 0.1 * expected.norm() + torch.finfo(torch.float16).tiny * expected.numel() ** 0.5
        lengths = (1.0, 2.0**4)
    for length in lengths:  # powers of two change no digit
        away = (send(length) / length - expected).norm()
        if bool(away.isfinite() & (away > allowed)):  # in float16 it overflows
            raise UnsupportedError(
                "A backward pass through the model is not linear in the vector that is sent back: a hook of the "
                "model, or a backward pass written by hand, clamps, normalises or perturbs gradients. There are no "
                "derivatives then: leave that out while the curvature is computed."
            )


def _is_python(node: Any) -> bool:
    return isinstance(node, torch._C._FunctionBase)  # pyright: ignore[reportPrivateUsage]


def _nodes(outputs: Sequence[Tensor]) -> Any:
    return postorder([f.grad_fn for f in outputs])


def _meets_float16(outputs: Sequence[Tensor]) -> bool:
    """Whether something in the graph is in float16, as with autocast, whatever the outputs are in."""
    return any(met.dtype == torch.float16 for node, _ in _nodes(outputs) for met in node._input_metadata)
