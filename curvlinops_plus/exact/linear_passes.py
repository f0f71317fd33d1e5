"""Backward passes through code of the user, which are linear only if that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.convolution import is_own_node
from curvlinops_plus.risk.graph import postorder


def is_by_hand(outputs: Sequence[Tensor], hooked: bool) -> bool:
    """Whether something else than PyTorch's own functions, which are linear, takes part in backward passes.

    Args:
        outputs: Tensors, with a graph.
        hooked: Whether a hook was registered on a tensor on the way to them.

    Cost: a walk through the graph.
    """
    return hooked or any(_is_python(node) and not is_own_node(node) for node, _ in _nodes(outputs))


def refuse_nonlinear(send: Callable[[float, float], Sequence[Tensor]], outputs: Sequence[Tensor], eps: float) -> bool:
    """Refuse backward passes that leave something else of sums and multiples of vectors than the sum and multiple.

    Args:
        send: What `a v + b w` leaves in each parameter, with two random vectors `v` and `w`.
        outputs: Through whose graph it is sent.
        eps: Of the coarsest numbers among outputs and parameters.

    Returns:
        Whether anything has arrived: else nothing is known.

    Raises:
        UnsupportedError: If they do; with float16 on the way, if somewhat longer ones do.
    """
    expected = [p + q for p, q in zip(send(1, 0), send(0, 1), strict=True)]
    norms = torch.stack([p.norm() for p in expected])
    # Where the derivative is zero, as that of a bias in front of a norm, rounding leaves something.
    allowed, lengths = min(10 * eps**0.5, 0.1) * norms + 4 * eps**0.75 * norms.norm(), (1.0, 2.0**30, -(2.0**-30))
    if _meets_float16(outputs):  # which has no digits for shorter ones, and few for small numbers
        tiny = torch.finfo(torch.float16).tiny
        few = torch.stack([tiny * torch.ones_like(p).norm() for p in expected])
        allowed, lengths = 0.1 * norms + 0.02 * norms.norm() + few, (1.0, -(2.0**4))
    for c in lengths:  # powers of two change no digit
        away = torch.stack([(p / c - q).norm() for p, q in zip(send(c, c), expected, strict=True)])
        if bool((away.isfinite() & (away > allowed)).any()):  # in float16 it overflows
            raise UnsupportedError(
                "A backward pass through the model is not linear in the vector that is sent back: a hook of the "
                "model, or a backward pass written by hand, clamps, normalises or perturbs gradients. There are no "
                "derivatives then: leave that out while the curvature is computed."
            )
    return bool(norms.any())


def refuse_nonlinear_products(
    product: Callable[[Tensor], Tensor],
    sizes: Sequence[int],
    like: Tensor,
    loss: Tensor,
    hooked: bool,
    dtype: torch.dtype,
) -> None:
    """Refuse products with a Hessian that are not linear: hooks are called in the second backward pass, too.

    Args:
        product: Products [K, n] -> [K, n].
        sizes: Of the parts of a vector.
        like: A vector [n, *].
        loss: With its graph.
        hooked: As for `is_by_hand`.
        dtype: What limits the digits.

    Raises:
        UnsupportedError: As `refuse_nonlinear`.
    """
    if not is_by_hand([loss], hooked):
        return
    at = torch.arange(len(like), device=like.device)
    x, y = (f(at)[None].to(like.dtype) for f in (torch.cos, torch.sin))

    def send(a: float, b: float) -> Sequence[Tensor]:
        return product(a * x + b * y)[0].split(list(sizes))

    refuse_nonlinear(send, [loss], torch.finfo(dtype).eps)


def _is_python(node: Any) -> bool:
    return isinstance(node, torch._C._FunctionBase)  # pyright: ignore[reportPrivateUsage]


def _nodes(outputs: Sequence[Tensor]) -> Any:
    return postorder([f.grad_fn for f in outputs])


def _meets_float16(outputs: Sequence[Tensor]) -> bool:
    """Whether something in the graph is in float16, as with autocast, whatever the outputs are in."""
    return any(met.dtype == torch.float16 for node, _ in _nodes(outputs) for met in node._input_metadata)
