"""The Kronecker product nearest to a sum."""

from __future__ import annotations

import torch

from curvlinops_plus.linalg import Kronecker
from curvlinops_plus.linalg.nearest import nearest_kronecker
from test.linalg.cases import block_diagonal, psd
from test.linalg.test_laws import close


def test_nearest_kronecker() -> None:
    """The best approximation of rank one to the rearranged sum; blocks that are no sums stay."""
    pairs = [(psd(3, 3, seed=k), psd(4, 4, seed=k + 9)) for k in range(3)]
    G, A = nearest_kronecker(pairs)
    rearranged = sum(torch.outer(H.flatten(), B.flatten()) for H, B in pairs)
    assert isinstance(rearranged, torch.Tensor)
    U, sigma, Vh = torch.linalg.svd(rearranged)
    close(torch.outer(G.flatten(), A.flatten()), sigma[0] * torch.outer(U[:, 0], Vh[0]))
    K, _ = block_diagonal()
    conv = K.blocks["conv"]
    assert isinstance(conv, Kronecker)
    near = (
        K + K._with({**K.blocks, "conv": Kronecker(2 * conv.G.to_dense(), 2 * conv.A.to_dense())})
    ).nearest_kronecker()
    assert isinstance(near.blocks["conv"], Kronecker)
    close(near.blocks["conv"].to_dense(), 5 * conv.to_dense())
