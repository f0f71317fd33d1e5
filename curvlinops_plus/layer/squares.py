"""Sums of squared per-example gradients in a Kronecker basis, without holding the gradients."""

from __future__ import annotations

from torch import Tensor

__all__ = ["rotate", "squared_gradients"]

# Products per example are formed in pieces of about this many bytes, which stay in a processor's cache.
_CHUNK_BYTES = 2**23


def rotate(J: Tensor, QG: Tensor | None, QA: Tensor | None) -> Tensor:  # [..., *b, o, i] -> [..., *b, o, i]
    """`Q_Gᵀ J Q_A`; None is the identity."""
    J = J if QG is None else QG.mT @ J
    return J if QA is None else J @ QA


def squared_gradients(g: Tensor, a: Tensor, QG: Tensor | None = None, QA: Tensor | None = None) -> Tensor:
    """`Σ_n (Q_Gᵀ (Σ_s g_{n,s} a_{n,s}ᵀ) Q_A)²`, entry by entry.

    Args:
        g: Output gradients [N, S, *b, o].
        a: Inputs [N, S, *b, i].
        QG: Basis of the rows [*b, o, o], None for the identity.
        QA: Basis of the columns [*b, i, i], None for the identity.

    Returns:
        [*b, o, i].

    Cost: products per example are formed in pieces of a few megabytes, and rotated before or after, whichever takes
    fewer operations. Without weight sharing (S = 1) nothing per example is formed at all.

    Example:
        >>> import torch
        >>> squared_gradients(torch.ones(1, 2, 1), torch.ones(1, 2, 3))
        tensor([[4., 4., 4.]])
    """
    (N, S), o, i = g.shape[:2], g.shape[-1], a.shape[-1]
    batch = g.shape[2:-1]
    if batch:  # [b, N, S, .]: matrices first, as products want them
        g, a = g.movedim(2, 0), a.movedim(2, 0)
        QG = None if QG is None else QG[:, None]
        QA = None if QA is None else QA[:, None]
    if S == 1:
        g = g if QG is None else g @ QG
        a = a if QA is None else a @ QA
        return g[..., 0, :].square().mT @ a[..., 0, :].square()
    rotate_first = S * (o * o + i * i) <= o * i * (o + i)
    if rotate_first:
        g = g if QG is None else g @ QG
        a = a if QA is None else a @ QA
    total = g.new_zeros(*batch, o, i)
    step = max(1, _CHUNK_BYTES // (batch.numel() * o * i * g.element_size()))
    for start in range(0, N, step):
        piece = slice(start, start + step)
        J = g[..., piece, :, :].mT @ a[..., piece, :, :]
        J = J if rotate_first else rotate(J, QG, QA)
        total += J.square_().sum(-3)
    return total
