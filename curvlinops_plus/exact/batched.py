"""Several columns at once: how many fit, their parts for each parameter, and vector-Jacobian products of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import whole
from curvlinops_plus.risk.process_state import quiet

# Columns are vectorised in pieces whose copies of intermediate results stay below this many bytes.
CHUNK_BYTES = 2**28

# On a CPU columns are sent back together only while results have fewer numbers: larger ones take as long as one after
# the other, or longer, and hold more.
CPU_NUMBERS = 2**17


def checked_chunk_size(chunk_size: int | None) -> int | None:
    """`chunk_size`, checked.

    Raises:
        ValueError: If it is neither None nor an integer of at least 1.
    """
    if chunk_size is None:
        return None
    found = whole(chunk_size)
    if found is None or found < 1:
        raise ValueError(
            f"chunk_size={chunk_size!r} must be an integer of at least 1, the number of columns computed together."
        )
    return found


def columns_at_once(chunk_size: int | None, numbers: int) -> int:
    """How many columns are computed together: `chunk_size`, or as many as keep `numbers` of each within 256 MiB."""
    return chunk_size or max(1, CHUNK_BYTES // (8 * numbers))


def columns_sent_back(chunk_size: int | None, numbers: int, largest: int, params: Sequence[Tensor]) -> int:
    """How many columns a backward pass takes at once, whose results are `largest` numbers or as large as parameters."""
    size = columns_at_once(chunk_size, numbers)
    if chunk_size is not None or params[0].device.type != "cpu":
        return size
    return min(size, max(1, CPU_NUMBERS // max(1, largest, *(p.numel() for p in params))))


def split_rows(rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:  # [K, n] -> [K, *shape] for each parameter
    """The parts of several vectors, in the parameters' own dtypes."""
    rows, K = rows.clone() if rows.is_inference() else rows, rows.shape[0]
    parts = rows.split([p.numel() for p in params], dim=1)
    return [part.reshape(K, *p.shape).to(p.dtype) for part, p in zip(parts, params, strict=True)]


def join_rows(
    parts: Sequence[Tensor | None], params: Sequence[Tensor], K: int, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:  # [K, *shape] for each parameter -> [K, n]
    """Several vectors from their parts, of which None is zero; added to `total` if there is one."""
    if total is not None:
        for own, part in zip(total.split([p.numel() for p in params], 1), parts, strict=True):
            if part is not None:
                own += part.reshape(K, -1)
        return total
    joined = [
        torch.zeros(K, p.numel(), dtype=dtype, device=p.device) if part is None else part.reshape(K, -1).to(dtype)
        for part, p in zip(parts, params, strict=True)
    ]
    return torch.cat(joined, 1)


def is_generic(v: Tensor, params: Sequence[Tensor]) -> bool:  # v [n]
    """Whether a vector can serve as a random one, to find out whether linear functions of it agree.

    It can if its entries are of one size in all parameters, if few are next to zero, and if they vary along each axis.

    Cost: a few passes over the vector.
    """
    mean, told = v.square().mean(), []
    for part, p in zip(v.split([p.numel() for p in params]), params, strict=True):
        part = part.view(p.shape)
        square = part.square()
        own = square.mean()
        told += [own > 0.01 * mean, (square > 0.01 * own).count_nonzero() > 0.5 * part.numel()]
        told += [part.mean(k).square().mean() < 0.99 * own for k, size in enumerate(p.shape) if size > 1]
    return bool(torch.stack(told).all())


def agree(
    v: Sequence[Tensor],
    JV: Sequence[Tensor],
    MJV: Sequence[Tensor],
    back: Sequence[Tensor | None],
    of: Sequence[Tensor],
) -> bool:
    """Whether `<M J v, J v> = <v, Jᵀ M J v>`, and rounding errors are too small to hide that it is not.

    Args:
        v: A vector like a random one, whole or in parts.
        JV: `J v`.
        MJV: `M J v`.
        back: `Jᵀ M J v`, in parts as `v`; None is zero.
        of: Tensors whose dtypes limit the digits.
    """
    eps, dtype = max(torch.finfo(t.dtype).eps for t in (*v, *of)), v[0].dtype
    V, U = (torch.cat([t.flatten().to(dtype) for t in ts]) for ts in (JV, MJV))
    inner = U.dot(V)
    pairs = [(own.flatten(), g.flatten().to(own.dtype)) for own, g in zip(v, back, strict=True) if g is not None]
    length, size = (torch.stack([t.norm().to(dtype) for t in ts]).norm() for ts in zip(*pairs, strict=True))
    enough = torch.maximum(1e-3 * U.norm() * V.norm(), 0.1 * size * length / sum(t.numel() for t in v) ** 0.5)
    away = (torch.stack([own.dot(g).to(dtype) for own, g in pairs]).sum() - inner).abs()
    return bool((inner.abs() > enough) & (away <= min(10 * eps**0.5, 0.1) * inner.abs()))


def vjp(
    outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Sequence[Tensor], last: bool = False
) -> list[Tensor | None]:
    """Vector-Jacobian products of several vectors `[K, *output]`, one tensor for each output.

    Args:
        outputs: The outputs.
        inputs: What they are differentiated by.
        vectors: The vectors.
        last: Whether a single vector may free what the graph saved, on the way; otherwise the graph is kept.

    Returns:
        Tensors `[K, *input]`; None for inputs that the outputs don't depend on.

    Cost: one backward pass, vectorised over K; a single vector takes the plain way, which is faster.
    """
    if len(vectors[0]) == 1:
        found = torch.autograd.grad(outputs, inputs, [v[0] for v in vectors], retain_graph=not last, allow_unused=True)
        return [None if g is None else g[None] for g in found]
    options = {"retain_graph": True, "allow_unused": True}
    try:
        with quiet():
            return list(torch.autograd.grad(outputs, inputs, vectors, is_grads_batched=True, **options))
    except RuntimeError:  # operations that can't be vectorised (group norm's second derivative); all else fails again
        rows = [vjp(outputs, inputs, [v[k : k + 1] for v in vectors]) for k in range(len(vectors[0]))]
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.cat([g for g in column if g is not None]) for column in columns]


def add_vjp(
    outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Sequence[Tensor], total: Tensor, last: bool = False
) -> Tensor:
    """`total + Jᵀ u` in place, [1, n], for vectors `[1, *output]` and leaves of the graph.

    Each part is added as soon as it is there, so those of all inputs are never held at once. As for `vjp` else.
    """
    if not outputs:
        return total
    if any(p.dtype != total.dtype for p in inputs):
        return join_rows(vjp(outputs, inputs, vectors, last), inputs, 1, total.dtype, total)
    try:
        for p, own in zip(inputs, total[0].split([p.numel() for p in inputs]), strict=True):
            p.grad = own.view(p.shape)  # which a backward pass adds to
        torch.autograd.backward(outputs, [v[0] for v in vectors], retain_graph=not last, inputs=inputs)
    finally:
        for p in inputs:
            p.grad = None
    return total
