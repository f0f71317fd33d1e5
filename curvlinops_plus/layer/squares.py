"""Sums of squared per-example gradients in a Kronecker basis, and their inner products, without
holding them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlinops_plus.linalg.pieces import rows_at_once

# Products per example are formed in pieces of about this many bytes on a CPU, which stay in its
# cache.
_CHUNK_BYTES = 2**20


def rotate(
    J: Tensor, QG: Tensor | None, QA: Tensor | None
) -> Tensor:  # [..., *b, o, i] -> [..., *b, o, i]
    """`Q_Gᵀ J Q_A`; None is the identity."""
    J = multiplied(J, QA)
    if QG is None:
        return J
    return QG.mT @ J if QG.ndim == 2 else multiplied(J.mT, QG).mT


def multiplied(t: Tensor, Q: Tensor | None) -> Tensor:  # [..., *b, m, k] -> [..., *b, m, l]
    """`t Q` in the precision of `t`: of several matrices, one large product for each instead of one
    per example.
    """
    if Q is None:
        return t
    if Q.ndim > 2:
        return torch.einsum("...bmk,bkl->...bml", t, Q.to(t.dtype))
    Q = Q.to(t.dtype)
    if t.stride(-1) == 1 or t.ndim == 2:
        return (t.flatten(0, -2) @ Q).unflatten(0, t.shape[:-1])
    # A copy would take longer than the difference between one product and several.
    images = t.flatten(0, -3)
    return torch.bmm(images, Q.expand(len(images), *Q.shape)).unflatten(0, t.shape[:-2])


def squared_gradients(
    g: Tensor,
    a: Tensor,
    QG: Tensor | None = None,
    QA: Tensor | None = None,
    bias: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    """`Σ_n (Q_Gᵀ (Σ_s g_{n,s} a_{n,s}ᵀ) Q_A)²`, entry by entry.

    Args:
        g: Output gradients [N, S, *b, o].
        a: Inputs [N, S, *b, i].
        QG: Basis of the rows [*b, o, o], None for the identity.
        QA: Basis of the columns [*b, i, i], likewise.
        bias: Whether inputs have one more entry, which is one and not stored; bases count it.
        total: What it is added to, if it is not the first one; it is returned then.

    Returns:
        [*b, o, i], with one more column for a bias.

    Cost: products per example are formed in pieces, on a CPU of a megabyte. Each side is rotated
    before or after, whichever takes fewer operations. Without weight sharing (S = 1) nothing per
    example is formed at all.

    Example:
        >>> squared_gradients(torch.ones(1, 2, 1), torch.ones(1, 2, 3))
        tensor([[4., 4., 4.]])
    """
    S = g.shape[1]
    o = g.shape[-1]
    i = a.shape[-1] + bias
    batch = g.shape[2:-1]
    if batch:  # [N, b, S, .]
        g = g.movedim(2, 1)
        a = a.movedim(2, 1)
    # Rotating S inputs takes S·i² multiplications, rotating their product o·i².
    if o >= S:
        a = _rotated_inputs(a, QA, bias)
        QA = None
        bias = False
    if i >= S:
        g = multiplied(g, QG)
        QG = None
    if total is None:
        total = g.new_zeros(*batch, o, i)
    # (g aᵀ)² = g² (a²)ᵀ, so that the sum over examples is one product.
    if S == 1:
        return _add_unshared(total, g[..., 0, :].square(), a[..., 0, :].square())
    step = rows_at_once(g.device, _CHUNK_BYTES, total.numel() * g.element_size())
    chunk = g.new_empty(min(step, len(g)), *batch, o, i)
    for g_n, a_n in zip(g.split(step), a.split(step), strict=True):
        J = chunk[: len(g_n)]
        weight_columns = J[..., : a.shape[-1]].flatten(0, -3)
        torch.bmm(g_n.mT.flatten(0, -3), a_n.flatten(0, -3), out=weight_columns)
        if bias:  # one more column of J rather than one more entry for each of S inputs
            torch.sum(g_n, -2, out=J[..., -1])
        squared_examples(J, QG, QA, total)
    return total


def squared_examples(J: Tensor, QG: Tensor | None, QA: Tensor | None, total: Tensor) -> Tensor:
    """`total + Σ_n (Q_Gᵀ J_n Q_A)²` of a few gradients [N, *b, o, i], in place."""
    rotated = rotate(J, QG, QA)
    if len(J) == 1:
        return total.addcmul_(rotated[0], rotated[0])
    squares = rotated.square() if rotated is J else rotated.square_()
    return total.add_(squares.sum(0))


def row_products(g: Tensor, a: Tensor, C: Tensor) -> Tensor:
    """Inner products of each example's `g aᵀ` with matrices, [V, N, K].

    Args:
        g: Output gradients [V, N, o].
        a: Inputs [N, i].
        C: Matrices [K, o, i].

    Example:
        >>> row_products(torch.ones(1, 2, 3), torch.ones(2, 4), torch.ones(1, 3, 4))
        tensor([[[12.],
                 [12.]]])
    """
    if len(g) == 1 and g.shape[2] > a.shape[1]:
        return torch.einsum("kni,ni->nk", g[0] @ C, a)[None]
    return torch.einsum("vno,kno->vnk", g, a @ C.mT)


def _add_unshared(total: Tensor, g: Tensor, a: Tensor) -> Tensor:
    """`total + Σ_n g aᵀ` of `g [N, *b, o]` and `a [N, *b, i]`, in its place."""
    if g.ndim > 2 or total.dtype != g.dtype:
        return total.add_(torch.einsum("n...o,n...i->...oi", g, a))
    return total.addmm_(g.T, a)


def _rotated_inputs(a: Tensor, QA: Tensor | None, bias: bool) -> Tensor:
    """Inputs `[N, *b, S, i]` in a basis, `[N, *b, S, k]`.

    The basis has a row more for a bias, whose input is one and not stored.
    """
    if bias and QA is not None:
        i = a.shape[-1]
        return multiplied(a, QA[..., :i, :]).add_(QA[..., i:, :])
    if bias:
        a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
    return multiplied(a, QA)
