"""Sums of squared per-example gradients in a Kronecker basis, and their inner products, without holding them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Basis", "multiplied", "rotate", "row_products", "squared_gradients"]

# An orthogonal matrix, or those on the diagonal of one.
Basis = Tensor | tuple[Tensor, ...]

# Products per example are formed in pieces of about this many bytes, which stay in a processor's cache.
_CHUNK_BYTES = 2**20


def rotate(J: Tensor, QG: Basis | None, QA: Basis | None) -> Tensor:  # [..., *b, o, i] -> [..., *b, o, i]
    """`Q_Gᵀ J Q_A`; None is the identity."""
    if QG is not None:
        J = QG.mT @ J if isinstance(QG, Tensor) and QG.ndim == 2 else multiplied(J.mT, QG).mT
    return multiplied(J, QA)


def multiplied(t: Tensor, Q: Basis | None) -> Tensor:  # [..., *b, m, k] -> [..., *b, m, l]
    """`t Q` in the precision of `t`: of several matrices, one large product for each instead of one per example."""
    if isinstance(Q, tuple):
        parts = t.split_with_sizes([part.shape[-2] for part in Q], -1)
        return torch.cat([multiplied(some, part) for some, part in zip(parts, Q, strict=True)], -1)
    if Q is None or Q.ndim == 2:
        return t if Q is None else t @ Q.to(t.dtype)
    return torch.einsum("...bmk,bkl->...bml", t, Q.to(t.dtype))


def squared_gradients(
    g: Tensor,
    a: Tensor,
    QG: Basis | None = None,
    QA: Basis | None = None,
    bias: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    """`Σ_n (Q_Gᵀ (Σ_s g_{n,s} a_{n,s}ᵀ) Q_A)²`, entry by entry.

    Args:
        g: Output gradients [N, S, *b, o].
        a: Inputs [N, S, *b, i].
        QG: Basis of the rows [*b, o, o], None for the identity; a tuple of the matrices on its diagonal.
        QA: Basis of the columns [*b, i, i], likewise.
        bias: Whether inputs have one more entry, which is one and not stored; bases count it.
        total: What it is added to, if it is not the first one; it is returned then.

    Returns:
        [*b, o, i], with one more column for a bias.

    Cost: products per example are formed in pieces of a megabyte, and rotated before or after, whichever takes
    fewer operations. Without weight sharing (S = 1) nothing per example is formed at all.

    Example:
        >>> squared_gradients(torch.ones(1, 2, 1), torch.ones(1, 2, 3))
        tensor([[4., 4., 4.]])
    """
    S, o, i = g.shape[1], g.shape[-1], a.shape[-1]
    batch = g.shape[2:-1]
    if batch:  # [N, b, S, .]
        g, a = g.movedim(2, 1), a.movedim(2, 1)
    if bias and (S == 1 or isinstance(QA, tuple)):
        a, bias = _with_ones(a), False
        i += 1
    if S == 1:
        return _unshared(_squares(g[..., 0, :], QG), _squares(a[..., 0, :], QA), total)
    rotate_first = S * (o * o + i * i) <= o * i * (o + i)
    if rotate_first:
        g = multiplied(g, QG)
        if bias and isinstance(QA, Tensor):
            a, bias = multiplied(a, QA[..., :i, :]).add_(QA[..., i:, :]), False
        elif QA is not None:
            a = multiplied(a, QA)
    total = g.new_zeros(*batch, o, a.shape[-1] + bias) if total is None else total
    step = max(1, _CHUNK_BYTES // (total.numel() * g.element_size()))
    for g_n, a_n in zip(g.split(step), a.split(step), strict=True):
        J = g_n.mT @ a_n
        if bias:  # one more column of J rather than one more entry for each of S inputs
            J = torch.cat([J, g_n.sum(-2)[..., None]], -1)
        J = J if rotate_first else rotate(J, QG, QA)
        total += J.square_().sum(0)
    return total


def row_products(g: Tensor, a: Tensor, C: Tensor, right: Tensor | None = None) -> Tensor:
    """Inner products of each example's `Σ_s g aᵀ` with matrices, [V, N, K].

    Args:
        g: Output gradients [V, N, S, o].
        a: Inputs [N, S, i].
        C: Matrices [K, o, i], for S = 1; with `right` their left factors [K, r, o].
        right: Right factors [K, r, i]: the matrices are `Cᵀ right`.

    Example:
        >>> g, a = torch.ones(1, 2, 1, 3), torch.ones(2, 1, 4)
        >>> row_products(g, a, torch.ones(1, 3, 4)), row_products(g, a, torch.ones(1, 1, 3), torch.ones(1, 1, 4))
        (tensor([[[12.],
                 [12.]]]), tensor([[[12.],
                 [12.]]]))
    """
    if right is not None:
        K, r, _ = right.shape
        left_rows, right_rows = g @ C.flatten(0, 1).T, a @ right.flatten(0, 1).T  # [V, N, S, K r], [N, S, K r]
        return (left_rows * right_rows).sum(2).unflatten(2, (K, r)).sum(3)
    g, a = g[:, :, 0], a[:, 0]
    if len(g) == 1 and g.shape[2] > a.shape[1]:
        return torch.einsum("kni,ni->nk", g[0] @ C, a)[None]
    return torch.einsum("vno,kno->vnk", g, a @ C.mT)


def _unshared(g: Tensor, a: Tensor, total: Tensor | None) -> Tensor:  # [N, *b, o], [N, *b, i] -> [*b, o, i]
    """`Σ_n g aᵀ`, added to `total`."""
    if total is None or g.ndim > 2 or total.dtype != g.dtype:
        found = torch.einsum("n...o,n...i->...oi", g, a)
        return found if total is None else total.add_(found)
    return total.addmm_(g.T, a)


def _squares(rows: Tensor, Q: Basis | None) -> Tensor:  # [N, *b, m] -> [N, *b, k]
    """The squares of rows in a basis."""
    return rows.square() if Q is None else multiplied(rows[..., None, :], Q)[..., 0, :].square_()


def _with_ones(a: Tensor) -> Tensor:
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
